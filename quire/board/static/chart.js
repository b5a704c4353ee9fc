// Draws a picture of numbers as SVG, with a legend, a table of the same numbers and, where wanted, a reading
// line that the pointer or a slider moves.
//
//   plot: {title, x: axis, y: axis, marks: [{kind, name, x, y, group, tiles, faint}], square}

import { brief, html, short, svg } from "./element.js";
import { extent, linear, logarithmic } from "./scale.js";

const COLOURS = 6;
const ROWS = 60;
const CELLS = 600;

export class Chart {
  constructor(figure, { reading = false } = {}) {
    this.figure = figure;
    this.caption = figure.querySelector("figcaption") ?? figure.appendChild(html("figcaption"));
    this.canvas = html("div", { class: "canvas" });
    this.legend = html("ul", { class: "legend" });
    this.note = html("p", { class: "reading", hidden: true });
    this.slider = html("input", { type: "range", min: 0, max: 1, step: 1, class: "reader", hidden: true });
    this.reading = reading;
    this.place = null;
    this.rows = html("div", { class: "scroll" });
    this.details = html("details", {}, html("summary", {}, "Table"), this.rows);
    figure.append(this.canvas, this.legend, ...(reading ? [this.note, this.slider] : []), this.details);
    this.details.addEventListener("toggle", () => this.tabulate());
    this.slider.addEventListener("input", () => this.read(Number(this.slider.value)));
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    new ResizeObserver(() => {
      if (this.plot && this.canvas.clientWidth !== this.width) this.draw(this.plot);
    }).observe(this.canvas);
  }

  draw(plot) {
    this.plot = plot;
    this.width = this.canvas.clientWidth || 440;
    this.height = plot.square ? Math.min(this.width, 400) : Math.max(200, Math.min(300, Math.round(this.width * 0.6)));
    const lone = plot.marks.every((mark) => mark.kind === "tiles" && mark.tiles.length <= 2);
    if (lone) this.height = 90;
    this.caption.textContent = plot.title;
    const root = svg("svg", { viewBox: `0 0 ${this.width} ${this.height}`, role: "img" });
    root.setAttribute("aria-label", `${plot.title}. ${this.describe()}`);
    this.axes(root, plot);
    plot.marks.forEach((mark) => root.append(this.mark(mark, this.colour(mark))));
    this.line = svg("line", { class: "cursor", y1: this.box.top, y2: this.box.bottom, visibility: "hidden" });
    root.append(this.line);
    this.canvas.replaceChildren(root);
    this.showLegend();
    if (this.reading) this.showReading();
    this.tabulate();
  }

  describe() {
    const said = this.plot.marks.map((mark) => {
      if (mark.kind === "tiles") return `an image of ${mark.tiles.length} by ${mark.tiles[0]?.length ?? 0}`;
      const known = mark.y.filter((value) => value !== null);
      if (!known.length) return `${mark.name}: no values`;
      const [least, most] = extent(known);
      return `${mark.name}: ${known.length} values from ${short(least)} to ${short(most)}, last ${short(known.at(-1))}`;
    });
    return said.slice(0, 8).join("; ");
  }

  // Marks of one name are one thing, and have one colour.
  colour(mark) {
    const index = [...new Set(this.plot.marks.map(({ name }) => name))].indexOf(mark.name);
    return `c${index % COLOURS} d${Math.floor(index / COLOURS) % 4}`;
  }

  // -- axes ---------------------------------------------------------------------------------------

  axes(root, plot) {
    const named = plot.x.labels?.length > 0;
    const box = { left: 54, right: this.width - 18, top: 10, bottom: this.height - (plot.x.label ? 40 : 26) };
    const flat = plot.marks.every((mark) => mark.kind === "tiles");
    if (flat && !plot.y.label) box.left = 12;
    if (plot.square) {
      const side = Math.min(box.right - box.left, box.bottom - box.top);
      const room = Math.floor((box.right - box.left - side) / 2);
      box.left += room;
      box.right = box.left + side;
      box.top = box.bottom - side;
    }
    this.box = box;
    const drawn = plot.marks.filter((mark) => mark.kind !== "tiles");
    const across = this.range(plot.x, drawn.flatMap((mark) => mark.x), named || drawn.some((m) => m.kind === "bars"));
    const up = this.range(plot.y, drawn.flatMap((mark) => mark.y), false);
    const wide = Math.max(2, Math.floor((box.right - box.left) / 70));
    const high = Math.max(2, Math.floor((box.bottom - box.top) / 38));
    this.x = (plot.x.log ? logarithmic : linear)(across, box.left, box.right, wide);
    this.y = (plot.y.log ? logarithmic : linear)(up, box.bottom, box.top, high);
    const lines = svg("g", { class: "axes", "aria-hidden": "true" });
    if (!(flat && !plot.y.label)) {
      for (const tick of this.y.ticks) {
        const y = this.y.at(tick);
        lines.append(svg("line", { x1: box.left, x2: box.right, y1: y, y2: y }));
        lines.append(svg("text", { x: box.left - 6, y: y + 4, "text-anchor": "end" }, brief(tick)));
      }
    }
    const every = named ? Math.ceil((plot.x.labels.length * 76) / (box.right - box.left)) : 1;
    const ticks = named ? plot.x.labels.map((_, place) => place).filter((place) => place % every === 0) : this.x.ticks;
    for (const tick of ticks) {
      const x = this.x.at(tick);
      if (!named) lines.append(svg("line", { x1: x, x2: x, y1: box.top, y2: box.bottom, class: "faint" }));
      const text = named ? String(plot.x.labels[tick]) : brief(tick);
      const shown = text.length > 9 ? `${text.slice(0, 4)}…${text.slice(-4)}` : text;
      lines.append(svg("text", { x, y: box.bottom + 16, "text-anchor": "middle" }, shown));
    }
    lines.append(svg("text", { x: (box.left + box.right) / 2, y: this.height - 4, "text-anchor": "middle" }, plot.x.label));
    const middle = (box.top + box.bottom) / 2;
    const words = plot.y.label + (plot.y.log ? " (log scale)" : "");
    const edge = box.left - 43;
    const turn = { x: edge, y: middle, "text-anchor": "middle", transform: `rotate(-90 ${edge} ${middle})` };
    lines.append(svg("text", turn, words));
    root.append(lines);
  }

  range(axis, values, bars) {
    let found = extent(axis.log ? values.filter((value) => value > 0) : values) ?? (axis.log ? [0.1, 1] : [0, 1]);
    if (bars) found = [-0.6, Math.max(found[1], (axis.labels?.length ?? 1) - 1) + 0.6];
    else if (!axis.log && axis === this.plot.y) {
      const room = (found[1] - found[0]) * 0.04;
      found = [found[0] - room, found[1] + room];
    }
    return [axis.least ?? found[0], axis.most ?? found[1]];
  }

  // -- marks --------------------------------------------------------------------------------------

  mark(mark, colour) {
    const kinds = { line: "path", points: "dots", bars: "columns", tiles: "image" };
    return this[kinds[mark.kind]](mark, `${colour}${mark.faint ? " faint" : ""}`);
  }

  fits(x, y) {
    return x !== null && y !== null && (!this.plot.y.log || y > 0) && (!this.plot.x.log || x > 0);
  }

  path(mark, colour) {
    let words = "";
    let pen = false;
    mark.x.forEach((x, i) => {
      const y = mark.y[i];
      if (this.fits(x, y)) words += `${pen ? "L" : "M"}${this.x.at(x).toFixed(1)} ${this.y.at(y).toFixed(1)}`;
      pen = this.fits(x, y);
    });
    const alone = mark.x.filter((x, i) => this.fits(x, mark.y[i])).length === 1;
    return alone ? this.dots({ ...mark, group: [] }, colour) : svg("path", { d: words, class: `mark line ${colour}` });
  }

  dots(mark, colour) {
    const group = svg("g", { class: "mark points" });
    mark.x.forEach((x, i) => {
      if (!this.fits(x, mark.y[i])) return;
      const own = mark.group?.length ? mark.group[i] : null;
      const look = own === null || own === undefined ? colour : own < 0 ? "here" : `c${own % COLOURS}`;
      const [left, top] = [this.x.at(x), this.y.at(mark.y[i])];
      if (own >= COLOURS) group.append(svg("rect", { x: left - 2.6, y: top - 2.6, width: 5.2, height: 5.2, class: look }));
      else group.append(svg("circle", { cx: left, cy: top, r: own < 0 ? 6 : 3, class: look }));
    });
    return group;
  }

  columns(mark, colour) {
    const group = svg("g", { class: "mark bars" });
    const wide = Math.max(1, (this.x.at(1) - this.x.at(0)) * 0.7);
    const ground = this.y.at(Math.max(0, this.plot.y.least ?? 0));
    mark.x.forEach((x, i) => {
      if (mark.y[i] === null) return;
      const top = this.y.at(mark.y[i]);
      const box = { x: this.x.at(x) - wide / 2, y: Math.min(top, ground), width: wide, height: Math.abs(ground - top) };
      group.append(svg("rect", { ...box, class: colour }));
    });
    return group;
  }

  image(mark) {
    const group = svg("g", { class: "mark tiles", "shape-rendering": "crispEdges" });
    const { left, right, top, bottom } = this.box;
    const rows = mark.tiles.length;
    mark.tiles.forEach((row, i) => {
      row.forEach((value, j) => {
        const [x, y] = [left + ((right - left) * j) / row.length, top + ((bottom - top) * i) / rows];
        const grey = Math.round(255 * Math.min(1, Math.max(0, value ?? 0)));
        const size = { x, y, width: (right - left) / row.length + 0.3, height: (bottom - top) / rows + 0.3 };
        group.append(svg("rect", { ...size, fill: `rgb(${grey},${grey},${grey})` }));
      });
    });
    return group;
  }

  // -- words --------------------------------------------------------------------------------------

  showLegend() {
    const known = new Map(this.plot.marks.map((mark) => [mark.name, mark]));
    const named = [...known.values()].filter((mark) => mark.kind !== "tiles");
    this.legend.hidden = named.length < 2;
    this.legend.replaceChildren(
      ...named.map((mark) => {
        const look = `mark ${mark.kind === "line" ? "line" : "points"} ${this.colour(mark)}${mark.faint ? " faint" : ""}`;
        const shape =
          mark.kind === "line"
            ? svg("line", { x1: 1, x2: 23, y1: 6, y2: 6, class: look })
            : svg("circle", { cx: 12, cy: 6, r: 4, class: mark.group?.some((g) => g < 0) ? "here" : look });
        const swatch = svg("svg", { viewBox: "0 0 24 12", width: 24, height: 12, "aria-hidden": "true" }, shape);
        return html("li", {}, mark.group?.some((g) => g >= 0) ? null : swatch, mark.name);
      }),
    );
  }

  // All numbers on the x axis, in order.
  places() {
    const found = new Set(this.plot.marks.flatMap((mark) => mark.x));
    return [...found].sort((a, b) => a - b);
  }

  showReading() {
    this.steps = this.places();
    const last = this.steps.length - 1;
    const follow = this.place === null || this.place >= Number(this.slider.max);
    this.slider.max = Math.max(0, last);
    this.slider.hidden = this.note.hidden = last < 1;
    this.slider.setAttribute("aria-label", `Read ${this.plot.title} at a step`);
    if (last >= 0) this.read(follow ? last : Math.min(this.place, last), follow);
  }

  read(place, quiet = false) {
    this.place = place;
    this.slider.value = place;
    const step = this.steps[place];
    const found = this.plot.marks.map((mark) => {
      const index = nearest(mark.x, step);
      return index < 0 ? null : `${mark.name} ${short(mark.y[index])}`;
    });
    this.note.textContent = `${this.plot.x.label} ${short(step)}: ${found.filter(Boolean).join(", ")}`;
    this.slider.setAttribute("aria-valuetext", this.note.textContent);
    const x = this.x.at(step);
    this.line.setAttribute("x1", x);
    this.line.setAttribute("x2", x);
    this.line.setAttribute("visibility", quiet ? "hidden" : "visible");
  }

  point(event) {
    if (!this.reading || !this.steps?.length) return;
    const left = event.clientX - this.canvas.getBoundingClientRect().left;
    let best = 0;
    this.steps.forEach((step, place) => {
      if (Math.abs(this.x.at(step) - left) < Math.abs(this.x.at(this.steps[best]) - left)) best = place;
    });
    this.read(best);
  }

  tabulate() {
    if (!this.details.open || !this.plot) return;
    const marks = this.plot.marks.filter((mark) => mark.kind !== "tiles");
    const all = this.places();
    const every = Math.ceil(all.length / ROWS);
    const body = all
      .filter((_, place) => place % every === 0 || place === all.length - 1)
      .map((x) => [this.plot.x.labels?.[x] ?? short(x), ...marks.map((mark) => short(mark.y[mark.x.indexOf(x)]))]);
    let head = [this.plot.x.label || "place", ...marks.map((mark) => mark.name)];
    const tiles = this.plot.marks.find((mark) => mark.kind === "tiles");
    if (!marks.length && tiles && tiles.tiles.length * tiles.tiles[0].length <= CELLS) {
      head = ["row", ...tiles.tiles[0].map((_, j) => String(j + 1))];
      tiles.tiles.forEach((row, i) => body.push([String(i + 1), ...row.map(short)]));
    }
    const cell = (name, scope) => (text) => html(name, scope ? { scope, class: "n" } : { class: "n" }, String(text));
    const lines = body.map(([first, ...rest]) => html("tr", {}, cell("th", "row")(first), ...rest.map(cell("td"))));
    const caption = html("caption", { class: "hidden" }, this.plot.title);
    const table = html("table", {}, caption, html("thead", {}, html("tr", {}, ...head.map(cell("th", "col")))), html("tbody", {}, ...lines));
    this.rows.replaceChildren(lines.length ? table : html("p", {}, this.describe()));
  }
}

function nearest(values, wanted) {
  let best = -1;
  values.forEach((value, i) => {
    if (best < 0 || Math.abs(value - wanted) < Math.abs(values[best] - wanted)) best = i;
  });
  return best;
}

// The curves of one run, or of several over each other; drawn when they come into view, and again while a run
// trains.

import { Chart } from "./chart.js";
import { ask, html, repeat } from "./element.js";

const root = document.getElementById("charts");
const names = [...root.querySelectorAll("input[name=run]")].map((field) => field.value);
const grid = root.querySelector(".pictures");
const split = document.getElementById("split");
const TRAINER = ["lr", "gradient_norm"];
const charts = new Map();
const visible = new Set();

const watcher = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting && !visible.has(target)) load(target);
      if (isIntersecting) visible.add(target);
      else visible.delete(target);
    }
  },
  { rootMargin: "200px" },
);

function add(figure) {
  const log = html("input", { type: "checkbox" });
  const chart = new Chart(figure, { reading: true });
  chart.caption.after(html("label", { class: "log" }, log, " log scale"));
  log.addEventListener("change", () => {
    chart.chosen = log.checked;
    show(chart);
  });
  chart.log = log;
  charts.set(figure.dataset.measure, chart);
  watcher.observe(figure);
}

async function load(figure) {
  const chart = charts.get(figure.dataset.measure);
  const given = [...names.map((name) => ["run", name]), ["measure", figure.dataset.measure]];
  if (split) given.push(["split", split.value]);
  try {
    chart.found = await ask("/api/curves", given);
    show(chart);
  } catch (error) {
    chart.canvas.replaceChildren(html("p", { class: "notice bad" }, error.message));
  }
}

// Positive values over more than two decades can only be seen on a logarithmic scale.
function wide(lines) {
  const known = lines.flatMap((line) => line.y).filter((value) => value !== null);
  const [least, most] = known.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
  return known.length > 1 && least > 0 && most / least > 100;
}

function show(chart) {
  const { title, lines, measure, split: used } = chart.found;
  const log = chart.chosen ?? wide(lines);
  chart.log.checked = log;
  const marks = lines.map((line) => ({ kind: "line", ...line }));
  const y = { label: title.toLowerCase(), log, least: TRAINER.includes(measure) && !log ? 0 : null };
  chart.draw({ title: used ? `${title}, ${used}` : title, x: { label: "step" }, y, marks });
}

const KINDS = { training: "live", damaged: "bad", interrupted: "bad", unfinished: "quiet" };
let points = null;

async function refresh() {
  const { runs: found } = await ask("/api/moving", names.map((name) => ["run", name]));
  if (names.length === 1) {
    const [run] = found;
    const state = document.querySelector("#state .state");
    if (state.textContent !== run.state) {
      state.textContent = run.state;
      state.className = `state ${KINDS[run.state] ?? "done"}`;
    }
    const [value, measure] = document.getElementById("value").children;
    value.textContent = run.value;
    if (measure) measure.textContent = run.measure;
  }
  for (const measure of new Set(found.flatMap((run) => run.measures))) {
    if (charts.has(measure)) continue;
    const figure = html("figure", { class: "chart" }, html("figcaption", {}, measure));
    figure.dataset.measure = measure;
    grid.append(figure);
    grid.previousElementSibling.hidden = true;
    add(figure);
  }
  const now = found.map((run) => run.points).join(" ");
  if (points !== null && now !== points) for (const figure of visible) load(figure);
  points = now;
  return found.some((run) => run.state === "training") ? 1 : 5;
}

for (const figure of root.querySelectorAll("figure")) add(figure);
split?.addEventListener("change", () => visible.forEach(load));
repeat(refresh);

// The list of runs: filtered while one types, and kept as the runs are.

import { ask, html, repeat } from "./element.js";

const table = document.getElementById("runs");
const field = document.getElementById("words");
const count = document.getElementById("count");
const news = document.getElementById("news");
const rows = table ? [...table.tBodies[0].rows] : [];
const total = rows.length;

function filter() {
  const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const row of rows) {
    const text = `${row.dataset.run} ${row.cells[2].textContent} ${row.cells[3].textContent}`.toLowerCase();
    row.hidden = !words.every((word) => text.includes(word));
    if (!row.hidden) shown += 1;
  }
  count.textContent = shown === total ? `${total.toLocaleString("en")} runs` : `${shown.toLocaleString("en")} of ${total.toLocaleString("en")} runs`;
}

const KINDS = { training: "live", damaged: "bad", interrupted: "bad", unfinished: "quiet" };

function update(row, run) {
  const state = row.cells[3].querySelector(".state");
  if (state.textContent !== run.state) {
    state.textContent = run.state;
    state.className = `state ${KINDS[run.state] ?? "done"}`;
  }
  const [value, measure] = row.cells[4].children;
  value.textContent = run.value;
  if (measure) measure.textContent = run.measure;
  row.cells[5].textContent = run.step;
}

let version = "";

async function refresh() {
  const found = await ask("/api/runs", { version });
  if (found === null) return 2;
  const known = new Map(rows.map((row) => [row.dataset.run, row]));
  const fresh = found.runs.filter((run) => !known.has(run.name)).length;
  for (const run of found.runs) {
    const row = known.get(run.name);
    if (row) update(row, run);
  }
  if (fresh && !table) location.reload(); // the first run of all
  const filtered = new URLSearchParams(location.search).get("words");
  if (fresh && table && !filtered) {
    // What was marked or typed stays until the reader asks for the new ones.
    news.replaceChildren(html("a", { href: location.href }, fresh === 1 ? "1 new run" : `${fresh} new runs`));
  }
  version = found.version;
  return 2;
}

if (field && table) field.addEventListener("input", filter);
// Whoever marks a run will compare it: the board reads its curves meanwhile.
table?.addEventListener("change", ({ target }) => {
  if (target.name === "run" && target.checked) ask("/api/moving", { run: target.value }).catch(() => {});
});
repeat(refresh);

// Elements without markup: whatever text comes from a run stays text.

const SVG = "http://www.w3.org/2000/svg";

function dress(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

export const html = (name, attributes = {}, ...children) => dress(document.createElement(name), attributes, children);
export const svg = (name, attributes = {}, ...children) =>
  dress(document.createElementNS(SVG, name), attributes, children);

const UNITS = [
  [1e12, "T"],
  [1e9, "G"],
  [1e6, "M"],
  [1e3, "k"],
];

// Four digits, whole numbers in full.
export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  let text = Number.isInteger(value) ? value.toLocaleString("en") : String(+value.toPrecision(4));
  if (size !== 0 && (size >= 1e15 || size < 1e-4)) text = value.toExponential(2).replace("e+", "e");
  return text.replace("-", "−");
}

// As short as an axis needs it.
export function brief(value) {
  const size = Math.abs(value);
  const unit = size >= 1e4 && size < 1e15 ? UNITS.find(([least]) => size >= least) : null;
  return unit ? `${+(value / unit[0]).toPrecision(4)}${unit[1]}`.replace("-", "−") : short(value);
}

// An answer of the board; an error of its own words where there is one.
export async function ask(path, given, signal) {
  const response = await fetch(`${path}?${new URLSearchParams(given)}`, { signal });
  if (response.status === 204) return null;
  const found = await response.json().catch(() => ({ error: `the board answered ${response.status}` }));
  if (!response.ok) throw new Error([found.error, found.expected && `expected: ${found.expected}`, found.fix].filter(Boolean).join("; "));
  return found;
}

// Runs `work` now and then again, while the page is looked at; it says after how many seconds, 0 ends it.
export function repeat(work) {
  let timer = 0;
  const turn = async () => {
    clearTimeout(timer);
    if (document.hidden) return;
    let wait = 5;
    try {
      wait = await work();
    } catch {
      wait = 5; // the board may come back
    }
    if (wait > 0) timer = setTimeout(turn, wait * 1000);
  };
  document.addEventListener("visibilitychange", turn);
  return turn();
}

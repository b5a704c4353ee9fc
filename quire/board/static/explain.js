// Costs by layer as bars, from the numbers that the page came with.

import { Chart } from "./chart.js";

const layers = [...document.querySelectorAll("#layers li")].map((item) => item.dataset);
const labels = layers.map((layer) => layer.name);

for (const figure of document.querySelectorAll("figure[data-bars]")) {
  const { bars, unit } = figure.dataset;
  const y = layers.map((layer) => (layer[bars] === undefined ? null : Number(layer[bars])));
  const mark = { kind: "bars", name: unit, x: labels.map((_, place) => place), y };
  const title = figure.querySelector("figcaption").textContent;
  new Chart(figure).draw({ title, x: { label: "layer", labels }, y: { label: unit, least: 0 }, marks: [mark] });
}

// An instrument: its controls go to the board, and what comes back is drawn.

import { Chart } from "./chart.js";
import { ask, html } from "./element.js";

const form = document.getElementById("instrument");
const plots = document.getElementById("plots");
const said = document.getElementById("said");
const facts = document.getElementById("facts");
const charts = [];
let under = null;
let waiting = false;

async function move() {
  for (const slider of form.querySelectorAll("input[type=range]")) {
    form.querySelector(`output[for=${slider.id}]`).textContent = slider.value;
  }
  if (under) {
    waiting = true; // only the last place of a slider counts
    return;
  }
  under = ask("/api/instrument", { name: form.dataset.name, ...Object.fromEntries(new FormData(form)) });
  try {
    show(await under);
  } catch (error) {
    said.className = "notice bad";
    said.textContent = error.message;
  }
  plots.setAttribute("aria-busy", "false");
  under = null;
  if (waiting) {
    waiting = false;
    move();
  }
}

function show(answer) {
  answer.plots.forEach((plot, index) => {
    if (!charts[index]) {
      const figure = html("figure", { class: "chart" });
      plots.append(figure);
      charts[index] = new Chart(figure);
    }
    charts[index].draw(plot);
  });
  said.className = "";
  said.textContent = answer.said;
  facts.replaceChildren(...answer.facts.map(([name, text]) => html("div", {}, html("dt", {}, name), html("dd", {}, text))));
}

said.textContent = "Starting…";
form.addEventListener("input", move);
form.addEventListener("submit", (event) => event.preventDefault());
move();

// Proofs, run where they stand.

import { ask } from "./element.js";

async function prove(button) {
  const outcome = button.parentElement.querySelector(".outcome");
  button.disabled = true;
  outcome.className = "outcome soft";
  outcome.textContent = "running…";
  try {
    const found = await ask("/api/proof", { id: button.dataset.id });
    const refuted = found.refuted === null ? "" : `; the wrong form has error ${found.refuted}`;
    const detail = found.detail ? `; ${found.detail}` : "";
    outcome.className = `outcome ${found.passed ? "good" : "bad"}`;
    outcome.textContent =
      `${found.passed ? "✓ proven" : "✗ failed"}: error ${found.error}, tolerance ${found.tolerance}${refuted}${detail}` +
      ` (${found.seconds} s)`;
  } catch (error) {
    outcome.className = "outcome bad";
    outcome.textContent = error.message;
  } finally {
    button.disabled = false;
    button.focus({ preventScroll: true });
  }
}

const buttons = [...document.querySelectorAll("button.proof")];
for (const button of buttons) button.addEventListener("click", () => prove(button));
document.getElementById("all").addEventListener("click", async ({ target }) => {
  target.disabled = true;
  for (const button of buttons) await prove(button);
  target.disabled = false;
  target.focus({ preventScroll: true });
});

// The doctor's verdict on a run, when it is asked for.

import { ask, html } from "./element.js";

const button = document.getElementById("ask");
const verdict = document.getElementById("verdict");

button.addEventListener("click", async () => {
  button.disabled = true;
  verdict.replaceChildren(html("p", { class: "soft" }, "The doctor is looking…"));
  try {
    const found = await ask("/api/diagnosis", { run: button.dataset.run });
    const said = html("p", {}, html("span", { class: `verdict ${found.good ? "good" : "bad"}` }, found.sentence));
    const findings = found.findings.map((finding) =>
      html(
        "li",
        {},
        html("b", {}, `${finding.severity}: ${finding.what}`),
        ` (${finding.where}) ${finding.evidence}. `,
        html("span", { class: "soft" }, `What helps: ${finding.fix} [${finding.code}]`),
      ),
    );
    verdict.replaceChildren(said, html("ul", { class: "findings" }, ...findings));
  } catch (error) {
    verdict.replaceChildren(html("p", { class: "notice bad" }, error.message));
  } finally {
    button.disabled = false;
    button.focus({ preventScroll: true });
  }
});

// Finds formulas by their titles.

const field = document.getElementById("words");
const count = document.getElementById("count");
const chapters = [...document.querySelectorAll("section.chapter")];

field.addEventListener("input", () => {
  const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const chapter of chapters) {
    const name = chapter.querySelector("h2").textContent.toLowerCase();
    let own = 0;
    for (const entry of chapter.querySelectorAll("li")) {
      const text = `${name} ${entry.textContent.toLowerCase()}`;
      entry.hidden = !words.every((word) => text.includes(word));
      if (!entry.hidden) own += 1;
    }
    chapter.hidden = own === 0;
    shown += own;
  }
  count.textContent = `${shown} formulas`;
});

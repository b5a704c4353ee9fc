// On every page: what scrolls sideways can be reached with the keyboard.

function mark(region) {
  const scrolls = region.scrollWidth > region.clientWidth + 1;
  if (scrolls) {
    region.setAttribute("tabindex", "0");
    region.setAttribute("role", "group");
    const heading = region.closest("section, figure, main")?.querySelector("h1, h2, figcaption");
    region.setAttribute("aria-label", `${heading?.textContent ?? "Content"}, scrolls sideways`);
  } else {
    for (const name of ["tabindex", "role", "aria-label"]) region.removeAttribute(name);
  }
}

const watched = new ResizeObserver((entries) => entries.forEach((entry) => mark(entry.target)));
for (const region of document.querySelectorAll(".scroll, pre")) {
  watched.observe(region);
  region.closest("details")?.addEventListener("toggle", () => mark(region));
}

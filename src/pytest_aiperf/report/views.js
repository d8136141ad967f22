"use strict";
// Show the text of a mark, which a browser shows only to a mouse that rests on it, at once: on
// hover, on touch, and when the mark or its row has the keyboard's focus. Scroll two panes of code
// together.
(() => {
  for (const title of document.querySelectorAll(".aiperf svg title")) {
    const mark = title.parentElement;
    mark.dataset.tip = title.textContent;
    if (mark.matches("a, [role]")) mark.setAttribute("aria-label", title.textContent);
    title.remove(); // the browser would show it as well
  }
  const tip = document.createElement("div");
  tip.id = "aiperf-tip";
  tip.setAttribute("role", "tooltip");
  tip.hidden = true;
  (document.querySelector(".aiperf") ?? document.body).append(tip);
  let shown = null;
  let pointer; // where the mouse or the finger is
  let untapped = false; // whether the touch that is going on is the first one on its mark
  const markOf = (target) => target.closest?.("[data-tip]") ?? target.closest?.(".chart .tr")?.querySelector("[data-tip]") ?? null;
  const show = (mark, x) => {
    [shown, pointer] = [mark, x];
    tip.hidden = !mark;
    if (!mark) return;
    tip.textContent = mark.dataset.tip;
    const place = mark.getBoundingClientRect();
    const left = (x ?? place.left + place.width / 2) - tip.offsetWidth / 2;
    const above = place.top - tip.offsetHeight - 8;
    tip.style.left = Math.max(4, Math.min(left, document.documentElement.clientWidth - tip.offsetWidth - 4)) + "px";
    tip.style.top = (above > 4 ? above : place.bottom + 8) + "px";
  };
  document.addEventListener("pointermove", (event) => {
    if (event.pointerType !== "touch") show(markOf(event.target), event.clientX);
  });
  document.addEventListener("pointerdown", (event) => {
    const mark = markOf(event.target);
    untapped = event.pointerType === "touch" && mark !== shown;
    show(mark, event.clientX);
  });
  document.addEventListener("click", (event) => {
    if (untapped && event.target.closest("a[data-tip]")) event.preventDefault(); // the second tap follows it
  }, true);
  document.addEventListener("focusin", (event) => { if (event.target.matches(":focus-visible")) show(markOf(event.target)); });
  document.addEventListener("focusout", () => show(null));
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") show(null); });
  document.addEventListener("scroll", (event) => {
    if (event.target === document) return show(shown, pointer);
    if (!event.target.matches(".codes pre")) return;
    for (const pane of event.target.closest(".codes").querySelectorAll(":scope > div > pre")) {
      pane.scrollTop = event.target.scrollTop;
      pane.scrollLeft = event.target.scrollLeft;
    }
  }, true);
})();

"use strict";
(() => {
  const get = (id) => document.getElementById(id);
  const body = get("claims").tBodies[0];
  const rows = [...body.rows];
  const heads = [...get("claims").tHead.rows[0].cells];
  const collator = new Intl.Collator("en", { numeric: true });
  const value = (row, i) => row.cells[i].dataset.v ?? row.cells[i].textContent.trim();
  heads.forEach((head, i) => head.addEventListener("click", () => {
    const figures = rows.length > 0 && rows[0].cells[i].dataset.v !== undefined;
    const last = head.getAttribute("aria-sort");
    const up = last ? last === "descending" : !figures; // the first click puts the largest figures first
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const sorted = [...rows].sort((a, b) => {
      const [x, y] = [value(a, i), value(b, i)];
      return (figures ? x - y : collator.compare(x, y)) * (up ? 1 : -1);
    });
    body.append(...sorted);
  }));
  const choices = ["verdict", "chapter", "key"].filter((name) => get(name));
  const texts = new Map(rows.map((row) => [row, (row.textContent + " " + row.dataset.words).toLowerCase()]));
  const marked = [...document.querySelectorAll("[data-claim]")].filter((element) => !rows.includes(element));
  const parents = [...document.querySelectorAll("[data-parent]")];
  const filter = () => {
    const words = get("words").value.toLowerCase().split(/\s+/).filter(Boolean);
    const kept = new Set();
    for (const row of rows) {
      const shown = words.every((word) => texts.get(row).includes(word)) &&
        choices.every((name) => !get(name).value || row.dataset[name] === get(name).value);
      row.hidden = !shown;
      if (shown) kept.add(row.dataset.claim);
    }
    for (const element of marked) element.hidden = !kept.has(element.dataset.claim);
    for (const parent of parents) {
      const inner = parent.classList.contains("group") ? following(parent) : [...parent.querySelectorAll("[data-claim]")];
      parent.hidden = inner.every((element) => element.hidden);
    }
    get("count").textContent = kept.size + " of " + rows.length;
  };
  const following = (group) => {
    const members = [];
    for (let element = group.nextElementSibling; element && !element.classList.contains("group"); element = element.nextElementSibling) members.push(element);
    return members;
  };
  get("words").addEventListener("input", filter);
  choices.forEach((name) => get(name).addEventListener("change", filter));
  document.querySelector(".tools").hidden = false;
  filter();
})();

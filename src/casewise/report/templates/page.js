"use strict";
(() => {
  const root = document.documentElement;
  const byId = (id) => document.getElementById(id);

  // Theme: follow the system until the reader chooses.
  const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const theme = byId("theme");
  const named = () => { theme.textContent = dark() ? "Light" : "Dark"; };
  theme.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; named(); });
  named();

  // Tables: click a heading to sort, again to reverse. Cells without a value stay last.
  const key = (row, column) => row.children[column].dataset.sort;
  const order = (first, second) => {
    const a = Number(first), b = Number(second);
    return Number.isNaN(a) || Number.isNaN(b) ? first.localeCompare(second, undefined, { numeric: true }) : a - b;
  };
  const sort = (heading) => {
    const table = heading.closest("table"), body = table.tBodies[0], column = heading.cellIndex;
    const down = heading.getAttribute("aria-sort") === "ascending";
    table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    const rows = [...body.rows];
    rows.forEach((row) => row.classList.remove("rule"));
    rows.sort((a, b) => {
      const first = key(a, column), second = key(b, column);
      if (first === "" || second === "") return (first === "") - (second === "");
      return down ? order(second, first) : order(first, second);
    });
    body.append(...rows);
  };
  document.querySelectorAll("th button").forEach((button) => button.addEventListener("click", () => sort(button.closest("th"))));

  // Contents: mark where the reader is.
  const links = new Map([...document.querySelectorAll("nav .links a")].map((link) => [link.hash.slice(1), link]));
  const watcher = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (!entry.isIntersecting) return;
    links.forEach((link) => link.classList.remove("here"));
    links.get(entry.target.id)?.classList.add("here");
  }), { rootMargin: "-10% 0px -80% 0px" });
  document.querySelectorAll("section[id]").forEach((section) => watcher.observe(section));

  // Cases: filter, and open one.
  const table = byId("case-table");
  if (!table) return;
  const cases = JSON.parse(byId("case-facts").textContent);
  const body = table.tBodies[0];
  const bucket = byId("by-bucket"), group = byId("by-group"), worse = byId("only-worse"), search = byId("by-id");
  const keep = (row) =>
    (!bucket.value || row.dataset.bucket === bucket.value) &&
    (!group.value || row.dataset.group === group.value) &&
    (!worse.checked || row.dataset.worse === "1") &&
    (!search.value || row.dataset.case.toLowerCase().includes(search.value.toLowerCase()));
  const filter = () => {
    let shown = 0;
    for (const row of body.rows) { row.hidden = !keep(row); shown += !row.hidden; }
    byId("shown").textContent = `${shown} of ${body.rows.length} cases`;
  };
  [bucket, group, worse, search].forEach((control) => control.addEventListener("input", filter));
  filter();

  const dialog = byId("case-view");
  let current = null;
  const visible = () => [...body.rows].filter((row) => !row.hidden);
  const element = (name, text, className) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  };
  const panel = (source, caption) => {
    const figure = element("figure");
    if (source) { const image = element("img"); image.src = source; image.alt = caption; figure.append(image); }
    else figure.append(element("div", "no picture", "blank"));
    figure.append(element("figcaption", caption));
    return figure;
  };
  const show = (row) => {
    current = row;
    const facts = cases[row.dataset.case];
    const pictures = [...row.querySelectorAll(".panels img")].map((image) => image.src);
    byId("case-name").textContent = row.dataset.case;
    byId("case-panels").replaceChildren(...facts.panels.map((caption, at) => panel(pictures[at], caption)));
    byId("case-where").textContent = facts.where;
    byId("case-candidates").replaceChildren(...facts.candidates.map((one) => {
      const cell = element("div", undefined, one.chosen ? (facts.flagged ? "chosen flagged" : "chosen") : "");
      cell.setAttribute("role", "listitem");
      const mark = one.chosen && facts.flagged ? `${one.chosen}, flagged` : one.chosen;
      cell.append(element("b", one.name), element("span", one.agreement), element("span", one.change), element("i", mark));
      return cell;
    }));
    byId("case-candidates-note").hidden = !facts.candidates.length;
    byId("case-list").replaceChildren(...facts.facts.map(([name, value]) => {
      const line = element("div"); line.append(element("dt", name), element("dd", value)); return line;
    }));
    if (!dialog.open) dialog.showModal();
  };
  const move = (by) => {
    const rows = visible(), at = rows.indexOf(current) + by;
    if (rows[at]) show(rows[at]);
  };
  body.addEventListener("click", (event) => { const row = event.target.closest("tr"); if (row) show(row); });
  byId("case-close").addEventListener("click", () => dialog.close());
  byId("case-before").addEventListener("click", () => move(-1));
  byId("case-after").addEventListener("click", () => move(1));
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  dialog.addEventListener("keydown", (event) => {
    if (event.key === "ArrowLeft") move(-1);
    if (event.key === "ArrowRight") move(1);
  });
})();

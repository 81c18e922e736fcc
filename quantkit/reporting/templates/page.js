"use strict";
// Tooltips of the marks, sorting and filtering of tables, the theme. The page reads without it.

const root = document.documentElement;
const tip = document.getElementById("tip");
const spoken = document.getElementById("spoken");
const MARK = '[role="graphics-symbol"][aria-label]';

// Theme: the system's unless chosen; storage may be blocked for a file.
const stored = {
  get() { try { return localStorage.getItem("quantkit-theme"); } catch { return null; } },
  set(value) { try { localStorage.setItem("quantkit-theme", value); } catch { /* for this view alone */ } },
};
const THEMES = ["system", "light", "dark"];
const themeButton = document.getElementById("theme");
function setTheme(theme) {
  if (theme === "system") delete root.dataset.theme; else root.dataset.theme = theme;
  themeButton.textContent = `Theme: ${theme}`;
}
let theme = THEMES.includes(stored.get()) ? stored.get() : "system";
setTheme(theme);
themeButton.hidden = false;
themeButton.addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  setTheme(theme);
  stored.set(theme);
});

// Marks: hover, tap, or the arrow keys in a focused picture.
let shown = null;
function show(mark, { aloud = false } = {}) {
  hide();
  shown = mark;
  mark.classList.add("on");
  tip.textContent = mark.getAttribute("aria-label");
  tip.hidden = false;
  place();
  if (aloud) spoken.textContent = tip.textContent;
}
function place() {
  const at = shown.getBoundingClientRect(), box = tip.getBoundingClientRect();
  const left = Math.min(Math.max(4, at.left + at.width / 2 - box.width / 2), root.clientWidth - box.width - 4);
  const above = at.top - box.height - 8;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${above > 4 ? above : at.bottom + 8}px`;
}
function hide() {
  if (shown) shown.classList.remove("on");
  shown = null;
  tip.hidden = true;
}
document.addEventListener("pointerover", (event) => {
  const mark = event.target.closest?.(MARK);
  if (mark) show(mark); else if (event.pointerType === "mouse") hide();
});
document.addEventListener("pointerdown", (event) => {
  const mark = event.target.closest?.(MARK);
  if (mark) show(mark, { aloud: true }); else hide();
});
// A section that comes into view may still move what is on the screen: the tooltip goes along.
document.addEventListener("scroll", () => { if (shown) place(); }, { capture: true, passive: true });
for (const svg of document.querySelectorAll(".panel svg")) {
  const marks = [...svg.querySelectorAll(MARK)];
  if (!marks.length) continue;
  svg.tabIndex = 0;
  let index = -1;
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (step) index = (index + step + marks.length + (index < 0 && step < 0 ? 1 : 0)) % marks.length;
    else if (event.key === "Home") index = 0;
    else if (event.key === "End") index = marks.length - 1;
    else if (event.key === "Escape") { hide(); return; }
    else return;
    event.preventDefault();
    show(marks[index], { aloud: true });
  });
  svg.addEventListener("blur", hide);
}

// Tables: a click on a head sorts, another turns it round, a third restores the first order.
const SIZES = { B: 1, kB: 1e3, KB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12 };
const TIMES = { us: 1e-6, ms: 1e-3, s: 1, min: 60, h: 3600 };
function value(text) {
  const plain = text.replaceAll("\u2212", "-");
  if (/^[-+]?inf\b/.test(plain)) return plain.startsWith("-") ? -Infinity : Infinity;
  const times = /^(\d+) (h|min) (\d+) (min|s)$/.exec(plain);  // 2 h 05 min
  if (times) return times[1] * TIMES[times[2]] + times[3] * TIMES[times[4]];
  const found = /^([^0-9\-+.]*)([-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*([A-Za-z]*)/i.exec(plain);
  if (!found) return NaN;
  const number = Number(found[2].replaceAll(",", ""));
  if (found[1] === "x") return 100 * (number - 1);  // x12.3, among percents of change
  return number * (SIZES[found[3]] ?? TIMES[found[3]] ?? 1);
}
const collator = new Intl.Collator("en", { numeric: true });
function sortable(table) {
  const body = table.tBodies[0], rows = [...body.rows];
  if (rows.length < 2) return;
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const next = { ascending: "descending", descending: null }[head.getAttribute("aria-sort")];
      const order = next === undefined ? "ascending" : next;
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      if (order === null) { body.append(...rows); return; }
      head.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      const asNumbers = head.classList.contains("number");
      const keyed = rows.map((row) => {
        const text = row.cells[column].textContent.trim();
        const number = asNumbers ? value(text) : NaN;
        return { row, text, number, rank: Number.isNaN(number) ? (text && text !== "n/a" ? 1 : 2) : 0 };
      });
      keyed.sort((a, b) => {
        // Numbers, then words; what is missing comes last: in both orders.
        if (a.rank !== b.rank) return a.rank - b.rank;
        if (a.rank === 2) return 0;
        if (a.rank === 0) return sign * (a.number < b.number ? -1 : Number(a.number > b.number));
        return sign * collator.compare(a.text, b.text);
      });
      body.append(...keyed.map((entry) => entry.row));
    });
  });
  if (rows.length > 20) {
    const filter = document.createElement("input");
    filter.type = "search";
    filter.className = "filter";
    filter.placeholder = "Filter rows";
    filter.setAttribute("aria-label", "Filter the rows of the table below");
    filter.addEventListener("input", () => {
      const wanted = filter.value.toLowerCase();
      for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
      spoken.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
    });
    table.parentElement.before(filter);
  }
}
document.querySelectorAll("table").forEach(sortable);

// Contents: folded on a small screen; the section in view is marked.
const contents = document.querySelector("nav details");
if (!matchMedia("(min-width: 72rem)").matches) contents.open = false;
const links = new Map([...document.querySelectorAll("nav a")].map((a) => [a.hash.slice(1), a]));
const watcher = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (!isIntersecting) continue;
    for (const link of links.values()) link.removeAttribute("aria-current");
    links.get(target.id || target.querySelector("h2").id)?.setAttribute("aria-current", "true");
  }
}, { rootMargin: "0px 0px -75% 0px" });
document.querySelectorAll("main > section").forEach((section) => watcher.observe(section));

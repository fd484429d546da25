// The reviewer's page. Everything that came from files is set as text, never as markup.
import { Viewer } from "./viewer.js";

const element = (id) => document.getElementById(id);
const MARK = { "keep-m0": "0", "keep-adapted": "N", "both-wrong": "✗", flag: "⚑" };
const WORDS = { "keep-m0": "keep original", "keep-adapted": "keep new", "both-wrong": "both are wrong", flag: "flag" };
const ACTIONS = { rollback: "original mask", keep: "new mask", shrink: "new mask, partly back", gate: "pieces of a new mask" };
const KEYS = { k: "keep-m0", a: "keep-adapted", w: "both-wrong", f: "flag" };
const LAYERS = ["m0", "adapted", "deployed", "edits", "classes"];
const state = { cases: [], shown: [], current: null, detail: null, region: -1, busy: false };
const viewer = new Viewer(element("canvas"), { moved: showSlice, failed: (message) => say(message, true) });

function made(tag, options = {}, ...children) {
  const node = Object.assign(document.createElement(tag), options);
  node.append(...children);
  return node;
}

async function ask(address, options) {
  const answer = await fetch(address, options).catch(() => { throw new Error("the server of this page does not answer; start casewise review again and open the new address (earlier decisions are in the log)"); });
  const content = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(content.error), { review: content.review });
  return content;
}

function say(text, bad = false) {
  element("said").textContent = text;
  element("said").classList.toggle("bad", bad);
}

const percent = (value) => (value === null ? "—" : value > 0 && value < 0.001 ? "<0.1 %" : `${(100 * value).toFixed(1)} %`);
const decided = (row) => row.review !== null && row.review.current;

// ---- the list -------------------------------------------------------------------------------------------------

const ORDERS = {
  worst: (rows) => rows, // the server's order
  deployed: (rows) => [...rows.filter((row) => row.action !== null && row.action !== "rollback"), ...rows.filter((row) => row.action === null || row.action === "rollback")],
  name: (rows) => [...rows].sort((one, other) => (one.id < other.id ? -1 : 1)),
};

function list() {
  const open = element("open-only").checked;
  state.shown = ORDERS[element("order").value](state.cases).filter((row) => !open || !decided(row) || row === state.current);
  element("cases").replaceChildren(...state.shown.map(item));
  const done = state.cases.filter(decided).length;
  element("progress").textContent = `${done} of ${state.cases.length} cases decided`;
}

function item(row) {
  const decision = decided(row) ? row.review.decision : "";
  const what = [row.status === "done" ? ACTIONS[row.action] || row.action : row.status === "failed" ? "no output" : "original after a failure", row.group];
  const button = made("button", { type: "button" },
    made("span", { className: `mark ${decision}`, textContent: MARK[decision] || "·" }),
    made("span", { className: "id", textContent: row.id }),
    made("span", { className: "risk", textContent: (row.flagged ? "⚑ " : "") + (row.quality_low === null ? "" : `${state.metric} ≥ ${row.quality_low.toFixed(2)}`), title: row.quality_low === null ? "" : `estimated ${state.metric}, lower bound` }),
    made("span", { className: "what", textContent: what.filter(Boolean).join(" · ") }));
  button.dataset.case = row.id;
  button.setAttribute("aria-current", row === state.current);
  button.addEventListener("click", () => show(row));
  return made("li", {}, button);
}

function neighbor(step, open = false) {
  const at = state.shown.indexOf(state.current);
  for (let next = at + step; next >= 0 && next < state.shown.length; next += step) if (!open || !decided(state.shown[next])) return state.shown[next];
  return null;
}

// ---- one case -------------------------------------------------------------------------------------------------

function address(kind, axis, slice) {
  const query = new URLSearchParams({ axis, slice });
  if (kind === "image") { query.set("channel", element("channel").value || "0"); query.set("window", element("window").value); }
  else if (state.detail.state !== null) query.set("state", state.detail.state);
  return `${kind}/${encodeURIComponent(state.current.id)}?${query}`;
}

async function show(row, wanted = null) {
  const before = state.current;
  state.current = row;
  list();
  for (const button of element("cases").querySelectorAll("[aria-current=true]")) button.scrollIntoView({ block: "nearest" });
  if (before !== row) { element("note").value = ""; say(""); }
  showDecision();
  let detail;
  try {
    detail = await ask(`case/${encodeURIComponent(row.id)}${wanted === null ? "" : `?${new URLSearchParams({ state: wanted })}`}`);
  } catch (error) {
    say(error.message, true);
    detail = { ...row, shape: null, overlay: false, error: error.message };
  }
  if (state.current !== row) return; // another case was opened meanwhile
  state.detail = detail;
  if (detail.review !== undefined && (detail.review || {}).hash !== (row.review || {}).hash) { // somebody decided it meanwhile
    row.review = detail.review;
    list();
    showDecision();
  }
  state.region = -1;
  history.replaceState(null, "", `#${encodeURIComponent(row.id)}`);
  showFacts();
  showRegions();
  showControls();
  if (detail.shape) await viewer.open(detail, address);
  else { viewer.case = null; viewer.frame = null; viewer.paint(); }
  element("canvas").dataset.case = row.id;
}

function showFacts() {
  const { detail } = state;
  element("name").textContent = detail.id;
  const tags = [[detail.group, ""], [detail.status === "done" ? null : detail.status, detail.status], [ACTIONS[detail.action] || detail.action, ""]].filter(([text]) => text);
  element("tags").replaceChildren(...tags.map(([text, kind]) => made("span", { className: `tag ${kind}`, textContent: text })));
  element("quality").textContent = detail.quality === null ? "" : `Estimated ${state.metric} about ${detail.quality.toFixed(2)}${detail.quality_low === null ? "" : `, at least ${detail.quality_low.toFixed(2)}`}.`;
  const named = (text) => text.replace(/of label (\d+)/g, (found, value) => (state.classes.has(Number(value)) ? `of ${state.classes.get(Number(value))}` : found));
  element("reason").textContent = named(detail.reason);
  element("edit-said").textContent = "";
  element("edit-commands").replaceChildren();
  element("edit").disabled = !detail.has_masks;
  const warnings = [detail.error, ...(detail.warnings || [])].filter((text) => text && !(detail.reason && text.includes(detail.reason)));
  element("warnings").replaceChildren(...warnings.map((text) => made("li", { textContent: named(text) })));
  element("overlay").hidden = !detail.overlay || Object.keys(detail.states).length > 0;
  if (!element("overlay").hidden) element("overlay").src = `overlay/${encodeURIComponent(detail.id)}`;
  element("region-title").hidden = detail.shape === null;
  element("nothing").hidden = detail.shape !== null;
  element("nothing").textContent = detail.shape ? "" : `This case has no mask. ${detail.error}`;
  element("image-note").textContent = detail.shape && detail.image_problem ? detail.image_problem : "";
}

function showControls() {
  const { detail } = state;
  const there = { m0: detail.shape !== null, adapted: detail.state != null, deployed: detail.shape !== null, edits: detail.shape !== null, classes: detail.shape !== null };
  for (const box of document.querySelectorAll("[data-layer]")) {
    box.checked = viewer.layers[box.dataset.layer];
    box.disabled = !there[box.dataset.layer];
    box.parentElement.classList.toggle("off", box.disabled);
  }
  const volume = detail.shape !== null && detail.shape.length === 3;
  options("state", Object.keys(detail.states), detail.state, detail.states);
  options("channel", [...Array(detail.channels || 0).keys()].map(String), "0");
  document.querySelector(".state").hidden = Object.keys(detail.states).length < 2;
  document.querySelector(".channel").hidden = (detail.channels || 0) < 2;
  document.querySelector(".window").hidden = !volume || detail.image_problem !== null;
  document.querySelector(".plane").hidden = !volume;
  element("plane").value = "0";
  element("scroll").hidden = !volume;
  document.querySelector("[data-decision=keep-m0]").disabled = !detail.has_masks;
  document.querySelector("[data-decision=keep-adapted]").disabled = detail.state == null;
}

function options(id, values, chosen, names = {}) {
  element(id).replaceChildren(...values.map((value) => made("option", { value, textContent: names[value] || value, selected: value === chosen })));
}

function showSlice() {
  const slices = viewer.slices;
  Object.assign(element("slice"), { max: slices - 1, value: viewer.slice });
  element("slice-number").textContent = viewer.isVolume ? `${viewer.slice + 1} of ${slices}` : "";
  if (!viewer.isVolume) return;
  const strip = element("strip"), context = strip.getContext("2d"), changes = state.detail.changes[viewer.axis];
  Object.assign(strip, { width: slices, height: 1 });
  const most = Math.max(1, ...changes), harm = getComputedStyle(document.body).getPropertyValue("--harm");
  changes.forEach((count, at) => {
    context.globalAlpha = count ? 0.15 + 0.85 * (count / most) : 0.06;
    context.fillStyle = harm;
    context.fillRect(at, 0, 1, 1);
  });
}

// ---- regions --------------------------------------------------------------------------------------------------

function showRegions() {
  const { detail } = state, regions = detail.regions || [];
  const note = detail.state == null
    ? (detail.shape ? "The new mask was not saved: predict with --set save-candidates=true to compare it with the original." : "")
    : detail.total === 0 && detail.crumbs ? `Only places too small to list changed, ${detail.area} ${detail.area === 1 ? "voxel" : "voxels"} in all.`
    : `The original and the new mask differ in ${detail.area} voxels, in ${detail.total} ${detail.total === 1 ? "place" : "places"}${detail.crumbs ? `; ${detail.crumbs} voxels lie in places too small to list` : ""}.${detail.action === "rollback" ? " The new mask was not written." : ""}`
      + (regions.length < detail.total ? ` The first ${regions.length} are listed.` : "");
  element("region-note").textContent = note;
  element("region-box").hidden = regions.length === 0;
  element("regions").tBodies[0].replaceChildren(...regions.map(regionRow));
}

function regionRow(region, at) {
  const kind = !viewer.background ? "relabeled" : ["added", "removed", "relabeled"].reduce((best, name) => (region[name] > region[best] ? name : best));
  const mixed = viewer.background && region[kind] < region.voxels ? "mostly " : "";
  const row = made("tr", { tabIndex: 0, title: "show it" },
    made("td", {}, made("span", { className: `chip ${kind}` }), `${mixed}${kind}`),
    made("td", { textContent: region.voxels }),
    made("td", { textContent: region.deployed === 1 ? "yes" : region.deployed === 0 ? "no" : percent(region.deployed) }));
  row.dataset.region = region.number;
  row.addEventListener("click", () => jump(at));
  row.addEventListener("keydown", (event) => { if (event.key === "Enter") jump(at); });
  return row;
}

async function handOver() { // copies of image and masks for an editor
  try {
    const found = await ask(`edit/${encodeURIComponent(state.current.id)}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: "{}" });
    element("edit-said").textContent = `Copied to ${found.folder}. Open it with one of these commands, and save the corrected mask under another name; casewise does not read it back:`;
    element("edit-commands").replaceChildren(...found.commands.map((line) => made("li", {}, made("code", { textContent: line }))));
  } catch (error) {
    element("edit-said").textContent = error.message;
  }
}

function jump(at) {
  state.region = at;
  [...element("regions").tBodies[0].rows].forEach((row, place) => {
    row.setAttribute("aria-selected", place === at);
    if (place === at) row.scrollIntoView({ block: "nearest" });
  });
  viewer.jump(state.detail.regions[at]);
}

// ---- decisions ------------------------------------------------------------------------------------------------

function showDecision() {
  const { review } = state.current;
  const now = review !== null && review.current ? review.decision : null;
  for (const button of document.querySelectorAll("[data-decision]")) button.setAttribute("aria-pressed", button.dataset.decision === now);
  if (review === null || element("said").classList.contains("bad")) return;
  const words = `${WORDS[review.decision]} · ${review.reviewer} · ${review.time.replace("T", " ").replace("+00:00", " UTC")}${review.note ? ` · ${review.note}` : ""}`;
  say(review.current ? words : `about an earlier output: ${words}`);
}

async function decide(decision) {
  const row = state.current, reviewer = element("reviewer").value.trim();
  if (row === null || state.detail === null || state.detail.id !== row.id || state.busy) return;
  if (document.querySelector(`[data-decision=${decision}]`).disabled) {
    say("this mask was not saved; flag the case instead", true);
    return;
  }
  if (!reviewer) {
    document.querySelector(".who").classList.add("needed");
    element("reviewer").focus();
    say("enter your name first; it is stored in the log", true);
    return;
  }
  state.busy = true;
  try {
    const body = JSON.stringify({ case: row.id, decision, reviewer, about: row.about, adapted: state.detail.state ?? null, note: element("note").value.trim(), seen: row.review === null ? "" : row.review.hash });
    row.review = await ask("decide", { method: "POST", headers: { "Content-Type": "application/json" }, body });
    say("");
    element("note").value = "";
    showDecision();
    list();
    const next = element("go-on").checked ? neighbor(1, true) : null;
    if (next) await show(next);
  } catch (error) {
    say(error.message, true);
    if (error.review) { row.review = error.review; list(); showDecision(); }
  } finally {
    state.busy = false;
  }
}

// ---- keys and controls ----------------------------------------------------------------------------------------

function toggle(name) {
  const box = document.querySelector(`[data-layer=${name}]`);
  if (box.disabled) return;
  viewer.layers[name] = !viewer.layers[name];
  box.checked = viewer.layers[name];
  viewer.paint();
}

function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || state.current === null) return;
  if (event.target.matches("input[type=text], select, textarea")) { if (event.key === "Escape" || event.key === "Enter") event.target.blur(); return; }
  const key = event.key.toLowerCase(), regions = (state.detail && state.detail.regions) || [];
  const go = (row) => row && show(row);
  const does = {
    arrowdown: () => viewer.go(viewer.slice + 1), arrowright: () => viewer.go(viewer.slice + 1),
    arrowup: () => viewer.go(viewer.slice - 1), arrowleft: () => viewer.go(viewer.slice - 1),
    j: () => go(neighbor(1)), n: () => go(neighbor(1)), p: () => go(neighbor(-1)),
    r: () => regions.length && jump((state.region + 1) % regions.length),
    "+": () => viewer.enlarge(1.4), "=": () => viewer.enlarge(1.4), "-": () => viewer.enlarge(1 / 1.4),
    0: () => { viewer.reset(); viewer.paint(); },
  }[key];
  if (KEYS[key]) { if (!event.repeat) decide(KEYS[key]); }
  else if ("12345".includes(key)) toggle(LAYERS[Number(key) - 1]);
  else if (does) does();
  else return;
  event.preventDefault();
}

function theme() {
  const dark = getComputedStyle(document.documentElement).colorScheme === "dark";
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  sessionStorage.setItem("theme", document.documentElement.dataset.theme);
  if (viewer.case) showSlice();
}

function wire() {
  document.addEventListener("keydown", pressed);
  for (const box of document.querySelectorAll("[data-layer]")) box.addEventListener("change", () => toggle(box.dataset.layer));
  for (const button of document.querySelectorAll("[data-decision]")) button.addEventListener("click", () => decide(button.dataset.decision));
  element("slice").addEventListener("input", () => viewer.go(Number(element("slice").value)));
  element("opacity").addEventListener("input", () => { viewer.opacity = element("opacity").value / 100; viewer.paint(); });
  element("state").addEventListener("change", () => show(state.current, element("state").value));
  element("plane").addEventListener("change", () => viewer.turn(Number(element("plane").value)));
  for (const id of ["window", "channel"]) element(id).addEventListener("change", () => viewer.forgetImages());
  for (const id of ["order", "open-only"]) element(id).addEventListener("change", list);
  element("theme").addEventListener("click", theme);
  element("edit").addEventListener("click", handOver);
  element("reviewer").addEventListener("input", () => {
    sessionStorage.setItem("reviewer", element("reviewer").value);
    document.querySelector(".who").classList.remove("needed");
  });
}

async function begin() {
  if (sessionStorage.getItem("theme")) document.documentElement.dataset.theme = sessionStorage.getItem("theme");
  wire();
  const found = await ask("cases");
  state.cases = found.cases;
  state.metric = found.metric;
  viewer.background = found.background;
  state.classes = new Map(found.classes.map((one) => [one.value, one.name]));
  viewer.colors = new Map(found.classes.map((one) => [one.value, one.color]));
  element("legend").replaceChildren(...found.classes.map((one) => {
    const chip = made("i", {});
    chip.style.background = `rgb(${one.color.join(",")})`;
    return made("li", {}, chip, one.name);
  }));
  for (const name of ["plus", "minus"]) document.querySelector(`#layers i.${name}`).hidden = !found.background;
  element("folder").textContent = found.folder;
  document.title = `Review of ${found.folder}`;
  element("reviewer").value = sessionStorage.getItem("reviewer") || found.reviewer;
  element("trouble").hidden = found.problems.length === 0;
  element("trouble").textContent = found.problems.join("; ");
  const wanted = decodeURIComponent(location.hash.slice(1));
  list();
  await show(state.cases.find((row) => row.id === wanted) || state.cases.find((row) => !decided(row)) || state.cases[0]);
}

begin().catch((error) => say(error.message, true));

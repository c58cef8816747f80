// Elements, figures, and requests to this server. The key is a variable of this page and nowhere else.

const root = document.documentElement;
const mode = root.dataset.mode;
const byId = id => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const POLL_MS = 2000, PULSE_MS = 1000;
// Below it are the server's routes, where another program has mounted them.
const base = location.pathname.replace(/\/$/, "");

let apiKey = "";
let poolModel = ""; // of a pool: the model that requests name

// An element with attributes and children; `null` attributes and children are left out. Text is always text.
function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter(child => child !== null && child !== undefined));
  return element;
}

// Replace an element's children where something has changed: a reader's place and selection survive where not.
function show(element, ...children) {
  const made = children.flat().filter(child => child !== null && child !== undefined);
  const next = document.createDocumentFragment();
  next.append(...made);
  if (same(element, next)) return;
  const focused = element.contains(document.activeElement) ? document.activeElement.dataset.name : undefined;
  element.replaceChildren(next);
  if (focused) element.querySelector(`[data-name="${CSS.escape(focused)}"]`)?.focus();
}

function same(element, fragment) {
  if (element.childNodes.length !== fragment.childNodes.length) return false;
  return [...element.childNodes].every((node, index) => node.isEqualNode(fragment.childNodes[index]));
}

const seconds = s => s === null || s === undefined || !Number.isFinite(s) ? "–"
  : s < 0.0995 ? `${Math.round(s * 1e3)} ms`
  : s < 99.95 ? `${s.toFixed(2)} s`
  : `${Math.floor(s / 60)} min ${Math.round(s % 60)} s`;

function bytes(count) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (count < 999.5) return `${count.toFixed(unit === "GB" ? 2 : unit === "MB" && count < 9.95 ? 1 : 0)} ${unit}`;
    count /= 1000;
  }
  return `${count.toFixed(2)} TB`;
}

const percent = (share, digits = 0) => share === null || share === undefined ? "–" : `${(100 * share).toFixed(digits)} %`;
const whole = count => Math.round(count).toLocaleString("en");

// A definition list's entries, one card each.
const cards = entries => entries.filter(Boolean).map(([name, figure, title]) =>
  el("div", { title: title ?? null }, el("dt", {}, name), el("dd", {}, figure)));

const heading = (text, ...more) => el("div", { class: "hero" }, el("h1", {}, text), ...more);

// A bar of shares, side by side, which sum up to `total`. `label` says it all to who cannot see it.
function stack(parts, total, label) {
  const bar = svg("svg", { class: "stack", viewBox: "0 0 1000 24", preserveAspectRatio: "none", role: "img", "aria-label": label });
  let x = 0;
  for (const { kind, amount } of parts) {
    const width = total ? 1000 * amount / total : 0;
    if (width > 0) bar.append(svg("rect", { class: kind, x: x.toFixed(2), y: 0, width: width.toFixed(2), height: 24 }));
    x += width;
  }
  return bar;
}

const key = (kind, ...content) => el("li", {}, el("i", { class: kind, "aria-hidden": "true" }), ...content);

class AnswerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function headersFor(more = {}) {
  const headers = { ...more };
  if (apiKey) headers.Authorization = `Bearer ${apiKey}`;
  if (poolModel) headers["x-teneral-model"] = poolModel;
  return headers;
}

// The answer of this server. Throws AnswerError with the server's own words.
async function ask(path, options = {}) {
  const response = await fetch(base + path, { ...options, headers: headersFor(options.headers), cache: "no-store", credentials: "omit" });
  if (response.ok) return response;
  let message = `${response.status} ${response.statusText}`;
  try {
    const told = await response.json();
    message = told?.error?.message ?? told?.message ?? message;
  } catch { /* not JSON: the status says it */ }
  if (response.status === 401) askForKey(message);
  throw new AnswerError(response.status, message);
}

const getJson = async (path, options) => (await ask(path, options)).json();

// The data of each server-sent event of a response, until it ends.
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const data = block.split("\n").filter(line => line.startsWith("data: ")).map(line => line.slice(6)).join("\n");
        if (data) yield data;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// The metrics of this server: name → list of [labels, value].
async function readMetrics() {
  const families = new Map();
  for (const line of (await (await ask("/metrics")).text()).split("\n")) {
    const found = /^([a-zA-Z_:][\w:]*)(?:{(.*)})? (\S+)/.exec(line);
    if (!found || line.startsWith("#")) continue;
    const labels = {};
    for (const [, name, value] of (found[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) labels[name] = value;
    if (!families.has(found[1])) families.set(found[1], []);
    families.get(found[1]).push([labels, Number(found[3].replace("Inf", "Infinity"))]);
  }
  const total = (name, wanted = {}) => {
    const rows = families.get(name);
    if (!rows) return undefined;
    return rows.filter(([labels]) => Object.entries(wanted).every(([label, value]) => labels[label] === value))
      .reduce((sum, [, value]) => sum + value, 0);
  };
  const names = function* (prefix) {
    for (const [name, rows] of families) if (name.startsWith(prefix)) for (const [labels, value] of rows) yield [name, labels, value];
  };
  return { at: performance.now() / 1000, rows: name => families.get(name) ?? [], names, total };
}

let keyWanted = null;

// Show the form for the key; resolves when one was given.
function askForKey(message = "") {
  byId("key-error").textContent = apiKey ? message : "";
  apiKey = "";
  byId("key-form").hidden = false;
  for (const panel of document.querySelectorAll("[role=tabpanel]")) panel.hidden = true;
  byId("key").focus();
  keyWanted ??= {};
  keyWanted.promise ??= new Promise(resolve => { keyWanted.resolve = resolve; });
  return keyWanted.promise;
}

byId("key-form").addEventListener("submit", event => {
  event.preventDefault();
  apiKey = byId("key").value.trim();
  byId("key").value = "";
  byId("key-form").hidden = true;
  keyWanted?.resolve();
  keyWanted = null;
  showPanel();
});

// The load: requests, tokens and refusals, by the metrics of two moments.

const load = { before: null, rates: [] };
const MAX_RATES = 90, MAX_NAMES = 50;

async function readLoad() {
  const metrics = await readMetrics();
  if (mode === "pool") await readPool(metrics);
  const panel = mode === "pool" ? byId("pool-load") : byId("panel-load");
  const adapters = mode === "server" ? await readAdapters(metrics) : null;
  const before = load.before;
  load.before = metrics;
  const since = (name, wanted) => {
    const now = metrics.total(name, wanted), then = before?.total(name, wanted);
    return now === undefined || then === undefined || now < then ? null : (now - then) / Math.max(0.1, metrics.at - before.at);
  };
  const tokens = since("teneral_generated_tokens_total"), requests = since("teneral_requests_total");
  if (mode === "server" && tokens !== null) load.rates = [...load.rates, tokens].slice(-MAX_RATES);
  const refused = status => metrics.total("teneral_requests_total", { status });
  const gauge = name => metrics.total(name);
  const running = gauge("teneral_engine_running") ?? gauge("teneral_embedder_running");
  show(panel,
    mode === "pool" ? el("h2", {}, "Requests") : heading(running === undefined ? "No engine yet" : [el("em", {}, whole(running)), running === 1 ? " sequence runs" : " sequences run"]),
    el("dl", { class: "figures" }, cards([
      gauge("teneral_engine_queued") !== undefined && ["waiting", whole(gauge("teneral_engine_queued") + (gauge("teneral_http_waiting_sequences") ?? 0))],
      gauge("teneral_pool_waiting") !== undefined && ["waiting for an instance", whole(gauge("teneral_pool_waiting"))],
      tokens !== null && ["tokens a second", tokens.toFixed(1)],
      requests !== null && ["requests a second", requests.toFixed(1)],
      gauge("teneral_generated_tokens_total") !== undefined && ["tokens generated", whole(gauge("teneral_generated_tokens_total"))],
      gauge("teneral_http_connections") !== undefined && ["connections", whole(gauge("teneral_http_connections"))],
      ["refused, 429", whole(refused("429") ?? 0)], ["refused, 503", whole(refused("503") ?? 0)],
      ["cold requests", whole(gauge("teneral_cold_requests_total") ?? 0)],
      gauge("process_resident_memory_bytes") && ["memory of the process", bytes(gauge("process_resident_memory_bytes"))],
    ])),
    mode === "server" ? sparkOf() : null,
    adapters ? adaptersCard(adapters) : null,
    el("div", { class: "histograms" },
      histogramOf(metrics, "teneral_first_token_seconds", "First token"),
      histogramOf(metrics, "teneral_inter_token_seconds", "Between tokens"),
      histogramOf(metrics, "teneral_pool_wait_seconds", "Wait for an instance"),
      histogramOf(metrics, "teneral_request_seconds", "Whole requests", labels => !QUIET.has(labels.route))));
}

// Adapters, where the server takes them: those in memory by name, and what their requests found. The playground offers them.
async function readAdapters(given) {
  if (given === undefined && byId("adapter-field").dataset.none) return null;
  const metrics = given ?? await readMetrics(), budget = metrics.total("teneral_adapters_max_bytes");
  byId("adapter-field").hidden = budget === undefined;
  if (budget === undefined) {
    if (metrics.total("teneral_engine_running") !== undefined) byId("adapter-field").dataset.none = "yes";
    return null;
  }
  const names = (await getJson("/v1/models")).data.filter(model => model.parent).map(model => model.id.slice(model.parent.length + 1)).sort();
  show(byId("adapters"), names.map(name => el("option", { value: name })));
  return { budget, names, count: name => metrics.total(`teneral_adapters_${name}`) ?? 0 };
}

function adaptersCard({ budget, names, count }) {
  const used = count("loaded_bytes");
  return el("section", { class: "card", id: "adapters-card" }, el("h2", {}, "Adapters"),
    stack([{ kind: "in-use", amount: used }], budget, `adapters: ${bytes(used)} of ${bytes(budget)}`),
    el("ul", { class: "keys" }, key("in-use", "in memory ", el("b", {}, bytes(used))), key("free", "budget ", el("b", {}, bytes(budget)))),
    el("dl", { class: "figures" }, cards([
      ["in memory", whole(count("loaded"))], ["held by requests", whole(count("pinned"))], ["being read", whole(count("loading"))],
      ["waiting for room", whole(count("waiting_for_room"))], ["found in memory", whole(count("hits_total"))], ["had to be read", whole(count("misses_total"))],
      ["made way", whole(count("evictions_total"))], ["failed", whole(count("failures_total"))],
    ])),
    names.length ? el("p", { class: "soft" }, `${names.slice(0, MAX_NAMES).join(", ")}${names.length > MAX_NAMES ? ` and ${names.length - MAX_NAMES} more` : ""}`) : null);
}

// Routes of probes and of this page, which are no work.
const QUIET = new Set(["/", "/livez", "/readyz", "/health", "/ping", "/metrics", "/timeline", "/timeline/events", "/debug/kv", "/debug/artifact",
  "/console.js", "/console.svg", "/v1/models", "unmatched"]);

function sparkOf() {
  const rates = load.rates, most = Math.max(1, ...rates);
  if (rates.length < 2) return null;
  const points = rates.map((rate, index) => `${(1000 * (index + MAX_RATES - rates.length) / (MAX_RATES - 1)).toFixed(1)},${(78 - 70 * rate / most).toFixed(1)}`);
  return el("section", { class: "card" }, el("h2", {}, "Tokens a second"),
    svg("svg", { class: "spark", viewBox: "0 0 1000 80", preserveAspectRatio: "none", role: "img", "aria-label": `Tokens a second over the last ${Math.round(rates.length * POLL_MS / 1000)} s: now ${rates.at(-1).toFixed(1)}, at most ${most.toFixed(1)}` },
      svg("polyline", { class: "network-line", points: points.join(" "), "vector-effect": "non-scaling-stroke" })),
    el("p", { class: "soft" }, `at most ${most.toFixed(1)} in the last ${Math.round(MAX_RATES * POLL_MS / 60000)} minutes of this page`));
}

// A histogram's buckets, summed over its labels: counts up to a bound become counts within one.
function histogramOf(metrics, name, title, wanted = () => true) {
  const counts = new Map();
  for (const [labels, value] of metrics.rows(`${name}_bucket`)) {
    if (!wanted(labels)) continue;
    const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
    counts.set(bound, (counts.get(bound) ?? 0) + value);
  }
  if (!counts.size) return null;
  const bounds = [...counts.keys()].sort((a, b) => a - b), total = counts.get(Infinity) ?? 0;
  const within = bounds.map((bound, index) => counts.get(bound) - (index ? counts.get(bounds[index - 1]) : 0));
  const quantile = share => {
    const place = bounds.findIndex(bound => counts.get(bound) >= share * total && counts.get(bound) > 0);
    if (!total || place < 0) return null;
    const low = place ? bounds[place - 1] : 0, below = place ? counts.get(low) : 0;
    return bounds[place] === Infinity ? low : low + (bounds[place] - low) * (share * total - below) / Math.max(1, within[place]);
  };
  const most = Math.max(1, ...within), step = 320 / bounds.length;
  const told = total ? `${whole(total)} of them; half within ${seconds(quantile(0.5))}, 95 % within ${seconds(quantile(0.95))}, 99 % within ${seconds(quantile(0.99))}` : "none yet";
  const drawing = svg("svg", { class: "histogram", viewBox: "0 0 320 84", role: "img", "aria-label": `${title}: ${told}` });
  within.forEach((count, index) => {
    const height = 60 * count / most;
    drawing.append(svg("rect", { class: "idle-bar", x: (index * step + 1).toFixed(1), y: 64, width: (step - 2).toFixed(1), height: 1.5 }));
    if (count > 0) drawing.append(svg("rect", { class: "fetch", x: (index * step + 1).toFixed(1), y: (64 - height).toFixed(1), width: (step - 2).toFixed(1), height: Math.max(1.5, height).toFixed(1), rx: 1.5 }));
    if (index % 4 === 1) drawing.append(text(index * step + step / 2, 79, bounds[index] === Infinity ? "∞" : bounds[index] < 1 ? `${Number((bounds[index] * 1e3).toPrecision(3))} ms` : `${bounds[index]} s`, "tick", "middle"));
  });
  return el("section", { class: "card" }, el("h2", {}, title), drawing, el("p", { class: "soft" }, told));
}

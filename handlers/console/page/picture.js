// A timeline's snapshot → what there is to draw: rows of bars and marks, and the figures above them.
// docs/timeline.md has the lanes. `runtime/waterfall/picture.py` does the same for the terminal.

const LOAD_LANES = ["fetch", "verify", "decode", "place"];
const OTHER_LANES = new Set([...LOAD_LANES, "ready", "execute", "request", "draft"]);
const REQUEST_KINDS = { queued: "queued", prefill: "prefill", decode: "generate" };
const MAX_LAYER_ROWS = 130, MAX_TASK_ROWS = 40, MAX_REQUEST_ROWS = 12;
const DECISIONS = ["draft-first: ", "exact: "];

function pictureOf(snapshot) {
  const lanes = {};
  for (const span of snapshot.spans) (lanes[span.lane] ??= []).push({ attributes: {}, ...span });
  for (const spans of Object.values(lanes)) spans.sort((a, b) => a.start_s - b.start_s);
  const of = lane => lanes[lane] ?? [];
  const figures = figuresOf(of, snapshot.now_s);
  const tasks = taskRows(lanes), layers = shareRows(layerRows(of), MAX_LAYER_ROWS);
  const isLoading = of("fetch").length > 0 && !of("fetch").some(span => span.name === "load") && !figures.failure;
  const loaded = isLoading ? snapshot.now_s : latest([...tasks, ...layers]);
  const begins = new Map();
  for (const span of of("request")) {
    const id = String(span.attributes.request ?? "");
    if (!begins.has(id)) begins.set(id, []);
    begins.get(id).push(span);
  }
  const early = [...begins.values()].filter(spans => spans[0].start_s <= 1.5 * loaded).slice(0, MAX_REQUEST_ROWS);
  const rows = [...tasks, ...layers, ...stepRows(of("execute")), ...early.map(requestRow)]
    .map(row => clip(row, 2 * loaded)).filter(row => row.bars.length || row.marks.length);
  const end = Math.max(loaded, ...rows.map(lastOf), 1e-3);
  return { end, rows, figures, isLoading, hidden: begins.size - early.length, dropped: snapshot.dropped_spans,
    started: snapshot.started_unix_s, explained: explain(of, figures, loaded, isLoading) };
}

const lastOf = row => Math.max(0, ...row.bars.map(bar => bar.end), ...row.marks.map(mark => mark.at));
const latest = rows => Math.max(1e-3, ...rows.map(row =>
  Math.max(0, ...row.bars.filter(bar => bar.kind !== "execute").map(bar => bar.end), ...row.marks.map(mark => mark.at))));

function clip(row, end) {
  return { ...row, bars: row.bars.filter(bar => bar.start < end).map(bar => ({ ...bar, end: Math.min(bar.end, end) })),
    marks: row.marks.filter(mark => mark.at <= end) };
}

// What the process does itself: a row a lane; in the lane "process", where threads meet, a row a name.
function taskRows(lanes) {
  const rows = new Map();
  const spans = Object.values(lanes).flat().sort((a, b) => a.start_s - b.start_s);
  for (const span of spans) {
    if (OTHER_LANES.has(span.lane) || span.end_s === span.start_s) continue;
    const label = span.lane === "process" ? span.name : span.lane;
    const title = label === span.name ? label : `${label}: ${span.name}`;
    if (!rows.has(label)) rows.set(label, []);
    rows.get(label).push({ kind: "task", start: span.start_s, end: span.end_s, title: `${title}, ${seconds(span.end_s - span.start_s)}` });
  }
  return [...rows].slice(0, MAX_TASK_ROWS).map(([label, bars]) => ({ section: "process", label, bars, marks: [],
    note: seconds(bars.reduce((sum, bar) => sum + bar.end - bar.start, 0)) }));
}

function layerRows(of) {
  const layers = new Map();
  const layer = name => {
    if (!layers.has(name)) layers.set(name, { order: Infinity, bars: [], marks: [], bytes: 0 });
    return layers.get(name);
  };
  const share = wireShareOf(of);
  for (const lane of LOAD_LANES) {
    for (const span of of(lane)) {
      const { group, tier = "", part, bytes: own = 0 } = span.attributes, size = Math.round(lane === "fetch" ? share * own : own);
      if (typeof group !== "string") continue;
      const one = layer(group);
      const name = tier ? `${group} ${tier}` : group;
      const title = `${name}: ${lane}${Number.isInteger(part) ? ` part ${part}` : ""}, ${bytes(size)} in ${seconds(span.end_s - span.start_s)}`;
      one.bars.push({ kind: lane, tier, start: span.start_s, end: span.end_s, title, bytes: size });
      if (Number.isInteger(part)) one.order = Math.min(one.order, part);
      if (lane === "fetch") one.bytes += size;
    }
  }
  for (const span of of("ready")) {
    const { group, tier } = span.attributes;
    if (typeof group === "string" && (tier === "draft" || tier === "exact"))
      layer(group).marks.push({ kind: tier, at: span.start_s, title: `${group}: ${tier}, ${seconds(span.start_s)}` });
  }
  for (const lane of ["execute", "draft"]) {
    for (const span of of(lane)) {
      if (!("layer" in span.attributes)) continue;
      const one = layer(span.name), what = lane === "draft" ? "drafted" : "executed";
      one.bars.push({ kind: "execute", tier: lane === "draft" ? "draft" : "", start: span.start_s, end: span.end_s,
        title: `${span.name}: ${what} in ${seconds(span.end_s - span.start_s)}` });
      if (span.attributes.layer === -1) one.order = -1; // the embeddings, which may lie in the store as the head
    }
  }
  return [...layers].sort((a, b) => a[1].order - b[1].order).map(([label, { bars, marks, bytes: size }]) => {
    const exact = marks.filter(mark => mark.kind === "exact").map(mark => mark.at);
    return { section: "weights", label, bars, marks, bytes: size, note: exact.length ? `exact ${seconds(Math.max(...exact))}` : "" };
  });
}

// The picture with no more rows of layers than a screen has room for, at least a dozen: neighbours share one.
function foldLayers(picture, rowPx, screenPx) {
  const layers = picture.rows.filter(row => row.section === "weights"), others = picture.rows.length - layers.length;
  const most = Math.max(12, Math.floor(screenPx / rowPx) - others), shared = shareRows(layers, most);
  const first = picture.rows.indexOf(layers[0]);
  return { ...picture, rows: shared === layers ? picture.rows : [...picture.rows.slice(0, first), ...shared, ...picture.rows.slice(first + layers.length)],
    numLayers: layers.length, isFolded: shared !== layers };
}

function shareRows(rows, most) {
  if (rows.length <= most) return rows;
  const per = Math.ceil(rows.length / most), shared = [];
  for (let first = 0; first < rows.length; first += per) {
    const some = rows.slice(first, first + per), last = some[some.length - 1];
    if (some.length === 1) {
      shared.push(last);
      continue;
    }
    const kind = label => /^[a-z._]*/.exec(label)[0], ends = kind(some[0].label) === kind(last.label) ? last.label.slice(kind(last.label).length) : last.label;
    shared.push({ section: "weights", label: `${some[0].label}–${ends}`, note: last.note,
      bars: some.flatMap(row => row.bars), marks: some.flatMap(row => row.marks), bytes: some.reduce((sum, row) => sum + row.bytes, 0) });
  }
  return shared;
}

function stepRows(spans) {
  const bars = spans.filter(span => !("layer" in span.attributes)).map(span => ({ kind: "execute", start: span.start_s,
    end: span.end_s, title: `${span.name}: ${span.attributes.tokens ?? 0} tokens in ${seconds(span.end_s - span.start_s)}` }));
  return bars.length ? [{ section: "requests", label: "forward passes", bars, marks: [], note: "" }] : [];
}

function requestRow(spans, index) {
  const row = { section: "requests", label: `request ${index + 1}`, bars: [], marks: [], note: "" };
  for (const span of spans) {
    const took = seconds(span.end_s - span.start_s);
    if (REQUEST_KINDS[span.name]) row.bars.push({ kind: REQUEST_KINDS[span.name], start: span.start_s, end: span.end_s, title: `${span.name} for ${took}` });
    else if (span.name === "first token" || span.name === "last token") row.marks.push({ kind: span.name.replace(" ", "-"), at: span.start_s,
      title: `${span.name} after ${seconds(span.start_s - spans[0].start_s)}` });
  }
  const first = row.marks.find(mark => mark.kind === "first-token");
  if (first) row.note = `token ${seconds(first.at)}`;
  return row;
}

function figuresOf(of, now) {
  const mark = name => of("process").find(span => span.name === name && span.start_s === span.end_s)?.start_s ?? null;
  const firsts = of("request").filter(span => span.name === "first token").map(span => span.start_s);
  const failed = of("process").find(span => span.name === "failed");
  const decision = of("process").find(span => DECISIONS.some(begin => span.name.startsWith(begin)));
  const parts = of("fetch").filter(span => "part" in span.attributes);
  const load = of("fetch").find(span => span.name === "load");
  const begin = parts.length ? Math.min(...parts.map(span => span.start_s)) : null;
  const queued = of("request").find(span => span.name === "queued" || span.name === "prefill");
  const exact = mark("all weights exact");
  const said = decision?.attributes ?? {};
  const engine = of("process").find(span => ["engine runs", "can answer"].includes(span.name));
  const mode = engine?.attributes.first_token, draft = draftOf(of("ready"));
  const needed = ["draft", "sketch"].includes(mode) && draft !== null && exact !== null ? draft : exact;
  const share = wireShareOf(of);
  const predicts = decision && begin !== null && Number.isFinite(said.exact_s);
  return {
    begin, exact, draft, engine: engine?.start_s ?? null, possible: engine && needed !== null ? Math.max(engine.start_s, needed) : null,
    possibleName: mode ? "first token possible" : "first answer possible", failure: failed ? String(failed.attributes.error ?? "failed") : "",
    firstToken: firsts.length ? Math.min(...firsts) : null,
    asked: queued ? queued.start_s : null,
    isEarly: queued !== undefined && exact !== null && queued.start_s < exact,
    stored: share * (load?.attributes.stored_bytes ?? parts.reduce((sum, span) => sum + (span.attributes.bytes ?? 0), 0)),
    weights: load?.attributes.weight_bytes ?? 0,
    fetchS: load ? load.end_s - load.start_s : begin === null ? 0 : Math.max(0, now - begin),
    decision: decision?.name ?? "", outcome: outcomeOf(of("draft")),
    predictedExact: predicts ? begin + said.exact_s : null,
    predictedToken: predicts ? begin + said.exact_s + (said.token_s ?? 0) : null,
  };
}

// When the last group's draft was there; null while a group has none.
function draftOf(marks) {
  const groups = { draft: new Map(), exact: new Map() };
  for (const { start_s: at, attributes: { group, tier } } of marks) groups[tier]?.set(group, at);
  const isWhole = groups.draft.size > 0 && [...groups.exact.keys()].every(group => groups.draft.has(group));
  return isWhole ? Math.max(...groups.draft.values()) : null;
}

// Bytes that crossed the network for one of the load's, which a GGUF file's source makes of fewer.
const wireShareOf = of => of("manifest").find(span => span.attributes.wire_share > 0)?.attributes.wire_share ?? 1;

function outcomeOf(spans) {
  const last = spans.find(span => span.name === "exact from here on");
  if (!last) return "";
  const { num_draft_steps: steps = 0, num_accepted: accepted = 0, num_judged: judged = 0 } = last.attributes;
  return steps ? `${whole(steps)} steps drafted, ${whole(accepted)} of ${whole(judged)} proposals confirmed` : "";
}

// What each moment from 0 to the first token went to. Of what goes on at the same time the first in this list counts:
// while bytes are on their way, all else waits for them.
const CAUSES = [
  ["network", "bytes on their way", ["fetch"]],
  ["decode", "verifying and decoding", ["verify", "decode", "place"]],
  ["compute", "computing", ["execute", "draft"]],
  ["setup", "setting up", null],
];

function explain(of, figures, loaded, isLoading) {
  const end = figures.isEarly && figures.firstToken !== null ? figures.firstToken : Math.max(loaded, 1e-3);
  const lanes = ["process", "manifest", "tokenizer", "model", "device"];
  // A part has its span when its last byte is there: until then, what was asked for is on its way.
  const onTheirWay = isLoading && figures.begin !== null ? [[figures.begin, end]] : [];
  const busy = CAUSES.map(([, , some]) => union((some ?? lanes).flatMap(of).concat(some?.includes("execute") ? of("request").filter(span => span.name === "prefill") : [])
    .filter(span => span.name !== "load").map(span => [span.start_s, Math.min(span.end_s, end)]).filter(([start, stop]) => stop > start)
    .concat(some?.includes("fetch") ? onTheirWay : [])));
  let taken = [];
  const parts = CAUSES.map(([kind, label], index) => {
    const before = length(taken);
    taken = union([...taken, ...busy[index]]);
    return { kind, label, amount: length(taken) - before };
  });
  const share = Math.min(1, length(taken) / end);
  return { end, share, parts: [...parts, { kind: "unexplained", label: "unexplained", amount: Math.max(0, end - length(taken)) }] };
}

function union(intervals) {
  const merged = [];
  for (const [start, end] of intervals.sort((a, b) => a[0] - b[0])) {
    const last = merged[merged.length - 1];
    if (last && start <= last[1]) last[1] = Math.max(last[1], end);
    else merged.push([start, end]);
  }
  return merged;
}

const length = intervals => intervals.reduce((sum, [start, end]) => sum + end - start, 0);

// Bytes that arrived in each of `count` equal stretches, each part taken to have come evenly.
function throughput(picture, count) {
  const bins = new Array(count).fill(0), width = picture.end / count;
  for (const row of picture.rows) {
    for (const bar of row.bars) {
      if (bar.kind !== "fetch" || !bar.bytes) continue;
      const first = Math.min(count - 1, Math.floor(bar.start / width)), last = Math.min(count - 1, Math.floor(bar.end / width));
      for (let bin = first; bin <= last; bin++) {
        const inside = Math.min(bar.end, (bin + 1) * width) - Math.max(bar.start, bin * width);
        bins[bin] += first === last ? bar.bytes : bar.bytes * Math.max(0, inside) / (bar.end - bar.start);
      }
    }
  }
  return bins;
}

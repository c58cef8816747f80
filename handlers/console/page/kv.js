// The KV pool: what its blocks are used for, and the prefixes that can be found in it.

async function readKv() {
  const panel = byId("panel-kv"), metrics = await readMetrics();
  if (!metrics.total("teneral_engine_num_blocks") && mode === "server") {
    show(panel, heading("KV pool"), el("p", { class: "notice" }, "There is no KV pool yet: it is made with the model. Encoders have none."));
    return;
  }
  const view = await getJson("/debug/kv");
  drawKv(panel, view, metrics);
}

function drawKv(panel, view, metrics) {
  const states = [
    ["in-use", "in use", view.num_in_use], ["pinned", "pinned by sessions", view.num_pinned],
    ["idle", "idle, can be found", view.num_idle], ["free", "free", view.num_free],
  ];
  const total = name => metrics.total(`teneral_engine_${name}`);
  const budget = total("kv_bytes"), used = view.num_blocks - view.num_free;
  const hits = total("prefix_hit_tokens_total"), looked = total("prefix_lookup_tokens_total");
  show(panel,
    heading([el("em", {}, percent(view.num_blocks ? used / view.num_blocks : 0, 1)), " of the KV pool is taken"]),
    el("section", { class: "card", "aria-labelledby": "blocks-title" },
      el("h2", { id: "blocks-title" }, `${whole(view.num_blocks)} blocks of ${view.block_size} tokens`),
      stack(states.map(([kind, , amount]) => ({ kind, amount })), view.num_blocks, states.map(([, label, amount]) => `${label} ${amount}`).join(", ")),
      el("ul", { class: "keys" }, states.map(([kind, label, amount]) => key(kind, `${label} `, el("b", {}, whole(amount)), ` ${percent(view.num_blocks ? amount / view.num_blocks : 0, 1)}`)))),
    el("dl", { class: "figures" }, cards([
      budget && ["memory", `${bytes(budget * used / Math.max(1, view.num_blocks))} of ${bytes(budget)}`],
      ["shared blocks", whole(view.num_shared)],
      looked > 0 && ["prompt tokens found", percent(hits / looked, 1), `${whole(hits)} of ${whole(looked)}`],
      ["evicted blocks", whole(total("prefix_evictions_total") ?? 0)],
      ["sessions", `${whole(view.num_sessions)} of ${whole(view.num_session_owners)} owners`],
      ["sessions may pin", `${whole(view.max_pinned_blocks)} blocks`],
    ])),
    spillOf(metrics), snapshotOf(metrics), treeOf(view));
}

const rowsUnder = (metrics, prefix) => [...metrics.names(prefix)];

function figuresUnder(metrics, prefix, title, empty) {
  const rows = rowsUnder(metrics, prefix);
  return el("section", { class: "card" }, el("h2", {}, title), rows.length
    ? el("dl", { class: "plain" }, rows.flatMap(([name, labels, value]) => [
      el("dt", {}, [name.slice(prefix.length).replace(/_total$/, "").replaceAll("_", " "), labels.kind].filter(Boolean).join(" · ")),
      el("dd", {}, name.includes("bytes") && !name.endsWith("_s") ? bytes(value) : Number.isInteger(value) ? whole(value) : value.toFixed(3))]))
    : el("p", { class: "soft" }, empty));
}

const spillOf = metrics => figuresUnder(metrics, "teneral_engine_spill_", "Spill", "Off: --kv-host-bytes and --kv-disk-dir turn it on.");
const snapshotOf = metrics => figuresUnder(metrics, "teneral_kv_snapshot_", "Snapshot", "Off: --kv-snapshot names a place for it.");

function treeOf(view) {
  const children = new Map();
  view.prefixes.forEach((node, index) => {
    if (!children.has(node.parent)) children.set(node.parent, []);
    children.get(node.parent).push([index, node]);
  });
  const most = Math.max(1, ...view.prefixes.map(node => node.num_tokens));
  const branch = parent => (children.get(parent) ?? []).length ? el("ul", {}, children.get(parent).map(([index, node]) => el("li", {},
    el("div", { class: "node" },
      stack([{ kind: node.num_sequences ? "in-use" : node.num_sessions ? "pinned" : "idle", amount: node.num_tokens }], most, `${node.num_tokens} tokens`),
      el("span", {}, el("b", {}, `${whole(node.num_tokens)} tokens`), ` ${whole(node.num_hits)} ${node.num_hits === 1 ? "hit" : "hits"}`),
      el("span", { class: "soft" }, [node.num_sequences ? `${node.num_sequences} running` : null, node.num_sessions ? `${node.num_sessions} sessions` : null,
        `unused for ${seconds(node.unused_s >= 100 ? node.unused_s : Math.round(node.unused_s))}`].filter(Boolean).join(" · "))),
    branch(index)))) : null;
  return el("section", { class: "card tree" }, el("h2", {}, "Prefixes"),
    branch(null) ?? el("p", { class: "soft" }, "None can be found yet: whole blocks of a prompt are kept for the next that begins with them."),
    view.num_chains > view.chains.length ? el("p", { class: "soft" }, `${whole(view.num_chains - view.chains.length)} chains more are not shown.`) : null);
}

// The artifact: what `teneral inspect` prints.

async function readArtifact() {
  const panel = byId("panel-artifact");
  if (panel.dataset.done === (poolModel || "yes")) return;
  if (mode === "server" && !start.snapshot?.spans.some(span => span.lane === "manifest" && span.name === "open")) {
    show(panel, heading("Artifact"), el("p", { class: "notice" }, "Its manifest has not been read yet."));
    return;
  }
  drawArtifact(panel, await getJson("/debug/artifact"));
  panel.dataset.done = poolModel || "yes";
}

function drawArtifact(panel, told) {
  const isPacked = told.digest !== null, totals = told.totals, hasSketch = totals.sketch_bytes > 0;
  const columns = [["tensors", row => whole(row.tensors)], ["elements", row => whole(row.elements)], ["raw", row => bytes(row.raw_bytes)]];
  if (isPacked) {
    if (hasSketch) columns.push(["sketch", row => bytes(row.sketch_bytes)]);
    columns.push(["draft", row => bytes(row.draft_bytes)], ["refine", row => bytes(row.refine_bytes)],
      ["draft of raw", row => percent(row.draft_ratio, 1)], ["stored of raw", row => percent(row.stored_ratio, 1)]);
  }
  const line = (row, tag = {}) => el("tr", tag, el("th", { scope: "row" }, row.name), columns.map(([, cell]) => el("td", {}, cell(row))));
  const stored = isPacked ? totals.stored_bytes : totals.raw_bytes;
  const facts = [
    ["address", told.url], ["format", isPacked ? `${told.format}, written by ${told.generator}` : "plain safetensors, not packed"],
    ["digest", isPacked ? `b3:${told.digest}` : "none: nothing says what these bytes should be"],
    ["family", familyOf(told.model)], ["dtypes", Object.entries(told.dtypes).map(([name, count]) => `${count} ${name}`).join(", ")],
    ["encodings", Object.entries(told.encodings).map(([name, count]) => `${name} (${count})`).join(", ")],
    ["stored", `${told.parts} parts in ${told.blobs.length} blobs`],
    ["tied", Object.entries(told.aliases).map(([name, target]) => `${name} = ${target}`).join(", ")],
  ].filter(([, value]) => value);
  show(panel,
    heading([el("em", {}, bytes(stored)), isPacked ? ` stored, ${percent(totals.stored_ratio)} of ${bytes(totals.raw_bytes)}` : " of plain safetensors"]),
    isPacked ? el("section", { class: "card" }, el("h2", {}, "Tiers"),
      stack([{ kind: "sketch", amount: totals.sketch_bytes }, { kind: "fetch", amount: totals.draft_bytes }, { kind: "refine", amount: totals.refine_bytes }], totals.stored_bytes,
        `draft ${bytes(totals.sketch_bytes + totals.draft_bytes)}, refine ${bytes(totals.refine_bytes)}`),
      el("ul", { class: "keys" }, hasSketch ? key("sketch", "sketch ", el("b", {}, bytes(totals.sketch_bytes))) : null,
        key("fetch", "draft ", el("b", {}, bytes(totals.draft_bytes)), ` ${percent(totals.draft_ratio)} of raw`),
        key("refine", "refine ", el("b", {}, bytes(totals.refine_bytes))))) : null,
    el("section", { class: "card" }, el("h2", {}, "Facts"), el("dl", { class: "plain wide" }, facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]))),
    el("section", { class: "card" }, el("h2", {}, "Layers"), el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Layers of the artifact" }, el("table", {},
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "group"), columns.map(([name]) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, told.groups.map(row => line(row))), el("tfoot", {}, line({ ...totals, name: "total" }))))),
    el("section", { class: "card" }, el("h2", {}, "Files"), el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Files of the artifact" }, el("table", {},
      el("thead", {}, el("tr", {}, ["name", "bytes", "BLAKE3"].map(name => el("th", { scope: "col", class: name === "BLAKE3" ? "text" : null }, name)))),
      el("tbody", {}, told.files.map(file => el("tr", {}, el("th", { scope: "row" }, file.name), el("td", {}, bytes(file.bytes)), el("td", { class: "digest" }, file.digest ?? "–"))))))));
}

function familyOf(model) {
  if (!model) return "";
  if (model.refused) return `refused: ${model.refused}`;
  const native = model.native_only ? "by the native core" : "by the native core and torch";
  return `${model.family}, ${model.kind}, up to ${whole(model.max_tokens)} tokens; ${model.native_refuses ? `not by the native core: ${model.native_refuses}` : native}`;
}

// The cold start: as it happens, by the timeline's events; of a file, as it was.

const start = { snapshot: null, load: null, received: 0, forecast: null, stream: null, isUnfolded: false };

function makeStart() {
  const chart = el("div", { class: "chart" });
  byId("panel-start").append(
    el("div", { id: "start-hero" }, heading("Waiting for the server’s timeline")),
    el("dl", { id: "start-cards", class: "figures" }),
    el("section", { id: "explained", class: "card", "aria-labelledby": "explained-title" }),
    el("div", { id: "legend", class: "legend", role: "group", "aria-label": "Phases to show" }),
    el("button", { id: "fold", class: "quiet", type: "button", "aria-expanded": "false", hidden: true, onclick: () => {
      start.isUnfolded = !start.isUnfolded;
      drawStart();
    } }),
    chart,
    el("details", { id: "start-table" }, el("summary", {}, "As a table"), el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Layers as a table" })),
    el("p", { id: "start-remarks", class: "soft" }));
  readUnderPointer(chart);
  new ResizeObserver(() => drawStart()).observe(chart);
  byId("start-table").addEventListener("toggle", drawStart);
}

// The snapshot as of now: while weights arrive, time goes on between two events.
function nowOf(snapshot) {
  const isMoving = start.load && (start.load.state === "loading" || start.load.state === "partial");
  return isMoving ? snapshot.now_s + (performance.now() - start.received) / 1000 : snapshot.now_s;
}

function drawStart() {
  const panel = byId("panel-start");
  if (panel.hidden || !start.snapshot) return;
  const picture = pictureOf({ ...start.snapshot, now_s: nowOf(start.snapshot) });
  drawHero(picture);
  drawExplained(picture.explained);
  const box = panel.querySelector(".chart"), width = Math.floor(box.clientWidth);
  if (width > 0) {
    const folded = foldLayers(picture, ROW_PX, innerHeight - CHART_FRAME_PX);
    box.replaceChildren(drawWaterfall(start.isUnfolded ? picture : folded, width));
    byId("fold").hidden = !folded.isFolded;
    byId("fold").setAttribute("aria-expanded", String(start.isUnfolded));
    byId("fold").textContent = start.isUnfolded ? "Fold the layers" : `Show each of ${folded.numLayers} layers`;
    show(byId("legend"), legendOf(picture));
  }
  if (byId("start-table").open) show(byId("start-table").querySelector("div"), tableOf(picture));
  const remarks = [`process started ${new Date(picture.started * 1000).toISOString().replace("T", " ").slice(0, 19)} UTC`];
  if (picture.hidden) remarks.push(`${whole(picture.hidden)} more requests are not shown`);
  if (picture.dropped) remarks.push(`${whole(picture.dropped)} spans were dropped when the timeline was full`);
  byId("start-remarks").textContent = remarks.join(" · ");
}

function drawHero(picture) {
  const { figures } = picture, load = start.load, progress = load?.progress, share = progress?.fraction ?? null;
  const forecast = load?.forecast;
  if (forecast && start.forecast === null) start.forecast = start.snapshot.now_s + forecast.first_token_s;
  const predicted = figures.predictedToken ?? start.forecast;
  const ready = Math.max(figures.exact ?? 0, figures.engine ?? 0);
  const hasDraft = figures.exact !== null || (progress?.groups > 0 && progress.groups_draft === progress.groups);
  const isLoading = share !== null && share < 1 && !figures.failure;
  let title, lead = "";
  if (figures.failure) title = heading(`The cold start failed: ${figures.failure}`);
  else if (isLoading) {
    title = heading([el("em", {}, percent(share)), " of the weights are here"]);
    lead = forecast ? `${bytes(forecast.rate_bytes_per_s)}/s · first token ${forecast.is_upper_bound || load.first_token !== "exact" ? "within" : "in"} about ${seconds(Math.max(0, forecast.first_token_s))}` : "measuring the link";
  } else if (figures.isEarly && figures.firstToken !== null) {
    title = heading(["First token after ", el("em", {}, seconds(figures.firstToken))]);
    lead = predicted === null ? "from the start of the process" : forecastOf(predicted, figures.firstToken);
  } else if (ready) {
    title = heading(["Ready after ", el("em", {}, seconds(ready))]);
    lead = figures.predictedExact !== null && figures.exact !== null
      ? `all exact: ${forecastOf(figures.predictedExact, figures.exact)}`
      : "from the start of the process; no request waited for it";
  } else title = heading("No token yet");
  show(byId("start-hero"), title, lead ? el("p", { class: "lead" }, lead) : null,
    isLoading ? el("div", { class: "progress", role: "progressbar", "aria-label": "Weights loaded", "aria-valuemin": "0", "aria-valuemax": "100", "aria-valuenow": Math.round(100 * share) },
      stack([{ kind: "fetch", amount: share }], 1, "")) : null);
  byId("start-hero").querySelector(".progress svg")?.setAttribute("aria-hidden", "true");
  show(byId("start-cards"), cards([
    figures.draft !== null && hasDraft && ["draft there after", seconds(figures.draft)],
    figures.possible !== null && [`${figures.possibleName} after`, seconds(figures.possible)],
    figures.exact !== null && ["all exact after", seconds(figures.exact)],
    figures.stored > 0 && ["fetched", `${bytes(progress && isLoading ? progress.fetched_bytes : figures.stored)}${isLoading && progress.stored_bytes ? ` of ${bytes(progress.stored_bytes)}` : ""}`],
    figures.stored > 0 && figures.fetchS > 0 && ["on average", `${bytes((progress && isLoading ? progress.fetched_bytes : figures.stored) / figures.fetchS)}/s`],
    figures.weights > 0 && ["weights in memory", bytes(figures.weights)],
    progress?.groups > 0 && ["layers exact", `${progress.groups_exact} of ${progress.groups}`],
    figures.decision && ["order", figures.decision],
    figures.outcome && ["draft", figures.outcome],
  ]));
}

// A forecast with its error, in shares of what it took: one that was too long is no gain.
function forecastOf(predicted, actual) {
  const error = predicted - actual, sign = error > 0 ? "+" : "−";
  if (Math.abs(error) < 0.005 * actual) return `forecast ${seconds(predicted)}`;
  return `forecast ${seconds(predicted)}, wrong by ${sign}${seconds(Math.abs(error))} (${sign}${percent(Math.abs(error) / actual)})`;
}

function drawExplained({ end, share, parts }) {
  const label = parts.filter(part => part.amount > 0).map(part => `${part.label} ${seconds(part.amount)}`).join(", ");
  show(byId("explained"),
    el("h2", { id: "explained-title" }, "What the time went to"),
    stack(parts, end, `Of ${seconds(end)}: ${label}`),
    el("ul", { class: "keys" }, parts.filter(part => part.amount > 0.0005 * end).map(part =>
      key(part.kind, `${part.label} `, el("b", {}, seconds(part.amount)), ` ${percent(part.amount / end, 1)}`))),
    el("p", { class: "soft" }, `${percent(share, 1)} of ${seconds(end)} is explained. Where phases overlap, the first in this list is counted.`));
}

function legendOf(picture) {
  const seen = new Set(picture.rows.flatMap(row => [...row.bars.map(kindOf), ...row.marks.map(mark => mark.kind)]));
  return LEGEND.filter(([kind]) => seen.has(kind)).map(([kind, label]) => el("button", {
    type: "button", "aria-pressed": String(!hiddenKinds.has(kind)), "data-name": `legend-${kind}`,
    onclick: () => {
      if (!hiddenKinds.delete(kind)) hiddenKinds.add(kind);
      drawStart();
    },
  }, el("i", { class: kind, "aria-hidden": "true" }), label));
}

function tableOf(picture) {
  const at = (row, kind) => Math.max(...row.marks.filter(mark => mark.kind === kind).map(mark => mark.at), -1);
  const last = (row, kind) => Math.max(...row.bars.filter(bar => bar.kind === kind).map(bar => bar.end), -1);
  const cell = value => el("td", {}, value < 0 ? "–" : seconds(value));
  const rows = picture.rows.filter(row => row.section === "weights");
  return el("table", {},
    el("thead", {}, el("tr", {}, ["layer", "bytes", "fetched", "draft", "exact", "executed"].map(name => el("th", { scope: "col" }, name)))),
    el("tbody", {}, rows.map(row => el("tr", {}, el("th", { scope: "row" }, row.label), el("td", {}, bytes(row.bytes)),
      cell(last(row, "fetch")), cell(at(row, "draft")), cell(at(row, "exact")), cell(last(row, "execute"))))));
}

function takeEvent(event) {
  const before = start.snapshot;
  const isSame = before && before.started_unix_s === event.started_unix_s && !event.isWhole;
  start.snapshot = { ...event, spans: isSame ? [...before.spans, ...event.spans] : event.spans };
  start.received = performance.now();
  if (event.load) {
    start.load = event.load;
    showState(event.load);
  }
  drawStart();
}

// Follow the start by its events; after its end, look now and then for the first request's token, and for the server.
async function followStart() {
  if (start.stream) return;
  start.stream = new AbortController();
  try {
    if (!start.snapshot || (start.load && !["ready", "failed"].includes(start.load.state))) {
      const response = await ask("/timeline/events", { signal: start.stream.signal });
      if (start.snapshot) start.snapshot = null;
      for await (const data of eventsOf(response)) if (data !== "[DONE]") takeEvent(JSON.parse(data));
    } else if (!pictureOf(start.snapshot).figures.firstToken) {
      takeEvent({ ...await getJson("/timeline"), isWhole: true });
    }
    await readState();
    showTrouble("");
  } catch (error) {
    if (error.name !== "AbortError") showTrouble(error);
  } finally {
    start.stream = null;
  }
}

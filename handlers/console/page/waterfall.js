// A picture as SVG, in the pixels that there are: nothing is scaled, so that texts have one size on every screen.

const LEGEND = [
  ["task", "setting up"], ["fetch", "fetch"], ["refine", "fetch what makes it exact"], ["verify", "verify"],
  ["decode", "decode"], ["place", "place on the device"], ["draft", "draft is there"], ["exact", "layer exact"],
  ["execute", "forward pass"], ["queued", "queued"], ["prefill", "prefill"], ["generate", "generate"], ["first-token", "first token"],
];
const SECTIONS = { process: "PROCESS", weights: "WEIGHTS", requests: "REQUESTS" };
const ROW_PX = 18, CHART_FRAME_PX = 210; // of a row; of the header, the axis and the network above and below the rows
const hiddenKinds = new Set();

const kindOf = bar => bar.kind === "fetch" && bar.tier === "refine" ? "refine" : bar.kind;

function drawWaterfall(picture, width) {
  const narrow = width < 620;
  const left = narrow ? 82 : 140, right = width - (narrow ? 10 : 104);
  const rowHeight = picture.rows.length > 60 ? 12 : ROW_PX, networkHeight = 46;
  const x = at => left + (right - left) * Math.min(1, at / picture.end);
  const moments = momentsOf(picture);
  const axisY = 16, top = 24 + 15 * moments.length + 4;
  const body = svg("g"), lines = svg("g"), labels = svg("g");
  let y = top;
  for (const [section, title] of Object.entries(SECTIONS)) {
    const rows = picture.rows.filter(row => row.section === section);
    if (!rows.length) continue;
    body.append(text(8, y + 17, title, "head"));
    y += 26;
    if (section === "weights") {
      drawNetwork(body, picture, { x, y, left, right, height: networkHeight, narrow });
      y += networkHeight;
    }
    for (const row of rows) {
      body.append(drawRow(row, { x, y, height: rowHeight, left, right, width, narrow }));
      y += rowHeight;
    }
  }
  const height = y + 10;
  for (const tick of ticksOf(picture.end, Math.max(3, Math.floor((right - left) / (narrow ? 56 : 84))))) {
    lines.append(svg("line", { class: "grid", x1: x(tick).toFixed(1), x2: x(tick).toFixed(1), y1: top - 4, y2: height - 4 }));
    labels.append(text(x(tick), axisY - 2, `${Number(tick.toPrecision(6))} s`, "tick", "middle"));
  }
  moments.forEach(([at, kind, label], lane) => {
    const place = x(at), labelY = axisY + 16 + 15 * lane, fits = place + 8 * label.length < width - 6;
    lines.append(svg("line", { class: `moment ${kind}`, x1: place.toFixed(1), x2: place.toFixed(1), y1: labelY - 9, y2: height - 4 }));
    labels.append(text(place + (fits ? 5 : -5), labelY, label, `moment ${kind}`, fits ? "start" : "end"));
  });
  const pointer = svg("line", { class: "pointer", y1: top - 4, y2: height - 4, visibility: "hidden" });
  const drawing = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": summaryOf(picture) },
    lines, body, labels, pointer);
  Object.assign(drawing, { scale: { left, right, end: picture.end }, pointer });
  return drawing;
}

function momentsOf(picture) {
  const { possible, possibleName, exact, firstToken, predictedToken, isEarly } = picture.figures;
  return [[possible === exact ? null : possible, "answer", possibleName], [exact, "all-exact", "exact"], [firstToken, "token", "first token"],
    [isEarly || picture.isLoading ? predictedToken : null, "predicted", "forecast"]]
    .filter(([at]) => at !== null && at <= picture.end).sort((a, b) => a[0] - b[0]);
}

function drawRow(row, { x, y, height, left, right, width, narrow }) {
  const order = ["task", "fetch", "verify", "decode", "place", "execute", "queued", "prefill", "generate"];
  const group = svg("g", { class: "row" }, svg("rect", { class: "band", x: 0, y, width, height: height - 1 }));
  const label = narrow && row.label.length > 11 ? `${row.label.slice(0, 10)}…` : row.label.length > 19 ? `${row.label.slice(0, 18)}…` : row.label;
  group.append(text(left - 8, y + height / 2 + 4, label, "label", "end"));
  const bars = [...row.bars].sort((a, b) => order.indexOf(a.kind) - order.indexOf(b.kind) || a.start - b.start);
  for (const bar of thinned(bars, x)) {
    const kind = kindOf(bar);
    if (hiddenKinds.has(kind)) continue;
    const [from, to] = edges(bar), start = x(bar.start), size = Math.max(1.6, x(bar.end) - start);
    group.append(svg("rect", { class: kind, x: start.toFixed(1), y: (y + from * (height - 1)).toFixed(1), width: size.toFixed(1),
      height: ((to - from) * (height - 1)).toFixed(1), rx: 1.5, "data-title": bar.title }));
  }
  for (const mark of row.marks) {
    if (hiddenKinds.has(mark.kind)) continue;
    const at = x(mark.at);
    if (mark.kind === "draft" || mark.kind === "exact") {
      group.append(svg("rect", { class: mark.kind, x: (at - 0.9).toFixed(1), y, width: 1.8, height: height - 1, "data-title": mark.title }));
      continue;
    }
    const middle = y + (height - 1) / 2, half = height * (mark.kind === "first-token" ? 0.4 : 0.22);
    group.append(svg("path", { class: mark.kind, "data-title": mark.title,
      d: `M${at.toFixed(1)} ${middle - half}l${half} ${half}l${-half} ${half}l${-half} ${-half}z` }));
  }
  if (!narrow) group.append(text(right + 10, y + height / 2 + 4, row.note, "note"));
  return group;
}

// Bars of one kind that share a pixel become one: the drawing's size is bounded by the screen, not by the timeline.
function thinned(bars, x) {
  const kept = [];
  for (const bar of bars) {
    const last = kept[kept.length - 1];
    if (last && last.kind === bar.kind && last.tier === bar.tier && x(bar.start) - x(last.end) < 0.6 && x(last.end) - x(last.start) < 3) {
      const count = (last.count ?? 1) + 1, size = (last.bytes ?? 0) + (bar.bytes ?? 0);
      kept[kept.length - 1] = { ...last, end: Math.max(last.end, bar.end), count, bytes: size,
        title: `${count} of them: ${bar.kind}${size ? `, ${bytes(size)}` : ""}` };
    } else kept.push(bar);
  }
  return kept;
}

// Where a bar lies in its row, from 0 at the top to 1: a layer's tiers arrive one above the other.
function edges(bar) {
  if (bar.kind === "queued") return [0.35, 0.65];
  if (bar.kind === "execute" || !bar.tier) return [0.14, 0.86];
  return bar.tier === "refine" ? [0.5, 0.86] : [0.14, 0.5];
}

function drawNetwork(body, picture, { x, y, left, right, height, narrow }) {
  const count = Math.max(40, Math.min(220, Math.floor((right - left) / 4))), arrived = throughput(picture, count);
  const highest = Math.max(...arrived);
  if (!highest) return;
  const base = y + height - 8, scale = (height - 12) / highest, step = (right - left) / count;
  const points = arrived.map((amount, index) => `${(left + (index + 0.5) * step).toFixed(1)},${(base - amount * scale).toFixed(1)}`).join(" ");
  const peak = `peak ${bytes(highest * count / picture.end)}/s`;
  body.append(svg("polygon", { class: "network-area", points: `${left},${base} ${points} ${right},${base}` }),
    svg("polyline", { class: "network-line", points }), text(left - 8, base - 4, "network", "label", "end"));
  if (narrow) body.append(text(left + 4, y + 4, peak, "note halo"));
  else body.append(text(right + 10, base - 4, peak, "note"));
}

// Multiples of …, 0.5, 1, 2, 5, 10, … that cut [0, end] into at most `most` pieces.
function ticksOf(end, most) {
  const rough = end / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(factor => factor * power).find(each => each >= rough * (1 - 1e-9));
  return Array.from({ length: Math.floor(end / step + 1e-9) + 1 }, (_, index) => index * step);
}

const text = (x, y, content, kind, anchor = "start") =>
  svg("text", { class: kind, x: x.toFixed(1), y: y.toFixed(1), "text-anchor": anchor }, content);

function summaryOf(picture) {
  const { firstToken, exact, stored, fetchS } = picture.figures;
  const told = [`A waterfall of ${picture.rows.length} rows over ${seconds(picture.end)}`];
  if (stored) told.push(`${bytes(stored)} fetched in ${seconds(fetchS)}`);
  if (exact !== null) told.push(`all weights exact after ${seconds(exact)}`);
  if (firstToken !== null) told.push(`first token after ${seconds(firstToken)}`);
  return `${told.join(", ")}. The table below has the same figures.`;
}

// The reading of time under the pointer, and of the bar there.
function readUnderPointer(box) {
  const tip = byId("tip");
  box.addEventListener("pointermove", event => {
    const drawing = box.querySelector("svg");
    if (!drawing?.scale) return;
    const { left, right, end } = drawing.scale, at = event.clientX - drawing.getBoundingClientRect().left;
    const inside = at >= left && at <= right;
    drawing.pointer.setAttribute("visibility", inside ? "visible" : "hidden");
    tip.hidden = !inside;
    if (!inside) return;
    drawing.pointer.setAttribute("x1", at);
    drawing.pointer.setAttribute("x2", at);
    tip.replaceChildren(el("b", {}, seconds((at - left) / (right - left) * end)), event.target.dataset?.title ? `  ${event.target.dataset.title}` : "");
    const flip = event.clientX > innerWidth - tip.offsetWidth - 30;
    tip.style.left = `${Math.max(4, event.clientX + (flip ? -tip.offsetWidth - 14 : 14))}px`;
    tip.style.top = `${Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8)}px`;
  });
  box.addEventListener("pointerleave", () => {
    tip.hidden = true;
    box.querySelector("svg")?.pointer?.setAttribute("visibility", "hidden");
  });
}

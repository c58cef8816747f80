// Which panel is shown, and what it reads while it is.

const PANELS = ["start", "playground", "kv", "load", "artifact"];
// In front of a pool, reading of an instance wakes its model: only when asked to.
const READS = mode === "pool" ? { load: readLoad } : { start: followStart, kv: readKv, load: readLoad, artifact: readArtifact, playground: () => readAdapters() };
let current = "start", isReading = false;

// Of a server whose engine runs, and whose weights are not all exact: what it answers with is a setting.
function partialState() {
  return start.load?.first_token === "exact" ? "takes requests, first token when all weights are exact" : "answers from its draft, still refining";
}

function showState({ state, model, error }) {
  byId("model").textContent = model;
  byId("state").textContent = { loading: "loading", partial: partialState(), ready: "ready", failed: "failed", draining: "draining" }[state] ?? state;
  byId("state").className = `state ${state}`;
  if (error) byId("state").title = error;
  document.title = `${model} · Teneral`;
}

// Whether the server is still there: after its start no event says so. (/readyz would be an error in the browser's
// console while it is not ready.)
async function readState() {
  if (mode !== "server") return;
  await ask("/livez");
  if (start.load) showState(start.load);
}

// Once a second, whatever else is read: a server that has ended is seen within two.
let isBeating = false;
async function beat() {
  if (mode === "file" || isBeating || document.visibilityState === "hidden" || !byId("key-form").hidden) return;
  isBeating = true;
  try {
    await ask("/livez", { signal: AbortSignal.timeout(5 * PULSE_MS) });
    if (byId("state").classList.contains("trouble") && mode === "server") refresh();
  } catch (error) {
    // Before its first answer the server may still be importing what answers.
    if (!error.status && (error.name !== "TimeoutError" || start.load)) showTrouble(error);
  } finally {
    isBeating = false;
  }
}

function showTrouble(error) {
  if (!error) {
    if (byId("state").classList.contains("trouble")) byId("state").className = "state";
    return;
  }
  if (error.status === 401) return;
  byId("state").className = "state trouble";
  byId("state").textContent = error.status ? error.message : "the server does not answer";
}

function showPanel(name = current, focus = false) {
  current = PANELS.includes(name) ? name : "start";
  for (const each of PANELS) {
    const tab = byId(`tab-${each}`), isShown = each === current;
    tab.setAttribute("aria-selected", String(isShown));
    tab.tabIndex = isShown ? 0 : -1;
    byId(`panel-${each}`).hidden = !isShown || !byId("key-form").hidden;
    if (isShown && focus) tab.focus();
  }
  byId("tip").hidden = true;
  byId("model-choice").hidden = mode !== "pool" || current === "load" || !byId("key-form").hidden;
  byId("pool-read").hidden = current === "playground";
  byId("pool-read").nextElementSibling.hidden = current === "playground";
  if (mode === "file") drawStart();
  else {
    if (current === "start") drawStart();
    refresh();
  }
}

async function refresh() {
  const read = READS[current];
  if (mode === "file" || !read || isReading || !byId("key-form").hidden || document.visibilityState === "hidden") return;
  isReading = read !== followStart;
  try {
    await read();
    if (read !== followStart) {
      await readState();
      showTrouble("");
    }
  } catch (error) {
    showTrouble(error);
  } finally {
    isReading = false;
  }
}

function makeTabs() {
  const bar = document.querySelector("[role=tablist]");
  for (const name of PANELS) byId(`tab-${name}`).addEventListener("click", () => { location.hash = name; });
  bar.addEventListener("keydown", event => {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -PANELS.length, End: PANELS.length }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = Math.abs(step) > 1 ? (step < 0 ? 0 : PANELS.length - 1) : (PANELS.indexOf(current) + step + PANELS.length) % PANELS.length;
    showPanel(PANELS[next], true);
    history.replaceState(null, "", `#${PANELS[next]}`);
  });
  window.addEventListener("hashchange", () => showPanel(location.hash.slice(1)));
}

function makeFile() {
  for (const name of PANELS.slice(1)) byId(`tab-${name}`).remove();
  document.querySelector("[role=tablist]").hidden = true;
  byId("panel-start").setAttribute("role", "region");
  byId("panel-start").setAttribute("aria-label", "Cold start");
  byId("panel-start").removeAttribute("aria-labelledby");
  for (const name of PANELS.slice(1)) byId(`panel-${name}`).remove();
  byId("key-form").remove();
  byId("model-choice").remove();
  byId("panel-start").hidden = false;
  start.snapshot = JSON.parse(byId("timeline").textContent);
  document.title = "A cold start · Teneral";
  drawStart();
}

makeStart();
if (mode === "file") makeFile();
else {
  makePlayground();
  makeTabs();
  byId("pool-read").addEventListener("click", async () => {
    try {
      if (current === "start") takeEvent({ ...await getJson("/timeline"), isWhole: true });
      if (current === "kv") drawKv(byId("panel-kv"), await getJson("/debug/kv"), await readMetrics());
      if (current === "artifact") {
        byId("panel-artifact").dataset.done = "";
        await readArtifact();
      }
      showTrouble("");
    } catch (error) {
      showTrouble(error);
    }
  });
  const open = async () => {
    current = location.hash.slice(1) || (mode === "pool" ? "load" : "start");
    if (mode === "pool") await choosePoolModel().catch(showTrouble);
    showPanel(current);
    if (mode === "server" && current !== "start") followStart();
    setInterval(refresh, POLL_MS);
    setInterval(beat, PULSE_MS);
    setInterval(() => { if (start.load && ["loading", "partial"].includes(start.load.state)) drawStart(); }, 250);
  };
  document.addEventListener("visibilitychange", () => refresh());
  if (root.dataset.key === "needed") askForKey().then(open);
  else open();
}

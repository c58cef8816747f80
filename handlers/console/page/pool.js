// A pool's models, versions and instances, and who sleeps.

async function readPool() {
  const pool = await getJson("/v1/pool"), panel = byId("panel-load");
  if (!byId("pool-load")) panel.append(el("div", { id: "pool-models" }), el("div", { id: "pool-load" }));
  showState({ state: pool.state, model: `pool of ${Object.keys(pool.models).length} ${Object.keys(pool.models).length === 1 ? "model" : "models"}` });
  const memory = pool.memory;
  show(byId("pool-models"),
    heading([el("em", {}, whole(instancesOf(pool).length)), instancesOf(pool).length === 1 ? " instance of " : " instances of ", whole(Object.keys(pool.models).length), Object.keys(pool.models).length === 1 ? " model" : " models"]),
    el("section", { class: "card" }, el("h2", {}, "Memory"),
      stack([{ kind: "in-use", amount: memory.used_bytes }, { kind: "pinned", amount: Math.max(0, memory.reserved_bytes - memory.used_bytes) }], memory.budget_bytes,
        `used ${bytes(memory.used_bytes)}, reserved ${bytes(memory.reserved_bytes)} of ${bytes(memory.budget_bytes)}`),
      el("ul", { class: "keys" }, key("in-use", "used ", el("b", {}, bytes(memory.used_bytes))), key("pinned", "reserved ", el("b", {}, bytes(memory.reserved_bytes))), key("free", "budget ", el("b", {}, bytes(memory.budget_bytes))))),
    el("p", { id: "pool-error", class: "error", role: "alert" }),
    Object.entries(pool.models).map(([name, model]) => modelCard(name, model, pool.may_control)));
  byId("pool-error").textContent = poolTrouble;
}

let poolTrouble = "";
const instancesOf = pool => Object.values(pool.models).flatMap(model => model.versions.flatMap(version => version.instances));

function modelCard(name, model, mayControl) {
  const act = action => async () => {
    try {
      poolTrouble = "";
      await ask(`/v1/pool/${encodeURIComponent(name)}/${action}`, { method: "POST" });
    } catch (error) {
      poolTrouble = error.message;
    }
    await refresh();
  };
  const rows = model.versions.flatMap(version => version.instances.length
    ? version.instances.map(one => [version.name, one.start, seconds(one.start_s), one.in_work, whole(one.served), bytes(one.memory_bytes), one.closing ? "closing" : "ready"])
    : [[version.name, "–", "–", "–", "–", "–", version.state]]);
  return el("section", { class: "card" },
    el("h2", {}, name, el("span", { class: `tag ${model.state}` }, model.state)),
    model.trouble ? el("p", { class: "error" }, model.trouble) : null,
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Instances of ${name}` }, el("table", {},
      el("thead", {}, el("tr", {}, ["version", "start", "took", "in work", "served", "memory", "state"].map(head => el("th", { scope: "col" }, head)))),
      el("tbody", {}, rows.map(([first, ...rest]) => el("tr", {}, el("th", { scope: "row" }, first), rest.map(cell => el("td", {}, String(cell)))))))),
    mayControl ? el("div", { class: "buttons" },
      ["sleep", "wake"].map(action => el("button", { type: "button", "data-name": `${action} ${name}`, onclick: act(action) }, action === "sleep" ? "Put to sleep" : "Wake", el("span", { class: "visually-hidden" }, ` ${name}`)))) : null);
}

async function choosePoolModel() {
  const models = (await getJson("/v1/models")).data.map(model => model.id);
  show(byId("pool-model"), models.map(name => el("option", {}, name)));
  poolModel = models[0] ?? "";
  byId("pool-model").addEventListener("change", event => { poolModel = event.target.value; });
}

// The tokens of an answer: tinted by their probability, marked where the draft chose them, read by pointer or arrows.

const tokensOf = box => [...box.querySelectorAll(".token")];

function tokenSpan({ text: content, logprob, top, isDrafted }) {
  const span = el("span", { class: ["token", isDrafted ? "drafted" : "", tintOf(logprob)].filter(Boolean).join(" ") }, content);
  span.facts = { content, logprob, top, isDrafted };
  return span;
}

const tintOf = logprob => logprob === null || logprob === undefined ? ""
  : logprob > Math.log(0.5) ? "sure" : logprob > Math.log(0.15) ? "unsure" : "unlikely";

function describeToken(span) {
  const { content, logprob, top, isDrafted } = span.facts;
  if (logprob === null || logprob === undefined) return [el("p", {}, isDrafted ? "chosen by the draft" : "ask for log-probabilities to see them here")];
  return [
    el("p", {}, el("code", {}, JSON.stringify(content)), ` ${percent(Math.exp(logprob), 1)} (logprob ${logprob.toFixed(3)})`,
      isDrafted ? el("span", { class: "tag" }, "drafted") : null),
    top?.length ? el("ol", { class: "candidates" }, top.map(each => el("li", {},
      el("code", {}, JSON.stringify(each.token)), stack([{ kind: "fetch", amount: Math.exp(each.logprob) }], 1, ""), el("b", {}, percent(Math.exp(each.logprob), 1))))) : null,
  ].filter(Boolean);
}

function selectToken(span) {
  const box = byId("transcript");
  for (const each of box.querySelectorAll(".chosen")) each.classList.remove("chosen");
  span?.classList.add("chosen");
  byId("token").replaceChildren(...(span ? describeToken(span) : []));
  for (const drawing of byId("token").querySelectorAll("svg")) drawing.setAttribute("aria-hidden", "true");
}

function makeTokens() {
  const box = byId("transcript");
  box.addEventListener("pointerover", event => {
    const span = event.target.closest?.(".token");
    if (span) selectToken(span);
  });
  box.addEventListener("keydown", event => {
    if (!["ArrowRight", "ArrowLeft"].includes(event.key)) return;
    const all = tokensOf(box), at = all.indexOf(box.querySelector(".chosen"));
    const next = all[Math.min(all.length - 1, Math.max(0, at + (event.key === "ArrowRight" ? 1 : -1)))];
    if (!next) return;
    event.preventDefault();
    selectToken(next);
    next.scrollIntoView({ block: "nearest" });
  });
}

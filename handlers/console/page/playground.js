// Chats and completions as any client sends them. Messages live in this page only.

const play = { messages: [], abort: null, last: null };
const EMPTY = "Nothing is stored: what you write is gone with this page.";
const isNarrow = () => matchMedia("(max-width: 900px)").matches;

function makePlayground() {
  const form = byId("ask"), prompt = byId("prompt");
  const update = () => {
    const isChat = form.elements.kind.value === "chat";
    for (const part of document.querySelectorAll(".chat-only")) part.hidden = !isChat;
    byId("forget").hidden = !isChat;
    byId("prompt-label").textContent = prompt.placeholder = isChat ? "Message" : "Text to continue";
    byId("send-hint").textContent = isChat ? "Enter sends, Shift + Enter begins a line" : "Ctrl + Enter sends";
    byId("token-legend").hidden = !byId("logprobs").checked;
    const kind = byId("form").value;
    byId("grammar-field").hidden = kind === "text" || kind === "json_object";
    byId("grammar-label").textContent = { json_schema: "Schema", regex: "Expression", choice: "Choices, a line each", grammar: "Grammar" }[kind] ?? "Schema";
  };
  form.addEventListener("change", update);
  form.addEventListener("submit", event => {
    event.preventDefault();
    send(prompt.value);
  });
  form.addEventListener("keydown", event => {
    if (event.key !== "Enter" || event.isComposing) return;
    const sends = event.ctrlKey || event.metaKey || (event.target === prompt && !event.shiftKey && form.elements.kind.value === "chat");
    if (!sends) return;
    event.preventDefault();
    form.requestSubmit();
  });
  prompt.addEventListener("input", fitPrompt);
  byId("stop").addEventListener("click", () => play.abort?.abort());
  byId("forget").addEventListener("click", () => {
    play.abort?.abort();
    play.messages = [];
    clearAnswers();
    prompt.focus();
  });
  byId("show-parameters").addEventListener("click", () => showParameters(byId("parameters").hidden));
  for (const button of document.querySelectorAll("[data-copy]"))
    button.addEventListener("click", () => copyText(button, byId(button.dataset.copy).textContent));
  showParameters(!isNarrow());
  makeTokens();
  update();
  clearAnswers();
}

function showParameters(isShown) {
  byId("parameters").hidden = !isShown;
  byId("show-parameters").setAttribute("aria-expanded", String(isShown));
}

function clearAnswers() {
  show(byId("transcript"), el("p", { class: "empty soft" }, EMPTY));
  selectToken(null);
  for (const id of ["ask-figures", "ask-error", "ask-state"]) byId(id).replaceChildren();
}

// As high as its text, up to a third of the window.
function fitPrompt() {
  const prompt = byId("prompt");
  prompt.rows = Math.min(8, Math.max(1, prompt.value.split("\n").length));
}

function parsed(id, label) {
  const content = byId(id).value.trim();
  if (!content) return undefined;
  try {
    return JSON.parse(content);
  } catch (error) {
    throw new Error(`${label}: ${error.message}`);
  }
}

// The request's path and body, as the form has them. Throws Error for what is no JSON.
function requestOf(prompt) {
  const form = byId("ask"), isChat = form.elements.kind.value === "chat";
  const body = {};
  if (poolModel) body.model = poolModel;
  if (isChat) {
    const system = byId("system").value.trim();
    body.messages = [...(system ? [{ role: "system", content: system }] : []), ...play.messages, { role: "user", content: prompt }];
  } else body.prompt = prompt;
  body.max_tokens = Number(byId("max-tokens").value);
  body.temperature = Number(byId("temperature").value);
  if (byId("seed").value) body.seed = Number(byId("seed").value);
  if (byId("stream").checked) Object.assign(body, { stream: true, stream_options: { include_usage: true } });
  if (byId("logprobs").checked) Object.assign(body, isChat ? { logprobs: true, top_logprobs: 5 } : { logprobs: 5 });
  const kind = byId("form").value, grammar = byId("grammar").value;
  if (kind === "json_object") body.response_format = { type: "json_object" };
  if (kind === "json_schema") body.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema: parsed("grammar", "Schema") ?? {} } };
  if (kind === "regex") body.structured_outputs = { regex: grammar };
  if (kind === "choice") body.structured_outputs = { choice: grammar.split("\n").filter(Boolean) };
  if (kind === "grammar") body.structured_outputs = { grammar };
  const tools = isChat ? parsed("tools", "Tools") : undefined;
  if (tools) Object.assign(body, { tools, tool_choice: byId("tool-choice").value });
  const adapter = byId("adapter-field").hidden ? "" : byId("adapter").value.trim();
  if (adapter) body.lora = adapter;
  if (byId("first-token").value) body.teneral = { first_token: byId("first-token").value };
  return { path: isChat ? "/v1/chat/completions" : "/v1/completions", body, isChat };
}

async function send(prompt) {
  if (play.abort) return;
  let request;
  byId("ask-error").textContent = "";
  try {
    request = requestOf(prompt);
  } catch (error) {
    byId("ask-error").textContent = error.message;
    return;
  }
  const { path, body, isChat } = request, box = byId("transcript");
  showCode(path, body);
  box.querySelector(".empty")?.remove();
  box.querySelector(".again")?.remove();
  if (!isChat) box.replaceChildren();
  const asked = el("p", { class: isChat ? "turn user" : "turn given" }, prompt);
  const target = el(isChat ? "div" : "p", { class: isChat ? "turn assistant" : "turn given" });
  box.append(asked, target);
  box.scrollTop = box.scrollHeight;
  const answer = { target, isChat, hasTokens: !isChat || Boolean(body.logprobs), body: isChat ? target.appendChild(el("div", { class: "markdown" })) : target,
    text: "", reasoning: "", reasoned: null, calls: [], usage: null, began: performance.now(), first: null, last: null, tokens: 0, drafted: 0, finish: "", frame: 0 };
  play.abort = new AbortController();
  showBusy(true);
  if (isChat) {
    byId("prompt").value = "";
    fitPrompt();
  }
  byId("ask-state").textContent = "Waiting for the first token …";
  let isKept = true;
  try {
    const response = await ask(path, { method: "POST", body: JSON.stringify(body), signal: play.abort.signal, headers: { "Content-Type": "application/json" } });
    if (body.stream) {
      for await (const data of eventsOf(response)) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        take(answer, chunk);
      }
    } else take(answer, await response.json());
    byId("ask-state").textContent = { length: "Stopped at the token limit.", tool_calls: "The model calls tools." }[answer.finish] ?? "";
  } catch (error) {
    const isStopped = error.name === "AbortError";
    byId("ask-state").textContent = isStopped ? "Stopped." : "";
    if (!isStopped) byId("ask-error").textContent = error instanceof AnswerError || !(error instanceof TypeError) ? error.message : "The server does not answer.";
    isKept = answer.text !== "";
  } finally {
    play.abort = null;
    showBusy(false);
    cancelAnimationFrame(answer.frame);
    draw(answer);
    finish(answer, prompt, asked, isKept);
  }
}

// Keep what was said for the next message; what was refused goes back where it was written.
function finish(answer, prompt, asked, isKept) {
  if (answer.reasoning) showReasoning(answer, true);
  showFigures(answer);
  if (!answer.isChat) return;
  if (!isKept) {
    answer.target.remove();
    asked.remove();
    if (!byId("prompt").value) byId("prompt").value = prompt;
    fitPrompt();
    return;
  }
  const kept = play.messages.length;
  play.messages.push({ role: "user", content: prompt }, { role: "assistant", content: answer.text });
  answer.target.append(el("p", { class: "actions" },
    el("button", { type: "button", class: "quiet copy", onclick: event => copyText(event.currentTarget, answer.text) }, "Copy"),
    el("button", { type: "button", class: "quiet again", onclick: () => {
      if (play.abort) return;
      play.messages.length = kept;
      answer.target.remove();
      asked.remove();
      send(prompt);
    } }, "Try again")));
  const box = byId("transcript");
  box.scrollTop = box.scrollHeight;
}

function showBusy(isBusy) {
  byId("stop").hidden = !isBusy;
  byId("send").hidden = isBusy;
  if (isBusy && document.activeElement === document.body) byId("prompt").focus();
}

// One chunk of a stream, or a whole answer.
function take(answer, chunk) {
  if (chunk.usage) answer.usage = chunk.usage;
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const { isChat } = answer, part = isChat ? choice.delta ?? choice.message ?? {} : choice;
  const content = (isChat ? part.content : part.text) ?? "";
  if (choice.finish_reason) answer.finish = choice.finish_reason;
  if (part.reasoning_content) answer.reasoning += part.reasoning_content;
  for (const call of part.tool_calls ?? []) addCall(answer, call);
  const drafted = chunk.teneral?.drafted_tokens ?? 0;
  const tokens = tokensIn(choice.logprobs, isChat);
  if (!content && !tokens.length && !part.reasoning_content && !part.tool_calls) return;
  answer.last = performance.now();
  answer.first ??= answer.last;
  if (answer.reasoning && content) answer.reasoned ??= answer.last;
  answer.text += content;
  answer.tokens += Math.max(1, tokens.length);
  answer.drafted += drafted;
  if (answer.hasTokens) {
    if (drafted) byId("token-legend").hidden = false;
    // A token's text may be a part of a character: where they do not add up to the text, the text is what counts.
    if (tokens.length && tokens.map(token => token.text).join("") === content)
      answer.body.append(...tokens.map((token, index) => tokenSpan({ ...token, isDrafted: index < drafted })));
    else if (content) answer.body.append(tokenSpan({ text: content, logprob: tokens.length === 1 ? tokens[0].logprob : null, top: tokens[0]?.top, isDrafted: drafted > 0 }));
  }
  byId("ask-state").textContent = `Answering … first token after ${seconds((answer.first - answer.began) / 1000)}`;
  if (!answer.frame) answer.frame = requestAnimationFrame(() => draw(answer));
}

// What has come, once a frame. A reader who has scrolled up stays there.
function draw(answer) {
  answer.frame = 0;
  const box = byId("transcript"), isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
  if (answer.reasoning) showReasoning(answer, false);
  if (!answer.hasTokens) patch(answer.body, markdown(answer.text));
  if (isAtEnd) box.scrollTop = box.scrollHeight;
}

function showReasoning(answer, isOver) {
  if (!answer.folded) {
    answer.folded = el("details", { class: "reasoning" }, el("summary"), el("div"));
    answer.target.prepend(answer.folded);
  }
  const took = ((answer.reasoned ?? answer.last) - answer.first) / 1000;
  answer.folded.firstChild.textContent = answer.reasoned || isOver ? `Reasoned for ${seconds(took)}` : `Reasoning … ${seconds(took)}`;
  answer.folded.lastChild.textContent = answer.reasoning;
}

function tokensIn(logprobs, isChat) {
  if (!logprobs) return [];
  if (isChat) return (logprobs.content ?? []).map(each => ({ text: each.token, logprob: each.logprob, top: each.top_logprobs }));
  return logprobs.tokens.map((token, index) => ({ text: token, logprob: logprobs.token_logprobs[index],
    top: Object.entries(logprobs.top_logprobs[index] ?? {}).map(([name, logprob]) => ({ token: name, logprob })).sort((a, b) => b.logprob - a.logprob) }));
}

function addCall(answer, call) {
  const index = call.index ?? answer.calls.length;
  answer.calls[index] ??= { name: "", args: "", place: answer.target.appendChild(el("code", { class: "call" })) };
  const one = answer.calls[index];
  one.name += call.function?.name ?? "";
  one.args += call.function?.arguments ?? "";
  one.place.textContent = `${one.name}(${one.args})`;
}

function showFigures(answer) {
  const usage = answer.usage, details = usage?.completion_tokens_details, count = usage?.completion_tokens ?? answer.tokens;
  const took = answer.first === null ? 0 : (answer.last - answer.first) / 1000;
  show(byId("ask-figures"), cards([
    answer.first !== null && ["first token", seconds((answer.first - answer.began) / 1000)],
    count > 1 && took > 0 && ["tokens a second", ((count - 1) / took).toFixed(1)],
    usage && ["prompt", `${whole(usage.prompt_tokens)} tokens`],
    usage?.prompt_tokens_details?.cached_tokens > 0 && ["of them cached", whole(usage.prompt_tokens_details.cached_tokens)],
    count > 0 && ["answer", `${whole(count)} tokens`],
    (details?.drafted_tokens ?? answer.drafted) > 0 && ["drafted", whole(details?.drafted_tokens ?? answer.drafted), "underlined in the answer: the draft chose them"],
    details?.accepted_prediction_tokens > 0 && ["proposals confirmed", `${whole(details.accepted_prediction_tokens)} of ${whole(details.accepted_prediction_tokens + details.rejected_prediction_tokens)}`],
  ]));
}

const quoted = content => `'${content.replaceAll("'", "'\\''")}'`;

function showCode(path, body) {
  const hasKey = root.dataset.key === "needed" || apiKey, json = JSON.stringify(body, null, 2);
  byId("curl").textContent = `curl ${body.stream ? "-N " : ""}${location.origin}${base}${path} \\\n  -H 'Content-Type: application/json' \\\n`
    + (hasKey ? "  -H \"Authorization: Bearer $TENERAL_API_KEY\" \\\n" : "") + `  -d ${quoted(json)}`;
  byId("python").textContent = [
    "import json", "import os", "from openai import OpenAI", "",
    `client = OpenAI(base_url=${JSON.stringify(`${location.origin}${base}/v1`)}, api_key=os.environ.get("TENERAL_API_KEY", "none"))`,
    `request = json.loads(r"""${json.includes('"""') ? json.replaceAll('"""', '\\"\\"\\"') : json}""")`,
    "own = {name: request.pop(name) for name in (\"teneral\", \"structured_outputs\", \"lora\") if name in request}",
    `request.setdefault("model", ${JSON.stringify(byId("model").textContent)})`,
    `answer = client.${path.includes("chat") ? "chat.completions" : "completions"}.create(**request, extra_body=own)`,
    ...(body.stream ? ["for chunk in answer:", "    if chunk.choices:", `        print(${path.includes("chat") ? 'chunk.choices[0].delta.content or ""' : "chunk.choices[0].text"}, end="", flush=True)`]
      : [`print(answer.choices[0].${path.includes("chat") ? "message.content" : "text"})`]),
  ].join("\n");
  byId("code").hidden = false;
}

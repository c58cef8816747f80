// Markdown as elements, as far as models write it. Text stays text, and only http and https become links.

const MAX_DEPTH = 8, MAX_INLINE_CHARS = 8000; // of quotes and lists; of a paragraph: beyond, it is shown as it is
const FENCE = /^ {0,3}(`{3,}|~{3,}) *([\w+#.-]*)/, HEADING = /^ {0,3}(#{1,6}) +(.*?)(?: +#+)? *$/, QUOTE = /^ {0,3}> ?/;
const RULE = /^ {0,3}(?:(?:- *){3,}|(?:\* *){3,}|(?:_ *){3,})$/, ITEM = /^( *)([-*+]|\d{1,9}[.)]) +(.*)$/;
const COLUMNS = /^ *\|? *:?-+:? *(?:\| *:?-+:? *)*\|? *$/;
const INLINE = new RegExp([
  /(?<ticks>`+)(?<code>[^]*?[^`])\k<ticks>(?!`)/, /\*\*(?<bold>\S(?:[^]*?\S)??)\*\*/, /~~(?<struck>[^]+?)~~/,
  /\*(?<slanted>[^\s*](?:[^*]*[^\s*])?)\*/, /(?<!\w)_(?<leaning>[^\s_](?:[^_]*[^\s_])?)_(?!\w)/,
  /\[(?<name>[^\]\n]+)\]\((?<to>https?:\/\/[^\s)]+)\)/, /(?<address>https?:\/\/[^\s<>"')\]]*[^\s<>"')\].,;:!?*_`~])/, /\\(?<literal>[!-/:-@[-`{-~])/,
].map(each => each.source).join("|"), "g");

const markdown = source => blocksOf(source.replaceAll("\r\n", "\n").split("\n"), 0);
const indentOf = line => line.length - line.trimStart().length;
const startsBlock = (line, next) => FENCE.test(line) || HEADING.test(line) || QUOTE.test(line) || RULE.test(line) || ITEM.test(line) || startsTable(line, next);
const startsTable = (line, next) => line.includes("|") && next !== undefined && next.includes("-") && COLUMNS.test(next);

function blocksOf(lines, depth) {
  const made = [];
  for (let at = 0; at < lines.length;) {
    const line = lines[at], fence = FENCE.exec(line), title = HEADING.exec(line);
    let end = at + 1;
    if (!line.trim()) { /* between blocks */ }
    else if (fence) {
      while (end < lines.length && !(lines[end].trim().startsWith(fence[1]) && !lines[end].trim().replaceAll(fence[1][0], ""))) end++;
      made.push(codeBlock(lines.slice(at + 1, end).join("\n"), fence[2]));
      end++;
    } else if (title) made.push(el("p", { class: `heading level-${title[1].length}` }, el("strong", {}, inline(title[2], depth))));
    else if (RULE.test(line)) made.push(el("hr"));
    else if (QUOTE.test(line) && depth < MAX_DEPTH) {
      while (end < lines.length && lines[end].trim() && (QUOTE.test(lines[end]) || !startsBlock(lines[end], lines[end + 1]))) end++;
      made.push(el("blockquote", {}, blocksOf(lines.slice(at, end).map(each => each.replace(QUOTE, "")), depth + 1)));
    } else if (ITEM.test(line) && depth < MAX_DEPTH) end = addList(made, lines, at, depth);
    else if (startsTable(line, lines[at + 1])) {
      for (end = at + 2; end < lines.length && lines[end].includes("|");) end++;
      made.push(tableOfLines([line, ...lines.slice(at + 2, end)], depth));
    } else {
      while (end < lines.length && lines[end].trim() && !startsBlock(lines[end], lines[end + 1])) end++;
      made.push(el("p", {}, inline(lines.slice(at, end).map(each => each.trimStart()).join("\n"), depth)));
    }
    at = end;
  }
  return made;
}

// Add the list that begins at a line; returns the line behind it.
function addList(made, lines, at, depth) {
  const [, { length: indent }, mark] = ITEM.exec(lines[at]), isOrdered = /\d/.test(mark), items = [];
  let width = 0;
  for (; at < lines.length; at++) {
    const line = lines[at], item = ITEM.exec(line);
    if (item && Math.abs(item[1].length - indent) < 2 && /\d/.test(item[2]) === isOrdered) {
      width = line.length - item[3].length;
      items.push([item[3]]);
    } else if (!line.trim()) {
      const next = lines.slice(at + 1).find(each => each.trim());
      if (next === undefined || !(indentOf(next) > indent || (ITEM.test(next) && /\d/.test(ITEM.exec(next)[2]) === isOrdered))) break;
      items.at(-1).push("");
    } else if (indentOf(line) > indent) items.at(-1).push(line.slice(Math.min(width, indentOf(line))));
    else if (lines[at - 1].trim() && !startsBlock(line, lines[at + 1])) items.at(-1).push(line);
    else break;
  }
  const start = isOrdered && Number.parseInt(mark, 10) !== 1 ? Number.parseInt(mark, 10) : null;
  made.push(el(isOrdered ? "ol" : "ul", { start }, items.map(content => el("li", {}, tight(blocksOf(content, depth + 1))))));
  return at;
}

// An item's first paragraph without its own margins.
const tight = ([first, ...rest]) => first?.tagName === "P" && !first.className ? [...first.childNodes, ...rest] : [first, ...rest];

function tableOfLines([head, ...rows], depth) {
  const cells = line => line.trim().replace(/^\||\|$/g, "").split("|").map(cell => inline(cell.trim(), depth));
  return el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Table" }, el("table", {},
    el("thead", {}, el("tr", {}, cells(head).map(cell => el("th", { scope: "col" }, cell)))),
    el("tbody", {}, rows.map(row => el("tr", {}, cells(row).map(cell => el("td", {}, cell)))))));
}

function codeBlock(content, language) {
  return el("div", { class: "code-block" }, el("p", { class: "language" }, language || "code"),
    el("button", { type: "button", class: "copy", onclick: event => copyText(event.currentTarget, content) }, "Copy"),
    el("pre", { tabindex: "0", role: "group", "aria-label": `Code${language ? ` in ${language}` : ""}` }, el("code", {}, content)));
}

function inline(content, depth) {
  if (content.length > MAX_INLINE_CHARS || depth > MAX_DEPTH) return [content];
  const made = [], inner = some => inline(some, depth + 1);
  let from = 0;
  for (const found of content.matchAll(INLINE)) {
    const { code, bold, struck, slanted, leaning, name, to, address, literal } = found.groups;
    if (found.index > from) made.push(content.slice(from, found.index));
    from = found.index + found[0].length;
    if (code !== undefined) made.push(el("code", {}, code));
    else if (bold !== undefined) made.push(el("strong", {}, inner(bold)));
    else if (struck !== undefined) made.push(el("del", {}, inner(struck)));
    else if ((slanted ?? leaning) !== undefined) made.push(el("em", {}, inner(slanted ?? leaning)));
    else if (literal !== undefined) made.push(literal);
    else made.push(el("a", { href: to ?? address, target: "_blank", rel: "noopener noreferrer" }, name ?? address));
  }
  if (from < content.length) made.push(content.slice(from));
  return made;
}

// Replace an element's children from the first that has changed on: earlier ones keep a reader's selection.
function patch(element, nodes) {
  let same = 0;
  while (same < nodes.length && same < element.childNodes.length && element.childNodes[same].isEqualNode(nodes[same])) same++;
  while (element.childNodes.length > same) element.lastChild.remove();
  element.append(...nodes.slice(same));
}

async function copyText(button, content) {
  const name = button.textContent;
  try {
    await navigator.clipboard.writeText(content); // browsers have it at https and localhost alone
    button.textContent = "Copied";
  } catch {
    button.textContent = "Select and copy it";
  }
  setTimeout(() => { button.textContent = name; }, 1500);
}

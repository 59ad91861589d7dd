// The subset of Markdown that models write, as DOM nodes. Text becomes text nodes and nothing else, so that no answer can
// add markup of its own; links lead to http and https addresses only, and images are not loaded.

const INLINE = /(`+)([\s\S]*?[^`])\1(?!`)|\*\*([^\s*](?:[\s\S]*?[^\s*])?)\*\*|(?<![\w*])\*([^\s*](?:[^*\n]*[^\s*])?)\*(?![\w*])|\[([^\]\n]+)\]\((https?:\/\/[^\s)]+)\)|(https?:\/\/[^\s<>)\]]*[^\s<>)\].,;:!?'"])/g;
const LIST = /^\s{0,6}(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;

export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** Shows `source` in `target`. While it grows, only the blocks that have changed are made anew. */
export function render(target, source) {
  const blocks = split(source);
  const shown = target.children;
  for (const [index, block] of blocks.entries()) {
    const text = block.lines.join("\n");
    const key = `${block.kind} ${text}`;
    if (shown[index]?.source === key) continue;
    const element = build(block, text);
    element.source = key;
    if (shown[index]) shown[index].replaceWith(element);
    else target.append(element);
  }
  while (shown.length > blocks.length) target.lastChild.remove();
}

function split(source) {
  const blocks = [];
  let block = null;
  let fence = "";
  const begin = (kind) => blocks.push((block = { kind, lines: [] }));
  for (const line of source.replace(/\r\n?/g, "\n").split("\n")) {
    const mark = /^\s{0,3}(```+|~~~+)/.exec(line)?.[1];
    if (fence) {
      if (mark?.startsWith(fence) && line.trim() === mark) [fence, block] = ["", null];
      else block.lines.push(line);
      continue;
    }
    if (mark) {
      fence = mark;
      begin("code");
    } else if (!line.trim()) {
      block = null;
    } else {
      const kind = kindOf(line, block);
      if (kind === "heading" || kind === "rule" || block?.kind !== kind) begin(kind);
      block.lines.push(line);
      if (kind === "heading" || kind === "rule") block = null;
    }
  }
  return blocks;
}

function kindOf(line, block) {
  if (/^#{1,6}\s/.test(line)) return "heading";
  if (/^\s{0,3}([-*_])(\s*\1){2,}\s*$/.test(line)) return "rule";
  if (/^\s{0,3}>/.test(line)) return "quote";
  const item = LIST.exec(line);
  if (item) return item[1] ? "ordered" : "list";
  if ((block?.kind === "list" || block?.kind === "ordered") && /^\s/.test(line)) return block.kind;
  return "text";
}

function build({ kind, lines }, text) {
  switch (kind) {
    case "code":
      return make("pre", { tabindex: "0" }, make("code", {}, text));
    case "heading":
      return make("h4", {}, ...inline(text.replace(/^#+\s+/, "").replace(/\s+#+\s*$/, "")));
    case "rule":
      return make("hr");
    case "quote":
      return make("blockquote", {}, ...inline(text.replace(/^\s{0,3}>\s?/gm, "")));
    case "list":
    case "ordered":
      return list(kind, lines);
    default:
      return make("p", {}, ...inline(text));
  }
}

function list(kind, lines) {
  const items = [];
  for (const line of lines) {
    const item = LIST.exec(line);
    if (item) items.push(item[2]);
    else items.push(`${items.pop() ?? ""}\n${line.trim()}`);
  }
  const element = make(kind === "list" ? "ul" : "ol", {}, ...items.map((item) => make("li", {}, ...inline(item))));
  const first = LIST.exec(lines[0])?.[1];
  if (first && first !== "1") element.setAttribute("start", first);
  return element;
}

function inline(text) {
  const nodes = [];
  let end = 0;
  for (const found of text.matchAll(INLINE)) {
    const [whole, , code, strong, emphasis, label, address, bare] = found;
    if (found.index > end) nodes.push(...broken(text.slice(end, found.index)));
    end = found.index + whole.length;
    if (code !== undefined) nodes.push(make("code", {}, code));
    else if (strong !== undefined) nodes.push(make("strong", {}, ...inline(strong)));
    else if (emphasis !== undefined) nodes.push(make("em", {}, ...inline(emphasis)));
    else nodes.push(link(address ?? bare, label ?? bare));
  }
  if (end < text.length) nodes.push(...broken(text.slice(end)));
  return nodes;
}

function broken(text) {
  return text.split("\n").flatMap((line, index) => (index ? [make("br"), line] : [line]));
}

function link(address, label) {
  return make("a", { href: address, target: "_blank", rel: "noopener noreferrer" }, label);
}

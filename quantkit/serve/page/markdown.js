// Answers as elements: paragraphs, headings, lists and code. Text stays text; nothing in it becomes HTML.

const FENCE = /^(\s*)(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^#{1,6}\s+(.*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const INLINE = /(`+)(.+?)\1(?!`)|\*\*(?=\S)(.+?)\*\*|(?<![\w*])\*(?![\s*])([^*\n]+?)\*(?![\w*])/gs;

export function made(name, kind, ...content) {
  const element = document.createElement(name);
  if (kind) element.className = kind;
  element.append(...content);
  return element;
}

// Shows a text that grows: only the last block is made again.
export class Renderer {
  #root;
  #last = null;
  #start = 0;

  constructor(root) {
    this.#root = root;
  }

  show(text) {
    const blocks = blocksOf(text.slice(this.#start));
    this.#last?.remove();
    this.#root.append(...blocks.map((block) => block.element));
    const last = blocks.at(-1);
    this.#last = last?.element ?? null;
    this.#start += last?.start ?? 0;
  }
}

function blocksOf(text) {
  const lines = text.split("\n");
  const starts = [];
  lines.reduce((start, line, at) => {
    starts[at] = start;
    return start + line.length + 1;
  }, 0);
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [element, end] = code(lines, at) ?? heading(lines, at) ?? list(lines, at) ?? paragraph(lines, at);
    blocks.push({ element, start: starts[at] });
    at = end;
  }
  return blocks;
}

function code(lines, at) {
  const [, indent, fence, language] = FENCE.exec(lines[at]) ?? [];
  if (fence === undefined) return null;
  const closing = (line) => line.trim().startsWith(fence) && /^[`~]+$/.test(line.trim());
  let end = at + 1;
  while (end < lines.length && !closing(lines[end])) end += 1;
  const own = lines.slice(at + 1, end).map((line) => (line.startsWith(indent) ? line.slice(indent.length) : line));
  const copy = made("button", "copy-code quiet", "Copy");
  copy.type = "button";
  copy.setAttribute("aria-label", "Copy code");
  const pre = made("pre", "", made("code", "", own.join("\n")));
  pre.tabIndex = 0; // to scroll it with the keyboard
  pre.setAttribute("role", "group");
  pre.setAttribute("aria-label", language ? `Code, ${language}` : "Code");
  return [made("div", "code", made("p", "head", made("span", "", language ?? ""), copy), pre), end + 1];
}

function heading(lines, at) {
  const found = HEADING.exec(lines[at]);
  if (!found) return null;
  const element = made("p", "heading");
  inline(element, found[1].replace(/\s+#+$/, ""));
  return [element, at + 1];
}

function list(lines, at) {
  if (!ITEM.test(lines[at])) return null;
  const open = []; // the lists around the current item, outermost first
  let end = at;
  let item = null;
  for (; end < lines.length; end += 1) {
    const found = ITEM.exec(lines[end]);
    if (found) {
      const [, { length: depth }, mark, text] = found;
      while (open.length > 1 && depth < open.at(-1).depth) open.pop();
      const ordered = /\d/.test(mark);
      if (!open.length || depth > open.at(-1).depth + 1) {
        const element = made(ordered ? "ol" : "ul");
        if (ordered) element.start = parseInt(mark, 10);
        item?.append(element);
        open.push({ depth, element });
      } else if (open.length === 1 && ordered !== (open[0].element.tagName === "OL")) {
        break;
      }
      item = made("li");
      inline(item, text);
      open.at(-1).element.append(item);
    } else if (lines[end].trim() && /^\s/.test(lines[end]) && !FENCE.test(lines[end])) {
      item.append("\n");
      inline(item, lines[end].trim());
    } else if (lines[end].trim() || !ITEM.test(lines[end + 1] ?? "")) {
      break;
    }
  }
  return [open[0].element, end];
}

function paragraph(lines, at) {
  let end = at + 1;
  const ends = (line) => !line.trim() || FENCE.test(line) || HEADING.test(line) || ITEM.test(line);
  while (end < lines.length && !ends(lines[end])) end += 1;
  const own = lines.slice(at, end);
  if (own.every((line) => line.startsWith("|"))) {
    const table = made("pre", "table", own.join("\n"));
    table.tabIndex = 0;
    table.setAttribute("role", "group");
    table.setAttribute("aria-label", "Table");
    return [table, end];
  }
  const element = made("p");
  inline(element, own.join("\n"));
  return [element, end];
}

function inline(element, text) {
  let at = 0;
  for (const found of text.matchAll(INLINE)) {
    const [whole, , literal, strong, emphasis] = found;
    element.append(text.slice(at, found.index));
    element.append(made(literal ? "code" : strong ? "strong" : "em", "", literal ?? strong ?? emphasis));
    at = found.index + whole.length;
  }
  element.append(text.slice(at));
}

// Markdown blocks to DOM elements. Everything is made by createElement and text nodes: the text of
// a model is untrusted, and no string of it is ever parsed as HTML.

import {highlight} from "./highlight.js";
import {parseInline} from "./inline.js";
import {parseMarkdown, parsePlain} from "./markdown.js";
import {formula} from "./math.js";

/** Create an element. attributes: its properties; "class" and "aria-*" are attributes. */
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class" || key.includes("-")) element.setAttribute(key, value);
    else element[key] = value;
  }
  element.append(...children);
  return element;
}

/** Create an icon: lines on a field of 20 by 20. path: of SVG. */
export function icon(path) {
  const names = ["svg", "path"].map(name =>
    document.createElementNS("http://www.w3.org/2000/svg", name),
  );
  names[0].setAttribute("viewBox", "0 0 20 20");
  names[0].setAttribute("aria-hidden", "true");
  names[1].setAttribute("d", path);
  names[0].append(names[1]);
  return names[0];
}

/**
 * Renders a text that grows. Blocks before the last one are final and keep their elements.
 *
 * pieces(start, length, shown): returns the nodes of a range of the source; `shown` replaces it.
 */
export class TextView {
  constructor(element, pieces) {
    this.element = element;
    this.pieces = pieces;
    this.clear();
  }

  /** Render again, once a library for formulas or code is there. */
  refresh = () => {
    if (this.isStale) return;
    this.isStale = true; // one rendering for all formulas
    queueMicrotask(() => {
      this.isStale = false;
      const {source, isPlain, isFinal} = this;
      this.clear();
      this.update(source, {isPlain, isFinal});
    });
  };

  clear() {
    this.element.replaceChildren();
    this.source = "";
    this.last = {start: 0, nodes: 0}; // the first block that may still change
  }

  /** Show a text. isFinal: parse all of it, since a later line may change an earlier block. */
  update(source, {isPlain, isFinal}) {
    const isSame = this.isFinal && isPlain === this.isPlain && source === this.source;
    if (isSame && this.element.childNodes.length) return;
    this.isFinal = isFinal;
    if (isFinal || isPlain !== this.isPlain || !source.startsWith(this.source)) this.clear();
    [this.isPlain, this.source] = [isPlain, source];
    this.element.classList.toggle("plain", isPlain);
    const {start, nodes} = this.last;
    while (this.element.childNodes.length > nodes) this.element.lastChild.remove();
    const blocks = (isPlain ? parsePlain : parseMarkdown)(source, start);
    const newest = source.lastIndexOf("\n") + 1; // a block is final if a whole line follows it
    for (const [n, block] of blocks.entries()) {
      const isOpen = n === blocks.length - 1 || blocks[n + 1].start >= newest;
      if (!isOpen)
        this.last = {start: blocks[n + 1].start, nodes: this.element.childNodes.length + 1};
      this.element.append(this.block(block));
    }
  }

  block(block) {
    switch (block.type) {
      case "plain":
        return make("span", {}, ...this.pieces(block.start, block.length));
      case "heading":
        return make(`h${Math.min(block.level + 2, 6)}`, {}, ...this.inline(block.content));
      case "paragraph":
        return make("p", {}, ...this.inline(block.content));
      case "rule":
        return make("hr");
      case "code":
        return this.code(block);
      case "math":
        return this.mathBlock(block);
      case "quote":
        return make("blockquote", {}, ...block.blocks.map(inner => this.block(inner)));
      case "list":
        return this.list(block);
      case "table":
        return this.table(block);
    }
  }

  code({language, lines}) {
    const source = lines.map(line => line.text).join("\n");
    const colored = highlight(source, language, this.refresh);
    const code = make("code", {}, ...this.codeLines(lines, colored ?? [{start: 0, end: Infinity}]));
    const button = make("button", {class: "quiet", type: "button", textContent: "Copy"});
    button.setAttribute("aria-label", "Copy code");
    button.onclick = () => copyText(source, button);
    const head = make(
      "div",
      {class: "code-head"},
      make("span", {textContent: language || "text"}),
      button,
    );
    // A scrolling element must take the focus, so that the keyboard can scroll it.
    const scrolling = make(
      "pre",
      {tabIndex: 0, role: "group", "aria-label": `Code, ${language || "text"}`},
      code,
    );
    return make("div", {class: "code"}, head, scrolling);
  }

  /** Return the nodes of code lines. colored: see `highlight`. */
  codeLines(lines, colored) {
    const nodes = [];
    let at = 0; // of the line in the code
    let n = 0; // the first colored range that ends after it
    for (const [number, {text, start}] of lines.entries()) {
      const end = at + text.length;
      while (n < colored.length && colored[n].start < end) {
        const from = Math.max(colored[n].start, at);
        const to = Math.min(colored[n].end, end);
        const pieces = to > from ? this.pieces(start + from - at, to - from) : [];
        const {kind} = colored[n];
        nodes.push(
          ...(kind && pieces.length ? [make("span", {class: `hl-${kind}`}, ...pieces)] : pieces),
        );
        if (colored[n].end > end) break;
        n++;
      }
      if (number < lines.length - 1) nodes.push(...this.pieces(start + text.length, 1, "\n"));
      at = end + 1;
      while (n < colored.length && colored[n].end <= at) n++;
    }
    return nodes;
  }

  mathBlock({lines, tex}) {
    const source = lines.flatMap(({text, start}, n) => [
      ...this.pieces(start, text.length),
      ...(n < lines.length - 1 ? this.pieces(start + text.length, 1, "\n") : []),
    ]);
    return make(
      "div",
      {class: "formula-block", tabIndex: 0, role: "group", "aria-label": "Formula"},
      this.math(tex, true, source),
    );
  }

  /** Return a formula's element: the formula, and its source where tokens are colored. */
  math(tex, isDisplay, source) {
    const shown = tex === null ? null : formula(tex, isDisplay, this.refresh);
    const code = make("code", {class: "source"}, ...source);
    const element = make("span", {class: isDisplay ? "formula display" : "formula"}, code);
    if (shown) element.append(make("span", {class: "shown"}, shown));
    return element;
  }

  list({number, isLoose, items}) {
    const list = make(number === null ? "ul" : "ol", isLoose ? {class: "loose"} : {});
    if (number !== null) list.start = number;
    for (const {checked, blocks} of items) {
      const item = make("li", {}, ...blocks.map(block => this.block(block)));
      if (checked !== null) {
        item.classList.add("task");
        const label = checked ? "done" : "open";
        item.prepend(
          make("input", {type: "checkbox", checked, disabled: true, "aria-label": label}),
        );
      }
      list.append(item);
    }
    return list;
  }

  table({align, head, rows}) {
    const row = (cells, name) =>
      make(
        "tr",
        {},
        ...cells.map((cell, n) => {
          return make(name, {class: align[n] ?? "left"}, ...this.inline(cell));
        }),
      );
    const table = make("table", {}, make("thead", {}, row(head, "th")));
    table.append(make("tbody", {}, ...rows.map(cells => row(cells, "td"))));
    return make("div", {class: "table", tabIndex: 0, role: "group", "aria-label": "Table"}, table);
  }

  inline(content) {
    return parseInline(content).flatMap(node => this.inlineNode(node));
  }

  inlineNode(node) {
    const children = () => node.children.flatMap(child => this.inlineNode(child));
    const texts = () =>
      node.parts.flatMap(({start, length}) => this.pieces(start, length, node.value));
    switch (node.type) {
      case "break":
        return [make("br")];
      case "code":
        return [make("code", {}, ...texts())];
      case "math":
        return [this.math(node.tex, node.isDisplay, texts())];
      case "strong":
      case "em":
      case "del":
        return [make(node.type, {}, ...children())];
      case "link":
        return [
          make("a", {href: node.href, rel: "noopener noreferrer", target: "_blank"}, ...children()),
        ];
      default:
        return texts();
    }
  }
}

/** Copy a text and show the result on the button for a moment. */
export async function copyText(text, button) {
  const label = button.textContent;
  button.textContent = (await writeClipboard(text)) ? "Copied" : "Not copied";
  setTimeout(() => {
    button.textContent = label;
  }, 1500);
}

async function writeClipboard(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text); // browsers have the clipboard on https and localhost only
  }
}

function copyBySelection(text) {
  const area = make("textarea", {value: text, class: "offscreen"});
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}

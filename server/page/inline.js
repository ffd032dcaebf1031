// The inline text of a Markdown block: emphasis, code, links. Ranges are source offsets.

const MAX_DEPTH = 16; // of nested emphasis: a deeper one would overflow the stack

/** Lines joined to one text, and the source offset of each. */
class Flat {
  constructor(lines) {
    this.text = lines.map(line => line.text).join("\n");
    this.lines = [];
    let at = 0;
    for (const line of lines) {
      this.lines.push({at, start: line.start});
      at += line.text.length + 1;
    }
  }

  /** Return the source offset of a position in `text`. */
  offset(position) {
    let low = 0;
    let high = this.lines.length - 1; // the last line that begins at or before it
    while (low < high) {
      const middle = Math.ceil((low + high) / 2);
      if (this.lines[middle].at <= position) low = middle;
      else high = middle - 1;
    }
    return this.lines[low].start + position - this.lines[low].at;
  }
}

/** Join lines without the white space around them. */
export const flatten = lines => new Flat(lines.map(trim));

/** Remove the white space around a line. */
export function trim(line) {
  const begin = line.text.length - line.text.trimStart().length;
  return {text: line.text.trim(), start: line.start + begin};
}

const ENTITIES = {amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0"};
const PUNCTUATION = /[!-/:-@[-`{-~\p{P}\p{S}]/u;
const PLAIN = /[^\\`*_~[!<&\nhH$]+/y; // characters without a meaning of their own

/** Return the inline nodes of a Flat. A node has children, or `parts`: ranges of the source. */
export function parseInline(flat) {
  const nodes = new InlineParser(flat).parse(0, flat.text.length, false);
  return nodes.map(node => toSource(flat, node));
}

class InlineParser {
  constructor(flat) {
    this.flat = flat;
    this.text = flat.text;
    this.unclosed = new Set(); // lengths of backtick runs, and formula marks, that nothing closes
    this.pairs = matchBrackets(this.text);
  }

  /** Return the nodes of text[begin:end]. inLink: links cannot hold links. */
  parse(begin, end, inLink) {
    const nodes = [];
    for (let at = begin; at < end;) {
      const [node, next] = this.take(at, end, inLink);
      addNode(nodes, node);
      at = next;
    }
    return pairDelimiters(nodes);
  }

  /** Return the node at a position, and the position after it. */
  take(at, end, inLink) {
    const found = this.takeSpecial(this.text[at], at, end, inLink);
    if (found && found[1] <= end) return found;
    PLAIN.lastIndex = at;
    const length = PLAIN.exec(this.text)?.[0].length ?? 1;
    const next = Math.min(at + length, end);
    return [{type: "text", start: at, end: next}, next];
  }

  takeSpecial(character, at, end, inLink) {
    switch (character) {
      case "\\":
        return this.takeMath(at) ?? this.takeEscape(at);
      case "$":
        return this.takeMath(at);
      case "`":
        return this.takeCode(at);
      case "\n":
        return [{type: "break", start: at, end: at + 1}, at + 1];
      case "*":
      case "_":
      case "~":
        return this.takeDelimiter(at, end);
      case "!":
        return this.text[at + 1] === "[" ? this.takeLink(at + 1, at, inLink) : null;
      case "[":
        return this.takeLink(at, at, inLink);
      case "<":
        return this.takeAngle(at, inLink);
      case "&":
        return this.takeEntity(at);
      default:
        return inLink ? null : this.takeUrl(at, end);
    }
  }

  takeEscape(at) {
    if (this.text[at + 1] === "\n") return [{type: "break", start: at, end: at + 2}, at + 2];
    if (!/[!-/:-@[-`{-~]/.test(this.text[at + 1] ?? "")) return null;
    return [{type: "text", start: at + 1, end: at + 2}, at + 2];
  }

  /** Formulas: their underscores and stars are not emphasis. */
  takeMath(at) {
    const open = this.text.slice(at, at + 2);
    const close = {"\\(": "\\)", "\\[": "\\]", $$: "$$"}[open];
    if (!close) return this.text[at] === "$" ? this.takeDollar(at) : null;
    if (this.unclosed.has(close)) return null;
    const end = this.text.indexOf(close, at + 2);
    if (end < 0) this.unclosed.add(close);
    return end < 0 ? null : this.mathNode(at, end + 2, 2, open !== "\\(");
  }

  /** A formula between single dollars; pandoc's rules tell it from amounts of money. */
  takeDollar(at) {
    const end = this.text.indexOf("$", at + 1);
    const isOpen = !/\w/.test(this.text[at - 1] ?? "") && /\S/.test(this.text[at + 1] ?? " ");
    if (end <= at + 1 || !isOpen || this.text.slice(at, end).includes("\n")) return null;
    const isClosed = /\S/.test(this.text[end - 1]) && !/\d/.test(this.text[end + 1] ?? "");
    return isClosed ? this.mathNode(at, end + 1, 1, false) : null;
  }

  mathNode(start, end, marks, isDisplay) {
    const tex = this.text.slice(start + marks, end - marks);
    return [{type: "math", start, end, tex, isDisplay}, end];
  }

  takeCode(at) {
    const length = runLength(this.text, at);
    let close = this.unclosed.has(length) ? -1 : this.text.indexOf("`", at + length);
    while (close >= 0) {
      const found = runLength(this.text, close);
      if (found === length) return [this.codeNode(at + length, close), close + length];
      close = this.text.indexOf("`", close + found);
    }
    this.unclosed.add(length);
    return [{type: "text", start: at, end: at + length}, at + length];
  }

  codeNode(start, end) {
    const inner = this.text.slice(start, end);
    const isPadded = /^[ \n][^]*[ \n]$/.test(inner) && inner.trim();
    return isPadded ? {type: "code", start: start + 1, end: end - 1} : {type: "code", start, end};
  }

  takeDelimiter(at, end) {
    const character = this.text[at];
    const size = Math.min(runLength(this.text, at), end - at);
    const before = this.text[at - 1] ?? " ";
    const after = this.text[at + size] ?? " ";
    const [spaceBefore, spaceAfter] = [/\s/.test(before), /\s/.test(after)];
    const [markBefore, markAfter] = [PUNCTUATION.test(before), PUNCTUATION.test(after)];
    const left = !spaceAfter && (!markAfter || spaceBefore || markBefore);
    const right = !spaceBefore && (!markBefore || spaceAfter || markAfter);
    const isWord = character === "_"; // snake_case is no emphasis
    const canOpen = isWord ? left && (!right || markBefore) : left;
    const canClose = isWord ? right && (!left || markAfter) : right;
    return [
      {type: "delimiter", character, size, canOpen, canClose, start: at, end: at + size},
      at + size,
    ];
  }

  /** A link, or an image as a link: the page loads nothing from elsewhere. */
  takeLink(open, start, inLink) {
    const close = this.pairs.get(open);
    if (inLink || close === undefined || this.text[close + 1] !== "(") return null;
    const rest = this.text.slice(close + 2, close + 4000);
    const found =
      /^\s*(?:<([^<>\n]*)>|((?:[^\s()\\]|\\.|\([^\s()]*\))*))(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/.exec(
        rest,
      );
    const href = found && safeUrl(found[1] ?? found[2]);
    if (!href) return null;
    const children = this.parse(open + 1, close, true);
    return [{type: "link", href, children}, close + 2 + found[0].length];
  }

  takeAngle(at, inLink) {
    const rest = this.text.slice(at, at + 2000);
    const line = /^<br[ \t]*\/?>/i.exec(rest);
    if (line) return [{type: "break", start: at, end: at + line[0].length}, at + line[0].length];
    const found = inLink ? null : /^<([a-z]+:[^\s<>]*)>/i.exec(rest);
    const href = found && safeUrl(found[1]);
    return href ? this.urlNode(at + 1, found[1].length, href, at + found[0].length) : null;
  }

  takeUrl(at, end) {
    if (/\w/.test(this.text[at - 1] ?? "")) return null;
    const found = /^https?:\/\/[^\s<>`*|]+/i.exec(this.text.slice(at, Math.min(end, at + 2000)));
    if (!found) return null;
    let url = found[0].replace(/[.,:;!?'"_~\]]+$/, "");
    while (url.endsWith(")") && url.split(")").length > url.split("(").length)
      url = url.slice(0, -1);
    const href = safeUrl(url);
    return href ? this.urlNode(at, url.length, href, at + url.length) : null;
  }

  urlNode(start, length, href, next) {
    const text = {type: "text", start, end: start + length};
    return [{type: "link", href, children: [text]}, next];
  }

  takeEntity(at) {
    const found = /^&(?:#(\d{1,7})|#x([\da-f]{1,6})|(\w{2,6}));/i.exec(
      this.text.slice(at, at + 12),
    );
    if (!found) return null;
    const code = found[1] ? parseInt(found[1]) : parseInt(found[2], 16);
    const value = found[3]
      ? ENTITIES[found[3]]
      : code > 0 && code < 0x110000 && String.fromCodePoint(code);
    return value
      ? [{type: "text", start: at, end: at + found[0].length, value}, at + found[0].length]
      : null;
  }
}

/** Return a node with source ranges in place of positions in the joined text. */
function toSource(flat, node) {
  if (node.children) return {...node, children: node.children.map(child => toSource(flat, child))};
  if (node.value)
    return {...node, parts: [{start: flat.offset(node.start), length: node.end - node.start}]};
  const parts = []; // one for each line: a quote's source has ">" between them
  for (let at = node.start; at < node.end;) {
    const line = flat.text.indexOf("\n", at);
    const stop = line < 0 || line >= node.end ? node.end : line + 1;
    parts.push({start: flat.offset(at), length: stop - at});
    at = stop;
  }
  return {...node, parts};
}

/** Return the length of the run of one character at a position. */
function runLength(text, at) {
  let end = at;
  while (text[end] === text[at]) end++;
  return end - at;
}

/** Return the position of each "[" -> that of its "]", in one pass. */
function matchBrackets(text) {
  const pairs = new Map();
  const open = [];
  for (let at = 0; at < text.length; at++) {
    if (text[at] === "\\") at++;
    else if (text[at] === "[") open.push(at);
    else if (text[at] === "]" && open.length) pairs.set(open.pop(), at);
  }
  return pairs;
}

/** Add a node. Adjacent texts become one. */
function addNode(nodes, node) {
  const last = nodes.at(-1);
  const joins =
    node.type === "text" &&
    last?.type === "text" &&
    !node.value &&
    !last.value &&
    last.end === node.start;
  if (joins) last.end = node.end;
  else nodes.push(node);
}

/** Replace pairs of delimiters by emphasis (the algorithm of CommonMark's appendix). */
function pairDelimiters(nodes) {
  const bottoms = new Map(); // a kind of closer -> index below which it has no opener
  for (let close = 0; close < nodes.length; close++) {
    const closer = nodes[close];
    if (closer.type !== "delimiter" || !closer.canClose) continue;
    const kind = closer.character + closer.canOpen + (closer.size % 3);
    let open = close - 1;
    while (open >= (bottoms.get(kind) ?? 0) && !canPair(nodes[open], closer)) open--;
    const isFound = open >= (bottoms.get(kind) ?? 0);
    if (!isFound || depthOf(nodes.slice(open, close)) > MAX_DEPTH) {
      bottoms.set(kind, close);
      continue;
    }
    close = wrap(nodes, open, close) - 1; // the closer may have characters left
    for (const [other, bottom] of bottoms) bottoms.set(other, Math.min(bottom, open));
  }
  return withoutDelimiters(nodes);
}

/** Turn delimiters without a partner into text. */
function withoutDelimiters(nodes) {
  const left = nodes.filter(node => node.children || node.end > node.start);
  return left.map(node => (node.type === "delimiter" ? {...node, type: "text"} : node));
}

/** Return the largest depth of emphasis in the nodes, plus 1. */
const depthOf = nodes => 1 + nodes.reduce((most, node) => Math.max(most, node.depth ?? 0), 0);

function canPair(opener, closer) {
  if (opener.type !== "delimiter" || !opener.canOpen || opener.character !== closer.character)
    return false;
  const [left, right] = [opener.end - opener.start, closer.end - closer.start];
  if (!left || !right) return false;
  if (closer.character === "~") return left === 2 && right === 2;
  const isInner = opener.canClose || closer.canOpen;
  return !(
    isInner &&
    (opener.size + closer.size) % 3 === 0 &&
    (opener.size % 3 || closer.size % 3)
  );
}

/** Wrap the nodes between two delimiters. Returns the closer's new index. */
function wrap(nodes, open, close) {
  const opener = nodes[open];
  const closer = nodes[close];
  const used = Math.min(2, opener.end - opener.start, closer.end - closer.start);
  opener.end -= used;
  closer.start += used;
  const type = closer.character === "~" ? "del" : used === 2 ? "strong" : "em";
  const children = withoutDelimiters(nodes.slice(open + 1, close));
  nodes.splice(open + 1, close - open - 1, {type, children, depth: depthOf(children)});
  return closer.start < closer.end ? open + 2 : open + 3;
}

/** Return a URL that is safe to link to, or null. Others (javascript:, data:) stay text. */
export function safeUrl(href) {
  if (!/^https?:\/\//i.test(href)) return null;
  try {
    return new URL(href).href;
  } catch {
    return null;
  }
}

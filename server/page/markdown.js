// The blocks of a Markdown text, with source offsets, so that tokens can be colored.
//
// Blocks hold lines {text, start}: `text` is a slice of the source that begins at offset `start`.
// HTML in the source stays text.

import {flatten, trim} from "./inline.js";

const MAX_DEPTH = 16; // of nested quotes and lists: deeper ones would overflow the stack
const FENCE = /^ {0,3}(`{3,}|~{3,})([^\n]*)$/;
const MATH = {$$: /\$\$[ \t]*$/, "\\[": /\\\][ \t]*$/}; // a line that opens a formula -> its end
const HEADING = /^ {0,3}(#{1,6})(?=[ \t]|$)/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const MARKER = /^(\s*)([-*+]|\d{1,9}[.)])(?=[ \t]|$)/;
const UNDERLINE = /^ {0,3}(=+|-+)[ \t]*$/;

/** Return the blocks of a Markdown text from an offset on. Each has `type` and `start`. */
export function parseMarkdown(source, from = 0) {
  return parseBlocks(splitLines(source, from), 0);
}

/** Return a block for each line, so that a growing plain text is rendered line by line. */
export function parsePlain(source, from = 0) {
  return splitLines(source, from).map(({text, start}) => {
    const length = Math.min(text.length + 1, source.length - start); // with its line break
    return {type: "plain", start, length};
  });
}

function splitLines(source, from) {
  let start = from;
  return source
    .slice(from)
    .split("\n")
    .map(text => {
      const line = {text, start};
      start += text.length + 1;
      return line;
    });
}

// Blocks ---------------------------------------------------------------------------------------

const BLOCKS = [
  takeFence,
  takeMath,
  takeHeading,
  takeRule,
  takeQuote,
  takeList,
  takeTable,
  takeIndented,
  takeParagraph,
];

function parseBlocks(lines, depth) {
  const blocks = [];
  for (let n = 0; n < lines.length;) {
    if (isBlank(lines[n])) {
      n++;
      continue;
    }
    const [block, next] = takeBlock(lines, n, depth);
    blocks.push({...block, start: lines[n].start});
    n = next;
  }
  return blocks;
}

/** Return the block that begins at line n, and the number of the line after it. */
function takeBlock(lines, n, depth) {
  if (depth >= MAX_DEPTH)
    return [{type: "paragraph", content: flatten(lines.slice(n))}, lines.length];
  for (const take of BLOCKS) {
    const found = take(lines, n, depth);
    if (found) return found;
  }
}

const isBlank = line => !line.text.trim();

/** Return the columns of white space before a line's text. A tab ends at a multiple of 4. */
function indentOf(line) {
  let columns = 0;
  for (const character of line.text) {
    if (character === " ") columns++;
    else if (character === "\t") columns += 4 - (columns % 4);
    else break;
  }
  return columns;
}

/** Return a line without its first `columns` columns of white space. */
function dedent(line, columns) {
  let taken = 0;
  let at = 0;
  while (taken < columns && " \t".includes(line.text[at] || "x")) {
    taken += line.text[at] === "\t" ? 4 - (taken % 4) : 1;
    at++;
  }
  return cut(line, at);
}

/** Return a line without its first `count` characters. */
const cut = (line, count) => ({text: line.text.slice(count), start: line.start + count});

function takeFence(lines, n) {
  const open = FENCE.exec(lines[n].text);
  if (!open || (open[1][0] === "`" && open[2].includes("`"))) return null;
  const close = new RegExp(`^ {0,3}${open[1][0]}{${open[1].length},}[ \\t]*$`);
  let end = n + 1;
  while (end < lines.length && !close.test(lines[end].text)) end++;
  const indent = indentOf(lines[n]);
  const body = lines.slice(n + 1, end).map(line => dedent(line, indent));
  const block = {type: "code", language: open[2].trim().split(/\s/)[0], lines: body};
  return [block, Math.min(end + 1, lines.length)];
}

/** A formula between lines of "$$", or of "\[" and "\]". Unclosed, it has all lines. */
function takeMath(lines, n) {
  const close = MATH[lines[n].text.trim()];
  if (!close || indentOf(lines[n]) > 3) return null;
  let end = n + 1;
  while (end < lines.length && !close.test(lines[end].text)) end++;
  const isClosed = end < lines.length;
  const body = lines.slice(n + 1, end).map(line => line.text);
  if (isClosed) body.push(lines[end].text.replace(close, ""));
  const taken = lines.slice(n, end + 1);
  return [{type: "math", lines: taken, tex: isClosed ? body.join("\n") : null}, n + taken.length];
}

function takeHeading(lines, n) {
  const found = HEADING.exec(lines[n].text);
  if (!found) return null;
  const line = cut(lines[n], found[0].length);
  const text = line.text.replace(/(^|[ \t])#+[ \t]*$/, "");
  return [{type: "heading", level: found[1].length, content: flatten([{...line, text}])}, n + 1];
}

function takeRule(lines, n) {
  return RULE.test(lines[n].text) ? [{type: "rule"}, n + 1] : null;
}

function takeQuote(lines, n, depth) {
  const inner = [];
  for (; n < lines.length; n++) {
    const found = QUOTE.exec(lines[n].text);
    // A paragraph in a quote may go on without its ">".
    const goesOn =
      inner.length && !isBlank(inner.at(-1)) && !isBlank(lines[n]) && !startsBlock(lines[n]);
    if (!found && !goesOn) break;
    inner.push(found ? cut(lines[n], found[0].length) : lines[n]);
  }
  return inner.length ? [{type: "quote", blocks: parseBlocks(inner, depth + 1)}, n] : null;
}

/** Return a list item's marker, or null. width: columns before the item's text. */
function markerOf(line) {
  const found = MARKER.exec(line.text);
  if (!found || RULE.test(line.text)) return null;
  const rest = cut(line, found[0].length);
  const spaces = indentOf(rest);
  const gap = isBlank(rest) || spaces > 4 ? 1 : spaces;
  const number = parseInt(found[2]);
  return {
    indent: indentOf(line),
    kind: found[2].at(-1),
    number,
    isEmpty: isBlank(rest),
    width: indentOf(line) + found[2].length + gap,
    text: dedent(rest, gap),
  };
}

function takeList(lines, n, depth) {
  const first = markerOf(lines[n]);
  if (!first || first.indent > 3) return null;
  const items = [];
  let isLoose = false;
  while (n < lines.length) {
    const marker = markerOf(lines[n]);
    if (!marker || marker.kind !== first.kind || marker.indent > 3) break;
    const [inner, next] = takeItem(lines, n, marker);
    items.push(parseItem(inner, depth));
    n = next;
    while (n < lines.length && isBlank(lines[n])) n++;
    if (n > next && n < lines.length && markerOf(lines[n])?.kind === first.kind) isLoose = true;
  }
  return [
    {type: "list", number: Number.isNaN(first.number) ? null : first.number, isLoose, items},
    n,
  ];
}

/** Return the lines of a list item, without their indentation, and the number of the next line. */
function takeItem(lines, n, marker) {
  const inner = [marker.text];
  let next = ++n; // after the last line that is not blank
  for (; n < lines.length; n++) {
    const line = lines[n];
    const indent = indentOf(line);
    if (isBlank(line)) {
      inner.push(line);
      continue;
    }
    // Models often indent bullets below "1." by two columns, one less than CommonMark requires.
    const isNested =
      indent >= marker.indent + 2 && (markerOf(line)?.kind ?? marker.kind) !== marker.kind;
    const goesOn = n === next && !startsBlock(line) && !markerOf(line) && !isBlank(inner.at(-1));
    if (indent < marker.width && !isNested && !goesOn) break;
    inner.push(dedent(line, Math.min(indent, marker.width)));
    next = n + 1;
  }
  return [inner.slice(0, inner.length - (n - next)), next];
}

function parseItem(lines, depth) {
  const box = /^\[([ xX])\][ \t]+/.exec(lines[0].text);
  const inner = box ? [cut(lines[0], box[0].length), ...lines.slice(1)] : lines;
  return {checked: box ? box[1] !== " " : null, blocks: parseBlocks(inner, depth + 1)};
}

function takeTable(lines, n) {
  if (!lines[n].text.includes("|") || n + 1 >= lines.length) return null;
  const marks = cellsOf(lines[n + 1]).map(cell => cell.text);
  if (!lines[n + 1].text.includes("-") || !marks.every(mark => /^:?-+:?$/.test(mark))) return null;
  const head = cellsOf(lines[n]);
  if (head.length !== marks.length) return null;
  const rows = [];
  for (n += 2; n < lines.length && !isBlank(lines[n]) && !startsBlock(lines[n]); n++) {
    rows.push(cellsOf(lines[n]).slice(0, head.length));
  }
  const contents = row => row.map(cell => flatten([cell]));
  return [
    {type: "table", align: marks.map(alignmentOf), head: contents(head), rows: rows.map(contents)},
    n,
  ];
}

function alignmentOf(mark) {
  const [left, right] = [mark.startsWith(":"), mark.endsWith(":")];
  return right ? (left ? "center" : "right") : "left";
}

/** Return the cells of a table's row as lines. A backslash keeps a pipe in its cell. */
function cellsOf(line) {
  const cells = [];
  let begin = 0;
  for (let at = 0; at <= line.text.length; at++) {
    if (line.text[at] === "\\") at++;
    else if (at === line.text.length || line.text[at] === "|") {
      cells.push(trim({text: line.text.slice(begin, at), start: line.start + begin}));
      begin = at + 1;
    }
  }
  if (cells.length > 1 && !cells[0].text) cells.shift();
  if (cells.length > 1 && !cells.at(-1).text) cells.pop();
  return cells;
}

function takeIndented(lines, n) {
  if (indentOf(lines[n]) < 4) return null;
  let end = n;
  for (let at = n; at < lines.length && (isBlank(lines[at]) || indentOf(lines[at]) >= 4); at++) {
    if (!isBlank(lines[at])) end = at + 1;
  }
  return [
    {type: "code", language: "", lines: lines.slice(n, end).map(line => dedent(line, 4))},
    end,
  ];
}

function takeParagraph(lines, n) {
  const first = n++;
  for (; n < lines.length && !isBlank(lines[n]); n++) {
    const line = UNDERLINE.exec(lines[n].text);
    if (line) {
      const level = line[1][0] === "=" ? 1 : 2;
      return [{type: "heading", level, content: flatten(lines.slice(first, n))}, n + 1];
    }
    if (startsBlock(lines[n]) || takeTable(lines, n)) break;
  }
  return [{type: "paragraph", content: flatten(lines.slice(first, n))}, n];
}

/** Whether a line ends the paragraph before it. */
function startsBlock(line) {
  const marker = markerOf(line);
  if (
    marker &&
    marker.indent < 4 &&
    !marker.isEmpty &&
    !(marker.number !== 1 && marker.number >= 0)
  )
    return true;
  if (MATH[line.text.trim()]) return true;
  return [FENCE, HEADING, RULE, QUOTE].some(start => start.test(line.text));
}

// Kinds of tokens, to count the experts of some of them.

export const KINDS = [
  ["all", "all"],
  ["word", "beginnings of words"],
  ["part", "rests of words"],
  ["number", "numbers"],
  ["mark", "punctuation"],
  ["space", "white space"],
  ["reasoning", "of the reasoning"],
  ["answer", "of the answer"],
  ["text", "with a text"],
];
const WORD = /[\p{L}\p{N}_]$/u;

/** Return the kind of a token's text. before: the text of the token before it. */
export function kindOf(text, before) {
  const core = text.trim();
  if (!core) return "space";
  if (/^\p{N}/u.test(core)) return "number";
  if (!/^[\p{L}_]/u.test(core)) return "mark";
  return core[0] === text[0] && WORD.test(before) ? "part" : "word";
}

/** Return a function: whether a token's number is of a kind; null: all are. */
export function keeper(routing, kind, pattern) {
  const {texts, spans} = routing;
  if (kind === "all" || (kind === "text" && !pattern)) return null;
  if (kind === "text") return token => texts[token].includes(pattern);
  if (kind === "reasoning" || kind === "answer") {
    const part = kind === "answer" ? "content" : kind;
    const tokens = new Set(spans[part].map(span => span.token));
    return token => tokens.has(token);
  }
  const first = spans.content[0]?.token; // it does not go on with a word of the reasoning
  const before = token => (token === first ? "" : (texts[token - 1] ?? ""));
  return token => kindOf(texts[token], before(token)) === kind;
}

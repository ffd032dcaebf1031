// Syntax colors of code blocks, by highlight.js, which is loaded at the first one.

const FOLDER = "./vendor/highlight/";
const LANGUAGES =
  "bash c cpp csharp css diff dockerfile go ini java javascript json kotlin lua makefile markdown " +
  "php python r ruby rust sql swift typescript xml yaml";
const ALIASES = {
  "c++": "cpp",
  "c#": "csharp",
  cc: "cpp",
  console: "bash",
  docker: "dockerfile",
  golang: "go",
  h: "c",
  hpp: "cpp",
  html: "xml",
  js: "javascript",
  jsonc: "json",
  jsx: "javascript",
  kt: "kotlin",
  make: "makefile",
  md: "markdown",
  patch: "diff",
  py: "python",
  python3: "python",
  rb: "ruby",
  rs: "rust",
  sh: "bash",
  shell: "bash",
  svg: "xml",
  toml: "ini",
  ts: "typescript",
  tsx: "typescript",
  yml: "yaml",
  zsh: "bash",
};
const NAMES = new Set(LANGUAGES.split(" "));
const NEEDS = {php: ["xml"], markdown: ["xml"]}; // languages within them
const MAX_LENGTH = 30_000; // characters: longer code has no colors
const ENTITIES = {amp: "&", lt: "<", gt: ">", quot: '"', "#x27": "'"};

const loading = new Map(); // a language -> the promise of its load
let library = null;

/** Return the name of a language that has colors, or null. */
function languageOf(name) {
  const lower = name.toLowerCase();
  const found = ALIASES[lower] ?? lower;
  return NAMES.has(found) ? found : null;
}

/** Load a language, once. */
function load(language) {
  if (!loading.has(language)) loading.set(language, fetchLanguage(language));
  return loading.get(language);
}

async function fetchLanguage(language) {
  const core = await import(FOLDER + "core.min.js");
  library = core.default;
  for (const name of [language, ...(NEEDS[language] ?? [])]) {
    const {default: grammar} = await import(`${FOLDER}${name}.min.js`);
    library.registerLanguage(name, grammar);
  }
}

/**
 * Return [{start, end, kind}] of a code, all of it, or null if it has no colors (yet).
 * onLoad: called once the colors are there.
 */
export function highlight(code, name, onLoad) {
  const language = languageOf(name);
  if (!language || code.length > MAX_LENGTH) return null;
  if (library?.getLanguage(language)) {
    const {value} = library.highlight(code, {language, ignoreIllegals: true});
    return readSpans(value);
  }
  load(language).then(onLoad, () => {}); // without the file the code stays plain
  return null;
}

/** Read the library's HTML, which has spans and entities only: nothing is parsed as HTML. */
function readSpans(html) {
  const spans = [];
  const open = [""];
  let at = 0;
  for (const [, kind, close, text] of html.matchAll(/<span class="([^"]*)">|(<\/span>)|([^<]+)/g)) {
    if (close) open.pop();
    else if (text === undefined) open.push(kind.replace(/^hljs-/, "").split(" ")[0] || open.at(-1));
    else {
      const plain = text.replace(/&(amp|lt|gt|quot|#x27);/g, (_, entity) => ENTITIES[entity]);
      spans.push({start: at, end: at + plain.length, kind: open.at(-1)});
      at += plain.length;
    }
  }
  return spans;
}

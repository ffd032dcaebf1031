// Formulas, by KaTeX, which is loaded at the first one.

import {make} from "./render.js";

const FOLDER = "page/vendor/katex/";
const HELD = "data-style";
const MAX_LENGTH = 4000; // characters of a formula
let loading = null;

/** Load the library, once. */
function load() {
  loading ??= new Promise((resolve, reject) => {
    document.head.append(make("link", {rel: "stylesheet", href: FOLDER + "katex.min.css"}));
    const script = make("script", {src: FOLDER + "katex.min.js"});
    script.onload = resolve;
    script.onerror = reject;
    document.head.append(script);
  });
  return loading;
}

/**
 * Return a formula's element, or null for a text that is none, or if the library is not there yet.
 * onLoad: called once it is.
 */
export function formula(source, isDisplay, onLoad) {
  if (source.length > MAX_LENGTH) return null;
  if (!window.katex) {
    load().then(onLoad, () => {}); // without the file the source stays
    return null;
  }
  try {
    const options = {displayMode: isDisplay, throwOnError: true, trust: refuse, strict: "ignore"};
    const tree = window.katex.__renderToDomTree(source, options);
    holdStyles(tree);
    const element = tree.toNode();
    for (const styled of element.querySelectorAll(`[${HELD}]`))
      styled.style.cssText = styled.getAttribute(HELD);
    return element;
  } catch {
    return null;
  }
}

/** Commands that make links or load images are errors. */
function refuse({command}) {
  throw new Error(`${command} is not allowed`);
}

/** Rename the attribute `style`: the page's policy blocks it, but not an element's own property. */
function holdStyles(node) {
  const {attributes} = node;
  if (attributes?.style) attributes[HELD] = attributes.style;
  if (attributes) delete attributes.style;
  for (const child of node.children ?? []) holdStyles(child);
}

// The tokens in the text: one span for each, colored by its expert.

import {expertColor} from "./routing.js";

const places = new WeakMap(); // a span -> {routing, token}
export const view = {layer: 0, picked: null, token: null}; // picked: {layer, expert} to find

/** Return a function that makes the nodes of a range of the source, for TextView. */
export function tokenPieces(getSource, getRouting, part) {
  return (start, length, shown) => {
    const routing = getRouting();
    const source = getSource();
    if (!routing) return [document.createTextNode(shown ?? source.slice(start, start + length))];
    const spans = routing.spans[part];
    if (shown !== undefined) return [node(shown, routing, spanAt(spans, start))];
    return split(source, start, start + length, routing, spans);
  };
}

function split(source, start, end, routing, spans) {
  const nodes = [];
  for (let at = start; at < end;) {
    const span = spanAt(spans, at);
    const stop = Math.min(end, span ? span.end : nextStart(spans, at));
    nodes.push(node(source.slice(at, stop), routing, span));
    at = stop;
  }
  return nodes;
}

/** Return the index of the first span that ends after an offset. */
function search(spans, offset) {
  let low = 0;
  let high = spans.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (spans[middle].end > offset) high = middle;
    else low = middle + 1;
  }
  return low;
}

function spanAt(spans, offset) {
  const span = spans[search(spans, offset)];
  return span && span.start <= offset ? span : null;
}

const nextStart = (spans, offset) => spans[search(spans, offset)]?.start ?? Infinity;

function node(text, routing, span) {
  if (!span) return document.createTextNode(text);
  const element = document.createElement("span");
  element.className = "token";
  element.textContent = text;
  places.set(element, {routing, token: span.token});
  paint(element);
  return element;
}

/** Return {routing, token} of a span, or undefined. */
export const placeOf = element => places.get(element);

/** Color all tokens below an element by `view`. */
export function paintAll(root) {
  for (const element of root.querySelectorAll(".token")) paint(element);
  root.classList.toggle("finding", Boolean(view.picked));
}

function paint(element) {
  const {routing, token} = places.get(element);
  const layer = Math.min(view.layer, routing.layers - 1);
  if (layer < 0) return;
  const {expert, weight} = routing.at(token, layer)[0];
  element.style.background = expertColor(expert, weight);
  const {picked} = view;
  const isFound =
    picked && picked.layer < routing.layers && routing.uses(token, picked.layer, picked.expert);
  element.classList.toggle("found", Boolean(isFound));
  element.classList.toggle(
    "current",
    view.token?.routing === routing && view.token.token === token,
  );
}

/** Move the mark of the current token. place: {routing, token} or null. */
export function markToken(root, place) {
  view.token = place;
  for (const element of root.querySelectorAll(".token.current"))
    element.classList.remove("current");
  for (const element of place ? root.querySelectorAll(".token") : []) {
    const found = places.get(element);
    if (found.routing === place.routing && found.token === place.token)
      element.classList.add("current");
  }
}

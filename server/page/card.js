// The card beside a token: its experts in every layer.

import {expertColor} from "./routing.js";
import {make} from "./render.js";
import {placeOf, view} from "./tokens.js";

const TABLE = {experts: 16, layers: 24}; // at most; a larger model gets a small map
const MAP = {width: 320, height: 240}; // pixels, at most

/** Show the card of the token under the pointer, or hide it. */
export function showCard(card, target) {
  const place = target && placeOf(target);
  card.style.display = place?.routing.layers ? "block" : "none";
  if (card.style.display === "none") return;
  const {routing, token} = place;
  const isSmall = routing.experts <= TABLE.experts && routing.layers <= TABLE.layers;
  const name = make("div", {
    class: "card-token",
    textContent: JSON.stringify(routing.texts[token]),
  });
  card.replaceChildren(name, ...(isSmall ? table(routing, token) : smallMap(routing, token)));
  moveNextTo(card, target.getBoundingClientRect());
}

function table(routing, token) {
  const head = make(
    "tr",
    {},
    ...["", ...Array(routing.experts).keys()].map(text => make("th", {textContent: text})),
  );
  const rows = Array.from({length: routing.layers}, (_, layer) => {
    const chosen = new Map(routing.at(token, layer).map(({expert, weight}) => [expert, weight]));
    const cells = Array.from({length: routing.experts}, (_, expert) =>
      cell(expert, chosen.get(expert)),
    );
    return make("tr", {}, make("th", {textContent: layer}), ...cells);
  });
  return [
    "Weights of its experts (columns) in each layer (rows)",
    make("table", {}, head, ...rows),
  ];
}

function cell(expert, weight) {
  if (weight === undefined) return make("td");
  const element = make("td", {textContent: weight.toFixed(2).replace(/^0/, "")});
  element.style.background = expertColor(expert, weight);
  return element;
}

/** A map of all layers, and the weights of the chosen layer as text. */
function smallMap(routing, token) {
  const layer = Math.min(view.layer, routing.layers - 1);
  const chips = routing.at(token, layer).map(({expert, weight}) => {
    const chip = make("span", {class: "chip", textContent: `${expert}: ${weight.toFixed(2)}`});
    chip.style.background = expertColor(expert, weight);
    return chip;
  });
  const text = `Experts and weights in layer ${layer}`;
  return [
    text,
    make("div", {class: "chips"}, ...chips),
    "All layers (rows) and experts (columns)",
    drawMap(routing, token),
  ];
}

function drawMap(routing, token) {
  const column = Math.min(Math.max(MAP.width / routing.experts, 0.5), 8);
  const row = Math.min(Math.max(MAP.height / routing.layers, 1), 8);
  const scale = 2;
  const canvas = make("canvas", {
    width: scale * column * routing.experts,
    height: scale * row * routing.layers,
  });
  canvas.style.width = canvas.width / scale + "px";
  const context = canvas.getContext("2d");
  const style = getComputedStyle(document.body);
  for (let layer = 0; layer < routing.layers; layer++) {
    for (const {expert, weight} of routing.at(token, layer)) {
      context.fillStyle = style.color;
      context.globalAlpha = 0.25 + 0.75 * Math.min(weight, 1);
      context.fillRect(
        scale * column * expert,
        scale * row * layer,
        Math.max(scale * column, 3),
        scale * row - 1,
      );
    }
  }
  return canvas;
}

/** Put the card below the token, or above it where there is no room below. */
function moveNextTo(card, box) {
  const left = Math.min(box.left, innerWidth - card.offsetWidth - 8);
  const below = box.bottom + 6;
  const above = box.top - card.offsetHeight - 6;
  card.style.left = Math.max(8, left) + "px";
  card.style.top = Math.max(8, below + card.offsetHeight < innerHeight ? below : above) + "px";
}

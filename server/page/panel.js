// The experts panel: heat map, replay, color legend. What it counts: instrument.js.

import {distance, largestDifference} from "./compare.js";
import {HeatMap, drawScale} from "./heatmap.js";
import {Instrument} from "./instrument.js";
import {make} from "./render.js";
import {expertColor} from "./routing.js";
import {markToken, paintAll, view} from "./tokens.js";

const LEGEND = 12; // experts in the legend, at most
const REPLAY_SECONDS = 6;
const $ = id => document.getElementById(id);
const percent = share => (100 * share).toFixed(share < 0.0995 ? 1 : 0) + " %";
const points = share => `${share < 0 ? "\u2212" : "+"}${(100 * Math.abs(share)).toFixed(1)} points`;

export class ExpertsPanel {
  others = () => []; // answers to compare with, see Instrument

  /** log: the element with the answers' texts. page: see Instrument. */
  constructor(log, page) {
    this.log = log;
    this.message = null; // the answer
    this.answer = null; // {routing or null, counts}
    this.position = null; // tokens of a replay; null: all
    this.map = new HeatMap($("heat"), {
      onCell: () => this.showCell(),
      onPick: cell => this.pick(cell),
    });
    this.instrument = new Instrument(this, page);
    $("play").onclick = () => (this.playing ? this.stop() : this.play());
    $("position").oninput = () => this.seek(Number($("position").value));
    $("sorted").onchange = () => this.draw();
    $("layer").onchange = () => this.setLayer(Number($("layer").value));
    $("enlarge").onclick = () => this.enlarge();
    new ResizeObserver(() => this.draw()).observe($("map"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  /** Show an answer's experts. answer.routing is null for one whose tokens are not kept. */
  show(message, answer) {
    if (message !== this.message || !answer) this.reset();
    Object.assign(this, {message, answer});
    const isEmpty = !answer?.counts.layers;
    $("experts_empty").hidden = !isEmpty;
    $("experts_body").hidden = isEmpty;
    this.listOthers();
    if (isEmpty) return;
    this.fillLayers(answer.counts.layers);
    $("replay").hidden = !answer.routing;
    this.draw();
  }

  listOthers() {
    this.instrument.list();
  }

  reset() {
    this.stop();
    this.position = null;
    markToken(this.log, null);
    if (view.picked) this.pick(null);
  }

  fillLayers(layers) {
    if ($("layer").options.length === layers) return;
    const chosen = Math.min(view.layer, layers - 1);
    $("layer").replaceChildren(
      ...Array.from({length: layers}, (_, layer) => new Option(layer, layer)),
    );
    $("layer").value = view.layer = chosen;
  }

  draw() {
    if (!this.answer?.counts.layers || $("experts").hidden) return;
    const [counts, other] = this.instrument.shown(this.position);
    const {routing} = this.answer;
    const token = this.position ?? routing?.length;
    const isPathShown = routing && (this.position !== null || this.isLive);
    const path = isPathShown
      ? Array.from({length: routing.layers}, (_, layer) => routing.at(token - 1, layer))
      : [];
    const size = {width: $("map").clientWidth, height: this.mapHeight()};
    this.map.show({counts, other, sorted: $("sorted").checked, path, size});
    this.drawTexts(counts, other);
  }

  mapHeight() {
    const share = $("experts").classList.contains("large") ? 0.72 : 0.46;
    return Math.max(share * innerHeight, 160);
  }

  drawTexts(counts, other) {
    const largest = this.map.largest();
    drawScale($("scale"), other ? null : counts.even / largest, Boolean(other));
    $("scale_least").textContent = other ? points(-largest) : "0";
    $("scale_most").textContent = other ? points(largest) : `${percent(largest)} of the tokens`;
    $("experts_scope").textContent =
      `${counts.layers} layers, ${counts.experts} experts, ${counts.active} for each token. ` +
      `${this.instrument.scope(counts)}. Even load: ${percent(counts.even)}.`;
    this.drawReplay();
    this.drawLegend(counts);
    this.readOut();
  }

  drawReplay() {
    const {routing} = this.answer;
    if (!routing) return;
    const position = this.position ?? routing.length;
    $("position").max = routing.length;
    $("position").value = position;
    const text = JSON.stringify(routing.texts[position - 1] ?? "");
    $("position_text").textContent = `${position} of ${routing.length}: ${text}`;
  }

  drawLegend(counts) {
    const layer = Math.min(view.layer, counts.layers - 1);
    const ranking = counts.ranking(layer);
    const used = ranking.filter(expert => counts.share(layer, expert) > 0);
    const items = used.slice(0, LEGEND).map(expert => this.legendItem(counts, layer, expert));
    const others = used.length - items.length;
    if (others > 0) items.push(make("li", {class: "others", textContent: `and ${others} others`}));
    // New elements would take the focus away from a button at each token.
    const key =
      JSON.stringify(items.map(item => item.textContent + item.className)) +
      layer +
      JSON.stringify(view.picked);
    if (key !== this.legendKey && !$("legend").contains(document.activeElement)) {
      $("legend").replaceChildren(...items);
      this.legendKey = key;
    }
  }

  legendItem(counts, layer, expert) {
    const isPicked = view.picked?.layer === layer && view.picked.expert === expert;
    const swatch = make("span", {class: "swatch"});
    swatch.style.background = expertColor(expert);
    const text = `${expert} · ${percent(counts.share(layer, expert))}`;
    const button = make("button", {type: "button", "aria-pressed": String(isPicked)}, swatch, text);
    button.setAttribute(
      "aria-label",
      `Expert ${expert}, ${percent(counts.share(layer, expert))} of the tokens`,
    );
    button.onclick = () => {
      button.blur();
      this.pick({layer, expert});
    };
    return make("li", {}, button);
  }

  setLayer(layer) {
    view.layer = layer;
    paintAll(this.log);
    this.draw();
  }

  /** Highlight the tokens that used an expert; the same expert again: end the highlight. */
  pick(cell) {
    const isSame = cell && view.picked?.layer === cell.layer && view.picked.expert === cell.expert;
    view.picked = isSame ? null : cell;
    if (cell) $("layer").value = view.layer = cell.layer;
    paintAll(this.log);
    this.draw();
  }

  showCell() {
    if (!this.answer?.counts.layers || !this.map.counts) return;
    this.map.redraw();
    this.readOut();
  }

  /** Describe the cell under the pointer, the chosen one, or the whole map. */
  readOut() {
    const cell = this.map.cell ?? view.picked;
    const {counts, other} = this.map;
    const isCell = cell && cell.layer < counts.layers && cell.expert < counts.experts;
    const texts = other ? [describeDifference, summarizeDifference] : [describe, summarize];
    const text = isCell ? texts[0](counts, cell, other) : texts[1](counts, other);
    const more = isCell
      ? this.commonTexts(cell.layer, cell.expert)
      : (this.instrument.chance() ?? "");
    $("readout").textContent = text + more;
  }

  /** Return the tokens that an expert gets most often, as a sentence. */
  commonTexts(layer, expert) {
    const found = new Map();
    for (const {routing} of this.instrument.parts()) {
      if (!routing) continue;
      const keep = this.instrument.keep(routing);
      const length = routing === this.answer.routing ? this.position : null;
      for (let token = 0; token < (length ?? routing.length); token++) {
        if (!routing.uses(token, layer, expert) || (keep && !keep(token))) continue;
        found.set(routing.texts[token], (found.get(routing.texts[token]) ?? 0) + 1);
      }
    }
    const most = [...found]
      .sort((a, b) => b[1] - a[1])
      .slice(0, 4)
      .map(([text]) => JSON.stringify(text));
    return most.length ? ` Most often: ${most.join(", ")}.` : "";
  }

  // Replay -------------------------------------------------------------------------------------

  seek(position) {
    const {routing} = this.answer;
    this.position = Math.min(position, routing.length);
    markToken(this.log, {routing, token: this.position - 1});
    this.log.querySelector(".token.current")?.scrollIntoView({block: "nearest"});
    this.draw();
  }

  play() {
    const {routing} = this.answer;
    const speed = routing.length / REPLAY_SECONDS;
    const begin = this.position === null || this.position >= routing.length ? 0 : this.position;
    const start = performance.now();
    $("play").textContent = "Pause";
    const step = now => {
      const position = Math.floor(begin + ((now - start) / 1000) * Math.min(speed, 60)) + 1;
      this.seek(Math.min(Math.max(position, 1), routing.length));
      if (position >= routing.length) this.stop();
      else this.playing = requestAnimationFrame(step);
    };
    this.playing = requestAnimationFrame(step);
  }

  stop() {
    cancelAnimationFrame(this.playing);
    this.playing = 0;
    $("play").textContent = "Play";
  }

  enlarge() {
    const isLarge = $("experts").classList.toggle("large");
    $("enlarge").setAttribute("aria-pressed", String(isLarge));
    $("enlarge").textContent = isLarge ? "Make smaller" : "Enlarge";
    this.draw();
  }
}

function describe(counts, {layer, expert}) {
  const used = counts.values[layer * counts.experts + expert];
  const times = counts.even ? counts.share(layer, expert) / counts.even : 0;
  const effective = counts.effective(layer).toFixed(1);
  const share = percent(counts.share(layer, expert));
  return (
    `Layer ${layer}, expert ${expert}: ${used} of ${counts.tokens} tokens (${share}), ` +
    `${times.toFixed(1)} x the even load. ` +
    `Spread of the layer: ${effective} of ${counts.experts} experts.`
  );
}

function describeDifference(counts, {layer, expert}, other) {
  const shares = [counts, other].map(of => of.share(layer, expert));
  return (
    `Layer ${layer}, expert ${expert}: ${percent(shares[0])} of the tokens, ` +
    `${percent(shares[1])} in the other answer (${points(shares[0] - shares[1])}). ` +
    `Distance of the layer: ${distance(counts, other, layer).toFixed(2)}.`
  );
}

/** Return the largest difference, and the layers that differ most, as text. */
function summarizeDifference(counts, other) {
  if (!counts.tokens || !other.tokens) return "One of the answers has no such tokens.";
  const {layer, expert, value} = largestDifference(counts, other);
  const distances = Array.from({length: counts.layers}, (_, n) => distance(counts, other, n));
  const mean = distances.reduce((a, b) => a + b, 0) / counts.layers;
  const far = distances.indexOf(Math.max(...distances));
  return (
    `Mean distance of the layers: ${mean.toFixed(2)} (0: the same load, 1: no common expert). ` +
    `Farthest: layer ${far}, ${distances[far].toFixed(2)}. ` +
    `Largest difference: expert ${expert} of layer ${layer}, ${points(value)}.`
  );
}

/** Return the most used expert and the layer with the least spread, as text. */
function summarize(counts) {
  if (!counts.tokens) return "The answer has no such tokens.";
  const most = counts.values.indexOf(counts.values.reduce((a, b) => Math.max(a, b), 0));
  const layer = Math.floor(most / counts.experts);
  const expert = most % counts.experts;
  const spreads = Array.from({length: counts.layers}, (_, n) => counts.effective(n));
  const narrow = spreads.indexOf(Math.min(...spreads));
  const share = percent(counts.share(layer, expert));
  const least = spreads[narrow].toFixed(1);
  return (
    `Most used: expert ${expert} of layer ${layer}, ${share} of the tokens. ` +
    `Least spread: layer ${narrow}, ${least} of ${counts.experts} experts. ` +
    "Point at a cell, or move with the arrow keys."
  );
}

// The heat map: a row for each layer, a column for each expert, on a canvas.

import {distance, largestDifference} from "./compare.js";

const LIGHT = [
  "#f4f1ea",
  "#dcead9",
  "#a5d5c0",
  "#5bb3b5",
  "#2f86ab",
  "#2c5796",
  "#2b2c74",
  "#1c1443",
];
const DARK = [
  "#171a26",
  "#2a1f4e",
  "#56217a",
  "#8f2f86",
  "#cb4679",
  "#f1755b",
  "#fdb36a",
  "#fdf1b8",
];
// Less than in the other answer, the same, more.
const DIFFERENCE = {
  light: ["#1f4f9e", "#6d9fd3", "#c9dcee", "#f4f1ea", "#f6d3b4", "#e08a4a", "#a3480b"],
  dark: ["#9cc9ff", "#4f8fd6", "#26456f", "#171a26", "#5f3416", "#c9702a", "#ffc18a"],
};
const INK = {
  light: {text: "#5b6370", bar: "#9aa5b8", path: "#e0356b", halo: "#ffffff", mark: "#101623"},
  dark: {text: "#a3adbd", bar: "#58627a", path: "#7ef0ff", halo: "#0b0d14", mark: "#ffffff"},
};
const ROW = {least: 3, most: 34}; // pixels
const TOP = 5;
const GUTTER = 34;
const AXIS = 20;
const SPREAD = 58;
const GAP = 10;
const SMALLEST_CELL = 4; // pixels: smaller cells are drawn as one image

/** Whether the page is dark: by the switch, or by the system's setting. */
function isDark() {
  const theme = document.documentElement.dataset.theme;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

/** Return [r, g, b] of a value from 0 to 1. */
function colorOf(value, stops) {
  const at = Math.min(Math.max(value, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(at), stops.length - 2);
  const part = at - low;
  const [from, to] = [channels(stops[low]), channels(stops[low + 1])];
  return from.map((channel, n) => Math.round(channel + part * (to[n] - channel)));
}

const channels = hex => [1, 3, 5].map(n => parseInt(hex.slice(n, n + 2), 16));

/** Return 256 colors, so that a cell costs one look-up. Square roots separate small values. */
function palette(dark, isDifference) {
  if (!isDifference) {
    const stops = dark ? DARK : LIGHT;
    return Array.from({length: 256}, (_, n) => colorOf(Math.sqrt(n / 255), stops));
  }
  const stops = DIFFERENCE[dark ? "dark" : "light"];
  const spread = value => Math.sign(value) * Math.sqrt(Math.abs(value));
  return Array.from({length: 256}, (_, n) => colorOf((spread(n / 127.5 - 1) + 1) / 2, stops));
}

const css = ([r, g, b]) => `rgb(${r} ${g} ${b})`;

/** Draws Counts, and over them the path of one token through the layers. */
export class HeatMap {
  /** onCell: called with {layer, expert} or null when the pointer or the keyboard moves. */
  constructor(canvas, {onCell, onPick}) {
    Object.assign(this, {canvas, onCell, onPick, counts: null, orders: [], path: [], cell: null});
    canvas.onpointermove = event => this.point(event);
    canvas.onpointerleave = () => this.move(null);
    canvas.onclick = () => this.cell && onPick(this.cell);
    canvas.onkeydown = event => this.key(event);
    canvas.onblur = () => this.move(null);
  }

  /**
   * Draw.
   * counts: Counts. other: Counts to show the difference from, or null. sorted: order each layer's experts by load. path: [{expert, weight}] of each
   * layer, or []. size: {width, height} in pixels; the height is the most the map may take.
   */
  show({counts, other, sorted, path, size}) {
    Object.assign(this, {counts, other, path, dark: isDark()});
    this.colors = palette(this.dark, Boolean(other));
    this.orders = sorted
      ? Array.from({length: counts.layers}, (_, layer) => counts.ranking(layer))
      : [];
    this.measure(size);
    this.draw();
  }

  measure({width, height}) {
    const {layers, experts} = this.counts;
    const row = Math.floor((height - AXIS - TOP) / layers);
    this.row = Math.min(Math.max(row, ROW.least), ROW.most);
    this.column = (width - GUTTER - SPREAD - GAP) / experts;
    const scale = devicePixelRatio || 1;
    const total = this.top(layers) + AXIS;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(total * scale);
    this.canvas.style.height = total + "px";
    this.context = this.canvas.getContext("2d");
    this.context.setTransform(scale, 0, 0, scale, 0, 0);
  }

  /** Draw the same data, after the mark has moved. */
  redraw() {
    this.context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    this.draw();
  }

  draw() {
    const largest = this.largest();
    if (this.column < SMALLEST_CELL || this.row < SMALLEST_CELL) this.drawImage(largest);
    else this.drawCells(largest);
    this.drawLabels();
    this.drawSpread();
    if (this.path.length) this.drawPath();
    if (this.cell) this.drawMark();
  }

  /** Return the y of a row's upper edge. */
  top(layer) {
    return TOP + layer * this.row;
  }

  expertAt(layer, column) {
    return this.orders.length ? this.orders[layer][column] : column;
  }

  columnOf(layer, expert) {
    return this.orders.length ? this.orders[layer].indexOf(expert) : expert;
  }

  /** Return the value of the strongest color. */
  largest() {
    const {counts, other} = this;
    return (other ? Math.abs(largestDifference(counts, other).value) : counts.largest()) || 1;
  }

  color(layer, column, largest) {
    const expert = this.expertAt(layer, column);
    const share = this.counts.share(layer, expert) / largest;
    if (!this.other) return this.colors[Math.min(255, Math.round(255 * share))];
    const difference = share - this.other.share(layer, expert) / largest;
    return this.colors[Math.min(255, Math.max(0, Math.round(127.5 * (difference + 1))))];
  }

  // What a file of the map needs: figures.js --------------------------------------------------

  geometry() {
    const width = this.spreadLeft() + SPREAD;
    const height = this.top(this.counts.layers) + AXIS;
    return {width, height, ink: INK[this.dark ? "dark" : "light"].text};
  }

  /** Return {x, y, w, h, color, title} of each cell, and of the bars beside them. */
  cells() {
    const {layers, experts} = this.counts;
    const largest = this.largest();
    const bar = INK[this.dark ? "dark" : "light"].bar;
    const found = [];
    for (let layer = 0; layer < layers; layer++) {
      for (let column = 0; column < experts; column++) {
        const expert = this.expertAt(layer, column);
        const share = (100 * this.counts.share(layer, expert)).toFixed(1);
        found.push({
          x: GUTTER + column * this.column,
          y: this.top(layer),
          w: this.column - Math.min(1, this.column / 8),
          h: this.row - Math.min(1, this.row / 8),
          color: css(this.color(layer, column, largest)),
          title: `layer ${layer}, expert ${expert}: ${share} %`,
        });
      }
      const part = this.barOf(layer);
      const title = `layer ${layer}: ${this.other ? "distance" : "spread"} ${part.toFixed(2)}`;
      const [y, h] = [this.top(layer + 0.2), 0.6 * this.row];
      found.push({x: this.spreadLeft(), y, w: Math.max(part * SPREAD, 1), h, color: bar, title});
    }
    return found;
  }

  drawCells(largest) {
    const {layers, experts} = this.counts;
    const gap = this.column > 8 && this.row > 8 ? 2 : 0.75;
    for (let layer = 0; layer < layers; layer++) {
      for (let column = 0; column < experts; column++) {
        this.context.fillStyle = css(this.color(layer, column, largest));
        this.context.beginPath();
        this.context.roundRect(
          GUTTER + column * this.column,
          this.top(layer),
          this.column - gap,
          this.row - gap,
          gap === 2 ? 3 : 0.5,
        );
        this.context.fill();
      }
    }
  }

  /** One pixel a cell, scaled to the map's size: 40,000 rectangles would take too long. */
  drawImage(largest) {
    const {layers, experts} = this.counts;
    const small = new OffscreenCanvas(experts, layers);
    const image = new ImageData(experts, layers);
    for (let n = 0; n < layers * experts; n++) {
      const color = this.color(Math.floor(n / experts), n % experts, largest);
      image.data.set([...color, 255], 4 * n);
    }
    small.getContext("2d").putImageData(image, 0, 0);
    this.context.imageSmoothingEnabled = this.column < 1;
    this.context.drawImage(small, GUTTER, TOP, experts * this.column, layers * this.row);
  }

  drawLabels() {
    Object.assign(this.context, {
      fillStyle: INK[this.dark ? "dark" : "light"].text,
      font: "11px system-ui, sans-serif",
      textBaseline: "middle",
    });
    for (const {x, y, text, align} of this.labels()) {
      this.context.textAlign = align === "middle" ? "center" : align;
      this.context.fillText(text, x, y);
    }
  }

  /** Return {x, y, text, align} of the labels; align: "start", "middle" or "end". */
  labels() {
    const {layers, experts} = this.counts;
    const rows = ticks(layers, Math.ceil(16 / this.row)).map(layer => {
      return {x: GUTTER - 7, y: this.top(layer + 0.5), text: layer, align: "end"};
    });
    const y = this.top(layers) + AXIS / 2 + 2;
    const step = Math.ceil(26 / this.column);
    const columns = this.orders.length
      ? [{x: GUTTER, y, text: "most used first", align: "start"}]
      : ticks(experts, step).map(expert => {
          return {x: GUTTER + (expert + 0.5) * this.column, y, text: expert, align: "middle"};
        });
    const bars = this.other ? "distance" : "spread";
    return [...rows, ...columns, {x: this.spreadLeft(), y, text: bars, align: "start"}];
  }

  spreadLeft() {
    return GUTTER + this.counts.experts * this.column + GAP;
  }

  /** Return the length of a layer's bar, from 0 to 1: its effective experts, or its distance. */
  barOf(layer) {
    const {counts, other} = this;
    if (other) return distance(counts, other, layer);
    return counts.tokens ? counts.effective(layer) / counts.experts : 0;
  }

  /** A bar for each layer. */
  drawSpread() {
    this.context.fillStyle = INK[this.dark ? "dark" : "light"].bar;
    for (let layer = 0; layer < this.counts.layers; layer++) {
      const part = this.barOf(layer);
      const height = Math.max(this.row - (this.row > 8 ? 5 : 1), 1.5);
      this.context.beginPath();
      this.context.roundRect(
        this.spreadLeft(),
        this.top(layer) + (this.row - height) / 2 - 1,
        Math.max(part * SPREAD, 1),
        height,
        Math.min(height / 2, 3),
      );
      this.context.fill();
    }
  }

  center(layer, expert) {
    return [
      GUTTER + (this.columnOf(layer, expert) + 0.5) * this.column - 1,
      this.top(layer + 0.5) - 1,
    ];
  }

  /** A curve through the token's first expert of each layer, and a dot for each chosen expert. */
  drawPath() {
    const ink = INK[this.dark ? "dark" : "light"];
    const points = this.path.map((chosen, layer) => this.center(layer, chosen[0].expert));
    Object.assign(this.context, {lineJoin: "round", lineCap: "round"});
    for (const [style, width] of [
      [ink.halo, 4.5],
      [ink.path, 2],
    ]) {
      Object.assign(this.context, {strokeStyle: style, lineWidth: width});
      this.context.beginPath();
      this.context.moveTo(...points[0]);
      for (let n = 1; n < points.length; n++) this.curve(points[n - 1], points[n]);
      this.context.stroke();
    }
    for (const [layer, chosen] of this.path.entries()) {
      for (const {expert, weight} of chosen) this.dot(this.center(layer, expert), weight, ink);
    }
  }

  curve([x0, y0], [x1, y1]) {
    const middle = (y0 + y1) / 2;
    this.context.bezierCurveTo(x0, middle, x1, middle, x1, y1);
  }

  dot([x, y], weight, ink) {
    const most = Math.min(this.row / 2, 7);
    Object.assign(this.context, {fillStyle: ink.path, strokeStyle: ink.halo, lineWidth: 1.25});
    this.context.beginPath();
    this.context.arc(x, y, Math.max(1.25, most * Math.sqrt(Math.min(weight, 1))), 0, 2 * Math.PI);
    this.context.fill();
    if (most > 3) this.context.stroke();
  }

  drawMark() {
    const {layer, expert} = this.cell;
    Object.assign(this.context, {
      strokeStyle: INK[this.dark ? "dark" : "light"].mark,
      lineWidth: 1.5,
    });
    this.context.strokeRect(
      GUTTER + this.columnOf(layer, expert) * this.column - 1.5,
      this.top(layer) - 1.5,
      Math.max(this.column, 3) + 1,
      Math.max(this.row, 3) + 1,
    );
  }

  // Pointer and keyboard -----------------------------------------------------------------------

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    if (!this.counts) return;
    const column = Math.floor((event.clientX - box.left - GUTTER) / this.column);
    const layer = Math.floor((event.clientY - box.top - TOP) / this.row);
    const isInside =
      column >= 0 && column < this.counts.experts && layer >= 0 && layer < this.counts.layers;
    this.move(isInside ? {layer, expert: this.expertAt(layer, column)} : null);
  }

  key(event) {
    const step = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]}[
      event.key
    ];
    if (event.key === "Enter" && this.cell) this.onPick(this.cell);
    if (!step || !this.counts) return;
    event.preventDefault();
    if (!this.cell) return this.move({layer: 0, expert: this.expertAt(0, 0)});
    const clamp = (value, size) => Math.min(Math.max(value, 0), size - 1);
    const layer = clamp(this.cell.layer + step[0], this.counts.layers);
    const column = clamp(
      this.columnOf(this.cell.layer, this.cell.expert) + step[1],
      this.counts.experts,
    );
    this.move({layer, expert: this.expertAt(layer, column)});
  }

  move(cell) {
    if (cell?.layer === this.cell?.layer && cell?.expert === this.cell?.expert) return;
    this.cell = cell;
    this.onCell(cell);
  }
}

/** Return every `step`-th number below `size`; steps are 1, 2, 4, 8, ... */
function ticks(size, step) {
  const power = 2 ** Math.ceil(Math.log2(Math.max(step, 1)));
  return Array.from({length: Math.ceil(size / power)}, (_, n) => n * power);
}

/** Draw the color scale, with a tick at `even`, a part of its length, or null. */
export function drawScale(canvas, even, isDifference) {
  const colors = palette(isDark(), isDifference);
  const context = canvas.getContext("2d");
  [canvas.width, canvas.height] = [256, 12];
  for (let x = 0; x < 256; x++) {
    context.fillStyle = css(colors[x]);
    context.fillRect(x, 0, 1, 12);
  }
  if (even === null || even >= 1) return;
  context.fillStyle = isDark() ? "#ffffff" : "#101623";
  context.fillRect(Math.round(255 * even), 0, 2, 12);
}

/** Return a picture of the map on the page's background, as a PNG blob. */
export function pictureOf(canvas, background) {
  const picture = new OffscreenCanvas(canvas.width + 48, canvas.height + 48);
  const context = picture.getContext("2d");
  context.fillStyle = background;
  context.fillRect(0, 0, picture.width, picture.height);
  context.drawImage(canvas, 24, 24);
  return picture.convertToBlob({type: "image/png"});
}

// The experts that each token of an answer used.

const GROWTH = 2; // arrays grow by this factor

/** Experts and weights [T][L][A] of an answer's tokens, and the place of each token in the text. */
export class Routing {
  layers = 0;
  active = 0; // experts of one token in one layer
  experts = 0; // 1 + the largest index seen: the server does not send the number
  length = 0; // tokens
  chosen = new Uint16Array(0); // [T * L * A]
  weights = new Float32Array(0);
  texts = [];
  spans = {content: [], reasoning: []}; // {start, end, token} by part, ascending

  /** Add a token. experts and weights: [L][A]. part: "content", "reasoning" or null (not shown). */
  add(text, experts, weights, part, start, end) {
    if (!this.length) [this.layers, this.active] = [experts.length, experts[0]?.length ?? 0];
    if (part && end > start) this.spans[part].push({start, end, token: this.length});
    const size = this.layers * this.active;
    const offset = this.length * size;
    this.reserve(offset + size);
    this.chosen.set(experts.flat(), offset);
    this.weights.set(weights.flat(), offset);
    for (let n = offset; n < offset + size; n++)
      this.experts = Math.max(this.experts, this.chosen[n] + 1);
    this.texts.push(text);
    this.length++;
  }

  reserve(size) {
    if (size <= this.chosen.length) return;
    const grown = Math.max(size, GROWTH * this.chosen.length);
    const chosen = new Uint16Array(grown);
    const weights = new Float32Array(grown);
    chosen.set(this.chosen);
    weights.set(this.weights);
    [this.chosen, this.weights] = [chosen, weights];
  }

  /** Whether a token's experts have this shape. They differ after another model was loaded. */
  fits(experts) {
    return !this.length || (experts.length === this.layers && experts[0]?.length === this.active);
  }

  /** Return [{expert, weight}] of a token in a layer, the largest weight first. */
  at(token, layer) {
    const offset = (token * this.layers + layer) * this.active;
    const pairs = Array.from({length: this.active}, (_, n) => ({
      expert: this.chosen[offset + n],
      weight: this.weights[offset + n],
    }));
    return pairs.sort((a, b) => b.weight - a.weight);
  }

  uses(token, layer, expert) {
    const offset = (token * this.layers + layer) * this.active;
    return this.chosen.subarray(offset, offset + this.active).includes(expert);
  }

  /** Return the counts of the first `tokens` tokens. keep: a function of a token's number. */
  counts(tokens = this.length, keep = null) {
    if (keep) return this.filtered(tokens, keep);
    // The last result grows with a streamed answer: counting all tokens at each frame is too slow.
    const last = this.counted;
    const reuse = last && last.experts === this.experts && last.tokens <= tokens;
    const counts = reuse ? last : new Counts(this.layers, this.experts, this.active, 0);
    for (; counts.tokens < tokens; counts.tokens++) this.countToken(counts, counts.tokens);
    this.counted = counts;
    return counts;
  }

  filtered(tokens, keep) {
    const counts = new Counts(this.layers, this.experts, this.active, 0);
    for (let token = 0; token < tokens; token++) {
      if (!keep(token)) continue;
      this.countToken(counts, token);
      counts.tokens++;
    }
    return counts;
  }

  /** Return an object for IndexedDB. Weights have 16 bits: a part of the largest one. */
  pack() {
    const size = this.length * this.layers * this.active;
    const {layers, active, experts, texts, spans} = this;
    const largest = this.weights.subarray(0, size).reduce((a, b) => Math.max(a, b), 0) || 1;
    const weights = Uint16Array.from(this.weights.subarray(0, size), weight =>
      Math.round((65535 * Math.max(weight, 0)) / largest),
    );
    return {
      layers,
      active,
      experts,
      texts,
      spans,
      largest,
      weights,
      chosen: this.chosen.slice(0, size),
    };
  }

  /** Return the Routing of a packed object, or null without one. */
  static unpack(packed) {
    if (!packed) return null;
    const {layers, active, experts, texts, spans, largest, chosen} = packed;
    const weights = Float32Array.from(packed.weights, part => (largest * part) / 65535);
    const values = {layers, active, experts, texts, spans, chosen, weights, length: texts.length};
    return Object.assign(new Routing(), values);
  }

  countToken(counts, token) {
    let n = token * this.layers * this.active;
    for (let layer = 0; layer < this.layers; layer++) {
      for (let k = 0; k < this.active; k++)
        counts.values[layer * this.experts + this.chosen[n++]]++;
    }
  }
}

/** Return the bytes of 16-bit numbers as base64. */
function toBase64(numbers) {
  let text = "";
  for (const byte of new Uint8Array(numbers.buffer)) text += String.fromCharCode(byte);
  return btoa(text);
}

/** The number of tokens that chose each expert of each layer. */
export class Counts {
  constructor(layers, experts, active, tokens) {
    Object.assign(this, {layers, experts, active, tokens});
    this.values = new Uint32Array(layers * experts);
  }

  /** Return the share of tokens that chose an expert. */
  share(layer, expert) {
    return this.tokens ? this.values[layer * this.experts + expert] / this.tokens : 0;
  }

  largest() {
    return this.tokens ? this.values.reduce((a, b) => Math.max(a, b), 0) / this.tokens : 0;
  }

  /** The share of every expert if the router balanced its load perfectly. */
  get even() {
    return this.experts ? this.active / this.experts : 0;
  }

  /** Return Counts of the same shape without tokens. */
  blank() {
    return new Counts(this.layers, this.experts, this.active, 0);
  }

  /** Return a copy with columns for this many experts, of which the last have no tokens. */
  widened(experts) {
    const wide = new Counts(this.layers, experts, this.active, this.tokens);
    for (let layer = 0; layer < this.layers; layer++) {
      const row = this.values.subarray(layer * this.experts, (layer + 1) * this.experts);
      wide.values.set(row, layer * experts);
    }
    return wide;
  }

  /** Return the experts of a layer, the most used first. */
  ranking(layer) {
    const row = this.values.subarray(layer * this.experts, (layer + 1) * this.experts);
    return Array.from(row.keys()).sort((a, b) => row[b] - row[a]);
  }

  /** Return exp(entropy) of a layer's load: E if balanced, 1 if one expert has all tokens. */
  effective(layer) {
    const total = this.tokens * this.active;
    let entropy = 0;
    for (let expert = 0; expert < this.experts; expert++) {
      const part = this.values[layer * this.experts + expert] / total;
      if (part) entropy -= part * Math.log(part);
    }
    return Math.exp(entropy);
  }

  /** Return an object for JSON. 16 bits a cell keep a conversation small in localStorage. */
  pack() {
    const values = Uint16Array.from(this.values, value => Math.min(value, 65535));
    const {layers, experts, active, tokens} = this;
    return {layers, experts, active, tokens, values: toBase64(values)};
  }

  /** Return the counts of a packed object, or null if it is damaged. */
  static unpack(packed) {
    const {layers, experts, active, tokens, values} = packed ?? {};
    const isWhole = [layers, experts, active].every(count => Number.isInteger(count) && count > 0);
    const size = 2 * layers * experts; // bytes
    // Its base64 is as long as the counts need: nothing larger is allocated.
    if (!isWhole || !(tokens >= 0) || values?.length !== 4 * Math.ceil(size / 3)) return null;
    try {
      const bytes = Uint8Array.from(atob(values), character => character.charCodeAt(0));
      const counts = new Counts(layers, experts, active, tokens);
      counts.values.set(new Uint16Array(bytes.buffer));
      return counts;
    } catch {
      return null; // no base64, or an odd number of bytes
    }
  }
}

/** Return the color of an expert in the text. The golden angle separates neighbors' hues. */
export function expertColor(expert, weight = 1) {
  const hue = (expert * 137.508 + 12) % 360;
  const alpha = 0.1 + 0.9 * Math.min(weight, 1);
  // The lightness depends on the theme (base.css), so that text on it stays readable.
  const shade = "var(--expert-lightness) var(--expert-chroma)";
  return `oklch(${shade} ${hue.toFixed(1)} / ${alpha.toFixed(2)})`;
}

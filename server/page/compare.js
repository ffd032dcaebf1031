// The difference of two answers' experts.

import {Counts} from "./routing.js";

const SHUFFLES = 20; // of tokens, to see how far two answers differ by chance

/** Whether two Counts are of models with the same shape. */
export const isSameShape = (a, b) => a.layers === b.layers && a.active === b.active;

/** Return both Counts with the same number of columns. */
export function alike(a, b) {
  const experts = Math.max(a.experts, b.experts);
  return [a, b].map(counts => (counts.experts === experts ? counts : counts.widened(experts)));
}

/** Return the sum of several Counts. */
export function total(all) {
  if (all.length === 1) return all[0];
  const experts = Math.max(0, ...all.map(counts => counts.experts));
  const {layers, active} = all[0];
  const sum = new Counts(layers, experts, active, 0);
  for (const counts of all) {
    const {values} = counts.experts === experts ? counts : counts.widened(experts);
    values.forEach((value, n) => (sum.values[n] += value));
    sum.tokens += counts.tokens;
  }
  return sum;
}

/** Return how far two loads of a layer differ: 0 if they are equal, 1 without a common expert. */
export function distance(a, b, layer) {
  let sum = 0;
  for (let expert = 0; expert < a.experts; expert++)
    sum += Math.abs(a.share(layer, expert) - b.share(layer, expert));
  return sum / 2 / a.active;
}

/** Return the mean distance of the layers. */
export function meanDistance(a, b) {
  let sum = 0;
  for (let layer = 0; layer < a.layers; layer++) sum += distance(a, b, layer);
  return sum / a.layers;
}

/** Return the largest difference of a cell, as a share of the tokens, and its place. */
export function largestDifference(a, b) {
  const most = {value: 0, layer: 0, expert: 0};
  for (let layer = 0; layer < a.layers; layer++) {
    for (let expert = 0; expert < a.experts; expert++) {
      const value = a.share(layer, expert) - b.share(layer, expert);
      if (Math.abs(value) > Math.abs(most.value)) Object.assign(most, {value, layer, expert});
    }
  }
  return most;
}

/**
 * Return the mean distance that two answers would have by chance: that of random halves of their
 * tokens. sides: two lists of {routing, keep}, keep as of Routing.counts.
 */
export function chanceDistance(sides) {
  const tokens = sides.flatMap((parts, side) =>
    parts.flatMap(({routing, keep}) =>
      Array.from({length: routing.length}, (_, token) => ({side, routing, token})).filter(
        ({token}) => !keep || keep(token),
      ),
    ),
  );
  const first = tokens.filter(({side}) => !side).length;
  const {layers, active} = sides[0][0].routing;
  const experts = Math.max(...sides.flat().map(({routing}) => routing.experts));
  const next = generator(1);
  let sum = 0;
  for (let n = 0; n < SHUFFLES; n++) {
    shuffle(tokens, next);
    const halves = [tokens.slice(0, first), tokens.slice(first)].map(part => {
      const counts = new Counts(layers, experts, active, part.length);
      for (const {routing, token} of part) routing.countToken(counts, token);
      return counts;
    });
    sum += meanDistance(...halves);
  }
  return sum / SHUFFLES;
}

function shuffle(list, next) {
  for (let n = list.length - 1; n > 0; n--) {
    const other = Math.floor(next() * (n + 1));
    [list[n], list[other]] = [list[other], list[n]];
  }
}

/** Return a function of random numbers from 0 to 1: xorshift, so that a figure can be repeated. */
function generator(seed) {
  let state = seed;
  return () => {
    state ^= state << 13;
    state ^= state >>> 17;
    state ^= state << 5;
    return (state >>> 0) / 2 ** 32;
  };
}

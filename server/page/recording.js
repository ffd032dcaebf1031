// Files with the routing of answers, as `generate.py --save_routing` writes them.
//
// {"moe_fast_routing": 1, "model", "format", "answers": [{"prompt", "tokens" [T],
// "experts" [T][L][A], "weights" [T][L][A]}]}

import {Routing} from "./routing.js";

const VERSION = 1;
const FIX = "give one of generate.py --save_routing, or of Save Routing";

/** Return {model, format, answers: [{prompt, routing, text}]}. Raises Error with a message. */
export function readRecording(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error(`The file is not JSON: ${FIX}.`);
  }
  if (file?.moe_fast_routing !== VERSION || !Array.isArray(file.answers) || !file.answers.length)
    throw new Error(`The file has no routing of version ${VERSION}: ${FIX}.`);
  const answers = file.answers.map(readAnswer);
  const name = value => (typeof value === "string" ? value : "");
  return {model: name(file.model), format: name(file.format), answers};
}

function readAnswer({prompt, tokens, experts, weights} = {}) {
  const lists = [tokens, experts, weights];
  const isWhole =
    lists.every(list => Array.isArray(list) && list.length === tokens.length) && tokens.length;
  if (!isWhole) throw new Error(`An answer has not as many experts as tokens: ${FIX}.`);
  const routing = new Routing();
  let at = 0;
  tokens.forEach((token, n) => {
    if (!isToken(token, experts[n], weights[n], routing))
      throw new Error(`Token ${n} is not like the first one: ${FIX}.`);
    routing.add(token, experts[n], weights[n], "content", at, at + token.length);
    at += token.length;
  });
  return {prompt: typeof prompt === "string" ? prompt : "", routing, text: tokens.join("")};
}

/** Whether a token has a text, and experts and weights [L][A] as the tokens before it. */
function isToken(token, experts, weights, routing) {
  const isGrid = (grid, isValue) =>
    Array.isArray(grid) &&
    grid.length > 0 &&
    grid.every(
      row =>
        Array.isArray(row) && row.length === grid[0].length && row.length && row.every(isValue),
    );
  const isExpert = value => Number.isInteger(value) && value >= 0 && value < 65536;
  return (
    typeof token === "string" &&
    isGrid(experts, isExpert) &&
    isGrid(weights, Number.isFinite) &&
    weights.length === experts.length &&
    weights[0].length === experts[0].length &&
    routing.fits(experts)
  );
}

/** Return the text of a file with one answer. about: {model, format, prompt}. */
export function writeRecording(routing, {model, format, prompt}) {
  const numbers = Array.from({length: routing.length}, (_, token) =>
    Array.from({length: routing.layers}, (_, layer) => routing.at(token, layer)),
  );
  const pick = read => numbers.map(layers => layers.map(chosen => chosen.map(read)));
  const answer = {
    prompt,
    tokens: routing.texts,
    experts: pick(({expert}) => expert),
    weights: pick(({weight}) => Number(weight.toFixed(4))),
  };
  return JSON.stringify({moe_fast_routing: VERSION, model, format, answers: [answer]}) + "\n";
}

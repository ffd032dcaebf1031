// The text of an empty conversation, with examples to start from.

import {make} from "./render.js";

const CHAT = {
  text:
    "Turn on Colors to see each token's expert. Experts shows all layers of this " +
    "Mixture-of-Experts model.",
  examples: [
    ["Explain", "Explain in five sentences how a Mixture-of-Experts model chooses its experts."],
    ["Write code", "Write a Python function for the longest common prefix of a list, with a test."],
    ["Compare", "Compare bubble sort, merge sort and quicksort in a table: idea, time, memory."],
  ],
};
const CONTINUATION = {
  text: "This model has no chat template: it continues a text and does not answer questions. ",
  examples: [
    ["Continue a function", "import os\n\n\ndef find_files(directory, suffix):\n"],
    ["Continue a class", "class Stack:\n    def __init__(self):\n        self.items = []\n"],
    ["Continue a test", "import unittest\n\n\nclass TestParser(unittest.TestCase):\n"],
  ],
};

/** Return the elements of the welcome. send: called with an example's text. */
export function welcome({name, template}, send) {
  const title = template ? `Chat with ${name}` : `${name} continues your text`;
  const text = template ? CHAT.text : CONTINUATION.text + CHAT.text;
  const {examples} = template ? CHAT : CONTINUATION;
  const section = make("section", {class: "welcome"});
  section.append(make("h2", {textContent: title}), make("p", {textContent: text}));
  section.append(make("div", {class: "examples"}, ...examples.map(item => button(item, send))));
  return section;
}

function button([name, text], send) {
  const element = make("button", {type: "button", class: "example"});
  element.append(make("strong", {textContent: name}), make("span", {textContent: text.trim()}));
  element.onclick = () => send(text);
  return element;
}

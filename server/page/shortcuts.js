// Keyboard shortcuts, and the dialog that lists them.

import {make} from "./render.js";

const $ = id => document.getElementById(id);
const IS_MAC = /Mac|iPhone|iPad/.test(navigator.platform);
const CONTROL = IS_MAC ? "\u2318" : "Ctrl";

const LIST = [
  // keys, what they do, name of the action
  [["Enter"], "send"],
  [["Shift", "Enter"], "start a new line"],
  [["Esc"], "stop the answer, or close what is open"],
  [["\u2191"], "edit the last message, in an empty box"],
  [[CONTROL, "Shift", "O"], "new chat", "newChat"],
  [[CONTROL, "K"], "search the chats", "search"],
  [[CONTROL, "Shift", "\u2191"], "chat above", "chatAbove"],
  [[CONTROL, "Shift", "\u2193"], "chat below", "chatBelow"],
  [[CONTROL, "Shift", "Y"], "copy the last answer", "copyLast"],
  [[CONTROL, "Shift", "E"], "experts", "experts"],
  [[CONTROL, "Shift", "L"], "colors of the tokens", "colors"],
  [[CONTROL, ","], "settings", "settings"],
  [[CONTROL, "/"], "this list", "shortcuts"],
];
const KEYS = {ArrowUp: "\u2191", ArrowDown: "\u2193"};

/** Run an action of the list by its keys. actions: functions by name. */
export function connectShortcuts(actions) {
  addEventListener("keydown", event => {
    if (!(IS_MAC ? event.metaKey : event.ctrlKey) || event.altKey) return;
    const key = KEYS[event.key] ?? event.key.toUpperCase();
    const found = LIST.find(
      ([keys, , name]) => name && keys.at(-1) === key && keys.includes("Shift") === event.shiftKey,
    );
    if (!found || (document.querySelector("dialog[open]") && found[2] !== "shortcuts")) return;
    event.preventDefault();
    actions[found[2]]();
  });
  $("shortcut_list").replaceChildren(...LIST.flatMap(([keys, text]) => row(keys, text)));
}

function row(keys, text) {
  const kbds = keys.flatMap((key, n) => [
    ...(n ? ["\u2009"] : []),
    make("kbd", {textContent: key}),
  ]);
  return [make("dt", {}, ...kbds), make("dd", {textContent: text})];
}

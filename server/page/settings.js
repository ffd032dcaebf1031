// The settings: dialog, theme and switches. They are kept in the browser.

import * as store from "./store.js";

const NUMBERS = ["temperature", "top_p", "max_tokens"];
const KEPT = [...NUMBERS, "tools", "format", "theme"];
const $ = id => document.getElementById(id);

/** Return the sampling settings. Empty fields are left out: the server has defaults. */
export function samplingSettings() {
  const filled = NUMBERS.filter(name => $(name).value !== "");
  return Object.fromEntries(filled.map(name => [name, Number($(name).value)]));
}

/** Return {tools, error}: a list, and a message if the text is not a JSON list. */
export function readTools() {
  const text = $("tools").value.trim();
  const result = {tools: [], error: ""};
  try {
    if (text) result.tools = JSON.parse(text);
  } catch {
    result.tools = null;
  }
  if (!Array.isArray(result.tools)) {
    Object.assign(result, {tools: [], error: "The tools are not a JSON list. None are sent."});
  }
  $("tools_error").textContent = result.error;
  return result;
}

/** Fill the fields with the kept values. */
export function fillSettings() {
  const settings = store.loadSettings();
  for (const name of KEPT) if (settings[name] !== undefined) $(name).value = settings[name];
  $("key").value = store.loadKey();
  $("colors").checked = settings.colors ?? true;
  showColors();
}

/** Keep changes. onFormat and onTheme: called after a change of the view. */
export function connectSettings({onFormat, onTheme}) {
  const after = {format: onFormat, theme: () => setTheme(onTheme), tools: readTools};
  for (const name of KEPT) {
    $(name).onchange = () => {
      store.saveSettings({[name]: $(name).value});
      after[name]?.();
    };
  }
  $("colors").onchange = () => {
    store.saveSettings({colors: $("colors").checked});
    showColors();
  };
}

function showColors() {
  document.body.classList.toggle("colored", $("colors").checked);
}

function setTheme(onTheme) {
  const theme = $("theme").value;
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  onTheme();
}

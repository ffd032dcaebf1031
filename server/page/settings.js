// The settings: dialog, presets, theme and switches. They are kept in the browser.

import * as store from "./store.js";

const SAMPLING = ["temperature", "top_p", "top_k", "min_p", "seed", "max_tokens"];
const PRESET = ["temperature", "top_p", "top_k", "min_p"]; // a preset's fields
const KEPT = [...SAMPLING, "tools", "format", "theme", "thinking", "effort"];
const PRESETS = {
  Balanced: {temperature: "0.8", top_p: "1", top_k: "", min_p: ""},
  Precise: {temperature: "0.2", top_p: "0.9", top_k: "", min_p: ""},
  Greedy: {temperature: "0", top_p: "1", top_k: "", min_p: ""},
  Creative: {temperature: "1.1", top_p: "1", top_k: "", min_p: "0.05"},
};
const OWN = "own settings"; // the choice that is shown when the fields are no preset's
const $ = id => document.getElementById(id);

/** Return the settings of a request: {sampling, tools, thinking, effort, error}. */
export function requestSettings() {
  // Empty fields are left out: the server has defaults.
  const filled = SAMPLING.filter(name => $(name).value !== "");
  const sampling = Object.fromEntries(filled.map(name => [name, Number($(name).value)]));
  return {sampling, thinking: $("thinking").value, effort: $("effort").value, ...readTools()};
}

/** Return {tools, error}: a list, and a message if the text is not a JSON list. */
function readTools() {
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
  $("colors").checked = settings.colors ?? false;
  showColors();
  showPresets();
}

/** Keep changes. onFormat, onTheme and onColors: called after a change of the view. */
export function connectSettings({onFormat, onTheme, onColors}) {
  const after = {format: onFormat, theme: () => setTheme(onTheme), tools: readTools};
  for (const name of KEPT) {
    $(name).onchange = () => {
      store.saveSettings({[name]: $(name).value});
      after[name]?.();
      if (PRESET.includes(name)) showPresets();
    };
  }
  $("colors").onchange = () => {
    store.saveSettings({colors: $("colors").checked});
    showColors();
    onColors();
  };
  $("preset").onchange = () => usePreset($("preset").value);
  $("save_preset").onclick = savePreset;
  $("preset_name").onkeydown = event => {
    if (event.key !== "Enter") return;
    event.preventDefault(); // it would close the dialog
    savePreset();
  };
  $("delete_preset").onclick = deletePreset;
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

// Presets --------------------------------------------------------------------------------------

/** Return {name: fields} of the user's own presets. */
function ownPresets() {
  const {presets} = store.loadSettings();
  const isObject = value => value && typeof value === "object" && !Array.isArray(value);
  if (!isObject(presets)) return {};
  return Object.fromEntries(Object.entries(presets).filter(([, fields]) => isObject(fields)));
}

/** List the presets, and choose the one that the fields have. */
function showPresets() {
  const all = {...PRESETS, ...ownPresets()};
  const isShown = fields => PRESET.every(name => String(fields[name] ?? "") === $(name).value);
  const chosen = Object.keys(all).find(name => isShown(all[name])) ?? "";
  const options = Object.keys(all).map(name => new Option(name, name));
  $("preset").replaceChildren(...(chosen ? [] : [new Option(OWN, "")]), ...options);
  $("preset").value = chosen;
  $("delete_preset").hidden = !(chosen in ownPresets());
}

function usePreset(name) {
  const fields = {...PRESETS, ...ownPresets()}[name];
  if (!fields) return;
  for (const key of PRESET) $(key).value = fields[key] ?? "";
  store.saveSettings(Object.fromEntries(PRESET.map(key => [key, $(key).value])));
  showPresets();
}

function savePreset() {
  const name = $("preset_name").value.trim();
  if (!name) return $("preset_name").focus();
  const fields = Object.fromEntries(PRESET.map(key => [key, $(key).value]));
  store.saveSettings({presets: {...ownPresets(), [name]: fields}});
  $("preset_name").value = "";
  showPresets();
}

function deletePreset() {
  const presets = ownPresets();
  delete presets[$("preset").value];
  store.saveSettings({presets});
  showPresets();
}

// Conversations and settings in localStorage. Each conversation has a key of its own, so that
// two tabs do not overwrite each other's conversations.

const SETTINGS = "moe-fast:settings";
const CHAT = "moe-fast:chat:";
const DRAFT = "moe-fast:draft:";
const MAX_DEPTH = 64; // of versions within versions

/** localStorage, or an object with the same methods if the browser blocks it. */
function openStorage() {
  try {
    localStorage.getItem(SETTINGS);
    return localStorage;
  } catch {
    return new MemoryStorage();
  }
}

class MemoryStorage {
  items = new Map();
  get length() {
    return this.items.size;
  }
  key(n) {
    return [...this.items.keys()][n];
  }
  getItem(key) {
    return this.items.get(key) ?? null;
  }
  setItem(key, value) {
    this.items.set(key, value);
  }
  removeItem(key) {
    this.items.delete(key);
  }
}

const storage = openStorage();

/** Return the value of a key, or null if it is missing or not JSON. */
function read(key) {
  try {
    return JSON.parse(storage.getItem(key));
  } catch {
    return null;
  }
}

export function loadSettings() {
  const settings = read(SETTINGS);
  return isObject(settings) ? {...settings, system: text(settings.system)} : {};
}

/** Save some settings and leave the others. */
export function saveSettings(changes) {
  try {
    storage.setItem(SETTINGS, JSON.stringify({...loadSettings(), ...changes}));
  } catch {
    // Full storage: the settings hold until the page is closed.
  }
}

/** Return [{id, title, updated}] of all conversations, the newest first. */
export function listChats() {
  const keys = Array.from({length: storage.length}, (_, n) => storage.key(n));
  const chats = keys
    .filter(key => key.startsWith(CHAT))
    .map(key => loadChat(key.slice(CHAT.length)))
    .filter(Boolean);
  return chats
    .sort((a, b) => b.updated - a.updated)
    .map(({id, title, updated}) => ({id, title, updated}));
}

/** Return all conversations, the newest first. */
export function allChats() {
  return listChats().map(({id}) => loadChat(id));
}

/** Return a new id. Not crypto.randomUUID: browsers offer it on https and localhost only. */
export function newId() {
  return Date.now().toString(36) + Math.random().toString(36).slice(2, 8);
}

export function newChat(system = "") {
  return {id: newId(), title: "", named: false, updated: Date.now(), system, messages: []};
}

/** Return a conversation, or null if it does not exist. */
export function loadChat(id) {
  const chat = read(CHAT + id);
  return repairChat(id, chat);
}

/** Save a conversation. Returns false if the browser's storage is full. */
export function saveChat(chat) {
  const withoutMap = (name, value) => (name === "heat" ? undefined : value);
  // Full storage: the heat maps go before the text does.
  return write(chat) || write(chat, withoutMap);
}

function write(chat, replacer) {
  try {
    storage.setItem(CHAT + chat.id, JSON.stringify(chat, replacer));
    return true;
  } catch {
    return false;
  }
}

export function deleteChat(id) {
  storage.removeItem(CHAT + id);
  storage.removeItem(DRAFT + id);
}

/** Return {text, files}: what was written in a chat and not sent. */
export function loadDraft(id) {
  const draft = read(DRAFT + id);
  return isObject(draft) ? {text: text(draft.text), files: repairFiles(draft.files)} : EMPTY_DRAFT;
}

/** Keep a draft; an empty one is removed. */
export function saveDraft(id, draft) {
  if (!draft.text && !draft.files.length) return storage.removeItem(DRAFT + id);
  try {
    storage.setItem(DRAFT + id, JSON.stringify(draft));
  } catch {
    // Full storage: the input field still has it.
  }
}

/** Call `handler` when another tab changes a conversation. */
export function onOtherTab(handler) {
  addEventListener("storage", event => {
    if (!event.key || event.key.startsWith(CHAT)) handler();
  });
}

// What is kept may be of another version of the page, or changed by an extension or by hand: a
// field of the wrong type gets its default, a message of the wrong type is left out.

/** Return a chat from anywhere, such as an imported file, or null. It gets this id. */
export function repairChat(id, chat) {
  if (!isObject(chat) || !Array.isArray(chat.messages)) return null;
  return {
    id,
    title: text(chat.title),
    named: chat.named === true,
    updated: number(chat.updated),
    system: text(chat.system),
    messages: repairMessages(chat.messages, 0),
  };
}

const repairMessages = (messages, depth) =>
  messages.map(message => repairMessage(message, depth)).filter(Boolean);

function repairMessage(message, depth) {
  if (!isObject(message) || !ROLES.includes(message.role)) return null;
  const {role} = message;
  const content = text(message.content);
  if (role === "tool") return {role, content, tool_call_id: text(message.tool_call_id)};
  const branches = repairBranches(message.branches, depth);
  const files = repairFiles(message.files);
  if (role === "user") return {role, content, ...(files.length && {files}), ...branches};
  return {
    role,
    id: text(message.id) || newId(),
    content,
    ...branches,
    reasoning: text(message.reasoning),
    tool_calls: list(message.tool_calls).map(repairCall).filter(Boolean),
    finish: text(message.finish) || null,
    error: text(message.error),
    rate: text(message.rate),
    first: number(message.first),
    model: text(message.model),
    format: text(message.format),
    count: number(message.count),
    isFull: message.isFull === true,
    ...(isObject(message.usage) && {usage: repairUsage(message.usage)}),
    ...(isObject(message.heat) && {heat: message.heat}), // Counts.unpack checks it
  };
}

/** Return {branches}, or {} unless they are lists and one null, which marks the shown version. */
function repairBranches(branches, depth) {
  if (!Array.isArray(branches) || depth >= MAX_DEPTH) return {};
  const isShown = branches.filter(tail => tail === null).length === 1;
  const repaired = branches
    .map(tail => (Array.isArray(tail) ? repairMessages(tail, depth + 1) : tail))
    .filter(tail => tail === null || (Array.isArray(tail) && tail.length));
  return isShown && repaired.length > 1 ? {branches: repaired} : {};
}

const repairFiles = files =>
  list(files)
    .filter(isObject)
    .map(file => ({name: text(file.name), text: text(file.text)}));

function repairCall(call) {
  if (!isObject(call?.function)) return null;
  const {name, arguments: values} = call.function;
  return {
    id: text(call.id),
    type: "function",
    function: {name: text(name), arguments: text(values)},
  };
}

function repairUsage({completion, total, reasoning, isLeast}) {
  return {
    completion: number(completion),
    total: number(total),
    reasoning: number(reasoning),
    isLeast: isLeast === true,
  };
}

const EMPTY_DRAFT = {text: "", files: []};
const ROLES = ["user", "assistant", "tool"];
const isObject = value => value !== null && typeof value === "object" && !Array.isArray(value);
const text = value => (typeof value === "string" ? value : "");
const number = value => (Number.isFinite(value) && value >= 0 ? value : 0);
const list = value => (Array.isArray(value) ? value : []);

// The key lives as long as the tab: localStorage would keep it on the disk.
export function loadKey() {
  try {
    return sessionStorage.getItem("moe-fast:key") ?? "";
  } catch {
    return "";
  }
}

export function saveKey(key) {
  try {
    sessionStorage.setItem("moe-fast:key", key);
  } catch {
    // The input field still has it.
  }
}

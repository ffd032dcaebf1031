// Conversations and settings in localStorage. Each conversation has a key of its own, so that
// two tabs do not overwrite each other's conversations.

const SETTINGS = "moe-fast:settings";
const CHAT = "moe-fast:chat:";

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
  return read(SETTINGS) ?? {};
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
    .map(read)
    .filter(isChat);
  return chats
    .sort((a, b) => b.updated - a.updated)
    .map(({id, title, updated}) => ({id, title, updated}));
}

function isChat(value) {
  return Boolean(value?.id && Array.isArray(value.messages));
}

export function newChat(system = "") {
  // Not crypto.randomUUID: browsers offer it on https and localhost only.
  const id = Date.now().toString(36) + Math.random().toString(36).slice(2, 8);
  return {id, title: "", named: false, updated: Date.now(), system, messages: []};
}

/** Return a conversation, or null if it does not exist. */
export function loadChat(id) {
  const chat = read(CHAT + id);
  return isChat(chat) ? chat : null;
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
}

/** Call `handler` when another tab changes a conversation. */
export function onOtherTab(handler) {
  addEventListener("storage", event => {
    if (!event.key || event.key.startsWith(CHAT)) handler();
  });
}

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

// The list of conversations, with search, rename, delete and export.

import {icon, make} from "./render.js";

const ICONS = {
  Rename: "M4 16l1-4 8.5-8.5 3 3L8 15z",
  Export: "M10 3v9M6.5 9l3.5 3.5L13.5 9M4 16h12",
  Delete: "M5 5l10 10M15 5L5 15",
};
const BESIDE = 30; // characters of a found text before and after it

/**
 * Show the list. chats: as of store.listChats, with `snippet` in a search.
 * state: {openId, isRunning(id)}. actions: open(id), rename(id, title), remove(id), save(id).
 */
export function showChats(list, chats, state, actions) {
  list.replaceChildren(...chats.map(chat => chatItem(chat, state, actions)));
}

function chatItem(chat, {openId, isRunning}, actions) {
  const open = make("button", {type: "button", class: "chat", title: chat.title});
  open.append(make("span", {class: "chat-title", textContent: chat.title}));
  if (chat.snippet) open.append(make("span", {class: "snippet", textContent: chat.snippet}));
  if (chat.id === openId) open.setAttribute("aria-current", "true");
  open.onclick = () => actions.open(chat.id);
  const item = make("li", {}, open);
  if (isRunning(chat.id))
    item.prepend(make("span", {class: "live", role: "img", "aria-label": "An answer is written"}));
  const tool = (label, act) => {
    const button = make(
      "button",
      {type: "button", class: "icon", title: label},
      icon(ICONS[label]),
    );
    button.setAttribute("aria-label", `${label} ${chat.title}`);
    button.onclick = act;
    return button;
  };
  item.append(
    make(
      "span",
      {class: "chat-tools"},
      tool("Rename", () => editTitle(item, chat, actions)),
      tool("Export", () => actions.save(chat.id)),
      tool("Delete", () => actions.remove(chat.id)),
    ),
  );
  return item;
}

/** Return the chats whose title or messages have a text, with the place as `snippet`. */
export function searchChats(chats, query) {
  const wanted = query.trim().toLowerCase();
  if (!wanted) return chats.map(chat => ({...chat, snippet: ""}));
  return chats.flatMap(chat => {
    const texts = chat.messages.flatMap(message => [
      message.content,
      ...(message.files ?? []).map(file => file.name),
    ]);
    const found = texts.find(content => content.toLowerCase().includes(wanted));
    if (found === undefined && !chat.title.toLowerCase().includes(wanted)) return [];
    const text = found === undefined ? "" : snippet(found, wanted);
    return [{...chat, snippet: text === chat.title ? "" : text}];
  });
}

function snippet(content, wanted) {
  const at = content.toLowerCase().indexOf(wanted);
  const begin = Math.max(0, at - BESIDE);
  const end = at + wanted.length + BESIDE;
  const text = content.slice(begin, end).replace(/\s+/g, " ");
  return `${begin ? "\u2026" : ""}${text}${end < content.length ? "\u2026" : ""}`;
}

/** Turn a title into an input. Enter saves, Escape does not. */
function editTitle(item, chat, actions) {
  const input = make("input", {value: chat.title, maxLength: 100, "aria-label": "Title"});
  let isDone = false;
  const finish = title => {
    if (isDone) return; // replacing the list removes the input, which then loses the focus
    isDone = true;
    actions.rename(chat.id, title.trim() || chat.title);
  };
  input.onkeydown = event => {
    if (event.key === "Enter") finish(input.value);
    if (event.key === "Escape") finish(chat.title);
    event.stopPropagation(); // Escape stops the answer elsewhere
  };
  input.onblur = () => finish(input.value);
  item.replaceChildren(input);
  input.select();
}

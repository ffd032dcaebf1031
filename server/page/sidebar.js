// The list of conversations, with rename and delete.

import {make} from "./render.js";

/** Show the list. actions: open(id), rename(id, title), remove(id). */
export function showChats(list, chats, openId, actions) {
  list.replaceChildren(...chats.map(chat => chatItem(chat, chat.id === openId, actions)));
}

function chatItem(chat, isOpen, actions) {
  const open = make("button", {
    type: "button",
    class: "chat",
    textContent: chat.title,
    title: chat.title,
  });
  if (isOpen) open.setAttribute("aria-current", "true");
  open.onclick = () => actions.open(chat.id);
  const item = make("li", {}, open);
  const rename = make("button", {type: "button", class: "quiet", textContent: "Rename"});
  rename.setAttribute("aria-label", `Rename ${chat.title}`);
  rename.onclick = () => editTitle(item, chat, actions);
  const remove = make("button", {type: "button", class: "quiet", textContent: "Delete"});
  remove.setAttribute("aria-label", `Delete ${chat.title}`);
  remove.onclick = () => actions.remove(chat.id);
  item.append(make("span", {class: "chat-tools"}, rename, remove));
  return item;
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

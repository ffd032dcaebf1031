// Conversations as files: Markdown to read, JSON to import again.

import * as store from "./store.js";
import {contentWithFiles} from "./chat.js";
import {make} from "./render.js";

const KIND = "moe-fast chats"; // marks a file of ours
const NAMES = {user: "You", assistant: "Model", tool: "Tool result"};

/** Offer a text or a blob as a download. */
export function download(name, content, type = "text/plain") {
  const blob = content instanceof Blob ? content : new Blob([content], {type});
  const url = URL.createObjectURL(blob);
  make("a", {href: url, download: name}).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

/** Return chats as the text of a file that `importChats` reads. */
export function chatsToJson(chats) {
  return JSON.stringify({kind: KIND, version: 1, chats}, null, 1) + "\n";
}

/** Save the chats of a file under new ids; return them. Raises Error with a message to show. */
export function importChats(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON: give one that Export has written.");
  }
  // A list of messages, as generate.py's /save and most APIs have them, is a chat, too.
  const isMessages = Array.isArray(file) && file.every(message => message?.role);
  const chats = isMessages ? [fromMessages(file)] : (file?.chats ?? [file]);
  const repaired = (Array.isArray(chats) ? chats : [])
    .map(chat => store.repairChat(store.newId(), chat))
    .filter(chat => chat?.messages.length);
  if (!repaired.length) throw new Error("The file has no chats: give one that Export has written.");
  if (!repaired.every(chat => store.saveChat(chat)))
    throw new Error("The browser's storage is full: delete older chats first.");
  return repaired;
}

function fromMessages(messages) {
  const system = messages[0]?.role === "system" ? messages[0].content : "";
  const first = messages.find(message => message.role === "user")?.content;
  return {title: String(first ?? "Imported").slice(0, 60), updated: Date.now(), system, messages};
}

/** Return a chat as Markdown. */
export function chatToMarkdown(chat) {
  const parts = [`# ${chat.title}`];
  if (chat.system) parts.push(`## System\n\n${chat.system}`);
  for (const message of chat.messages) {
    const name =
      message.role === "assistant" && message.model ? message.model : NAMES[message.role];
    const calls = (message.tool_calls ?? []).map(
      ({function: {name, arguments: values}}) =>
        `Tool call ${name}:\n\n\`\`\`json\n${values}\n\`\`\``,
    );
    parts.push([`## ${name}`, contentWithFiles(message, true), ...calls].join("\n\n"));
  }
  return parts.join("\n\n") + "\n";
}

/** Return a file's name for a chat. */
export function fileName(chat, ending) {
  const name = chat.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "");
  return `${name.slice(0, 50) || "chat"}.${ending}`;
}

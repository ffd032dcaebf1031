// The message box: text, attached files, and a draft for each chat.

import {make} from "./render.js";
import * as store from "./store.js";

const MAX_FILE = 1 << 20; // bytes of an attached file
const NEW = "new"; // the key of the draft of a chat without messages
const $ = id => document.getElementById(id);

export class Composer {
  files = [];

  /** actions: send(text, files), isRunning(), stop(), editLast(), complain(text). */
  constructor(actions) {
    this.actions = actions;
    $("form").onsubmit = event => this.submit(event);
    $("text").onkeydown = event => this.key(event);
    $("text").oninput = () => this.changed();
    $("text").onpaste = event => this.take(event, event.clipboardData);
    $("attach").onclick = () => $("pick_files").click();
    $("pick_files").onchange = () => this.addFiles([...$("pick_files").files]);
    const center = $("center");
    center.ondragover = event => {
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault();
      center.classList.add("dropping");
    };
    center.ondragleave = event => {
      if (!center.contains(event.relatedTarget)) center.classList.remove("dropping");
    };
    center.ondrop = event => {
      center.classList.remove("dropping");
      this.take(event, event.dataTransfer);
    };
  }

  /** Show the draft of a chat. */
  open(chat) {
    this.draft = chat.messages.length ? chat.id : NEW;
    const {text, files} = store.loadDraft(this.draft);
    $("text").value = text;
    this.files = [...files];
    this.showFiles();
    this.grow();
  }

  changed() {
    store.saveDraft(this.draft, {text: $("text").value, files: this.files});
    this.grow();
  }

  submit(event) {
    event.preventDefault();
    if (this.actions.isRunning()) return this.actions.stop();
    const text = $("text").value;
    const {files} = this;
    if (!text.trim() && !files.length) return;
    $("text").value = "";
    this.files = [];
    this.changed();
    this.showFiles();
    this.actions.send(text, files);
  }

  /** Let the box grow with its text. */
  grow() {
    const text = $("text");
    const most = innerHeight / 3;
    text.style.height = "auto";
    text.style.overflowY = text.scrollHeight > most ? "auto" : "hidden";
    text.style.height = Math.min(text.scrollHeight, most) + "px";
  }

  key(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!this.actions.isRunning()) $("form").requestSubmit();
    }
    if (event.key === "ArrowUp" && !$("text").value && !this.actions.isRunning())
      if (this.actions.editLast()) event.preventDefault();
  }

  // Files --------------------------------------------------------------------------------------

  /** Take the files that were pasted or dropped. */
  take(event, transfer) {
    if (!transfer?.files.length) return;
    event.preventDefault();
    this.addFiles([...transfer.files]);
  }

  async addFiles(files) {
    const read = await Promise.all(files.map(readText));
    this.files.push(...read.filter(file => file.text !== undefined));
    $("pick_files").value = ""; // the same file may be picked again
    this.changed();
    this.showFiles();
    const refused = read.filter(file => file.why).map(file => `${file.name} ${file.why}`);
    if (refused.length) this.actions.complain(`Not attached: ${refused.join("; ")}.`);
    $("text").focus();
  }

  showFiles() {
    $("files").replaceChildren(...this.files.map(file => this.chip(file)));
  }

  chip(file) {
    const remove = make("button", {type: "button", class: "quiet", textContent: "\u00d7"});
    remove.setAttribute("aria-label", `Remove ${file.name}`);
    remove.onclick = () => {
      this.files = this.files.filter(other => other !== file);
      this.changed();
      this.showFiles();
    };
    return make("li", {class: "file"}, fileLabel(file), remove);
  }
}

/** Return {name, text}, or {name, why}: why the file is refused. */
async function readText(file) {
  const {name} = file;
  if (file.size > MAX_FILE) return {name, why: "is over 1 MB"};
  try {
    const text = new TextDecoder("utf-8", {fatal: true}).decode(await file.arrayBuffer());
    return text.includes("\0") ? {name, why: "is not a text"} : {name, text};
  } catch {
    return {name, why: "is not UTF-8 text"};
  }
}

/** Return a file's name and size as an element. */
export function fileLabel({name, text}) {
  const lines = text.split("\n").length - (text.endsWith("\n") ? 1 : 0);
  const size = make("span", {class: "hint", textContent: `${lines} line${lines === 1 ? "" : "s"}`});
  return make("span", {class: "file-name"}, make("strong", {textContent: name}), " ", size);
}

// The sidebar: which chats are listed, and what their buttons do.

import {make} from "./render.js";
import {searchChats, showChats} from "./sidebar.js";
import * as store from "./store.js";
import {chatToMarkdown, chatsToJson, download, fileName, importChats} from "./transfer.js";

const $ = id => document.getElementById(id);

export class ChatList {
  /**
   * page: openId() and isRunning(id) of the page; find(id): a chat; open(chat), start(): shows a
   * new one; stop(chat); toast(text, ...nodes).
   */
  constructor(page) {
    this.page = page;
    $("clear").onclick = () => page.start();
    $("search").oninput = () => this.show();
    $("search").onkeydown = event => this.keyInSearch(event);
    $("export").onclick = () =>
      download("moe-fast-chats.json", chatsToJson(store.allChats()), "application/json");
    $("import").onclick = () => $("pick_import").click();
    $("pick_import").onchange = () => this.take($("pick_import").files[0]);
  }

  show() {
    const {page} = this;
    const wanted = $("search").value;
    const chats = wanted.trim() ? searchChats(store.allChats(), wanted) : store.listChats();
    this.ids = chats.map(({id}) => id);
    // The list is rendered anew: a title that is being edited would be lost.
    if ($("chats").querySelector("input")) return;
    const state = {openId: page.openId(), isRunning: page.isRunning};
    showChats($("chats"), chats, state, {
      open: id => page.open(page.find(id) ?? store.newChat()),
      rename: (id, title) => this.rename(id, title),
      remove: id => this.remove(id),
      save: id => this.export(id),
    });
    $("no_chats").hidden = chats.length > 0;
    $("no_chats").textContent = wanted.trim() ? "No chat has this text." : "No chats yet.";
  }

  keyInSearch(event) {
    if (event.key === "Escape" && $("search").value) {
      $("search").value = "";
      this.show();
      event.stopPropagation();
    }
    if (event.key === "Enter" && this.ids.length) this.page.open(this.page.find(this.ids[0]));
  }

  /** Open the chat above (-1) or below (1) in the list. */
  step(by) {
    const at = this.ids.indexOf(this.page.openId());
    const to = at < 0 ? 0 : at + by;
    if (to >= 0 && to < this.ids.length) this.page.open(this.page.find(this.ids[to]));
  }

  rename(id, title) {
    const renamed = this.page.find(id);
    if (renamed) store.saveChat(Object.assign(renamed, {title, named: true}));
    $("chats").replaceChildren(); // the input
    this.show();
  }

  remove(id) {
    const removed = this.page.find(id);
    if (removed) this.page.stop(removed);
    const draft = store.loadDraft(id);
    store.deleteChat(id);
    if (id === this.page.openId()) this.page.start();
    this.show();
    const undo = make("button", {type: "button", textContent: "Undo"});
    undo.onclick = () => {
      if (removed) store.saveChat(removed);
      store.saveDraft(id, draft);
      $("toast").replaceChildren();
      this.show();
    };
    this.page.toast(`Deleted "${removed?.title ?? ""}".`, undo);
  }

  /** Save one chat as Markdown. */
  export(id) {
    const chat = this.page.find(id);
    if (chat) download(fileName(chat, "md"), chatToMarkdown(chat), "text/markdown");
  }

  async take(file) {
    if (!file) return;
    $("pick_import").value = "";
    try {
      const chats = importChats(await file.text());
      this.page.open(chats[0]);
      this.page.toast(`Imported ${chats.length} chat${chats.length === 1 ? "" : "s"}.`);
    } catch (error) {
      this.page.toast(error.message);
    }
  }
}

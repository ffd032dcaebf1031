// Scrolling with the answer, and opening and closing of the two side panels.

import * as store from "./store.js";

const NEAR_END = 40; // pixels
const WIDE = matchMedia("(min-width: 1100px)"); // room for the experts beside the text
const $ = id => document.getElementById(id);

/** Keeps the end of the conversation in sight until the user scrolls up. */
export class Follower {
  isFollowing = true;
  lastTop = 0;

  constructor(log, button) {
    Object.assign(this, {log, button});
    log.onscroll = () => this.onScroll();
    button.onclick = () => this.toEnd();
    // The view also gets smaller when the input grows: keep its end in sight.
    new ResizeObserver(() => this.follow()).observe(log);
  }

  toEnd() {
    this.isFollowing = true;
    this.follow();
  }

  follow() {
    if (!this.isFollowing) return;
    this.log.scrollTop = this.log.scrollHeight;
    this.lastTop = this.log.scrollTop;
  }

  onScroll() {
    const {scrollHeight, scrollTop, clientHeight} = this.log;
    const distance = scrollHeight - scrollTop - clientHeight;
    // Growing text moves the end away without the user: only a move up ends the following.
    if (distance < NEAR_END) this.isFollowing = true;
    else if (scrollTop < this.lastTop) this.isFollowing = false;
    this.lastTop = scrollTop;
    this.button.hidden = this.isFollowing;
  }
}

/** The sidebar and the experts panel. onExperts: called when the panel opens or closes. */
export class SidePanels {
  constructor(onExperts) {
    this.onExperts = onExperts;
    $("open_sidebar").onclick = () => this.openSidebar(!this.isSidebarOpen);
    $("shade").onclick = () => this.openSidebar(false);
    $("open_experts").onclick = () => this.chooseExperts($("experts").hidden);
    $("close_experts").onclick = () => this.chooseExperts(false);
    WIDE.addEventListener("change", () => this.openDefault());
    this.openDefault();
  }

  /** Open the experts panel if there is room and the user has left it open. */
  openDefault() {
    this.openExperts(WIDE.matches && store.loadSettings().experts === true);
  }

  chooseExperts(isOpen) {
    if (WIDE.matches) store.saveSettings({experts: isOpen});
    this.openExperts(isOpen);
    if (!isOpen) $("open_experts").focus();
  }

  openExperts(isOpen) {
    $("experts").hidden = !isOpen;
    $("open_experts").setAttribute("aria-expanded", String(isOpen));
    this.onExperts();
  }

  get isSidebarOpen() {
    return document.body.classList.contains("sidebar-open");
  }

  openSidebar(isOpen) {
    document.body.classList.toggle("sidebar-open", isOpen);
    $("open_sidebar").setAttribute("aria-expanded", String(isOpen));
    $("shade").hidden = !isOpen;
  }

  /** Close what lies over the text. Returns whether there was something. */
  closeOverlay() {
    if (this.isSidebarOpen) this.openSidebar(false);
    else if (!WIDE.matches && !$("experts").hidden) this.chooseExperts(false);
    else return false;
    return true;
  }
}

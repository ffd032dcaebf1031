// The page: one conversation on the screen. Answers of other ones go on meanwhile.

import {Answers, rateOf, tokensOf} from "./answers.js";
import {addBranch, allAnswers, namedAnswers, switchBranch, versionOf} from "./branches.js";
import {showCard} from "./card.js";
import {THINKING, isEmpty, newAnswer, titleOf} from "./chat.js";
import {ChatList} from "./chats.js";
import {getModel} from "./client.js";
import {Composer} from "./composer.js";
import {Follower, SidePanels} from "./layout.js";
import {MessageView} from "./message.js";
import {ExpertsPanel} from "./panel.js";
import {copyText, make} from "./render.js";
import {connectSettings, fillSettings, requestSettings} from "./settings.js";
import {connectShortcuts} from "./shortcuts.js";
import * as store from "./store.js";
import {keepTraces, loadTrace, saveTrace} from "./traces.js";
import {welcome} from "./welcome.js";

const $ = id => document.getElementById(id);
const COMPLETION_TOKENS = 200; // default of a model that does not end its answers

let chat = store.newChat();
let model = {name: "moe-fast", context: 0, template: true, variables: [], format: ""};
const views = new Map(); // a message of the shown chat -> its MessageView
const answers = new Answers({onChange: showChange, onEnd: showEnd, onSave: save});
const panel = new ExpertsPanel($("log"), {toast, openRecording, promptOf});
const follower = new Follower($("log"), $("latest"));
const sidePanels = new SidePanels(() => panel.draw());
const composer = new Composer({
  send,
  isRunning,
  stop,
  editLast,
  complain: toast,
});
const chats = new ChatList({
  openId: () => chat.id,
  isRunning: id => answers.runs.has(id),
  // A chat whose answer streams is newer than what is stored.
  find: id => (id === chat.id ? chat : (answers.runs.get(id)?.chat ?? store.loadChat(id))),
  open: openChat,
  start: startChat,
  stop: found => answers.stop(found),
  toast,
});

// Conversations --------------------------------------------------------------------------------

function openChat(next) {
  chat = next;
  $("system").value = chat.system;
  composer.open(chat);
  showMessages();
  const last = chat.messages.findLast(message => message.role === "assistant");
  showExperts(last);
  showRunning();
  chats.show();
  follower.toEnd();
  showInAddress();
  sidePanels.openSidebar(false);
  loadTraces();
}

/** Put the conversation into the address, so that a reload shows it. */
function showInAddress() {
  history.replaceState(null, "", chat.messages.length ? "#" + chat.id : location.pathname);
}

function startChat() {
  openChat(store.newChat(store.loadSettings().system ?? ""));
  $("text").focus();
}

/** Load the experts of the shown answers from an earlier visit. */
async function loadTraces() {
  for (const message of allAnswers(chat.messages)) {
    if (answers.routings.has(message) || !message.id) continue;
    const routing = await loadTrace(message.id);
    if (!routing || answers.routings.has(message)) continue;
    answers.routings.set(message, routing);
    views.get(message)?.refresh();
    if (panel.message === message) showExperts(message);
  }
  panel.listOthers();
}

/** Keep the system prompt for this chat, and for new ones. */
function changeSystem() {
  chat.system = $("system").value;
  store.saveSettings({system: chat.system});
  save(chat);
}

function save(saved) {
  if (!saved.messages.length) return;
  saved.updated = Date.now();
  if (!saved.named) saved.title = titleOf(saved);
  if (!store.saveChat(saved))
    toast("The browser's storage is full. This chat is not saved: delete older ones.");
  chats.show();
  if (saved === chat) showInAddress();
}

function toast(text, ...nodes) {
  $("toast").replaceChildren(text, ...nodes);
  clearTimeout(toast.timer);
  toast.timer = setTimeout(() => $("toast").replaceChildren(), 8000);
}

// Messages -------------------------------------------------------------------------------------

function showMessages() {
  views.clear();
  $("log").replaceChildren();
  if (!chat.messages.length && model.context) $("log").append(welcome(model, send));
  chat.messages.forEach(addView);
  if (isRunning()) views.get(answers.of(chat).answer).update(false);
  showContext();
}

function addView(message) {
  $("log").querySelector(".welcome")?.remove();
  const view = new MessageView(message, actions, {
    isPlain,
    hasExperts: answer => Boolean(answers.expertsOf(answer)),
    needsResult,
    routingOf: answer => answers.routings.get(answer),
    context: () => model.context,
  });
  views.set(message, view);
  $("log").append(view.element);
}

function isPlain() {
  return $("format").value === "plain" || ($("format").value === "auto" && !model.template);
}

/** Whether a tool call of the last answer has no result yet. */
function needsResult(call) {
  const answer = chat.messages.findLast(message => message.role === "assistant");
  const isLast = answer?.tool_calls?.includes(call);
  return (
    isLast &&
    !chat.messages.some(message => message.role === "tool" && message.tool_call_id === call.id)
  );
}

const actions = {
  edit(message, text) {
    if (!text.trim()) return;
    stop();
    const {role, files} = message;
    replaceFrom(message, {role, content: text, ...(files && {files})});
    answer(newAnswer());
  },
  regenerate(message) {
    stop();
    const next = newAnswer();
    // An empty answer, such as after an error, is no version.
    if (isEmpty(message) && !message.reasoning && message === chat.messages.at(-1)) {
      if (message.branches) next.branches = message.branches;
      chat.messages.pop();
      removeView(message);
      chat.messages.push(next);
    } else replaceFrom(message, next);
    answer(next);
  },
  retry(message) {
    if (message.content) actions.continue(message);
    else actions.regenerate(message);
  },
  continue(message) {
    cutAfter(message);
    answer(message);
  },
  version(message, to) {
    stop();
    switchBranch(chat.messages, chat.messages.indexOf(message), to);
    save(chat);
    showMessages();
    showExperts(chat.messages.findLast(other => other.role === "assistant"));
    loadTraces();
  },
  experts(message) {
    showExperts(message);
    sidePanels.openExperts(true);
  },
  sendResult(call, text) {
    stop();
    chat.messages.push({role: "tool", tool_call_id: call.id, content: text});
    addView(chat.messages.at(-1));
    const calls = chat.messages.findLast(message => message.role === "assistant").tool_calls;
    if (calls.some(needsResult)) refreshCalls();
    else answer(newAnswer());
  },
};

/** Put another message in place of one and of those after it, which stay as a version. */
function replaceFrom(message, next) {
  const hadLater = message !== chat.messages.at(-1);
  const {at} = versionOf(message);
  const number = chat.messages.indexOf(message);
  for (const removed of chat.messages.slice(number)) removeView(removed);
  addBranch(chat.messages, number, next);
  addView(next);
  if (hadLater) offerUndo("Later messages are in the version before.", () => back(chat, next, at));
}

/** Show the version of a message that was shown before. */
function back(changed, message, at) {
  if (chat === changed && chat.messages.includes(message)) actions.version(message, at);
}

/** Remove the messages after one. They can be brought back. */
function cutAfter(message) {
  stop();
  const number = chat.messages.indexOf(message) + 1;
  const removed = chat.messages.splice(number);
  removed.forEach(removeView);
  if (!removed.length) return;
  const changed = chat;
  const kept = [...chat.messages, ...removed];
  offerUndo("Later messages were replaced.", () => {
    if (chat !== changed) return;
    stop();
    chat.messages = kept;
    save(chat);
    showMessages();
  });
}

function removeView(message) {
  views.get(message)?.element.remove();
  views.delete(message);
}

function offerUndo(text, undo) {
  const button = make("button", {type: "button", textContent: "Undo"});
  button.onclick = () => {
    $("toast").replaceChildren();
    undo();
    follower.toEnd();
  };
  toast(text, button);
}

/** Show only the last answer's tool calls with fields for results. */
function refreshCalls() {
  for (const [message, view] of views) if (message.tool_calls?.length) view.update(true);
}

// Answers --------------------------------------------------------------------------------------

function isRunning() {
  return answers.runs.has(chat.id);
}

function send(text, files = []) {
  stop();
  chat.messages.push({role: "user", content: text, ...(files.length && {files})});
  addView(chat.messages.at(-1));
  answer(newAnswer());
}

/** Request an answer, or the continuation of one, and show it as it arrives. */
function answer(message) {
  const settings = requestSettings();
  if (settings.error) toast(settings.error);
  if (!chat.messages.includes(message)) chat.messages.push(message);
  if (!views.has(message)) addView(message);
  follower.toEnd();
  const started = answers.start(chat, message, {model, key: $("key").value, settings});
  composer.open(chat);
  showRunning();
  showExperts(message);
  return started;
}

function stop() {
  answers.stop(chat);
}

/** Show an answer that has changed. */
function showChange(run) {
  if (run.chat !== chat) return;
  views.get(run.answer)?.update(false);
  if (run.answer.count > run.begun) $("status").textContent = statusOf(run);
  if (!$("experts").hidden && panel.message === run.answer) showExperts(run.answer);
  follower.follow();
}

/** Return tokens and tokens/s as text. */
function statusOf(run) {
  const rate = rateOf(run);
  return rate ? `${tokensOf(run)} tokens, ${rate}/s` : `${tokensOf(run)} tokens`;
}

/** Show and announce how an answer ended. */
function showEnd(run) {
  const {answer: message} = run;
  if (run.errorKind === "key") askForKey();
  chats.show();
  if (run.chat !== chat) return;
  showRunning();
  views.get(message)?.update(true);
  refreshCalls();
  const {count, error, finish} = message;
  const tokens = count - run.begun;
  const isStopped = error || finish?.startsWith("stopped");
  const stopped = tokens ? `stopped after ${tokens} tokens` : "";
  $("status").textContent = isStopped ? stopped : statusOf(run);
  $("announce").textContent = error || `The answer has ended. ${$("status").textContent}`;
  showContext();
  if (panel.message === message) showExperts(message);
  panel.listOthers();
  follower.follow();
}

function showRunning() {
  const running = isRunning();
  $("send").textContent = running ? "Stop" : "Send";
  $("send").classList.toggle("stop", running);
  $("status").textContent = running ? "waiting" : "";
  panel.isLive = running;
}

/** Show the experts of an answer in the panel. */
function showExperts(message) {
  panel.show(message, answers.expertsOf(message));
}

/** Return the answers of this chat that the panel can compare, with names. */
panel.others = () => {
  return namedAnswers(chat.messages)
    .map(found => ({...found, ...answers.expertsOf(found.message)}))
    .filter(({counts}) => counts);
};

/** Return the text that an answer follows. */
function promptOf(message) {
  return chat.messages[chat.messages.indexOf(message) - 1]?.content ?? "";
}

/** Show the answers of a file as a chat, which is kept like any other. */
function openRecording(name, {model: modelName, format, answers: recorded}) {
  const next = Object.assign(store.newChat(), {title: name, named: true});
  for (const {prompt, routing, text} of recorded) {
    const heat = routing.counts().pack();
    const message = {...newAnswer(), content: text, count: routing.length, finish: "stop", heat};
    const usage = {completion: routing.length, total: 0, reasoning: 0};
    Object.assign(message, {model: modelName, format, usage});
    next.messages.push({role: "user", content: prompt}, message);
    answers.routings.set(message, routing);
    saveTrace(message.id, routing);
  }
  openChat(next);
  save(next);
  sidePanels.openExperts(true);
}

// The server's model ---------------------------------------------------------------------------

async function loadModel() {
  try {
    model = await getModel($("key").value);
  } catch (error) {
    if (error.kind === "key") return askForKey();
    return showServerError(error);
  }
  $("ask_key").hidden = true;
  $("model").textContent = model.name;
  $("model").title = [model.name, model.format].filter(Boolean).join(", ");
  document.title = model.name;
  document.body.classList.toggle("continues", !model.template);
  $("no_template").hidden = model.template;
  $("thinking").hidden = !THINKING.some(name => model.variables.includes(name));
  $("effort").hidden = !model.variables.includes("reasoning_effort");
  const hasDefault = store.loadSettings().max_tokens !== undefined;
  if (!model.template && !hasDefault && !$("max_tokens").value)
    $("max_tokens").value = COMPLETION_TOKENS;
  if (!isRunning()) showMessages();
}

function askForKey() {
  $("ask_key").hidden = false;
}

function showServerError(error) {
  const retry = make("button", {type: "button", textContent: "Retry"});
  const note = make(
    "div",
    {class: "note error server", role: "alert"},
    make("span", {textContent: error.message}),
    retry,
  );
  retry.onclick = () => {
    note.remove();
    loadModel();
  };
  $("log").prepend(note);
}

/** Show how much of the context the conversation has. The next request has at least as much. */
function showContext() {
  const usage = chat.messages.findLast(message => message.usage?.total)?.usage;
  const total = usage?.total ?? 0;
  const isUnknown = !usage && chat.messages.length > 0;
  $("context").hidden = !model.context || isUnknown;
  Object.assign($("context_bar"), {
    max: model.context || 1,
    value: total,
    high: 0.85 * model.context,
    optimum: 0,
  });
  const format = number => number.toLocaleString("en");
  const least = usage?.isLeast ? "at least " : "";
  const text = isUnknown ? "" : `${least}${format(total)} of ${format(model.context)} tokens`;
  $("context_text").textContent = text;
}

// Events ---------------------------------------------------------------------------------------

/** Edit the last message of the user. Returns whether there is one. */
function editLast() {
  const last = chat.messages.findLast(message => message.role === "user");
  if (last) views.get(last).edit();
  return Boolean(last);
}

/** Escape closes what lies over the text, or stops the answer. */
function keyAnywhere(event) {
  const isInDialog = document.querySelector("dialog[open]");
  if (event.key === "Escape" && !isInDialog && !sidePanels.closeOverlay()) stop();
}

function copyLast() {
  const last = chat.messages.findLast(message => message.content && message.role === "assistant");
  const said = make("span", {textContent: "Copy"});
  if (last) copyText(last.content, said).then(() => toast(`${said.textContent}: the last answer.`));
}

function toggle(dialog) {
  if ($(dialog).open) $(dialog).close();
  else $(dialog).showModal();
}

function connect() {
  $("system").oninput = changeSystem;
  document.addEventListener("keydown", keyAnywhere);
  $("log").onpointerover = event => showCard($("card"), event.target);
  $("log").onpointerleave = () => showCard($("card"), null);
  $("open_settings").onclick = () => $("settings").showModal();
  $("open_shortcuts").onclick = () => $("shortcuts").showModal();
  $("ask_key").onsubmit = useKey;
  $("key").onchange = () => store.saveKey($("key").value);
  store.onOtherTab(() => chats.show());
  addEventListener("pagehide", () => answers.stopAll()); // saves the answers so far
  connectShortcuts({
    newChat: startChat,
    search: () => {
      sidePanels.openSidebar(true);
      $("search").focus();
    },
    chatAbove: () => chats.step(-1),
    chatBelow: () => chats.step(1),
    copyLast,
    experts: () => sidePanels.chooseExperts($("experts").hidden),
    colors: () => $("colors").click(),
    settings: () => toggle("settings"),
    shortcuts: () => toggle("shortcuts"),
  });
}

function useKey(event) {
  event.preventDefault();
  store.saveKey($("key").value);
  loadModel();
}

connect();
connectSettings({
  onFormat: showMessages,
  onTheme: () => panel.draw(),
  onColors: () => panel.draw(),
});
fillSettings();
keepTraces(
  new Set(
    store
      .allChats()
      .flatMap(({messages}) => allAnswers(messages))
      .map(({id}) => id),
  ),
);
openChat(
  store.loadChat(location.hash.slice(1)) ?? store.newChat(store.loadSettings().system ?? ""),
);
loadModel();

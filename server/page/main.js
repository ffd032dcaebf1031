// The page: one conversation on the screen, one answer at a time.

import {showCard} from "./card.js";
import {applyChunk, isEmpty, newAnswer, requestBody, titleOf} from "./chat.js";
import {getModel, streamAnswer} from "./client.js";
import {Follower, SidePanels} from "./layout.js";
import {MessageView} from "./message.js";
import {ExpertsPanel} from "./panel.js";
import {make} from "./render.js";
import {Counts, Routing} from "./routing.js";
import {connectSettings, fillSettings, readTools, samplingSettings} from "./settings.js";
import {showChats} from "./sidebar.js";
import * as store from "./store.js";
import {welcome} from "./welcome.js";

const $ = id => document.getElementById(id);
const COMPLETION_TOKENS = 200; // default of a model that does not end its answers

let chat = store.newChat();
let model = {name: "moe-fast", context: 0, template: true};
let running = null; // {chat, answer, controller} of the answer that streams
const views = new Map(); // a message of the shown chat -> its MessageView
const routings = new WeakMap(); // an answer -> its Routing; lost when the page is closed
const panel = new ExpertsPanel($("log"));
const follower = new Follower($("log"), $("latest"));
const sidePanels = new SidePanels(() => panel.draw());

// Conversations --------------------------------------------------------------------------------

/** Show a conversation. An answer that streams belongs to the one before: stop it first. */
function openChat(next) {
  stop();
  chat = next;
  $("system").value = chat.system;
  $("status").textContent = "";
  showMessages();
  showAnswerExperts(chat.messages.findLast(message => message.role === "assistant"));
  listChats();
  follower.toEnd();
  showInAddress();
}

/** Put the conversation into the address, so that a reload shows it. */
function showInAddress() {
  history.replaceState(null, "", chat.messages.length ? "#" + chat.id : location.pathname);
}

function startChat() {
  openChat(store.newChat(store.loadSettings().system ?? ""));
  sidePanels.openSidebar(false);
  $("text").focus();
}

function listChats() {
  showChats($("chats"), store.listChats(), chat.id, {
    open: id => {
      openChat(store.loadChat(id) ?? store.newChat());
      sidePanels.openSidebar(false);
    },
    rename: (id, title) => changeTitle(id, title),
    remove: id => removeChat(id),
  });
}

function changeTitle(id, title) {
  const renamed = id === chat.id ? chat : store.loadChat(id);
  if (renamed) store.saveChat(Object.assign(renamed, {title, named: true}));
  listChats();
}

function removeChat(id) {
  if (running?.chat.id === id) stop();
  const removed = id === chat.id ? chat : store.loadChat(id);
  store.deleteChat(id);
  if (id === chat.id) startChat();
  listChats();
  const undo = make("button", {type: "button", textContent: "Undo"});
  undo.onclick = () => {
    if (removed) store.saveChat(removed);
    $("toast").replaceChildren();
    listChats();
  };
  toast(`Deleted "${removed?.title ?? ""}".`, undo);
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
  listChats();
  showInAddress();
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
  showContext();
}

function addView(message) {
  $("log").querySelector(".welcome")?.remove();
  const view = new MessageView(message, actions, {
    isPlain,
    hasExperts,
    needsResult,
    routingOf: answer => routings.get(answer),
  });
  views.set(message, view);
  $("log").append(view.element);
}

function isPlain() {
  return $("format").value === "plain" || ($("format").value === "auto" && !model.template);
}

const hasExperts = message => Boolean(routings.get(message)?.layers || message.heat);

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
    cutAt(chat.messages.indexOf(message));
    send(text);
  },
  regenerate(message) {
    cutAt(chat.messages.indexOf(message));
    answer(newAnswer());
  },
  retry(message) {
    if (message.content) actions.continue(message);
    else actions.regenerate(message);
  },
  continue(message) {
    cutAt(chat.messages.indexOf(message) + 1);
    answer(message);
  },
  experts(message) {
    showAnswerExperts(message);
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

/** Remove the messages from a number on. Answers among them can be brought back. */
function cutAt(number) {
  stop();
  const all = [...chat.messages];
  const removed = chat.messages.splice(number);
  for (const message of removed) {
    views.get(message)?.element.remove();
    views.delete(message);
  }
  if (removed.some(message => message.role === "assistant" && !isEmpty(message)))
    offerUndo(chat, all);
}

function offerUndo(changed, messages) {
  const undo = make("button", {type: "button", textContent: "Undo"});
  undo.onclick = () => {
    $("toast").replaceChildren();
    if (chat !== changed) return;
    stop();
    chat.messages = messages;
    save(chat);
    showMessages();
    follower.toEnd();
  };
  toast("Later messages were replaced.", undo);
}

/** Show only the last answer's tool calls with fields for results. */
function refreshCalls() {
  for (const [message, view] of views) if (message.tool_calls?.length) view.update(true);
}

// Answers --------------------------------------------------------------------------------------

function send(text) {
  stop();
  chat.messages.push({role: "user", content: text});
  addView(chat.messages.at(-1));
  answer(newAnswer());
}

/** Request an answer, or the continuation of one, and show it as it arrives. */
async function answer(message) {
  const {tools, error} = readTools();
  if (error) toast(error);
  if (!chat.messages.includes(message)) chat.messages.push(message);
  if (!views.has(message)) addView(message);
  if (!routings.has(message)) routings.set(message, new Routing());
  const run = {
    chat,
    answer: message,
    controller: new AbortController(),
    first: 0,
    begun: message.count,
  };
  Object.assign(message, {error: "", finish: null, earlier: message.usage?.completion ?? 0});
  running = run;
  follower.toEnd();
  showRunning(run);
  showAnswerExperts(message);
  save(run.chat);
  try {
    await stream(run, tools);
  } catch (error) {
    if (!run.isDone) handleError(run, error);
  }
  finish(run);
}

async function stream(run, tools) {
  const settings = {...samplingSettings(), tools};
  const body = requestBody(run.chat, run.answer, model, settings);
  try {
    await readStream(run, body);
  } catch (error) {
    // The limit is more than the context has left. Without a limit the server takes all of it.
    if (error.kind !== "context" || !body.max_tokens) throw error;
    delete body.max_tokens;
    await readStream(run, body);
  }
}

async function readStream(run, body) {
  for await (const chunk of streamAnswer(body, $("key").value, run.controller.signal)) {
    if (run.isDone) return;
    applyChunk(run.answer, routings.get(run.answer), chunk);
    if (run.answer.count > run.begun) run.first ||= performance.now();
    run.last = performance.now();
    scheduleUpdate(run);
  }
}

/** Update at the next frame, with at most a third of the time: long answers take longer. */
function scheduleUpdate(run) {
  if (run.frame || run !== running) return;
  run.frame = requestAnimationFrame(() => {
    run.frame = 0;
    if (run !== running || performance.now() < (run.next ?? 0)) return;
    const start = performance.now();
    updateAnswer(run, false);
    run.next = start + 3 * (performance.now() - start);
  });
}

function updateAnswer(run, isFinal) {
  views.get(run.answer).update(isFinal);
  if (isFinal) refreshCalls();
  if (run.answer.count > run.begun) $("status").textContent = rateOf(run);
  if (!$("experts").hidden || isFinal) showAnswerExperts(run.answer);
  follower.follow();
}

/** Return tokens and tokens/s as text. Sets the answer's rate. */
function rateOf(run) {
  const tokens = (run.answer.usage?.completion ?? run.answer.count) - run.begun;
  const seconds = (run.last - run.first) / 1000;
  const rate = tokens > 1 && seconds > 0 ? ((tokens - 1) / seconds).toFixed(1) : "";
  run.answer.rate = rate;
  return rate ? `${tokens} tokens, ${rate}/s` : `${tokens} tokens`;
}

function handleError(run, error) {
  run.answer.error = error.message;
  if (error.kind === "key") askForKey();
  if (!error.kind) console.error(error); // a mistake in the page
}

/** End a run, once: `stop` ends it before its request does. */
function finish(run) {
  if (run.isDone) return;
  run.isDone = true;
  const {answer: message} = run;
  const routing = routings.get(message);
  const hasUsage = message.usage && !message.error && message.finish !== "stopped";
  if (hasUsage) message.count = message.usage.completion;
  const known = {total: 0, reasoning: 0, ...message.usage, completion: message.count};
  message.usage = hasUsage ? known : {...known, ...leastTotal(run)};
  const isCut = message.finish === "length";
  message.isFull = isCut && Boolean(model.context) && message.usage.total >= model.context;
  rateOf(run);
  if (routing.layers) message.heat = routing.counts().pack();
  running = null;
  save(run.chat);
  showRunning(null);
  updateAnswer(run, true);
  showEnd(run);
}

/** Return the usage that is certain after an answer without one: it was stopped, or it failed. */
function leastTotal(run) {
  const before = run.chat.messages.findLast(message => message.usage?.total)?.usage.total ?? 0;
  return {total: before + run.answer.count - run.begun, isLeast: true};
}

/** Show and announce how an answer ended. */
function showEnd(run) {
  const {count, error, finish: reason} = run.answer;
  const tokens = count - run.begun;
  if (reason === "stopped" || error)
    $("status").textContent = tokens ? `stopped after ${tokens} tokens` : "";
  $("announce").textContent = error || `The answer has ended. ${$("status").textContent}`;
  showContext();
}

function showRunning(run) {
  $("send").textContent = run ? "Stop" : "Send";
  $("send").classList.toggle("stop", Boolean(run));
  if (run) $("status").textContent = "waiting";
  if (run) views.get(run.answer).update(false);
  panel.isLive = Boolean(run);
}

/** Stop the answer that streams. What has arrived stays. */
function stop() {
  const run = running;
  if (!run) return;
  run.answer.finish = "stopped";
  finish(run);
  run.controller.abort();
}

/** Show the experts of an answer in the panel. */
function showAnswerExperts(message) {
  const routing = message && routings.get(message);
  const counts = routing?.layers ? routing.counts() : Counts.unpack(message?.heat);
  panel.show(counts && {routing: routing?.layers ? routing : null, counts});
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
  document.title = model.name;
  document.body.classList.toggle("continues", !model.template);
  $("no_template").hidden = model.template;
  const hasDefault = store.loadSettings().max_tokens !== undefined;
  if (!model.template && !hasDefault && !$("max_tokens").value)
    $("max_tokens").value = COMPLETION_TOKENS;
  if (!running) showMessages();
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

function growInput() {
  const text = $("text");
  const most = innerHeight / 3;
  text.style.height = "auto";
  text.style.overflowY = text.scrollHeight > most ? "auto" : "hidden";
  text.style.height = Math.min(text.scrollHeight, most) + "px";
}

function submit(event) {
  event.preventDefault();
  if (running) return stop();
  const text = $("text").value;
  if (!text.trim()) return;
  $("text").value = "";
  growInput();
  send(text);
}

function keyInText(event) {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!running) $("form").requestSubmit();
  }
  if (event.key === "ArrowUp" && !$("text").value && !running) {
    const last = chat.messages.findLast(message => message.role === "user");
    if (last) event.preventDefault();
    if (last) views.get(last).edit();
  }
}

/** Escape closes what lies over the text, or stops the answer. */
function keyAnywhere(event) {
  if (event.key === "Escape" && !$("settings").open && !sidePanels.closeOverlay()) stop();
}

function connect() {
  $("form").onsubmit = submit;
  $("text").onkeydown = keyInText;
  $("text").oninput = growInput;
  $("clear").onclick = startChat;
  $("system").oninput = changeSystem;
  document.addEventListener("keydown", keyAnywhere);
  $("log").onpointerover = event => showCard($("card"), event.target);
  $("log").onpointerleave = () => showCard($("card"), null);
  $("open_settings").onclick = () => $("settings").showModal();
  $("ask_key").onsubmit = useKey;
  $("key").onchange = () => store.saveKey($("key").value);
  store.onOtherTab(listChats);
  addEventListener("pagehide", stop); // saves the answer so far
}

function useKey(event) {
  event.preventDefault();
  store.saveKey($("key").value);
  loadModel();
}

connect();
connectSettings({onFormat: showMessages, onTheme: () => panel.draw()});
fillSettings();
openChat(
  store.loadChat(location.hash.slice(1)) ?? store.newChat(store.loadSettings().system ?? ""),
);
growInput();
loadModel();

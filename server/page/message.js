// The elements of one message of a conversation.

import {versionOf} from "./branches.js";
import {fileLabel} from "./composer.js";
import {TextView, copyText, make} from "./render.js";
import {tokenPieces} from "./tokens.js";

const NAMES = {user: "You", assistant: "Model", tool: "Tool result"};

/**
 * Shows a message and follows its changes.
 *
 * message: see chat.js. actions: edit, regenerate, retry, continue, experts, version, sendResult:
 * functions of the message. options: isPlain, hasExperts, needsResult and routingOf, functions;
 * context: of the model, in tokens.
 */
export class MessageView {
  constructor(message, actions, options) {
    Object.assign(this, {message, actions, options});
    const isAnswer = message.role === "assistant";
    this.answer = make("div", {class: isAnswer ? "answer" : "said"});
    this.tools = make("div", {class: "tools"});
    this.note = make("div", {class: "note"});
    const name = NAMES[message.role] ?? message.role;
    this.element = make("article", {class: `message ${message.role}`, "aria-label": name});
    if (message.files?.length) this.element.append(fileList(message.files));
    this.element.append(this.answer, this.note, this.tools);
    if (isAnswer) this.text = new TextView(this.answer, this.pieces("content"));
    this.update(true);
  }

  pieces(part) {
    const source = () => (part === "content" ? this.message.content : this.message.reasoning);
    return tokenPieces(source, () => this.options.routingOf(this.message), part);
  }

  /** Show the message's present state. isFinal: the answer is complete. */
  update(isFinal) {
    const {message} = this;
    this.element.classList.toggle("running", !isFinal);
    if (message.role !== "assistant") {
      this.answer.textContent = message.content;
      this.answer.hidden = !message.content && Boolean(message.files?.length);
    } else {
      this.showReasoning(isFinal);
      this.text.update(message.content, {isPlain: this.options.isPlain(), isFinal});
      this.showCalls(isFinal);
    }
    if (isFinal) this.showNote();
    else this.note.replaceChildren();
    this.tools.replaceChildren(...(isFinal ? this.buttons() : []));
  }

  /** Show the texts anew, with the tokens of a routing that was loaded. */
  refresh() {
    this.text?.refresh();
    this.reasoningText?.refresh();
    this.tools.replaceChildren(...this.buttons());
  }

  showReasoning(isFinal) {
    const {message} = this;
    if (!message.reasoning) return;
    if (!this.reasoning) {
      this.summary = make("summary");
      const text = make("div", {class: "reasoning-text"});
      this.reasoning = make("details", {class: "reasoning"}, this.summary, text);
      this.reasoningText = new TextView(text, this.pieces("reasoning"));
      this.answer.before(this.reasoning);
    }
    const isThinking = !isFinal && !message.content;
    this.summary.textContent = isThinking ? "Reasoning ..." : "Reasoning";
    if (message.usage?.reasoning) this.summary.textContent += `, ${message.usage.reasoning} tokens`;
    this.reasoningText.update(message.reasoning, {isPlain: this.options.isPlain(), isFinal});
  }

  showCalls(isFinal) {
    const calls = this.message.tool_calls ?? [];
    if (!calls.length) return;
    this.calls ??= make("div", {class: "calls"});
    if (!this.calls.isConnected) this.answer.after(this.calls);
    this.calls.replaceChildren(...calls.map(call => this.call(call, isFinal)));
  }

  call(call, isFinal) {
    const title = make(
      "div",
      {class: "call-head"},
      "Tool call ",
      make("code", {textContent: call.function.name}),
    );
    const code = make("pre", {
      tabIndex: 0,
      role: "group",
      "aria-label": "Arguments",
      textContent: prettyJson(call.function.arguments),
    });
    const element = make("div", {class: "call"}, title, code);
    if (isFinal && this.options.needsResult(call)) element.append(this.resultForm(call));
    return element;
  }

  resultForm(call) {
    const input = make("textarea", {rows: 2, placeholder: "The tool's result, as text or JSON"});
    input.setAttribute("aria-label", `Result of ${call.function.name}`);
    const button = make("button", {type: "button", textContent: "Send result"});
    button.onclick = () => this.actions.sendResult(call, input.value);
    return make("div", {class: "result"}, input, button);
  }

  showNote() {
    const {message} = this;
    this.note.className = message.error ? "note error" : "note";
    this.note.replaceChildren(...noteOf(message, this.actions));
  }

  buttons() {
    const {message, actions} = this;
    const copy = action("Copy", () => copyText(message.content, copy));
    if (message.role === "user")
      return [...this.versions(), action("Edit", () => this.edit()), copy];
    if (message.role !== "assistant") return [copy];
    const buttons = [...this.versions(), copy];
    buttons.push(action("Regenerate", () => actions.regenerate(message)));
    if (this.options.hasExperts(message))
      buttons.push(action("Experts", () => actions.experts(message)));
    if (message.usage)
      buttons.push(make("span", {class: "hint", textContent: statistics(message, this.options)}));
    return buttons;
  }

  /** Return the buttons that lead through the versions of this message. */
  versions() {
    const {at, count} = versionOf(this.message);
    if (count < 2) return [];
    const step = (label, text, to) => {
      const button = action(text, () => this.actions.version(this.message, to));
      button.setAttribute("aria-label", label);
      button.disabled = to < 0 || to >= count;
      return button;
    };
    const text = make("span", {textContent: `${at + 1} of ${count}`});
    const group = make("span", {class: "versions", role: "group", "aria-label": "Versions"});
    group.append(step("Version before", "\u2039", at - 1), text);
    group.append(step("Version after", "\u203a", at + 1));
    return [group];
  }

  /** Turn a user's message into an input field. */
  edit() {
    const input = make("textarea", {
      class: "edit",
      value: this.message.content,
      "aria-label": "Edit the message",
    });
    input.rows = Math.min(this.message.content.split("\n").length + 1, 12);
    const send = action("Send again", () => this.actions.edit(this.message, input.value));
    const cancel = action("Cancel", () => this.update(true));
    input.onkeydown = event => {
      if (event.key === "Escape") cancel.click();
      else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send.click();
      else return;
      event.preventDefault();
      event.stopPropagation();
    };
    const hint = make("span", {
      class: "hint",
      textContent: "The messages from here on stay, as another version.",
    });
    this.answer.hidden = false;
    this.answer.replaceChildren(input);
    this.tools.replaceChildren(send, cancel, hint);
    input.focus();
  }
}

function action(label, onclick) {
  return make("button", {type: "button", class: "quiet", textContent: label, onclick});
}

function fileList(files) {
  const items = files.map(file => {
    const text = make("pre", {tabIndex: 0, role: "group", textContent: file.text});
    text.setAttribute("aria-label", file.name);
    return make("details", {class: "file"}, make("summary", {}, fileLabel(file)), text);
  });
  return make("div", {class: "sent-files"}, ...items);
}

/** Return the line below an answer: tokens, speed, first token, model, context. */
function statistics({usage, rate, first, model, format}, {context}) {
  const speed = rate ? ` at ${rate}/s` : "";
  const total = usage.total.toLocaleString("en");
  const ofContext = context() ? ` of ${context().toLocaleString("en")}` : "";
  return [
    `${usage.completion} tokens${speed}`,
    first && `first token after ${inSeconds(first)}`,
    [model, format].filter(Boolean).join(", "),
    usage.total && `context ${usage.isLeast ? "at least " : ""}${total}${ofContext}`,
  ]
    .filter(Boolean)
    .join(" \u00b7 ");
}

function inSeconds(seconds) {
  return seconds < 0.9995 ? `${Math.round(1000 * seconds)} ms` : `${seconds.toFixed(1)} s`;
}

/** Return the nodes of the line below an answer: an error, or why the answer ended. */
function noteOf(message, actions) {
  const [text, label, act] = noteParts(message, actions);
  const button = label ? [action(label, () => act(message))] : [];
  return text ? [make("span", {textContent: text}), ...button] : [];
}

/** Return a text, and a button's label and action. All are left out for a complete answer. */
function noteParts(message, actions) {
  const {error, finish, content, isFull, usage} = message;
  const tokens = usage?.completion ?? message.count;
  // The server takes an answer's text back, not its reasoning.
  const goOn = content ? ["Continue", actions.continue] : ["Answer again", actions.regenerate];
  if (error) return [error, "Retry", actions.retry];
  if (finish === "stopped") return [`Stopped after ${tokens} tokens.`, ...goOn];
  if (finish === "stopped: closed") return [`The page was closed after ${tokens} tokens.`, ...goOn];
  if (finish !== "length") return [];
  if (isFull) return [`The context is full: ${usage.total} tokens. Start a new chat.`];
  if (content) return [`Cut at ${tokens} tokens.`, ...goOn];
  return [`Cut at ${tokens} tokens, all of them reasoning. The settings have the limit.`, ...goOn];
}

/** Return indented JSON; an incomplete or invalid text as it is. */
function prettyJson(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

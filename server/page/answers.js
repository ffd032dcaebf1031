// Answers that stream. Each chat may have one: it goes on while another chat is shown.

import {applyChunk, requestBody} from "./chat.js";
import {streamAnswer} from "./client.js";
import {Counts, Routing} from "./routing.js";
import {saveTrace} from "./traces.js";

const CLOSED = "stopped: closed"; // why an answer ended
const SAVE_EVERY = 2000; // ms: a browser that is killed loses no more of an answer

export class Answers {
  runs = new Map(); // a chat's id -> its run
  routings = new WeakMap(); // an answer -> its Routing

  /**
   * onChange: called with a run at most once a frame. onEnd: called with a run when it has ended.
   * onSave: called with a chat.
   */
  constructor({onChange, onEnd, onSave}) {
    Object.assign(this, {onChange, onEnd, onSave});
  }

  /** Return the run of a chat, or undefined. */
  of = chat => this.runs.get(chat.id);

  /** Request an answer, or the continuation of one. request: {model, key, settings}. */
  async start(chat, answer, request) {
    if (!this.routings.has(answer)) this.routings.set(answer, new Routing());
    const {name, format} = request.model;
    const run = {chat, answer, controller: new AbortController(), first: 0, begun: answer.count};
    run.asked = performance.now();
    Object.assign(answer, {error: "", finish: null, earlier: answer.usage?.completion ?? 0});
    Object.assign(answer, {model: name, format});
    this.runs.set(chat.id, run);
    this.saveRunning(run);
    this.onChange(run);
    try {
      await this.stream(run, request);
    } catch (error) {
      if (!run.isDone) this.fail(run, error);
    }
    this.finish(run, request.model);
  }

  async stream(run, {model, key, settings}) {
    const body = requestBody(run.chat, run.answer, model, settings);
    try {
      await this.read(run, body, key);
    } catch (error) {
      // The limit is more than the context has left. Without a limit the server takes all of it.
      if (error.kind !== "context" || !body.max_tokens) throw error;
      delete body.max_tokens;
      await this.read(run, body, key);
    }
  }

  async read(run, body, key) {
    for await (const chunk of streamAnswer(body, key, run.controller.signal)) {
      if (run.isDone) return;
      applyChunk(run.answer, this.routings.get(run.answer), chunk);
      const now = performance.now();
      if (run.answer.count > run.begun) run.first ||= now;
      run.last = now;
      this.schedule(run);
      if (now - run.saved > SAVE_EVERY) this.saveRunning(run);
    }
  }

  /** Save an answer that streams. What is saved says that the page was closed. */
  saveRunning(run) {
    const {answer} = run;
    const {finish} = answer;
    run.saved = performance.now();
    answer.finish ??= CLOSED;
    this.onSave(run.chat);
    answer.finish = finish;
    const routing = this.routings.get(answer);
    if (routing.length) saveTrace(answer.id, routing);
  }

  /** Update at the next frame, with at most a third of the time: long answers take longer. */
  schedule(run) {
    if (run.frame) return;
    run.frame = requestAnimationFrame(() => {
      run.frame = 0;
      if (run.isDone || performance.now() < (run.next ?? 0)) return;
      const start = performance.now();
      this.onChange(run);
      run.next = start + 3 * (performance.now() - start);
    });
  }

  fail(run, error) {
    run.answer.error = error.message;
    run.errorKind = error.kind;
    if (!error.kind) console.error(error); // a mistake in the page
  }

  /** End a run, once: `stop` ends it before its request does. */
  finish(run, model = null) {
    if (run.isDone) return;
    run.isDone = true;
    const {answer} = run;
    const routing = this.routings.get(answer);
    const hasUsage = answer.usage && !answer.error && !answer.finish?.startsWith("stopped");
    if (hasUsage) answer.count = answer.usage.completion;
    const known = {total: 0, reasoning: 0, ...answer.usage, completion: answer.count};
    answer.usage = hasUsage ? known : {...known, ...leastTotal(run)};
    const isCut = answer.finish === "length";
    answer.isFull = isCut && Boolean(model?.context) && answer.usage.total >= model.context;
    answer.rate = rateOf(run);
    if (run.first) answer.first = (run.first - run.asked) / 1000;
    if (routing.layers) answer.heat = routing.counts().pack();
    this.runs.delete(run.chat.id);
    this.onSave(run.chat);
    if (routing.length) saveTrace(answer.id, routing);
    this.onEnd(run);
  }

  /** Stop the answer of a chat. What has arrived stays. reason: of `finish`. */
  stop(chat, reason = "stopped") {
    const run = this.of(chat);
    if (!run) return;
    run.answer.finish = reason;
    this.finish(run);
    run.controller.abort();
  }

  /** Stop all answers, as the page is closed. */
  stopAll() {
    for (const {chat} of [...this.runs.values()]) this.stop(chat, CLOSED);
  }

  /** Return {routing or null, counts} of an answer's experts, or null. */
  expertsOf(answer) {
    const routing = answer && this.routings.get(answer);
    if (routing?.layers) return {routing, counts: routing.counts()};
    const counts = Counts.unpack(answer?.heat);
    return counts && {routing: null, counts};
  }
}

/** Return the tokens per second of a run as text, "" below two tokens. */
export function rateOf(run) {
  const seconds = (run.last - run.first) / 1000;
  const tokens = tokensOf(run);
  return tokens > 1 && seconds > 0 ? ((tokens - 1) / seconds).toFixed(1) : "";
}

/** Return the tokens that a run has added to its answer. */
export const tokensOf = ({answer, begun}) => (answer.usage?.completion ?? answer.count) - begun;

/** Return the usage that is certain after an answer without one: it was stopped, or it failed. */
function leastTotal(run) {
  const before = run.chat.messages.findLast(message => message.usage?.total)?.usage.total ?? 0;
  return {total: before + run.answer.count - run.begun, isLeast: true};
}

// Conversations as data: the request for an answer, and the answer from the server's chunks.
//
// A chat is {id, title, named, updated, system, messages}. A message is {role, content}; those of
// the user may have files ({name, text}). Answers also have id, reasoning, tool_calls, finish,
// error, usage, rate, first (seconds to the first token), model, format, count (tokens) and heat
// (Counts). usage is {completion, total, reasoning}, of the server. isLeast: the total is what is
// certain. branches: see branches.js.

import {newId} from "./store.js";

/** Return an empty answer. */
export function newAnswer() {
  return {role: "assistant", id: newId(), content: "", reasoning: "", tool_calls: [], count: 0};
}

/** Whether an answer has neither text nor tool calls, such as after an error. */
export function isEmpty(message) {
  return !message.content && !message.tool_calls?.length;
}

/**
 * Return the body of the request for `answer`, the last message of a chat.
 * settings: {sampling, tools, thinking, effort}; see settings.js.
 */
export function requestBody(chat, answer, model, settings) {
  const body = {
    messages: requestMessages(chat, answer, model),
    stream: true,
    stream_options: {include_usage: true},
    routing: true,
    ...settings.sampling,
  };
  if (settings.tools?.length) body.tools = settings.tools;
  const {effort, thinking} = settings;
  if (effort && model.variables.includes("reasoning_effort")) body.reasoning_effort = effort;
  const switches = THINKING.filter(name => model.variables.includes(name));
  if (thinking && switches.length)
    body.chat_template_kwargs = Object.fromEntries(switches.map(name => [name, thinking === "on"]));
  // The template leaves the last message open, so the model goes on within it.
  if (goesOn(answer) && model.template)
    Object.assign(body, {continue_final_message: true, add_generation_prompt: false});
  return body;
}

/** Names under which chat templates have a switch for reasoning: Qwen3 and GLM, DeepSeek. */
export const THINKING = ["enable_thinking", "thinking"];

/** Whether the answer has text that a request continues. */
const goesOn = answer => Boolean(answer.content) && !answer.tool_calls?.length;

function requestMessages(chat, answer, model) {
  const messages = chat.system ? [{role: "system", content: chat.system}] : [];
  chat.messages.forEach((message, n) => {
    const next = chat.messages[n + 1];
    // Chat templates require a reply to each message: leave out a message whose answer failed.
    const hasFailed =
      message.role === "user" && next?.role === "assistant" && next !== answer && isEmpty(next);
    if (!hasFailed && !(message.role === "assistant" && isEmpty(message)))
      messages.push(sent(message, message === answer, model));
  });
  return messages;
}

/** Return the fields of a message that the server reads. isOpen: the answer continues it. */
function sent(message, isOpen, model) {
  const {role, reasoning, tool_calls: calls, tool_call_id: id} = message;
  // The chat template decides whether the model sees why it called a tool.
  const reason = reasoning && (calls?.length || isOpen) && {reasoning_content: reasoning};
  const call = calls?.length && {tool_calls: calls};
  const content = contentWithFiles(message, model.template);
  return {role, content, ...reason, ...call, ...(id && {tool_call_id: id})};
}

/** Return a message's text after its files: in fences for a chat model, as they are for others. */
export function contentWithFiles({content, files}, hasTemplate) {
  if (!files?.length) return content;
  return [...files.map(file => (hasTemplate ? fenced(file) : file.text)), content]
    .filter(Boolean)
    .join(hasTemplate ? "\n\n" : "");
}

/** Return a file as a Markdown code block. The fence is longer than those in the file. */
function fenced({name, text}) {
  const runs = text.match(/`{3,}/g) ?? [];
  const fence = "`".repeat(runs.reduce((most, run) => Math.max(most, run.length + 1), 3));
  return `File ${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
}

/** Add a chunk of the stream to an answer and its Routing. */
export function applyChunk(answer, routing, chunk) {
  if (chunk.usage) answer.usage = readUsage(chunk.usage, answer.earlier);
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const delta = choice.delta ?? {};
  const part = delta.reasoning_content ? "reasoning" : delta.content ? "content" : null;
  const text = part ? delta[part === "reasoning" ? "reasoning_content" : "content"] : "";
  addTokens(answer, routing, part, text, choice.moe_fast);
  if (part) answer[part] += text;
  for (const call of delta.tool_calls ?? []) addCall(answer.tool_calls, call);
  if (choice.finish_reason) answer.finish = choice.finish_reason;
}

/** earlier: tokens of the answer before it was continued. */
function readUsage(usage, earlier = 0) {
  return {
    completion: usage.completion_tokens + earlier,
    total: usage.total_tokens,
    reasoning: usage.completion_tokens_details?.reasoning_tokens ?? 0,
  };
}

function addTokens(answer, routing, part, text, routed) {
  const names = routed?.tokens ?? [];
  answer.count += routed ? names.length : text ? 1 : 0;
  let start = part ? answer[part].length : 0;
  // A chunk is one token unless text was held back. If tokens and text differ, the last token
  // gets the whole text.
  const isExact = names.join("") === text;
  names.forEach((name, n) => {
    const length = isExact ? name.length : n === names.length - 1 ? text.length : 0;
    if (!routing.fits(routed.experts[n])) return;
    routing.add(name, routed.experts[n], routed.weights[n], part, start, start + length);
    start += length;
  });
}

/** Add a delta of a tool call. The arguments arrive in parts. */
function addCall(calls, delta) {
  const call = (calls[delta.index ?? calls.length] ??= {
    id: "",
    type: "function",
    function: {name: "", arguments: ""},
  });
  if (delta.id) call.id = delta.id;
  call.function.name += delta.function?.name ?? "";
  call.function.arguments += delta.function?.arguments ?? "";
}

/** Return a title from the first message. */
export function titleOf(chat) {
  const first = chat.messages.find(message => message.role === "user");
  const line = (first?.content || first?.files?.[0]?.name || "").trim().split("\n")[0];
  return line.length > 60 ? line.slice(0, 57) + "..." : line || "New chat";
}

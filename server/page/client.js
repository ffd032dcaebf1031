// Requests to the server, and their errors in plain words.

/** An error to show. kind: unreachable, lost, key, busy, context, refused or server. */
export class ServerError extends Error {
  constructor(message, kind) {
    super(message);
    this.name = "ServerError";
    this.kind = kind;
  }
}

const UNREACHABLE =
  "The server does not answer. It was stopped, or the network is down. " +
  "Start it again with python serve.py, then press Retry.";
const LOST =
  "The connection broke during the answer. The server was stopped, or the network is " +
  "down. The text so far is kept.";

/** Return {name, context, template, variables, format} of the served model. Raises ServerError. */
export async function getModel(key) {
  const response = await request("v1/models", {headers: headers(key)});
  const model = (await response.json()).data[0];
  return {
    name: model.id,
    context: model.max_model_len,
    template: model.chat_template !== false,
    variables: model.template_variables ?? [],
    format: model.format ?? "",
  };
}

/** Yield the chunks of a streamed answer. Raises ServerError, and AbortError after an abort. */
export async function* streamAnswer(body, key, signal) {
  const options = {method: "POST", headers: headers(key), body: JSON.stringify(body), signal};
  const response = await request("v1/chat/completions", options);
  let ended = false;
  try {
    for await (const data of readEvents(response)) {
      if (data === "[DONE]") ended = true;
      else yield checkChunk(JSON.parse(data));
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ServerError) throw error;
    throw new ServerError(LOST, "lost");
  }
  if (!ended) throw new ServerError(LOST, "lost");
}

function headers(key) {
  const json = {"Content-Type": "application/json"};
  return key ? {...json, Authorization: "Bearer " + key} : json;
}

async function request(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(UNREACHABLE, "unreachable");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

/** Return the ServerError of a response with an error status. */
async function refusal(response) {
  const error = (await response.json().catch(() => ({}))).error ?? {};
  const message = error.message ?? `The server answers with status ${response.status}.`;
  return new ServerError(message, kindOf(response.status, error.code));
}

function kindOf(status, code) {
  if (status === 401) return "key";
  if (status === 429 || status === 503) return "busy";
  if (code === "context_length_exceeded") return "context";
  return status >= 500 ? "server" : "refused";
}

function checkChunk(chunk) {
  if (chunk.error) throw new ServerError(chunk.error.message, "server");
  return chunk;
}

/** Yield the data of each server-sent event. */
async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) if (event.startsWith("data: ")) yield event.slice(6);
  }
}

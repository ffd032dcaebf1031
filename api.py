"""OpenAI's API: what a request may say, read strictly, and the shapes of its answer. No model and no HTTP."""

import asyncio
import json
import math
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass, field

from session import CANDIDATES, TOP, Sampling
from tokenizer import Tokenizer

DEFAULT_COMPLETION = 16  # tokens of /v1/completions, as the API has it
# Each number of a request: its kind, what it is if it is not given, and the least and the most it can be.
NUMBERS = {
    "temperature": (float, 1.0, 0, 2),
    "top_p": (float, 1.0, 0, 1),
    "min_p": (float, 0.0, 0, 0.99),
    "top_k": (int, Sampling.top_k, 1, CANDIDATES),  # among more, each number would compile a step of its own
    "repetition_penalty": (float, 1.0, 0.1, 10),
    "seed": (int, None, -(2**63), 2**63 - 1),
    "max_tokens": (int, None, 1, 2**31),
    "max_completion_tokens": (int, None, 1, 2**31),
    "top_logprobs": (int, 0, 0, TOP),
    "n": (int, 1, 1, 1),
    "best_of": (int, 1, 1, 1),
    "frequency_penalty": (float, 0.0, 0, 0),
    "presence_penalty": (float, 0.0, 0, 0),
}
UNSUPPORTED = ("tools", "functions", "logit_bias", "echo", "suffix", "audio", "prediction", "web_search_options")
KINDS = {str: "a text", dict: "an object", bool: "true or false"}
ENDS = {"stop": "stop", "length": "length", "interrupted": "length"}  # interrupted: by the limit of time


class Refusal(ValueError):
    """What a client is told instead of an answer, in OpenAI's shape."""

    def __init__(self, message: str, status: int = 400, code: str | None = None, headers: dict | None = None):
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers or {}

    def body(self) -> dict:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


# Requests -----------------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """A request, read and found good. What the other ranks have to know of it is `work`."""

    ids: list[int]
    work: tuple  # the arguments of `answer`
    chat: bool
    stream: bool
    include_usage: bool
    logprobs: int | None  # how many likeliest tokens are told of beside each; None: nothing
    routing: bool
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    arrived: float = field(default_factory=time.monotonic)
    gone: bool = False  # the client is
    events: asyncio.Queue = field(default_factory=asyncio.Queue)
    loop: asyncio.AbstractEventLoop | None = None

    def tell(self, event: dict) -> None:
        """From the decoding thread to the client's."""
        with suppress(RuntimeError):  # the other thread has ended
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)


def read_request(body: bytes, chat: bool, tokenizer: Tokenizer, max_seq_len: int) -> Job:
    """The job that a request's body describes. Raises Refusal for what is not, cannot be, or is not supported."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        raise Refusal("the body is not JSON") from None
    if not isinstance(request, dict):
        raise Refusal("the body must be a JSON object")
    for name in UNSUPPORTED:
        if request.get(name):
            raise Refusal(f"{name} is not supported: leave it out")
    if request.get("response_format") not in (None, {"type": "text"}):
        raise Refusal('response_format must be {"type": "text"}: other formats are not supported')
    _typed(request, "model", str, "")
    options = _typed(request, "stream_options", dict, {})
    numbers = {name: _number(request, name, *limits) for name, limits in NUMBERS.items()}
    seed = secrets.randbits(62) if numbers["seed"] is None else numbers["seed"] % 2**63
    temperature = 0.0 if numbers["temperature"] < 1e-4 else numbers["temperature"]  # logits over less would overflow
    sampling = Sampling(
        temperature, numbers["top_k"], max(numbers["top_p"], 1e-6), numbers["min_p"], numbers["repetition_penalty"],
        seed,
    )  # fmt: skip
    stop = request.get("stop")
    stop = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stop, list) or len(stop) > 4 or not all(isinstance(s, str) and 0 < len(s) <= 500 for s in stop):
        raise Refusal("stop must be a text of 1 to 500 characters, or up to 4 of them")
    if chat:
        ids, reply = _read_messages(request.get("messages"), tokenizer)
        asked = numbers["max_completion_tokens"] or numbers["max_tokens"]
        logprobs = numbers["top_logprobs"] if _typed(request, "logprobs", bool, False) else None
        if numbers["top_logprobs"] and logprobs is None:
            raise Refusal("top_logprobs needs logprobs: true")
    else:
        ids, reply = _read_prompt(request.get("prompt"), tokenizer), False
        asked = numbers["max_tokens"] or DEFAULT_COMPLETION
        logprobs = _number(request, "logprobs", int, None, 0, TOP)
    room = max_seq_len - len(ids)
    if room < (asked or 1):
        raise Refusal(
            f"the context is {max_seq_len} tokens, and {len(ids)} of the prompt and {asked or 1} asked for are "
            f"{len(ids) + (asked or 1)}: shorten the prompt" + (f", or max_tokens to {room}" if room > 0 else ""),
            code="context_length_exceeded",
        )
    routing = _typed(request, "routing", bool, False)
    work = ids, asked or room, sampling, stop, reply, logprobs is not None or routing
    return Job(
        ids, work, chat, _typed(request, "stream", bool, False),
        _typed(options, "include_usage", bool, False), logprobs, routing,
    )  # fmt: skip


def _typed(values: dict, name: str, kind: type, default):
    value = values.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise Refusal(f"{name} {value!r:.40}: it must be {KINDS[kind]}")
    return value


def _number(values: dict, name: str, kind: type, default, least, most):
    value = values.get(name)
    if value is None:
        return default
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most or (
        kind is int and not whole
    ):  # fmt: skip
        rule = f"from {least} to {most}" if least < most else f"{least}, since nothing else is supported"
        raise Refusal(f"{name} {value!r:.40}: it must be {'a whole number ' * (kind is int)}{rule}")
    return kind(value)


def _read_messages(messages, tokenizer: Tokenizer) -> tuple[list[int], bool]:
    """A conversation's token ids, and whether the answer is a text of its own; without a template it is continued."""
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise Refusal('messages must be a list such as [{"role": "user", "content": "Hello"}]')
    plain = []
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
            content = "".join(part["text"] for part in content)
        if not isinstance(role, str) or not isinstance(content, str):
            raise Refusal("each message must have a role and a content that are text; nothing else is supported")
        plain.append({"role": role, "content": content})
    if not tokenizer.has_chat_template:
        return _read_prompt("".join(message["content"] for message in plain), tokenizer), False
    try:
        return tokenizer.chat(plain), True
    except ValueError as error:
        raise Refusal(str(error)) from None


def _read_prompt(prompt, tokenizer: Tokenizer) -> list[int]:
    """The token ids of a text, or of token ids; a list of one prompt is that prompt."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        (prompt,) = prompt
    if isinstance(prompt, list) and any(isinstance(part, str | list) for part in prompt):
        raise Refusal("several prompts in one request are not supported: send a request for each")
    if not isinstance(prompt, str | list) or not prompt:
        raise Refusal("there is no prompt: give a text or token ids that are not empty")
    if isinstance(prompt, str):
        try:
            return tokenizer.encode(prompt)
        except ValueError as error:
            raise Refusal(str(error)) from None
    if not all(type(id) is int and 0 <= id < tokenizer.vocab_size for id in prompt):
        raise Refusal(f"token ids must be whole numbers from 0 to {tokenizer.vocab_size - 1}")
    return prompt


# Answers ------------------------------------------------------------------------------------------------------------


def _token(tokenizer: Tokenizer, id: int) -> dict:
    data = tokenizer.token_bytes(id)
    return {"token": data.decode(errors="replace"), "bytes": list(data)}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else -9999.0  # which JSON has no word for


class Writer:
    """The objects of one job's answer, in the API's shapes."""

    def __init__(self, job: Job, model: str, tokenizer: Tokenizer):
        self.job, self.tokenizer = job, tokenizer
        self.kind = "chat.completion" if job.chat else "text_completion"
        self.frame = {"id": job.id, "object": self.kind, "created": job.created, "model": model}

    def choice(self, text: str, tokens: list, finish: str | None, streamed: bool) -> dict:
        job, choice = self.job, {"index": 0, "finish_reason": finish, "logprobs": None}
        if not job.chat:
            choice["text"] = text
        elif streamed:
            choice["delta"] = {"content": text} if text else {}
        else:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        if job.logprobs is not None:
            choice["logprobs"] = self.logprobs(tokens)
        if job.routing:
            details = [details for _, _, details in tokens]
            choice["moe_fast"] = {
                "tokens": [_token(self.tokenizer, token)["token"] for token, _, _ in tokens],
                "experts": [d.experts for d in details],
                "weights": [[[round(w, 4) for w in layer] for layer in d.weights] for d in details],
            }
        return choice

    def logprobs(self, tokens: list) -> dict:
        count, content = self.job.logprobs, []
        for token, _, details in tokens:
            top = [
                _token(self.tokenizer, id) | {"logprob": _finite(logprob)} for id, logprob in details.top[:count]
            ]  # fmt: skip
            content.append(_token(self.tokenizer, token) | {"logprob": _finite(details.logprob), "top_logprobs": top})
        if self.job.chat:
            return {"content": content, "refusal": None}
        return {
            "tokens": [entry["token"] for entry in content],
            "token_logprobs": [entry["logprob"] for entry in content],
            "top_logprobs": [{t["token"]: t["logprob"] for t in entry["top_logprobs"]} for entry in content],
            "text_offset": [begin for _, begin, _ in tokens],
        }

    def usage(self, result: dict) -> dict:
        return {
            "prompt_tokens": result["prompt_tokens"],
            "completion_tokens": result["new_tokens"],
            "total_tokens": result["prompt_tokens"] + result["new_tokens"],
            "prompt_tokens_details": {"cached_tokens": result["cached_tokens"]},
        }

    def whole(self, result: dict) -> dict:
        choice = self.choice(result["text"], result["tokens"], ENDS[result["finish_reason"]], False)
        return self.frame | {"choices": [choice], "usage": self.usage(result)}

    def part(self, choices: list, usage: dict | None = None) -> bytes:
        """A chunk of a stream."""
        chunk = self.frame | {"object": self.kind + ".chunk" * self.job.chat, "choices": choices}
        return sse(chunk | ({"usage": usage} if self.job.include_usage else {}))


def sse(value: dict) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"

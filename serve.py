"""An OpenAI-compatible server: `python serve.py --checkpoint_path DIR --compile`, then http://127.0.0.1:8000/v1.

The main thread decodes, one request after the other in the order they came, by the functions of generate.py; a second
thread speaks HTTP. Between them stands a `Desk`: a bounded line of jobs, and for each job a queue of events to its
client. Under torchrun rank 0 has the desk and hands each job to the others. docs/server.md says what is served.
"""

import argparse
import asyncio
import hmac
import json
import math
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

import tp
import world
from generate import DEFAULT_CHAT_LENGTH, generate, load_model, open_checkpoint
from quantize import DTYPES, KV_CACHES, model_args
from session import CANDIDATES, PREFILL_CHUNK, TOP, Sampling, Session
from tokenizer import Tokenizer, load_tokenizer

PAGE = Path(__file__).with_name("chat.html")
LOCAL = ("127.0.0.1", "localhost", "::1")
BODY_SECONDS = 30.0  # in which a request's body has to arrive
HEARTBEAT = 60.0  # seconds after which rank 0 gives a sign of life to the others, which wait for a job
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


# Decoding -----------------------------------------------------------------------------------------------------------


class Desk:
    """What the two threads share: jobs in line, the one under way, and counts for /metrics."""

    def __init__(self, max_queue: int, time_limit: float):
        self.max_queue, self.time_limit = max_queue, time_limit
        self.line: deque[Job] = deque()
        self.job: Job | None = None  # under way
        self.changed, self.closed = threading.Condition(), False
        self.counts: Counter = Counter()
        self.seconds_per_answer = 1.0

    def put(self, job: Job) -> None:
        """Raises Refusal where the line is full."""
        with self.changed:
            if self.closed:
                raise Refusal("the server is ending", 503)
            if len(self.line) >= self.max_queue:
                wait = str(math.ceil(min(self.seconds_per_answer * (len(self.line) + 1) / 2, 600)))
                full = f"{len(self.line)} requests are waiting, as many as may: try again in {wait} s"
                raise Refusal(full, 429, "queue_full", {"Retry-After": wait})
            self.line.append(job)
            self.changed.notify()

    def drop(self, job: Job) -> None:
        """Its client has gone, or has all of its answer."""
        with self.changed:
            job.gone = True
            with suppress(ValueError):
                self.line.remove(job)
                self.counts["dropped"] += 1

    def close(self) -> None:
        """No more jobs; clients that wait are told so."""
        with self.changed:
            self.closed = True
            self.changed.notify()
            for job in [*self.line, *([self.job] if self.job else [])]:
                job.tell({"refusal": Refusal("the server is ending", 503)})

    def works(self) -> Iterator[tuple | None]:
        """Each job's work in turn, until `close`; None is a sign of life."""
        while not self.closed:
            with self.changed:
                if not self.line:
                    self.changed.wait(HEARTBEAT)
                self.job = self.line.popleft() if self.line else None
            if self.job and self.late():
                self.job.tell({"refusal": Refusal("the time limit has passed in the queue: try again later", 503)})
            else:
                yield self.job and self.job.work

    def late(self) -> bool:
        return time.monotonic() - self.job.arrived > self.time_limit

    def done(self, result: dict) -> None:
        """The job's answer is complete."""
        self.counts["answers"] += 1
        for name in ("prompt_tokens", "new_tokens", "seconds", "cached_tokens"):
            self.counts[name] += result[name]
        self.counts["ttft_s"] += result["ttft_s"] or 0.0
        self.seconds_per_answer += 0.2 * (result["seconds"] - self.seconds_per_answer)
        self.job.tell({"result": result})


def answer(session: Session, tokenizer: Tokenizer, work: tuple, desk: Desk | None) -> None:
    """Run one job on this rank; the one that has the desk tells the client."""
    ids, max_new_tokens, sampling, stop, reply, session.watch = work
    pending, shown, start = [], 0, time.monotonic()

    def on_token(token: int, begin: int) -> None:
        pending.append((token, begin, session.details[0]))

    def on_text(text: str) -> None:
        nonlocal shown
        shown += len(text)
        ready = [entry for entry in pending if entry[1] < shown]
        del pending[: len(ready)]
        if text:
            desk.job.tell({"text": text, "tokens": ready})

    result = generate(
        session, tokenizer, ids, max_new_tokens, sampling, stop=stop, reply=reply,
        on_text=on_text if desk and desk.job.stream else lambda text: None,
        on_token=on_token if desk and session.watch else lambda token, begin: None,
        interrupted=lambda: world.share(lambda: desk.job.gone or desk.closed or desk.late()),
    )  # fmt: skip
    if desk:
        result |= {"seconds": time.monotonic() - start, "cached_tokens": len(ids) - session.prefilled}
        length = math.inf if result["finish_reason"] != "stop" else len(result["text"])
        desk.done(result | {"tokens": [entry for entry in pending if entry[1] < length]})


def decode_all(session: Session, tokenizer: Tokenizer, desk: Desk | None) -> None:
    """Answer jobs until the desk closes; on ranks without a desk, rank 0's."""
    for work in world.share_each(lambda: desk.works()):
        if work is None:
            continue
        try:
            answer(session, tokenizer, work, desk)
        except Exception as error:
            if world.size() > 1:  # the others would wait for ever
                raise
            traceback.print_exc()
            full = isinstance(error, torch.cuda.OutOfMemoryError)
            reason = "out of GPU memory: shorten the prompt" if full else f"the server failed: {type(error).__name__}"
            desk.counts["failed"] += 1
            desk.job.tell({"refusal": Refusal(reason, 500)})
            session.reset()


# HTTP ---------------------------------------------------------------------------------------------------------------


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


async def stream(job: Job, writer: Writer, event: dict) -> AsyncIterator[bytes]:
    """The chunks of an answer, of which `event` is the first."""
    if job.chat:
        yield writer.part([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
    while "text" in event:
        yield writer.part([writer.choice(event["text"], event["tokens"], None, True)])
        event = await job.events.get()
    if "refusal" in event:
        yield sse(event["refusal"].body())
        return
    result = event["result"]
    yield writer.part([writer.choice("", result["tokens"], ENDS[result["finish_reason"]], True)])
    if job.include_usage:
        yield writer.part([], writer.usage(result))
    yield b"data: [DONE]\n\n"


async def wait_for(coroutine, request):
    """What the coroutine returns, or None once the client has gone."""
    tasks = [asyncio.ensure_future(coroutine), asyncio.ensure_future(request.receive())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()


def make_app(desk: Desk, tokenizer: Tokenizer, name: str, max_seq_len: int, api_key: str | None, max_body: int):
    """The HTTP side, an ASGI application. `tokenizer` is its own: it is not shared with the decoding thread."""
    from fastapi import FastAPI, Request
    from fastapi.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect

    class Stream(StreamingResponse):
        async def __call__(self, *connection) -> None:
            try:
                await super().__call__(*connection)
            finally:  # a generator that was never begun would not get to its own
                desk.drop(self.job)

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    encoder = ThreadPoolExecutor(1)  # a tokenizer is for one thread
    started = int(time.time())

    def reply(value: dict, status: int = 200, headers: dict | None = None):
        desk.counts[f"status_{status}"] += 1
        return Response(json.dumps(value), status, headers, "application/json")

    @app.exception_handler(Refusal)
    async def refused(request: Request, refusal: Refusal):
        return reply(refusal.body(), refusal.status, refusal.headers)

    @app.exception_handler(HTTPException)
    async def no_such_page(request: Request, error: HTTPException):
        refusal = Refusal(f"{request.method} {request.url.path}: {error.detail}", error.status_code)
        return reply(refusal.body(), refusal.status)

    @app.exception_handler(ClientDisconnect)
    async def left(request: Request, error: ClientDisconnect):
        return PlainTextResponse("", 400)

    def check_key(request: Request) -> None:
        if api_key is None:  # then a page of another site must not reach us under a name of its own
            host = re.sub(r":\d*$", "", request.headers.get("host", "")).strip("[]")
            if host not in LOCAL:
                raise Refusal(f"{host!r:.80} is not a name of this server: use one of {', '.join(LOCAL)}", 403)
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if not hmac.compare_digest(given, api_key.encode()):
            raise Refusal("wrong API key: send it as the header Authorization: Bearer KEY", 401, "invalid_api_key")

    async def read_body(request: Request) -> bytes:
        if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            raise Refusal("send the body as Content-Type: application/json", 415)
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    body += part
                    if len(body) > max_body:
                        raise Refusal(f"the body is over {max_body} bytes, the limit (--max_body)", 413)
        except TimeoutError:
            raise Refusal(f"the body did not arrive within {BODY_SECONDS:.0f} s", 408) from None
        return bytes(body)

    async def handle(request: Request, chat: bool):
        check_key(request)
        body, loop = await read_body(request), asyncio.get_running_loop()
        job = await loop.run_in_executor(encoder, read_request, body, chat, tokenizer, max_seq_len)
        job.id, job.loop = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}", loop
        writer = Writer(job, name, tokenizer)
        desk.put(job)
        streaming = None
        try:
            event = await wait_for(job.events.get(), request)
            if event and job.stream and "refusal" not in event:
                desk.counts["status_200"] += 1
                streaming = Stream(stream(job, writer, event), media_type="text/event-stream")
                streaming.job = job
                return streaming
            if event is None:
                return PlainTextResponse("", 400)  # to no one
            if "refusal" in event:
                raise event["refusal"]
            return reply(writer.whole(event["result"]))
        finally:
            if streaming is None:
                desk.drop(job)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request):
        return await handle(request, True)

    @app.post("/v1/completions")
    async def completions(request: Request):
        return await handle(request, False)

    @app.get("/v1/models")
    async def models(request: Request):
        check_key(request)
        model = {"id": name, "object": "model", "created": started, "owned_by": "moe-fast"}
        return {"object": "list", "data": [model | {"max_model_len": max_seq_len}]}

    @app.get("/health")
    async def health():
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics(request: Request):
        check_key(request)
        return PlainTextResponse(metrics_text(desk), media_type="text/plain; version=0.0.4")

    @app.get("/")
    async def page():
        policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
        headers = {"Content-Security-Policy": policy, "X-Frame-Options": "DENY"}
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers=headers)

    return app


def metrics_text(desk: Desk) -> str:
    """The counts in Prometheus's text format."""
    counts, lines = dict(desk.counts), []

    def say(name: str, kind: str, help: str, *values: tuple[str, float]) -> None:
        lines.extend((f"# HELP moe_fast_{name} {help}", f"# TYPE moe_fast_{name} {kind}"))
        lines.extend(f"moe_fast_{name}{label} {value}" for label, value in values)

    statuses = sorted((key[7:], count) for key, count in counts.items() if key.startswith("status_"))
    say("responses_total", "counter", "HTTP responses to requests, by status.",
        *((f'{{status="{status}"}}', count) for status, count in statuses))  # fmt: skip
    for name, key, help in (
        ("answers_total", "answers", "Answers that were decoded, whole or until their client left."),
        ("failures_total", "failed", "Answers that the server failed at."),
        ("dropped_total", "dropped", "Requests whose client left before their turn."),
        ("prompt_tokens_total", "prompt_tokens", "Tokens of prompts."),
        ("cached_tokens_total", "cached_tokens", "Of these, tokens that the cache still held."),
        ("new_tokens_total", "new_tokens", "Tokens of answers."),
        ("answer_seconds_total", "seconds", "Seconds of prefill and decoding."),
        ("first_token_seconds_total", "ttft_s", "Of these, seconds until the first token."),
    ):
        say(name, "counter", help, ("", counts.get(key, 0)))
    say("waiting", "gauge", "Requests in line.", ("", len(desk.line)))
    return "\n".join(lines) + "\n"


# Command ------------------------------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Serve a converted checkpoint by OpenAI's API, with a chat page at /.",
        epilog="example: python serve.py --checkpoint_path checkpoints/R/model_bf16 --compile",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--checkpoint_path", type=Path, metavar="DIR", help="converted checkpoint; default: the embedded tiny model")
    add("--host", default="127.0.0.1", help="address to listen on; another than this machine's own needs --api_key")
    add("--port", type=int, default=8000, help="0 takes a free one (8000)")
    add("--api_key", metavar="KEY", help="what clients have to send; default: $MOE_FAST_API_KEY, else nothing")
    add("--max_queue", type=int, default=256, metavar="N", help="most requests in line; further ones get 429 (256)")
    add("--max_body", type=int, default=4 << 20, metavar="BYTES", help="largest request (4 MiB)")
    add("--time_limit", type=float, default=600.0, metavar="S", help="most seconds from a request to its end (600)")
    add("--max_seq_len", type=int, metavar="N", help=f"prompt and answer; default: the model's, at most "
        f"{DEFAULT_CHAT_LENGTH}")  # fmt: skip
    add("--compile", action="store_true", help="compile the decode step (and record it as a CUDA graph)")
    add("--compile_prefill", action="store_true", help="compile the prompt's pass too")
    add("--prefill_chunk", type=int, default=PREFILL_CHUNK, metavar="N", help="prompt tokens that are computed at once")
    add("--kv_cache", choices=tuple(KV_CACHES), default="plain", help="int8: keys and values in half the bytes")
    add("--device", default="auto", choices=("auto", "cuda", "cpu"))
    add("--dtype", choices=tuple(DTYPES), help="default: as the checkpoint has it")
    add("--parallel", default="tensor", choices=tp.PARALLEL, help="how torchrun's processes share the experts")
    return parser


def check_options(options: argparse.Namespace) -> None:
    """Raises ValueError for options that cannot be, or cannot be together."""
    for name in ("max_queue", "max_body", "max_seq_len", "prefill_chunk"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ValueError(f"--{name} {value}: it must be at least 1")
    if not 0 <= options.port < 65536:
        raise ValueError(f"--port {options.port}: it must be from 0 to 65535")
    if not options.time_limit > 0:
        raise ValueError(f"--time_limit {options.time_limit}: it must be above 0")
    if options.api_key is None:
        options.api_key = os.environ.get("MOE_FAST_API_KEY")
    if options.api_key is not None and (not options.api_key.isascii() or not options.api_key.strip()):
        raise ValueError("--api_key: it must be ASCII text, and not empty")
    if options.host not in LOCAL and options.api_key is None:
        raise ValueError(f"--host {options.host} can be reached by others: add --api_key, or listen on 127.0.0.1")


def bind(host: str, port: int) -> socket.socket:
    """A socket with this address; nothing connects to it before it listens. Raises ValueError where it is not free."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise ValueError(f"cannot listen on {host} port {port} ({error.strerror}): choose another --port") from None
    return bound


def http_server(app, desk: Desk):
    """The server that runs an app; its `run` is for a thread. Raises ValueError without uvicorn."""
    import uvicorn

    return uvicorn.Server(
        uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=3, timeout_keep_alive=60,
            limit_concurrency=2 * desk.max_queue + 64, h11_max_incomplete_event_size=64 << 10, server_header=False,
            ws="none", lifespan="off",
        )
    )  # fmt: skip


def serve(session: Session, tokenizer: Tokenizer, desk: Desk, app, bound: socket.socket, ready: Callable) -> None:
    """Listen, decode, and end when the desk closes or at a KeyboardInterrupt; `ready` is called once it listens."""
    server = http_server(app, desk)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        if not server.started:
            raise ValueError("the HTTP server did not start: see above why")
        ready()
        decode_all(session, tokenizer, desk)
    finally:
        desk.close()
        server.should_exit = True
        thread.join(timeout=10)
        bound.close()


def run(options: argparse.Namespace) -> None:
    """Load the model and serve it until Ctrl-C."""
    device = world.start(options.device)
    check_options(options)
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        raise ValueError("a server needs FastAPI and uvicorn: pip install 'moe-fast[serve]'") from None
    bound = []
    world.share(lambda: bound.append(bind(options.host, options.port)))
    checkpoint = open_checkpoint(options.checkpoint_path)
    args = model_args(checkpoint)
    if (options.max_seq_len or 0) > args.max_position:
        raise ValueError(f"--max_seq_len {options.max_seq_len}: the model was made for {args.max_position} positions")
    length = options.max_seq_len or min(args.max_position, DEFAULT_CHAT_LENGTH)
    world.agree(vars(options) | {"api_key": None}, checkpoint)
    tokenizer = load_tokenizer(checkpoint.directory)
    model = load_model(checkpoint, device, DTYPES[options.dtype] if options.dtype else None, options.parallel)
    model.cache_kind = KV_CACHES[options.kv_cache]
    session = Session(model, length, options.compile, options.compile_prefill, 1, options.prefill_chunk)
    if options.compile or options.compile_prefill:
        start = time.perf_counter()
        for temperature in (0.0, 1.0):  # the two kinds of step
            list(session.stream([0], 2, Sampling(temperature, seed=0)))
        session.reset()
        if world.is_main():
            print(f"compiled in {time.perf_counter() - start:.1f} s", file=sys.stderr)
    if not world.is_main():
        decode_all(session, tokenizer, None)
        return
    desk = Desk(options.max_queue, options.time_limit)
    name = checkpoint.directory.absolute().parent.name
    app = make_app(desk, load_tokenizer(checkpoint.directory), name, length, options.api_key, options.max_body)
    host, port = bound[0].getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    ready = lambda: print(f"serving {name} on {url}/v1, the chat page on {url}/", file=sys.stderr, flush=True)  # noqa: E731
    serve(session, tokenizer, desk, app, bound[0], ready)


def _terminated(*_) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Run the command; a user's mistake is one line on stderr and exit code 2. Ctrl-C and SIGTERM are how it ends."""
    options = build_parser().parse_args()
    signal.signal(signal.SIGTERM, _terminated)
    try:
        run(options)
        world.stop()
    except torch.cuda.OutOfMemoryError as error:
        return world.fail(f"out of GPU memory ({str(error).splitlines()[0]}): shorten --max_seq_len")
    except (ValueError, OSError) as error:
        return world.fail(str(error).splitlines()[0])
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())

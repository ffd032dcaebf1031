"""An OpenAI-compatible server: `python serve.py --checkpoint_path DIR --compile`, then http://127.0.0.1:8000/v1.

The main thread decodes (desk.py), a second one speaks HTTP, here; what is said is api.py's. docs/server.md says what is
served.
"""

import argparse
import asyncio
import hmac
import json
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import world
from api import ENDS, Job, Refusal, Writer, read_request, sse
from command import Parser
from desk import Desk, decode_all
from generate import (
    DEFAULT_CHAT_LENGTH,
    add_model_options,
    check_counts,
    check_model_options,
    open_checkpoint,
    open_session,
)
from quantize import model_args
from session import Sampling, Session
from tokenizer import Tokenizer, load_tokenizer

PAGE = Path(__file__).with_name("chat.html")
LOCAL = ("127.0.0.1", "localhost", "::1")
BODY_SECONDS = 30.0  # in which a request's body has to arrive


# HTTP ---------------------------------------------------------------------------------------------------------------


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
    for name, key, help in (
        ("expert_hits_total", "hits", "Experts needed, once a layer and pass, that were in a slot."),
        ("expert_guessed_total", "speculative_hits", "Experts needed that had been copied on a guess."),
        ("expert_misses_total", "misses", "Experts needed that were waited for."),
        ("expert_guesses_total", "speculative_loads", "Experts copied on a guess."),
        ("expert_bytes_total", "bytes", "Bytes of experts copied from host memory or files."),
    ):
        if (count := counts.get(f"offload_{key}")) is not None:
            say(name, "counter", help, ("", count))
    say("waiting", "gauge", "Requests in line.", ("", len(desk.line)))
    return "\n".join(lines) + "\n"


# Command ------------------------------------------------------------------------------------------------------------


def build_parser() -> Parser:
    parser = Parser(
        "Serve a converted checkpoint by OpenAI's API, with a chat page at /.",
        (
            "python serve.py --checkpoint_path checkpoints/OWNER/NAME/model_bf16 --compile",
            "python serve.py --checkpoint_path DIR --host 0.0.0.0 --api_key KEY --max_queue 32",
            "python serve.py --checkpoint_path DIR --offload --gpu_memory 16GB --prefetch 2",
        ),
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
    add_model_options(parser)
    return parser


def check_options(options: argparse.Namespace) -> None:
    """Raises ValueError for options that cannot be, or cannot be together."""
    check_model_options(options)
    check_counts(options, "max_queue", "max_body", "max_seq_len")
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
    except ImportError as error:  # of one of them, or of what one of them needs
        raise ValueError(f"a server needs FastAPI and uvicorn ({error}): pip install 'moe-fast[serve]'") from None
    bound = []
    world.share(lambda: bound.append(bind(options.host, options.port)))
    checkpoint = open_checkpoint(options.checkpoint_path)
    args = model_args(checkpoint)
    if (options.max_seq_len or 0) > args.max_position:
        raise ValueError(f"--max_seq_len {options.max_seq_len}: the model was made for {args.max_position} positions")
    length = options.max_seq_len or min(args.max_position, DEFAULT_CHAT_LENGTH)
    world.agree(vars(options) | {"api_key": None}, checkpoint)
    tokenizer = load_tokenizer(checkpoint.directory)
    session = open_session(options, checkpoint, device, length)
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


def command() -> int:
    options = build_parser().parse_args()
    signal.signal(signal.SIGTERM, _terminated)
    run(options)
    world.stop()
    return 0


def main() -> int:
    """Run the command; a user's mistake is one line on stderr and exit code 2. Ctrl-C and SIGTERM are how it ends."""
    try:
        return world.attempt(command, out_of_memory="shorten --max_seq_len")
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main())

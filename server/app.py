"""The HTTP side of the server: a FastAPI app, and the thread that runs it.

The main thread decodes meanwhile (server/scheduler.py).
"""

import argparse
import asyncio
import hmac
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from runtime.session import Session
from server import LOCAL_HOSTS
from server.connections import make_http_server
from server.scheduler import QueuedRequest, Scheduler, decode_requests
from server.schema import (
    APIError,
    Event,
    ResponseBuilder,
    TextDelta,
    read_request,
    server_sent_event,
)
from server.tokenizing import TokenizerPool
from tokenizer import Tokenizer, load_tokenizer

CHAT_PAGE = Path(__file__).with_name("chat.html")
CHAT_PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
)
BODY_TIMEOUT = 30.0  # seconds in which a request's body must arrive


@dataclass(frozen=True)
class AppSettings:
    """Settings of the HTTP side."""

    model_name: str
    max_seq_len: int
    max_body: int  # bytes
    max_requests: int = 256  # that are read or wait at a time
    api_key: str | None = None


def make_app(scheduler: Scheduler, tokenizer: TokenizerPool, settings: AppSettings) -> FastAPI:
    """Return the ASGI app."""
    endpoints = Endpoints(scheduler, tokenizer, settings)
    guarded = APIRouter(dependencies=[Depends(endpoints.check_access)])
    guarded.post("/v1/chat/completions")(endpoints.chat_completions)
    guarded.post("/v1/completions")(endpoints.completions)
    guarded.get("/v1/models")(endpoints.models)
    guarded.get("/metrics")(endpoints.metrics)
    handlers = {
        APIError: endpoints.handle_api_error,
        HTTPException: endpoints.handle_http_error,
        ClientDisconnect: endpoints.handle_disconnect,
    }
    app = FastAPI(openapi_url=None, exception_handlers=handlers)  # without pages about itself
    app.include_router(guarded)
    app.get("/health")(endpoints.health)
    app.get("/")(endpoints.chat_page)
    return app


class Endpoints:
    """The handlers of routes and exceptions, with their shared state."""

    def __init__(self, scheduler: Scheduler, tokenizer: TokenizerPool, settings: AppSettings):
        self.scheduler, self.tokenizer, self.settings = scheduler, tokenizer, settings
        self.reading = ThreadPoolExecutor(tokenizer.workers)
        self.requests = 0  # being read, waiting or answered
        self.started = int(time.time())

    # Completions ------------------------------------------------------------------------------

    async def chat_completions(self, request: Request) -> Response:
        return await self.complete(request, chat=True)

    async def completions(self, request: Request) -> Response:
        return await self.complete(request, chat=False)

    async def complete(self, http_request: Request, chat: bool) -> Response:
        """Queue a request and return its answer as one object or as a stream."""
        with ExitStack() as stack:
            self.admit(stack)
            body, loop = await self.read_body(http_request), asyncio.get_running_loop()
            read = partial(read_request, body, chat, self.tokenizer, self.settings.max_seq_len)
            request = await loop.run_in_executor(self.reading, read)
            events = EventQueue(loop)
            queued = QueuedRequest(request, events.send)
            builder = ResponseBuilder(request, self.settings.model_name, self.tokenizer.vocabulary)
            self.scheduler.submit(queued)
            stack.callback(self.scheduler.cancel, queued)
            event = await events.first(http_request)
            if event is None:
                raise ClientDisconnect
            if isinstance(event, APIError):
                raise event
            if not request.body.stream:
                return self.json_response(builder.completion(event))
            self.count_response(200)
            # The stream outlives this function: it cancels the request when it ends.
            return EventStream(stream_chunks(builder, events, event), stack.pop_all().close)

    def admit(self, stack: ExitStack) -> None:
        """Count a request until the stack closes. Raises APIError if there are too many."""
        if self.requests >= self.settings.max_requests:
            reason = f"{self.requests} requests are open, the limit: try again later"
            raise APIError(reason, 429, "queue_full", {"Retry-After": "1"})
        self.requests += 1

        def leave() -> None:
            self.requests -= 1

        stack.callback(leave)

    async def read_body(self, request: Request) -> bytes:
        """Return a request's body. Raises APIError if it is not JSON, too large or too slow."""
        content_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if content_type != "application/json":
            raise APIError("send the body as Content-Type: application/json", 415)
        body, limit = bytearray(), self.settings.max_body
        try:
            async with asyncio.timeout(BODY_TIMEOUT):
                async for part in request.stream():
                    body += part
                    if len(body) > limit:
                        reason = f"the body is over {limit} bytes, the limit (--max_body)"
                        raise APIError(reason, 413)
        except TimeoutError:
            raise APIError(f"the body did not arrive within {BODY_TIMEOUT:.0f} s", 408) from None
        return bytes(body)

    async def check_access(self, request: Request) -> None:
        """Raise APIError for a wrong API key. A server without a key checks the Host header.

        Otherwise the page of another site could reach a local server by DNS rebinding.
        """
        if self.settings.api_key is None:
            host = re.sub(r":\d*$", "", request.headers.get("host", "")).strip("[]")
            if host.lower() not in LOCAL_HOSTS:
                names = ", ".join(LOCAL_HOSTS)
                fix = f"use one of {names}, or start the server with --api_key"
                raise APIError(f"{host!r:.80} is not a name of this server: {fix}", 403)
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(key.strip().encode(), self.settings.api_key.encode())
        if scheme.lower() != "bearer" or not right:
            reason = "wrong API key: send it as the header Authorization: Bearer KEY"
            raise APIError(reason, 401, "invalid_api_key", {"WWW-Authenticate": "Bearer"})

    # Other routes -----------------------------------------------------------------------------

    async def models(self) -> Response:
        model = {
            "id": self.settings.model_name,
            "object": "model",
            "created": self.started,
            "owned_by": "moe-fast",
            "max_model_len": self.settings.max_seq_len,
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def metrics(self) -> Response:
        return Response(self.scheduler.metrics.export(), media_type=CONTENT_TYPE_LATEST)

    async def health(self) -> Response:
        return JSONResponse({"status": "ok"})

    async def chat_page(self) -> Response:
        headers = {"Content-Security-Policy": CHAT_PAGE_POLICY, "X-Frame-Options": "DENY"}
        return HTMLResponse(CHAT_PAGE.read_text(encoding="utf-8"), headers=headers)

    # Responses --------------------------------------------------------------------------------

    def count_response(self, status: int) -> None:
        self.scheduler.metrics.responses.labels(str(status)).inc()

    def json_response(
        self, value: dict, status: int = 200, headers: dict[str, str] | None = None
    ) -> Response:
        """Return a JSON response, and count it."""
        self.count_response(status)
        return JSONResponse(value, status, headers)

    async def handle_api_error(self, request: Request, error: APIError) -> Response:
        return self.json_response(error.body(), error.status, error.headers)

    async def handle_http_error(self, request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return await self.handle_api_error(request, APIError(message, error.status_code))

    async def handle_disconnect(self, request: Request, error: ClientDisconnect) -> Response:
        return PlainTextResponse("", 400)


class EventQueue:
    """Passes the events of one answer from the decoding thread to the HTTP thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop, self.events = loop, asyncio.Queue()
        self.get = self.events.get

    def send(self, event: Event) -> None:
        """Add an event, from any thread."""
        with suppress(RuntimeError):  # the HTTP thread has ended
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)

    async def first(self, request: Request) -> Event | None:
        """Return the first event, or None if the client disconnects before it."""
        tasks = [asyncio.ensure_future(self.get()), asyncio.ensure_future(request.receive())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return tasks[0].result() if tasks[0].done() else None
        finally:
            for task in tasks:
                task.cancel()


class EventStream(StreamingResponse):
    """A stream of server-sent events that calls `on_close` when it ends, for any reason.

    The generator's own `finally` would not run if the client disconnects before the first chunk.
    """

    def __init__(self, chunks: AsyncIterator[bytes], on_close: Callable[[], None]):
        super().__init__(chunks, media_type="text/event-stream")
        self.on_close = on_close

    async def __call__(self, *connection) -> None:
        try:
            await super().__call__(*connection)
        finally:
            self.on_close()


async def stream_chunks(
    builder: ResponseBuilder, events: EventQueue, event: Event
) -> AsyncIterator[bytes]:
    """Yield the chunks of an answer whose first event is `event`."""
    if builder.body.chat:
        yield builder.role_chunk()
    while isinstance(event, TextDelta):
        yield builder.chunk(event.text, event.tokens, is_reasoning=event.is_reasoning)
        event = await events.get()
    if isinstance(event, APIError):
        yield server_sent_event(event.body())
        return
    yield builder.chunk("", event.tokens, event.result["finish_reason"])
    if builder.body.stream_options.include_usage:
        yield builder.usage_chunk(event)
    yield b"data: [DONE]\n\n"


# Running --------------------------------------------------------------------------------------


def serve_session(
    session: Session,
    directory: Path,
    listener: socket.socket | None,
    options: argparse.Namespace,
    on_ready: Callable[[str], None],
) -> None:
    """Serve a session until Ctrl-C. With several ranks rank 0 listens and the others follow it.

    directory: the session's checkpoint, OWNER/NAME/model_FORMAT. listener: a bound socket; None
    on other ranks. options: those of serve.py. on_ready: gets NAME when the server listens.
    """
    tokenizer = load_tokenizer(directory)
    if listener is None:
        decode_requests(session, tokenizer, None)
        return
    name = directory.absolute().parent.name
    scheduler = Scheduler(options.max_queue, options.time_limit)
    settings = AppSettings(
        name,
        session.max_seq_len,
        options.max_body,
        max_requests=2 * options.max_queue + 64,
        api_key=options.api_key,
    )
    pool = TokenizerPool(directory, session.max_seq_len)
    app = make_app(scheduler, pool, settings)
    with closing(pool):
        run_server(session, tokenizer, scheduler, app, listener, partial(on_ready, name))


def run_server(
    session: Session,
    tokenizer: Tokenizer,
    scheduler: Scheduler,
    app: FastAPI,
    listener: socket.socket,
    on_ready: Callable[[], None],
) -> None:
    """Listen and decode until the scheduler closes or a KeyboardInterrupt.

    Calls `on_ready` when it listens. Raises ValueError if the HTTP thread does not start.
    """
    http_server = make_http_server(app)
    thread = threading.Thread(target=http_server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        while not http_server.started and thread.is_alive():
            time.sleep(0.01)
        if not http_server.started:
            raise ValueError("the HTTP server did not start: its own message is above")
        on_ready()
        decode_requests(session, tokenizer, scheduler)
    finally:
        scheduler.close()
        http_server.should_exit = True
        thread.join(timeout=10)
        listener.close()

"""The HTTP side of the server: a Starlette app, and the thread that runs it.

The main thread decodes meanwhile (server/scheduler.py).
"""

import argparse
import asyncio
import hmac
import logging
import re
import secrets
import signal
import socket
import threading
import time
from codecs import BOM_UTF8
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from cli.serve_options import LOCAL_HOSTS
from host.folders import model_folder
from host.switches import switch_interval
from parallel import process_group
from runtime.session import Session
from runtime.speculation import Speculation
from server.answers import Builder, ResponseBuilder
from server.clients import QueuedRequest
from server.connections import make_http_server
from server.constraints import grammar_tokens
from server.errors import APIError
from server.message_blocks import MessageBuilder
from server.messages import PATH, count_tokens, error_body, read_message
from server.page_files import page_response
from server.plan import GenerationRequest, Limits, read_request
from server.response_items import ResponsesBuilder
from server.response_store import ItemStore
from server.responses import read_responses_request
from server.scheduler import Decoder, Scheduler
from server.streams import EventQueue, EventStream, Mailbox, stream_chunks
from server.tokenizing import TokenizerPool, TokenizerUnavailableError
from server.tokens import detokenize, tokenize
from tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger("moe_fast")
Prepared = tuple[GenerationRequest, Builder]
Endpoint = Callable[[Request], Awaitable[Response]]
# A thread keeps Python's lock for this time. The default is as long as a decode step: the main
# thread would launch the next step late.
SWITCH_SECONDS = 5e-4
REQUEST_ID = "request-id"  # a header of Anthropic's API
BODY_TIMEOUT = 30.0  # seconds in which a request's body must arrive


@dataclass(frozen=True)
class AppSettings:
    """Settings of the HTTP side."""

    model_name: str
    limits: Limits
    max_body: int  # bytes
    max_requests: int = 256  # that are read or wait at a time
    api_key: str | None = None
    cors_origin: str | None = None  # whose web pages may use the API
    format: str | None = None  # the weights'


def make_app(scheduler: Scheduler, tokenizer: TokenizerPool, settings: AppSettings) -> Starlette:
    """Return the ASGI app."""
    endpoints = Endpoints(scheduler, tokenizer, settings)
    guard, post = endpoints.guard, ["POST"]

    def answer(prepare: Callable[[bytes], Prepared]) -> Endpoint:
        return guard(partial(endpoints.complete, prepare=prepare))

    routes = [  # by GET and HEAD, unless by POST
        Route("/v1/chat/completions", answer(partial(endpoints.prepare, chat=True)), methods=post),
        Route("/v1/completions", answer(partial(endpoints.prepare, chat=False)), methods=post),
        Route("/v1/responses", answer(endpoints.prepare_response), methods=post),
        Route("/v1/responses/{id}", guard(endpoints.stored_response)),
        Route("/v1/responses/{id}", guard(endpoints.delete_response), methods=["DELETE"]),
        Route("/v1/responses/{id}/input_items", guard(endpoints.input_items)),
        Route("/v1/messages", guard(endpoints.messages), methods=post),
        Route("/v1/messages/count_tokens", guard(endpoints.count_tokens), methods=post),
        Route("/v1/embeddings", guard(endpoints.embeddings), methods=post),
        Route("/tokenize", guard(partial(endpoints.convert, compute=tokenize)), methods=post),
        Route("/detokenize", guard(partial(endpoints.convert, compute=detokenize)), methods=post),
        Route("/v1/models", guard(endpoints.models)),
        Route("/v1/models/{name:path}", guard(endpoints.model)),
        Route("/metrics", guard(endpoints.metrics)),
        Route("/health", endpoints.health),
        Route("/", endpoints.chat_page),
        Route("/page/{name:path}", endpoints.page_file),
    ]
    handlers = {
        APIError: endpoints.handle_api_error,
        HTTPException: endpoints.handle_http_error,
        ClientDisconnect: endpoints.handle_disconnect,
        Exception: endpoints.handle_failure,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    if settings.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=[settings.cors_origin],
            allow_methods=["GET", "HEAD", "POST", "DELETE"],
            allow_headers=["*"],
        )
    return app


class Endpoints:
    """The handlers of routes and exceptions, with their shared state."""

    def __init__(self, scheduler: Scheduler, tokenizer: TokenizerPool, settings: AppSettings):
        self.scheduler, self.tokenizer, self.settings = scheduler, tokenizer, settings
        self.reading = ThreadPoolExecutor(tokenizer.workers)
        self.requests = 0  # being read, waiting or answered
        self.items = ItemStore()
        self.template_variables = tokenizer.vocabulary.template_variables()
        self.mailbox = Mailbox()
        scheduler.deliver = self.mailbox.deliver
        self.started = int(time.time())

    # Completions ------------------------------------------------------------------------------

    def prepare(self, body: bytes, chat: bool) -> Prepared:
        """Read a request's body. Raises APIError."""
        request = read_request(body, chat, self.tokenizer, self.settings.limits)
        name = self.settings.model_name
        return request, ResponseBuilder(request, name, self.tokenizer.vocabulary)

    def prepare_response(self, body: bytes) -> Prepared:
        """Read the body of POST /v1/responses. Raises APIError."""
        limits, vocabulary = self.settings.limits, self.tokenizer.vocabulary
        fields, request = read_responses_request(body, self.tokenizer, limits, self.items)
        name = self.settings.model_name
        return request, ResponsesBuilder(fields, request, name, vocabulary, self.items)

    def prepare_message(self, body: bytes) -> Prepared:
        """Read the body of POST /v1/messages. Raises APIError."""
        fields, request = read_message(body, self.tokenizer, self.settings.limits)
        name, vocabulary = self.settings.model_name, self.tokenizer.vocabulary
        return request, MessageBuilder(fields, request, name, vocabulary)

    async def complete(
        self, http_request: Request, prepare: Callable[[bytes], Prepared]
    ) -> Response:
        """Queue a request and return its answer as one object or as a stream."""
        with ExitStack() as stack:
            self.admit(stack)
            body, loop = await self.read_body(http_request), asyncio.get_running_loop()
            request, builder = await loop.run_in_executor(self.reading, prepare, body)
            self.mailbox.loop = loop
            events = EventQueue(self.mailbox)
            queued = QueuedRequest(request, events.send)
            self.scheduler.submit(queued)
            stack.callback(self.scheduler.cancel, queued)
            event = await events.next(http_request)
            if isinstance(event, APIError):  # before the stream begins: with its status
                raise event
            if not request.body.stream:
                ends = await events.ends(event, len(request.generations), http_request)
                return self.json_response(builder.completion(ends))
            self.count_response(200)
            # The stream outlives this function: it cancels the request when it ends.
            chunks = stream_chunks(builder, events, event, len(request.generations))
            return EventStream(chunks, stack.pop_all().close)

    async def stored_response(self, request: Request) -> Response:
        return JSONResponse(self.items.response(request.path_params["id"]).response)

    async def delete_response(self, request: Request) -> Response:
        id = request.path_params["id"]
        self.items.remove(id)
        return JSONResponse({"id": id, "object": "response", "deleted": True})

    async def input_items(self, request: Request) -> Response:
        input = self.items.response(request.path_params["id"]).input
        return JSONResponse({"object": "list", "data": input, "has_more": False})

    async def messages(self, request: Request) -> Response:
        return with_request_id(await self.complete(request, self.prepare_message))

    async def count_tokens(self, request: Request) -> Response:
        return with_request_id(await self.convert(request, count_tokens))

    async def embeddings(self, request: Request) -> Response:
        fix = "send it to a server of an embedding model"
        raise APIError(f"this server generates text and has no embeddings: {fix}", 400)

    async def convert(self, request: Request, compute: Callable[..., dict]) -> Response:
        """Answer a request that needs the tokenizer alone."""
        with ExitStack() as stack:
            self.admit(stack)
            body, loop = await self.read_body(request), asyncio.get_running_loop()
            given = body, self.tokenizer, self.settings.limits.max_seq_len
            return self.json_response(await loop.run_in_executor(self.reading, compute, *given))

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
        coding = request.headers.get("content-encoding", "").lower()
        if coding not in ("", "identity"):
            raise APIError(f"send the body without Content-Encoding {coding!r:.40}", 415)
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
        return bytes(body).removeprefix(BOM_UTF8)

    def guard(self, endpoint: Endpoint) -> Endpoint:
        """Return an endpoint that checks access first."""

        async def guarded(request: Request) -> Response:
            self.check_access(request)
            return await endpoint(request)

        return guarded

    def check_access(self, request: Request) -> None:
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
        keys = [key.strip()] if scheme.lower() == "bearer" else []
        keys.append(request.headers.get("x-api-key", ""))  # of Anthropic's clients
        expected = self.settings.api_key.encode()
        if not any([hmac.compare_digest(key.encode(), expected) for key in keys]):
            reason = "wrong API key: send it as the header Authorization: Bearer KEY, or x-api-key"
            raise APIError(reason, 401, "invalid_api_key", {"WWW-Authenticate": "Bearer"})

    # Other routes -----------------------------------------------------------------------------

    def describe_model(self) -> dict:
        return {
            "id": self.settings.model_name,
            "object": "model",
            "created": self.started,
            "owned_by": "moe-fast",
            "max_model_len": self.settings.limits.max_seq_len,
            "chat_template": self.tokenizer.has_chat_template,
            "template_variables": self.template_variables,
            "format": self.settings.format,
            # Anthropic's names.
            "type": "model",
            "display_name": self.settings.model_name,
            "created_at": datetime.fromtimestamp(self.started, UTC).isoformat(),
            "max_input_tokens": self.settings.limits.max_seq_len,
        }

    async def models(self, request: Request) -> Response:
        ends = dict.fromkeys(("first_id", "last_id"), self.settings.model_name)
        data = {"object": "list", "data": [self.describe_model()], "has_more": False}
        return JSONResponse(data | ends)

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self.settings.model_name:
            reason = f"the model {name!r:.80} is not here: it is {self.settings.model_name!r}"
            raise APIError(reason, 404, "model_not_found", param="model")
        return JSONResponse(self.describe_model())

    async def metrics(self, request: Request) -> Response:
        return Response(self.scheduler.metrics.export(), media_type=CONTENT_TYPE_LATEST)

    async def health(self, request: Request) -> Response:
        try:
            await asyncio.get_running_loop().run_in_executor(None, self.tokenizer.check)
        except TokenizerUnavailableError as error:
            return JSONResponse({"status": "error", "reason": str(error)}, 503)
        if self.scheduler.drain_until is not None:
            return JSONResponse({"status": "ending"}, 503)
        return JSONResponse({"status": "ok"})

    async def chat_page(self, request: Request) -> Response:
        return self.send_page("index.html")

    async def page_file(self, request: Request) -> Response:
        return self.send_page(request.path_params["name"])

    def send_page(self, name: str) -> Response:
        try:
            return page_response(name)
        except KeyError:
            raise HTTPException(404) from None

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
        if request.url.path.startswith(PATH):
            id = new_request_id()
            body, headers = error_body(error, id), error.headers | {REQUEST_ID: id}
            return self.json_response(body, error.status, headers)
        return self.json_response(error.body(), error.status, error.headers)

    async def handle_http_error(self, request: Request, error: HTTPException) -> Response:
        headers = dict(error.headers or {})  # 405 has the methods that a route allows
        message = f"{request.method} {request.url.path:.80}: {error.detail}"
        if error.status_code == 404:
            message += "; the API's routes are those of /v1, such as /v1/chat/completions"
        elif error.status_code == 405:
            message += f"; send {headers['Allow']}"
        failure = APIError(message, error.status_code, headers=headers)
        return await self.handle_api_error(request, failure)

    async def handle_failure(self, request: Request, error: Exception) -> Response:
        """Answer in JSON, as clients expect; uvicorn logs the traceback."""
        failure = APIError(f"the server failed: {type(error).__name__}", 500)
        return await self.handle_api_error(request, failure)

    async def handle_disconnect(self, request: Request, error: ClientDisconnect) -> Response:
        return PlainTextResponse("", 400)


def new_request_id() -> str:
    return f"req_{secrets.token_hex(12)}"


def with_request_id(response: Response) -> Response:
    """Return a response with the header that Anthropic's clients log."""
    response.headers[REQUEST_ID] = new_request_id()
    return response


# Running --------------------------------------------------------------------------------------


def serve_session(
    session: Session,
    directory: Path,
    listener: socket.socket | None,
    options: argparse.Namespace,
    on_ready: Callable[[str], None],
    speculation: Speculation | None = None,
) -> None:
    """Serve a session until Ctrl-C. With several ranks rank 0 listens and the others follow it.

    directory: the session's checkpoint, OWNER/NAME/model_FORMAT. listener: a bound socket; None
    on other ranks. options: those of serve.py. on_ready: gets NAME when the server listens.
    speculation: as in `Decoder`.
    """
    tokenizer, scheduler = load_tokenizer(directory), None
    tokenizer.check_ids((), session.model.args.vocab_size)
    name = model_folder(directory)
    if listener:
        scheduler = Scheduler(options.max_queue, options.time_limit, options.max_batch, name)
    decoder = Decoder(session, tokenizer, scheduler, speculation)
    decoder.prepare()
    if listener is None:
        decoder.run()
        return
    settings = AppSettings(
        name,
        make_limits(session, tokenizer),
        options.max_body,
        max_requests=2 * options.max_queue + 64,
        api_key=options.api_key,
        cors_origin=options.cors_origin,
        format=options.weights_format,
    )
    pool = TokenizerPool(directory, session.max_seq_len)
    app = make_app(scheduler, pool, settings)
    with closing(pool), drain_on_sigterm(scheduler, options.drain):
        run_server(decoder, app, listener, partial(on_ready, name))


@contextmanager
def drain_on_sigterm(scheduler: Scheduler, seconds: float) -> Iterator[None]:
    """Within, the first SIGTERM drains the scheduler; the next one ends the process as before.

    Several ranks end at once: torchrun sends SIGTERM also when one of them has died.
    """
    if process_group.size() > 1 or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)

    def drain(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, before)
        log.info("draining: running answers have %.0f s to end", seconds)
        scheduler.drain(seconds)

    signal.signal(signal.SIGTERM, drain)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def make_limits(session: Session, tokenizer: Tokenizer) -> Limits:
    """Return what requests to this session may ask for."""
    vocab_size = session.model.args.vocab_size

    def check_grammar(grammar: str) -> None:
        grammar_tokens(tokenizer, vocab_size).matcher(grammar)

    return Limits(session.max_seq_len, vocab_size, check_grammar)


def run_server(
    decoder: Decoder, app: Starlette, listener: socket.socket, on_ready: Callable[[], None]
) -> None:
    """Listen and decode until the scheduler closes or a KeyboardInterrupt.

    Calls `on_ready` when it listens. Raises ValueError if another program has begun to listen on
    the address, and if the HTTP thread does not start.
    """
    try:
        listener.listen()
    except OSError as error:
        port = listener.getsockname()[1]
        raise ValueError(
            f"cannot listen on port {port} any more ({error.strerror}): choose another --port"
        ) from None
    http_server = make_http_server(app)
    thread = threading.Thread(target=http_server.run, args=([listener],), daemon=True)
    with switch_interval(SWITCH_SECONDS):
        thread.start()
        try:
            while not http_server.started and thread.is_alive():
                time.sleep(0.01)
            if not http_server.started:
                raise ValueError("the HTTP server did not start: its own message is above")
            on_ready()
            decoder.run()
        finally:
            decoder.scheduler.close()
            http_server.should_exit = True
            thread.join(timeout=10)
            listener.close()

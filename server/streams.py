"""Events on their way from the decoding thread to a client."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse

from server.answers import Builder, Event, Finished
from server.errors import APIError

log = logging.getLogger("moe_fast")


class Mailbox:
    """Events on their way to the HTTP thread, which is woken once for all of a step's events.

    Waking it for each would cost 0.1 ms: the threads exchange Python's lock.
    """

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.events: deque[tuple[asyncio.Queue, Event]] = deque()

    def deliver(self) -> None:
        """Put the events into their queues soon; from any thread."""
        if self.events and self.loop:
            with suppress(RuntimeError):  # the HTTP thread has ended
                self.loop.call_soon_threadsafe(self.distribute)

    def distribute(self) -> None:
        """Put the events into their queues, on the HTTP thread."""
        while self.events:
            queue, event = self.events.popleft()
            queue.put_nowait(event)


class EventQueue:
    """Passes the events of one request from the decoding thread to the HTTP thread."""

    def __init__(self, mailbox: Mailbox):
        self.mailbox, self.events = mailbox, asyncio.Queue()
        self.get, self.empty = self.events.get, self.events.empty

    def send(self, event: Event) -> None:
        """Add an event, from any thread; `Mailbox.deliver` makes it arrive."""
        self.mailbox.events.append((self.events, event))

    async def next(self, request: Request) -> Event:
        """Return the next event. Raises ClientDisconnect if the client leaves before it."""
        tasks = [asyncio.ensure_future(self.get()), asyncio.ensure_future(request.receive())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not tasks[0].done():
                raise ClientDisconnect
            return tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()

    async def ends(self, event: Event, count: int, request: Request) -> list[Finished]:
        """Return the ends of `count` answers, of which `event` is the first.

        Raises APIError if one fails, and ClientDisconnect.
        """
        found = []
        while True:
            if isinstance(event, APIError):
                raise event
            found.append(event)
            if len(found) == count:
                return found
            event = await self.next(request)


class EventStream(StreamingResponse):
    """A stream of server-sent events that calls `on_close` when it ends, for any reason.

    The generator's own `finally` would not run if the client disconnects before the first chunk.
    """

    def __init__(self, chunks: AsyncIterator[bytes], on_close: Callable[[], None]):
        # Proxies neither store the stream nor collect it (X-Accel-Buffering: nginx).
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(chunks, media_type="text/event-stream", headers=headers)
        self.on_close = on_close

    async def __call__(self, *connection) -> None:
        try:
            await super().__call__(*connection)
        finally:
            self.on_close()


async def stream_chunks(
    builder: Builder, events: EventQueue, event: Event, answers: int
) -> AsyncIterator[bytes]:
    """Yield the chunks of a stream with this many answers, whose first event is `event`.

    Chunks of events that are there are joined: each part that is sent costs a system call.
    """
    chunks = [*builder.start()]
    while True:
        if isinstance(event, APIError):
            chunks.append(builder.error(event))
            break
        ended = isinstance(event, Finished)
        try:
            chunks += builder.end(event) if ended else builder.deltas(event)
        except Exception as error:  # the status has been sent: `handle_failure` comes too late
            log.exception("a stream has failed")
            failure = APIError(f"the server failed: {type(error).__name__}", 500)
            chunks.append(builder.error(failure))
            break
        answers -= ended
        if not answers:
            break
        if events.empty():
            yield b"".join(chunks)
            chunks = []
        event = await events.get()
    yield b"".join(chunks)

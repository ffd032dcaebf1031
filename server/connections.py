"""uvicorn's server, with a limit on the time in which a request's headers must arrive."""

import asyncio

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_TIMEOUT = 10.0  # seconds from a connection's, or a request's, first byte
SHUTDOWN_SECONDS = 1  # that answers in flight have to end


class TimedProtocol(H11Protocol):
    """Closes a connection whose headers are late; uvicorn has a timeout for idle ones only.

    Otherwise silent sockets would use up the server's file descriptors.
    """

    header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self.start_timer()

    def data_received(self, data: bytes) -> None:
        if self.header_timer is None and not self.in_request():
            self.start_timer()
        super().data_received(data)
        if self.in_request():
            self.stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_timer()
        super().connection_lost(exc)

    def in_request(self) -> bool:
        """Whether the headers of a request are there, and its response is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def start_timer(self) -> None:
        self.header_timer = self.loop.call_later(HEADER_TIMEOUT, self.transport.close)

    def stop_timer(self) -> None:
        if self.header_timer is not None:
            self.header_timer.cancel()
            self.header_timer = None


def make_http_server(app: Starlette) -> uvicorn.Server:
    """Return a server for an app. Its `run` takes a list of sockets.

    It accepts any number of connections: the app limits requests.
    """
    config = uvicorn.Config(
        app,
        http=TimedProtocol,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        timeout_keep_alive=60,
        h11_max_incomplete_event_size=64 << 10,
        server_header=False,
        ws="none",
        lifespan="off",
    )
    return uvicorn.Server(config)

"""uvicorn's server, with limits on the time that a client may take to send and to read."""

import asyncio
import json
import socket
import sys

import anyio
import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from server.errors import APIError

HEADER_TIMEOUT = 10.0  # seconds from a connection's, or a request's, first byte
READ_TIMEOUT = 60.0  # seconds in which a client must read something of what is waiting for it
# Seconds after which the kernel asks whether an idle client is there, and between its questions.
KEEPALIVE_IDLE, KEEPALIVE_INTERVAL, KEEPALIVE_COUNT = 30, 10, 3
SHUTDOWN_SECONDS = 1  # that answers in flight have to end


class TimedProtocol(H11Protocol):
    """Closes a connection whose headers are late, and one whose client does not read.

    uvicorn has a timeout for idle connections only. Without these, silent sockets would use up the
    server's file descriptors, and answers that nobody reads would fill its queue.
    """

    header_timer: asyncio.TimerHandle | None = None
    read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # `pause_writing` is called for any bytes that wait
        ask_whether_alive(transport.get_extra_info("socket"))
        self.start_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.wait_for_reader()

    def resume_writing(self) -> None:
        self.stop_read_timer()
        super().resume_writing()

    def wait_for_reader(self, before: float = float("inf")) -> None:
        """Close the connection if none of the bytes that wait was read in READ_TIMEOUT.

        before: how many waited then.
        """
        waiting = self.transport.get_write_buffer_size()
        if waiting < before:
            self.read_timer = self.loop.call_later(READ_TIMEOUT, self.wait_for_reader, waiting)
        else:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.header_timer is None and not self.in_request():
            self.start_timer()
        super().data_received(data)
        if self.in_request():
            self.stop_timer()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, in JSON as all else."""
        body = json.dumps(APIError(msg).body()).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        response = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_timer()
        self.stop_read_timer()
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

    def stop_read_timer(self) -> None:
        if self.read_timer is not None:
            self.read_timer.cancel()
            self.read_timer = None


def ask_whether_alive(connection: socket.socket) -> None:
    """Let the kernel close a connection whose client has gone without closing it.

    A request of such a client would be answered to its end.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_COUNT)


def make_http_server(app: Starlette) -> uvicorn.Server:
    """Return a server for an app. Its `run` takes a list of sockets.

    It accepts any number of connections: the app limits requests.
    """
    # This imports what the first stream would import, for a tenth of a second without a token.
    anyio.run(anyio.sleep, 0)
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

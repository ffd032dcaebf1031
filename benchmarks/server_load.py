"""Load on a server: time to the first token, tokens/s, and whether memory grows.

    python benchmarks/server_load.py --clients 200
    python benchmarks/server_load.py --clients 8 --requests 2000 --new_tokens 8
    python benchmarks/server_load.py --url http://127.0.0.1:8000 --clients 8
    python benchmarks/server_load.py --conversation 1086

Each client sends one streamed completion after the other, until --requests are done. Without --url
the script starts serve.py with the embedded model, and --server has its options. Prompts differ
from their first token on, so that no prefix is reused. The command fails if an answer is lost or
cut. Memory is the server's resident set after the first tenth of the requests and at the end.

--conversation measures how long the second turn of a chat waits for its first token: at once, and
after a request for a title, as chat pages send it.
"""

import argparse
import asyncio
import json
import math
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import httpx

from cli.parser import Parser

ROOT = Path(__file__).parents[1]


@contextmanager
def server(options: str) -> Iterator[tuple[str, int]]:
    """Start serve.py on a free port; yield its URL and process id."""
    command = [sys.executable, "serve.py", "--port", "0", *shlex.split(options)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        for line in process.stderr:
            if found := re.search(r"on (http://\S+)/v1", line):
                yield found[1], process.pid
                return
        sys.exit(f"serve.py ended with code {process.wait()}")
    finally:
        process.terminate()
        process.wait()


def resident_mb(pid: int) -> float:
    """Return a process's resident set in MB."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", text)[1]) / 1000


async def stream_completion(
    client: httpx.AsyncClient, url: str, body: dict
) -> tuple[float | None, int]:
    """Stream an answer; return the seconds to its first token, if there is one, and its tokens."""
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    started, first, tokens = time.perf_counter(), None, 0
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if first is None and chunk.get("choices"):
                first = time.perf_counter() - started
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
    return first, tokens


class Load:
    """The clients' requests, and what they measured."""

    def __init__(self, options: argparse.Namespace, url: str, pid: int | None):
        self.options, self.url, self.pid = options, url, pid
        self.numbers = iter(range(options.requests or options.clients))
        self.firsts: list[float] = []  # seconds to the first token
        self.tokens = self.lost = 0
        self.memory: list[float] = []

    async def run(self) -> float:
        """Run all clients; return the seconds that they took."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=None, limits=limits) as client:
            if self.options.connect_first:
                await asyncio.gather(*(self.connect(client) for _ in range(self.options.clients)))
            started = time.perf_counter()
            await asyncio.gather(*(self.ask_all(client) for _ in range(self.options.clients)))
            return time.perf_counter() - started

    async def connect(self, client: httpx.AsyncClient) -> None:
        """Stream two tokens: a connection is open and both processes have run this code."""
        await stream_completion(client, self.url, {"prompt": [7, 8, 9], "max_tokens": 2})

    async def ask_all(self, client: httpx.AsyncClient) -> None:
        """Be one client: send the next request until none is left."""
        for number in self.numbers:
            await self.ask(client, number)
            done, total = len(self.firsts) + self.lost, self.options.requests or 0
            if self.pid and done in (total // 10, total):
                self.memory.append(resident_mb(self.pid))

    async def ask(self, client: httpx.AsyncClient, number: int) -> None:
        """Stream one completion."""
        length, count = self.options.prompt_tokens, self.options.new_tokens
        prompt = [10 + (number * 7919 + n * n) % 4000 for n in range(length)]
        body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "seed": number}
        first, found = await stream_completion(client, self.url, body)
        if first is None or not found:
            self.lost += 1
            return
        self.firsts.append(first)
        self.tokens += found

    def report(self, seconds: float) -> str:
        ordered = sorted(self.firsts) or [math.nan]  # none, if every answer is lost
        last = ordered[int(0.95 * (len(ordered) - 1))]
        lines = [
            f"{self.options.clients} clients, {len(self.firsts)} answers, {self.lost} lost, "
            f"{seconds:.1f} s",
            f"first token: median {statistics.median(ordered):.3f} s, 95 % within {last:.3f} s",
            f"{self.tokens / seconds:.1f} tokens/s of all clients",
        ]
        if len(self.memory) > 1:
            lines.append(f"memory {self.memory[0]:.0f} MB, at the end {self.memory[-1]:.0f} MB")
        return "\n".join(lines)


async def first_token(client: httpx.AsyncClient, url: str, prompt: list[int], count: int) -> float:
    """Return the seconds to the first token of an answer of `count` tokens."""
    body = {"prompt": prompt, "max_tokens": count, "temperature": 0}
    first, _ = await stream_completion(client, url, body)
    return math.nan if first is None else first


async def measure_conversation(url: str, length: int) -> str:
    """Return the times of turns of a chat whose first prompt has `length` tokens, as text."""
    turns = {"first turn": [], "second turn": [], "second turn, after a title": []}
    async with httpx.AsyncClient(timeout=None) as client:
        for number in range(5):
            for with_title in (False, True):
                begin = [100 + 2 * number + with_title]
                talk = begin + [10 + (7 * n + n * n) % 4000 for n in range(length)]
                turns["first turn"].append(await first_token(client, url, talk, 16))
                if with_title:
                    await first_token(client, url, [50, 60, *talk[: length // 2]], 8)
                name = "second turn, after a title" if with_title else "second turn"
                turns[name].append(await first_token(client, url, [*talk, *range(200, 240)], 16))
    return "\n".join(f"{name}: {statistics.median(s):.3f} s" for name, s in turns.items())


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/server_load.py --clients 200",
            "python benchmarks/server_load.py --clients 8 --requests 2000 --new_tokens 8",
            "python benchmarks/server_load.py --url http://127.0.0.1:8000 --clients 8",
            "python benchmarks/server_load.py --conversation 1086",
        ),
    )
    add = parser.add_argument
    add("--url", help="a running server's; default: start one with the embedded model")
    add("--server", default="", metavar="OPTIONS", help="options of the server to start")
    add("--conversation", type=int, metavar="N", help="measure the turns of a chat of N tokens")
    add("--clients", type=int, default=8, help="requests in flight (8)")
    add("--requests", type=int, help="of all clients (one each)")
    add("--prompt_tokens", type=int, default=16, help="tokens of a prompt (16)")
    add("--connect_first", action="store_true", help="start the clock with open connections")
    add("--new_tokens", type=int, default=32, help="tokens of an answer (32)")
    return parser


def main() -> None:
    options = build_parser().parse_args()
    with nullcontext((options.url, None)) if options.url else server(options.server) as (url, pid):
        url = url.rstrip("/")
        if options.conversation:
            print(asyncio.run(measure_conversation(url, options.conversation)))
            return
        load = Load(options, url, pid)
        print(load.report(asyncio.run(load.run())))
    if load.lost:
        sys.exit(1)


if __name__ == "__main__":
    main()

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
import http.client
import json
import math
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from urllib.parse import urlsplit

from cli.parser import Parser

ROOT = Path(__file__).parents[1]


@contextmanager
def server(options: str) -> Iterator[tuple[str, int]]:
    """Start serve.py on a free port; yield its URL and process id."""
    command = [sys.executable, "serve.py", "--port", "0", *shlex.split(options)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        for line in process.stderr:
            print(line, end="", file=sys.stderr)
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


class Connection:
    """One client's connection to a server. http.client takes little time of what is measured."""

    def __init__(self, url: str):
        parts = urlsplit(url)
        self.path = f"{parts.path}/v1/completions"
        self.connection = http.client.HTTPConnection(parts.netloc)

    def stream(self, body: dict) -> tuple[float | None, int]:
        """Stream an answer; return the seconds to its first token, if it has one, and its tokens.

        An answer that fails has no tokens.
        """
        started, first, tokens = time.perf_counter(), None, 0
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
        headers = {"Content-Type": "application/json"}
        self.connection.request("POST", self.path, json.dumps(body), headers)
        for line in self.connection.getresponse():
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line.removeprefix(b"data: "))
            if first is None and chunk.get("choices"):
                first = time.perf_counter() - started
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
        return first, tokens

    def first_token(self, prompt: list[int], count: int) -> float:
        """Return the time to the first token of an answer of `count` tokens."""
        first, _ = self.stream({"prompt": prompt, "max_tokens": count, "temperature": 0})
        return math.nan if first is None else first


class Load:
    """The clients' requests, and what they measured. Each client is a thread."""

    def __init__(self, options: argparse.Namespace, url: str, pid: int | None):
        self.options, self.url, self.pid = options, url, pid
        self.numbers = iter(range(options.requests or options.clients))
        self.answers: list[tuple[float | None, int]] = []  # as `Connection.stream` returns them
        self.memory: list[float] = []

    def run(self) -> float:
        """Run all clients; return the seconds that they took."""
        clients = [Connection(self.url) for _ in range(self.options.clients)]
        with ThreadPoolExecutor(len(clients)) as pool:
            if self.options.connect_first:
                list(pool.map(self.connect, clients))
            started = time.perf_counter()
            list(pool.map(self.ask_all, clients))
            return time.perf_counter() - started

    def connect(self, client: Connection) -> None:
        """Stream two tokens: a connection is open and both processes have run this code."""
        client.stream({"prompt": [7, 8, 9], "max_tokens": 2})

    def ask_all(self, client: Connection) -> None:
        """Be one client: send the next request until none is left."""
        for number in self.numbers:
            length, count = self.options.prompt_tokens, self.options.new_tokens
            prompt = [10 + (number * 7919 + n * n) % 4000 for n in range(length)]
            body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "seed": number}
            self.answers.append(client.stream(body))
            done, total = len(self.answers), self.options.requests or 0
            if self.pid and done in (total // 10, total):
                self.memory.append(resident_mb(self.pid))

    @property
    def firsts(self) -> list[float]:
        """The seconds to the first token of each answer that is whole."""
        return [first for first, tokens in self.answers if first is not None and tokens]

    @property
    def lost(self) -> int:
        """The number of answers without a token, or cut."""
        return len(self.answers) - len(self.firsts)

    def report(self, seconds: float) -> str:
        ordered = sorted(self.firsts) or [math.nan]  # none, if every answer is lost
        last = ordered[math.ceil(0.95 * len(ordered)) - 1]
        tokens = sum(count for _, count in self.answers)
        lines = [
            f"{self.options.clients} clients, {len(self.firsts)} answers, {self.lost} lost, "
            f"{seconds:.1f} s",
            f"first token: median {statistics.median(ordered):.3f} s, 95 % within {last:.3f} s",
            f"{tokens / seconds:.1f} tokens/s of all clients",
        ]
        if len(self.memory) > 1:
            lines.append(f"memory {self.memory[0]:.0f} MB, at the end {self.memory[-1]:.0f} MB")
        return "\n".join(lines)


def measure_conversation(url: str, length: int) -> str:
    """Return the times of turns of a chat whose first prompt has `length` tokens, as text."""
    turns = {"first turn": [], "second turn": [], "second turn, after a title": []}
    client = Connection(url)
    for number in range(5):
        for with_title in (False, True):
            begin = [100 + 2 * number + with_title]
            talk = begin + [10 + (7 * n + n * n) % 4000 for n in range(length)]
            turns["first turn"].append(client.first_token(talk, 16))
            if with_title:
                client.first_token([50, 60, *talk[: length // 2]], 8)
            name = "second turn, after a title" if with_title else "second turn"
            turns[name].append(client.first_token([*talk, *range(200, 240)], 16))
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
            print(measure_conversation(url, options.conversation))
            return
        load = Load(options, url, pid)
        print(load.report(load.run()))
    if load.lost:
        sys.exit(1)


if __name__ == "__main__":
    main()

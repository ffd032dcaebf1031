"""Turns of a chat and of a server: time to the first token of each.

    python benchmarks/turns.py --arch Qwen3-30B-A3B --mode int4
    python benchmarks/turns.py --arch Qwen3-30B-A3B --mode int4 --server

Random weights are written as a checkpoint first; --checkpoint DIR keeps it for the next run, or is
a model's own. The chat is generate.py's: its session, drafts and captures between turns, in a
process of its own. Each turn goes on with all tokens so far and has --tokens new ones. A prompt is
"eager", "captured" (as a graph, after an eager run) or "replayed".

The server is serve.py, asked over HTTP: three prompts as soon as it is ready, the turns of a
conversation when it has been idle, then both beside another answer, and a long prompt beside it.
The pause is the longest time between two tokens of that answer meanwhile.

Both start with an empty compile cache, unless --compile_cache names one.
"""

import argparse
import http.client
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from benchmarks.cold_start import STARTED, make_checkpoint
from benchmarks.server_load import server
from cli.options import add_compile_cache, add_device
from cli.parser import Parser
from host.compile_helper import start_before_imports

ROOT = Path(__file__).parents[1]
AT_ONCE = 3  # requests when a server is ready
SPEED = 64  # tokens of each of their answers


class Tokens:
    """Random token ids, the same in every run. No text begins as another: no prefix is reused."""

    def __init__(self, vocab_size: int):
        self.vocab_size, self.random = vocab_size, random.Random(0)

    def take(self, count: int) -> list[int]:
        """Return the next tokens."""
        return self.random.choices(range(self.vocab_size), k=count)


def in_ms(values: list[float]) -> str:
    """Return seconds as a list of milliseconds."""
    return " ".join(f"{1e3 * value:.2f}" for value in values)


# An answer's `times` are those of its request and of each of its tokens.


def firsts(answers: list[list[float]]) -> list[float]:
    """Return the seconds to the first token of each answer."""
    return [times[1] - times[0] for times in answers]


def speed(times: list[float]) -> float:
    """Return an answer's tokens/s after the first, 0 if it has no other."""
    return (len(times) - 2) / (times[-1] - times[1]) if len(times) > 2 else 0


def longest(times: list[float]) -> float:
    """Return the longest seconds between two tokens of an answer."""
    return max((b - a for a, b in pairwise(times[1:])), default=0)


# A chat -------------------------------------------------------------------------------------------


def note_graphs() -> list[str]:
    """Return a list that gets, from now on, how each chunk that may be captured runs."""
    from runtime.graphs import GraphCache

    call, seen = GraphCache.__call__, []

    def noted(graphs: GraphCache, key, *arguments):
        known = "captured" if key in graphs.known else "eager"
        seen.append("replayed" if graphs.has(key) else known)
        return call(graphs, key, *arguments)

    GraphCache.__call__ = noted
    return seen


def slowest(ways: list[str]) -> str:
    """Return how a prompt ran whose chunks ran in these ways. None: no chunk may be captured."""
    return next((way for way in ("captured", "eager", "replayed") if way in ways), "eager")


class ChatTurn(NamedTuple):
    """What is measured of a chat's turn."""

    first: float  # seconds to its first token
    rate: float  # tokens/s after that
    way: str  # how its prompt ran
    captures: float  # seconds of captures after its answer


def chat_turns(
    session, ids: list[int], tokens: Iterator[list[int]], seen: list[str], count: int, sampling
) -> Iterator[ChatTurn]:
    """Yield the turns of a chat, each of the next `tokens` and an answer of `count`.

    seen: of `note_graphs`.
    """
    captures = getattr(session, "captures", None)
    for new in tokens:
        ids = [*ids, *new]
        seen.clear()
        times, way = [time.perf_counter()], ""
        for (token,) in session.stream_all([ids], count, sampling):
            times.append(time.perf_counter())
            way = way or slowest(seen)
            ids.append(token)
        while captures and captures.capture_next():
            pass
        captured = time.perf_counter() - times[-1]
        yield ChatTurn(times[1] - times[0], speed(times), way, captured)


def chat(options: argparse.Namespace) -> None:
    """Print the turns of generate.py's chat in this process, for each number of tokens."""
    started = float(os.environ[STARTED])
    start_before_imports(options)
    import generate

    def measure(session, tokenizer, _, sampling) -> None:
        print(f"chat: ready after {time.time() - started:.1f} s", flush=True)
        tokens, seen = Tokens(session.model.args.vocab_size), note_graphs()
        for length in options.tokens:
            session.reset()
            new = (tokens.take(length) for _ in range(options.turns))
            for turn in chat_turns(session, [], new, seen, options.new_tokens, sampling):
                print(
                    f"chat, {length} tokens: {1e3 * turn.first:.2f} ms, {turn.way}, then "
                    f"{turn.rate:.1f} tokens/s; captures after it {turn.captures:.2f} s",
                    flush=True,
                )
                time.sleep(options.reading)

    generate.chat = measure
    given = generate.build_parser().parse_args(["--interactive", *command_options(options)])
    generate.run(given)


def command_options(options: argparse.Namespace) -> list[str]:
    """Return the options that generate.py and serve.py share."""
    given = {
        "--checkpoint_path": options.checkpoint,
        "--device": options.device,
        "--max_seq_len": options.max_seq_len,
    }
    if not options.eager:
        given["--compile_cache"] = options.compile_cache
    words = [f"{name}={value}" for name, value in given.items()]
    return [*words, "--eager" if options.eager else "--compile"]


# A server -----------------------------------------------------------------------------------------


class Client:
    """One client's connection to a server. http.client takes little time of what is measured."""

    def __init__(self, url: str):
        self.connection = http.client.HTTPConnection(urlsplit(url).netloc)

    def ask(
        self, prompt: list[int], count: int, ended: Callable[[], bool] = lambda: False
    ) -> list[float]:
        """Stream an answer until `ended`; return the times of its request and of each token.

        Raises RuntimeError if it has no token.
        """
        body = json.dumps({"prompt": prompt, "max_tokens": count, "stream": True})
        times = [time.perf_counter()]
        headers = {"Content-Type": "application/json"}
        self.connection.request("POST", "/v1/completions", body, headers)
        response = self.connection.getresponse()
        for line in response:
            if line.startswith(b"data: {") and b'"text":""' not in line.replace(b" ", b""):
                times.append(time.perf_counter())
            elif response.status != 200 or b'"error"' in line:
                raise RuntimeError(line.decode())
            if ended():
                self.connection.close()
                break
        if len(times) == 1:
            raise RuntimeError("an answer has no token")
        return times


class OtherAnswers(threading.Thread):
    """One answer after the other, while something else is measured."""

    def __init__(self, url: str, prompt: list[int], count: int):
        super().__init__(daemon=True)
        self.client, self.prompt, self.count = Client(url), prompt, count
        self.done, self.tokens = threading.Event(), 0
        self.answers: list[list[float]] = []

    def run(self) -> None:
        while not self.done.is_set():
            self.answers.append(self.client.ask(self.prompt, self.count, self.saw_token))

    def saw_token(self) -> bool:
        self.tokens += 1
        return self.done.is_set()

    def gaps(self, start: float, end: float) -> list[float]:
        """Return the seconds between tokens of one answer, of those that overlap a time."""
        pairs = (pair for times in self.answers for pair in pairwise(times[1:]))
        return [b - a for a, b in pairs if b > start and a < end]


@contextmanager
def other_answers(url: str, prompt: list[int], count: int) -> Iterator[OtherAnswers]:
    """Within, other answers run; after it, their gaps are known."""
    other = OtherAnswers(url, prompt, count)
    other.start()
    while other.tokens < 20 and other.is_alive():
        time.sleep(0.001)
    try:
        yield other
    finally:
        other.done.set()
        other.join()


def conversation(
    client: Client, tokens: Tokens, length: int, options: argparse.Namespace
) -> list[list[float]]:
    """Return the times of a conversation's turns. Each adds `length` tokens to the prompt."""
    prompt, found = [], []
    for _ in range(options.turns):
        prompt += tokens.take(length)
        found.append(client.ask(prompt, options.new_tokens))
    return found


def serve(options: argparse.Namespace) -> None:
    """Print the turns of a server that this starts."""
    config = json.loads((options.checkpoint / "config.json").read_text())
    tokens = Tokens(config["args"]["vocab_size"])
    line, started = shlex.join(command_options(options)), time.perf_counter()
    with server(line) as (url, _):
        print(f"server: ready after {time.perf_counter() - started:.1f} s", flush=True)
        client, length = Client(url), options.tokens[0]
        for _ in range(AT_ONCE):
            times = client.ask(tokens.take(length), SPEED)
            print(
                f"server, {length} tokens, at once: {in_ms(firsts([times]))} ms, then "
                f"{speed(times):.1f} tokens/s, longest pause {in_ms([longest(times)])} ms",
                flush=True,
            )
        time.sleep(options.idle)
        for length in options.tokens:
            answers = conversation(client, tokens, length, options)
            rates = " ".join(f"{speed(times):.1f}" for times in answers)
            turns = f"{in_ms(firsts(answers))} ms, then {rates} tokens/s"
            print(f"server, {length} tokens, turns: {turns}", flush=True)
        beside_another(client, url, tokens, options)


def beside_another(client: Client, url: str, tokens: Tokens, options: argparse.Namespace) -> None:
    """Print the turns of a server beside another answer, and a long prompt there."""
    count = options.max_seq_len - 8
    for length in options.tokens:
        with other_answers(url, tokens.take(3), count) as other:
            answers = conversation(client, tokens, length, options)
        pauses = [max(other.gaps(times[0], times[1]), default=0) for times in answers]
        print(
            f"server, {length} tokens, turns beside another answer: {in_ms(firsts(answers))} ms, "
            f"its longest pauses {in_ms(pauses)} ms",
            flush=True,
        )
    with other_answers(url, tokens.take(3), count) as other:
        start, first, *_ = client.ask(tokens.take(options.long), 1)
    pause, before = max(other.gaps(start, first), default=0), other.gaps(0, start)
    print(
        f"server, {options.long} tokens beside another answer: {in_ms([first - start])} ms, its "
        f"longest pause {in_ms([pause])} ms, {in_ms([statistics.median(before)])} ms before",
        flush=True,
    )


# Command ------------------------------------------------------------------------------------------


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/turns.py --arch Qwen3-30B-A3B --mode int4",
            "python benchmarks/turns.py --arch gpt-oss-20b --mode mxfp4 --server --tokens 200",
        ),
    )
    parser.begin_group("model", "random weights, or a checkpoint")
    arch = "a Hugging Face config.json, or a name as Mixtral-8x7B; a wrong one lists the nearest"
    parser.add_argument("--arch", metavar="NAME", help=arch)
    parser.add_argument("--mode", default="bf16", help="number format of random weights (bf16)")
    parser.add_number("--layers", "only the first N layers of random weights")
    parser.add_path("--checkpoint", "write the weights there, unless that was done")
    parser.begin_group("turns", "what is measured")
    parser.add_flag("--server", "turns of serve.py instead of generate.py's chat")
    tokens = "new tokens of a turn (200 40 600)"
    parser.add_argument("--tokens", type=int, nargs="+", default=[200, 40, 600], help=tokens)
    parser.add_number("--turns", "turns of a conversation (5)", 5)
    parser.add_number("--new_tokens", "tokens of an answer (16)", 16)
    reading = "seconds between the turns of a chat (0.5)"
    parser.add_argument("--reading", type=float, default=0.5, metavar="S", help=reading)
    idle = "seconds that a server is idle after the first requests (15)"
    parser.add_argument("--idle", type=float, default=15, metavar="S", help=idle)
    parser.add_number("--long", "tokens of the long prompt beside an answer (4096)", 4096)
    parser.add_number("--max_seq_len", "cache length (8192)", 8192)
    parser.begin_group("speed and devices", "how the model is run")
    parser.add_flag("--eager", "do not compile")
    add_compile_cache(parser)
    add_device(parser, "auto: cuda if there is a GPU (auto)")
    parser.begin_group("internal", "used by this command itself")
    parser.add_argument("--step", choices=("write", "chat"), help="do this part in this process")
    return parser


def run_step(step: str, options: argparse.Namespace) -> None:
    """Run a part of the command in a process of its own. Exits with its code if it fails."""
    given = {name: value for name, value in vars(options).items() if value is not None}
    words = ["--tokens", *map(str, given.pop("tokens"))]
    words += [f"--{name}" for name in ("eager", "server") if given.pop(name)]
    words += [f"--{name}={value}" for name, value in given.items()] + [f"--step={step}"]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {STARTED: str(time.time()), "PYTHONPATH": path}
    if code := subprocess.run([sys.executable, __file__, *words], env=environment).returncode:
        sys.exit(code)


def measure(options: argparse.Namespace) -> None:
    """Write the checkpoint if it is not there, and print the turns."""
    if not options.checkpoint.exists():
        started = time.perf_counter()
        run_step("write", options)
        print(f"checkpoint written in {time.perf_counter() - started:.1f} s", flush=True)
    if options.server:
        serve(options)
    else:
        run_step("chat", options)


def main() -> None:
    options = (parser := build_parser()).parse_args()
    if options.step:
        (make_checkpoint if options.step == "write" else chat)(options)
        return
    has_weights = options.checkpoint and options.checkpoint.exists()
    if not (options.arch or has_weights):
        parser.error("no model: add --arch NAME, or --checkpoint with a checkpoint that is there")
    with tempfile.TemporaryDirectory() as temporary:
        options.checkpoint = options.checkpoint or Path(temporary, "model")
        options.compile_cache = options.compile_cache or Path(temporary, "compiled")
        print(f"{options.arch or options.checkpoint} {options.mode}", flush=True)
        measure(options)


if __name__ == "__main__":
    main()

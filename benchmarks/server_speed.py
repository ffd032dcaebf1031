"""What HTTP and the scheduler cost: tokens/s of a server's clients against a session's own.

    python benchmarks/server_speed.py --arch Qwen3-30B-A3B --mode int4

Random weights, greedy, prompts of 5 tokens, in one process and on one GPU. First a session decodes
1 and 8 sequences, as benchmark.py does: prompts do not count ("session"), or whole answers do
("answers"). Then a server with the same model and as long a cache answers as many clients, which
run in another process (benchmarks/server_load.py); there prompts count. Then the session decodes
again, and ratios are to the mean of both. Every token has a text, so that each is an event of its
answer's stream. Due: 0.97 of a session's tokens/s for one client, 0.93 for 8. "batch" is the
server's loop without HTTP and text, "steps" its median step. The pause is the longest time between
two tokens of a running answer while a prompt of 4,096 tokens arrives; due are 50 ms. Each figure
also goes to stderr as soon as it is known, since compiling takes minutes.
"""

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import httpx
import tokenizers
import torch

from benchmarks.decode_speed import open_session
from cli.benchmark_options import add_measure_options
from cli.parser import Parser
from models.random_weights import architecture, first_layers, random_prompt
from runtime.batch import Batch
from runtime.sampling import Sampling
from runtime.session import Session, SessionOptions
from server.app import AppSettings, make_app, make_limits, run_server
from server.scheduler import Decoder, Scheduler
from server.tokenizing import TokenizerPool

ROOT = Path(__file__).parents[1]
CLIENTS = 1, 8
GREEDY = Sampling(temperature=0)
LONG_PROMPT, PAUSED = 4096, 400  # tokens of the prompt that arrives, and of the answer that waits


def session_speed(session: Session, options: argparse.Namespace) -> tuple[float, float]:
    """Return a session's tokens/s of all its sequences: after the first tokens, and of all.

    Each is the median of `repeats` answers after one more.
    """
    prompts = [
        random_prompt(session.model.args, options.prompt_len, n) for n in range(session.batch)
    ]
    rates, whole = [], []
    for _ in range(options.repeats + 1):
        session.reset()
        started = time.perf_counter()
        stream = session.stream_all(prompts, options.new_tokens, GREEDY)
        times = [time.perf_counter() for _ in stream]
        rates.append(session.batch * (len(times) - 1) / (times[-1] - times[0]))
        whole.append(session.batch * len(times) / (times[-1] - started))
    return statistics.median(rates[1:]), statistics.median(whole[1:])


def batch_speed(batch: Batch, clients: int, options: argparse.Namespace) -> tuple[float, float]:
    """Return the tokens/s of `clients` sequences at once without a server, and of steps alone.

    The first counts prompts. The second is of the median step.
    """
    total = clients * (options.repeats + 1)
    prompts = (random_prompt(batch.session.model.args, options.prompt_len, n) for n in range(total))
    tokens, times, left = 0, [time.perf_counter()], {}
    while True:
        while len(left) < clients and (prompt := next(prompts, None)):
            left[batch.start(prompt, options.new_tokens, GREEDY)] = options.new_tokens
        if not left:
            steps = [b - a for a, b in pairwise(times)]
            return tokens / (times[-1] - times[0]), clients / statistics.median(steps)
        batch.prefill()
        for token in batch.step():
            tokens, left[token.sequence] = tokens + 1, left[token.sequence] - 1
            if not left[token.sequence]:
                batch.end(token.sequence)
                del left[token.sequence]
        times.append(time.perf_counter())


def client_speed(url: str, clients: int, options: argparse.Namespace) -> float:
    """Return the tokens/s of this many clients in another process."""
    requests = clients * (options.repeats + 1)
    line = [sys.executable, "benchmarks/server_load.py", "--url", url, "--clients", str(clients)]
    line += ["--requests", str(requests), "--prompt_tokens", str(options.prompt_len)]
    line += ["--new_tokens", str(options.new_tokens), "--connect_first"]
    found = subprocess.run(line, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    print(found, end="", file=sys.stderr)
    return float(found.partition(" tokens/s of all")[0].rsplit(None, 1)[-1])


def longest_pause(url: str) -> float:
    """Return the longest seconds between two tokens while a long prompt arrives.

    Raises RuntimeError if the answer ends before the prompt has run.
    """
    times: list[float] = []

    def ask(prompt: list[int], count: int, keep: bool) -> None:
        body = {"prompt": prompt, "max_tokens": count, "stream": True, "temperature": 0}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=None) as answer:
            for line in answer.iter_lines():
                if keep and line.startswith("data: {"):
                    times.append(time.perf_counter())

    first = threading.Thread(target=ask, args=([5, 6, 7], PAUSED, True))
    first.start()
    while first.is_alive() and len(times) < 20:
        time.sleep(0.001)
    ask([10 + n * n % 4000 for n in range(LONG_PROMPT)], 1, False)
    done = time.perf_counter()
    first.join()
    if times[-1] < done:
        raise RuntimeError(f"{len(times)} tokens arrived, the last before the long prompt had run")
    return max(b - a for a, b in pairwise(times[20:]))


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """Write a tokenizer each of whose tokens has a text: bytes, then words."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = (f"\u0120w{n}" for n in range(len(letters), vocab_size))
    vocabulary = {text: n for n, text in enumerate((*letters, *words))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))


class Figures(dict):
    """Figures by name, each shown on stderr when it is set."""

    def __setitem__(self, name: str, value: float) -> None:
        super().__setitem__(name, value)
        print(f"{name} {value:.4g}", file=sys.stderr, flush=True)


def serve_clients(
    session: Session, directory: Path, options: argparse.Namespace, found: Figures
) -> None:
    """Serve a session; add the tokens/s of 1 and 8 clients, and the longest pause.

    directory: that of the tokenizer.
    """
    scheduler = Scheduler(256, 600.0, max(CLIENTS))
    pool = TokenizerPool(directory, session.max_seq_len)
    decoder = Decoder(session, pool.vocabulary, scheduler)
    started = time.perf_counter()
    decoder.prepare()
    found["prepare_s"] = time.perf_counter() - started
    for clients in CLIENTS:
        speeds = batch_speed(decoder.batch, clients, options)
        found[f"batch_{clients}"], found[f"steps_{clients}"] = speeds
    session.reset()
    # asyncio sends small writes at once only where the protocol is named.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    app = make_app(
        scheduler, pool, AppSettings("random", make_limits(session, pool.vocabulary), 4 << 20)
    )

    def measure() -> None:
        try:
            for clients in CLIENTS:
                found[f"http_{clients}"] = client_speed(url, clients, options)
            found["pause_s"] = longest_pause(url)
        finally:
            scheduler.close()

    thread = threading.Thread(target=measure)
    with closing(pool):
        run_server(decoder, app, listener, thread.start)
        thread.join()


def measure(options: argparse.Namespace) -> Figures:
    """Return all figures of one model."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args = architecture(options.arch)
    args = first_layers(args, options.layers or args.n_layer)
    found, session = Figures(), None
    options.max_seq_len = LONG_PROMPT + 512
    for clients in CLIENTS:
        options.batch = clients
        if session is None:
            session = open_session(args, options, device)
        else:
            session = Session(session.model, session.max_seq_len, renewed(session, clients))
        speed, whole = session_speed(session, options)
        found[f"session_{clients}"], found[f"answers_{clients}"] = speed, whole
    session = Session(session.model, session.max_seq_len, session.options)
    with tempfile.TemporaryDirectory() as directory:
        write_tokenizer(Path(directory), args.vocab_size)
        serve_clients(session, Path(directory), options, found)
    for clients in CLIENTS:  # again: a GPU that has become warm may be slower
        session = Session(session.model, session.max_seq_len, renewed(session, clients))
        found[f"session_{clients}_after"], _ = session_speed(session, options)
    return found


def renewed(session: Session, batch: int) -> SessionOptions:
    """Return a session's options with another number of rows."""
    return SessionOptions(**vars(session.options) | {"batch": batch})


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/server_speed.py --arch Qwen3-30B-A3B --mode int4",
            "python benchmarks/server_speed.py --arch Mixtral-8x7B --mode int8 --layers 8",
        ),
    )
    add_measure_options(parser)
    return parser


def main() -> None:
    options = build_parser().parse_args()
    found = measure(options)
    print(json.dumps({"arch": options.arch, "mode": options.mode} | found))
    for clients in CLIENTS:
        ours, alone = found[f"http_{clients}"], found[f"session_{clients}"]
        alone = (alone + found[f"session_{clients}_after"]) / 2
        ratios = f"{ours / alone:.3f}, of whole answers {ours / found[f'answers_{clients}']:.3f}"
        ratios += f", of steps {ours / found[f'steps_{clients}']:.3f}"
        print(f"{clients} clients: {ours:.1f} tokens/s, session {alone:.1f}: {ratios}")
    print(f"prepared in {found['prepare_s']:.1f} s, longest pause {found['pause_s'] * 1e3:.0f} ms")


if __name__ == "__main__":
    main()

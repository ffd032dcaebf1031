"""Chat templates and tokenization in child processes, limited in time and memory.

A template is a program from a download, and a tokenizer's regex may take exponential time on a
request. Neither can be interrupted inside this process, where it would stop every client. A child
ends itself after TIME_LIMIT, even in compiled code; its request fails and a new child starts.
"""

import json
import queue
import resource
import signal
import subprocess
import sys
from pathlib import Path

from cli.command import printable
from tokenizer import Tokenizer, load_tokenizer

TIME_LIMIT = 2.0  # seconds of a request
MEMORY_LIMIT = 1 << 30  # bytes that a request may allocate
WORKERS = 2  # child processes; one that starts again does not hold up everyone
ROOT = Path(__file__).parents[1]


class TokenizerPool:
    """Encodes the prompts of requests. Thread-safe; `close` ends all children at once.

    max_seq_len: tokens of the context. A text that needs more is refused by its length in bytes.
    vocabulary: the same tokenizer in this process, for what takes no time.
    """

    def __init__(self, directory: Path, max_seq_len: int, workers: int = WORKERS):
        self.directory, self.workers, self.closed = directory, workers, False
        self.vocabulary = load_tokenizer(directory)
        self.vocab_size = self.vocabulary.vocab_size
        self.has_chat_template = self.vocabulary.has_chat_template
        self.max_bytes = max_seq_len * self.vocabulary.max_bytes_per_token()
        self.idle: queue.SimpleQueue[subprocess.Popen] = queue.SimpleQueue()
        self.processes = [self._start() for _ in range(workers)]
        for process in self.processes:
            self.idle.put(process)

    def _start(self) -> subprocess.Popen:
        command = [sys.executable, "-m", "server.tokenizing", str(self.directory.absolute())]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)

    def encode(self, prompt: str) -> list[int]:
        """Return the ids of a text. Raises ValueError, also beyond the limits."""
        self._check_length(prompt)
        return self._call({"prompt": prompt})

    def chat(self, messages: list[dict]) -> list[int]:
        """Return the ids of a conversation in the chat template. Raises ValueError."""
        self._check_length(*(message["content"] for message in messages))
        return self._call({"messages": messages})

    def _check_length(self, *texts: str) -> None:
        size = sum(len(text.encode(errors="replace")) for text in texts)
        if size > self.max_bytes:
            limit = f"{self.max_bytes} bytes, the most that the context can hold"
            raise ValueError(f"the prompt has {size} bytes, over {limit}: shorten it")

    def _call(self, request: dict) -> list[int]:
        process = self.idle.get()
        try:
            answer = exchange(process, request)
            if answer is None:
                process = self._replace(process)
                limits = f"{TIME_LIMIT:.0f} s or {MEMORY_LIMIT >> 20} MiB"
                raise ValueError(f"the prompt takes over {limits} to format and tokenize")
        finally:
            self.idle.put(process)
        if isinstance(answer, str):
            raise ValueError(answer)
        return answer

    def _replace(self, process: subprocess.Popen) -> subprocess.Popen:
        """Return a new child in place of one that has ended."""
        end(process)
        if self.closed:
            raise ValueError("the server is ending")
        new = self._start()
        self.processes[self.processes.index(process)] = new
        return new

    def close(self) -> None:
        """End all children; requests in flight fail."""
        self.closed = True
        for process in self.processes:
            end(process)


def exchange(process: subprocess.Popen, request: dict) -> list[int] | str | None:
    """Send a request to a child -> ids, an error message, or None if the child has ended."""
    assert process.stdin and process.stdout
    try:
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        return json.loads(line) if line.endswith("\n") else None
    except (OSError, ValueError):  # ValueError: `close` has closed the pipe
        return None


def end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()


# The child ----------------------------------------------------------------------------------------


def answer_requests(tokenizer: Tokenizer) -> None:
    """Answer requests from stdin, one JSON value a line, until it is closed."""
    for line in sys.stdin:
        # SIGALRM's default action ends the process, wherever it is.
        signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT)
        try:
            request = json.loads(line)
            if "messages" in request:
                answer: list[int] | str = tokenizer.chat(request["messages"])
            else:
                answer = tokenizer.encode(request["prompt"])
        except BaseException as error:  # a panic in Rust is not even an Exception
            answer = printable(str(error) or type(error).__name__)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), flush=True)


def limit_memory(size: int) -> None:
    """Let allocations beyond `size` more bytes fail."""
    status = Path("/proc/self/status").read_text()
    used = next(int(line.split()[1]) << 10 for line in status.splitlines() if "VmData" in line)
    resource.setrlimit(resource.RLIMIT_DATA, (used + size, used + size))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which ends this
    loaded = load_tokenizer(sys.argv[1])
    limit_memory(MEMORY_LIMIT)
    answer_requests(loaded)

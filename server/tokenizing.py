"""Chat templates and tokenization in child processes, limited in time and memory.

A template is a program from a download, and a tokenizer's regex may take exponential time on a
request. Neither can be interrupted inside this process, where it would stop every client.

A worker is a process that loads the tokenizer once, and forks a child that answers requests. The
child ends itself after `time_limit`, even in compiled code; its request fails and the worker forks
another. So nothing is read from disk again: the checkpoint may be gone, or be another by then.
"""

import json
import os
import queue
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from cli.command import printable
from tokenizer import Tokenizer, load_tokenizer

TIME_LIMIT = 2.0  # seconds of the CPU for a request
# And for each byte of it: byte-pair encoding takes 0.3 to 1 us.
SECONDS_PER_BYTE = 4e-6
MEMORY_LIMIT = 1 << 30  # bytes that a request may allocate
WORKERS = 2  # a request that takes all of its time does not hold up everyone
ROOT = Path(__file__).parents[1]


class PromptTooLongError(ValueError):
    """A prompt has more bytes than the context can hold."""


class TokenizerUnavailableError(ValueError):
    """No worker runs: the fault is the server's, not the prompt's."""


class TokenizerPool:
    """Encodes the prompts of requests. Thread-safe; `close` ends all workers at once.

    max_seq_len: tokens of the context. A text that needs more is refused by its length in bytes.
    vocabulary: the same tokenizer in this process, for what takes no time.
    """

    command = sys.executable, "-m", "server.tokenizing"  # starts a worker, before the directory

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
        command, pipe = [*self.command, str(self.directory.absolute())], subprocess.PIPE
        # The worker gets a process group, so that `end` reaches its child, too.
        return subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, process_group=0
        )

    def encode(self, prompt: str, bos: bool = True, *, special: bool = False) -> list[int]:
        """Return the ids of a text, as `Tokenizer.encode`. Raises ValueError beyond the limits."""
        self._check_length(prompt)
        return self._call({"prompt": prompt, "bos": bos, "special": special})

    def chat(self, messages: list[dict], /, **variables: Any) -> list[int]:
        """Return the ids of a conversation in the chat template. Raises ValueError.

        variables: of the template, JSON values. A system message that the template refuses is
        merged into the first user message.
        """
        self._check_length(messages, variables)
        return self._call({"messages": messages, "variables": variables})

    def _check_length(self, *values: Any) -> None:
        size = sum(text_bytes(value) for value in values)
        if size > self.max_bytes:
            limit = f"{self.max_bytes} bytes, the most that the context can hold"
            raise PromptTooLongError(f"the prompt has {size} bytes, over {limit}: shorten it")

    def check(self) -> None:
        """Raise TokenizerUnavailableError if no worker runs, and none can be started again."""
        if all(process.poll() is not None for process in self.processes):
            self._call({"prompt": "", "bos": False, "special": False})

    def _call(self, request: dict) -> list[int]:
        """Return a worker's answer. Raises ValueError."""
        line, process = json.dumps(request) + "\n", self.idle.get()
        try:
            answer = exchange(process, line)
            if isinstance(answer, Ended):
                # The system has killed the worker, as when memory is short.
                process = self._replace(process)
                answer = exchange(process, line)
            if isinstance(answer, Ended):
                raise TokenizerUnavailableError(f"a tokenizing process ended {answer.reason}")
            return take(answer, time_limit(line))
        finally:
            self.idle.put(process)

    def _replace(self, process: subprocess.Popen) -> subprocess.Popen:
        """Return a new worker in place of one that has ended."""
        end(process)
        if self.closed:
            raise TokenizerUnavailableError("the server is ending")
        try:
            new = self._start()
        except OSError as error:
            reason = f"a tokenizing process cannot start: {error.strerror}"
            raise TokenizerUnavailableError(reason) from None
        self.processes[self.processes.index(process)] = new
        return new

    def close(self) -> None:
        """End all workers; requests in flight fail."""
        self.closed = True
        for process in self.processes:
            end(process)


def vocabulary_of(tokenizer: Tokenizer | TokenizerPool) -> Tokenizer:
    """Return the tokenizer of this process."""
    return tokenizer.vocabulary if isinstance(tokenizer, TokenizerPool) else tokenizer


def text_bytes(value: Any) -> int:
    """Return the bytes of all texts in a JSON value, those of an object's keys aside."""
    if isinstance(value, str):
        return len(value.encode(errors="replace"))
    values = value.values() if isinstance(value, dict) else value
    return sum(map(text_bytes, values)) if isinstance(value, dict | list) else 0


def time_limit(line: str) -> float:
    """Return the seconds that a request may take, from its line.

    They are the CPU's seconds: a request that is slow because the machine is busy does not fail. A
    prompt of a million tokens has 4 MB.
    """
    return TIME_LIMIT + len(line) * SECONDS_PER_BYTE


class Ended(NamedTuple):
    """A worker has ended. reason: its last message, or its exit status."""

    reason: str


def exchange(process: subprocess.Popen, line: str) -> list[int] | str | Ended | None:
    """Send a request's line to a worker -> ids, an error message, or None if its child ended."""
    assert process.stdin and process.stdout
    with suppress(OSError, ValueError):  # ValueError: `close` has closed the pipe
        process.stdin.write(line)
        process.stdin.flush()
    try:
        found = process.stdout.readline()
        answer = json.loads(found) if found.endswith("\n") else {}
    except ValueError:  # the child ended within its line
        return None
    except OSError:
        answer = {}
    if isinstance(answer, dict):
        end(process)
        return Ended(f"({answer['failed']})" if answer else f"with status {process.returncode}")
    return answer


def take(answer: list[int] | str | None, seconds: float) -> list[int]:
    """Return the ids of an answer. seconds: its limit. Raises ValueError for an error."""
    if answer is None:
        limits = f"{seconds:.0f} s or {MEMORY_LIMIT >> 20} MiB"
        raise ValueError(f"the prompt takes over {limits} to format and tokenize")
    if isinstance(answer, str):
        raise ValueError(answer)
    return answer


def end(process: subprocess.Popen) -> None:
    """End a worker and its child."""
    if process.poll() is None:  # so its id is not another's yet
        with suppress(ProcessLookupError):  # another thread ends it, too
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# The worker ---------------------------------------------------------------------------------------


def work(directory: str) -> None:
    """Load the tokenizer, and fork a child until one has seen the end of stdin."""
    try:
        tokenizer = load_tokenizer(directory)
    except (OSError, ValueError) as error:
        print(json.dumps({"failed": printable(str(error))}), flush=True)
        return
    while True:
        child = os.fork()  # the tokenizer has started no thread
        if child == 0:
            limit_memory(MEMORY_LIMIT)
            answer_requests(tokenizer)
            return
        _, status = os.waitpid(child, 0)
        if status == 0:
            return
        os.write(1, b"null\n")


def answer_requests(tokenizer: Tokenizer) -> None:
    """Answer requests from stdin, one JSON value a line, until it is closed."""
    for line in sys.stdin:
        # SIGPROF's default action ends the process, wherever it is.
        signal.setitimer(signal.ITIMER_PROF, time_limit(line))
        try:
            request = json.loads(line)
            if "messages" in request:
                answer: list[int] | str = chat_ids(tokenizer, **request)
            else:
                answer = tokenizer.encode(
                    request["prompt"], request["bos"], special=request["special"]
                )
        except BaseException as error:  # a panic in Rust is not even an Exception
            answer = printable(str(error) or type(error).__name__)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


def chat_ids(tokenizer: Tokenizer, messages: list[dict], variables: dict) -> list[int]:
    """Return the ids of a conversation.

    If the template refuses them, they are changed step by step: without the reasoning beside text
    and calls, without any, without a system message, with neighbors of one role merged.
    """
    changes = iter((without_reasoning_of_calls, without_reasoning, merge_system, merge_turns))
    while True:
        try:
            return tokenizer.chat(messages, **variables)
        except ValueError:
            changed = next(filter(None, (change(messages) for change in changes)), None)
            if changed is None:
                raise
            messages = changed


def without_reasoning_of_calls(messages: list[dict]) -> list[dict] | None:
    """Return the messages without reasoning beside a content and calls, which gpt-oss refuses."""
    return without_reasoning(messages, ("content", "tool_calls"))


def without_reasoning(messages: list[dict], beside: tuple[str, ...] = ()) -> list[dict] | None:
    """Return the messages without reasoning, where they also have what `beside` names.

    Return None if none has.
    """
    name = "reasoning_content"
    found = [all(message.get(key) for key in (name, *beside)) for message in messages]
    if not any(found):
        return None
    return [
        {k: v for k, v in message.items() if k != name} if drops else message
        for message, drops in zip(messages, found, strict=True)
    ]


def merge_system(messages: list[dict]) -> list[dict] | None:
    """Return the messages with the system's text at the beginning of the first user message.

    Return None if there is no system message.
    """
    texts = [message["content"] for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    if not texts:
        return None
    first = next((n for n, message in enumerate(others) if message["role"] == "user"), None)
    if first is None:
        return [{"role": "user", "content": join_texts(texts)}, *others]
    texts.append(others[first]["content"])
    others[first] = others[first] | {"content": join_texts(texts)}
    return others


def merge_turns(messages: list[dict]) -> list[dict] | None:
    """Return the messages with neighboring texts of one role merged; None if there are none."""
    found: list[dict] = []
    for message in messages:
        last = found[-1] if found else {}
        are_texts = last.keys() == message.keys() == {"role", "content"}
        if are_texts and last["role"] == message["role"]:
            found[-1] = last | {"content": join_texts([last["content"], message["content"]])}
        else:
            found.append(message)
    return found if len(found) < len(messages) else None


def join_texts(texts: list[str]) -> str:
    """Return texts as one, with an empty line between."""
    return "\n\n".join(filter(None, texts))


def limit_memory(size: int) -> None:
    """Let allocations beyond `size` more bytes fail, on a system with /proc."""
    try:
        status = Path("/proc/self/status").read_text()
    except FileNotFoundError:
        return
    used = next(int(line.split()[1]) << 10 for line in status.splitlines() if "VmData" in line)
    resource.setrlimit(resource.RLIMIT_DATA, (used + size, used + size))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which ends this
    work(sys.argv[1])

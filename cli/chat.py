"""A chat in the terminal: its commands, the conversation, and how answers are printed."""

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from cli.command import describe_os_error, printable
from cli.report import format_statistics, format_turn
from cli.terminal import ctrl_c_flag, read_messages

DIM, NORMAL = "\x1b[2m", "\x1b[0m"
MAX_FILE = 16 << 20  # bytes of a conversation
ROLES = "system", "user", "assistant"
HELP = '''\
  /help           these lines
  /reset          forget the conversation
  /retry          answer the last message again
  /system TEXT    set the system message, and forget the conversation; no TEXT: none
  /save FILE      write the conversation, as JSON
  /load FILE      go on with a conversation that was saved
  /stats          speed, memory and bytes read of the last answer
  /exit, /quit    end; so does Ctrl-D
A line that ends in \\ goes on in the next one; lines between """ and """ are one message.
Ctrl-C stops an answer. A space before the / makes a command text.'''
COMMANDS = tuple(dict.fromkeys(re.findall(r"/[a-z]+", HELP)))
WITHOUT_TEXT = "/help", "/reset", "/retry", "/stats", "/exit", "/quit"

# A command, or "" for a message; and its text. /load has the messages of the file instead.
Request = tuple[str, str | list[dict]]


def read_requests() -> Iterator[Request]:
    """Yield messages and commands that all ranks carry out; answer the others here.

    Ends at /exit, /quit and the end of the input.
    """
    for message in read_messages(COMMANDS):
        name, text = split_command(message)
        try:
            if name in ("/exit", "/quit"):
                return
            if name == "/help":
                print(HELP, file=sys.stderr)
            elif name == "/load":
                yield name, load_messages(Path(text).expanduser())
            else:
                yield name, text
        except ValueError as error:
            say(str(error))


def split_command(message: str) -> tuple[str, str]:
    """Return a command and its text; "" and the message if it is none.

    A wrong command is reported and becomes /help, so that it is not sent to the model.
    """
    name, _, text = message.partition(" ")
    text = text.strip()
    if not re.fullmatch(r"/[a-z]+\s*", name):
        return "", message
    name = name.strip()
    if name not in COMMANDS:
        say(f"there is no command {name}; these are")
    elif name in WITHOUT_TEXT and text:
        say(f"{name} takes no text; commands are")
    elif name in ("/save", "/load") and not text:
        say(f"{name} needs the name of a file; commands are")
    else:
        return name, text
    return "/help", ""


def say(message: str) -> None:
    """Print one line on stderr."""
    print(printable(message), file=sys.stderr, flush=True)


@dataclass
class Conversation:
    """Messages of a chat: {"role": one of ROLES, "content": text}."""

    system: str | None = None
    messages: list[dict] = field(init=False)

    def __post_init__(self):
        self.reset()

    def reset(self) -> None:
        """Forget all but the system message."""
        self.messages = []
        if self.system is not None:
            self.messages.append({"role": "system", "content": self.system})

    def set_system(self, text: str) -> None:
        """Set the system message, or none, and forget the rest."""
        self.system = text or None
        self.reset()

    def load(self, messages: list[dict]) -> None:
        """Replace all messages."""
        self.messages = list(messages)
        first = messages[0] if messages else {"role": ""}
        self.system = first["content"] if first["role"] == "system" else None

    def retract(self) -> str | None:
        """Remove the last message of the user and its answer; return the message, or None."""
        asked = [n for n, message in enumerate(self.messages) if message["role"] == "user"]
        if not asked:
            return None
        text = self.messages[asked[-1]]["content"]
        del self.messages[asked[-1] :]
        return text

    def add(self, text: str, answer: str) -> None:
        """Add a message of the user and its answer."""
        self.messages.append({"role": "user", "content": text})
        self.messages.append({"role": "assistant", "content": answer})


def load_messages(path: Path) -> list[dict]:
    """Return the messages of a file. Raises ValueError for a file that holds no conversation."""
    try:
        if not path.is_file():
            raise ValueError(f"{path} is no file: give one written by /save")
        if path.stat().st_size > MAX_FILE:
            raise ValueError(f"{path} is over {MAX_FILE >> 20} MiB: give one written by /save")
        messages = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(describe_os_error(error)) from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text: give one written by /save") from None
    except (json.JSONDecodeError, RecursionError):
        raise ValueError(f"{path} is not JSON: give one written by /save") from None
    if not is_conversation(messages):
        fix = 'it must be a list of {"role": "user" or "assistant", "content": text}'
        raise ValueError(f"{path} holds no conversation: {fix}")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def is_conversation(messages: object) -> bool:
    """Whether JSON is a list of messages, of which only the first may be the system's."""
    return isinstance(messages, list) and all(
        isinstance(message, dict)
        and message.get("role") in (ROLES if number == 0 else ROLES[1:])
        and isinstance(message.get("content"), str)
        for number, message in enumerate(messages)
    )


def save_messages(messages: list[dict], path: Path) -> None:
    """Write messages to a new file, or replace a conversation.

    Raises ValueError for a file of another kind, or that cannot be written.
    """
    if os.path.lexists(path):
        try:
            load_messages(path)
        except ValueError:
            why = f"{path} is there and holds no conversation"
            raise ValueError(f"{why}: give another name") from None
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        part.write_text(json.dumps(messages, indent=1, ensure_ascii=False) + "\n")
        part.replace(path)
    except UnicodeEncodeError:  # half of a surrogate pair
        part.write_text(json.dumps(messages, indent=1) + "\n")
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise ValueError(describe_os_error(error)) from None


class AnswerPrinter:
    """Prints an answer piece by piece, its reasoning before it, dimmed on a terminal.

    show: `print`, or what takes its arguments.
    """

    def __init__(self, show: Callable[..., None]):
        self.show, self.reasoned = show, False
        self.dims = sys.stdout is not None and sys.stdout.isatty()

    def reasoning(self, piece: str) -> None:
        # Each piece for itself, so that Ctrl-C leaves no dimmed terminal.
        self.show(f"{DIM}{piece}{NORMAL}" if self.dims else piece, end="", flush=True)
        self.reasoned = True

    def answer(self, piece: str) -> None:
        if piece and self.reasoned:
            self.show("\n")
            self.reasoned = False
        self.show(piece, end="", flush=True)


def model_name(folder: str) -> str:
    """Return the name of a model from its folder, without the checksum that the cache's has."""
    return re.sub(r"-[0-9a-f]{8}$", "", folder)


def greeting(folder: str, format: str, length: int, template: bool) -> str:
    """Return what a chat begins with. folder: named after the model. length: of the context."""
    line = f"{model_name(folder)} in {format}, context of {length:,} tokens"
    line += "; /help lists commands, /exit ends"
    if template:
        return line
    return f"{line}\nThis model has no chat template: it only continues your text."


class Chat:
    """Carries out a chat's requests. On every rank; rank 0 prints.

    generate: `generate.generate` of a session and its tokenizer. sampling: a dataclass with `seed`.
    """

    def __init__(self, generate, session, tokenizer, options: argparse.Namespace, sampling):
        self.generate, self.session, self.tokenizer = generate, session, tokenizer
        self.options, self.sampling = options, sampling
        self.conversation = Conversation(options.system)
        self.ids: list[int] = []  # all text so far, for a model without a template
        self.last: dict | None = None  # the last answer's result
        self.retries = 0
        self.silent = False

    def show(self, *arguments, **settings) -> None:
        """Print, on rank 0."""
        if not self.silent:
            print(*arguments, **settings)

    def say(self, message: str) -> None:
        """Print a line on stderr, on rank 0."""
        self.show(message, file=sys.stderr, flush=True)

    def handle(self, name: str, given: str | list[dict]) -> None:
        """Carry out a request of `cli.chat.read_requests`."""
        conversation = self.conversation
        if name == "/system" and not self.tokenizer.has_chat_template:
            self.say("/system needs a chat template, and this model has none")
        elif name == "/system":
            conversation.set_system(given)
        elif name == "/reset":
            conversation.reset()
        elif name == "/load":
            conversation.load(given)
            self.say(f"{len(given)} messages")
        elif name == "/save" and not self.silent:
            self.save(Path(given).expanduser())
        elif name == "/stats":
            self.say(format_statistics(self.last) if self.last else "there is no answer yet")
        elif name == "/retry":
            self.retry()
        elif name == "":
            self.answer(given)
        if name in ("/system", "/reset", "/load"):
            self.ids = self.encode_all()

    def save(self, path: Path) -> None:
        """Write the conversation to a file, or say why not."""
        try:
            save_messages(self.conversation.messages, path)
        except ValueError as error:
            self.say(f"error: {error}")
        else:
            self.say(f"{len(self.conversation.messages)} messages written to {path}")

    def retry(self) -> None:
        """Answer the last message again, with another seed."""
        kept = list(self.conversation.messages)
        text = self.conversation.retract()
        if text is None:
            self.say("there is no message to answer again")
            return
        self.retries += 1
        self.ids = self.encode_all()
        if not self.answer(text):
            self.conversation.messages = kept
            self.ids = self.encode_all()

    def encode_all(self) -> list[int]:
        """Return the ids of all messages as one text, for a model without a template."""
        text = "".join(message["content"] for message in self.conversation.messages)
        return self.tokenizer.encode(text) if text else []

    def prompt_ids(self, text: str) -> list[int]:
        """Return the ids to continue. Raises ValueError if the template rejects the messages."""
        if self.tokenizer.has_chat_template:
            message = {"role": "user", "content": text}
            return self.tokenizer.chat([*self.conversation.messages, message])
        return self.ids + self.tokenizer.encode(text, bos=not self.ids)

    def answer(self, text: str) -> bool:
        """Stream the answer to a message; return whether there is one."""
        session, templated = self.session, self.tokenizer.has_chat_template
        try:
            prompt = self.prompt_ids(text)
        except ValueError as error:  # bytes that are no text, or the template's own objection
            self.say(f"error: {error}")
            return False
        left = session.max_seq_len - len(prompt)
        if left < 1:
            full = f"the message does not fit the context of {session.max_seq_len:,} tokens"
            self.say(f"{full}: /reset starts anew")
            return False
        sampling, seed = self.sampling, self.sampling.seed
        if seed is not None:
            sampling = replace(sampling, seed=seed + self.retries)
        printer = AnswerPrinter(self.show)
        with ctrl_c_flag() as interrupted:
            self.last = self.generate(
                prompt,
                min(self.options.max_new_tokens, left),
                sampling,
                stop=self.options.stop,
                ignore_eos=self.options.ignore_eos,
                reply=templated,
                on_text=printer.answer,
                on_reasoning=printer.reasoning if templated else None,
                interrupted=interrupted,
            )
        self.show(flush=True)
        used = self.last["prompt_tokens"] + self.last["new_tokens"]
        self.say(format_turn(self.last, used, session.max_seq_len))
        self.conversation.add(text, self.last["text"])
        self.ids = list(session.ids[0])
        if self.ids[-1] in self.tokenizer.stop_ids:
            self.ids.pop()
        return True

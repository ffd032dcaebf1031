"""A chat in the terminal: its commands, the conversation, and how answers are printed."""

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

from cli.answer_printer import AnswerPrinter
from cli.clipboard import copy_text
from cli.command import for_stream, printable
from cli.conversation import Conversation, load_messages, load_tools, named_file, save_messages
from cli.prompts import check_unicode
from cli.report import counted, format_statistics, format_turn
from cli.terminal import ctrl_c_flag, edit_text, read_messages

HELP = '''\
  /help           these lines
  /reset          forget the conversation
  /retry          answer the last message again
  /edit [TEXT]    change the last message, and answer it again
  /copy           copy the last answer
  /reasoning      the reasoning of the last answer, which is folded
  /tools FILE     let the model call functions: a JSON list as in OpenAI's API; no FILE: none
  /system TEXT    set the system message, and forget the conversation; no TEXT: none
  /save FILE      write the conversation, as JSON
  /load FILE      go on with a conversation that was saved
  /stats          speed, memory and bytes read of the last answer
  /exit, /quit    end; so does Ctrl-D
A line that ends in \\ goes on in the next one; lines between """ and """ are one message.
Ctrl-C stops an answer. A space before the / makes a command text.'''
COMMANDS = tuple(dict.fromkeys(re.findall(r"/[a-z]+", HELP)))
WITHOUT_TEXT = (*("/help", "/reset", "/retry", "/copy", "/reasoning", "/stats", "/exit", "/quit"),)

# A command, or "" for a message; and its text. /load and /tools have the file's list instead.
Request = tuple[str, str | list[dict]]


def read_requests(last_message: Callable[[], str | None] = lambda: None) -> Iterator[Request]:
    """Yield messages and commands that all ranks carry out; answer the others here.

    Ends at /exit, /quit and the end of the input. last_message: the one that /edit changes.
    """
    for message in read_messages(COMMANDS):
        name, text = split_command(message)
        try:
            if name in ("/exit", "/quit"):
                return
            if name == "/help":
                print(HELP, file=sys.stderr)
            elif name == "/load":
                yield name, load_messages(named_file(text))
            elif name == "/tools":
                yield name, load_tools(named_file(text)) if text else []
            elif name == "/edit" and not text:
                if changed := edit_text(last_message()):
                    yield name, changed
            else:
                yield name, text if name == "/save" else check_unicode(text, "the text")
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
    make_reader: returns a `tool_calls.reading.CallReader` for a list of tools.
    """

    def __init__(
        self,
        generate,
        session,
        tokenizer,
        options: argparse.Namespace,
        sampling,
        make_reader: Callable | None = None,
    ):
        self.generate, self.session, self.tokenizer = generate, session, tokenizer
        self.options, self.sampling, self.make_reader = options, sampling, make_reader
        self.conversation = Conversation(options.system)
        self.ids: list[int] = []  # all text so far, for a model without a template
        self.last: dict | None = None  # the last answer's result
        self.reasoning = ""  # the last answer's
        self.reader = None  # of calls; None: no tools
        self.retries = 0
        self.silent = False

    def last_message(self) -> str | None:
        """Return the last message of the user."""
        message = self.conversation.last("user")
        return message and message["content"]

    def show(self, *arguments, **settings) -> None:
        """Print, on rank 0."""
        if not self.silent:
            print(*arguments, **settings)

    def say(self, message: str) -> None:
        """Print a line on stderr, on rank 0."""
        self.show(message, file=sys.stderr, flush=True)

    def handle(self, name: str, given: str | list[dict]) -> None:
        """Carry out a request of `cli.chat.read_requests`."""
        if name in ("/system", "/tools") and not self.tokenizer.has_chat_template:
            self.say(f"{name} needs a chat template, and this model has none")
        elif name == "":
            self.take(given)
        elif name == "/save":
            if not self.silent:
                self.save(given)
        else:
            getattr(self, "do_" + name[1:])(given)
        if name in ("/system", "/reset", "/load"):
            self.ids = self.encode_all()

    def do_system(self, text: str) -> None:
        self.conversation.set_system(text)

    def do_reset(self, _: str) -> None:
        self.conversation.reset()

    def do_load(self, messages: list[dict]) -> None:
        self.conversation.load(messages)
        self.say(counted(len(messages), "message"))
        self.ask_results()

    def do_tools(self, tools: list[dict]) -> None:
        self.reader = self.make_reader(tools) if tools else None
        names = ", ".join(tool["function"]["name"] for tool in tools)
        self.say(f"tools: {printable(names) or 'none'}")

    def do_stats(self, _: str) -> None:
        self.say(format_statistics(self.last) if self.last else "there is no answer yet")

    def do_reasoning(self, _: str) -> None:
        text = self.reasoning.strip() or "the last answer has no reasoning"
        self.show(for_stream(text, sys.stdout), flush=True)

    def do_copy(self, _: str) -> None:
        answer = self.conversation.last("assistant")
        if answer is None:
            self.say("there is no answer yet")
        elif not self.silent:
            self.say(copy_text(answer["content"]))

    def do_edit(self, text: str) -> None:
        """Put a text in place of the last message, and answer it."""
        self.answer_again(text)

    def do_retry(self, _: str) -> None:
        """Answer the last message again, with another seed."""
        self.retries += 1
        if not self.answer_again(None):
            self.retries -= 1

    def save(self, name: str) -> None:
        """Write the conversation to a file, or say why not."""
        try:
            path = named_file(name)
            save_messages(self.conversation.messages, path)
        except ValueError as error:
            self.say(f"error: {error}")
        else:
            count = counted(len(self.conversation.messages), "message")
            self.say(f"{count} written to {path}")

    def answer_again(self, text: str | None) -> bool:
        """Answer the last message, or a text in its place; return whether there is an answer."""
        kept = list(self.conversation.messages)
        last = self.conversation.retract()
        if last is None:
            self.say("there is no message to answer again")
            return False
        self.ids = self.encode_all()
        if self.answer(last if text is None else text):
            return True
        self.conversation.messages = kept
        self.ids = self.encode_all()
        return False

    def encode_all(self) -> list[int]:
        """Return the ids of all messages as one text, for a model without a template."""
        text = "".join(message["content"] for message in self.conversation.messages)
        return self.tokenizer.encode(text) if text else []

    def prompt_ids(self, new: list[dict]) -> list[int]:
        """Return the ids to continue. Raises ValueError if the template rejects the messages."""
        if self.tokenizer.has_chat_template:
            messages, variables = [*self.conversation.messages, *new], {}
            if self.reader:
                messages, variables = self.reader.prepare(messages)
            return self.tokenizer.chat(messages, **variables)
        text = "".join(message["content"] for message in new)
        return self.ids + self.tokenizer.encode(text, bos=not self.ids)

    # Answers --------------------------------------------------------------------------------------

    def take(self, text: str) -> None:
        """Answer a message. After calls it is the result of the next one."""
        calls = self.conversation.open_calls()
        if not calls:
            self.answer(text)
            return
        self.conversation.add_result(calls[0], text)
        if calls[1:]:
            self.ask_results()
        elif not self.answer(None):
            self.conversation.messages.pop()

    def ask_results(self) -> None:
        """Ask for the result of the next call."""
        for call in self.conversation.open_calls()[:1]:
            name = printable(call["function"]["name"])
            self.say(f"the next message is the result of {name}")

    def answer(self, text: str | None) -> bool:
        """Stream the answer to a message, or to results (None); return whether there is one."""
        session, templated = self.session, self.tokenizer.has_chat_template
        new = [] if text is None else [{"role": "user", "content": text}]
        try:
            prompt = self.prompt_ids(new)
        except ValueError as error:  # bytes that are no text, or the template's own objection
            self.say(f"error: {error}")
            return False
        left = session.max_seq_len - len(prompt)
        if left < 1:
            full = f"the message does not fit the context of {session.max_seq_len:,} tokens"
            self.say(f"{full}: /reset starts anew")
            return False
        self.conversation.messages += new
        self.stream(prompt, left, templated)
        used = self.last["prompt_tokens"] + self.last["new_tokens"]
        self.say(format_turn(self.last, used, session.max_seq_len))
        self.ask_results()
        self.ids = list(session.ids[0])
        if self.ids[-1] in self.tokenizer.stop_ids:
            self.ids.pop()
        return True

    def stream(self, prompt: list[int], left: int, templated: bool) -> None:
        """Print an answer as it comes, and add it to the conversation. left: of the context."""
        sampling, seed = self.sampling, self.sampling.seed
        if seed is not None:
            sampling = replace(sampling, seed=seed + self.retries)
        printer = AnswerPrinter(self.show, self.reader)
        thinks = templated and not (self.reader and self.reader.splits_reasoning)
        with ctrl_c_flag() as interrupted:
            self.last = self.generate(
                prompt,
                min(self.options.max_new_tokens, left),
                sampling,
                stop=self.options.stop,
                ignore_eos=self.options.ignore_eos,
                reply=templated,
                on_text=printer.answer,
                on_reasoning=printer.reasoning if thinks else None,
                interrupted=interrupted,
                **({"markers": self.reader.markers} if self.reader else {}),
            )
        printer.end(self.last.get("finish_reason") != "stop")
        self.show(flush=True)
        self.reasoning = printer.reasoned
        message = {"role": "assistant", "content": self.last["text"]}
        if self.reader:
            message["content"] = printer.text
        if printer.calls:
            for number, call in enumerate(printer.calls):  # the same id on all ranks
                call["id"] = f"call_{len(self.conversation.messages)}_{number}"
            message["tool_calls"] = printer.calls
        self.conversation.messages.append(message)

"""An incremental parser of tool calls: the base class of the families' formats (formats.py).

A marker that is a control token has no text of its own: the answer has MARK and its name, so that
ordinary text that spells the name is not a marker.
"""

import re
import secrets
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from chat_template import whole_characters
from runtime.reasoning import held_prefix
from tokenizer import Tokenizer
from tool_calls.arguments import Schema, typed_value
from tool_calls.lenient_json import (
    FENCE,
    JsonScanner,
    Repair,
    parse_json,
    parse_lenient,
    skip_space,
    to_json,
)

MARK = "\ufdd1"  # before the name of a control token. A noncharacter: exchanged text has none.
NAME = r"[\w.:/-]+"  # a function's name
MAX_HEAD = 1000  # characters in which a call's name, or an argument's, must end
# Names by which models call a function's arguments and its name.
ARGUMENTS = ("arguments", "parameters", "args", "params", "input")
NAMES = ("name", "function", "tool", "tool_name")
JSON_HEAD = re.compile(
    r'\s*(?:```(?:json)?)?[\s\[]*\{\s*"name"\s*:\s*("(?:[^"\\\ufdd1]|\\.)+")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=[{\[])'
)
# Yields when it needs more text; returns whether it has found what it looked for.
Reader = Generator[None, None, bool]
ValueReader = Generator[None, None, str | None]


class TextPiece(NamedTuple):
    """Text of an answer, or of its reasoning."""

    text: str
    is_reasoning: bool = False


class CallPiece(NamedTuple):
    """A piece of a tool call. The first one of a call has its id and its function's name."""

    index: int
    arguments: str  # JSON, to be concatenated
    id: str | None = None
    name: str | None = None


Piece = TextPiece | CallPiece


class Call(NamedTuple):
    """An earlier call."""

    name: str
    arguments: dict[str, Any]


class ArgumentTags(NamedTuple):
    """How a call is written whose arguments are no JSON object.

    before, between, after: texts around the key and the value of an argument. after_name, end:
    texts before and after all arguments. All new lines but one before a text are optional.
    is_text: a value that may be a text has no quotes. Other values are JSON.
    """

    after_name: str
    before: str
    between: str
    after: str
    end: str
    separator: str = ""
    is_text: bool = True


class CallParser:
    """Splits an answer into text and tool calls. Text that only looks like a call is text.

    in_template: texts by which a chat template is recognized. tokens: markers that may be control
    tokens. openers: markers that begin a call. closer: text that ends it. json_tags: texts before
    and after {"name": ..., "arguments": {...}}, if calls are such objects. White space around calls
    belongs to neither text nor call.
    """

    in_template: ClassVar[tuple[str, ...]]
    tokens: ClassVar[tuple[str, ...]] = ()
    openers: ClassVar[tuple[str, ...]] = ()
    closer: ClassVar[str | None] = None
    json_tags: ClassVar[tuple[str, str] | None] = None
    splits_reasoning = False  # whether it replaces runtime.reasoning

    def __init__(self, schemas: dict[str, dict], marker: Callable[[str], str], single: bool):
        """schemas: the parameters of each tool. marker: maps a marker to its text in the answer.

        single: drop all calls but the first.
        """
        self.schemas, self.marker, self.single = schemas, marker, single
        self.buffer, self.ended = "", False
        self.calls = 0
        self.pieces: list[Piece] = []
        self.space, self.after_call = "", False
        self.arguments: list[str] = []  # keys of the current call
        self.is_cut = False  # the answer ended by a limit, not by itself
        self.schema = Schema({})  # of its arguments
        self.known: set[str] = set()  # names of its arguments
        self.reader = self.read()

    @classmethod
    def prefix(cls, name: str | None, tokenizer: Tokenizer) -> str:
        """Return the text that forces a call of a function, or of any (None)."""
        assert cls.json_tags
        return cls.json_tags[0] + '{"name": "' + (f'{name}", "arguments":' if name else "")

    @classmethod
    def json_markers(cls, tokenizer: Tokenizer) -> tuple[str, str] | None:
        """Return what stands between a call's name and its arguments, and after these.

        None: the arguments are not JSON.
        """
        return cls.json_tags and ('", "arguments":', "}" + cls.json_tags[1])

    @classmethod
    def argument_tags(cls) -> ArgumentTags | None:
        """Return how arguments are written that are not JSON; None if no grammar is known."""
        return None

    @classmethod
    def resumed(cls, kind: str) -> str:
        """Return the beginning of an answer, up to text of this kind (runtime.reasoning)."""
        return ""

    @classmethod
    def template_id(cls, id: str, name: str = "", number: int = 0) -> str:
        """Return the id of a call in a form that the templates accept.

        name: of its function. number: of calls before it in the conversation.
        """
        return id

    @classmethod
    def written(cls, calls: Sequence[Call]) -> tuple[str, str, str] | None:
        """Return calls as the model writes them: opener, text, closer.

        It is for templates that leave calls out. None: for this format none is known.
        """
        return None

    @classmethod
    def after(cls, messages: Sequence[Mapping[str, Any]]) -> "type[CallParser]":
        """Return the format of an answer to these messages, whose calls may be numbered on."""
        return cls

    def push(self, text: str) -> list[Piece]:
        """Take the next text; return the pieces now certain."""
        self.buffer += text
        next(self.reader, None)
        return self.take()

    def flush(self, is_cut: bool = True) -> list[Piece]:
        """End the answer; return the rest.

        is_cut: a limit ended it, so that arguments may be incomplete. They stay incomplete: closing
        them would make another call. An unclosed call of an answer that ended by itself is closed.
        """
        self.ended, self.is_cut = True, is_cut
        for _ in self.reader:
            pass
        if not self.calls and self.space:
            self.pieces.append(TextPiece(self.space))
        return self.take()

    def take(self) -> list[Piece]:
        taken, self.pieces = self.pieces, []
        if self.single:
            return [p for p in taken if isinstance(p, TextPiece) or p.index == 0]
        return taken

    # For subclasses ---------------------------------------------------------------------------

    def call(self) -> Reader:
        """Read a call after its opener. If it is none, return False with the buffer unchanged."""
        return (yield from self.json_calls())

    def read(self) -> Reader:
        openers = [self.marker(opener) for opener in self.openers]
        while True:
            found = [(at, o) for o in openers if (at := self.buffer.find(o)) >= 0]
            if found:
                at, opener = min(found)
                self.add_text(self.buffer[:at])
                self.buffer = self.buffer[at + len(opener) :]
                self.opener = opener
                if not (yield from self.call()):
                    self.add_text(opener)
                continue
            held = 0 if self.ended else max(held_prefix(self.buffer, o) for o in openers)
            certain = len(self.buffer) - held
            self.add_text(self.buffer[:certain])
            self.buffer = self.buffer[certain:]
            if not (yield from self.more()):
                return True

    def more(self) -> Reader:
        """Wait for more text; return False at the end of the answer."""
        if not self.ended:
            yield
            return True
        return False

    def begins_with(self, *texts: str) -> Reader:
        """Wait for other than white space; return whether it begins with one of the letters."""
        while not (text := self.buffer.lstrip()):
            if not (yield from self.more()):
                return False
        return text.startswith(texts)

    def expect(self, pattern: str, partial: str) -> Generator[None, None, re.Match | None]:
        """Wait until the buffer begins with a pattern, while all of it matches `partial`.

        Return None if it cannot match.
        """
        while not (match := re.match(pattern, self.buffer, re.DOTALL)):
            # The limit keeps the cost linear: the pattern is tried again for each piece of text.
            if len(self.buffer) > MAX_HEAD or not re.fullmatch(partial, self.buffer, re.DOTALL):
                return None
            if not (yield from self.more()):
                return None
        return match

    def skip_closer(self, closer: str | None) -> Reader:
        """Drop white space and the closer, if that is what follows."""
        while closer:
            rest = self.buffer.lstrip()
            if rest.startswith(closer):
                self.buffer = rest[len(closer) :]
                return True
            if not closer.startswith(rest) or not (yield from self.more()):
                return False
        return False

    def add_text(self, text: str) -> None:
        """Add text of the answer. Hold back the last white space: a call may follow."""
        text = self.space + text.replace(MARK, "")
        if self.after_call:
            text = text.lstrip()
        certain = text.rstrip()
        self.space = text[len(certain) :]
        if certain:
            self.after_call = False
            self.pieces.append(TextPiece(certain))

    def begin(self, name: str) -> None:
        """Begin a call."""
        self.arguments, self.schema = [], Schema(self.schemas.get(name, {}))
        self.known = self.schema.names()
        self.space, self.after_call = "", True
        name = plain(name.replace(MARK, ""))
        self.pieces.append(CallPiece(self.calls, "", self.new_id(name), name))
        self.calls += 1

    def new_id(self, name: str) -> str:
        return f"call_{secrets.token_hex(12)}"

    def add_arguments(self, text: str) -> None:
        if text := text.replace(MARK, ""):
            self.pieces.append(CallPiece(self.calls - 1, whole_characters(text)))

    def add_argument(self, key: str, text: str) -> None:
        """Add one argument, whose value is text: another type if the schema accepts no text."""
        self.add_value(key, typed_value(text.replace(MARK, ""), self.schema.at(key)))

    def add_value(self, key: str, value: Any) -> None:
        """Add one argument."""
        key = key.replace(MARK, "")
        start = ", " if self.arguments else "{"
        self.arguments.append(key)
        self.add_arguments(f"{start}{to_json(key)}: {to_json(value)}")

    def ends_cleanly(self) -> bool:
        """Whether a call ends between two arguments. Drop the beginning of one that was cut."""
        if self.ended and self.buffer.lstrip()[:1] in ("<", MARK):
            self.buffer = ""
            return not self.is_cut
        return True

    def end_arguments(self) -> None:
        self.add_arguments("}" if self.arguments else "{}")

    # Calls as JSON ----------------------------------------------------------------------------

    def scanner(self) -> JsonScanner:
        closer = self.marker(self.closer) if self.closer else ""
        return JsonScanner(closer, self.marker(self.openers[0]))

    def tags(self) -> list[str]:
        """Return patterns of the markers."""
        return [re.escape(self.marker(name)) for name in self.tokens]

    def ends(self) -> tuple[str, ...]:
        """Return the markers that can follow JSON."""
        return tuple(self.marker(name) for name in (self.closer, self.openers[0]) if name)

    def region_end(self, start: int = 0) -> int:
        """Return where the first of these markers is; -1: nowhere yet."""
        found = [self.buffer.find(marker, start) for marker in self.ends()]
        return min((at for at in found if at >= 0), default=-1)

    def region(self) -> Generator[None, None, int]:
        """Wait for one of these markers; return where it is, -1: nowhere in the answer."""
        start = 0
        while (end := self.region_end(start)) < 0:
            start = max(0, len(self.buffer) - MAX_HEAD)
            if not (yield from self.more()):
                break
        return end

    def json_calls(self) -> Reader:
        """Read calls as JSON: objects, or a list of them.

        If there is none, return False with the buffer unchanged.
        """
        if not (yield from self.json_call()):
            return False
        while (yield from self.further_call()):
            pass
        return True

    def json_call(self) -> Reader:
        """Read {"name": NAME, "arguments": {...}}, or what is meant as such.

        In this order the arguments are streamed. Else the value is read as a whole.
        """
        scanner, at = self.scanner(), 0
        while True:
            match = JSON_HEAD.match(self.buffer)
            if match and isinstance(name := parse_json(match[1]), str):
                self.begin(name)
                self.buffer = self.buffer[match.end() :]
                yield from self.json_arguments()
                return True
            first = skip_space(self.buffer, 0)
            if self.buffer[first : first + 1] not in ("", "{", "[", "`"):
                return False
            if "```json".startswith(self.buffer[first:]) and (yield from self.more()):
                continue
            if not at and (fence := FENCE.match(self.buffer)):
                at = fence.end()
            at += scanner.scan(self.buffer[at:])
            if scanner.complete:
                return self.take_calls(at)
            if scanner.broken or not (yield from self.more()):
                end = yield from self.region()
                end = len(self.buffer) if end < 0 and not self.is_cut else end
                return end >= 0 and self.take_calls(end)

    def take_calls(self, end: int) -> bool:
        """Take the calls that the buffer's text up to `end` has."""
        text = self.buffer[:end].replace(MARK, "")
        value, used = parse_lenient(text)
        calls = self.calls_in(value)
        for name, arguments in calls:
            self.begin(name)
            self.add_arguments(arguments)
        if calls:
            self.buffer = text[used:] + self.buffer[end:]
        return bool(calls)

    def calls_in(self, value: Any) -> list[tuple[str, str]]:
        """Return the calls that a JSON value has, as names and arguments; [] if it is none."""
        if isinstance(value, list):
            found = [self.calls_in(item) if isinstance(item, dict) else [] for item in value]
            return [call for calls in found for call in calls] if all(found) else []
        if not isinstance(value, dict):
            return []
        if isinstance(value.get("function"), dict):  # as OpenAI's API has calls
            value = value | value["function"]
        if len(value) == 1 and isinstance((only := next(iter(value.items())))[1], dict):
            value = {"name": only[0], "arguments": only[1]} if only[0] in self.schemas else {}
        name = next((value[n] for n in NAMES if value.get(n) and isinstance(value[n], str)), None)
        if name is None:
            return []
        known = Schema(self.schemas.get(name, {})).names()
        beside = {key: part for key, part in value.items() if key in known and key not in NAMES}
        arguments = next((value[n] for n in ARGUMENTS if n in value), beside)
        return [(name, arguments_json(arguments))]

    def json_arguments(self) -> Reader:
        """Read a JSON value as the arguments of the call; return whether it is complete."""
        scanner = self.scanner()
        while True:
            count = scanner.scan(self.buffer)
            self.add_arguments(self.buffer[:count])
            self.buffer = self.buffer[count:]
            if scanner.complete:
                return True
            if scanner.broken or not (yield from self.more()):
                break
        end = yield from self.region()
        is_closed = end >= 0 or not self.is_cut
        end = end if end >= 0 else len(self.buffer)
        text = self.buffer[:end].replace(MARK, "")
        repair = Repair(text, scanner)
        rest = repair.json(close=is_closed)
        self.add_arguments("{}" if rest == "null" else rest)
        self.buffer = text[repair.at :] + self.buffer[end:]
        return is_closed

    def further_call(self) -> Reader:
        """Read the next of several JSON calls. Drop what belongs to them up to their closer."""
        closer = self.marker(self.closer) if self.closer else ""
        while True:
            rest = self.buffer.lstrip(" \n\r\t}]`")  # some answers have a bracket too many
            item = rest.lstrip(" \n\r\t},]`") if rest.startswith(",") else rest
            if closer and rest.startswith(closer):
                self.buffer = rest[len(closer) :]
                return False
            if item and not closer.startswith(rest):
                break
            if not (yield from self.more()):
                self.buffer = ""
                return False
        if item[0] == "{":
            self.buffer = item
            return (yield from self.json_call())
        if item != rest and item[0] in "\"'":  # further keys of the last call
            self.buffer = "{" + item
            yield from self.skip_object()
            return True
        self.buffer = rest
        return False

    def skip_object(self) -> Reader:
        """Drop a JSON object."""
        scanner = self.scanner()
        while True:
            self.buffer = self.buffer[scanner.scan(self.buffer) :]
            if scanner.complete:
                return True
            if scanner.broken or not (yield from self.more()):
                end = yield from self.region()
                self.buffer = self.buffer[end:] if end >= 0 else ""
                return True


def arguments_json(arguments: Any) -> str:
    """Return a call's arguments as JSON. They may be missing, or JSON inside of a text."""
    if isinstance(arguments, str) and arguments.lstrip()[:1] in ("{", "["):
        value, _ = parse_lenient(arguments)
        arguments = arguments if value is None else value
    return "{}" if arguments in (None, "") else to_json(arguments)


def plain(text: str) -> str:
    """Return a text that UTF-8 can hold."""
    return text.encode("utf-8", "replace").decode()


def beginnings(*texts: str) -> str:
    """Return a pattern for all beginnings of the texts, their whole included."""
    found = (text[:n] for text in texts for n in range(len(text), 0, -1))
    return "|".join(map(re.escape, found))

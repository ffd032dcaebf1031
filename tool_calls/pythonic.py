"""Tool calls that are written as Python: LFM2's `<|tool_call_start|>[NAME(KEY='text')]`."""

import json
import re
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

from tokenizer import Tokenizer
from tool_calls.arguments import Schema, conform, members
from tool_calls.lenient_json import Number, Repair
from tool_calls.parser import NAME, ArgumentTags, Call, CallParser, Reader, beginnings

KEY = r"[^\W\d][\w.-]{0,99}"
NAMED = rf"(?P<quote>[\"']?)(?P<key>{KEY})(?P=quote)"  # some answers have quotes around it
ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[\"'\\/abfnrtv0]|\n)")
ESCAPED = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "0": "\0"}
BRACKETS = {"[": "]", "{": "}", "(": ")"}


class Value(NamedTuple):
    """The value of an argument. is_bare: a number, a name, or a text without quotes."""

    value: Any
    is_bare: bool = False


class PythonicParser(CallParser):
    """`<|tool_call_start|>[NAME(KEY='text', OTHER=5), NEXT()]<|tool_call_end|>`: LFM2.

    Texts have single or double quotes. The template does not escape quotes inside of a text, so a
    text ends at a quote that an argument, or the end of the call, follows.
    """

    in_template = ("<|tool_call_start|>", "<|tool_list_start|>")
    tokens = ("<|tool_call_start|>", "<|tool_call_end|>")
    openers = ("<|tool_call_start|>",)
    closer = "<|tool_call_end|>"

    @classmethod
    def prefix(cls, name: str | None, tokenizer: Tokenizer) -> str:
        return "<|tool_call_start|>[" + (f"{name}(" if name else "")

    @classmethod
    def written(cls, calls: Sequence[Call]) -> tuple[str, str, str] | None:
        texts = []
        for name, arguments in calls:
            pairs = ", ".join(f"{key}={literal(value)}" for key, value in arguments.items())
            texts.append(f"{name}({pairs})")
        return cls.openers[0], f"[{', '.join(texts)}]", cls.closer

    @classmethod
    def argument_tags(cls) -> ArgumentTags:
        end = ")]<|tool_call_end|>"
        return ArgumentTags("(", "", "=", "", end, separator=", ", is_text=False)

    def call(self) -> Reader:
        json_head = r"\s*(?:```(?:json)?)?\s*\[?\s*\{"
        match = yield from self.expect(
            rf"\s*\[?\s*({NAME})\(|{json_head}",
            rf"\s*\[?\s*(?:{NAME})?|\s*(?:{beginnings('```json')})?\s*\[?\s*",
        )
        if not match:
            return False
        if match[1] is None:
            return (yield from self.json_calls())
        tags = "|".join(self.tags())
        while match:
            self.begin(match[1])
            self.buffer = self.buffer[match.end() :]
            if not (yield from self.keywords()):
                return True
            self.end_arguments()
            match = yield from self.expect(rf"[\s,;]+({NAME})\(", rf"[\s,;]+(?:{NAME})?|")
        match = yield from self.expect(
            rf"\s*\)?\s*\]?\s*(?={tags})", rf"\s*\)?\s*\]?\s*(?:{self.begun_tag()})?"
        )
        if match or (self.ended and not self.buffer.strip(" \n\r\t)]")):
            self.buffer = self.buffer[match.end() :] if match else ""
        yield from self.skip_closer(self.marker(self.closer))
        return True

    def begun_tag(self) -> str:
        """Return the pattern of a marker's beginning."""
        return beginnings(*map(self.marker, self.tokens))

    def keywords(self) -> Reader:
        """Read arguments up to the call's bracket; return False if the text ends inside of one."""
        tags, begun = "|".join(self.tags()), self.begun_tag()
        end = rf"[\s,]*(?:\)|(?=\]?\s*(?:{tags})))"
        unnamed = rf"[\[{{(\d-]|{KEY}\s*[,)]|[\"'](?!(?:{KEY}[\"']?)?\s*(?:[=:]|\Z))"
        start = rf"[\s,]*(?:{NAMED}\s*[=:]\s*(?=[^\s=,)\]])|(?={unnamed}))"
        possible = rf"[\s,]*(?:[\"']?(?:{KEY})?[\"']?\s*[=:]?\s*|\]?\s*(?:{begun})?)?"
        while True:
            match = yield from self.expect(f"(?P<end>{end})|{start}", possible)
            if not match:
                return (yield from self.skip_rest())
            self.buffer = self.buffer[match.end() :]
            if match["end"] is not None:
                return True
            key = match["key"]
            found = yield from self.value(is_named=key is not None)
            if found is None:
                self.buffer = ""
                return False
            self.add_keyword(key, found)

    def skip_rest(self) -> Reader:
        """Drop what is no argument, up to a marker; return whether the call is complete."""
        end = yield from self.region()
        self.buffer = self.buffer[end:] if end >= 0 else "" if self.ended else self.buffer
        return end >= 0 or not self.is_cut

    def add_keyword(self, key: str | None, found: Value) -> None:
        """Add an argument. key: None for one without a name, which is the next in the schema."""
        parts = self.schema.parts()
        names = [name for part in parts for name in members(part) if name not in self.arguments]
        if key is None and isinstance(found.value, dict) and found.value.keys() <= self.known:
            for name, value in found.value.items():
                self.add_value(name, conform(value, self.schema.at(name)))
            return
        key = key or (names[0] if names else f"argument_{len(self.arguments) + 1}")
        if found.is_bare:
            self.add_argument(key, found.value)
        else:
            schema: Schema = self.schema.at(key)
            self.add_value(key, conform(found.value, schema))

    # Values -----------------------------------------------------------------------------------

    def value(self, is_named: bool) -> Generator[None, None, Value | None]:
        """Read one value; return None if the answer was cut inside of it."""
        if self.buffer[0] in "\"'":
            return (yield from self.text(is_named))
        if self.buffer[0] in BRACKETS:
            return (yield from self.container())
        at = 0
        ends = re.compile(rf"[,)\]]|{'|'.join(self.tags())}")
        while not (match := ends.search(self.buffer, at)):
            at = self.last_tag(at, len(self.buffer))
            if not (yield from self.more()):
                break
        if not match and self.is_cut:
            return None
        return self.take_value(match.start() if match else len(self.buffer), is_bare=True)

    def last_tag(self, start: int, end: int) -> int:
        """Return where a marker that goes on after `end` may begin, from `start` on."""
        return max(start, end - max(map(len, self.tokens)))

    def take_value(self, end: int, is_bare: bool = False) -> Value:
        """Return the buffer's text up to `end` as a value, and drop it."""
        text, self.buffer = self.buffer[:end].strip(), self.buffer[end:]
        return Value(text if is_bare else read_container(text), is_bare)

    def text(self, is_named: bool) -> Generator[None, None, Value | None]:
        """Read a text in quotes."""
        while len(self.buffer) < 3 and (yield from self.more()):
            pass
        first = self.buffer[0]
        quote = first * 3 if self.buffer.startswith(first * 3) else first
        at = len(quote)
        while True:
            limit = self.region_end(at)
            found = self.buffer.find(quote, at, limit if limit >= 0 else len(self.buffer))
            if found < 0:
                at = self.last_tag(at, len(self.buffer))
                if limit >= 0 or not (yield from self.more()):
                    return self.unclosed(quote)
                continue
            after = found + len(quote)
            ends = not is_escaped(self.buffer, found) and self.ends_text(after, is_named)
            if ends:
                text, self.buffer = self.buffer[len(quote) : found], self.buffer[after:]
                return Value(unescape(text))
            at = found if ends is None else found + 1
            if ends is None:
                yield

    def unclosed(self, quote: str) -> Value | None:
        """Return a text whose last quote is missing; None if the answer was cut."""
        end = self.region_end(len(quote))
        if end < 0 and self.is_cut:
            return None
        end = end if end >= 0 else len(self.buffer)
        text, self.buffer = self.buffer[len(quote) : end], self.buffer[end:]
        return Value(unescape(re.sub(rf"(?:{quote})?\s*\)?\s*\]?\s*\Z", "", text)))

    def ends_text(self, at: int, is_named: bool) -> bool | None:
        """Whether the quote before `at` ends its text; None if more text is needed."""
        tags, begun, rest = "|".join(self.tags()), self.begun_tag(), self.buffer[at : at + 400]
        next_value = "(?!)" if is_named else rf"[\"'\[{{\d-]|{KEY}\s{{0,9}}[,)]"
        argument = rf",\s{{0,99}}(?:{NAMED}\s{{0,9}}[=:]|{next_value})"
        bracket = rf",?\s{{0,99}}\)\s{{0,99}}(?:[,;\]]|{tags})"
        if re.match(rf"\s{{0,99}}(?:{argument}|{bracket}|\]?\s{{0,99}}(?:{tags}))", rest):
            return True
        undecided = (
            rf"\s{{0,99}}(?:,\s{{0,99}}(?:[\"']?(?:{KEY})?[\"']?\s{{0,9}})?"
            rf"|,?\s{{0,99}}\)\s{{0,99}}(?:{begun})?|\]?\s{{0,99}}(?:{begun})?)?"
        )
        if not re.fullmatch(undecided, rest):
            return False
        return True if self.ended else None

    def container(self) -> Generator[None, None, Value | None]:
        """Read a list, a dictionary or a tuple."""
        at, depth, quote = 0, 0, ""
        while True:
            limit = self.region_end(self.last_tag(0, at))
            end = limit if limit >= 0 else len(self.buffer)
            while at < end:
                letter = self.buffer[at]
                at += 1
                if quote:
                    if letter == quote and not is_escaped(self.buffer, at - 1):
                        quote = ""
                elif letter in "\"'":
                    quote = letter
                elif letter in BRACKETS:
                    depth += 1
                elif letter in BRACKETS.values():
                    depth -= 1
                    if not depth:
                        return self.take_value(at)
            if limit >= 0 or not (yield from self.more()):
                break
        if limit < 0 and self.is_cut:
            return None
        return self.take_value(end)


def literal(value: Any) -> str:
    """Return a value as the newer templates write it: containers as JSON, others as Python."""
    is_container = isinstance(value, dict | list)
    return json.dumps(value, ensure_ascii=False) if is_container else repr(value)


def is_escaped(text: str, at: int) -> bool:
    """Whether an odd number of backslashes stands before a place in a text."""
    before = at
    while before and text[before - 1] == "\\":
        before -= 1
    return (at - before) % 2 == 1


def unescape(text: str) -> str:
    """Return the text of a Python literal. Unknown escapes stay as they are written."""

    def one(match: re.Match) -> str:
        letters = match[0][1:]
        if letters[0] in "ux" and len(letters) > 1:
            return chr(int(letters[1:], 16))
        return "" if letters == "\n" else ESCAPED.get(letters, letters)

    return ESCAPE.sub(one, text)


def read_container(text: str) -> Any:
    """Return the value of a list, a dictionary or a tuple; the text if it is none.

    Its numbers are instances of Number.
    """
    if text[:1] == "(":
        text = f"[{text[1:].removesuffix(')')}]"
    try:
        return json.loads(Repair(text).json(), parse_int=Number, parse_float=Number)
    except (ValueError, RecursionError):
        return text

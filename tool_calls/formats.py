"""Tool calls in a model's text: the formats of the families.

The format is found by its marker in the chat template (`find_format`). All parsers are lenient: a
call with wrong quotes, keys in another order or a missing tag is still the call. Anything else is
text, as the model wrote it.
"""

import hashlib
import json
import re
import secrets
import string
from collections.abc import Generator, Mapping, Sequence
from typing import Any, ClassVar

from runtime.reasoning import HARMONY_TOKENS, REASONING, HarmonyMessage, held_prefix
from tokenizer import Tokenizer
from tool_calls.arguments import conform
from tool_calls.lenient_json import JsonScanner, Number, Repair, to_json
from tool_calls.parser import (
    MARK,
    MAX_HEAD,
    NAME,
    ArgumentTags,
    CallParser,
    CallPiece,
    Piece,
    Reader,
    TextPiece,
    ValueReader,
    beginnings,
)
from tool_calls.pythonic import PythonicParser

__all__ = [
    "FORMATS",
    "MARK",
    "NAME",
    "CallParser",
    "CallPiece",
    "GemmaParser",
    "GlmParser",
    "HarmonyParser",
    "HermesParser",
    "KimiParser",
    "MiniMaxParser",
    "MistralParser",
    "Piece",
    "PythonicParser",
    "QwenCoderParser",
    "TextPiece",
    "find_format",
]
MAX_TAGS = 400  # characters of the tags that end a value
LETTERS = string.ascii_letters + string.digits


class HermesParser(CallParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3."""

    in_template = "<tool_call>"
    tokens = ("<tool_call>", "</tool_call>")
    openers = ("<tool_call>",)
    closer = "</tool_call>"

    @classmethod
    def prefix(cls, name: str | None, tokenizer: Tokenizer) -> str:
        return '<tool_call>\n{"name": "' + (f'{name}", "arguments":' if name else "")

    @classmethod
    def json_markers(cls, tokenizer: Tokenizer) -> tuple[str, str] | None:
        return '", "arguments":', "}\n</tool_call>"

    def call(self) -> Reader:
        return (yield from self.json_calls())


class TaggedParser(CallParser):
    """Calls whose arguments are texts between tags.

    A value ends at its own end tag, if a tag of the call follows it: the value may be about tags.
    If the end tag is missing, it ends at the next argument's tag, or at the end of the call.
    """

    value_end: ClassVar[str]
    call_end: ClassVar[str]  # ends a value without an end tag

    def value_stop(self) -> re.Pattern:
        """Return the pattern of a value's end. Its group `key` is that of a next argument."""
        raise NotImplementedError

    def value(self, key: str) -> ValueReader:
        """Read the value of a key; return None if the answer was cut inside of it."""
        pattern, start, value_end = self.value_stop(), 0, self.marker(self.value_end)
        given = {key, *self.arguments}

        def ends_value(match: re.Match) -> bool:
            """Whether the value ends here: a text may spell an argument that the function lacks."""
            if (following := match["key"]) is None:
                return True
            following, at = following.strip("\"' "), match.start()
            is_known = following in self.known or not self.known
            return following not in given and (is_known or self.buffer[at - 1 : at] == "\n")

        while True:
            found = filter(ends_value, pattern.finditer(self.buffer, start))
            if stop := next(found, None):
                break
            start = max(0, len(self.buffer) - MAX_TAGS)
            if not (yield from self.more()):
                break
        region = self.buffer[: stop.start()] if stop else self.buffer
        if stop and stop.end() > stop.start():  # the end tag
            self.buffer = self.buffer[stop.end() :]
            return region
        value, tag, rest = region.rpartition(value_end)
        if stop:
            self.buffer = self.buffer[stop.start() :]
            return value if tag else rest.rstrip()
        if tag:
            self.buffer = rest
            return value
        ends = [
            at for end in (self.call_end, self.closer) if (at := region.find(self.marker(end))) >= 0
        ]
        end = min(ends, default=len(region))
        self.buffer = region[end:]
        return None if self.is_cut and not ends else region[:end].rstrip()


class QwenCoderParser(TaggedParser):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.

    function, parameter: the beginnings of the tags of a call and of an argument.
    """

    in_template = "<function="
    tokens = ("<tool_call>", "</tool_call>")
    function: ClassVar[str] = "<function="
    parameter: ClassVar[str] = "<parameter="
    openers = ("<tool_call>", "<function=")  # some answers lack the first
    closer = "</tool_call>"
    value_end = "</parameter>"
    call_end = "</function>"

    @classmethod
    def prefix(cls, name: str | None, tokenizer: Tokenizer) -> str:
        return "<tool_call>\n<function=" + (f"{name}>\n" if name else "")

    @classmethod
    def argument_tags(cls) -> ArgumentTags:
        tags = "<parameter=", ">\n", "\n</parameter>\n"
        return ArgumentTags(">\n", *tags, "</function>\n</tool_call>")

    def value_stop(self) -> re.Pattern:
        opener, closer = (re.escape(self.marker(name)) for name in self.tokens)
        key, begin, end = rf"{self.parameter}[^>\n]{{1,200}}[>\n]", self.function, self.call_end
        return re.compile(
            rf"{self.value_end}(?=\s{{0,99}}(?:{end}|{key}|{closer}))"
            rf"|(?={self.parameter}(?P<key>[^>\n]{{1,200}})[>\n])"
            rf"|(?={end}\s{{0,99}}(?:{closer}|{opener}|{begin}))"
            rf"|(?={closer}\s{{0,99}}(?:{opener}|{begin}))|(?={opener}\s{{0,99}}{begin})"
        )

    def call(self) -> Reader:
        opener, closer = (self.marker(name) for name in self.tokens)
        start = self.function if self.opener == opener else ""
        if start and (yield from self.begins_with("{", "[")):
            return (yield from self.json_calls())
        # Some answers lack the bracket, or have quotes where the format has none.
        head = rf"\s*{start}[\"']?({NAME})[\"']?(?:>|[ \t]*(?=\n))\s*"
        follows = (self.parameter, self.call_end, closer, opener, self.function, "{")
        whole = rf"{head}(?:{beginnings(*follows)})?"
        match = yield from self.expect(
            rf"{head}(?={'|'.join(map(re.escape, follows))})",
            rf"\s*({beginnings(start) or '(?!)'}|{start}[\"']?(({NAME})[\"']?[ \t]*)?|{whole})?",
        )
        if not match and self.ended and re.fullmatch(whole, self.buffer):
            match = re.match(head, self.buffer)
        if not match:
            return False
        self.begin(match[1])
        self.buffer = self.buffer[match.end() :]
        if self.buffer.startswith("{"):
            complete = yield from self.json_arguments()
            yield from self.skip_closer(self.call_end)
        elif complete := (yield from self.parameters()):
            self.end_arguments()
        if complete:
            yield from self.skip_closer(closer)
        return True

    def ends(self) -> tuple[str, ...]:
        return self.call_end, *super().ends()

    def parameters(self) -> Reader:
        """Read parameters up to the function's end; return False if the text ends inside of one."""
        opener, closer = (self.marker(name) for name in self.tokens)
        start = rf"\s*{self.parameter}([^>\n]+)(?:>|(?=\n))"
        end = rf"\s*(?:{self.call_end}|(?={re.escape(closer)}))"
        tags = beginnings(self.parameter, self.call_end, opener, closer)
        while True:
            match = yield from self.expect(
                f"{start}|{end}", rf"\s*({self.parameter}[^>\n]*|{tags})?"
            )
            if not match:
                return self.ends_cleanly()
            self.buffer = self.buffer[match.end() :]
            if not match[1]:
                return True
            key = match[1].strip("\"' ")
            value = yield from self.value(key)
            if value is None:
                return False
            self.add_argument(key, value.removeprefix("\n").removesuffix("\n"))


class MiniMaxParser(QwenCoderParser):
    """MiniMax-M2: `<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>`.

    One pair of `<minimax:tool_call>` tags is around all calls of an answer.
    """

    in_template = "<minimax:tool_call>"
    tokens = ("<minimax:tool_call>", "</minimax:tool_call>")
    function = "<invoke name="
    parameter = "<parameter name="
    openers = ("<minimax:tool_call>", "<invoke name=")
    closer = "</minimax:tool_call>"
    call_end = "</invoke>"

    @classmethod
    def prefix(cls, name: str | None, tokenizer: Tokenizer) -> str:
        return '<minimax:tool_call>\n<invoke name="' + (f'{name}">\n' if name else "")

    @classmethod
    def argument_tags(cls) -> ArgumentTags:
        tags = '<parameter name="', '">', "</parameter>\n"
        return ArgumentTags('">\n', *tags, "</invoke>\n</minimax:tool_call>")


class GlmParser(TaggedParser):
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`: GLM."""

    in_template = "<arg_key>"
    tokens = (
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    )
    openers = ("<tool_call>",)
    closer = "</tool_call>"
    value_end = "</arg_value>"
    call_end = "</tool_call>"

    @classmethod
    def prefix(cls, name: str | None, tokenizer: Tokenizer) -> str:
        return "<tool_call>" + (name or "")

    @classmethod
    def argument_tags(cls) -> ArgumentTags:
        tags = "\n<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>"
        return ArgumentTags("", *tags, "\n</tool_call>")

    def value_stop(self) -> re.Pattern:
        opener, closer, key, key_end, value, value_end = self.patterns()
        return re.compile(
            rf"{value_end}(?=\s{{0,99}}(?:{key}|{closer}|{opener}))"
            rf"|(?={key}\s{{0,99}}(?P<key>[^<{MARK}]{{1,200}}?)\s{{0,99}}(?:{key_end}|{value}))"
            rf"|(?={closer}\s{{0,99}}{opener})|(?={opener}\s{{0,99}}{NAME}\s{{0,99}}{key})"
        )

    def patterns(self) -> list[str]:
        return [re.escape(self.marker(name)) for name in self.tokens]

    def call(self) -> Reader:
        if (yield from self.begins_with("{", "[")):
            return (yield from self.json_calls())
        opener, closer, key = (self.marker(name) for name in self.tokens[:3])
        follows = beginnings(key, closer, opener, "{")
        match = yield from self.expect(
            rf"\s*({NAME})\s*(?={re.escape(key)}|{re.escape(closer)}|{re.escape(opener)}|\{{)",
            rf"\s*(({NAME})\s*({follows})?)?",
        )
        if not match and self.ended:
            match = re.fullmatch(rf"\s*({NAME})\s*", self.buffer)
        is_open = match and not self.buffer.startswith((key, closer), match.end())
        if not match or (is_open and match[1] not in self.schemas):
            return False
        self.begin(match[1])
        self.buffer = self.buffer[match.end() :]
        if self.buffer.startswith("{"):
            complete = yield from self.json_arguments()
        elif complete := (yield from self.pairs()):
            self.end_arguments()
        if complete:
            yield from self.skip_closer(closer)
        return True

    def pairs(self) -> Reader:
        """Read keys and values; return False if the text ends inside of one."""
        _, closer, key, key_end, value, _ = self.patterns()
        start = rf"\s*{key}\s*([^<{MARK}]{{1,200}}?)\s*(?:{key_end})?\s*{value}"
        tags = beginnings(*map(self.marker, self.tokens[:3]))
        begun = beginnings(self.marker("<arg_value>"))
        ends = rf"{key_end}\s*({begun})?|{begun}|{beginnings(self.marker('</arg_key>'))}"
        while True:
            match = yield from self.expect(
                rf"{start}|\s*(?={closer})", rf"\s*({key}[^<{MARK}]*({ends})?|{tags})?"
            )
            if not match:
                return self.ends_cleanly()
            self.buffer = self.buffer[match.end() :]
            if match[1] is None:
                return True
            text = yield from self.value(match[1])
            if text is None:
                return False
            self.add_argument(match[1], text)


class MistralParser(CallParser):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or newer `[TOOL_CALLS]NAME[ARGS]{...}`."""

    in_template = "[TOOL_CALLS]"
    tokens = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    openers = ("[TOOL_CALLS]",)

    @classmethod
    def prefix(cls, name: str | None, tokenizer: Tokenizer) -> str:
        if tokenizer.template_has("[ARGS]"):
            return "[TOOL_CALLS]" + (f"{name}[ARGS]" if name else "")
        return '[TOOL_CALLS][{"name": "' + (f'{name}", "arguments":' if name else "")

    @classmethod
    def json_markers(cls, tokenizer: Tokenizer) -> tuple[str, str] | None:
        is_new = tokenizer.template_has("[ARGS]")
        return ("[ARGS]", "") if is_new else ('", "arguments":', "}]")

    def new_id(self, name: str) -> str:
        """Return nine letters or digits: Mistral's templates accept no other id."""
        return "".join(secrets.choice(LETTERS) for _ in range(9))

    @classmethod
    def template_id(cls, id: str, name: str = "", number: int = 0) -> str:
        fits = re.fullmatch("[A-Za-z0-9]{9}", id)
        return id if fits else hashlib.sha256(id.encode()).hexdigest()[:9]

    def call(self) -> Reader:
        if (yield from self.begins_with("{", "[", "`")):
            return (yield from self.json_calls())
        args, call_id = re.escape(self.marker("[ARGS]")), re.escape(self.marker("[CALL_ID]"))
        head = rf"\s*({NAME})(?:{call_id}\w+)?(?:{args})?\s*"
        next_head = rf"[\s,]*({NAME})(?:{call_id}\w+)?{args}\s*(?=\{{)"
        possible = rf"[\s,]*({NAME})?({MARK}?\[[A-Z_]*\]?\w*)*{MARK}?\s*"
        match = yield from self.expect(rf"{head}(?=\{{)", possible)
        if not match and self.ended and not self.is_cut:  # a call without arguments
            match = re.fullmatch(head, self.buffer)
            match = match if match and match[1] in self.schemas else None
        if not match:
            return False
        while match:
            self.begin(match[1])
            self.buffer = self.buffer[match.end() :]
            if not self.buffer:
                self.end_arguments()
                break
            yield from self.json_arguments()
            match = yield from self.expect(next_head, possible)  # some answers lack the opener
        return True


class GemmaParser(CallParser):
    """`<|tool_call>call:NAME{key:<|"|>text<|"|>,other:5}<tool_call|>`: Gemma 4."""

    in_template = "<|tool_call>"
    tokens = ("<|tool_call>", "<tool_call|>", '<|"|>')
    openers = ("<|tool_call>",)
    closer = "<tool_call|>"

    @classmethod
    def prefix(cls, name: str | None, tokenizer: Tokenizer) -> str:
        return "<|tool_call>call:" + (name or "") + ("{" if name else "")

    def call(self) -> Reader:
        if (yield from self.begins_with("{", "[")):
            return (yield from self.json_calls())
        closer, name = self.marker(self.closer), NAME.replace(":", "")
        match = yield from self.expect(
            rf"\s*(?:call:)?\s*({name})\s*(?=\{{|{re.escape(closer)})",
            rf"\s*((call:)?\s*({name})?\s*({beginnings(closer)})?|{beginnings('call:')})",
        )
        if not match:
            return False
        start = match.end()
        end = yield from self.call_end(start)
        quote = self.marker('<|"|>')
        repair = Repair(self.buffer[start:end], quote=quote)
        is_closed = end < len(self.buffer) or not self.is_cut
        arguments = repair.json(close=is_closed) if end > start else "{}"
        if not repair.is_plausible:
            return False
        self.begin(match[1])
        self.add_arguments(self.conform(arguments.replace(quote, "")))
        rest = self.buffer[start + repair.at : end].lstrip(" \n\r\t},")
        if rest.startswith("call:"):  # several calls between two markers
            self.buffer = self.opener + rest + self.buffer[end:]
        else:
            self.buffer = rest + self.buffer[end:].removeprefix(closer)
        return True

    def call_end(self, start: int) -> Generator[None, None, int]:
        """Return where the call ends: at a closer or an opener that is not inside of a text."""
        quote, at = self.marker('<|"|>'), start
        first = -1
        tags = re.compile("|".join(re.escape(self.marker(name)) for name in self.tokens[:2]))
        while True:
            while match := tags.search(self.buffer, at):
                if self.buffer.count(quote, start, match.start()) % 2 == 0:
                    return match.start()
                first = match.start() if first < 0 else first
                at = match.end()
            at = max(at, len(self.buffer) - MAX_HEAD)
            if not (yield from self.more()):
                return first if first >= 0 else len(self.buffer)

    def conform(self, arguments: str) -> str:
        """Return arguments with the types of the function's schema."""
        try:
            value = json.loads(arguments, parse_int=Number, parse_float=Number)
            return to_json(conform(value, self.schema))
        except (ValueError, RecursionError):  # the answer was cut, or nests too deeply
            return arguments


class KimiParser(CallParser):
    """Kimi: a section of `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}`.

    The number counts the calls of the conversation. The published template writes a call's id
    there. earlier: calls before the answer.
    """

    in_template = "<|tool_call_argument_begin|>"
    tokens = (
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
        *("<|tool_call_end|>", "<|tool_call_argument_begin|>"),
    )
    openers = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")
    closer = "<|tool_call_end|>"
    earlier: ClassVar[int] = 0

    @classmethod
    def template_id(cls, id: str, name: str = "", number: int = 0) -> str:
        return f"functions.{name}:{number}" if name else id

    @classmethod
    def after(cls, messages: Sequence[Mapping[str, Any]]) -> type[CallParser]:
        earlier = sum(len(message.get("tool_calls") or ()) for message in messages)
        return type(cls.__name__, (cls,), {"earlier": earlier})

    @classmethod
    def prefix(cls, name: str | None, tokenizer: Tokenizer) -> str:
        section, _, begin, _, argument = cls.tokens
        after = f"{name}:{cls.earlier}{argument}" if name else ""
        return f"{section}{begin}functions.{after}"

    @classmethod
    def json_markers(cls, tokenizer: Tokenizer) -> tuple[str, str] | None:
        _, section_end, _, end, argument = cls.tokens
        return f":{cls.earlier}{argument}", f"{end}{section_end}"

    def new_id(self, name: str) -> str:
        return f"functions.{name}:{self.earlier + self.calls}"

    def ends(self) -> tuple[str, ...]:
        return tuple(map(self.marker, self.tokens[:4]))

    def call(self) -> Reader:
        section, section_end, begin, end, argument = map(self.marker, self.tokens)
        name, first = NAME.replace(":", ""), re.escape(begin) if self.opener == section else ""
        head = rf"\s*(?:functions\.)?({name})(?::\d+)?\s*{re.escape(argument)}\s*"
        partial = rf"\s*(({name})(:\d*)?\s*(({re.escape(argument)}\s*)|{beginnings(argument)})?)?"
        begun = rf"|\s*({beginnings(begin)})" if first else ""
        match = yield from self.expect(
            rf"\s*{first}{head}(?=\{{)", rf"\s*{first}{partial}{begun}|\s*"
        )
        if not match:
            return False
        self.begin(match[1])
        self.buffer = self.buffer[match.end() :]
        yield from self.json_arguments()
        yield from self.skip_closer(end)
        yield from self.skip_closer(section_end)
        return True


class HarmonyParser(CallParser):
    """gpt-oss: `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}`.

    It also splits off the reasoning: all that is neither a call nor in the channel `final`.
    """

    in_template = "<|channel|>"
    tokens = HARMONY_TOKENS
    splits_reasoning = True

    @classmethod
    def prefix(cls, name: str | None, tokenizer: Tokenizer) -> str:
        rest = f"{name} <|constrain|>json<|message|>" if name else ""
        return f"<|channel|>commentary to=functions.{rest}"

    @classmethod
    def json_markers(cls, tokenizer: Tokenizer) -> tuple[str, str] | None:
        return " <|constrain|>json<|message|>", ""

    @classmethod
    def resumed(cls, kind: str) -> str:
        return f"<|channel|>{'analysis' if kind == REASONING else 'final'}<|message|>"

    def read(self) -> Reader:
        markers = {self.marker(name): name for name in self.tokens}
        pattern = re.compile("|".join(map(re.escape, markers)))
        message = HarmonyMessage(kind=None)  # the prompt ends with the role
        while True:
            match = pattern.search(self.buffer)
            held = 0 if match or self.ended else max(held_prefix(self.buffer, m) for m in markers)
            end = match.start() if match else len(self.buffer) - held
            self.add(message, message.push_text(self.buffer[:end]))
            self.buffer = self.buffer[match.end() if match else end :]
            if match:
                marker = markers[match[0]]
                self.add_answer(message.push_marker(marker))
                if marker == "<|message|>" and (name := self.function(message)):
                    self.begin(name)
                    yield from self.message_arguments()
            elif not (yield from self.more()):
                self.add_answer(message.end())
                return True

    def message_arguments(self) -> Reader:
        """Read the arguments of a call, which end at the next control token."""
        yield from self.begins_with(MARK)
        if self.buffer.startswith(MARK) or not self.buffer.strip():
            self.end_arguments()
        else:
            yield from self.json_arguments()
        return True

    def function(self, message: HarmonyMessage) -> str | None:
        """Return the name of the function that a message calls."""
        match = re.match(rf"(functions\.)?({NAME})", message.recipient or "")
        is_call = match and (match[1] or match[2] in self.schemas)
        return match[2] if match and is_call else None

    def add(self, message: HarmonyMessage, text: str) -> None:
        """Add text of a message. Text after a call's arguments is dropped."""
        if not self.function(message):
            self.add_answer(text, message.kind == REASONING)

    def add_answer(self, text: str, is_reasoning: bool = False) -> None:
        """Add text; control tokens that mean nothing here are their own text."""
        if text := text.replace(MARK, ""):
            self.pieces.append(TextPiece(text, is_reasoning))

    def scanner(self) -> JsonScanner:
        return JsonScanner(MARK)

    def ends(self) -> tuple[str, ...]:
        return (MARK,)


# A template may mention the markers of a later row, never those of an earlier one.
FORMATS: tuple[type[CallParser], ...] = (
    HarmonyParser,
    GemmaParser,
    PythonicParser,
    KimiParser,
    MiniMaxParser,
    QwenCoderParser,
    GlmParser,
    MistralParser,
    HermesParser,
)


def find_format(tokenizer: Tokenizer) -> type[CallParser] | None:
    """Return the parser for a model's calls; None if its template has no known format."""
    return next((f for f in FORMATS if tokenizer.template_has(f.in_template)), None)

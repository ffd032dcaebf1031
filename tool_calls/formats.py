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
    Call,
    CallParser,
    Reader,
    TextPiece,
    beginnings,
)
from tool_calls.pythonic import PythonicParser
from tool_calls.tagged import GlmParser, MiniMaxParser, QwenCoderParser

LETTERS = string.ascii_letters + string.digits


class HermesParser(CallParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3."""

    in_template = ("<tool_call>",)
    tokens = ("<tool_call>", "</tool_call>")
    openers = ("<tool_call>",)
    closer = "</tool_call>"
    json_tags = "<tool_call>\n", "\n</tool_call>"


class MistralParser(CallParser):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or newer `[TOOL_CALLS]NAME[ARGS]{...}`."""

    in_template = ("[TOOL_CALLS]",)
    tokens = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    openers = ("[TOOL_CALLS]",)
    json_tags = "[TOOL_CALLS][", "]"

    @classmethod
    def prefix(cls, name: str | None, tokenizer: Tokenizer) -> str:
        if tokenizer.template_has("[ARGS]"):
            return "[TOOL_CALLS]" + (f"{name}[ARGS]" if name else "")
        prefix = super().prefix(name, tokenizer)
        has_space = tokenizer.template_has("[TOOL_CALLS] [")  # Mixtral 8x22B
        return prefix.replace("][", "] [", 1) if has_space else prefix

    @classmethod
    def json_markers(cls, tokenizer: Tokenizer) -> tuple[str, str] | None:
        is_new = tokenizer.template_has("[ARGS]")
        return ("[ARGS]", "") if is_new else super().json_markers(tokenizer)

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


class GraniteParser(CallParser):
    """`<|tool_call|>[{"name": ..., "arguments": {...}}]`: Granite 3."""

    in_template = ("<|tool_call|>",)
    tokens = ("<|tool_call|>",)
    openers = ("<|tool_call|>",)
    json_tags = "<|tool_call|>[", "]"

    @classmethod
    def written(cls, calls: Sequence[Call]) -> tuple[str, str, str] | None:
        found = [call._asdict() for call in calls]
        return cls.openers[0], json.dumps(found, ensure_ascii=False), ""


class GemmaParser(CallParser):
    """`<|tool_call>call:NAME{key:<|"|>text<|"|>,other:5}<tool_call|>`: Gemma 4."""

    in_template = ("<|tool_call>",)
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

    in_template = ("<|tool_call_argument_begin|>",)
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
        ends = beginnings(end, section_end)  # arguments may be missing
        given = rf"{re.escape(argument)}\s*({ends})?|{beginnings(argument)}"
        partial = rf"\s*(({name})(:\d*)?\s*({given})?)?"
        begun = rf"|\s*({beginnings(begin)})" if first else ""
        follows = "|".join(map(re.escape, ("{", end, section_end)))
        match = yield from self.expect(
            rf"\s*{first}{head}(?={follows})", rf"\s*{first}{partial}{begun}|\s*"
        )
        if not match:
            return False
        self.begin(match[1])
        self.buffer = self.buffer[match.end() :]
        if self.buffer.startswith("{"):
            yield from self.json_arguments()
        else:
            self.end_arguments()
        yield from self.skip_closer(end)
        yield from self.skip_closer(section_end)
        return True


class HarmonyParser(CallParser):
    """gpt-oss: `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}`.

    It also splits off the reasoning: all that is neither a call nor in the channel `final`.
    """

    in_template = ("<|channel|>",)
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
    GraniteParser,
    MistralParser,
    HermesParser,
)


def find_format(tokenizer: Tokenizer) -> type[CallParser] | None:
    """Return the parser for a model's calls; None if its template has no known format."""
    return next((f for f in FORMATS if any(map(tokenizer.template_has, f.in_template))), None)

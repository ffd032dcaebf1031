"""Tool calls in a model's text: the formats of the families, and an incremental parser for each.

The format is found by its marker in the chat template (`find_format`). A marker that is a control
token has no text of its own: `markers` maps its id to MARK and its name, so that ordinary text that
spells the name is not a marker.
"""

import hashlib
import json
import re
import secrets
import string
from collections.abc import Callable, Generator, Iterator
from typing import Any, ClassVar, NamedTuple

from runtime.reasoning import HARMONY_TOKENS, REASONING, HarmonyMessage, held_prefix
from tokenizer import Tokenizer

MARK = "\ufdd1"  # before the name of a control token. A noncharacter: exchanged text has none.
NAME = r"[\w.:/-]+"  # a function's name
MAX_HEAD = 1000  # characters in which a call's name, or an argument's, must end
LETTERS = string.ascii_letters + string.digits
WHITESPACE = re.compile(r"\s*")
# Yields when it needs more text; returns whether it has found what it looked for.
Reader = Generator[None, None, bool]


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


class CallParser:
    """Splits an answer into text and tool calls. Text that only looks like a call is text.

    in_template: text by which a chat template is recognized. tokens: markers that may be control
    tokens. openers: markers that begin a call. closer: text that ends it. White space around calls
    belongs to neither text nor call.
    """

    in_template: ClassVar[str]
    tokens: ClassVar[tuple[str, ...]] = ()
    openers: ClassVar[tuple[str, ...]] = ()
    closer: ClassVar[str | None] = None
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
        self.name, self.arguments = "", []  # the current call's function and keys
        self.reader = self.read()

    @classmethod
    def prefix(cls, name: str | None, tokenizer: Tokenizer) -> str:
        """Return the text that forces a call of a function, or of any (None)."""
        raise NotImplementedError

    @classmethod
    def json_markers(cls, tokenizer: Tokenizer) -> tuple[str, str] | None:
        """Return what stands between a call's name and its arguments, and after these.

        None: the arguments are not JSON.
        """
        return None

    @classmethod
    def template_id(cls, id: str) -> str:
        """Return the id of a call in a form that the templates accept."""
        return id

    def push(self, text: str) -> list[Piece]:
        """Take the next text; return the pieces now certain."""
        self.buffer += text
        next(self.reader, None)
        return self.take()

    def flush(self) -> list[Piece]:
        """End the answer; return the rest."""
        self.ended = True
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
        raise NotImplementedError

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
                    self.add_text(opener.removeprefix(MARK))
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
        text = self.space + text
        if self.after_call:
            text = text.lstrip()
        certain = text.rstrip()
        self.space = text[len(certain) :]
        if certain:
            self.after_call = False
            self.pieces.append(TextPiece(certain))

    def begin(self, name: str) -> None:
        """Begin a call."""
        self.name, self.arguments = name, []
        self.space, self.after_call = "", True
        self.pieces.append(CallPiece(self.calls, "", self.new_id(), name))
        self.calls += 1

    def new_id(self) -> str:
        return f"call_{secrets.token_hex(12)}"

    def add_arguments(self, text: str) -> None:
        if text:
            self.pieces.append(CallPiece(self.calls - 1, text))

    def add_argument(self, key: str, text: str) -> None:
        """Add one argument, whose value is text: JSON if the tool's schema has another type."""
        properties = self.schemas.get(self.name, {}).get("properties")
        schema = properties.get(key) if isinstance(properties, dict) else None
        value = typed_value(text, schema)
        start = ", " if self.arguments else "{"
        self.arguments.append(key)
        self.add_arguments(f"{start}{to_json(key)}: {to_json(value)}")

    def ends_cleanly(self, is_closed: bool) -> bool:
        """Whether a call ends between two arguments. Drop the beginning of one that was cut."""
        is_cut = self.ended and not is_closed and bool(self.buffer.strip())
        if is_cut:
            self.buffer = ""
        return not is_cut

    def end_arguments(self) -> None:
        self.add_arguments("}" if self.arguments else "{}")

    def json_value(self) -> Reader:
        """Read a JSON value as the arguments of the call; return False if it is incomplete."""
        scanner = JsonScanner()
        whole = ""
        while True:
            count, complete = scanner.scan(self.buffer)
            text, self.buffer = self.buffer[:count], self.buffer[count:]
            whole += text
            if scanner.is_container:
                self.add_arguments(text)
            if complete:
                break
            if not (yield from self.more()):
                return False
        if not scanner.is_container:  # null, or JSON inside of a string
            value = parse_json(whole)
            self.add_arguments(value if isinstance(value, str) and value else "{}")
        return True

    def json_call(self, closer: str | None) -> Reader:
        """Read {"name": NAME, "arguments": {...}} up to the end of the arguments.

        An object in another order is read as a whole, up to `closer`.
        """
        head = r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"(?:arguments|parameters)"\s*:\s*'
        while True:
            if match := re.match(head + r"(?=\S)", self.buffer):
                name = parse_json(match[1])
                if not isinstance(name, str):
                    return False
                self.begin(name)
                self.buffer = self.buffer[match.end() :]
                yield from self.json_value()
                return True
            start = self.buffer.lstrip()
            if start[:1] != "{" and (start or len(self.buffer) > MAX_HEAD):
                return False
            end = self.buffer.find(closer) if closer else -1
            if end >= 0 or self.ended:
                return self.whole_json_call(self.buffer[: end if end >= 0 else None])
            yield from self.more()

    def whole_json_call(self, text: str) -> bool:
        """Take an object such as {"arguments": {...}, "name": NAME}, if the text is one."""
        value = parse_json(text.strip())
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return False
        self.begin(value["name"])
        arguments = value.get("arguments", value.get("parameters")) or {}
        self.add_arguments(arguments if isinstance(arguments, str) else to_json(arguments))
        self.buffer = self.buffer[len(text) :]
        return True


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
        closer = self.marker(self.closer)
        if not (yield from self.json_call(closer)):
            return False
        while True:
            rest = self.buffer.lstrip(" \n\r\t}")  # some answers have a brace too many
            if rest.startswith(","):  # further keys
                rest = rest[found:] if (found := rest.find(closer)) >= 0 else ""
            if rest.startswith(closer):
                self.buffer = rest[len(closer) :]
                return True
            if not closer.startswith(rest) or not (yield from self.more()):
                self.buffer = rest
                return True


class QwenCoderParser(CallParser):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`."""

    in_template = "<function="
    tokens = ("<tool_call>", "</tool_call>")
    openers = ("<tool_call>", "<function=")  # some answers lack the first
    closer = "</tool_call>"

    @classmethod
    def prefix(cls, name: str | None, tokenizer: Tokenizer) -> str:
        return "<tool_call>\n<function=" + (f"{name}>\n" if name else "")

    def call(self) -> Reader:
        head, partial = rf"\s*({NAME})>", rf"\s*({NAME})?"
        if self.opener != "<function=":
            partial = rf"\s*(<function=({NAME})?|{beginnings('<function=')})?"
            head = rf"\s*<function=({NAME})>"
        match = yield from self.expect(head, partial)
        if not match:
            return False
        self.begin(match[1])
        self.buffer = self.buffer[match.end() :]
        complete = yield from self.parameters()
        if complete:
            self.end_arguments()
            yield from self.skip_closer(self.marker(self.closer))
        return True

    def parameters(self) -> Reader:
        """Read parameters up to `</function>`; return False if the text ends inside of one."""
        start, end = r"\s*<parameter=([^>\n]+)>", "</parameter>"
        possible = rf"\s*(<parameter=[^>\n]*|{beginnings('<parameter=', '</function>')})?"
        while True:
            match = yield from self.expect(rf"{start}|\s*</function>", possible)
            if not match:
                return self.ends_cleanly(False)
            if not match[1]:
                self.buffer = self.buffer[match.end() :]
                return True
            while (close := self.buffer.find(end, match.end())) < 0:
                if not (yield from self.more()):
                    self.buffer = ""
                    return False
            value = self.buffer[match.end() : close]
            self.add_argument(match[1], value.removeprefix("\n").removesuffix("\n"))
            self.buffer = self.buffer[close + len(end) :]


class GlmParser(CallParser):
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

    @classmethod
    def prefix(cls, name: str | None, tokenizer: Tokenizer) -> str:
        return "<tool_call>" + (name or "")

    def call(self) -> Reader:
        key, value = self.marker("<arg_key>"), self.marker("<arg_value>")
        key_end, value_end = self.marker("</arg_key>"), self.marker("</arg_value>")
        closer = self.marker(self.closer)
        follows = f"{re.escape(key)}|{re.escape(closer)}"
        match = yield from self.expect(
            rf"\s*({NAME})\s*(?={follows})", rf"\s*(({NAME})\s*({beginnings(key, closer)})?)?"
        )
        if not match:
            known = self.ended and self.buffer.strip() in self.schemas
            match = re.match(rf"\s*({NAME})\s*", self.buffer) if known else None
        if not match:
            return False
        self.begin(match[1])
        self.buffer = self.buffer[match.end() :]
        start = rf"\s*{re.escape(key)}(.*?){re.escape(key_end)}\s*{re.escape(value)}"
        possible = rf"\s*({re.escape(key)}.*|{beginnings(key, closer)})?"
        while True:
            match = yield from self.expect(rf"{start}|\s*{re.escape(closer)}", possible)
            if not match or match[1] is None:
                break
            while (end := self.buffer.find(value_end, match.end())) < 0:
                if not (yield from self.more()):
                    self.buffer = ""
                    return True
            self.add_argument(match[1].strip(), self.buffer[match.end() : end])
            self.buffer = self.buffer[end + len(value_end) :]
        if match:
            self.buffer = self.buffer[match.end() :]
        if self.ends_cleanly(bool(match)):
            self.end_arguments()
        return True


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

    def new_id(self) -> str:
        """Return nine letters or digits: Mistral's templates accept no other id."""
        return "".join(secrets.choice(LETTERS) for _ in range(9))

    @classmethod
    def template_id(cls, id: str) -> str:
        fits = re.fullmatch("[A-Za-z0-9]{9}", id)
        return id if fits else hashlib.sha256(id.encode()).hexdigest()[:9]

    def call(self) -> Reader:
        while not self.buffer.strip():
            if not (yield from self.more()):
                return False
        if self.buffer.lstrip()[0] in "[{":
            return (yield from self.json_calls())
        args, call_id = re.escape(self.marker("[ARGS]")), re.escape(self.marker("[CALL_ID]"))
        head = rf"\s*({NAME})(?:{call_id}\w+)?(?:{args})?\s*(?=\{{)"
        possible = rf"\s*({NAME})?({MARK}?\[[A-Z_]*\]?\w*)*{MARK}?\s*"
        match = yield from self.expect(head, possible)
        if not match:
            return False
        self.begin(match[1])
        self.buffer = self.buffer[match.end() :]
        yield from self.json_value()
        return True

    def json_calls(self) -> Reader:
        """Read calls as a JSON list, or as one JSON object."""
        raw = self.buffer
        self.buffer = self.buffer.lstrip().removeprefix("[")
        begun = False
        while True:
            if not (yield from self.json_call(None)):
                if not begun:
                    held = self.buffer
                    start = raw[: len(raw) - len(raw.lstrip())]
                    bracket = "[" if raw.lstrip().startswith("[") else ""
                    self.buffer = start + bracket + held.removeprefix(start)
                return begun
            begun = True
            key = r'(?:,\s*"id"\s*:\s*"[^"]*"\s*)?'
            match = yield from self.expect(rf"\s*{key}\}}\s*(?=[,\]\S])", r"\s*(,[^{}]*)?\}?\s*")
            if not match:
                self.buffer = "" if self.ended else self.buffer
                return True
            self.buffer = self.buffer[match.end() :]
            if not self.buffer.startswith(","):
                self.buffer = self.buffer.removeprefix("]")
                return True
            self.buffer = self.buffer[1:]


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
        closer = self.marker(self.closer)
        call = r"\s*call:(" + NAME.replace(":", "") + r")(?=\{)"
        possible = rf"\s*(call:({NAME})?|{beginnings('call:')})?"
        match = yield from self.expect(call, possible)
        if not match:
            return False
        while closer not in self.buffer:
            if not (yield from self.more()):
                break
        text, _, rest = self.buffer.partition(closer)
        try:
            value, _ = GemmaValue(self.marker('<|"|>')).read(text, match.end())
        except (ValueError, IndexError, RecursionError):
            return False
        self.begin(match[1])
        self.add_arguments(to_json(value))
        self.buffer = rest
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
            elif not (yield from self.more()):
                self.add_answer(message.end())
                return True

    def function(self, message: HarmonyMessage) -> str | None:
        """Return the name of the function that a message calls."""
        match = re.match(rf"(functions\.)?({NAME})", message.recipient or "")
        is_call = match and (match[1] or match[2] in self.schemas)
        return match[2] if match and is_call else None

    def add(self, message: HarmonyMessage, text: str) -> None:
        """Add text of a message."""
        if self.function(message):
            self.add_arguments(text)
        elif text:
            self.pieces.append(TextPiece(text, message.kind == REASONING))

    def add_answer(self, text: str) -> None:
        """Add text of an answer without a header."""
        if text:
            self.pieces.append(TextPiece(text))


# A template may mention the markers of a later row, never those of an earlier one.
FORMATS: tuple[type[CallParser], ...] = (
    HarmonyParser,
    GemmaParser,
    QwenCoderParser,
    GlmParser,
    MistralParser,
    HermesParser,
)


def find_format(tokenizer: Tokenizer) -> type[CallParser] | None:
    """Return the parser for a model's calls; None if its template has no known format."""
    return next((f for f in FORMATS if tokenizer.template_has(f.in_template)), None)


def control_markers(format: type[CallParser], tokenizer: Tokenizer) -> dict[int, str]:
    """Return {id: text in the answer} of the format's markers that are control tokens."""
    ids = {name: tokenizer.token_id(name) for name in format.tokens}
    return {
        id: MARK + name
        for name, id in ids.items()
        if id is not None and not tokenizer.token_bytes(id)
    }


def make_parser(
    format: type[CallParser],
    tokenizer: Tokenizer,
    schemas: dict[str, dict],
    prefix: str = "",
    *,
    single: bool = False,
) -> CallParser:
    """Return a parser of one answer. prefix: that of the answer that is in the prompt."""
    marked = {text.removeprefix(MARK): text for text in control_markers(format, tokenizer).values()}
    parser = format(schemas, lambda name: marked.get(name, name), single)
    for name, text in marked.items():
        prefix = prefix.replace(name, text)
    parser.pieces = parser.push(prefix)
    return parser


# Values -------------------------------------------------------------------------------------------


class JsonScanner:
    """Finds the end of a JSON value that arrives in pieces."""

    def __init__(self):
        self.depth, self.in_string, self.escaped, self.begun = 0, False, False, False
        self.is_container = False

    def scan(self, text: str) -> tuple[int, bool]:
        """Return how many characters belong to the value, and whether it is complete."""
        for at, letter in enumerate(text):
            if self.in_string:
                if self.escaped:
                    self.escaped = False
                elif letter == "\\":
                    self.escaped = True
                elif letter == '"':
                    self.in_string = False
                    if not self.depth:
                        return at + 1, True
                continue
            if not self.begun and not letter.isspace():
                self.begun, self.is_container = True, letter in "{["
            if letter == '"':
                self.in_string = True
            elif letter in "{[":
                self.depth += 1
            elif letter in "}]" and self.depth:
                self.depth -= 1
                if not self.depth:
                    return at + 1, True
            elif self.begun and not self.depth and letter in ",}] \n":
                return at, True  # after a number or a name
        return len(text), False


class GemmaValue:
    """Reads Gemma's notation: keys without quotes, texts between a marker."""

    def __init__(self, quote: str):
        self.quote = quote

    def read(self, text: str, at: int) -> tuple[Any, int]:
        """Return the value at a position, and where it ends. Raises ValueError, IndexError."""
        if text.startswith(self.quote, at):
            start = at + len(self.quote)
            end = text.index(self.quote, start)
            return text[start:end], end + len(self.quote)
        if text[at] == "{":
            return self.members(text, at)
        if text[at] == "[":
            return self.items(text, at)
        end = next((n for n in range(at, len(text)) if text[n] in ",}]"), len(text))
        atom = text[at:end].strip()
        value = parse_json(atom)
        return (atom if value is None and atom != "null" else value), end

    def members(self, text: str, at: int) -> tuple[dict, int]:
        found: dict = {}
        at = skip_space(text, at + 1)
        while text[at] != "}":
            colon = text.index(":", at)
            key = text[at:colon].strip().removeprefix(self.quote).removesuffix(self.quote)
            found[key], at = self.read(text, skip_space(text, colon + 1))
            at = self.separator(text, at, "}")
        return found, at + 1

    def items(self, text: str, at: int) -> tuple[list, int]:
        found = []
        at = skip_space(text, at + 1)
        while text[at] != "]":
            value, at = self.read(text, at)
            found.append(value)
            at = self.separator(text, at, "]")
        return found, at + 1

    def separator(self, text: str, at: int, end: str) -> int:
        """Return the position after a comma, or of the end."""
        at = skip_space(text, at)
        if text[at] == ",":
            return skip_space(text, at + 1)
        if text[at] != end:
            raise ValueError(f"no {end} at {at}")
        return at


def skip_space(text: str, at: int) -> int:
    match = WHITESPACE.match(text, at)
    return match.end() if match else at


def typed_value(text: str, schema: Any) -> Any:
    """Return an argument's value: text if the schema allows a string only, else parsed as JSON."""
    kinds = schema.get("type") if isinstance(schema, dict) else None
    if kinds == "string":
        return text
    value = parse_json(text.strip())
    if value is None and text.strip() != "null":
        lowered = text.strip().lower()  # True and False, as Python writes them
        return {"true": True, "false": False, "none": None}.get(lowered, text)
    if kinds is None and not isinstance(value, dict | list | bool | int | float | None):
        return text
    return value


def parse_json(text: str) -> Any:
    """Return a JSON value; None if the text is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def beginnings(*texts: str) -> str:
    """Return a pattern for all beginnings of the texts, their whole included."""
    found: Iterator[str] = (text[:n] for text in texts for n in range(len(text), 0, -1))
    return "|".join(map(re.escape, found))

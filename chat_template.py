"""A checkpoint's chat template: a jinja2 program that turns a conversation into text.

Control tokens that a message spells out are marked as text, so that only the template itself
produces control tokens: see `ChatTemplate.mark`.
"""

import json
import re
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from functools import cached_property
from pathlib import Path

import jinja2
import jinja2.meta
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Marks the character before it as text that cannot be part of a control token, see
# `ChatTemplate.mark`. A Unicode noncharacter: exchanged text does not contain it.
TEXT_MARK = "\ufdd0"
MARKED = re.compile(f"((?:[^{TEXT_MARK}]{TEXT_MARK})+)")
# Marks where a message that is to be continued ends. A noncharacter, too.
END_MARK = "\ufdd2"
NO_MARKS = str.maketrans("", "", TEXT_MARK + END_MARK)

DEFAULT, TOOL_USE = "default", "tool_use"
FILE, FOLDER = "chat_template.jinja", "additional_chat_templates"
# Names under which templates look for the reasoning of an assistant's message: Qwen3 and GLM,
# Gemma 4, gpt-oss.
REASONING_KEYS = "reasoning_content", "reasoning", "thinking"
# Markers of reasoning blocks that templates remove from an assistant's earlier messages.
REASONING_MARKERS = ("<think>", "</think>"), ("<|channel>", "<channel|>")
# Escapes of JSON, the halves of a surrogate pair among them. The group: one without the other.
HIGH, LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
ESCAPES = re.compile(rf"{HIGH}{LOW}|({HIGH}|{LOW})|\\.")
MOST_SECONDS = 10  # CPU time of one rendering, which takes milliseconds: longer ones never end
DEADLINE = "deadline of this rendering"  # a variable that no template can read
MOST_TEXT = 1 << 28  # characters and items of one product such as 'x' * n
ASKS_FOR_NONE = re.compile(r"""(?<!\w)content(['"]\s*\])?\s+is\s+(not\s+)?none""", re.IGNORECASE)


def whole_characters(text: str) -> str:
    """Return JSON text with U+FFFD in place of each escaped half of a surrogate pair.

    Programs that cut a text by UTF-16's units, and models, write such halves; UTF-8 has none.
    """
    return ESCAPES.sub(lambda match: r"\ufffd" if match[1] else match[0], text)


class CallArguments(dict):
    """The arguments of an earlier call: an object that is also its JSON text.

    Some templates read the object's members, others (DeepSeek) concatenate the text.
    """

    __slots__ = ("_text",)

    def __init__(self, members: dict, text: str):
        super().__init__(members)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: object) -> str:
        return self._text + str(other)

    def __radd__(self, other: object) -> str:
        return str(other) + self._text


class ChatTemplate:
    """One template.

    source: its text. names: variables for special tokens, {"bos_token": "<s>", ...}. control: the
    names of the tokenizer's control tokens.
    """

    def __init__(self, source: str, names: dict[str, str], control: Iterable[str]):
        self.source, self.names = source, names
        self.control = re.compile(any_of(control))
        removed = {name for pair in REASONING_MARKERS if self._searches(pair[1]) for name in pair}
        self.control_of_answers = re.compile(any_of(set(control) - removed))

    def _searches(self, marker: str) -> bool:
        """Whether the template looks for a marker: `marker in text` or `text.split(marker)`."""
        return bool(re.search(rf"['\"]{re.escape(marker)}['\"]\s*(in\b|[,)])", self.source))

    def highest_is_xhigh(self) -> bool:
        """Whether the template compares an effort with "xhigh", and not with "high" (Qwen3.8)."""
        return all(
            bool(re.search(rf"['\"]{effort}['\"]", self.source)) == is_known
            for effort, is_known in (("xhigh", True), ("high", False))
        )

    @property
    def variables(self) -> set[str]:
        """The names that the template reads and that are not its own, `messages` among them."""
        try:
            return jinja2.meta.find_undeclared_variables(self.environment().parse(self.source))
        except Exception:  # the template is a program of the checkpoint's author
            return set()

    @cached_property
    def program(self) -> jinja2.Template:
        """Compile the template, whose loops end at the deadline."""
        environment = self.environment()
        tree = environment.parse(self.source)
        for loop in tree.find_all(jinja2.nodes.For):
            loop.iter = jinja2.nodes.Filter(loop.iter, "timed", [], [], None, None)
        return environment.from_string(tree)

    def environment(self) -> jinja2.Environment:
        """Return jinja2's sandbox with the names that transformers defines: a template is a
        program from a download."""
        environment = _Sandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
        )
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        environment.filters["tojson"] = _to_json
        environment.filters["timed"] = _timed
        return environment

    def render(self, messages: Iterable[dict], variables: dict) -> str:
        """Return the conversation as text, with the messages' control tokens marked as text.

        The text ends where the last message does if `continue_final_message` is a true variable.
        Raises ValueError if the template fails or rejects the messages.
        """
        given, asks_for_none = list(messages), bool(ASKS_FOR_NONE.search(self.source))
        try:
            try:
                return self.fill(given, variables, asks_for_none)
            except Exception:  # a template may ask in one place, and search the content in another
                if not asks_for_none:
                    raise
                return self.fill(given, variables, empty_is_none=False)
        except Exception as error:  # the template is a program of the checkpoint's author
            raise ValueError(f"chat template: {one_line(error)}") from None

    def fill(self, messages: list[dict], variables: dict, empty_is_none: bool) -> str:
        """Run the template. empty_is_none: an empty content beside calls is none."""
        defaults = {"tools": None, "documents": None, "add_generation_prompt": True}
        if continues := bool(variables.get("continue_final_message")):
            variables = variables | {"add_generation_prompt": False}
        if variables.get("reasoning_effort") == "high" and self.highest_is_xhigh():
            variables = variables | {"reasoning_effort": "xhigh"}
        context = self.names | self.mark(defaults | variables)
        messages = [self.message(fields, empty_is_none) for fields in messages]
        if continues:
            mark_end(messages[-1])
        deadline = time.thread_time() + MOST_SECONDS
        text = self.program.render(context | {"messages": messages, DEADLINE: deadline})
        return text_until_end(text) if continues else text

    def message(self, fields: dict, empty_is_none: bool) -> dict:
        """Return a message as the template expects it, marked.

        written_calls: for a template that has no calls, their text, between markers that stay
        control tokens. It follows the content.
        """
        own = "tool_calls", "written_calls"
        marked = self.mark({key: fields[key] for key in fields if key not in own})
        if calls := fields.get("tool_calls"):
            marked["tool_calls"] = self.mark([with_arguments(call) for call in calls])
            if empty_is_none and marked.get("content") == "":
                marked["content"] = None  # DeepSeek renders calls only beside no content
        elif "tool_calls" in fields:
            marked["tool_calls"] = calls
        if fields.get("role") != "assistant":
            return marked
        if "content" in fields and marked["content"] is not None:
            # The template itself removes reasoning, so it has to find the markers.
            marked["content"] = self.mark(fields["content"], self.control_of_answers)
        if written := fields.get("written_calls"):
            begin, text, end = written
            marked["content"] = f"{marked.get('content') or ''}{begin}{self.mark(text)}{end}"
        if reasoning := next((marked[key] for key in REASONING_KEYS if marked.get(key)), None):
            known = [key for key in REASONING_KEYS if key in self.source]
            marked |= dict.fromkeys(known, reasoning)
        return marked

    def mark(self, value, control: re.Pattern | None = None):
        """Return a JSON value, with TEXT_MARK after each character of a control token in it."""
        control = control or self.control
        if isinstance(value, str):
            value = value.translate(NO_MARKS)
            return control.sub(lambda match: "".join(c + TEXT_MARK for c in match[0]), value)
        if isinstance(value, dict):
            members = {self.mark(k, control): self.mark(v, control) for k, v in value.items()}
            is_text = isinstance(value, CallArguments)
            return CallArguments(members, self.mark(str(value), control)) if is_text else members
        if isinstance(value, list | tuple):
            return [self.mark(item, control) for item in value]
        return value


def mark_end(message: dict) -> None:
    """Put END_MARK after the last text of a message. Raises ValueError if it has none."""
    keys = ["content"] if message.get("content") else REASONING_KEYS
    found = [key for key in keys if isinstance(message.get(key), str)]
    if not found:
        raise ValueError("the last message has no text that could be continued")
    for key in found:
        message[key] += END_MARK


def text_until_end(text: str) -> str:
    """Return a rendered text up to the last END_MARK. Raises ValueError without one."""
    before, mark, _ = text.rpartition(END_MARK)
    if not mark:
        raise ValueError("the last message cannot be continued: the template leaves its text out")
    return before.replace(END_MARK, "")


def with_arguments(call: dict) -> dict:
    """Return a tool call whose arguments, an object or its JSON text, are CallArguments."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    given = function.get("arguments")
    try:
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        members = json.loads(text := whole_characters(text))
    except (ValueError, RecursionError):
        return call
    if not isinstance(members, dict):
        return call
    return call | {"function": function | {"arguments": CallArguments(members, text)}}


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, in which each rendering ends."""

    intercepted_binops = frozenset("*")

    def call(self, context, *arguments, **named):
        check_deadline(context)
        return super().call(context, *arguments, **named)

    def call_binop(self, context, operator, left, right):
        for items, count in ((left, right), (right, left)):
            size = len(items) if hasattr(items, "__len__") else 0
            if isinstance(count, int) and size * count > MOST_TEXT:
                raise OverflowError(f"{size} * {count} characters or items are too many")
        return super().call_binop(context, operator, left, right)


@jinja2.pass_context
def _timed(context, items: Iterable) -> Iterator:
    """Yield the items of a loop."""
    for item in items:
        check_deadline(context)
        yield item


def check_deadline(context) -> None:
    """Raise TimeoutError after MOST_SECONDS of a rendering."""
    if time.thread_time() > context[DEADLINE]:
        raise TimeoutError(f"it did not end in {MOST_SECONDS} s")


class _GenerationTag(Extension):
    """Renders the contents of `{% generation %}`, which marks answers for training.

    As in transformers it is a scope: code after it does not see the variables that it sets.
    """

    tags = {"generation"}  # noqa: RUF012 (jinja2's protocol)

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str):
    raise jinja2.TemplateError(message)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Return plain JSON, which models are trained on; jinja2's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


# Files --------------------------------------------------------------------------------------------


def read_sources(directory: Path, config: dict) -> dict[str, str]:
    """Return the texts of the templates DEFAULT and TOOL_USE, as far as a checkpoint has them.

    config: of tokenizer_config.json. Its templates are those that have no file, as in transformers.
    Raises ValueError for values of other types.
    """
    sources = {}
    if (directory / FILE).is_file():
        sources[DEFAULT] = read_text(directory / FILE)
    else:
        sources = _named_templates(directory, config.get("chat_template"))
    # A converted checkpoint has no folders: there the last file stands beside the others.
    for file in (f"{FOLDER}/{DEFAULT}.jinja", f"{FOLDER}/{TOOL_USE}.jinja", f"{TOOL_USE}.jinja"):
        if (directory / file).is_file():
            sources[Path(file).stem] = read_text(directory / file)
    return {name: source for name, source in sources.items() if source}


def _named_templates(directory: Path, value) -> dict[str, str]:
    """Return the templates of tokenizer_config.json: a text, {name: text}, or a list of pairs."""
    if isinstance(value, list):
        items = [item for item in value if isinstance(item, dict)]
        pairs = [(item.get("name"), item.get("template")) for item in items]
    else:
        pairs = list(value.items()) if isinstance(value, dict) else [(DEFAULT, value)]
    found = {name: text for name, text in pairs if name in (DEFAULT, TOOL_USE) and text is not None}
    if not all(isinstance(text, str) for text in found.values()):
        path = directory / "tokenizer_config.json"
        raise ValueError(f"{path}: chat_template must be a text or named texts")
    return found


def read_text(path: Path) -> str:
    """Return a file's text. Raises ValueError if it is no readable UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path} ({one_line(error)}); download it again") from None


def any_of(names: Iterable[str]) -> str:
    """Return a pattern for any of the names, longest first; (?!) never matches."""
    longest_first = sorted(filter(None, names), key=len, reverse=True)
    return "|".join(map(re.escape, longest_first)) or "(?!)"


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__

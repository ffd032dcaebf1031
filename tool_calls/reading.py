"""Reading the calls of one answer, and giving tools to a chat template."""

from typing import Any

from tokenizer import Tokenizer
from tool_calls.formats import find_format
from tool_calls.generic import GENERIC, messages_with_tools
from tool_calls.parser import MARK, CallParser, Piece


class CallReader:
    """The calls of a chat's answers. `begin` before each answer."""

    def __init__(self, tokenizer: Tokenizer, tools: list[dict]):
        """tools: as in OpenAI's API, {"type": "function", "function": {"name", ...}}."""
        self.tokenizer, self.tools = tokenizer, tools
        self.known = find_format(tokenizer)
        self.format = self.known or GENERIC
        self.markers = control_markers(self.format, tokenizer)
        self.splits_reasoning = self.format.splits_reasoning
        self.parser = self.make()

    def make(self) -> CallParser:
        functions = (tool["function"] for tool in self.tools)
        schemas = {function["name"]: function.get("parameters", {}) for function in functions}
        return make_parser(self.format, self.tokenizer, schemas)

    def begin(self) -> None:
        """Begin an answer."""
        self.parser = self.make()

    def push(self, text: str) -> list[Piece]:
        """Take new text; return the pieces now certain."""
        return self.parser.push(text)

    def end(self, is_cut: bool) -> list[Piece]:
        """End the answer; return the rest. is_cut: a limit has ended it."""
        return self.parser.flush(is_cut)

    def prepare(self, messages: list[dict]) -> tuple[list[dict], dict[str, Any]]:
        """Return the messages for the chat template, and its variables."""
        if self.known:
            names = {
                call["id"]: call["function"]["name"]
                for message in messages
                for call in message.get("tool_calls", ())
            }
            return [self.message(message, names) for message in messages], {"tools": self.tools}
        return messages_with_tools(messages, [tool["function"] for tool in self.tools]), {}

    def message(self, message: dict, names: dict[str, str]) -> dict:
        """Return a message with the ids of its calls in a form that the template accepts.

        names: of the functions, by the calls' ids.
        """
        found = dict(message)
        if calls := message.get("tool_calls"):
            found["tool_calls"] = [{**c, "id": self.format.template_id(c["id"])} for c in calls]
        if id := message.get("tool_call_id"):
            found |= {"tool_call_id": self.format.template_id(id), "name": names.get(id, "")}
        return found


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

"""Reading the calls of one answer, and giving tools to a chat template."""

from typing import Any

from tokenizer import Tokenizer
from tool_calls.formats import find_format
from tool_calls.generic import GENERIC, messages_with_tools
from tool_calls.lenient_json import parse_json
from tool_calls.parser import MARK, Call, CallParser


class CallReader:
    """The calls of a chat's answers. `prepare` its messages, then take the answer's `parser`."""

    def __init__(self, tokenizer: Tokenizer, tools: list[dict]):
        """tools: as in OpenAI's API, {"type": "function", "function": {"name", ...}}."""
        self.tokenizer, self.tools = tokenizer, tools
        self.known = find_format(tokenizer)
        self.format = self.known or GENERIC
        self.markers = control_markers(self.format, tokenizer)
        self.splits_reasoning = self.format.splits_reasoning

    def parser(self) -> CallParser:
        """Return what reads the calls of the next answer."""
        functions = (tool["function"] for tool in self.tools)
        schemas = {function["name"]: function.get("parameters", {}) for function in functions}
        return make_parser(self.format, self.tokenizer, schemas)

    def prepare(self, messages: list[dict]) -> tuple[list[dict], dict[str, Any]]:
        """Return the messages for the chat template, and its variables."""
        self.format = (self.known or GENERIC).after(messages)
        if self.known:
            prepared = template_calls(messages, self.format, self.tokenizer)
            return prepared, {"tools": self.tools}
        return messages_with_tools(messages, [tool["function"] for tool in self.tools]), {}


def template_calls(
    messages: list[dict], format: type[CallParser], tokenizer: Tokenizer
) -> list[dict]:
    """Return messages with the ids of calls in a form that the template accepts.

    A result has the name of its function, if a call before it has its id. For a template that
    leaves calls out, a message has them as text, too (`written_calls`, see ChatTemplate.message).
    """
    leaves_out = tokenizer.has_chat_template and not tokenizer.template_has("tool_calls")
    names: dict[str, str] = {}
    ids: dict[str, str] = {}
    found, count = [], 0
    for given in messages:
        message = dict(given)
        if calls := message.get("tool_calls"):
            message["tool_calls"] = []
            for call in calls:
                id, name = call["id"], call["function"]["name"]
                names[id], ids[id] = name, format.template_id(id, name, count)
                message["tool_calls"].append({**call, "id": ids[id]})
                count += 1
            if leaves_out and (parts := format.written(list(map(read_call, calls)))):
                message["written_calls"] = parts
        if (id := message.get("tool_call_id")) is not None:
            message["tool_call_id"] = ids.get(id) or format.template_id(id)
            if name := message.get("name") or names.get(id):
                message["name"] = name
        found.append(message)
    return found


def read_call(call: dict) -> Call:
    """Return a call of OpenAI's API. Arguments that are no object are left out."""
    function = call["function"]
    arguments = function["arguments"]
    arguments = parse_json(arguments) if isinstance(arguments, str) else arguments
    return Call(function["name"], arguments if isinstance(arguments, dict) else {})


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

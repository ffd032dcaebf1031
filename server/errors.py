"""Error responses, and one-line messages about wrong fields."""

from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError

from server import structured


class APIError(Exception):
    """An error response. status: of HTTP. code: for programs, such as "queue_full".

    param: the field of the request that is wrong.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        param: str | None = None,
    ):
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers or {}
        self.param = param

    def body(self) -> dict:
        """Return the JSON object that OpenAI's clients expect."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


class ContextLengthError(APIError):
    """A prompt fills the context, so that no answer fits.

    tokens: of the prompt, None if nobody has counted them. limit: of the context.
    """

    def __init__(self, message: str, param: str, tokens: int | None, limit: int):
        super().__init__(message, code="context_length_exceeded", param=param)
        self.tokens, self.limit = tokens, limit


# Messages for structured fields. `error_message` derives those of other fields.
FIELD_MESSAGES = {
    **structured.FIELD_MESSAGES,
    "stop": "stop must be a string of 1 to 500 characters, or a list of up to 16",
    "messages": 'messages must be a list such as [{"role": "user", "content": "Hello"}], '
    "whose roles and contents are strings",
    "prompt": "there is no prompt: give one string, or a list of token ids (whole numbers)",
    "tools": 'tools must be a list such as [{"type": "function", "function": {"name": ..., '
    '"description": ..., "parameters": {...}}}], with names of letters, digits and _.:/-',
    "tool_choice": 'tool_choice must be "none", "auto", "required", '
    '{"type": "function", "function": {"name": ...}}, or {"type": "allowed_tools", '
    '"allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": ...}]}}',
    "logit_bias": "logit_bias must be an object of token ids and numbers from -100 to 100",
    "chat_template_kwargs": "chat_template_kwargs must be an object of names and values",
    "input": "input must be a string, or a list of messages, function calls and their outputs",
    "include": 'include must be a list of names such as "message.output_text.logprobs"',
    "tokens": "tokens must be a list of token ids (whole numbers)",
}
TYPE_RULES = {
    "bool_type": "true or false",
    "string_type": "a string",
    "model_type": "an object",
    "dict_type": "an object",
}


def error_message(error: ValidationError, model: type[BaseModel]) -> str:
    """Return a one-line message about the first error of a body.

    model: the body's class, which may have `field_messages` of its own.
    """
    first = error.errors(include_url=False)[0]
    kind, path, value = first["type"], first["loc"], first["input"]
    if kind == "json_invalid":
        return f"the body is not JSON, or not valid Unicode ({first['ctx']['error']})"
    if kind == "value_error":
        return str(first["ctx"]["error"])
    if not path:
        return "the body must be a JSON object"
    messages = getattr(model, "field_messages", FIELD_MESSAGES)
    if path[0] in messages:
        return messages[path[0]]
    if kind == "missing":
        return f"{path[-1]} is missing"
    rule = TYPE_RULES.get(kind) or limits_of(model, path[0])
    return f"{path[-1]} {value!r:.40}: it must be {rule}"


def error_field(error: ValidationError) -> str | None:
    """Return the name of the first wrong field, if there is one."""
    path = error.errors(include_url=False)[0]["loc"]
    return str(path[0]) if path else None


@cache
def limits_of(model: type[BaseModel], name: str) -> str:
    """Return the range of a numeric field, as text."""
    schema = model.model_json_schema()["properties"][name]
    schema = schema.get("anyOf", [schema])[0]
    kind = "a whole number " if schema["type"] == "integer" else ""
    low, high = whole_to_int(schema["minimum"]), whole_to_int(schema["maximum"])
    return f"{kind}from {low} to {high}"


def whole_to_int(value: Any) -> Any:
    """Return a whole float as an int: JSON does not distinguish 5 and 5.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value

"""Tools for a chat template without a known format of calls: they are described in the system text.

Calls have Hermes's layout, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, which most
instruct models have seen. Earlier calls and their results become text.
"""

import json
from typing import Any

from tool_calls.formats import HermesParser

GENERIC = HermesParser
INSTRUCTIONS = """\
You may call functions. These are available, one JSON object a line:
{functions}

To call one, write this and nothing after it, with arguments that its parameters accept:
<tool_call>
{{"name": "FUNCTION", "arguments": {{"PARAMETER": "VALUE"}}}}
</tool_call>
You may write several calls one after the other. The results are sent to you in the next message. \
If no function helps, answer without a call."""
Message = dict[str, Any]


def messages_with_tools(messages: list[Message], functions: list[dict]) -> list[Message]:
    """Return a chat's messages with functions, calls and results as text.

    functions: names, descriptions and parameters; [] adds no system text. Results, and the user's
    message after them, are one message: many templates want roles to alternate.
    """
    found: list[Message] = []
    after_result = False
    if functions:
        lines = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
        texts, messages = [INSTRUCTIONS.format(functions=lines)], list(messages)
        if messages[0]["role"] == "system":
            texts.insert(0, messages.pop(0)["content"])
        found.append({"role": "system", "content": "\n\n".join(texts)})
    for message in messages:
        role, content = message["role"], message["content"]
        if calls := message.get("tool_calls"):
            content = "\n".join(filter(None, [content, *map(call_text, calls)]))
        elif role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
        reasoning = {key: message[key] for key in ("reasoning_content",) if key in message}
        if after_result and role == "user":
            found[-1]["content"] += "\n\n" + content
        else:
            found.append({"role": role, "content": content, **reasoning})
        after_result = message["role"] == "tool"
    return found


def call_text(call: dict) -> str:
    """Return a call of the history as the model is to write it."""
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'

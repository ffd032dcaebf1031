"""A chat's messages, and the file that keeps them."""

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cli.command import describe_os_error
from host.files import replace_text

MAX_FILE = 16 << 20  # bytes of a conversation
KEPT = "role", "content", "tool_calls", "tool_call_id"  # fields of a message
ROLES = "system", "user", "assistant", "tool"


@dataclass
class Conversation:
    """Messages of a chat: {"role": one of ROLES, "content": text}.

    An answer with calls has `tool_calls`, as in OpenAI's API, and a result `tool_call_id`.
    """

    system: str | None = None
    messages: list[dict] = field(init=False)

    def __post_init__(self):
        self.reset()

    def reset(self) -> None:
        """Forget all but the system message."""
        self.messages = []
        if self.system is not None:
            self.messages.append({"role": "system", "content": self.system})

    def set_system(self, text: str) -> None:
        """Set the system message, or none, and forget the rest."""
        self.system = text or None
        self.reset()

    def load(self, messages: list[dict]) -> None:
        """Replace all messages."""
        self.messages = list(messages)
        first = messages[0] if messages else {"role": ""}
        self.system = first["content"] if first["role"] == "system" else None

    def last(self, role: str) -> dict | None:
        """Return the last message of a role."""
        return next((m for m in reversed(self.messages) if m["role"] == role), None)

    def open_calls(self) -> list[dict]:
        """Return the calls of the last answer that have no result yet.

        Other answers, and other calls of this one, may have the same ids.
        """
        at = len(self.messages)
        while at and self.messages[at - 1]["role"] == "tool":
            at -= 1
        answered = [message["tool_call_id"] for message in self.messages[at:]]
        answer, found = self.messages[at - 1] if at else {"role": ""}, []
        for call in answer.get("tool_calls", ()) if answer["role"] == "assistant" else ():
            if call["id"] in answered:
                answered.remove(call["id"])
            else:
                found.append(call)
        return found

    def retract(self) -> str | None:
        """Remove the last message of the user and its answer; return the message, or None."""
        asked = [n for n, message in enumerate(self.messages) if message["role"] == "user"]
        if not asked:
            return None
        text = self.messages[asked[-1]]["content"]
        del self.messages[asked[-1] :]
        return text

    def add_result(self, call: dict, text: str) -> None:
        """Add the result of a call."""
        self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})


def load_messages(path: Path) -> list[dict]:
    """Return the messages of a file. Raises ValueError for a file that holds no conversation."""
    messages = read_json(path, "give one written by /save")
    if not is_conversation(messages):
        fix = 'it must be a list of {"role": "user" or "assistant", "content": text}'
        raise ValueError(f"{path} holds no conversation: {fix}")
    return [{key: message[key] for key in KEPT if key in message} for message in messages]


def named_file(name: str) -> Path:
    """Return the path that a user has typed; ~ stands for a home. Raises ValueError."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise ValueError(f"{name}: there is no such home directory: give another path") from None


def read_json(path: Path, fix: str) -> Any:
    """Return the JSON of a file. Raises ValueError with the fix for other files.

    A device or a FIFO might never end. Halves of surrogate pairs become U+FFFD: UTF-8 has none.
    """
    try:
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is no file: {fix}")
        if path.stat().st_size > MAX_FILE:
            raise ValueError(f"{path} is over {MAX_FILE >> 20} MiB: {fix}")
        text = path.read_bytes()
    except OSError as error:
        raise ValueError(describe_os_error(error, str(path))) from None
    try:
        whole = json.dumps(json.loads(text), ensure_ascii=False)
        return json.loads(re.sub("[\ud800-\udfff]", "\ufffd", whole))
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text: {fix}") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is not JSON: {fix}") from None


def is_conversation(messages: object) -> bool:
    """Whether JSON is a list of messages, of which only the first may be the system's.

    A result follows an answer whose calls have its id.
    """
    if not isinstance(messages, list):
        return False
    called: list[str] = []
    for number, message in enumerate(messages):
        allowed = ROLES[:3] if number == 0 else ROLES[1:]
        if not isinstance(message, dict) or message.get("role") not in allowed:
            return False
        calls = message.get("tool_calls", [])
        if not isinstance(message.get("content"), str) or not is_calls(calls):
            return False
        if message["role"] == "tool" and message.get("tool_call_id") not in called:
            return False
        called += [call["id"] for call in calls]
    return True


def is_calls(calls: object) -> bool:
    """Whether JSON is a list of tool calls, as in OpenAI's API."""
    return isinstance(calls, list) and all(
        isinstance(call, dict)
        and isinstance(call.get("id"), str)
        and isinstance(function := call.get("function"), dict)
        and all(isinstance(function.get(name), str) for name in ("name", "arguments"))
        for call in calls
    )


def load_tools(path: Path) -> list[dict]:
    """Return the functions of a file, as in OpenAI's API. Raises ValueError if it has none."""
    tools = read_json(path, "give a list of functions")
    found = [as_tool(tool) for tool in tools] if isinstance(tools, list) else []
    if not found or None in found:
        fix = 'give a list of {"type": "function", "function": {"name": ..., "parameters": ...}}'
        raise ValueError(f"{path} has no functions: {fix}")
    return found


def as_tool(value: object) -> dict | None:
    """Return a function, with or without its wrapper, as a tool; None if it is none."""
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    given = {key: part for key, part in function.items() if part is not None}
    function = {"description": "", "parameters": {"type": "object"}, **given}
    if not isinstance(function["parameters"], dict):
        return None
    return {"type": "function", "function": function}


def save_messages(messages: list[dict], path: Path) -> None:
    """Write messages to a new file, or replace a conversation.

    Raises ValueError for a file of another kind, or that cannot be written.
    """
    if os.path.lexists(path):
        try:
            load_messages(path)
        except ValueError:
            why = f"{path} is there and holds no conversation"
            raise ValueError(f"{why}: give another name") from None
    try:
        try:
            replace_text(path, json.dumps(messages, indent=1, ensure_ascii=False) + "\n")
        except UnicodeEncodeError:  # half of a surrogate pair
            replace_text(path, json.dumps(messages, indent=1) + "\n")
    except OSError as error:
        raise ValueError(describe_os_error(error, str(path))) from None

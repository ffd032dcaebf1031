"""Recent answers of the Responses API, which later requests name by their ids."""

import json
import threading
from typing import Any, NamedTuple

from server.errors import APIError

Item = dict[str, Any]
STORED_BYTES = 16 << 20


class StoredResponse(NamedTuple):
    """An answer, with its own part of the conversation."""

    response: dict
    input: list[Item]

    @property
    def previous(self) -> str | None:
        return self.response["previous_response_id"]


class ItemStore:
    """The latest responses and their items by id, at most `max_bytes` of them as JSON."""

    def __init__(self, max_bytes: int = STORED_BYTES):
        self.max_bytes, self.bytes = max_bytes, 0
        self.entries: dict[str, tuple[Any, int]] = {}  # oldest first
        self.lock = threading.Lock()  # several threads read requests

    def add(self, items: list[Item]) -> None:
        """Keep items; forget the oldest entries."""
        with self.lock:
            for item in items:
                self.keep(item["id"], item, len(json.dumps(item)))

    def add_response(self, response: dict, input: list[Item]) -> None:
        """Keep a response and its items. input: the items that the request has sent."""
        self.add(response["output"])
        size = len(json.dumps(response)) + len(json.dumps(input))
        with self.lock:
            self.keep(response["id"], StoredResponse(response, input), size)

    def keep(self, id: str, value: Any, size: int) -> None:
        _, replaced = self.entries.get(id, (None, 0))
        self.entries[id] = value, size
        self.bytes += size - replaced
        while self.bytes > self.max_bytes:
            self.bytes -= self.entries.pop(next(iter(self.entries)))[1]

    def get(self, id: Any, kind: type) -> Any:
        """Return an entry of a type; None if it is not here."""
        with self.lock:
            value, _ = self.entries.get(id, (None, 0)) if isinstance(id, str) else (None, 0)
        return value if isinstance(value, kind) else None

    def find(self, id: Any) -> Item:
        """Return an item. Raises APIError if it is not here."""
        if (found := self.get(id, dict)) is None:
            reason = f"input: the item {id!r:.80} is not stored here (any more): send it whole"
            raise APIError(f"{reason}, with store: false", param="input")
        return found

    def response(self, id: str) -> StoredResponse:
        """Return a response. Raises APIError if it is not here."""
        if (found := self.get(id, StoredResponse)) is None:
            reason = f"the response {id!r:.80} is not stored here (any more)"
            raise APIError(reason, 404, "response_not_found")
        return found

    def remove(self, id: str) -> None:
        """Forget a response and its items. Raises APIError if it is not here."""
        output = self.response(id).response["output"]
        with self.lock:
            for key in (id, *(item["id"] for item in output)):
                self.bytes -= self.entries.pop(key, (None, 0))[1]

    def conversation(self, id: str | None) -> list[Item]:
        """Return all items up to the end of a response. Raises APIError if a part is missing."""
        turns: list[StoredResponse] = []
        while id is not None:
            if (found := self.get(id, StoredResponse)) is None:
                reason = (
                    f"previous_response_id: the response {id!r:.80} is not stored here (any more)"
                )
                fix = "send the whole conversation as input"
                code, param = "previous_response_not_found", "previous_response_id"
                raise APIError(f"{reason}: {fix}", 400, code, param=param)
            turns.append(found)
            id = found.previous
        return [
            item for turn in reversed(turns) for item in (*turn.input, *turn.response["output"])
        ]

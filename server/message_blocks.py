"""The content blocks and events of an answer in Anthropic's Messages API."""

import hashlib
import json
import secrets
from collections.abc import Iterator
from typing import Any

from server.answers import AnswerReader, Finished, TextDelta, server_sent_event
from server.errors import APIError
from server.messages import Item, MessagesBody, error_body
from server.plan import GenerationRequest
from tokenizer import Tokenizer
from tool_calls.parser import Piece, TextPiece


class MessageBuilder:
    """Builds the blocks and events of one answer, see server.answers.Builder.

    Without `thinking` in the request, clients expect text in the first block. If the model thinks
    nevertheless, its thoughts are not sent.
    """

    def __init__(
        self, body: MessagesBody, request: GenerationRequest, model_name: str, tokenizer: Tokenizer
    ):
        self.body, self.model_name = body, model_name
        self.reader = AnswerReader(request, tokenizer)
        self.prompt_tokens = len(request.generations[0].prompt_ids)
        self.id = f"msg_{secrets.token_hex(12)}"
        self.blocks: list[Item] = []
        self.is_open = False  # whether the last block is being written
        self.arguments = ""  # the open tool_use block's JSON

    def completion(self, events: list[Finished]) -> dict:
        """Return the answer to a request without `stream`."""
        (event,) = events
        for _ in self.add_pieces(self.reader.whole(event.result)):
            pass
        for _ in self.close_block():
            pass
        return self.message(self.usage(event), self.ending(event))

    def start(self) -> Iterator[bytes]:
        """Yield what a stream begins with."""
        usage = self.counts(self.prompt_tokens, 0, 0)
        yield self.event("message_start", message=self.message(usage, self.ending(None)))

    def deltas(self, event: TextDelta) -> Iterator[bytes]:
        """Yield the events for new text."""
        yield from self.add_pieces(self.reader.read(event.text, event.is_reasoning))

    def end(self, event: Finished) -> Iterator[bytes]:
        """Yield what a stream ends with."""
        yield from self.add_pieces(self.reader.end(event.result))
        yield from self.close_block()
        yield self.event("message_delta", delta=self.ending(event), usage=self.usage(event))
        yield self.event("message_stop")

    def error(self, error: APIError) -> bytes:
        """Return the end of a stream that fails."""
        return self.event("error", **error_body(error))

    # Blocks -----------------------------------------------------------------------------------

    def add_pieces(self, pieces: list[Piece]) -> Iterator[bytes]:
        """Add pieces of the answer to its blocks; yield the events."""
        for piece in pieces:
            if not isinstance(piece, TextPiece):
                if piece.name is not None:
                    yield from self.open_block("tool_use", id=piece.id, name=piece.name, input={})
                if piece.arguments:
                    self.arguments += piece.arguments
                    yield self.delta("input_json_delta", partial_json=piece.arguments)
            elif not piece.is_reasoning or self.body.thinking.type != "disabled":
                yield from self.add_text("thinking" if piece.is_reasoning else "text", piece.text)

    def add_text(self, kind: str, text: str) -> Iterator[bytes]:
        """Add text to the last block if it is of this kind, else to a new one."""
        if not self.is_open or self.blocks[-1]["type"] != kind:
            extra = {"signature": ""} if kind == "thinking" else {}
            yield from self.open_block(kind, **{kind: ""}, **extra)
        self.blocks[-1][kind] += text
        yield self.delta(f"{kind}_delta", **{kind: text})

    def open_block(self, kind: str, **fields: Any) -> Iterator[bytes]:
        """Close the open block and begin another one."""
        yield from self.close_block()
        self.blocks.append({"type": kind, **fields})
        self.is_open, self.arguments = True, ""
        yield self.block_event("content_block_start", content_block=self.blocks[-1])

    def close_block(self) -> Iterator[bytes]:
        """End the open block."""
        if not self.is_open:
            return
        block, self.is_open = self.blocks[-1], False
        if block["type"] == "tool_use":
            block["input"] = parse_arguments(self.arguments)
        elif block["type"] == "thinking":
            # Nobody checks it here, but some clients drop thinking without one.
            block["signature"] = hashlib.sha256(block["thinking"].encode()).hexdigest()
            yield self.delta("signature_delta", signature=block["signature"])
        yield self.block_event("content_block_stop")

    def delta(self, kind: str, **fields: Any) -> bytes:
        return self.block_event("content_block_delta", delta={"type": kind, **fields})

    def block_event(self, kind: str, **fields: Any) -> bytes:
        """Return an event about the last block."""
        return self.event(kind, index=len(self.blocks) - 1, **fields)

    def event(self, kind: str, **fields: Any) -> bytes:
        return f"event: {kind}\n".encode() + server_sent_event({**fields, "type": kind})

    # The message ------------------------------------------------------------------------------

    def message(self, usage: dict, ending: dict) -> dict:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model_name}
        return head | {"content": self.blocks, **ending, "usage": usage}

    def ending(self, event: Finished | None) -> dict:
        """Return why the answer has ended. None: it has not."""
        if event is None:
            return {"stop_reason": None, "stop_sequence": None}
        text = event.result.get("stop_text")
        text = text if text in self.body.stop_sequences else None
        if event.result["finish_reason"] != "stop":  # the limit, or the time limit
            reason = "max_tokens"
        elif text is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if self.reader.calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": text}

    def usage(self, event: Finished) -> dict:
        """Return the token counts of an answer. `input_tokens` are those not cached."""
        result = event.result
        cached = result["cached_tokens"]
        found = self.counts(result["prompt_tokens"] - cached, cached, result["new_tokens"])
        return found | {
            "output_tokens_details": {"thinking_tokens": result.get("reasoning_tokens", 0)}
        }

    def counts(self, computed: int, cached: int, new: int) -> dict:
        cache = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}
        return {"input_tokens": computed, **cache, "output_tokens": new}


def parse_arguments(text: str) -> dict:
    """Return the arguments of a call; {} if the answer was cut inside of them."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}

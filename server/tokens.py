"""POST /tokenize and /detokenize."""

from typing import Annotated

from pydantic import Field, ValidationError

from server.errors import APIError, error_field, error_message
from server.plan import parse_body, prompt_errors
from server.responses import Item
from server.schema import FAIL_FAST, ChatCompletionBody
from server.structured import StrictModel
from server.tokenizing import TokenizerPool
from tokenizer import Tokenizer


class TokenizeBody(StrictModel):
    """The body of POST /tokenize: a prompt, or the messages of a chat."""

    prompt: str | None = None
    messages: list[Item] | None = None
    tools: list[Item] = Field(default_factory=list)
    add_special_tokens: bool = True
    parse_special: bool = True  # as in /v1/completions

    def encode(self, tokenizer: Tokenizer | TokenizerPool) -> list[int]:
        """Return the token ids. Raises ValueError."""
        if self.messages is not None:
            fields = {"messages": self.messages, "tools": self.tools}
            chat = ChatCompletionBody.model_validate(fields)
            return chat.encode(tokenizer)[0][0]
        if self.prompt is None:
            raise ValueError("give a prompt, or the messages of a chat")
        return tokenizer.encode(self.prompt, self.add_special_tokens, special=self.parse_special)


class DetokenizeBody(StrictModel):
    """The body of POST /detokenize."""

    tokens: Annotated[list[int], FAIL_FAST]


def tokenize(body: bytes, tokenizer: TokenizerPool, max_seq_len: int) -> dict:
    """Return the answer to POST /tokenize. Raises APIError."""
    fields = parse_body(TokenizeBody, body)
    try:
        with prompt_errors(None, max_seq_len):
            tokens = fields.encode(tokenizer)
    except ValidationError as error:
        message = error_message(error, ChatCompletionBody)
        raise APIError(message, param=error_field(error)) from None
    return {"tokens": tokens, "count": len(tokens), "max_model_len": max_seq_len}


def detokenize(body: bytes, tokenizer: TokenizerPool, max_seq_len: int) -> dict:
    """Return the answer to POST /detokenize. Raises APIError."""
    fields = parse_body(DetokenizeBody, body)
    return {"prompt": tokenizer.vocabulary.decode(fields.tokens)}

"""POST /tokenize and /detokenize."""

from typing import Annotated

from pydantic import ConfigDict, Field, ValidationError

from server.errors import APIError, error_field, error_message
from server.plan import parse_body, prompt_errors
from server.responses import Item
from server.schema import FAIL_FAST, ChatCompletionBody, check_ids
from server.structured import StrictModel
from server.tokenizing import TokenizerPool, vocabulary_of
from tokenizer import Tokenizer


class TokenizeBody(StrictModel):
    """The body of POST /tokenize: a prompt, or a chat with all of its fields."""

    model_config = ConfigDict(extra="allow")

    prompt: str | None = None
    messages: list[Item] | None = None
    tools: list[Item] = Field(default_factory=list)
    add_special_tokens: bool = True
    parse_special: bool = True  # as in /v1/completions

    def encode(self, tokenizer: Tokenizer | TokenizerPool) -> list[int]:
        """Return the token ids. Raises ValueError."""
        if (self.messages is None) == (self.prompt is None):
            raise ValueError("give a prompt, or the messages of a chat")
        if self.messages is not None:
            fields = {"messages": self.messages, "tools": self.tools}
            chat = ChatCompletionBody.model_validate((self.model_extra or {}) | fields)
            return chat.encode(tokenizer)[0][0]
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
    tokens, vocabulary = parse_body(DetokenizeBody, body).tokens, vocabulary_of(tokenizer)
    try:
        return {"prompt": vocabulary.decode(check_ids(tokens, vocabulary))}
    except ValueError as error:
        raise APIError(str(error), param="tokens") from None

"""How the tool calls of one request's answers are read, and which grammar they have."""

from typing import Any, NamedTuple

from server.constraints import answer_or_calls
from tokenizer import Tokenizer
from tool_calls.parser import CallParser
from tool_calls.reading import control_markers, make_parser


class CallSettings(NamedTuple):
    """How the tool calls of an answer are read."""

    format: type[CallParser]
    schemas: dict[str, dict]  # name -> JSON schema of the parameters
    prefix: str  # the answer's beginning, which the prompt ends with or continues
    single: bool  # one call at most
    grammar: str | None = None  # a forced call's, after the prefix
    is_named: bool = False  # the request names the function
    is_forced: bool = False  # the answer is a call

    def parser(self, tokenizer: Tokenizer) -> CallParser:
        """Return a parser of one answer."""
        return make_parser(self.format, tokenizer, self.schemas, self.prefix, single=self.single)

    def generation_fields(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the fields of Generation that calls need."""
        found = {
            "markers": control_markers(self.format, tokenizer),
            "split_reasoning": not self.format.splits_reasoning,
        }
        return found | ({"grammar": self.grammar, "reasons": False} if self.grammar else {})

    def beside(self, answer: str, tokenizer: Tokenizer) -> str:
        """Return the grammar of either calls, or an answer that follows the grammar `answer`."""
        if not self.format.openers:  # calls stand outside of the answer's text
            return answer
        return answer_or_calls(tokenizer, answer, self.format.openers, self.format.tokens)

    def stop(self, tokenizer: Tokenizer) -> list[str]:
        """Return the text that ends an answer with a single call, if the format has one."""
        if not self.single or not self.format.closer:
            return []
        marker = self.format.closer
        id = tokenizer.token_id(marker)
        return [control_markers(self.format, tokenizer).get(-1 if id is None else id, marker)]

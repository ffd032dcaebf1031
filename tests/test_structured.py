"""Fields by which requests restrict answers, in the names of several servers."""

import json
import logging
import random
import re

import pytest
from test_constraints import walk

from server import structured
from server.constraints import Constraint, grammar_tokens
from server.errors import APIError
from server.plan import Limits, read_request
from server.response_store import ItemStore
from server.responses import read_responses_request

OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}
YES_OR_NO = 'root ::= answer\nanswer ::= "yes" | "no"'
A_NUMBER = r'\{\s*"a"\s*:\s*-?\d+\s*\}'
PROMPTS = {
    "completions": {"prompt": "x"},
    "chat": {"messages": [{"role": "user", "content": "x"}]},
    "responses": {"input": "x"},
}


@pytest.fixture(scope="module")
def read(tokenizer):
    """(api, fields) -> the request, by the reader of one API."""

    def check_grammar(grammar):
        grammar_tokens(tokenizer, tokenizer.vocab_size).matcher(grammar)

    limits = Limits(256, tokenizer.vocab_size, check_grammar)

    def read(api, fields):
        body = json.dumps(PROMPTS[api] | fields).encode()
        if api == "responses":
            return read_responses_request(body, tokenizer, limits, ItemStore())[1]
        return read_request(body, api == "chat", tokenizer, limits)

    return read


@pytest.mark.parametrize(
    ("fields", "pattern"),
    (
        ({"guided_json": OBJECT}, A_NUMBER),
        ({"guided_json": json.dumps(OBJECT)}, A_NUMBER),
        ({"guided_regex": "[ab]{3}"}, "[ab]{3}"),
        ({"guided_regex": "^(a|b)$"}, "a|b"),
        ({"guided_choice": ["x y", 'a"\\b', "日"]}, r'x y|a"\\b|日'),
        ({"guided_grammar": YES_OR_NO}, "yes|no"),
        ({"guided_grammar": 'start: "ja" | "nein"'}, "ja|nein"),
        ({"structured_outputs": {"json": OBJECT}}, A_NUMBER),
        ({"structured_outputs": {"regex": "c+d"}}, "c+d"),
        ({"structured_outputs": {"choice": ["a", "b"], "disable_fallback": True}}, "a|b"),
        ({"structured_outputs": {"grammar": YES_OR_NO}}, "yes|no"),
        ({"structured_outputs": {"json_object": True}}, r"(?s)\{.*\}"),
        ({"grammar": YES_OR_NO}, "yes|no"),
        ({"json_schema": OBJECT}, A_NUMBER),
        ({"regex": "a/b"}, "a/b"),
        ({"ebnf": YES_OR_NO}, "yes|no"),
        ({"response_format": {"type": "json_object", "schema": OBJECT}}, A_NUMBER),
        ({"response_format": {"type": "json_schema", "schema": OBJECT}}, A_NUMBER),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": OBJECT}}}, A_NUMBER),
        ({"guided_json": OBJECT, "response_format": {"type": "text"}}, A_NUMBER),
    ),
    ids=str,
)
def test_a_field_of_any_server_restricts_the_answer(read, tokenizer, fields, pattern):
    (grammar,) = {read(api, fields).generations[0].grammar for api in PROMPTS}
    constraint = Constraint(grammar_tokens(tokenizer, tokenizer.vocab_size), grammar)
    assert re.fullmatch(pattern, walk(constraint, random.Random(1)))


@pytest.mark.parametrize(
    ("field", "values"),
    (
        ("guided_json", (5, [], "{", "[" * 99_999, "5", {"type": "nothing"})),
        ("guided_regex", (5, "(", r"\bword\b", "(" * 999)),
        ("guided_choice", ([], "a", [1], [None], ["a" * 300_000])),
        ("guided_grammar", (5, "root", 'root ::= "a" x', "start: x", "root ::= " + "(" * 99)),
        ("structured_outputs", (5, {"x": 1}, {"regex": "("}, {"regex": 1}, {"choice": []})),
        ("structured_outputs", ({"structural_tag": "x"}, {"json": {}, "regex": "a"})),
        ("grammar", ({"type": "json", "value": {}}, "root ::= (")),
        ("json_schema", (True, "{", {"type": 5})),
        ("regex", (1, "[")),
        ("ebnf", (1, "x")),
        ("structural_tag", ({"a": 1},)),
        ("response_format", ("json", {"type": "regex"}, {"type": "text", "schema": {}})),
        ("response_format", ({"type": "json", "value": {}}, {"type": "json_object", "value": {}})),
        # Not about the text's format, but they would change it.
        *((name, (True,)) for name in ("ignore_eos", "bad_words", "use_beam_search", "documents")),
        *((name, (3,)) for name in ("n_predict", "mirostat", "prompt_logprobs")),
        *((name, (0, 1.1)) for name in ("repeat_penalty", "length_penalty", "typical_p")),
        ("skip_special_tokens", (False,)),
        ("stop_token_ids", ([1],)),
    ),
)
@pytest.mark.parametrize("api", PROMPTS)
def test_a_field_that_cannot_be_honored_is_named(read, api, field, values):
    for value in values:
        with pytest.raises(APIError) as caught:
            read(api, {field: value})
        message = str(caught.value)
        assert caught.value.status == 400 and caught.value.param in (field, None), message
        assert caught.value.param or field in message
        assert "\n" not in message and len(message) < 500


@pytest.mark.parametrize("api", PROMPTS)
def test_two_formats_are_refused(read, api):
    with pytest.raises(APIError, match="guided_json and guided_regex: send one of them"):
        read(api, {"guided_json": OBJECT, "guided_regex": "a"})


def test_values_that_change_nothing_are_accepted(read):
    fields = dict.fromkeys(
        ("guided_json", "guided_choice", "structured_outputs", "min_tokens", "grammar", "regex")
    )
    fields |= {"ignore_eos": False, "stop_token_ids": [], "repeat_penalty": 1.0, "n_predict": -1}
    fields |= {"skip_special_tokens": True, "guided_regex": "", "guided_decoding_backend": "x"}
    for api in PROMPTS:
        assert read(api, fields).generations[0].grammar is None


def test_unknown_fields_are_logged_once(read, monkeypatch, caplog):
    monkeypatch.setattr(structured, "REPORTED", set())
    caplog.set_level(logging.INFO, "moe_fast")
    for api in ("chat", "chat", "completions"):
        read(api, {"chat_id": 1, "a\x1b[31m\n": 2, "stream_options": {"chunk_size": 3}, "n": 1})
    read("responses", {"chat_id": 1, "truncation": "auto", "reasoning": {"budget": 9}})
    logged = [record.getMessage().partition(": ")[2] for record in caplog.records]
    assert sorted(", ".join(logged).split(", ")) == [
        "a\\x1b[31m", "chat_id", "reasoning.budget", "stream_options.chunk_size", "truncation",
    ]  # fmt: skip
    caplog.clear()
    read("chat", {f"field_{n}": 1 for n in range(999)})
    read("chat", {f"other_{n}": 1 for n in range(999)})
    assert len(structured.REPORTED) == structured.MAX_REPORTED and len(caplog.records) == 1

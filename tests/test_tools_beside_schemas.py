"""Tools together with a format of the answer, and tools for templates that know none."""

import json

import jsonschema
import pytest
from local_server import LocalServer
from test_constraints import may_end
from test_reasoning import make_tokenizer
from test_tool_calls import (
    CALL,
    CODER,
    HERMES,
    LENGTH,
    QUESTION,
    WEATHER,
    Server,
    call_then_answer,
    with_template,
)

from server.constraints import Constraint, grammar_tokens
from server.plan import Limits, plan_request
from server.schema import ChatCompletionBody
from tokenizer import load_tokenizer
from tool_calls.generic import messages_with_tools

pytestmark = pytest.mark.usefixtures("few_threads")
LIMITS = Limits(LENGTH, 1 << 20)
NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NUMBER |= {"additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "number", "schema": NUMBER}}
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
MISTRAL = "[TOOL_CALLS][ARGS]" + PLAIN
GEMMA = "{# <|tool_call> #}" + PLAIN
HARMONY = "{# <|channel|> #}" + PLAIN
FORCED = {"type": "function", "function": {"name": "weather"}}


def grammar_of(tokenizer, **fields) -> str | None:
    body = ChatCompletionBody(messages=QUESTION, tools=[WEATHER], **fields)
    return plan_request(body, tokenizer, LIMITS).generations[0].grammar


def accepts(tokenizer, grammar: str, text: str) -> bool:
    """Whether a whole text, with its control tokens, follows a grammar."""
    constraint = Constraint(grammar_tokens(tokenizer, tokenizer.vocab_size), grammar)
    try:
        for id in tokenizer.encode(text, bos=False, special=True):
            constraint.advance(id)
    except ValueError:
        return False
    return may_end(constraint)


@pytest.mark.parametrize(
    ("template", "names", "call"),
    (
        (HERMES, (), CALL),
        (HERMES, ("<tool_call>", "</tool_call>"), f"{CALL}\n{CALL}"),
        (CODER, (), "<tool_call>\n<function=weather>\n<parameter=city>Rom</parameter></function>"),
        (CODER, (), "<function=weather>\n</function>"),
        (MISTRAL, ("[TOOL_CALLS]", "[ARGS]"), '[TOOL_CALLS]weather[ARGS]{"city": "Rom"}'),
        (GEMMA, ("<|tool_call>", "<tool_call|>", '<|"|>'),
         '<|tool_call>call:weather{city:<|"|>Rom<|"|>}<tool_call|>'),
        (PLAIN, (), CALL),
    ),
)  # fmt: skip
@pytest.mark.parametrize(
    ("format", "right", "wrong"),
    (
        ({"response_format": FORMAT}, '{"a": 5}', '{"a": "5"}'),
        ({"guided_regex": "[0-9]+"}, "55", "5 "),
        ({"guided_choice": ["yes", "no"]}, "no", "nope"),
        ({"guided_grammar": 'start: "ja" | "nein"'}, "ja", "nei"),
    ),
    ids=("schema", "regex", "choice", "grammar"),
)
def test_an_answer_has_the_format_or_is_a_call(
    tmp_path, template, names, call, format, right, wrong
):
    tokenizer = make_tokenizer(tmp_path, names, True, template)
    grammar = grammar_of(tokenizer, **format)
    for text in (right, call):
        assert accepts(tokenizer, grammar, text)
    for text in (wrong, "x" + call, "\n" + call, "Let me see."):
        assert not accepts(tokenizer, grammar, text)


def test_calls_of_gpt_oss_stand_outside_of_the_answer(tmp_path):
    names = ("<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|constrain|>", "<|end|>")
    tokenizer = make_tokenizer(tmp_path, names, True, HARMONY)
    grammar = grammar_of(tokenizer, response_format=FORMAT)
    assert accepts(tokenizer, grammar, '{"a": 5}') and not accepts(tokenizer, grammar, CALL)


@pytest.mark.parametrize("choice", ("required", FORCED))
def test_a_forced_call_has_no_answer(tmp_path, choice):
    for template, constrained in ((HERMES, True), (CODER, True), (GEMMA, False)):
        tokenizer = make_tokenizer(tmp_path, (), True, template)
        both = grammar_of(tokenizer, tool_choice=choice, response_format=FORMAT)
        assert both == grammar_of(tokenizer, tool_choice=choice)
        assert (both is not None) == constrained
    none = grammar_of(tokenizer, tool_choice="none", response_format=FORMAT)
    assert (
        none
        == plan_request(
            ChatCompletionBody(messages=QUESTION, response_format=FORMAT), tokenizer, LIMITS
        )
        .generations[0]
        .grammar
    )


def test_the_models_own_answer_has_the_format(directory, tmp_path):
    server = LocalServer(with_template(directory, tmp_path, HERMES), LENGTH)
    try:
        schema = {"type": "object", "properties": {"a": {"enum": [5]}}, "required": ["a"]}
        format = {"type": "json_object", "schema": schema | {"additionalProperties": False}}
        # A model of 9M parameters would begin calls, and never end them.
        pieces = map(server.tokenizer.token_bytes, range(server.tokenizer.vocab_size))
        bias = {str(id): -100 for id, piece in enumerate(pieces) if b"<" in piece}
        options = {"tools": [WEATHER], "response_format": format, "logit_bias": bias}
        (choice,) = server.chat(QUESTION, max_tokens=60, **options).choices
        assert json.loads(choice.message.content) == {"a": 5}
        assert choice.finish_reason == "stop"
    finally:
        server.close()


# Templates without tools --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(shallow_directory, tmp_path_factory, few_threads):
    """A server of scripted answers, whose template knows no tools and refuses equal roles."""
    template = """\
{%- for m in messages %}
{%- if (m.role == "user") != (loop.index0 % 2 == 0) %}{{ raise_exception("roles") }}{% endif %}
[{{ m.role }}]{{ m.content }}
{%- endfor %}[assistant]"""
    with pytest.MonkeyPatch.context() as patch:
        model = with_template(shallow_directory, tmp_path_factory.mktemp("plain"), template)
        server = Server(model, patch)
        yield server
        server.close()


def test_a_template_without_tools_gets_them_as_text(plain):
    plain.answer = lambda prompt: "It rains." if "<tool_response>" in prompt else f"Hm.\n{CALL}"
    choice = plain.chat(tools=[WEATHER]).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Hm."
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Rom"}
    assert '"description": "The weather of a city"' in plain.prompts[-1]
    results = [{"role": "tool", "tool_call_id": call.id, "content": c} for c in ("rain", "wind")]
    history = [*QUESTION, choice.message, *results, {"role": "user", "content": "So?"}]
    found = plain.chat(history, tools=[WEATHER]).choices[0]
    assert (found.finish_reason, found.message.content) == ("stop", "It rains.")
    assert "[assistant]Hm.\n<tool_call>" in plain.prompts[-1]
    sent = "\n\n".join(f"<tool_response>\n{c}\n</tool_response>" for c in ("rain", "wind"))
    assert f"[user]{sent}\n\nSo?[assistant]" in plain.prompts[-1]
    assert plain.chat(history).choices[0].message.content == "It rains."
    assert "You may call functions" not in plain.prompts[-1]


def test_earlier_messages_without_calls_stay_as_they_are():
    messages = [{"role": role, "content": role[0]} for role in ("system", "user", "user")]
    messages.append({"role": "assistant", "content": "a", "reasoning_content": "r"})
    assert messages_with_tools(messages, []) == messages


@pytest.mark.parametrize(
    ("template", "choice"), ((None, "required"), (PLAIN, FORCED)), ids=("none", "plain")
)
def test_a_model_without_tools_calls_one_if_it_must(directory, tmp_path, template, choice):
    """The embedded model, by a grammar."""
    place = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 4}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "weather", "parameters": place}}]
    model = with_template(directory, tmp_path, template) if template else directory
    server = LocalServer(model, LENGTH)
    try:
        found = server.chat(QUESTION, tools=tools, tool_choice=choice, max_tokens=200).choices[0]
        assert found.finish_reason == ("tool_calls" if choice == "required" else "stop")
        (call,) = found.message.tool_calls
        assert call.function.name == "weather"
        jsonschema.validate(json.loads(call.function.arguments), place)
        assert server.chat(QUESTION, tools=tools, max_tokens=5).choices[0].finish_reason
    finally:
        server.close()


def test_the_text_of_a_model_without_a_template(directory):
    tokenizer = load_tokenizer(directory)
    body = ChatCompletionBody(messages=QUESTION, tools=[WEATHER])
    text = tokenizer.decode(plan_request(body, tokenizer, LIMITS).generations[0].prompt_ids)
    assert text.startswith("You may call functions.") and text.endswith("a call.\n\nWeather?\n\n")
    last = {"role": "assistant", "content": "It"}
    for kind in ([], [WEATHER]):
        body = ChatCompletionBody(
            messages=[*QUESTION, last], tools=kind, continue_final_message=True
        )
        ids = plan_request(body, tokenizer, LIMITS).generations[0].prompt_ids
        assert tokenizer.decode(ids).endswith("Weather?\n\nIt" if kind else "Weather?It")
    plain = ChatCompletionBody(messages=QUESTION)
    ids = plan_request(plain, tokenizer, LIMITS).generations[0].prompt_ids
    assert tokenizer.decode(ids) == "Weather?"


def test_calls_and_text_of_the_generic_form(plain):
    plain.answer = call_then_answer
    chunks = list(plain.chat(tools=[WEATHER], stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "Let me see."
    assert chunks[-1].choices[0].finish_reason == "tool_calls"

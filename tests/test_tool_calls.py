"""Tools and the Responses API through the server, with templates in the layouts of the families.

The answers are scripted: the decoder's tokens are replaced by those of a given text. The templates
are the tests' own; they follow the documented layouts of the published ones.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
from conftest import any_json
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from local_server import LocalServer, httpx, openai
from test_reasoning import make_tokenizer

from runtime.text import TextSettings, TextStream
from server.answers import AnswerReader, join_pieces
from server.constraints import grammar_tokens
from server.errors import APIError
from server.plan import GenerationRequest, Limits, plan_request, read_request
from server.response_store import ItemStore
from server.responses import ResponsesBody, read_responses_request
from server.schema import ChatCompletionBody
from server.tokenizing import chat_ids
from tokenizer import load_tokenizer
from tool_calls.parser import MARK

pytestmark = pytest.mark.usefixtures("few_threads")
LENGTH = 2048
LIMITS = Limits(LENGTH, 1 << 20)
# Hermes's layout, as Qwen3 has it. It refuses a second system message.
HERMES = """\
{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>
Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>\n{% endif %}
{%- for m in messages %}
{%- if m.role == "system" and not loop.first %}{{ raise_exception("system") }}{% endif %}
[{{ m.role }}]{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
{%- raw %}</tool_call>{% endraw %}
{%- endfor %}
{% endfor %}[assistant]"""
CODER = """\
{%- for tool in tools or [] %}<function>{{ tool.function.name }}</function>{% endfor %}
{%- for m in messages %}[{{ m.role }}]{{ m.content }}
{%- for call in m.tool_calls or [] %}<function={{ call.function.name }}>
{%- for key, value in call.function.arguments | items %}<parameter={{ key }}>{{ value }}</parameter>
{%- endfor %}</function>{% endfor %}{% endfor %}[assistant]"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rom"}}</tool_call>'
QUESTION = [{"role": "user", "content": "Weather?"}]


class Server(LocalServer):
    """A server whose answers are scripted: `answer` maps a prompt to a text."""

    def __init__(self, directory: Path, monkeypatch, **settings):
        self.answer: Callable[[str], str] = lambda prompt: "Yes."
        self.prompts: list[str] = []
        super().__init__(directory, LENGTH, max_body=1_000_000, **settings)
        self.script(monkeypatch)

    def script(self, monkeypatch) -> None:
        """Replace the tokens of every answer."""
        server, start, push = self, TextStream.__init__, TextStream.push
        end = self.tokenizer.stop_ids[0]

        def init(stream, ids, tokenizer, settings):
            start(stream, ids, tokenizer, settings)
            if tokenizer is not server.tokenizer:
                return
            prompt = tokenizer.decode(ids)
            server.prompts.append(prompt)
            text = server.answer(prompt)
            stream.ids_of_script = iter(tokenizer.encode(text, bos=False))

        def scripted(stream, token):
            is_ours = hasattr(stream, "ids_of_script")
            push(stream, next(stream.ids_of_script, end) if is_ours else token)

        monkeypatch.setattr(TextStream, "__init__", init)
        monkeypatch.setattr(TextStream, "push", scripted)

    def chat(self, messages=QUESTION, **options):
        return super().chat(messages, **options)


def with_template(directory: Path, folder: Path, template: str) -> Path:
    model = Path(shutil.copytree(directory, folder / "model"))
    (model / "chat_template.jinja").write_text(template)
    return model


@pytest.fixture(scope="module")
def server(shallow_directory, tmp_path_factory, few_threads):
    with pytest.MonkeyPatch.context() as patch:
        model = with_template(shallow_directory, tmp_path_factory.mktemp("hermes"), HERMES)
        server = Server(model, patch, cors_origin="https://page.example")
        yield server
        server.close()


def call_then_answer(prompt: str) -> str:
    return "It rains." if "[tool]rain" in prompt else f"Let me see.\n{CALL}"


# Chats --------------------------------------------------------------------------------------------


def test_a_call_and_its_result(server):
    server.answer = call_then_answer
    choice = server.chat(tools=[WEATHER]).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments) == {
        "city": "Rom"
    }
    assert '"description": "The weather of a city"' in server.prompts[-1]
    history = [
        *QUESTION,
        choice.message,
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    found = server.chat(history, tools=[WEATHER]).choices[0]
    assert (found.finish_reason, found.message.content) == ("stop", "It rains.")
    assert found.message.tool_calls is None
    assert CALL in server.prompts[-1]  # the arguments are an object again
    null = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
    assert server.chat([*QUESTION, null, history[-1]]).choices[0].message.content == "It rains."


def test_a_stream_has_the_call_as_deltas(server):
    server.answer = lambda prompt: f"Let me see.\n{CALL}\n{CALL}"
    chunks = list(server.chat(tools=[WEATHER], stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert "".join(delta.content or "" for delta in deltas) == "Let me see."
    pieces = [call for delta in deltas for call in delta.tool_calls or []]
    for index in (0, 1):
        first, *rest = [piece for piece in pieces if piece.index == index]
        assert first.id and first.type == "function" and first.function.name == "weather"
        assert all(piece.id is None and piece.function.name is None for piece in rest)
        arguments = first.function.arguments + "".join(p.function.arguments for p in rest)
        assert json.loads(arguments) == {"city": "Rom"} and len(rest) > 1
    assert chunks[-2].choices[0].finish_reason == "tool_calls" and chunks[-1].usage
    with server.client.chat.completions.stream(
        model="any", messages=QUESTION, tools=[WEATHER]
    ) as stream:
        message = stream.get_final_completion().choices[0].message
    assert len(message.tool_calls) == 2


def test_one_call_only(server):
    server.answer = lambda prompt: f"{CALL}\n{CALL}"
    choice = server.chat(tools=[WEATHER], parallel_tool_calls=False).choices[0]
    assert len(choice.message.tool_calls) == 1 and choice.finish_reason == "tool_calls"
    assert choice.message.content is None


@pytest.mark.parametrize(
    ("choice", "prefix"),
    (
        ("required", '<tool_call>\n{"name": "'),
        (
            {"type": "function", "function": {"name": "weather"}},
            '<tool_call>\n{"name": "weather", "arguments":',
        ),
    ),
)
@pytest.mark.parametrize("stream", (False, True))
def test_a_call_is_forced_by_the_prompt(server, choice, prefix, stream):
    server.answer = lambda prompt: CALL.partition(prefix.replace("\n", ""))[2]
    found = server.chat(tools=[WEATHER], tool_choice=choice, stream=stream)
    if stream:
        deltas = [chunk.choices[0].delta for chunk in found]
        pieces = [call for delta in deltas for call in delta.tool_calls or []]
        assert pieces[0].function.name == "weather"
        arguments = "".join(piece.function.arguments for piece in pieces)
    else:
        (call,) = found.choices[0].message.tool_calls
        reason = "tool_calls" if choice == "required" else "stop"  # as OpenAI's API has it
        assert call.function.name == "weather" and found.choices[0].finish_reason == reason
        arguments = call.function.arguments
    assert json.loads(arguments) == {"city": "Rom"}
    assert server.prompts[-1].endswith(prefix)


def test_tool_choice_none_leaves_the_text(server):
    server.answer = lambda prompt: CALL
    choice = server.chat(tools=[WEATHER], tool_choice="none").choices[0]
    assert choice.message.content == CALL and choice.finish_reason == "stop"
    assert "<tools>" not in server.prompts[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    (
        ({"tools": [{"type": "web_search"}]}, "tools must be a list"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools must be a list"),
        ({"tools": [WEATHER], "tool_choice": "always"}, "tool_choice must be"),
        ({"tool_choice": "required"}, "needs tools"),
        (
            {
                "tools": [WEATHER],
                "tool_choice": {"type": "function", "function": {"name": "news"}},
            },
            "'news', which is no tool",
        ),
    ),
)
def test_wrong_tools_are_refused(server, options, message):
    body = {"messages": QUESTION, **options}
    error = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert error.status_code == 400 and message in error.json()["error"]["message"]


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("part", "message"),
    (
        (IMAGE, "images are not supported"),
        ({"type": "image", "text": "x"}, "images are not supported"),
        ({"type": "input_image", "image_url": "x"}, "images are not supported"),
        ({"type": "file", "file": {"file_id": "x"}}, "files are not supported"),
        ({"type": "input_file", "file_id": "x"}, "files are not supported"),
        ({"type": "input_audio", "input_audio": {}}, "sounds are not supported"),
        ({"type": "video_url", "video_url": {}}, "videos are not supported"),
        ({"type": "text"}, "must be a list"),
        ({"type": "text", "text": 5}, "must be a list"),
        (None, "must be a list"),
    ),
)
def test_parts_that_are_not_text_are_named(tokenizer, part, message):
    content = [{"type": "text", "text": "What is this?"}, part]
    messages = [{"role": "user", "content": content}]
    with pytest.raises(APIError, match=message) as caught:
        read_request(json.dumps({"messages": messages}).encode(), True, tokenizer, LIMITS)
    assert caught.value.param == "messages" and "\n" not in str(caught.value)
    body = json.dumps({"input": messages}).encode()
    message = message.replace("must be a list", "input must be a string")
    with pytest.raises(APIError, match=message) as caught:
        read_responses_request(body, tokenizer, LIMITS, ItemStore())
    assert caught.value.param == "input"


@pytest.mark.parametrize("api", ("chat", "responses"))
def test_parts_of_a_message_are_lines_of_their_own(tokenizer, api):
    """Agents send results of tools, and reminders, as parts that end without a new line."""
    kind = "text" if api == "chat" else "input_text"
    content = [{"type": kind, "text": text} for text in ("Result:", "", "a b", "c")]
    messages = [{"role": "user", "content": content}]
    if api == "chat":
        read = read_request(json.dumps({"messages": messages}).encode(), True, tokenizer, LIMITS)
    else:
        body = json.dumps({"input": messages}).encode()
        _, read = read_responses_request(body, tokenizer, LIMITS, ItemStore())
    (generation,) = read.generations
    assert "Result:\na b\nc" in tokenizer.decode(generation.prompt_ids)


def test_a_refusal_of_the_history_is_text(server):
    server.answer = lambda prompt: "Yes."
    part = {"type": "refusal", "refusal": "I cannot."}
    server.chat([*QUESTION, {"role": "assistant", "content": [part]}, *QUESTION])
    assert "[assistant]I cannot." in server.prompts[-1]
    server.chat([*QUESTION, {"role": "assistant", "content": None, "refusal": "No."}, *QUESTION])
    assert "[assistant]No." in server.prompts[-1]


def test_one_unsupported_tool_refuses_no_request_unless_strict_and_forced(directory, tmp_path):
    tokenizer = load_tokenizer(with_template(directory, tmp_path, HERMES))
    grammars = grammar_tokens(tokenizer, tokenizer.vocab_size)
    limits = Limits(LENGTH, tokenizer.vocab_size, grammars.matcher)
    email = {"type": "string", "pattern": "^(?!\\.)[a-z.]+@[a-z.]+$"}
    parameters = {"type": "object", "properties": {"to": email}}
    function = {"name": "mail", "parameters": parameters, "strict": True}
    tools = [WEATHER, {"type": "function", "function": function}]
    named = {"type": "function", "function": {"name": "mail"}}

    def read(tools, choice):
        body = {"messages": QUESTION, "tools": tools, "tool_choice": choice}
        return read_request(json.dumps(body).encode(), True, tokenizer, limits)

    for choice in ("auto", "required"):
        assert "strict" not in tokenizer.decode(read(tools, choice).generations[0].prompt_ids)
    relaxed = {"type": "function", "function": function | {"strict": False}}
    assert read([relaxed], named).generations[0].grammar
    with pytest.raises(APIError, match="look-ahead") as caught:
        read(tools, named)
    assert caught.value.param == "tools[1].function.parameters" in str(caught.value)
    assert "start:" not in str(caught.value) and "\n" not in str(caught.value)


def test_an_answer_that_ended_by_itself_has_whole_arguments(directory, tmp_path):
    tokenizer = load_tokenizer(with_template(directory, tmp_path, CODER))
    body = ChatCompletionBody(messages=QUESTION, tools=[WEATHER])
    request = plan_request(body, tokenizer, LIMITS)
    answer = "<function=weather><parameter=city>Rom"
    for reason, expected in (("stop", '{"city": "Rom"}'), ("length", "")):
        reader = AnswerReader(request, tokenizer)
        _, _, calls = join_pieces(reader.whole({"text": answer, "finish_reason": reason}))
        assert [call["function"]["arguments"] for call in calls] == [expected]


def test_a_second_system_message_is_merged(server):
    server.answer = lambda prompt: "Yes."
    messages = [
        {"role": "developer", "content": "Be kind."},
        *QUESTION,
        {"role": "system", "content": "Be short."},
    ]
    assert server.chat(messages).choices[0].message.content == "Yes."
    assert "[user]Be kind.\n\nBe short.\n\nWeather?" in server.prompts[-1]
    assert "[system]" not in server.prompts[-1]


# As the templates of Mixtral and Gemma 2.
ALTERNATING = (
    "{% for m in messages %}"
    "{% if m.role == 'system' or (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ m.role[0] }}:{{ m.content }};{% endfor %}"
)


@pytest.mark.parametrize(
    ("turns", "prompt"),
    (
        ("s:S u:A", "u:S||A;"),
        ("s:S", "u:S;"),
        ("s: u:A", "u:A;"),
        ("u:A u:B", "u:A||B;"),
        ("s:S u:A u:B a:C a:D u:E", "u:S||A||B;a:C||D;u:E;"),
        ("u:A a:B u:C", "u:A;a:B;u:C;"),
    ),
)
def test_roles_alternate_where_the_template_asks_for_it(directory, tmp_path, turns, prompt):
    tokenizer = load_tokenizer(with_template(directory, tmp_path / "a", ALTERNATING))
    roles = {"s": "system", "u": "user", "a": "assistant"}
    pairs = [turn.split(":") for turn in turns.split()]
    messages = [{"role": roles[role], "content": text} for role, text in pairs]
    found = tokenizer.decode(chat_ids(tokenizer, messages, {}))
    assert found == prompt.replace("||", "\n\n")
    plain = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    tokenizer = load_tokenizer(with_template(directory, tmp_path / "b", plain))
    expected = "".join(f"{role}:{text};" for role, text in pairs)
    assert tokenizer.decode(chat_ids(tokenizer, messages, {})) == expected


def test_turns_that_cannot_alternate_are_refused(directory, tmp_path):
    tokenizer = load_tokenizer(with_template(directory, tmp_path, ALTERNATING))
    for first in ("assistant", "tool"):
        messages = [{"role": first, "content": "x"}, {"role": "user", "content": "y"}]
        with pytest.raises(ValueError, match="roles must alternate"):
            chat_ids(tokenizer, messages, {})


def test_a_template_error_without_a_system_message_is_shown(server):
    class Refusing:
        def chat(self, messages, **variables):
            raise ValueError("chat template: no")

    with pytest.raises(ValueError, match="no"):
        chat_ids(Refusing(), [{"role": "user", "content": "x"}], {})


def test_an_open_block_is_closed_before_a_forced_call(directory, tmp_path):
    template = HERMES + "<think>{# </think> #}"
    tokenizer = load_tokenizer(with_template(directory, tmp_path, template))
    body = ChatCompletionBody(messages=QUESTION, tools=[WEATHER], tool_choice="required")
    generation = plan_request(body, tokenizer, LIMITS).generations[0]
    end = '[assistant]<think>\n</think>\n\n<tool_call>\n{"name": "'
    assert tokenizer.decode(generation.prompt_ids).replace("  ", " ").endswith(end)


@pytest.fixture(scope="module")
def unscripted(directory, tmp_path_factory, few_threads):
    """A server of the embedded model's own answers."""
    model = with_template(directory, tmp_path_factory.mktemp("unscripted"), HERMES)
    server = LocalServer(model, LENGTH)
    yield server
    server.close()


@pytest.mark.parametrize("choice", ("required", "weather"))
def test_forced_calls_have_arguments_of_their_schema(unscripted, choice):
    place = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 4}, "days": {"enum": [1, 3]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "weather", "parameters": place}}]
    if choice != "required":
        tools.append({"type": "function", "function": {"name": "other"}})
        choice = {"type": "function", "function": {"name": choice}}
    options = {"tools": tools, "tool_choice": choice, "seed": 1, "max_tokens": 300}
    (found,) = unscripted.chat(QUESTION, **options).choices
    assert found.finish_reason == ("tool_calls" if choice == "required" else "stop")
    (call,) = found.message.tool_calls
    assert call.function.name == "weather"
    jsonschema.validate(json.loads(call.function.arguments), place)


def test_templates_get_arguments_as_objects(directory, tmp_path):
    tokenizer = load_tokenizer(with_template(directory, tmp_path, CODER))
    call = {"id": "1", "function": {"name": "weather", "arguments": '{"city": "Rom"}'}}
    messages = [*QUESTION, {"role": "assistant", "tool_calls": [call]}]
    body = ChatCompletionBody(messages=messages, tools=[WEATHER])
    request = plan_request(body, tokenizer, LIMITS)
    text = tokenizer.decode(request.generations[0].prompt_ids)
    assert "<function=weather><parameter=city>Rom</parameter></function>" in text
    assert request.calls.format.__name__ == "QwenCoderParser"


def test_markers_that_are_control_tokens_reach_the_parser(tmp_path):
    """gpt-oss: the header of a message is known by control tokens, which have no text."""
    names = ("<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|constrain|>")
    messages = "{% for m in messages %}{{ m.content }}{% endfor %}"
    template = f"{messages}<|start|>assistant{{# <|channel|> #}}"
    tokenizer = make_tokenizer(tmp_path, names, True, template)
    body = ChatCompletionBody(messages=QUESTION, tools=[WEATHER])
    request = plan_request(body, tokenizer, LIMITS)
    generation = request.generations[0]
    expected = {MARK + name for name in (*names, "<|return|>", "<|end|>")}
    assert set(generation.markers.values()) == expected
    assert not generation.split_reasoning
    shown: list[str] = []
    settings = TextSettings(
        (), False, True, shown.append, lambda *_: None, None, generation.markers
    )
    stream = TextStream(generation.prompt_ids, tokenizer, settings)
    answer = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.weather <|constrain|>json<|message|>{"city": "Rom"}<|return|>'
    )
    for id in tokenizer.encode(answer, special=True):
        stream.push(id)
    assert stream.finish_reason == "stop" and "".join(shown) == stream.text
    reader = AnswerReader(GenerationRequest(body, generation, request.calls), tokenizer)
    text, reasoning, calls = join_pieces(reader.whole({"text": stream.text}))
    assert (text, reasoning) == ("", "Hm.") and reader.finish_reason("stop") == "tool_calls"
    assert calls[0]["function"] == {"name": "weather", "arguments": '{"city": "Rom"}'}


SHOW = """\
{#- tools #}{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}|{{ m.content }}
{%- endfor %}"""


@pytest.mark.parametrize(
    ("fields", "want"),
    (
        ({"reasoning_content": "I need f."}, "I need f."),
        ({"reasoning": "I need f."}, "I need f."),
        ({"reasoning": "I need f.", "reasoning_content": None}, "I need f."),
        ({"reasoning": "I need f.", "reasoning_content": ""}, "I need f."),
        ({"reasoning": [{"type": "text", "text": "I need "}, "f."]}, "I need f."),
        ({"reasoning": {"text": 5}, "reasoning_details": [{}]}, ""),
        ({"reasoning_content": 7, "reasoning": [[]]}, ""),
    ),
)
def test_reasoning_of_earlier_turns_goes_to_the_template(tmp_path, fields, want):
    tokenizer = make_tokenizer(tmp_path, template=SHOW)
    function = {"name": "weather", "arguments": "{}"}
    messages = [
        {**QUESTION[0], **fields},
        {"role": "assistant", "content": "", "tool_calls": [{"function": function}], **fields},
        {"role": "tool", "content": "rain"},
    ]
    request = plan_request(ChatCompletionBody(messages=messages), tokenizer, LIMITS)
    text = tokenizer.decode(request.generations[0].prompt_ids)
    assert text == f"<user>|Weather?<assistant>{want}|<tool>|rain"


# Responses ----------------------------------------------------------------------------------------

FLAT_WEATHER = {"type": "function", **WEATHER["function"], "strict": False}


def test_a_response_has_text(server):
    server.answer = lambda prompt: "Yes."
    found = server.client.responses.create(
        model="any", input="Weather?", instructions="Be short.", store=False, max_output_tokens=50
    )
    assert (found.status, found.output_text, found.output[0].type) == (
        "completed",
        "Yes.",
        "message",
    )
    assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
    assert "[system]Be short." in server.prompts[-1] and "[user]Weather?" in server.prompts[-1]
    cut = server.client.responses.create(model="any", input="Weather?", max_output_tokens=1)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"


def test_a_response_calls_a_tool_and_gets_its_output(server):
    server.answer = call_then_answer
    first = server.client.responses.create(model="any", input="Weather?", tools=[FLAT_WEATHER])
    message, call = first.output
    assert message.content[0].text == "Let me see." and call.type == "function_call"
    assert call.name == "weather" and json.loads(call.arguments) == {"city": "Rom"}
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": []}
    history = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        reasoning,
        *(item.model_dump() for item in first.output),
        output,
    ]
    second = server.client.responses.create(model="any", input=history, tools=[FLAT_WEATHER])
    assert second.output_text == "It rains."
    assert f"[assistant]Let me see.{CALL}" in server.prompts[-1]


def test_items_may_stand_by_their_ids(server):
    server.answer = call_then_answer
    options = {"model": "any", "tools": [FLAT_WEATHER]}
    first = server.client.responses.create(input="Weather?", **options)
    output = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "rain"}
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    history = [{"role": "user", "content": "Weather?"}, *references, output]
    assert server.client.responses.create(input=history, **options).output_text == "It rains."
    assert f"[assistant]Let me see.{CALL}" in server.prompts[-1]
    unkept = server.client.responses.create(input="Weather?", store=False, **options)
    reference = {"type": "item_reference", "id": unkept.output[0].id}
    with pytest.raises(openai.BadRequestError, match="is not stored here"):
        server.client.responses.create(input=[reference], **options)
    small = ItemStore(100)
    small.add([{"id": str(n), "text": "x" * 20} for n in range(5)])
    assert [small.find(str(n))["id"] for n in (3, 4)] == ["3", "4"] and small.bytes <= 100
    with pytest.raises(APIError):
        small.find("0")


def thought(text: str) -> dict:
    return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}


FIRST = {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "1", "output": "rain"}
SAID = {"role": "assistant", "content": "Let me see."}
SUMMARY = {"type": "reasoning", "content": None, "summary": [{"type": "summary_text", "text": "c"}]}


@pytest.mark.parametrize(
    ("items", "want"),
    (
        ([thought("a"), FIRST, OUTPUT], "<assistant>a|<tool>|rain"),
        ([thought("a"), SAID, FIRST, OUTPUT], "<assistant>a|Let me see.<tool>|rain"),
        ([SAID, thought("a"), FIRST, OUTPUT], "<assistant>a|Let me see.<tool>|rain"),
        ([thought("a"), FIRST, thought("b"), FIRST], "<assistant>a\n\nb|"),
        ([thought("a"), FIRST, OUTPUT, thought("b"), SAID],
         "<assistant>a|<tool>|rain<assistant>b|Let me see."),
        ([thought("a"), thought("b"), SAID], "<assistant>a\n\nb|Let me see."),
        ([SUMMARY, FIRST], "<assistant>c|"),
        ([thought("a"), OUTPUT, SAID], "<tool>|rain<assistant>|Let me see."),
        ([thought(""), {"type": "reasoning", "content": [5, {"text": []}]}, SAID, thought("a")],
         "<assistant>|Let me see."),
    ),
)  # fmt: skip
def test_reasoning_items_go_to_the_template(tmp_path, items, want):
    tokenizer = make_tokenizer(tmp_path, template=SHOW)
    body = json.dumps({"input": [*QUESTION, *items]}).encode()
    _, request = read_responses_request(body, tokenizer, LIMITS, ItemStore())
    text = tokenizer.decode(request.generations[0].prompt_ids)
    assert text == "<user>|Weather?" + want


def test_a_streamed_response_adds_up(server):
    server.answer = call_then_answer
    events = list(
        server.client.responses.create(
            model="any", input="Weather?", tools=[FLAT_WEATHER], stream=True
        )
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-3:] == [
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    parts = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert text == "Let me see." and json.loads("".join(parts)) == {"city": "Rom"}
    final = events[-1].response
    assert final.output_text == text and final.output[1].arguments == "".join(parts)
    with server.client.responses.stream(
        model="any", input="Weather?", tools=[FLAT_WEATHER]
    ) as stream:
        assert stream.get_final_response().output_text == text


@pytest.mark.parametrize(
    ("options", "message"),
    (
        ({"input": 5}, "input must be a string"),
        ({"input": []}, "input must be a string"),
        ({"input": [{"role": "user"}]}, "input must be a string"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "send it whole"),
        ({"previous_response_id": "x"}, "the response 'x' is not stored here"),
        ({"previous_response_id": 5}, "previous_response_id"),
        ({"conversation": "x"}, "conversation is not supported"),
        ({"tools": [{}]}, "each needs a type"),
        ({"tool_choice": {"type": "allowed_tools"}}, "allowed_tools needs tools"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice must be"),
        ({"input": "x " * 5000}, "maximum context length is 2048 tokens"),
        ({"text": {"format": {"type": "xml"}}}, "response_format must be"),
        ({"temperature": 3}, "temperature 3"),
    ),
)
def test_a_wrong_response_is_refused(server, options, message):
    found = httpx.post(f"{server.url}/v1/responses", json={"input": "x", **options})
    assert found.status_code == 400 and message in found.json()["error"]["message"]


JUNK = any_json("type", "role", "content", "call_id", "name", "arguments", "output", "function")
KINDS = st.sampled_from(("message", "function_call", "function_call_output", "reasoning"))
NAMES = st.sampled_from(("role", "content", "call_id", "name", "arguments", "output"))
ITEM = st.builds(lambda kind, junk: {"type": kind, **junk}, KINDS, st.dictionaries(NAMES, JUNK))


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.dictionaries(st.sampled_from(sorted(ResponsesBody.model_fields)), JUNK, max_size=3),
    st.lists(ITEM, max_size=3) | JUNK,
)
def test_every_response_body_becomes_a_request_or_an_api_error(tokenizer, fields, items):
    body = json.dumps({**fields, "input": items}).encode()
    try:
        _, request = read_responses_request(body, tokenizer, LIMITS, ItemStore())
    except APIError as error:
        json.dumps(error.body())
        assert "\n" not in str(error)
    else:
        assert request.generations[0].prompt_ids


# Other routes -------------------------------------------------------------------------------------


def test_one_model(server):
    assert server.client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        server.client.models.retrieve("a/b")
    assert caught.value.code == "model_not_found"


def test_head_has_no_body(server):
    for path in ("/", "/health", "/v1/models", "/v1/models/tiny", "/metrics"):
        found = httpx.head(server.url + path)
        assert found.status_code == 200 and not found.content


def test_tokenize_and_back(server):
    post = lambda path, **body: httpx.post(server.url + path, json=body)  # noqa: E731
    found = post("/tokenize", prompt="def é").json()
    assert found["tokens"] == server.tokenizer.encode("def é")
    assert found["count"] == len(found["tokens"]) and found["max_model_len"] == LENGTH
    for special in (True, False):
        tokens = post("/tokenize", prompt="a</s>", parse_special=special).json()["tokens"]
        assert tokens == server.tokenizer.encode("a</s>", special=special)
    assert post("/detokenize", tokens=found["tokens"]).json() == {"prompt": "def é"}
    chat = post("/tokenize", messages=QUESTION).json()["tokens"]
    assert "[user]Weather?" in server.tokenizer.decode(chat)
    assert post("/tokenize").status_code == 400
    assert post("/tokenize", messages=[{}]).status_code == 400
    assert post("/detokenize", tokens=["a"]).status_code == 400


def test_streams_are_not_stored_and_other_origins_are_named(server):
    body = {"messages": QUESTION, "stream": True}
    headers = {"Origin": "https://page.example"}
    found = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers)
    assert found.headers["cache-control"] == "no-cache"
    assert found.headers["x-accel-buffering"] == "no"
    assert found.headers["access-control-allow-origin"] == "https://page.example"
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-api"}
    preflight = httpx.options(f"{server.url}/v1/responses", headers=headers | ask)
    assert preflight.status_code == 200
    other = httpx.get(f"{server.url}/v1/models", headers={"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers

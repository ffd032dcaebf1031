"""The chat formats of the newer families: prompts, stop ids, reasoning and calls, one row a format.

The templates are the tests' own. They write calls as the published ones do; docs/server.md lists
which of these were run, and which were not found.
"""

import json
from typing import NamedTuple

import pytest
from test_reasoning import make_tokenizer
from test_tools_beside_schemas import accepts

from runtime.text import TextSettings, TextStream
from server.answers import AnswerReader, join_pieces
from server.plan import GenerationRequest, Limits, plan_request
from server.schema import ChatCompletionBody
from tokenizer import Tokenizer, load_tokenizer
from tool_calls.formats import KimiParser
from tool_calls.parser import MARK
from tool_calls.reading import CallReader

THINK = "<think>", "</think>"
IM = "<|im_start|>", "<|im_end|>"
HERMES_CALL = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom", "days": 3}}\n</tool_call>'
)
CODER_CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nRom\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
GLM_CALL = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rom</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
MINIMAX_CALL = (
    '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Rom</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>'
)
GLM_LINE_CALL = (
    "<tool_call>weather<arg_key>city</arg_key><arg_value>Rom</arg_value>"
    "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
)
GRANITE_CALL = '<|tool_call|>[{"name": "weather", "arguments": {"city": "Rom", "days": 3}}]'
MIXTRAL_CALL = '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rom", "days": 3}}]'
LFM_CALL = "<|tool_call_start|>[weather(city='Rom', days=3)]<|tool_call_end|>"
KIMI_CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    '<|tool_call_argument_begin|>{"city": "Rom", "days": 3}'
    "<|tool_call_end|><|tool_calls_section_end|>"
)
# How templates write an earlier call c of a message.
HERMES = """<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>"""
CODER = """<tool_call>
<function={{ c.function.name }}>
{% for key, value in c.function.arguments | items %}
<parameter={{ key }}>
{{ value }}
</parameter>
{% endfor %}
</function>
</tool_call>"""
GLM = """<tool_call>{{ c.function.name }}
{% for key, value in c.function.arguments | items %}
<arg_key>{{ key }}</arg_key>
<arg_value>{{ value }}</arg_value>
{% endfor %}
</tool_call>"""
GLM_LINE = """<tool_call>{{ c.function.name }}
{%- for key, value in c.function.arguments | items %}
{#- #}<arg_key>{{ key }}</arg_key><arg_value>{{ value }}</arg_value>
{%- endfor %}</tool_call>"""
MIXTRAL = """[TOOL_CALLS] [{"name": "{{ c.function.name }}", "arguments": {#- #}
{{- " " }}{{ c.function.arguments | tojson }}}]"""
MINIMAX = """<minimax:tool_call>
<invoke name="{{ c.function.name }}">
{% for key, value in c.function.arguments | items %}
<parameter name="{{ key }}">{{ value }}</parameter>
{% endfor %}
</invoke>
</minimax:tool_call>"""
LFM = """<|tool_call_start|>[{{ c.function.name }}(
{%- for key, value in c.function.arguments | items %}
{{ key }}={{ "'" ~ value ~ "'" if value is string else value }}{{ ", " if not loop.last }}
{%- endfor %})]<|tool_call_end|>"""

KIMI = """<|tool_calls_section_begin|><|tool_call_begin|>{{ c.id }}
{#- #}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}
{#- #}<|tool_call_end|><|tool_calls_section_end|>"""


class Chat(NamedTuple):
    """A family's chat format.

    role: the beginning of a message. end: the token that ends an answer. ends: ids of
    generation_config.json beside it. markers: further tokens. opened: the end of a prompt.
    call: an earlier call in its template's words; "": the template leaves calls out; None: it knows
    no tools. calls: the same, as the model writes it. tools: the text before the tools.
    """

    role: str
    end: str
    markers: tuple[str, ...]
    call: str | None
    calls: str
    opened: str = ""
    ends: tuple[str, ...] = ()
    reasons: bool = True
    tools: str = ""


CHATML = "<|im_start|>{}\n"
CHATS = {
    "nemotron_h": Chat(CHATML, IM[1], IM + THINK, CODER, CODER_CALL, "<think>\n", ("</s>",)),
    "laguna": Chat("<{}>\n", "</assistant>", THINK, GLM, GLM_CALL, "<think>", ("<eos>",)),
    "lfm2_moe": Chat(CHATML, IM[1], IM + THINK, LFM, LFM_CALL),
    "lfm2_moe, before 2.5": Chat(
        CHATML,
        IM[1],
        (*IM, "<|tool_list_start|>", "<|tool_call_start|>", "<|tool_call_end|>"),
        "",
        LFM_CALL,
        reasons=False,
        tools="<|tool_list_start|>",
    ),
    "granitemoe": Chat(
        "<|start_of_role|>{}<|end_of_role|>",
        "<|end_of_text|>",
        ("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"),
        "",
        GRANITE_CALL,
        reasons=False,
        tools="Answer <|tool_call|> and a list of calls.",
    ),
    "glm4_moe_lite": Chat(
        "<|{}|>", "<|user|>", ("<|assistant|>", *THINK), GLM_LINE, GLM_LINE_CALL, "<think>"
    ),
    "laguna, S": Chat("<{}>\n", "</assistant>", THINK, GLM_LINE, GLM_LINE_CALL, "<think>"),
    "mixtral": Chat("[{}]", "</s>", ("[TOOL_CALLS]",), MIXTRAL, MIXTRAL_CALL, reasons=False),
    "qwen4_exp": Chat(
        CHATML, IM[1], IM + THINK, CODER, CODER_CALL, "<think>\n", ("<|endoftext|>",)
    ),
    "mellum": Chat(CHATML, IM[1], IM + THINK, HERMES, HERMES_CALL),
    "granitemoehybrid": Chat(
        "<|start_of_role|>{}<|end_of_role|>",
        "<|end_of_text|>",
        ("<|start_of_role|>", "<|end_of_role|>"),
        HERMES,
        HERMES_CALL,
        reasons=False,
    ),
    "minimax_m2": Chat("]~b]{}\n", "[e~[", ("]~b]", *THINK), MINIMAX, MINIMAX_CALL, "<think>\n"),
    "ernie4_5_moe": Chat(
        CHATML,
        IM[1],
        (*IM, *THINK, "<response>", "</response>"),
        HERMES,
        HERMES_CALL,
        "<think>\n",
        ("</s>",),
    ),
    "afmoe": Chat(CHATML, IM[1], IM + THINK, HERMES, HERMES_CALL, "<think>\n"),
    "kimi_linear": Chat(
        "<|im_assistant|>{}<|im_middle|>",
        "<|im_end|>",
        ("<|im_assistant|>", "<|im_middle|>", *KimiParser.tokens),
        KIMI,
        KIMI_CALL,
        ends=("[EOS]",),
        reasons=False,
    ),
    # Their templates were not seen: tools are described in the system text.
    "flint": Chat(CHATML, IM[1], IM + THINK, None, HERMES_CALL),
    "kolibri1": Chat(CHATML, IM[1], IM + THINK, None, HERMES_CALL),
}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
ARGUMENTS = {"city": "Rom", "days": 3}
USER = {"role": "user", "content": "Weather?"}


def template(chat: Chat) -> str:
    """Return a chat template with the markers of a family."""
    begin, _, after = chat.role.partition("{}")
    calls = f"{{% for c in m.tool_calls or [] %}}{chat.call}{{% endfor %}}" if chat.call else ""
    knows_tools = chat.call is not None
    tools = f"{{% if tools %}}{chat.tools}{{{{ tools | tojson }}}}{{% endif %}}" * knows_tools
    closing = "{# </think> #}" if chat.reasons else ""
    return (
        f"{closing}{tools}{{% for m in messages %}}{begin}{{{{ m.role }}}}{after}"
        f"{{{{ m.content or '' }}}}{calls}{chat.end}\n{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{begin}assistant{after}{chat.opened}{{% endif %}}"
    )


@pytest.fixture(params=CHATS)
def chat(request) -> Chat:
    return CHATS[request.param]


@pytest.fixture(params=(False, True), ids=("added", "special"))
def tokenizer(request, chat, tmp_path) -> Tokenizer:
    """A tokenizer with a family's markers, as added or as special tokens."""
    tags = ("<|tool_call_start|>", "<|tool_call_end|>") if chat.call == LFM else ()
    names = dict.fromkeys((*chat.markers, *tags, *chat.ends, chat.end))
    make_tokenizer(tmp_path, names, request.param, template(chat))
    found = load_tokenizer(tmp_path)
    ends = [found.token_id(name) for name in (*chat.ends, chat.end)]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return load_tokenizer(tmp_path)


def plan(tokenizer: Tokenizer, *messages: dict, **fields) -> GenerationRequest:
    body = ChatCompletionBody(messages=[USER, *messages], tools=TOOLS, **fields)
    return plan_request(body, tokenizer, Limits(4096, 1 << 20))


def prompt_of(tokenizer: Tokenizer, request: GenerationRequest) -> str:
    """Return a prompt with its control tokens."""
    ids = request.generations[0].prompt_ids
    names = {tokenizer.token_id(name): name for name in tokenizer._vocabulary.control}
    return "".join(names.get(id) or tokenizer.decode([id]) for id in ids)


def read(tokenizer: Tokenizer, request: GenerationRequest, answer: str):
    """Return text, reasoning, calls and the finish reason of a streamed answer."""
    generation, pieces = request.generations[0], []
    reader = AnswerReader(request, tokenizer)
    stream = TextStream(
        generation.prompt_ids,
        tokenizer,
        TextSettings(
            (),
            False,
            True,
            lambda text: pieces.extend(reader.read(text)),
            lambda *_: None,
            lambda text: pieces.extend(reader.read(text, is_reasoning=True)),
            generation.markers,
        ),
    )
    for id in tokenizer.encode(answer, bos=False, special=True):
        if stream.finish_reason:
            break
        stream.push(id)
    if not stream.finish_reason:
        stream.end("length")
    pieces += reader.end({"finish_reason": stream.finish_reason})
    return *join_pieces(pieces), stream.finish_reason


def test_an_answer_ends_at_each_stop_id(chat, tokenizer):
    request = plan(tokenizer)
    for end in (chat.end, *chat.ends):
        thoughts = "so\n</think>\n\n" if chat.opened else ""
        text, _, calls, reason = read(tokenizer, request, f"{thoughts}Yes.{end}No.")
        assert (text, calls, reason) == ("Yes.", [], "stop")


def test_a_template_has_earlier_calls_as_the_model_writes_them(chat, tokenizer):
    call = {"id": "call00001", "function": {"name": "weather", "arguments": json.dumps(ARGUMENTS)}}
    messages = (
        {"role": "assistant", "content": "Let me see. ", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "content": "rain"},
    )
    prompt = prompt_of(tokenizer, plan(tokenizer, *messages))
    assert prompt.endswith(chat.role.format("assistant") + chat.opened)
    squeezed = "".join(prompt.split())
    assert "".join(chat.calls.split()) in squeezed and "rain" in prompt and '"weather"' in prompt


def test_reasoning_text_and_calls_are_split(chat, tokenizer):
    request = plan(tokenizer)
    opening = "" if chat.opened or not chat.reasons else "<think>\n"
    thoughts = f"{opening}so\n</think>\n\n" if chat.reasons else ""
    answer = f"{thoughts}Let me see.\n{chat.calls}{chat.end}"
    text, reasoning, calls, reason = read(tokenizer, request, answer)
    assert (text, reason) == ("Let me see.", "stop")
    assert reasoning.strip() == ("so" if chat.reasons else "")
    (call,) = calls
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS


def test_a_forced_call_follows_a_closed_block(chat, tokenizer):
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        request = plan(tokenizer, tool_choice=choice)
        assert request.generations[0].grammar
        prompt = prompt_of(tokenizer, request)
        begun = prompt.rpartition("</think>")[2] if chat.opened else prompt
        start = begun[begun.rindex(chat.calls.split("weather")[0].strip()[:16]) :]
        rest = chat.calls.removeprefix(start)
        assert rest != chat.calls
        _, _, (call,), _ = read(tokenizer, request, rest + chat.end)
        assert json.loads(call["function"]["arguments"]) == ARGUMENTS
        assert accepts(tokenizer, request.generations[0].grammar, rest)


@pytest.mark.parametrize("effort", ("none", "high"))
def test_no_effort_is_no_thinking(tmp_path, effort):
    """DeepSeek's and Kimi's templates name the switch `thinking`, Qwen's `enable_thinking`."""
    make_tokenizer(tmp_path, template="{{ enable_thinking }}|{{ thinking }}")
    tokenizer = load_tokenizer(tmp_path)
    body = ChatCompletionBody(messages=[USER], reasoning_effort=effort)
    (ids,), _ = body.encode(tokenizer)
    assert tokenizer.decode(ids) == ("False|False" if effort == "none" else "|")


@pytest.mark.parametrize("chat", [CHATS["kimi_linear"]])
def test_calls_of_a_conversation_are_numbered_on(chat, tokenizer):
    """Kimi's calls have ids with the number of the call in the conversation."""
    function = {"name": "weather", "arguments": json.dumps(ARGUMENTS)}
    calls = [{"id": id, "function": function} for id in ("functions.weather:0", "toolu_other")]
    messages = (
        {"role": "assistant", "content": "", "tool_calls": calls},
        *({"role": "tool", "tool_call_id": call["id"], "content": "rain"} for call in calls),
    )
    request = plan(tokenizer, *messages)
    prompt = prompt_of(tokenizer, request)
    assert [f"functions.weather:{n}<" in prompt for n in range(3)] == [True, True, False]
    answer = chat.calls.replace(":0", ":2") + chat.end
    _, _, (call,), _ = read(tokenizer, request, answer)
    assert call["id"] == "functions.weather:2"
    named = {"type": "function", "function": {"name": "weather"}}
    forced = plan(tokenizer, *messages, tool_choice=named)
    begun, argument, _ = answer.partition("<|tool_call_argument_begin|>")
    assert prompt_of(tokenizer, forced).endswith(begun + argument)
    assert plan(tokenizer, tool_choice="required").calls.format.earlier == 0
    reader = CallReader(tokenizer, TOOLS)
    prepared, _ = reader.prepare([USER, *messages])
    ids = [call["id"] for call in prepared[1]["tool_calls"]]
    assert ids == [result["tool_call_id"] for result in prepared[2:]]
    assert ids == ["functions.weather:0", "functions.weather:1"]
    text = chat.calls.replace("<|", f"{MARK}<|") if reader.markers else chat.calls
    pieces = reader.parser().push(text)
    assert [piece.id for piece in pieces if piece.id] == ["functions.weather:2"]

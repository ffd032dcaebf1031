"""Continued messages: the prompt ends inside of the assistant's last one."""

import json

import pytest
from test_reasoning import make_tokenizer
from test_tool_calls import HERMES, LENGTH, QUESTION, WEATHER, Server, with_template

from runtime.text import TextSettings, TextStream
from server.answers import AnswerReader, join_pieces
from server.errors import APIError
from server.plan import Limits, read_request

pytestmark = pytest.mark.usefixtures("few_threads")
LIMITS = Limits(LENGTH, 1 << 20)
# Layouts of published templates. A message of the assistant ends with a marker.
THINK = """\
{%- for m in messages %}<{{ m.role }}>
{%- if m.role == "assistant" and loop.last %}<think>
{{ (m.reasoning_content or "") | trim }}
</think>

{% endif %}{{ m.content | trim }}<end>{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
OPENED = """\
{%- for m in messages %}<{{ m.role }}>{{ m.content.split("</think>")[-1] }}<end>{% endfor %}
{%- if add_generation_prompt %}<assistant><think>{% endif %}"""
GEMMA = """\
{%- for m in messages %}<{{ m.role }}>
{%- if m.reasoning %}<|channel>thought
{{ m.reasoning }}<channel|>{% endif %}{{ m.content }}<end>{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
HARMONY = """\
{%- for m in messages %}<|start|>{{ m.role }}
{%- if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>{{ m.role }}
{%- endif %}<|channel|>final<|message|>{{ m.content }}<|return|>{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
TEMPLATES = {
    "think": (THINK, ("<think>", "</think>")),
    "text": (THINK, ()),
    "opened": (OPENED, ("<think>", "</think>")),
    "gemma": (GEMMA, ("<|channel>", "<channel|>")),
    "harmony": (HARMONY, ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>")),
}
ENDS = {"think": "</think>", "text": "</think>", "gemma": "<channel|>"}
ENDS["harmony"] = "<|end|><|start|>assistant<|channel|>final<|message|>"


def make(tmp_path, name):
    template, names = TEMPLATES[name]
    return make_tokenizer(tmp_path, names, True, template)


def plan(tokenizer, last: dict, **fields):
    messages = [*QUESTION, {"role": "assistant", **last}]
    body = {"messages": messages, "continue_final_message": True, **fields}
    return read_request(json.dumps(body).encode(), True, tokenizer, LIMITS)


def answer(tokenizer, request, text: str) -> tuple[str, str]:
    """Return an answer's text and its reasoning."""
    (generation,) = request.generations
    thoughts: list[str] = []
    splits = thoughts.append if generation.split_reasoning else None
    stream = TextStream(
        generation.prompt_ids,
        tokenizer,
        TextSettings(
            (),
            False,
            generation.reply and not generation.continues,
            lambda text: None,
            lambda *_: None,
            splits,
            generation.markers,
            generation.continues,
        ),
    )
    for id in tokenizer.encode(text, bos=False, special=True):
        stream.push(id)
    stream.end("stop")
    result = {"text": stream.text, "reasoning": stream.reasoning, "finish_reason": "stop"}
    found, reasoning, _ = join_pieces(AnswerReader(request, tokenizer).whole(result))
    return found, reasoning


@pytest.mark.parametrize(
    ("name", "tools"), [*((name, []) for name in TEMPLATES), ("harmony", [WEATHER])]
)
@pytest.mark.parametrize("text", ("It", "It rains. ", "So</think>It"))
def test_a_message_is_continued_where_its_text_ends(tmp_path, name, tools, text):
    tokenizer = make(tmp_path, name)
    request = plan(tokenizer, {"content": text}, tools=tools)
    prompt = tokenizer.decode(request.generations[0].prompt_ids)
    assert prompt.endswith(text.split("</think>")[-1] if name == "opened" else text)
    assert "<end>" not in prompt.partition("Weather?")[2].partition("<end>")[2]
    assert answer(tokenizer, request, " rains <b>") == (" rains <b>", "")


@pytest.mark.parametrize(
    ("name", "tools"), [*((name, []) for name in ENDS), ("harmony", [WEATHER])]
)
def test_thoughts_are_continued(tmp_path, name, tools):
    tokenizer = make(tmp_path, name)
    request = plan(tokenizer, {"content": "", "reasoning_content": "I think "}, tools=tools)
    assert tokenizer.decode(request.generations[0].prompt_ids).endswith("I think ")
    assert answer(tokenizer, request, f"so.{ENDS[name]}Yes.") == ("Yes.", "so.")
    assert answer(tokenizer, request, "so") == ("", "so")


def test_without_the_field_the_message_is_closed(tmp_path):
    tokenizer = make(tmp_path, "think")
    ids = plan(tokenizer, {"content": "It"}, continue_final_message=False).generations[0].prompt_ids
    assert tokenizer.decode(ids).endswith("It<end><assistant>")
    closed = {"continue_final_message": False, "add_generation_prompt": False}
    ids = plan(tokenizer, {"content": "It"}, **closed).generations[0].prompt_ids
    assert tokenizer.decode(ids).endswith("It<end>")
    open_ = {"continue_final_message": None, "add_generation_prompt": False}
    ids = plan(tokenizer, {"content": "It"}, **open_).generations[0].prompt_ids
    assert tokenizer.decode(ids).endswith("It")


def test_a_mark_in_a_text_is_dropped(tmp_path):
    tokenizer = make(tmp_path, "think")
    messages = [
        {"role": "user", "content": "a\ufdd2b"},
        {"role": "assistant", "content": "c\ufdd2"},
    ]
    ids = plan(tokenizer, {}, messages=messages).generations[0].prompt_ids
    assert tokenizer.decode(ids).endswith("c") and "ab" in tokenizer.decode(ids)


CALL = {"function": {"name": "weather", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("last", "fields", "message"),
    (
        ({"content": "x", "role": "user"}, {}, "needs a last message of the assistant"),
        ({"content": ""}, {}, "needs a last message of the assistant"),
        ({"content": "x"}, {"add_generation_prompt": True}, "needs add_generation_prompt: false"),
        ({"content": "x", "tool_calls": [CALL]}, {}, "tool calls cannot be continued"),
        ({"content": "x"}, {"tools": [WEATHER], "tool_choice": "required"}, "forced call"),
        ({"content": "", "reasoning": "x"}, {}, "the template leaves its text out"),
    ),
)
def test_what_cannot_be_continued_is_refused(tmp_path, last, fields, message):
    tokenizer = make(tmp_path, "opened")
    with pytest.raises(APIError, match=message):
        plan(tokenizer, last, **fields)


def test_a_grammar_begins_after_the_prefill(directory, tmp_path):
    """The grammar restricts the tokens that the model adds, not the whole text."""
    with pytest.MonkeyPatch.context() as patch:
        server = Server(with_template(directory, tmp_path, HERMES), patch)
        patch.undo()  # the model's own answers
        try:
            messages = [*QUESTION, {"role": "assistant", "content": "The number is"}]
            extra = {"continue_final_message": True, "add_generation_prompt": False}
            extra["guided_regex"] = " [0-9]{3}"
            found = server.chat(messages, max_tokens=20, extra_body=extra).choices[0].message
            assert len(found.content) == 4 and found.content[1:].isdecimal()
        finally:
            server.close()

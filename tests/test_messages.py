"""Anthropic's Messages API: shapes of its clients' requests, answers as blocks and as events.

The answers are scripted, see test_tool_calls. test_clients has the real package.
"""

import json
from functools import partial

import pytest
from conftest import any_json
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from local_server import LocalServer, httpx
from test_tool_calls import CALL, HERMES, LENGTH, Server, with_template

from server.errors import APIError
from server.message_blocks import MessageBuilder
from server.messages import MessagesBody, count_tokens, error_body, read_message
from server.plan import Limits
from tokenizer import load_tokenizer

pytestmark = pytest.mark.usefixtures("few_threads")
LIMITS = Limits(LENGTH, 1 << 20)
THINKING = HERMES + "{# <think> </think> #}"
SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "description": "The weather of a city", "input_schema": SCHEMA}
CACHED = {"cache_control": {"type": "ephemeral"}}
VERSION = {"anthropic-version": "2023-06-01"}
QUESTION = [{"role": "user", "content": "Weather?"}]


def text(value: str, **more) -> dict:
    return {"type": "text", "text": value, **more}


# As Claude Code sends it: the headers and fields are its own, the texts are ours.
AGENT_HEADERS = {
    **VERSION,
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
    "anthropic-dangerous-direct-browser-access": "true",
    "user-agent": "claude-cli/2.1.0 (external, cli)",
    "x-api-key": "none",
    "x-app": "cli",
    "x-stainless-lang": "js",
}
AGENT_BODY = {
    "model": "claude-sonnet-4-5-20250929",
    "max_tokens": 32000,
    "temperature": 1,
    "stream": True,
    "system": [text("You are an agent.", **CACHED), text("Be short.", **CACHED)],
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": "user_0_account__session_0"},
    "tools": [
        {**WEATHER, **CACHED},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "messages": [
        {
            "role": "user",
            "content": [text("<system-reminder>x</system-reminder>"), text("Weather?", **CACHED)],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I ask.", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                text("Let me see."),
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rom"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [text("rain")],
                    "is_error": False,
                    **CACHED,
                },
                text("And tomorrow?"),
            ],
        },
    ],
}


@pytest.fixture(scope="module")
def server(shallow_directory, tmp_path_factory, few_threads):
    with pytest.MonkeyPatch.context() as patch:
        model = with_template(shallow_directory, tmp_path_factory.mktemp("thinking"), THINKING)
        server = Server(model, patch)
        yield server
        server.close()


@pytest.fixture
def ask(server):
    """Send a request; return its response."""

    def send(body=None, path="messages", headers=VERSION, **fields) -> httpx.Response:
        body = {"max_tokens": 200, "messages": QUESTION} if body is None else body
        url = f"{server.url}/v1/{path}"
        return httpx.post(url, json={**body, **fields}, headers=headers, timeout=60)

    return send


def events_of(response: httpx.Response) -> list[dict]:
    """Return a stream's events, whose names and types are the same."""
    found = []
    for part in response.text.strip().split("\n\n"):
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def accumulate(events: list[dict]) -> dict:
    """Return the message that a stream's events add up to."""
    message = events[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    parts: dict[int, str] = {}
    for event in events[1:]:
        match event:
            case {"type": "content_block_start", "index": index, "content_block": block}:
                assert index == len(message["content"])
                message["content"].append(block)
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                kind = delta.pop("type")
                if kind == "input_json_delta":
                    parts[index] = parts.get(index, "") + delta["partial_json"]
                else:
                    ((name, value),) = delta.items()
                    assert kind == f"{name}_delta"
                    message["content"][index][name] += value
            case {"type": "content_block_stop", "index": index}:
                if index in parts:
                    message["content"][index]["input"] = json.loads(parts[index])
            case {"type": "message_delta", "delta": delta, "usage": usage}:
                message |= delta
                message["usage"] |= usage
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    return message


def without(message: dict) -> dict:
    """Return a message without what differs from answer to answer."""
    content = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    usage = message["usage"]
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    return {**message, "id": None, "content": content, "usage": (prompt, usage["output_tokens"])}


# Answers ------------------------------------------------------------------------------------------


def test_a_message_has_text(server, ask):
    server.answer = lambda prompt: "Yes."
    found = ask(system="Be short.")
    assert found.status_code == 200 and found.headers["request-id"].startswith("req_")
    message = found.json()
    assert message["id"].startswith("msg_")
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "tiny")
    assert message["content"] == [text("Yes.")]
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    assert "[system]Be short." in server.prompts[-1] and "[user]Weather?" in server.prompts[-1]
    counted = ask(path="messages/count_tokens", system="Be short.").json()
    usage = message["usage"]
    assert counted["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
    again = ask(system="Be short.").json()["usage"]
    assert again["cache_read_input_tokens"] > 0
    assert again["input_tokens"] + again["cache_read_input_tokens"] == counted["input_tokens"]


ANSWERS = {
    "text": ("Yes.", "end_turn", ["text"]),
    "thinking": ("<think>Hm.</think>Yes.", "end_turn", ["thinking", "text"]),
    "calls": (f"<think>Hm.</think>Well.\n{CALL}\n{CALL}", "tool_use",
              ["thinking", "text", "tool_use", "tool_use"]),
    "no arguments": ('<tool_call>{"name": "weather", "arguments": {}}</tool_call>', "tool_use",
                     ["tool_use"]),
    "halves of a pair": ('<tool_call>{"name": "weather", "arguments": {"\\udd00": "a"}}'
                         "</tool_call>", "tool_use", ["tool_use"]),
    "empty": ("", "end_turn", []),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_a_stream_adds_up_to_the_whole_message(server, ask, name):
    answer, reason, kinds = ANSWERS[name]
    server.answer = lambda prompt: answer
    fields = {"tools": [WEATHER], "thinking": {"type": "adaptive"}}
    whole = ask(**fields).json()
    events = events_of(ask(stream=True, **fields))
    assert without(accumulate(events)) == without(whole)
    assert [block["type"] for block in whole["content"]] == kinds
    assert whole["stop_reason"] == reason
    for block in whole["content"]:
        if block["type"] == "tool_use":
            given = {"no arguments": {}, "halves of a pair": {"\ufffd": "a"}}
            expected = given.get(name, {"city": "Rom"})
            assert (block["name"], block["input"]) == ("weather", expected) and block["id"]
        if block["type"] == "thinking":
            assert block["thinking"] == "Hm." and block["signature"]


def test_thoughts_that_nobody_asked_for_are_not_sent(server, ask):
    server.answer = lambda prompt: "<think>Hm.</think>Yes."
    for fields in ({}, {"thinking": {"type": "disabled"}}):
        assert ask(**fields).json()["content"] == [text("Yes.")]
        found = accumulate(events_of(ask(stream=True, **fields)))
        assert found["content"] == [text("Yes.")]
        assert found["usage"]["output_tokens_details"]["thinking_tokens"] > 0


def test_the_template_knows_whether_to_think(directory, tmp_path):
    source = "{{ enable_thinking }}|{{ thinking }}|{{ reasoning_effort }}"
    model = with_template(directory, tmp_path, source)
    from_body = partial(prompt_of, model)
    assert from_body() == "False|False|"
    assert from_body(thinking={"type": "enabled", "budget_tokens": 1024}) == "True|True|"
    assert from_body(output_config={"effort": "max"}) == "False|False|high"


def prompt_of(model, **fields) -> str:
    tokenizer = load_tokenizer(model)
    body = json.dumps({"max_tokens": 5, "messages": QUESTION, **fields}).encode()
    _, request = read_message(body, tokenizer, LIMITS)
    return tokenizer.decode(request.generations[0].prompt_ids)


def test_a_stop_sequence_is_named(server, ask):
    server.answer = lambda prompt: "one two three"
    message = ask(stop_sequences=["never", " three", " two"]).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", " two")
    assert message["content"] == [text("one")]
    events = events_of(ask(stop_sequences=[" two"], stream=True))
    assert accumulate(events)["stop_sequence"] == " two"
    message = ask(max_tokens=1).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None)


def test_a_cut_call_has_no_half_of_its_input(server, ask):
    server.answer = lambda prompt: CALL
    count = len(server.tokenizer.encode(CALL.partition("Rom")[0], bos=False))
    message = ask(max_tokens=count, tools=[WEATHER]).json()
    assert message["stop_reason"] == "max_tokens"
    assert message["content"][0]["input"] == {}


def test_an_agents_request(server, ask):
    """Claude Code's: of a query, with fields and tools that mean nothing here."""
    server.answer = lambda prompt: "<think>Hm.</think>It rains."
    response = ask(AGENT_BODY, "messages?beta=true", AGENT_HEADERS)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["request-id"]
    message = accumulate(events_of(response))
    assert message["content"][0]["thinking"] == "Hm." and message["stop_reason"] == "end_turn"
    prompt = server.prompts[-1]
    assert "[system]You are an agent.\n\nBe short." in prompt
    assert "<system-reminder>x</system-reminder>\n\nWeather?" in prompt
    assert f"[assistant]Let me see.{CALL}" in prompt
    assert "[tool]rain" in prompt and "[user]And tomorrow?" in prompt
    assert '"name": "weather"' in prompt and "web_search" not in prompt
    counted = {k: AGENT_BODY[k] for k in ("model", "messages", "system", "tools", "thinking")}
    found = ask(counted, "messages/count_tokens?beta=true", AGENT_HEADERS).json()
    usage = message["usage"]
    assert found["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


@pytest.mark.parametrize(
    ("choice", "start"),
    (
        ({"type": "any"}, '<tool_call>\n{"name": "'),
        ({"type": "tool", "name": "weather"}, '<tool_call>\n{"name": "weather", "arguments":'),
    ),
)
def test_a_forced_call(server, ask, choice, start):
    server.answer = lambda prompt: CALL.partition(start.replace("\n", ""))[2]
    message = ask(tools=[WEATHER], tool_choice=choice).json()
    assert message["stop_reason"] == "tool_use"
    assert message["content"][0]["input"] == {"city": "Rom"}
    assert server.prompts[-1].endswith(start)


def test_no_call_and_one_call(server, ask):
    server.answer = lambda prompt: CALL
    none = ask(tools=[WEATHER], tool_choice={"type": "none"}).json()
    assert none["content"] == [text(CALL)] and none["stop_reason"] == "end_turn"
    server.answer = lambda prompt: f"{CALL}\n{CALL}"
    one = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(ask(tools=[WEATHER], tool_choice=one).json()["content"]) == 1


def test_the_last_message_of_the_assistant_is_continued(server, ask):
    server.answer = lambda prompt: " rains."
    for content in ("It", [text("It")]):
        messages = [*QUESTION, {"role": "assistant", "content": content}]
        assert ask(messages=messages).json()["content"] == [text(" rains.")]
        assert server.prompts[-1].endswith("[assistant]It")
    for content in ("", [], [text("")]):  # nothing to continue
        messages = [*QUESTION, {"role": "assistant", "content": content}]
        ask(messages=messages)
        assert server.prompts[-1].endswith("[user]Weather?[assistant]")


def test_blocks_of_anthropics_servers_are_left_out_of_a_history(tokenizer):
    """As its tools are of a request: another model had them in this conversation."""
    ids = []
    for blocks in (
        [text("I search."), text("Found.")],
        [
            text("I search."),
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
            {"type": "mcp_tool_use", "id": "m", "name": "x", "server_name": "y", "input": {}},
            {"type": "mcp_tool_result", "tool_use_id": "m", "content": []},
            text("Found."),
        ],
    ):
        history = [*QUESTION, {"role": "assistant", "content": blocks}, *QUESTION]
        body = {"max_tokens": 5, "messages": history}
        _, request = read_message(json.dumps(body).encode(), tokenizer, LIMITS)
        ids.append(request.generations[0].prompt_ids)
    assert ids[0] == ids[1]


def test_documents_and_search_results_are_texts(server, ask):
    server.answer = lambda prompt: "Yes."
    content = [text("One."), text("Two.")]
    whole = {"type": "document", "title": "A", "source": {"type": "text", "data": "All."}}
    parts = {"type": "document", "source": {"type": "content", "content": content}}
    result = {"type": "search_result", "title": "B", "source": "http://b", "content": content}
    assert ask(**user(whole, parts, result)).status_code == 200
    assert "A\nAll.\n\nOne.\n\nTwo.\n\nB\nOne.\n\nTwo." in server.prompts[-1]


def test_messages_of_a_role_that_follow_each_other_are_one(server, ask):
    call = {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Rom"}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "rain"}
    turns = [
        ("user", "One"),
        ("user", [text("Two")]),
        ("assistant", "Let me "),
        ("assistant", [text("see."), call]),
        ("user", [result]),
        ("user", "Three"),
        ("assistant", ""),
        ("user", "Four"),
    ]
    ask(messages=[{"role": role, "content": content} for role, content in turns])
    found = server.prompts[-1].replace("\n[", "[")
    assert found.startswith(
        f"[user]One\n\nTwo[assistant]Let me see.{CALL}[tool]rain[user]Three[assistant]"
    ) and found.endswith("[user]Four[assistant]")


@pytest.mark.parametrize("name", ("output_config", "output_format"))
def test_an_answer_follows_a_schema(directory, tmp_path, name):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    format = {"type": "json_schema", "schema": schema}
    body = {"max_tokens": 5, "messages": QUESTION}
    body[name] = {"format": format} if name == "output_config" else format
    tokenizer = load_tokenizer(with_template(directory, tmp_path, HERMES))
    _, request = read_message(json.dumps(body).encode(), tokenizer, LIMITS)
    assert '"integer"' in request.generations[0].grammar


# Errors -------------------------------------------------------------------------------------------

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
PDF = {"type": "document", "source": {"type": "base64", "data": "AA"}}
RESULT = {"type": "tool_result", "tool_use_id": "1"}


def user(*blocks) -> dict:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("fields", "message"),
    (
        (user(text("What?"), IMAGE), "images are not supported"),
        (user({**RESULT, "content": [IMAGE]}), "images are not supported"),
        (user(PDF), "files are not supported"),
        (user({"type": "text"}), "messages: it must be a list"),
        (user({"type": ["text"]}), "messages: \"['text']\" is not supported"),
        (user({"type": "tool_reference", "tool_name": "x"}), "'tool_reference' is not supported"),
        (user({"type": "search_result", "content": [IMAGE]}), "images are not supported"),
        ({"messages": [{"role": "assistant", "content": [{"type": {}}]}]}, "'{}' is not supported"),
        (user(None), "messages: it must be a list"),
        ({"messages": []}, "messages: it must be a list"),
        ({"messages": "x"}, "messages: it must be a list"),
        ({"messages": [{"role": "cook", "content": "x"}]}, "messages: it must be a list"),
        ({"messages": [{"role": "user"}]}, "messages: it must be a list"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages: it must be a list"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens 0: it must be a whole number from 1"),
        ({"temperature": 3}, "temperature 3"),
        ({"stop_sequences": [""]}, "stop_sequences must be"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools must be a list"),
        ({"tools": [{"input_schema": {}}]}, "tools must be a list"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "news"}}, "'news'"),
        ({"tools": [WEATHER], "tool_choice": {"type": "some"}}, "tool_choice must be"),
        ({"thinking": {"type": "hard"}}, "thinking must be"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format must be"),
        ({"messages": [*QUESTION, {"role": "assistant", "content": [
            {"type": "tool_use", "id": "1", "name": "weather", "input": {}}]}]}, "tool_result"),
    ),
)  # fmt: skip
def test_a_wrong_request_is_refused_in_this_apis_form(ask, fields, message):
    found = ask(**fields)
    body = found.json()
    assert found.status_code == 400 and body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert message in body["error"]["message"] and "\n" not in body["error"]["message"]
    assert body["request_id"] == found.headers["request-id"]


def test_a_prompt_that_is_too_long_is_known_by_its_error(ask):
    for count in (LENGTH, 50 * LENGTH):
        messages = [{"role": "user", "content": "x " * count}]
        found = ask(messages=messages).json()["error"]
        assert found["message"].startswith("prompt is too long: ")
    message = error_body(ask_error(LENGTH))["error"]["message"]
    assert message.endswith(f" tokens > {LENGTH} maximum")


def ask_error(count: int) -> APIError:
    class Words:
        """A tokenizer without a chat template: a token a letter."""

        has_chat_template, vocab_size = False, 9

        def encode(self, text, special=False):
            return [1] * len(text)

        def template_has(self, text):
            return False

    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "x" * count}]}
    with pytest.raises(APIError) as caught:
        read_message(json.dumps(body).encode(), Words(), LIMITS)
    return caught.value


def test_other_errors_have_their_types(server, directory):
    base = f"{server.url}/v1/messages"
    for found, status, kind in (
        (httpx.get(base), 405, "invalid_request_error"),
        (httpx.post(base + "/batches", json={}), 404, "not_found_error"),
        (httpx.post(base, content=b"{", headers={"content-type": "application/json"}), 400,
         "invalid_request_error"),
        (httpx.post(base, json=[]), 400, "invalid_request_error"),
        (httpx.post(base, json={}, headers={"host": "evil.example"}), 403, "permission_error"),
        (httpx.post(base, json={"x": "x" * 2_000_000}), 413, "request_too_large"),
    ):  # fmt: skip
        assert (found.status_code, found.json()["error"]["type"]) == (status, kind)


def test_the_key_may_be_that_of_anthropics_clients(directory):
    server = LocalServer(directory, 128, api_key="secret")
    try:
        send = partial(httpx.get, f"{server.url}/v1/models")
        assert send(headers={"x-api-key": "secret"}).status_code == 200
        assert send(headers={"x-api-key": "wrong"}).status_code == 401
        body = {"max_tokens": 2, "messages": QUESTION}
        url = f"{server.url}/v1/messages"
        for headers in ({}, {"x-api-key": "é"}, {"authorization": "Basic secret"}):
            found = httpx.post(url, json=body, headers={k: v.encode() for k, v in headers.items()})
            assert found.status_code == 401
            assert found.json()["error"]["type"] == "authentication_error"
        assert httpx.post(url, json=body, headers={"x-api-key": "secret"}).status_code == 200
    finally:
        server.close()


def test_a_stream_that_fails_ends_in_an_error_of_this_api(tokenizer):
    body = json.dumps({"max_tokens": 5, "messages": QUESTION}).encode()
    fields, request = read_message(body, tokenizer, LIMITS)
    builder = MessageBuilder(fields, request, "tiny", tokenizer)
    name, data = builder.error(APIError("the server is ending", 503)).decode().split("\n", 1)
    error = {"type": "overloaded_error", "message": "the server is ending"}
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: ")) == {"type": "error", "error": error}


def test_models_have_anthropics_names(server):
    found = httpx.get(f"{server.url}/v1/models", headers=VERSION).json()
    assert found["has_more"] is False and found["first_id"] == found["last_id"] == "tiny"
    (model,) = found["data"]
    assert (model["type"], model["display_name"]) == ("model", "tiny") and model["created_at"]


KEYS = ("type", "role", "content", "text", "name", "input", "id", "source", "thinking")
JUNK = any_json(*KEYS, "input_schema", "tool_use_id", "format", "effort")
KINDS = st.sampled_from(
    ("text", "image", "document", "tool_use", "tool_result", "thinking", "redacted_thinking")
)
BLOCK = st.builds(
    lambda kind, junk: {"type": kind, **junk},
    KINDS,
    st.dictionaries(st.sampled_from((*KEYS, "tool_use_id")), JUNK, max_size=3),
)
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(("user", "assistant", "system")),
        "content": st.lists(BLOCK, max_size=3) | JUNK,
    }
)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.dictionaries(st.sampled_from(sorted(MessagesBody.model_fields)), JUNK, max_size=3),
    st.lists(MESSAGE, max_size=3) | JUNK,
    st.sampled_from((read_message, count_tokens)),
)
def test_every_body_becomes_a_request_or_an_error_of_this_api(tokenizer, fields, messages, read):
    body = json.dumps({"max_tokens": 5, **fields, "messages": messages}).encode()
    try:
        read(body, tokenizer, LIMITS if read is read_message else LENGTH)
    except APIError as error:
        found = error_body(error)
        json.dumps(found)
        assert error.status == 400 and "\n" not in found["error"]["message"]

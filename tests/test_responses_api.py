"""The Responses API: stored responses, and tools that only OpenAI's servers have.

The answers are scripted, see test_tool_calls.
"""

import json

import pytest
from local_server import httpx, openai
from test_tool_calls import CALL, FLAT_WEATHER, HERMES, LENGTH, Server, with_template

from server.errors import APIError
from server.plan import Limits
from server.response_store import ItemStore
from server.responses import read_responses_request
from tokenizer import load_tokenizer

pytestmark = pytest.mark.usefixtures("few_threads")
LIMITS = Limits(LENGTH, 1 << 20)


@pytest.fixture(scope="module")
def server(directory, tmp_path_factory, few_threads):
    with pytest.MonkeyPatch.context() as patch:
        server = Server(with_template(directory, tmp_path_factory.mktemp("hermes"), HERMES), patch)
        yield server
        server.close()


@pytest.fixture
def responses(server):
    server.answer = lambda prompt: "Yes."
    return server.client.responses


def test_a_response_follows_another(server, responses):
    first = responses.create(model="any", input="One?", instructions="Be short.")
    second = responses.create(model="any", input="Two?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    stream = responses.create(
        model="any", input="Three?", previous_response_id=second.id, stream=True
    )
    assert list(stream)[-1].response.previous_response_id == second.id
    turns = "".join(f"[user]{text}?[assistant]Yes." for text in ("One", "Two"))
    assert turns + "[user]Three?" in server.prompts[-1].replace("\n", "")
    assert "Be short." not in server.prompts[-1]  # as in OpenAI's API
    # Two responses may follow the same one.
    responses.create(model="any", input="Other?", previous_response_id=first.id)
    assert "Two?" not in server.prompts[-1] and "One?" in server.prompts[-1]


def test_the_output_of_a_tool_alone_follows_its_call(server, responses):
    server.answer = lambda prompt: "It rains." if "[tool]" in prompt else CALL
    first = responses.create(model="any", input="Weather?", tools=[FLAT_WEATHER])
    output = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "rain"}
    second = responses.create(model="any", input=[output], previous_response_id=first.id)
    assert second.output_text == "It rains." and CALL in server.prompts[-1]


def test_stored_responses_are_returned_and_deleted(server, responses):
    whole = responses.create(model="any", input="One?")
    streamed = list(responses.create(model="any", input="One?", stream=True))[-1].response
    for response in (whole, streamed):
        assert responses.retrieve(response.id) == response
        (item,) = responses.input_items.list(response.id)
        assert item.content == "One?" and item.role == "user"
    responses.delete(whole.id)
    for call in (responses.retrieve, responses.delete):
        with pytest.raises(openai.NotFoundError, match="is not stored here"):
            call(whole.id)
    reference = {"type": "item_reference", "id": whole.output[0].id}
    with pytest.raises(openai.BadRequestError, match="is not stored here"):
        responses.create(model="any", input=[reference])
    with pytest.raises(openai.BadRequestError, match="send the whole conversation") as caught:
        responses.create(model="any", input="Two?", previous_response_id=whole.id)
    assert caught.value.code == "previous_response_not_found"
    unkept = responses.create(model="any", input="One?", store=False)
    with pytest.raises(openai.NotFoundError):
        responses.retrieve(unkept.id)
    item = httpx.get(f"{server.url}/v1/responses/{streamed.output[0].id}")
    assert item.status_code == 404  # an item is no response


def test_the_store_forgets_the_oldest_and_counts_its_bytes():
    store = ItemStore(2000)
    for n in range(20):
        item = {"id": f"i{n}", "type": "message", "role": "assistant", "content": "x" * 50}
        previous = f"r{n - 1}" if n % 5 else None
        response = {"id": f"r{n}", "output": [item], "previous_response_id": previous}
        store.add_response(response, [{"role": "user", "content": "y" * 20}])
        assert store.bytes <= 2000
    assert [item["role"] for item in store.conversation("r19")] == ["user", "assistant"] * 5
    with pytest.raises(APIError):
        store.conversation("r0")
    store.remove("r17")
    with pytest.raises(APIError, match="'r17' is not stored"):
        store.conversation("r19")
    for id in list(store.entries):
        if id.startswith("r"):
            store.remove(id)
    assert all(id.startswith("i") for id in store.entries)
    assert store.bytes == sum(size for _, size in store.entries.values())


# As Codex sends them: the types and fields are its own, the texts are ours.
SHELL = {
    "type": "function",
    "name": "shell",
    "description": "Run a command",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "array", "items": {"type": "string"}}},
        "required": ["command"],
        "additionalProperties": False,
    },
}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}
CODEX = {
    "model": "gpt-5-codex",
    "instructions": "You are an agent.",
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "Be short."}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go."}]},
        {"type": "web_search_call", "status": "completed", "action": {"type": "search"}},
        {"type": "custom_tool_call", "call_id": "1", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "1", "output": "Done."},
    ],
    "tools": [
        SHELL,
        {"type": "custom", "name": "apply_patch", "description": "x", "format": GRAMMAR},
        {"type": "web_search"},
        {"type": "local_shell"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0",
    "text": {"verbosity": "medium"},
}


def test_an_item_without_a_type_is_a_message(tokenizer):
    for item in ({"role": "user", "content": "x"}, {"type": None, "role": "user", "content": "x"}):
        body = json.dumps({"input": [item]}).encode()
        _, request = read_responses_request(body, tokenizer, LIMITS, ItemStore())
        assert request.generations[0].prompt_ids == tokenizer.encode("x")


@pytest.mark.parametrize("number", ("NaN", "-Infinity", "1e999"))
@pytest.mark.parametrize(
    "field",
    (
        '"metadata": {"a": %s}',
        '"tools": [{"type": "function", "name": "f", "parameters": {"default": %s}}]',
        '"text": {"format": {"type": "json_object", "x": [%s]}}',
        '"tool_choice": {"type": "allowed_tools", "tools": [], "x": %s}',
        '"input": [{"role": "user", "content": "x", "x": %s}]',
    ),
)
def test_numbers_that_the_answer_could_not_repeat_are_refused(tokenizer, number, field):
    body = f'{{"input": "x", {field % number}}}'.encode()
    with pytest.raises(APIError, match="not finite"):
        read_responses_request(body, tokenizer, LIMITS, ItemStore())


def test_an_agents_request(server):
    server.answer = lambda prompt: (
        '<tool_call>{"name": "shell", "arguments": {"command": ["ls"]}}</tool_call>'
    )
    found = httpx.post(f"{server.url}/v1/responses", json=CODEX, timeout=60)
    assert found.status_code == 200
    last = json.loads(found.text.strip().split("\n\n")[-1].split("data: ")[1])
    (call,) = last["response"]["output"]
    assert call["name"] == "shell" and json.loads(call["arguments"]) == {"command": ["ls"]}
    prompt = server.prompts[-1]
    assert '"shell"' in prompt.partition("</tools>")[0]
    assert "web_search" not in prompt and "apply_patch" not in prompt.partition("</tools>")[0]
    assert '{"name": "apply_patch", "arguments": {"input": "*** Begin"}}' in prompt
    assert "[tool]Done." in prompt


NEWS = {**FLAT_WEATHER, "name": "news"}


@pytest.mark.parametrize("mode", ("auto", "required"))
def test_allowed_tools_leave_out_the_others(directory, tmp_path, mode):
    tokenizer = load_tokenizer(with_template(directory, tmp_path, HERMES))
    names = [{"type": "function", "name": "news"}, {"type": "web_search"}]
    choice = {"type": "allowed_tools", "mode": mode, "tools": names}
    body = {"input": "x", "tools": [FLAT_WEATHER, NEWS], "tool_choice": choice}
    _, request = read_responses_request(json.dumps(body).encode(), tokenizer, LIMITS, ItemStore())
    prompt = tokenizer.decode(request.generations[0].prompt_ids)
    assert '"news"' in prompt and '"weather"' not in prompt
    assert prompt.endswith('{"name": "') == (mode == "required")
    assert list(request.calls.schemas) == ["news"]

"""Published clients against the server: `pip install 'moe-fast[clients]'`. openai: test_tool_calls.

The answers are scripted, see there.
"""

import json
from typing import Annotated

import pytest
from local_server import LocalServer
from pydantic import BaseModel, ConfigDict, Field
from test_tool_calls import CALL, HERMES, LENGTH, QUESTION, WEATHER, Server, with_template

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_threads")]
REASON = "it needs the package: pip install 'moe-fast[clients]'"


@pytest.fixture(scope="module")
def server(directory, tmp_path_factory, few_threads):
    with pytest.MonkeyPatch.context() as patch:
        model = with_template(directory, tmp_path_factory.mktemp("hermes"), HERMES)
        server = Server(model, patch)
        yield server
        server.close()


class Place(BaseModel):
    """Where it is."""

    model_config = ConfigDict(extra="forbid")

    city: Annotated[str, Field(max_length=9)]
    days: Annotated[int, Field(ge=1, le=9)]


@pytest.fixture(scope="module")
def model(directory, tmp_path_factory, few_threads):
    """A server whose answers are the embedded model's."""
    server = LocalServer(with_template(directory, tmp_path_factory.mktemp("h"), HERMES), LENGTH)
    yield server
    server.close()


@pytest.fixture(autouse=True)
def answer(server):
    server.answer = lambda prompt: "It rains." if "[tool]rain" in prompt else f"Hm.\n{CALL}"


def weather(city: str) -> str:
    """The weather of a city."""
    assert city == "Rom"
    return "rain"


# LangChain ----------------------------------------------------------------------------------------


@pytest.fixture
def langchain(server):
    package = pytest.importorskip("langchain_openai", reason=REASON)
    return package.ChatOpenAI(base_url=f"{server.url}/v1", api_key="none", model="any")


def test_langchain_calls_a_tool(langchain):
    bound = langchain.bind_tools([weather])
    first = bound.invoke("Weather?")
    (call,) = first.tool_calls
    assert (first.content, call["name"], call["args"]) == ("Hm.", "weather", {"city": "Rom"})
    result = {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
    second = bound.invoke([*QUESTION, first, result])
    assert second.content == "It rains." and not second.tool_calls
    assert second.usage_metadata["output_tokens"] > 0


def test_langchain_streams_a_call(langchain):
    first, *rest = langchain.bind_tools([weather]).stream("Weather?")
    for chunk in rest:
        first += chunk
    assert [call["args"] for call in first.tool_calls] == [{"city": "Rom"}]
    assert first.response_metadata["finish_reason"] == "tool_calls"


def test_langchain_has_a_structured_output_by_a_forced_call(langchain, server):
    server.answer = lambda prompt: ' {"city": "Rom"}}</tool_call>'
    schema = {"title": "Place", "description": "x", "type": "object"}
    schema |= {"properties": {"city": {"type": "string"}}}
    structured = langchain.with_structured_output(schema, method="function_calling")
    assert structured.invoke("Where?") == {"city": "Rom"}


def test_langchain_uses_responses(server):
    package = pytest.importorskip("langchain_openai", reason=REASON)
    model = package.ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="none", model="any", use_responses_api=True
    )
    first = model.bind_tools([weather]).invoke("Weather?")
    assert [call["args"] for call in first.tool_calls] == [{"city": "Rom"}]
    server.answer = lambda prompt: "Yes."
    assert "".join(chunk.text for chunk in model.stream("Well?")) == "Yes."


@pytest.mark.parametrize("method", ("json_schema", "function_calling", "json_mode"))
def test_langchain_gets_structured_answers(model, method):
    package = pytest.importorskip("langchain_openai", reason=REASON)
    chat = package.ChatOpenAI(
        base_url=f"{model.url}/v1", api_key="none", model="any", seed=1, max_tokens=300
    )
    structured = chat.with_structured_output(Place, method=method, include_raw=True)
    found = structured.invoke("Where? Answer in JSON.")
    if method == "json_mode":  # any object
        assert found["raw"].content.startswith("{")
    else:
        assert isinstance(found["parsed"], Place) and not found["parsing_error"]


# LiteLLM ------------------------------------------------------------------------------------------


@pytest.fixture
def litellm(server, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    package = pytest.importorskip("litellm", reason=REASON)
    package.telemetry = False

    def complete(messages=QUESTION, **options):
        address = {"api_base": f"{server.url}/v1", "api_key": "none", "num_retries": 0}
        return package.completion("openai/any", messages, **address, **options)

    complete.package = package
    return complete


def test_litellm_calls_a_tool(litellm):
    choice = litellm(tools=[WEATHER], tool_choice="auto").choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Hm."
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Rom"}
    chunks = list(litellm(tools=[WEATHER], stream=True))
    found = litellm.package.stream_chunk_builder(chunks).choices[0].message
    assert json.loads(found.tool_calls[0].function.arguments) == {"city": "Rom"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    second = litellm([*QUESTION, choice.message.model_dump(), result], tools=[WEATHER])
    assert second.choices[0].message.content == "It rains."


def test_litellm_knows_that_a_prompt_is_too_long(litellm):
    with pytest.raises(litellm.package.ContextWindowExceededError):
        litellm([{"role": "user", "content": "x " * LENGTH}])


def test_litellm_gets_json(model, litellm):
    address = {"api_base": f"{model.url}/v1", "api_key": "none", "seed": 1, "max_tokens": 300}
    ask = litellm.package.completion
    found = ask("openai/any", QUESTION, response_format=Place, **address).choices[0]
    Place.model_validate_json(found.message.content)
    found = ask("openai/any", QUESTION, response_format={"type": "json_object"}, **address)
    assert found.choices[0].message.content.startswith("{")


# llm ----------------------------------------------------------------------------------------------


def test_llm_runs_a_tool(server):
    pytest.importorskip("llm", reason=REASON)
    models = pytest.importorskip("llm.default_plugins.openai_models", reason=REASON)
    model = models.Chat("tiny", api_base=f"{server.url}/v1", supports_tools=True)
    for stream in (False, True):
        chain = model.chain("Weather?", tools=[weather], key="none", stream=stream)
        assert chain.text().endswith("It rains.")
    assert "[tool]rain" in server.prompts[-1]


def test_llm_gets_json_of_a_schema(model):
    pytest.importorskip("llm", reason=REASON)
    models = pytest.importorskip("llm.default_plugins.openai_models", reason=REASON)
    chat = models.Chat("tiny", api_base=f"{model.url}/v1", supports_schema=True)
    for stream in (False, True):
        found = chat.prompt("Where?", schema=Place, key="none", stream=stream, max_tokens=300)
        Place.model_validate_json(found.text())

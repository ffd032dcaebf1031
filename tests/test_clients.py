"""Published clients against the server: `pip install 'moe-fast[clients]'`. openai: test_tool_calls.

The answers are scripted, see there.
"""

import json
from functools import partial
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
        template = HERMES + "{# <think> </think> #}"
        model = with_template(directory, tmp_path_factory.mktemp("hermes"), template)
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


def test_litellm_takes_anthropics_api(litellm, server):
    server.answer = lambda prompt: f"<think>Why?</think>Hm.\n{CALL}"
    ask = partial(litellm.package.completion, "anthropic/any", QUESTION, tools=[WEATHER])
    address = {"api_base": server.url, "api_key": "none", "num_retries": 0, "max_tokens": 300}
    choice = ask(**address).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Hm."
    chunks = list(ask(stream=True, **address))
    found = litellm.package.stream_chunk_builder(chunks).choices[0].message
    assert found.content == "Hm."
    for call in (choice.message.tool_calls[0], found.tool_calls[0]):
        assert json.loads(call.function.arguments) == {"city": "Rom"}


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


# anthropic ----------------------------------------------------------------------------------------

TOOL = {"name": "weather", "input_schema": WEATHER["function"]["parameters"]}


@pytest.fixture
def anthropic(server):
    package = pytest.importorskip("anthropic", reason=REASON)
    return package.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def test_anthropic_runs_a_tool(anthropic):
    options = {"model": "any", "max_tokens": 300, "tools": [TOOL], "system": "Be short."}
    first = anthropic.messages.create(messages=QUESTION, **options)
    said, call = first.content
    assert (first.stop_reason, said.text, call.name) == ("tool_use", "Hm.", "weather")
    assert call.input == {"city": "Rom"} and first._request_id.startswith("req_")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    history = [*QUESTION, {"role": "assistant", "content": first.content}]
    second = anthropic.messages.create(
        messages=[*history, {"role": "user", "content": [result]}], **options
    )
    assert [block.text for block in second.content] == ["It rains."]
    assert second.stop_reason == "end_turn" and second.usage.output_tokens > 0
    counted = anthropic.messages.count_tokens(
        model="any", messages=QUESTION, tools=[TOOL], system="Be short."
    )
    usage = first.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_anthropic_streams_a_call_and_thoughts(anthropic, server):
    server.answer = lambda prompt: f"<think>Why?</think>Hm.\n{CALL}"
    options = {"model": "any", "max_tokens": 300, "tools": [TOOL], "messages": QUESTION}
    with anthropic.messages.stream(thinking={"type": "adaptive"}, **options) as stream:
        texts = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert texts == "Hm." and message.stop_reason == "tool_use"
    thought, said, call = message.content
    assert (thought.thinking, said.text, call.input) == ("Why?", "Hm.", {"city": "Rom"})
    assert thought.signature and message.usage.output_tokens > 0


def test_anthropic_continues_a_message(anthropic, server):
    server.answer = lambda prompt: " rains. End"
    messages = [*QUESTION, {"role": "assistant", "content": "It"}]
    options = {"model": "any", "max_tokens": 300, "stop_sequences": [" End"]}
    found = anthropic.messages.create(messages=messages, **options)
    assert (found.content[0].text, found.stop_reason) == (" rains.", "stop_sequence")
    assert found.stop_sequence == " End" and server.prompts[-1].endswith("[assistant]It")


def test_anthropic_raises_its_own_errors(anthropic):
    package = pytest.importorskip("anthropic", reason=REASON)
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A"}}
    ask = partial(anthropic.messages.create, model="any", max_tokens=9)
    with pytest.raises(package.BadRequestError, match="images are not supported") as caught:
        ask(messages=[{"role": "user", "content": [image]}])
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(package.BadRequestError, match="prompt is too long"):
        ask(messages=[{"role": "user", "content": "x " * LENGTH}])
    (model,) = anthropic.models.list()
    assert model.id == "tiny"


# pydantic-ai --------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", ("OpenAIChatModel", "OpenAIResponsesModel"))
def test_pydantic_ai_has_tools_beside_a_native_output(server, api):
    package = pytest.importorskip("pydantic_ai", reason=REASON)
    models = pytest.importorskip("pydantic_ai.models.openai", reason=REASON)
    providers = pytest.importorskip("pydantic_ai.providers.openai", reason=REASON)

    class Weather(BaseModel):
        city: str
        rain: bool

    answer = '{"city": "Rom", "rain": true}'
    server.answer = lambda prompt: answer if "[tool]rain" in prompt else CALL
    provider = providers.OpenAIProvider(base_url=f"{server.url}/v1", api_key="none")
    model = getattr(models, api)("any", provider=provider)
    agent = package.Agent(model, output_type=package.NativeOutput(Weather), tools=[weather])
    assert agent.run_sync("Weather?").output == Weather(city="Rom", rain=True)


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

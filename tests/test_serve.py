"""The server with its clients (openai, httpx, a browser) and the embedded model in fp32."""

import asyncio
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Literal

import jsonschema
import pydantic
import pytest
import torch
from conftest import any_text
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from local_server import LocalServer, httpx, openai
from prometheus_client.parser import text_string_to_metric_families

from chat_template import ChatTemplate
from generate import generate, load_model
from model import Transformer
from runtime.batch import WAYS
from runtime.sampling import Sampling
from runtime.session import Session
from scripts.capture_page import Browser, wait_until
from serve import bind, build_parser, check_options
from serve import main as serve
from server import connections
from server.answers import Finished, TextDelta
from server.app import run_server
from server.errors import APIError
from server.messages import MessagesBody
from server.plan import Limits, read_request
from server.responses import ResponsesBody
from server.schema import ChatCompletionBody, CompletionBody
from server.streams import EventQueue, Mailbox, stream_chunks

ROOT = Path(__file__).parents[1]
PROMPT = "def read_lines(path):\n"
LENGTH = 256
JSON = {"Content-Type": "application/json"}
LIMITS = Limits(LENGTH, 4096)
ALONE = "--max_batch", "1"
pytestmark = pytest.mark.usefixtures("few_threads")


class Running(LocalServer):
    """A server, and requests with defaults."""

    def __init__(self, directory, **settings):
        super().__init__(directory, LENGTH, **settings)

    def complete(self, prompt=PROMPT, **options):
        return super().complete(prompt, **options)

    def chat(self, content=PROMPT, **options):
        messages = [{"role": "user", "content": content}]
        return super().chat(messages, **{"max_tokens": 12, **options})

    def metric(self, name: str) -> float:
        return read_metric(self.url, name)


def read_metric(url: str, name: str) -> float:
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    (value,) = [sample.value for sample in samples if sample.name == f"moe_fast_{name}"]
    return value


@pytest.fixture(scope="module")
def running(directory, few_threads):
    running = Running(directory)
    yield running
    running.close()


@pytest.fixture
def start(directory, running):
    """Start servers with other settings. Those of one worker share its process."""
    started = []

    def make(**options) -> Running:
        pool = None if "workers" in options else running.pool
        started.append(Running(directory, pool=pool, **options))
        return started[-1]

    yield make
    for running in started:
        running.close()


@pytest.fixture(scope="module")
def alone(directory, tokenizer, few_threads):
    """(prompt, tokens, Sampling) -> the result of generate, without a server."""
    session = Session(load_model(directory, "cpu", torch.float32), LENGTH)

    def answer(prompt, count=12, sampling=None):
        if sampling is None:
            return greedy(prompt, count)
        session.reset()
        return generate(session, tokenizer, prompt, count, sampling)

    @cache
    def greedy(prompt, count):
        return answer(prompt, count, Sampling(temperature=0))

    return answer


@pytest.fixture
def slowly(monkeypatch):
    """Slow each pass of the model to at least 20 ms."""
    forward = Transformer.forward

    def slow(*arguments, **options):
        time.sleep(0.02)
        return forward(*arguments, **options)

    monkeypatch.setattr(Transformer, "forward", slow)


# Answers --------------------------------------------------------------------------------------


def test_a_completion_equals_generate(running, alone):
    expected, found = alone(PROMPT), running.complete(temperature=0)
    assert found.choices[0].text == expected["text"] and found.choices[0].finish_reason == "length"
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (
        expected["prompt_tokens"],
        12,
    )
    ids = running.tokenizer.encode(PROMPT)
    assert running.complete(ids, temperature=0).choices[0].text == expected["text"]
    assert running.complete([PROMPT], temperature=0).choices[0].text == expected["text"]


def test_a_chat_without_a_template_is_continued(running, alone):
    expected = alone(PROMPT)["text"]
    assert running.chat(temperature=0).choices[0].message.content == expected
    parts = [{"type": "text", "text": PROMPT}]
    found = running.chat(parts, temperature=0, max_completion_tokens=3, max_tokens=openai.omit)
    assert (
        expected.startswith(found.choices[0].message.content) and found.usage.completion_tokens == 3
    )


def test_a_chat_goes_through_the_template(tokenizer, monkeypatch):
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "templates", {"default": ChatTemplate(source, {}, ())})
    monkeypatch.setattr(tokenizer, "has_chat_template", True)
    body = json.dumps(
        {"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}
    ).encode()
    generation = read_request(body, True, tokenizer, LIMITS).generations[0]
    assert tokenizer.decode(generation.prompt_ids).strip() == "[system]a[user]b"
    assert generation.max_new_tokens == LENGTH - len(generation.prompt_ids) and generation.reply


@pytest.mark.parametrize("kind", ("chat", "complete"))
def test_a_stream_adds_up_to_the_whole_answer(running, kind):
    ask = getattr(running, kind)
    options = {"temperature": 0, "max_tokens": 20, "logprobs": True if kind == "chat" else 1}
    whole = ask(**options)
    chunks = list(ask(stream=True, stream_options={"include_usage": True}, **options))
    *parts, last = chunks
    assert last.choices == [] and last.usage == whole.usage.model_copy(
        update={"prompt_tokens_details": last.usage.prompt_tokens_details}
    )
    assert all(part.usage is None for part in parts)
    assert len({chunk.id for chunk in chunks}) == 1
    assert parts[-1].choices[0].finish_reason == "length"
    if kind == "chat":
        assert parts[0].choices[0].delta.role == "assistant"
        text = "".join(part.choices[0].delta.content or "" for part in parts)
        found = [part.choices[0].logprobs for part in parts if part.choices[0].logprobs]
        logprobs = [token for part in found for token in part.content]
        assert text == whole.choices[0].message.content
        assert logprobs == whole.choices[0].logprobs.content
    else:
        text = "".join(part.choices[0].text for part in parts)
        logprobs = [t for part in parts for t in part.choices[0].logprobs.token_logprobs]
        assert text == whole.choices[0].text
        assert logprobs == whole.choices[0].logprobs.token_logprobs
    assert len(logprobs) == 20 and len(parts) > 10


def test_a_stop_text_ends_the_answer_and_is_not_sent(running, alone):
    text = alone(PROMPT, 20)["text"]
    stop = text[len(text) // 2 :][:6]
    expected = text[: text.find(stop)]
    found = running.complete(temperature=0, max_tokens=20, stop=["never there", stop], logprobs=0)
    choice = found.choices[0]
    assert (choice.text, choice.finish_reason) == (expected, "stop")
    assert "".join(choice.logprobs.tokens).startswith(expected) and choice.logprobs.text_offset[
        -1
    ] < len(expected)
    parts = [
        c.choices[0] for c in running.complete(temperature=0, max_tokens=20, stop=stop, stream=True)
    ]
    assert "".join(part.text for part in parts) == expected and parts[-1].finish_reason == "stop"


def is_in_prompt(session) -> bool:
    """Whether the step of a short prompt runs a token before its last one."""
    return session.cached[0] < len(session.ids[0]) - 1


def test_an_incomplete_character_is_held_back(running):
    """A character whose bytes are separate tokens is sent as one piece."""
    ids = iter(running.tokenizer.encode("é€", bos=False))
    assert len(list(running.tokenizer.encode("é€", bos=False))) > 2
    session = running.session
    choose_tokens = session.choose_tokens

    def forced(state, *rest):
        choose_tokens(state, *rest)
        if not is_in_prompt(session):
            state.token.fill_(next(ids))

    session.choose_tokens = forced
    try:
        parts = [c.choices[0].text for c in running.complete("x", max_tokens=5, stream=True)]
    finally:
        del running.session.choose_tokens
    assert [part for part in parts if part.strip()] == ["é", "€"]


def test_reasoning_is_sent_apart(directory, tmp_path):
    """The template opens the block, and the tokenizer has no tokens for its markers."""
    model = Path(shutil.copytree(directory, tmp_path / "model"))
    (model / "chat_template.jinja").write_text("{{ messages[-1].content }}<think>{# </think> #}")
    running = Running(model, options=("--speculate", "off"))  # the test forces tokens of steps
    session = running.session
    choose_tokens = session.choose_tokens

    def forced(state, *rest):
        choose_tokens(state, *rest)
        if not is_in_prompt(session):
            state.token.fill_(next(ids))

    session.choose_tokens = forced
    text = "so é </th </think>\nYes."
    try:
        script = running.tokenizer.encode(text, bos=False)
        ids = iter(script)
        whole = running.chat(max_tokens=len(script))
        ids = iter(script)
        options = {"stream_options": {"include_usage": True}}
        *parts, last = running.chat(max_tokens=len(script), stream=True, **options)
        ids = iter(script)
        completion = running.complete(max_tokens=len(script))
    finally:
        running.close()
    message, deltas = whole.choices[0].message, [part.choices[0].delta for part in parts]
    assert (message.reasoning_content.strip(), message.content) == ("so é </th", "Yes.")
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(thoughts) == message.reasoning_content
    assert "".join(delta.content or "" for delta in deltas) == message.content
    counted = whole.usage.completion_tokens_details.reasoning_tokens
    assert 0 < counted < len(script)
    assert last.usage.completion_tokens_details.reasoning_tokens == counted
    assert completion.choices[0].text.strip() == text
    assert completion.usage.completion_tokens_details is None


def test_the_same_seed_gives_the_same_text(running, alone):
    texts = [running.complete(temperature=1.2, seed=seed).choices[0].text for seed in (7, 7, 8, -2)]
    assert texts[0] == texts[1] and len(set(texts)) == 3
    assert texts[0] == alone(PROMPT, 12, Sampling(temperature=1.2, seed=7))["text"]


def test_logprobs_match_the_model(running, directory):
    """Logprobs equal those of one pass over the whole text."""
    found = running.chat(temperature=0.9, seed=3, logprobs=True, top_logprobs=5, max_tokens=10)
    content = found.choices[0].logprobs.content
    ids, model = running.session.ids[0], load_model(directory, "cpu", torch.float32)
    model.setup_cache(1, 64)
    logits = model(torch.tensor([ids]), torch.arange(len(ids))[None], all_positions=True)[0, -11:-1]
    expected = logits.log_softmax(dim=-1)
    for entry, row, id in zip(content, expected, ids[-10:], strict=True):
        assert entry.logprob == pytest.approx(row[id].item(), abs=1e-3)
        assert [t.logprob for t in entry.top_logprobs] == pytest.approx(
            row.topk(5).values.tolist(), abs=1e-3
        )
    assert "".join(entry.token for entry in content) == found.choices[0].message.content


@pytest.mark.parametrize(
    ("options", "top"), (({"top_logprobs": 3}, 3), ({}, 0)), ids=("top_logprobs", "include")
)
def test_a_response_has_the_logprobs_of_a_chat(running, options, top):
    shared = {"temperature": 0.9, "extra_body": {"seed": 3}}
    chat = running.chat(logprobs=True, top_logprobs=top, max_tokens=10, **shared).choices[0]
    expected = [token.model_dump() for token in chat.logprobs.content]
    options |= {"include": ["message.output_text.logprobs", "reasoning.encrypted_content"]}
    ask = partial(running.client.responses.create, model="any", input=PROMPT, max_output_tokens=10)
    whole = ask(**shared, **options)
    part = whole.output[0].content[0]
    assert part.text == chat.message.content and whole.top_logprobs == top
    assert [token.model_dump() for token in part.logprobs] == expected
    events = list(ask(stream=True, **shared, **options))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    done = next(event for event in events if event.type == "response.output_text.done")
    for found in ([entry for delta in deltas for entry in delta.logprobs], done.logprobs):
        assert [entry.to_dict() for entry in found] == expected
    assert events[-1].response.output[0].content[0].logprobs == part.logprobs
    plain = ask(**shared).output[0].content[0]
    assert plain.logprobs == [] and plain.text == part.text


def test_routing_matches_the_pass_that_chose_the_token(running, directory):
    whole = (
        running.complete(temperature=0, max_tokens=6, extra_body={"routing": True})
        .choices[0]
        .moe_fast
    )
    chunks = running.complete(
        temperature=0, max_tokens=6, stream=True, extra_body={"routing": True}
    )
    streamed = [chunk.choices[0].moe_fast for chunk in chunks]
    for name in ("tokens", "experts", "weights"):
        assert [entry for part in streamed for entry in part[name]] == whole[name]
    model = load_model(directory, "cpu", torch.float32)
    model.setup_cache(1, 64)
    ids = running.session.ids[0][:-1]
    _, experts, weights = model(
        torch.tensor([ids]), torch.arange(len(ids))[None], return_routing=True
    )
    assert whole["experts"] == experts[:, -6:].transpose(0, 1).tolist()
    torch.testing.assert_close(
        torch.tensor(whole["weights"]), weights[:, -6:].transpose(0, 1), atol=1e-3, rtol=0
    )


def test_the_prefix_in_the_cache_is_reused(running):
    before = running.metric("cached_tokens_total")
    running.complete("import os\nimport sys\n", temperature=0)
    found = running.complete("import os\nimport sys\nimport re\n", temperature=0)
    shared = len(running.tokenizer.encode("import os\nimport sys\n"))
    assert found.usage.prompt_tokens_details.cached_tokens >= shared - 1
    assert running.metric("cached_tokens_total") - before >= shared - 1


@pytest.mark.parametrize(
    "options",
    (
        "--gpu_experts 2",
        "--gpu_experts 4 --offload_compute cpu",
        "--gpu_memory 35MB",
    ),
)
def test_offloading_gives_the_same_text_and_is_counted(start, alone, options):
    running = start(options=["--offload", *options.split()])
    assert running.metric("expert_hits_total") == 0
    found = running.complete(temperature=0, logprobs=0)
    assert found.choices[0].text == alone(PROMPT)["text"]
    names = "hits", "misses", "on_cpu", "bytes"
    hits, misses, on_cpu, copied = [running.metric(f"expert_{name}_total") for name in names]
    decoded = 11 * 8 * 2  # tokens, layers, active experts
    prompt = hits + misses + on_cpu - decoded
    assert 8 * 2 <= prompt <= 8 * 8 and hits < decoded + prompt
    size = running.session.model.layers[0].ffn.experts.storage.blobs.shape[1]
    assert misses > 0 and copied == misses * size
    assert (on_cpu > 0) == ("cpu" in options)
    text = "".join(
        c.choices[0].text for c in running.complete("import", temperature=0, stream=True)
    )
    assert text == alone("import")["text"]
    assert running.metric("expert_hits_total") > hits


def test_a_resident_model_has_no_expert_metrics(running):
    assert "moe_fast_expert" not in httpx.get(f"{running.url}/metrics").text


def test_metrics_are_counters_and_gauges(running):
    families = list(text_string_to_metric_families(httpx.get(f"{running.url}/metrics").text))
    families = [family for family in families if not family.name.startswith("vllm:")]
    types = {family.name.removeprefix("moe_fast_"): family.type for family in families}
    assert types.pop("waiting") == types.pop("running") == "gauge" and set(types.values()) == {
        "counter"
    }
    assert types.keys() == {
        "responses",
        "answers",
        "failures",
        "dropped",
        "prompt_tokens",
        "cached_tokens",
        "new_tokens",
        "drafted_tokens",
        "accepted_tokens",
        "answer_seconds",
        "first_token_seconds",
    }
    assert {label for f in families for s in f.samples for label in s.labels} <= {"status"}


def test_models_health_and_unknown_pages(running):
    assert [model.id for model in running.client.models.list()] == ["tiny"]
    assert httpx.get(f"{running.url}/health").json() == {"status": "ok"}
    missing = httpx.get(f"{running.url}/v1/nothing")
    assert missing.status_code == 404 and "/v1/nothing" in missing.json()["error"]["message"]
    (model,) = httpx.get(f"{running.url}/v1/models").json()["data"]
    assert (model["format"], model["template_variables"]) == (None, [])  # LocalServer gives none
    page = httpx.get(running.url)
    assert page.headers["content-type"].startswith("text/html") and "http://" not in page.text


def test_the_pages_files_have_their_types(running):
    types = {
        "main.js": "text/javascript",
        "base.css": "text/css",
        "icon.svg": "image/svg+xml",
        "vendor/katex/katex.min.js": "text/javascript",
        "vendor/katex/fonts/KaTeX_Main-Regular.woff2": "font/woff2",
        "vendor/highlight/LICENSE.txt": "text/plain",
    }
    for name, kind in types.items():
        found = httpx.get(f"{running.url}/page/{name}")
        assert found.status_code == 200 and found.headers["content-type"].startswith(kind), name
        assert found.headers["x-content-type-options"] == "nosniff"
    for name in ("", "vendor", "vendor/", "../app.py", "%2e%2e/app.py", "vendor/../../app.py"):
        assert httpx.get(f"{running.url}/page/{name}").status_code == 404, name


# Answers side by side -------------------------------------------------------------------------


def test_answers_decode_side_by_side_and_are_those_given_alone(start, alone, monkeypatch):
    running, sizes = start(), set()
    decode = running.session.decode
    monkeypatch.setattr(
        running.session, "decode", lambda size, n: (sizes.add(size), decode(size, n))
    )
    requests = [(f"def f{n}(x):\n", {"seed": n, "temperature": 0.9 * (n % 2)}) for n in range(6)]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda r: running.complete(r[0], **r[1]), requests))
    for (prompt, options), answer in zip(requests, found, strict=True):
        assert answer.choices[0].text == alone(prompt, 12, Sampling(**options))["text"]
    assert max(sizes) > 2


def test_several_answers_to_a_prompt_have_seeds_of_their_own(running, alone):
    options = {"temperature": 0.9}
    found = running.complete(n=3, seed=5, **options)
    expected = [alone(PROMPT, 12, Sampling(seed=5 + k, **options)) for k in range(3)]
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    assert [choice.text for choice in found.choices] == [result["text"] for result in expected]
    assert len({choice.text for choice in found.choices}) > 1
    usage = found.usage
    assert usage.prompt_tokens == expected[0]["prompt_tokens"]
    assert usage.completion_tokens == sum(result["new_tokens"] for result in expected)


def test_several_prompts_in_one_request(running, alone):
    prompts = ["def a(", "class B:", "import "]
    found = running.complete(prompts, temperature=0, n=2)
    expected = [alone(prompt, 12, Sampling(temperature=0)) for prompt in prompts]
    texts = [result["text"] for result in expected for _ in range(2)]
    assert [choice.text for choice in found.choices] == texts
    assert found.usage.prompt_tokens == sum(result["prompt_tokens"] for result in expected)


def test_streams_of_several_answers_name_the_answer(running, alone):
    options = {"temperature": 0.9}
    texts, reasons = {}, {}
    stream = running.chat(
        n=3, seed=5, stream=True, stream_options={"include_usage": True}, **options
    )
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    whole = running.chat(n=3, seed=5, **options)
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_a_conversation_survives_other_requests(running):
    talk = [{"role": "user", "content": PROMPT * 6}]
    client, known = running.client.chat.completions, 0
    for turn in range(3):
        found = client.create(model="any", messages=talk, max_tokens=4, temperature=0)
        assert found.usage.prompt_tokens_details.cached_tokens >= known
        known = found.usage.prompt_tokens
        for n in range(3):  # titles, tags, ...
            running.complete(f"A title {turn} {n}: {PROMPT}", max_tokens=1)
        talk.append({"role": "assistant", "content": found.choices[0].message.content})
        talk.append({"role": "user", "content": "x = 1\n"})


# What a request asks of the logits --------------------------------------------------------------


def test_a_bias_forbids_and_forces_tokens(running):
    id = running.tokenizer.encode("x", bos=False)[-1]
    forced = running.complete(max_tokens=3, temperature=0, logit_bias={str(id): 100})
    assert forced.choices[0].text == "xxx"
    plain = running.complete(temperature=0).choices[0].text
    first = running.tokenizer.encode(plain, bos=False)[0]
    other = running.complete(temperature=0, logit_bias={str(first): -100}).choices[0].text
    assert other != plain


def test_penalties_are_those_of_the_library(running, alone):
    penalties = {"frequency_penalty": 1.5, "presence_penalty": 0.5}
    found = running.complete(max_tokens=24, temperature=0, **penalties).choices[0].text
    assert found == alone(PROMPT, 24, Sampling(temperature=0, **penalties))["text"]
    assert found != alone(PROMPT, 24, Sampling(temperature=0))["text"]


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", (0, 0.8))
def test_answers_follow_a_json_schema(running, temperature):
    schema = {"name": "person", "schema": PERSON, "strict": True}
    found = running.chat(
        max_tokens=200,
        temperature=temperature,
        seed=0,
        response_format={"type": "json_schema", "json_schema": schema},
    ).choices[0]
    assert found.finish_reason == "stop"
    jsonschema.validate(json.loads(found.message.content), PERSON)


def test_formats_of_neighbors_differ(running, alone):
    def ask(n: int) -> str:
        schema = {"name": "n", "schema": {"const": n}}
        format = {"type": "json_schema", "json_schema": schema} if n % 2 else {"type": "text"}
        return (
            running.complete(
                f"{n} = ", temperature=0, max_tokens=10, extra_body={"response_format": format}
            )
            .choices[0]
            .text
        )

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(ask, range(4)))
    for n, text in enumerate(found):
        expected = str(n) if n % 2 else alone(f"{n} = ", 10, Sampling(temperature=0))["text"]
        assert text == expected


@pytest.mark.parametrize("api", ("chat/completions", "completions", "responses"))
def test_other_servers_fields_restrict_answers(running, api):
    name = {"chat/completions": "messages", "completions": "prompt", "responses": "input"}[api]
    prompt = [{"role": "user", "content": "x"}] if name == "messages" else "x"
    body = {name: prompt, "seed": 2, "guided_choice": ["tomorrow", "never"]}
    found = running.post(api, json=body).json()
    if api == "responses":
        text = found["output"][0]["content"][0]["text"]
    else:
        (choice,) = found["choices"]
        text = choice["text"] if api == "completions" else choice["message"]["content"]
    assert text in ("tomorrow", "never")


def test_openais_parse_returns_an_object(running):
    class Person(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid")

        age: Annotated[int, pydantic.Field(ge=0, le=120)]
        tags: Annotated[list[Literal["a", "b"]], pydantic.Field(max_length=3)]

    messages = [{"role": "user", "content": PROMPT}]
    found = running.client.chat.completions.parse(
        model="any", messages=messages, response_format=Person, max_tokens=150, seed=2
    )
    assert isinstance(found.choices[0].message.parsed, Person)


def test_any_json_object(running):
    found = running.chat(
        max_tokens=200, temperature=0, response_format={"type": "json_object"}
    ).choices[0]
    assert found.message.content.startswith("{")
    if found.finish_reason == "stop":
        assert isinstance(json.loads(found.message.content), dict)


# Load, limits and disconnects -----------------------------------------------------------------


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("count", (12, pytest.param(200, marks=pytest.mark.slow)))
def test_concurrent_requests_get_their_own_answers(running, alone, count):
    words = [f"{chr(97 + n % 26)}{n} = {n * 37 % 1000}\n" for n in range(count)]
    expected = {word: alone(word, 3)["text"] for word in words[:: max(4, count // 25)]}

    async def ask_all(words: list[str]) -> list[tuple]:
        client = openai.AsyncOpenAI(
            base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=120
        )

        async def ask(word: str, n: int) -> tuple:
            options = {"model": "any", "prompt": word, "max_tokens": 3, "temperature": 0}
            if n % 3:
                answer = await client.completions.create(**options)
                return word, answer.choices[0].text, answer.id
            chunks = [
                chunk async for chunk in await client.completions.create(stream=True, **options)
            ]
            return word, "".join(chunk.choices[0].text for chunk in chunks), chunks[0].id

        return await asyncio.gather(*(ask(word, n) for n, word in enumerate(words)))

    found = asyncio.run(ask_all(words))
    before = rss()  # after the client has loaded its libraries and made its buffers
    found += asyncio.run(ask_all(words[: count // 2]))
    assert rss() - before < 20e6
    assert len({id for _, _, id in found}) == count + count // 2
    first = {word: text for word, text, _ in found[:count]}
    assert first.keys() == set(words) and all(
        first[word] == text for word, text, _ in found[count:]
    )
    assert {word: first[word] for word in expected} == expected
    assert not running.scheduler.queue


def test_a_request_of_many_answers_keeps_nobody_waiting(start, slowly, alone):
    running = start(options=("--max_batch", "2"))
    prompts = [f"{PROMPT}{letter}" for letter in "abc"]
    large = running.complete(prompts, n=4, max_tokens=3, seed=3).choices  # alone
    found: dict[str, list] = {}

    def ask() -> None:
        found["large"] = running.complete(prompts, n=4, max_tokens=3, seed=3).choices

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: len(running.scheduler.clients) == 2)
    small = running.complete(temperature=0, max_tokens=3).choices[0].text
    (waiting,) = running.scheduler.queue  # "large", whose other answers have not begun
    assert waiting.begun < 8 and thread.is_alive() and small == alone(PROMPT, 3)["text"]
    thread.join(60)
    assert [(choice.index, choice.text) for choice in found["large"]] == [
        (choice.index, choice.text) for choice in large
    ]
    assert running.metric("running") == running.metric("waiting") == 0
    assert running.metric("answers_total") == 25


def test_a_full_queue_returns_429_with_retry_after(start, slowly):
    running = start(max_queue=2, options=ALONE)
    waiting = [
        threading.Thread(target=running.complete, kwargs={"max_tokens": count})
        for count in (20, 1, 1)
    ]
    waiting[0].start()
    wait_until(lambda: running.scheduler.clients)
    for thread in waiting[1:]:
        thread.start()
    wait_until(lambda: len(running.scheduler.queue) == 2)
    refused = running.post(json={"prompt": "x"})
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    with pytest.raises(openai.RateLimitError, match="2 requests are waiting"):
        running.complete()
    for thread in waiting:
        thread.join()
    assert running.complete(max_tokens=1).usage.completion_tokens == 1


@pytest.mark.parametrize("streaming", (True, False))
def test_a_disconnect_stops_the_generation(start, slowly, streaming):
    running, passes = start(), []
    wrapped = running.session.run_model
    running.session.run_model = lambda *arguments: (
        passes.append(time.monotonic()),
        wrapped(*arguments),
    )[1]
    body = json.dumps({"prompt": PROMPT, "max_tokens": 200, "stream": streaming}).encode()
    with socket.create_connection(("127.0.0.1", int(running.url.rsplit(":")[-1]))) as connection:
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        )
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: len(passes) > 5)
    left = time.monotonic()
    wait_until(lambda: running.metric("answers_total") == 1)
    assert running.metric("new_tokens_total") < 100
    # The pass in flight and one more; 0.1 s for the disconnect to arrive.
    assert sum(moment > left + 0.1 for moment in passes) <= 2
    assert running.complete(max_tokens=2).usage.completion_tokens == 2


def test_a_disconnect_leaves_the_queue(start, slowly):
    running = start(max_queue=1, options=ALONE)
    first = threading.Thread(target=running.complete, kwargs={"max_tokens": 30})
    first.start()
    wait_until(lambda: running.scheduler.clients)
    with pytest.raises(openai.APITimeoutError):
        running.complete(timeout=0.2)
    wait_until(lambda: not running.scheduler.queue)
    assert running.metric("dropped_total") == 1
    first.join()


def test_the_time_limit_cuts_an_answer(start, slowly):
    running = start(time_limit=0.3)
    found = running.complete(max_tokens=200, temperature=0)
    assert found.choices[0].finish_reason == "length" and found.usage.completion_tokens < 50


def test_a_closing_server_sends_clients_an_error(directory, slowly):
    running, errors = Running(directory), []

    def ask():
        try:
            list(running.complete(max_tokens=200, temperature=0, stream=True))
        except openai.APIError as error:
            errors.append(error.message)

    client = threading.Thread(target=ask)
    client.start()
    wait_until(lambda: running.session.ids[0])
    running.close()
    client.join(20)
    assert len(errors) == 1 and errors[0].endswith("the server is ending")


def test_an_exception_fails_one_answer_only(running, monkeypatch, capfd):
    monkeypatch.setattr(Session, "start_row", lambda *_: 1 / 0)
    with pytest.raises(openai.InternalServerError, match="ZeroDivisionError"):
        running.complete()
    monkeypatch.undo()
    assert running.complete(max_tokens=2).usage.completion_tokens == 2
    assert "ZeroDivisionError" in capfd.readouterr().err


@pytest.mark.parametrize("path", ("completions", "messages"))
def test_an_exception_before_the_answer_is_json(running, monkeypatch, path):
    monkeypatch.setattr(running.scheduler, "submit", lambda request: 1 / 0)
    given = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "max_tokens": 1}
    failed = running.post(path, json=given)
    assert failed.status_code == 500
    assert failed.json()["error"]["message"] == "the server failed: ZeroDivisionError"
    monkeypatch.undo()
    assert running.post(path, json=given).status_code == 200


@pytest.mark.parametrize(
    "path, builder",
    (
        ("completions", "server.answers.ResponseBuilder"),
        ("messages", "server.message_blocks.MessageBuilder"),
        ("responses", "server.response_items.ResponsesBuilder"),
    ),
)
def test_an_exception_within_a_stream_is_its_last_event(
    running, monkeypatch, caplog, path, builder
):
    monkeypatch.setattr(f"{builder}.end", lambda *_: 1 / 0)
    given = {
        "completions": {"prompt": "x", "max_tokens": 2},
        "messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
        "responses": {"input": "x", "max_output_tokens": 16},
    }[path] | {"stream": True}
    answer = running.post(path, json=given)
    assert answer.status_code == 200
    last = json.loads(answer.text.strip().split("data: ")[-1])
    assert "the server failed: ZeroDivisionError" in json.dumps(last)
    assert "ZeroDivisionError" in caplog.text
    monkeypatch.undo()
    assert "ZeroDivisionError" not in running.post(path, json=given).text


# Refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    (
        (
            {"prompt": "x" * 1000},
            r"maximum context length is 256 tokens. However, your prompt resulted in \d+ tokens",
        ),
        ({"best_of": 2}, "best_of 2: all answers are returned"),
        ({"n": 9}, "n 9: it must be a whole number from 1 to 8"),
        ({"temperature": "hot"}, "temperature 'hot': it must be from 0 to 2"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"top_p": 1.5}, "top_p 1.5"),
        ({"max_tokens": 0}, "max_tokens 0"),
        ({"max_tokens": True}, "max_tokens True"),
        ({"top_k": 10**400}, "top_k 1000"),
        ({"stop": [""]}, "stop must be"),
        ({"stop": ["a"] * 17}, "stop must be"),
        ({"min_tokens": -1}, "min_tokens -1: it must be a whole number from 0"),
        ({"max_tokens": -2}, "max_tokens -2: it must be a whole number from 1"),
        ({"suffix": "x"}, "no tokens for fill-in-the-middle"),
        ({"suffix": "x", "prompt": [5]}, "suffix needs a prompt that is a text"),
        ({"stop": "a" * 501}, "stop must be"),
        ({"prompt": ""}, "there is no prompt"),
        ({"prompt": ["a"] * 65}, "65 prompts in one request: send up to 64"),
        ({"prompt": [5, -1]}, "token ids must be"),
        ({"logprobs": 21}, "from 0 to 20"),
        ({"frequency_penalty": 2.5}, "frequency_penalty 2.5: it must be from -2 to 2"),
        ({"presence_penalty": 2.5}, "presence_penalty 2.5: it must be from -2 to 2"),
        ({"logit_bias": {"5": 101}}, "logit_bias must be"),
        ({"logit_bias": {"4096": 1}}, "logit_bias: token ids must be from 0 to 4095"),
        ({"logit_bias": {"x": 1}}, "logit_bias: token ids must be"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias: token ids must be"),
        ({"echo": True, "logprobs": 1}, "echo with logprobs is not supported"),
        ({"echo": 1}, "echo 1: it must be true or false"),
        ({"stream": 1}, "stream 1: it must be true or false"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"strict": True, "schema": {"uniqueItems": True}},
                }
            },
            "not supported",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format must be"),
        ({"grammar": 'root ::= root "a"'}, "grammar: .* allows no text"),
        ({"regex": "[a&&b]"}, "regex: .* allows no text"),
        ({"stream_options": []}, "stream_options"),
    ),
)
def test_a_bad_request_is_refused_in_one_line(running, change, message):
    found = running.post(content=json.dumps({"prompt": PROMPT, **change}), headers=JSON)
    assert found.status_code == 400
    error = found.json()["error"]
    assert (
        re.search(message, error["message"])
        and "\n" not in error["message"]
        and len(error["message"]) < 300
    )
    assert error["type"] == "invalid_request_error"


def test_half_of_a_surrogate_pair_becomes_a_character(running):
    """Programs that cut a text by UTF-16's units send it, as an escape, which is legal JSON."""
    cut, whole = (
        running.post(content=json.dumps({"prompt": text, "temperature": 0}), headers=JSON).json()
        for text in ("def \ud83d(\U0001f600):", "def \ufffd(\U0001f600):")
    )
    assert cut["choices"] == whole["choices"]
    assert cut["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    "body", (b"", b"{", b"[]", b"\xff", b"[" * 50_000, b'{"prompt": 1' + b"0" * 5000 + b"}")
)
def test_a_body_that_is_no_object_is_refused(running, body):
    found = running.post(content=body, headers=JSON)
    assert found.status_code == 400 and found.json()["error"]["message"].startswith("the body")


@pytest.mark.parametrize(
    "messages",
    (
        None,
        [],
        "hi",
        [1],
        [{"role": "user"}],
        [{"role": 1, "content": "a"}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
    ),
)
def test_bad_messages_are_refused(running, messages):
    found = running.post("chat/completions", json={"messages": messages})
    assert found.status_code == 400 and "message" in found.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    (
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, "tools"),
        ({"messages": [{"role": "user", "content": ""}]}, None),
        ({"prompt": 5}, "prompt"),
        ({}, None),
    ),
)
def test_what_cannot_be_tokenized_is_refused_in_one_line(running, body, param):
    found = httpx.post(f"{running.url}/tokenize", json=body)
    error = found.json()["error"]
    assert found.status_code == 400 and error["param"] == param
    assert "\n" not in error["message"] and "pydantic" not in error["message"]


def test_an_empty_chat_is_told_what_it_lacks(running):
    for content in ("", []):
        found = running.post(
            "chat/completions", json={"messages": [{"role": "user"} | {"content": content}]}
        )
        error = found.json()["error"]
        assert found.status_code == 400 and error["param"] == "messages"
        assert error["message"].startswith("the messages have no text")


def test_a_route_names_the_methods_that_it_allows(running):
    for method, path, allowed in (
        ("PUT", "/v1/models", {"GET", "HEAD"}),
        ("GET", "/v1/completions", {"POST"}),
        ("POST", "/health", {"GET", "HEAD"}),
    ):
        found = httpx.request(method, running.url + path)
        assert found.status_code == 405
        assert set(found.headers["allow"].split(", ")) == allowed
    found = httpx.get(f"{running.url}/{'a' * 9_999}")
    assert found.status_code == 404 and len(found.json()["error"]["message"]) < 180


def test_the_client_raises_its_own_errors(running):
    with pytest.raises(openai.BadRequestError) as caught:
        running.complete("x" * 1000)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "prompt"
    with pytest.raises(openai.BadRequestError, match="maximum context length is 256") as caught:
        running.chat("x" * 1000)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "messages"
    with pytest.raises(openai.BadRequestError, match="maximum context length is 256") as caught:
        running.complete("x " * 40_000)  # refused by its length in bytes
    assert caught.value.code == "context_length_exceeded"


def test_max_tokens_is_clamped_to_the_free_context(running):
    found = running.complete(max_tokens=100_000, temperature=0, stop=["\n"])
    assert found.choices[0].finish_reason in ("stop", "length")
    body = json.dumps({"prompt": PROMPT, "max_tokens": 100_000}).encode()
    generation = read_request(body, False, running.tokenizer, LIMITS).generations[0]
    assert generation.max_new_tokens == LENGTH - len(generation.prompt_ids)


def test_what_clients_send_by_default_is_accepted(running):
    found = running.chat(
        max_tokens=1,
        user="me",
        store=False,
        metadata={"a": "b"},
        service_tier="auto",
        n=1,
        presence_penalty=0,
        frequency_penalty=0.0,
        logit_bias={},
        tools=[],
        parallel_tool_calls=True,
        reasoning_effort="low",
        response_format={"type": "text"},
        logprobs=False,
        extra_body={"top_k": -1, "chat_template_kwargs": {"enable_thinking": False}, "tools": []},
    )
    assert found.choices[0].finish_reason == "length"
    assert running.chat(max_tokens=1, extra_body={"top_k": 0}).usage.completion_tokens == 1


def test_body_size_content_type_and_host_are_checked(running):
    assert running.post(json={"prompt": "x" * 200_000}).status_code == 413
    assert (
        running.post(content=b'{"prompt": "x"}', headers={"Content-Type": "text/plain"}).status_code
        == 415
    )
    packed = running.post(content=b"x", headers=JSON | {"Content-Encoding": "gzip"})
    assert packed.status_code == 415 and "'gzip'" in packed.json()["error"]["message"]
    for coding in ("", "Identity"):
        headers = JSON | {"Content-Encoding": coding}
        assert running.post(content=b'{"prompt": "x"}', headers=headers).status_code == 200
    marked = running.post(content=b'\xef\xbb\xbf{"prompt": "x"}', headers=JSON)
    assert marked.status_code == 200  # a byte order mark
    elsewhere = running.post(json={"prompt": "x"}, headers={"Host": "evil.example"})
    assert elsewhere.status_code == 403 and "localhost" in elsewhere.json()["error"]["message"]
    assert running.post(json={"prompt": "x"}, headers={"Host": "[::1]:80"}).status_code == 200


def test_a_slow_body_gets_408(start, monkeypatch):
    monkeypatch.setattr("server.app.BODY_TIMEOUT", 0.3)
    running = start()
    with socket.create_connection(
        ("127.0.0.1", int(running.url.rsplit(":")[-1])), timeout=10
    ) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 408")


def narrow(running, monkeypatch, answers: int = 8, tokens: int = LENGTH - 8) -> socket.socket:
    """Connect to a server that has little memory for what this client does not read."""
    made = connections.TimedProtocol.connection_made

    def with_little_memory(protocol, transport):
        made(protocol, transport)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)

    monkeypatch.setattr(connections.TimedProtocol, "connection_made", with_little_memory)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    client.settimeout(20)
    client.connect(("127.0.0.1", int(running.url.rsplit(":", 1)[1])))
    body = {"prompt": "x", "max_tokens": tokens, "stream": True, "n": answers, "logprobs": 5}
    body = json.dumps(body).encode()
    client.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    return client


def test_a_client_that_never_reads_loses_its_place(start, monkeypatch):
    monkeypatch.setattr(connections, "READ_TIMEOUT", 0.5)
    running = start(max_requests=1)
    with narrow(running, monkeypatch) as client:
        client.recv(10)
        refused = running.post(json={"prompt": "x", "max_tokens": 1})
        assert refused.status_code == 429  # it has the only place
        end = time.monotonic() + 20
        while running.post(json={"prompt": "x", "max_tokens": 1}).status_code != 200:
            assert time.monotonic() < end
            time.sleep(0.1)
        with suppress(ConnectionError):
            while client.recv(1 << 16):  # what was sent, then the end
                pass


def test_a_client_that_reads_slowly_keeps_its_place(start, monkeypatch):
    """Each timeout it has read some bytes."""
    monkeypatch.setattr(connections, "READ_TIMEOUT", 0.3)
    with narrow(start(), monkeypatch, answers=3, tokens=100) as client:
        found, end = b"", time.monotonic() + 1
        while time.monotonic() < end:
            found += client.recv(2000)
            time.sleep(0.05)
        while not found.endswith(b"\r\n0\r\n\r\n"):
            found += client.recv(1 << 16)
        assert b"data: [DONE]" in found


def test_the_kernel_asks_whether_a_client_is_there(running, monkeypatch):
    """A client that has gone without closing its connection would be answered to the end."""
    asked = []
    ask = connections.ask_whether_alive
    monkeypatch.setattr(connections, "ask_whether_alive", lambda s: (ask(s), asked.append(s)))
    with httpx.Client() as client:
        assert client.get(f"{running.url}/health").status_code == 200
        (connection,) = asked
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if sys.platform == "linux":
            waits = connections.KEEPALIVE_COUNT * connections.KEEPALIVE_INTERVAL
            assert waits + connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60


def test_a_template_bomb_stops_nobody_else(directory, tmp_path):
    """Its client gets 400, another client gets an answer meanwhile, and closing takes no time."""
    model = Path(shutil.copytree(directory, tmp_path / "model"))
    bomb = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    choice = f"{{% if messages[0].content == 'bomb' %}}{bomb}{{% else %}}x{{% endif %}}"
    (model / "chat_template.jinja").write_text(choice)
    running = Running(model, workers=2)
    try:
        assert running.chat("warm", max_completion_tokens=1, max_tokens=openai.omit)
        refused = []

        def explode():
            try:
                running.chat("bomb", max_completion_tokens=1, max_tokens=openai.omit)
            except openai.APIError as error:
                refused.append(str(error))

        thread = threading.Thread(target=explode)
        thread.start()
        time.sleep(0.3)
        begin = time.monotonic()
        assert running.complete(max_tokens=1).usage.completion_tokens == 1
        assert time.monotonic() - begin < 1.5
        thread.join(10)
        assert refused and "400" in refused[0] and "over 2 s" in refused[0]
        thread = threading.Thread(target=explode)
        thread.start()
        time.sleep(0.3)
    finally:
        begin = time.monotonic()
        running.close()
    assert time.monotonic() - begin < 4
    thread.join(10)


def test_a_server_that_cannot_tokenize_says_so(start):
    running = start(workers=2)
    directory, running.pool.directory = running.pool.directory, Path("/gone")
    for process in running.pool.processes:
        os.killpg(process.pid, signal.SIGKILL)
    wait_until(lambda: httpx.get(f"{running.url}/health").status_code == 503)  # they have ended
    health = httpx.get(f"{running.url}/health")
    assert health.status_code == 503 and "/gone" in health.json()["reason"]
    bodies = {"completions": {"prompt": "x"}, "responses": {"input": "x"}}
    bodies["chat/completions"] = {"messages": [{"role": "user", "content": "x"}]}
    for path, body in bodies.items():
        found = running.post(path, json=body)
        assert found.status_code == 503 and "/gone" in found.json()["error"]["message"]
    found = httpx.post(f"{running.url}/tokenize", json={"prompt": "x"})
    assert found.status_code == 503
    running.pool.directory = directory
    assert httpx.get(f"{running.url}/health").status_code == 200
    assert running.complete(max_tokens=1).usage.completion_tokens == 1


def test_idle_sockets_lock_nobody_out(start, monkeypatch):
    monkeypatch.setattr(connections, "HEADER_TIMEOUT", 1.0)
    running = start(max_queue=3)
    address = ("127.0.0.1", int(running.url.rsplit(":", 1)[1]))
    sockets = [socket.create_connection(address) for _ in range(90)]
    for number, idle in enumerate(sockets):
        if number % 2:
            idle.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localho")
    assert running.complete(max_tokens=2).choices[0].text
    for idle in sockets:
        idle.settimeout(5)
        assert idle.recv(1) == b""  # closed by the server, without an answer
        idle.close()


def test_a_late_second_request_is_closed(start, monkeypatch):
    monkeypatch.setattr(connections, "HEADER_TIMEOUT", 0.5)
    running = start()
    port = int(running.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = client.recv(4096)
        while b"ok" not in answer:
            answer += client.recv(4096)
        time.sleep(0.7)  # idle between requests: that is allowed for longer
        client.sendall(b"GET /health HT")
        assert client.recv(1) == b""


def test_a_wrong_host_is_told_the_option(running):
    error = running.post(json={"prompt": "x"}, headers={"Host": "evil.example"})
    assert error.status_code == 403 and "--api_key" in error.text
    assert running.post(json={"prompt": "x"}, headers={"Host": "LocalHost:80"}).status_code == 200


def test_the_api_key_is_checked(start):
    running = start(api_key="secret")
    assert running.complete(max_tokens=1).usage.completion_tokens == 1
    for value in (
        "Bearer wrong",
        "Bearer secret2",
        "Bearer schlüssel",
        "secret",
        "Basic secret",
        "",
    ):
        for path in ("/v1/models", "/metrics"):
            refused = httpx.get(running.url + path, headers={"Authorization": value.encode()})
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
    headers = {"Authorization": "bearer secret"}  # a scheme's case does not matter (RFC 9110)
    assert httpx.get(running.url + "/v1/models", headers=headers).status_code == 200
    with pytest.raises(openai.AuthenticationError):
        running.client.with_options(api_key="wrong").completions.create(model="any", prompt="x")
    assert httpx.get(running.url + "/health").status_code == 200


@pytest.mark.parametrize("temperature", (0, 1))
@pytest.mark.parametrize("top_k", (-1, 0, 1, 256))
def test_a_start_prepares_the_steps_of_all_requests(temperature, top_k):
    """Sampling among all tokens would be another step, which Inductor compiles for a minute."""
    prepared = {sampling.candidates(1000) for sampling in WAYS}
    body = CompletionBody(prompt="a", temperature=temperature, top_k=top_k)
    message = {"role": "user", "content": "a"}
    chat = MessagesBody(messages=[message], max_tokens=1, temperature=temperature, top_k=top_k)
    for request in (body, chat.request_body()):
        assert request.sampling(1000).candidates(1000) in prepared


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | any_text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(any_text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
PATHS = ("completions", "chat/completions", "responses", "messages", "messages/count_tokens")
NAMES = sorted({*CompletionBody.model_fields, *ChatCompletionBody.model_fields})
OTHERS = {*ResponsesBody.model_fields, *MessagesBody.model_fields}
ALL_OPTIONS = sorted({*NAMES, *OTHERS} - {"prompt", "messages", "input"})
OPTIONS = [name for name in NAMES if name not in ("prompt", "messages")]


def test_null_stands_for_the_default(tokenizer):
    required = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    for chat in (True, False):
        empty = json.dumps(required | {"seed": 0}).encode()
        nulls = json.dumps(dict.fromkeys(OPTIONS) | required | {"seed": 0}).encode()
        expected, found = (read_request(body, chat, tokenizer, LIMITS) for body in (empty, nulls))
        assert found.generations[0] == expected.generations[0]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(st.sampled_from(NAMES), JUNK, max_size=5), st.booleans(), st.booleans())
def test_every_body_becomes_a_request_or_an_api_error(tokenizer, fields, chat, valid):
    if valid:
        fields = {**fields, "prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    try:
        request = read_request(json.dumps(fields).encode(), chat, tokenizer, LIMITS)
    except APIError as error:
        json.dumps(error.body())
        assert "\n" not in str(error)
    else:
        generation = request.generations[0]
        length = len(generation.prompt_ids) + generation.max_new_tokens
        assert generation.prompt_ids and length <= LENGTH


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(PATHS),
    st.dictionaries(st.sampled_from(ALL_OPTIONS), JUNK, max_size=3),
    st.binary(max_size=20),
    st.booleans(),
)
def test_no_body_stops_the_server(running, path, fields, noise, raw):
    messages = [{"role": "user", "content": "x"}]
    required = {"prompt": "x", "input": "x", "messages": messages, "max_output_tokens": 16}
    if path != "responses":
        required["max_tokens"] = 2
    body = noise if raw else json.dumps(required | fields).encode()
    found = running.post(path, content=body, headers=JSON)
    assert found.status_code in (200, 400)
    if found.status_code == 400:
        body = found.json()
        assert body["error"]["message"] and body["error"]["type"] == "invalid_request_error"
        assert (body.get("type") == "error") == path.startswith("messages")
    assert httpx.get(f"{running.url}/health").status_code == 200


# The page -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if not all(map(shutil.which, ("chromedriver", "chromium"))):
        pytest.skip(
            "the page's test needs chromium and chromedriver: apt-get install chromium-driver"
        )
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


def test_the_page_streams_a_chat_and_shows_the_experts(running, browser):
    browser.send("url", url=running.url)
    wait_until(lambda: browser.run("return document.getElementById('model').textContent") == "tiny")
    browser.run("""const $ = id => document.getElementById(id);
        $('temperature').value = 0; $('max_tokens').value = 60;
        $('text').value = 'def read_lines(path):\\n'; $('form').requestSubmit();""")
    wait_until(lambda: browser.run("return document.querySelectorAll('.token').length") > 0)
    assert browser.run("return document.getElementById('send').textContent") == "Stop"
    wait_until(lambda: browser.run("return document.getElementById('send').textContent") == "Send")
    found = running.chat(
        PROMPT, temperature=0, max_tokens=60, extra_body={"routing": True}
    ).choices[0]
    assert (
        browser.run("return document.querySelector('.answer').textContent") == found.message.content
    )
    assert re.fullmatch(
        r"60 tokens, [\d.]+/s", browser.run("return document.getElementById('status').textContent")
    )
    colors = browser.run(
        "return [...document.querySelectorAll('.token')].map(t => t.style.background)"
    )
    assert len(colors) > 50 and len(set(colors)) > 10
    # A hover shows the weights of each layer's experts.
    middle = browser.run(
        "const b = document.querySelectorAll('.token')[20].getBoundingClientRect();"
        "return [Math.round(b.x + b.width / 2), Math.round(b.y + b.height / 2)]"
    )
    move = {"type": "pointerMove", "x": middle[0], "y": middle[1], "origin": "viewport"}
    browser.send("actions", actions=[{"type": "pointer", "id": "mouse", "actions": [move]}])
    rows = browser.run(
        "return [...document.querySelectorAll('#card tr')].slice(1)"
        ".map(r => [...r.cells].slice(1).map(c => c.textContent))"
    )
    token = browser.run("return document.querySelectorAll('.token')[20].textContent")
    n = next(n for n, name in enumerate(found.moe_fast["tokens"]) if n >= 20 and name == token)
    assert len(rows) == len(found.moe_fast["experts"][n]) == 8
    for row, experts, weights in zip(
        rows, found.moe_fast["experts"][n], found.moe_fast["weights"][n], strict=True
    ):
        shown = {expert: float(text) for expert, text in enumerate(row) if text}
        assert shown == pytest.approx(dict(zip(experts, weights, strict=True)), abs=0.006)
    # Another layer has other colors; the page requests nothing elsewhere and logs no error.
    browser.run("const l = document.getElementById('layer'); l.value = 7; l.onchange()")
    assert (
        browser.run("return [...document.querySelectorAll('.token')].map(t => t.style.background)")
        != colors
    )
    requests = browser.run("return performance.getEntriesByType('resource').map(e => e.name)")
    assert requests and all(name.startswith(running.url) for name in requests)
    log = [
        entry["message"]
        for entry in browser.send("se/log", type="browser")
        if entry["level"] == "SEVERE"
    ]
    assert not [message for message in log if "favicon" not in message]


def test_the_page_shows_an_error_and_an_input_for_the_key(start, browser):
    running = start(api_key="secret")
    browser.send("url", url=running.url)
    hidden = "return document.getElementById('ask_key').hidden"
    wait_until(lambda: not browser.run(hidden))
    ask = (
        "document.getElementById('text').value = 'x';"
        "document.getElementById('form').requestSubmit()"
    )
    browser.run(ask)
    wait_until(
        lambda: "API key" in browser.run("return document.getElementById('log').textContent")
    )
    browser.run(
        "document.getElementById('key').value = 'secret';"
        "document.getElementById('max_tokens').value = 3;" + ask
    )
    wait_until(lambda: browser.run("return document.querySelectorAll('.token').length") > 0)


def test_the_pages_stop_button_stops_the_server(start, slowly, browser):
    running = start()
    browser.send("url", url=running.url)
    submit = "document.getElementById('form').requestSubmit()"
    browser.run("document.getElementById('text').value = 'import os'; " + submit)
    wait_until(lambda: browser.run("return document.querySelectorAll('.token').length") > 3)
    browser.run(submit)
    wait_until(lambda: running.metric("answers_total") == 1)
    assert running.metric("new_tokens_total") < 150
    assert browser.run("return document.getElementById('status').textContent").startswith(
        "stopped after"
    )


# Command --------------------------------------------------------------------------------------


def command(*arguments: str, **options) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | options.pop(
        "env", {}
    )
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *arguments], env=environment, **streams, **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        ("--host 0.0.0.0", "--host 0.0.0.0 can be reached by others: add --api_key"),
        ("--host 0.0.0.0 --api_key=", "--api_key: it must be printable ASCII text, and not empty"),
        ("--api_key é", "--api_key: it must be printable ASCII text, and not empty"),
        ("--api_key a\x00b", "--api_key: it must be printable ASCII text, and not empty"),
        ("--max_queue 0", "--max_queue 0: it must be at least 1"),
        ("--port 70000", "--port 70000: it must be from 0 to 65535"),
        ("--time_limit nan", "--time_limit nan: it must be above 0"),
        ("--prefill_chunk 0", "--prefill_chunk 0: it must be at least 1"),
        ("--gpu_experts 2", "--gpu_experts is about experts in host memory: add --offload"),
    ),
)
def test_bad_options_are_refused(arguments, message, monkeypatch):
    monkeypatch.delenv("MOE_FAST_API_KEY", raising=False)
    with pytest.raises(ValueError, match=re.escape(message)):
        check_options(build_parser().parse_args(arguments.split()))


def test_a_key_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("MOE_FAST_API_KEY", "secret")
    options = build_parser().parse_args(["--host", "0.0.0.0"])
    check_options(options)
    assert options.api_key == "secret"
    monkeypatch.setenv("MOE_FAST_API_KEY", "se cret\r\n")
    check_options(options := build_parser().parse_args([]))
    assert options.api_key == "se cret"


def test_a_taken_port_is_one_line(monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(sys, "argv", ["serve.py", "--port", str(taken.getsockname()[1])])
        assert serve() == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert (
        errors.startswith("error: ")
        and "choose another --port" in errors
        and errors.count("\n") == 1
    )


def test_a_second_server_is_refused_before_it_loads_a_model():
    """Linux lets two sockets with SO_REUSEADDR have one address until one of them listens."""
    first = bind("127.0.0.1", 0)
    port = first.getsockname()[1]
    for listening in (False, True):
        if listening:
            first.listen()
        with pytest.raises(ValueError, match=rf"127.0.0.1 port {port} \(Address already in use"):
            bind("127.0.0.1", port)
    with bind("127.0.0.2", port), socket.create_connection(("127.0.0.1", port)):
        pass
    first.close()
    second = bind("127.0.0.1", port)  # at once
    with socket.socket() as other:  # a program that does not claim its address
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(ValueError, match=rf"cannot listen on port {port} any more"):
            run_server(None, None, second, None)
    second.close()


@pytest.mark.parametrize("host", ("a" * 64 + ".org", "é" * 99, "256.1.1.1", "a b", "192.0.2.1"))
def test_a_wrong_host_is_one_line(host):
    message = r"cannot listen on .* port 8000 \(.*\): choose another --host"
    with pytest.raises(ValueError, match=message) as caught:
        bind(host, 8000)
    assert "\n" not in str(caught.value)


@pytest.mark.slow  # tests/test_startup.py has it before PyTorch is imported
def test_a_missing_package_is_one_line(tmp_path):
    (tmp_path / "starlette.py").write_text("raise ImportError('no starlette')")
    search = os.pathsep.join(map(str, (tmp_path, ROOT)))
    process = command("serve.py", cwd=ROOT, env={"PYTHONPATH": search})
    output, errors = process.communicate(timeout=60)
    reason = "a package of the server cannot be imported (no starlette)"
    line = f"error: {reason}: pip install 'moe-fast[serve]'\n"
    assert (process.returncode, output, errors) == (2, "", line)


def listening(process: subprocess.Popen) -> str:
    for line in process.stderr:
        if found := re.search(r"on (http://\S+)/v1", line):
            return found[1]
    raise AssertionError("it does not listen")


# serve.py, which prints the names of all modules when it gets SIGUSR1.
NAMES_MODULES = """
import runpy, signal, sys

def name_modules(*_):
    print("modules:", *sorted(sys.modules), file=sys.stderr, flush=True)

signal.signal(signal.SIGUSR1, name_modules)
sys.argv[0] = "serve.py"
runpy.run_path("serve.py", run_name="__main__")
"""


def modules(server: subprocess.Popen) -> set[str]:
    server.send_signal(signal.SIGUSR1)
    line = next(line for line in server.stderr if line.startswith("modules: "))
    return {*line.split()}


def start_command(directory, *options, script=("serve.py",)) -> subprocess.Popen:
    arguments = "--checkpoint_path", str(directory), "--port", "0", "--max_seq_len", "4096"
    return command(*script, *arguments, *options, cwd=ROOT)


@pytest.mark.parametrize(
    ("number", "options"),
    (
        (signal.SIGINT, ()),
        pytest.param(signal.SIGTERM, ("--drain", "0.5"), marks=pytest.mark.slow),
    ),
)
def test_ctrl_c_during_an_answer_exits_cleanly(directory, number, options):
    """Nor do the first requests import anything: that takes up to half a second, for all."""
    server = start_command(directory, *options, script=("-c", NAMES_MODULES))
    user = [{"role": "user", "content": "x"}]
    bodies = {"completions": {"prompt": "x"}, "responses": {"input": "x"}}
    bodies |= {path: {"messages": user} for path in ("chat/completions", "messages")}
    try:
        url = listening(server)
        assert httpx.get(f"{url}/health").status_code == 200
        before = modules(server)
        for path, body in bodies.items():
            limit = "max_output_tokens" if path == "responses" else "max_tokens"
            request = {**body, limit: 2, "stream": True}
            assert httpx.post(f"{url}/v1/{path}", json=request, timeout=60).status_code == 200
        assert modules(server) - before == set()
        # Greedy: a sampled answer may end before its limit.
        request = {"prompt": "x", "max_tokens": 4000, "temperature": 0, "stream": True}
        url += "/v1/completions"
        with httpx.stream("POST", url, json=request, timeout=60) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            server.send_signal(number)
            assert any("the server is ending" in line for line in lines)
        output, errors = server.communicate(timeout=30)
        assert server.returncode == 0 and output == "" and "Traceback" not in errors
    finally:
        server.kill()


def test_a_drain_ends_the_answer_and_then_the_server(directory, slowly):
    running = Running(directory)
    try:
        chunks = running.complete(max_tokens=20, temperature=0, stream=True)
        next(chunks)
        running.scheduler.drain(60)
        assert httpx.get(f"{running.url}/health").status_code == 503
        with pytest.raises(openai.InternalServerError, match="the server is ending"):
            running.complete()
        assert list(chunks)[-1].choices[0].finish_reason == "length"
        running.thread.join(20)
        assert not running.thread.is_alive()
    finally:
        running.close()


@pytest.mark.slow
@pytest.mark.parametrize("twice", (False, True))
def test_sigterm_lets_a_running_answer_end(directory, twice):
    server = start_command(directory, "--drain", "60")
    try:
        request = {"prompt": "x", "max_tokens": 400, "temperature": 0, "stream": True}
        base = listening(server)
        url = base + "/v1/completions"
        with httpx.stream("POST", url, json=request, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            wait_until(lambda: httpx.get(f"{base}/health").status_code == 503)
            late = httpx.post(url, json=request, timeout=60)
            assert late.status_code == 503 and "ending" in late.json()["error"]["message"]
            if twice:
                server.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert any("the server is ending" in line for line in rest) == twice
        assert ("data: [DONE]" in rest) != twice
        output, errors = server.communicate(timeout=30)
        assert server.returncode == 0 and output == "" and "Traceback" not in errors
        assert "draining" in errors
    finally:
        server.kill()


@pytest.mark.slow
def test_two_ranks_give_the_same_answers_and_stop_together(directory, alone):
    """Tensor parallelism: the text of one process, a disconnect, another request."""
    torchrun = "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "serve.py"
    options = "--checkpoint_path", str(directory), "--dtype", "fp32", "--device", "cpu"
    server = command(*torchrun, *options, "--port", "0", cwd=ROOT)
    try:
        url = listening(server)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120)
        options = {"model": "any", "temperature": 0}
        found = client.completions.create(prompt=PROMPT, max_tokens=12, logprobs=2, **options)
        assert found.choices[0].text == alone(PROMPT)["text"]
        with client.completions.create(
            prompt="import", max_tokens=1000, stream=True, **options
        ) as stream:
            next(iter(stream))
        start = time.monotonic()
        found = client.completions.create(prompt=PROMPT, max_tokens=12, **options)
        assert found.choices[0].text == alone(PROMPT)["text"] and time.monotonic() - start < 20
        assert read_metric(url, "new_tokens_total") < 500
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=60)
    finally:
        server.kill()


# Several ranks ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_ranks_decode_side_by_side(alone, tmp_path):
    command = ["torchrun", "--standalone", "--nproc_per_node=2", "serve.py", "--port", "0"]
    options = ["--device", "cpu", "--dtype", "fp32", "--max_seq_len", str(LENGTH)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command[0] = str(Path(sys.executable).with_name("torchrun"))
    process = subprocess.Popen(
        [*command, *options], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        url = next(
            found[1] for line in process.stderr if (found := re.search(r"on (\S+)/v1", line))
        )
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": PERSON}}

        def ask(n: int):
            extra = {"response_format": schema} if n == 0 else {}
            return client.completions.create(
                model="any",
                prompt=f"def f{n}(x):\n",
                max_tokens=20 if n else 150,
                temperature=0.9 * (n % 2),
                seed=n,
                n=1 + n % 2,
                extra_body=extra,
            )

        with ThreadPoolExecutor(6) as pool:
            first, *found = pool.map(ask, range(6))
        jsonschema.validate(json.loads(first.choices[0].text), PERSON)
        for n, answer in enumerate(found, start=1):
            for choice in answer.choices:
                sampling = Sampling(temperature=0.9 * (n % 2), seed=n + choice.index)
                expected = alone(f"def f{n}(x):\n", 20, sampling)
                assert choice.text == expected["text"]
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)


def test_events_that_arrive_together_are_sent_together():
    """Each event that arrives alone is a part of the stream."""

    class Builder:
        def start(self):
            return iter([b"begin "])

        def deltas(self, event):
            return iter([event.text.encode()])

        def end(self, event):
            return iter([b"end ", b"usage"])

    mailbox = Mailbox()
    words = [TextDelta(f"{n} ", [], False, 0) for n in range(4)]

    async def parts() -> list[bytes]:
        mailbox.loop = asyncio.get_running_loop()
        events, found = EventQueue(mailbox), []
        stream = stream_chunks(Builder(), events, words[0], 1)
        for together in (words[1:2], words[2:3], [words[3], Finished({}, [], 0)]):
            found.append(await anext(stream))
            for event in together:
                events.send(event)
            mailbox.deliver()
            await asyncio.sleep(0)
        return found + [part async for part in stream]

    assert asyncio.run(parts()) == [b"begin 0 ", b"1 ", b"2 ", b"3 end usage"]

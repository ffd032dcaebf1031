"""Options of completions and chats: their lengths, echo, fill-in-the-middle, 16 stop texts."""

import json
import socket
from functools import partial

import pytest
import torch
from local_server import LocalServer, httpx, openai
from test_reasoning import make_tokenizer

from runtime.logit_edits import ALL, mask_words
from server.constraints import Constraint, choice, grammar_tokens
from server.errors import APIError
from server.fill_in import FORMS, SUFFIX_FIRST
from server.min_tokens import MinTokens
from server.plan import Limits, read_request
from server.response_store import ItemStore
from server.responses import read_responses_request
from server.tokens import detokenize, tokenize

pytestmark = pytest.mark.usefixtures("few_threads")
LENGTH = 64
PROMPT = "def f(x):\n"


@pytest.fixture(scope="module")
def server(directory, few_threads):
    server = LocalServer(directory, LENGTH)
    yield server
    server.close()


# Lengths ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", ("completions", "chat"))
def test_all_tokens_that_fit(server, api):
    ask = server.complete if api == "completions" else server.chat
    prompt = PROMPT if api == "completions" else [{"role": "user", "content": PROMPT}]
    bias = {str(id): -100 for id in server.tokenizer.stop_ids}
    usage = ask(prompt, max_tokens=-1, logit_bias=bias).usage
    assert usage.total_tokens == LENGTH


@pytest.mark.parametrize("chat", (False, True))
@pytest.mark.parametrize("seed", (-1, -1.0))
def test_a_seed_of_minus_one_is_any(tokenizer, chat, seed):
    fields = {"messages": [{"role": "user", "content": PROMPT}]} if chat else {"prompt": PROMPT}
    body = json.dumps(fields | {"seed": seed}).encode()
    limits = Limits(LENGTH, tokenizer.vocab_size)
    found = [read_request(body, chat, tokenizer, limits).generations[0] for _ in range(2)]
    assert found[0].sampling.seed != found[1].sampling.seed
    assert not any(generation.seeded for generation in found)


def test_a_seed_of_minus_one_is_any_of_a_response(tokenizer):
    body = json.dumps({"input": PROMPT, "seed": -1}).encode()
    _, request = read_responses_request(body, tokenizer, Limits(LENGTH, 1 << 20), ItemStore())
    assert not request.generations[0].seeded


def test_no_end_token_before_min_tokens(server):
    stop = server.tokenizer.stop_ids[0]
    extra = {"extra_body": {"min_tokens": 5}, "logit_bias": {str(stop): 100}}
    for options, count in ((extra, 6), ({"logit_bias": {str(stop): 100}}, 1)):
        found = server.complete(PROMPT, max_tokens=12, temperature=0, **options)
        assert found.usage.completion_tokens == count
        assert found.choices[0].finish_reason == "stop"
    whole = server.complete(PROMPT, max_tokens=3, **extra)
    assert whole.choices[0].finish_reason == "length"


def test_min_tokens_yields_to_a_grammar(server):
    extra = {"min_tokens": 9, "guided_choice": ["yes"]}
    found = server.complete(PROMPT, max_tokens=12, extra_body=extra)
    assert found.choices[0].text == "yes" and found.choices[0].finish_reason == "stop"


def test_the_mask_of_min_tokens(tmp_path):
    """Also where an end token is the last bit of a word."""
    row = torch.zeros(mask_words(96), dtype=torch.int32)
    found = MinTokens(2, (5, 31, 63), None)
    found.mask(row)
    bits = [(row[id // 32].item() >> id % 32) & 1 for id in range(96)]
    assert [id for id in range(96) if not bits[id]] == [5, 31, 63]
    found.advance(0)
    found.advance(0)
    found.mask(row)
    assert (row == ALL).all()
    tokenizer = make_tokenizer(tmp_path)
    size = tokenizer.vocab_size
    constraint = Constraint(grammar_tokens(tokenizer, size), choice(["a", "ab"]))
    found = MinTokens(2, tokenizer.stop_ids, constraint)
    row = torch.zeros(mask_words(size), dtype=torch.int32)
    (a,), (b,), end = tokenizer.encode("a"), tokenizer.encode("b"), tokenizer.stop_ids[0]
    allowed = []
    for token in (a, b, None):
        found.mask(row)
        allowed.append([id for id in range(size) if (row[id // 32].item() >> id % 32) & 1])
        if token is not None:
            found.advance(token)
    assert allowed == [[a], [b], [end]]


def test_sixteen_stop_texts(server):
    stop = [f"never{n}" for n in range(15)]
    text = server.complete(PROMPT, temperature=0, max_tokens=20).choices[0].text
    options = {"temperature": 0, "max_tokens": 20, "extra_body": {"stop": [*stop, text[5:9]]}}
    assert server.complete(PROMPT, **options).choices[0].text == text[: text.find(text[5:9])]


# Echo ---------------------------------------------------------------------------------------------


def test_echo_puts_the_prompt_first(server):
    ids = server.tokenizer.encode(PROMPT)
    prompts = ["def g():\n", "x </s> y"]
    ask = partial(server.complete, temperature=0, max_tokens=4)
    for prompt, n in ((PROMPT, 1), (ids, 1), (prompts, 2)):
        plain = ask(prompt, n=n).choices
        texts = prompts if prompt is prompts else [PROMPT]
        expected = [texts[c.index // n] + c.text for c in plain]
        assert [choice.text for choice in ask(prompt, n=n, echo=True).choices] == expected
        streamed = [""] * len(plain)
        for chunk in ask(prompt, n=n, echo=True, stream=True):
            streamed[chunk.choices[0].index] += chunk.choices[0].text
        assert streamed == expected


def test_a_chat_has_no_echo_and_no_suffix(server):
    for field in ({"echo": True}, {"suffix": "x"}):
        with pytest.raises(openai.BadRequestError, match="is not supported"):
            server.chat([{"role": "user", "content": "x"}], extra_body=field)


# Fill-in-the-middle -------------------------------------------------------------------------------


@pytest.mark.parametrize("form", (*FORMS, SUFFIX_FIRST))
def test_a_suffix_takes_the_models_tokens(tmp_path, form):
    tokenizer = make_tokenizer(tmp_path, form, True)
    body = {"prompt": ["a<|end|>", ""], "suffix": "z" + form[0]}
    request = read_request(json.dumps(body).encode(), False, tokenizer, Limits(99, 999))
    ids = [tokenizer.token_id(name) for name in form]
    after = tokenizer.encode("z" + form[0])
    assert not set(ids) & set(after)  # names in a text are text
    for generation, before in zip(request.generations, ("a<|end|>", ""), strict=True):
        texts = [tokenizer.encode(before), after]
        if form == SUFFIX_FIRST:
            texts.reverse()
        expected = [ids[0], *texts[0], ids[1], *texts[1], *ids[2:]]
        assert generation.prompt_ids == expected and not generation.reply


def test_an_empty_suffix_is_none(tokenizer):
    for suffix in ("", None):
        body = json.dumps({"prompt": "x", "suffix": suffix}).encode()
        request = read_request(body, False, tokenizer, Limits(99, 9999))
        assert request.generations[0].prompt_ids == tokenizer.encode("x")
    with pytest.raises(APIError) as caught:
        body = json.dumps({"prompt": "x", "suffix": "y"}).encode()
        read_request(body, False, tokenizer, Limits(99, 9999))
    assert caught.value.param == "suffix"


def test_embeddings_are_refused_clearly(server):
    with pytest.raises(openai.BadRequestError, match="has no embeddings"):
        server.client.embeddings.create(model="any", input="x")
    assert httpx.get(f"{server.url}/v1/embeddings").status_code == 405


# Fields of a chat ---------------------------------------------------------------------------------

CHAT = [{"role": "user", "content": PROMPT}]
CALL = {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}


def read_chat(tokenizer, **fields):
    body = json.dumps({"messages": CHAT, **fields}).encode()
    return read_request(body, True, tokenizer, Limits(2048, tokenizer.vocab_size))


@pytest.mark.parametrize(
    "fields", ({"messages": [*CHAT, CALL]}, {"function_call": {"name": "f"}}, {"function_call": 1})
)
def test_calls_of_functions_are_refused(tokenizer, fields):
    """They would be left out of the conversation, or never be made."""
    with pytest.raises(APIError, match="function_call is not supported"):
        read_chat(tokenizer, **fields)


@pytest.mark.parametrize("choice", ("auto", "none", None))
def test_a_choice_of_functions_that_changes_nothing_is_accepted(tokenizer, choice):
    assert read_chat(tokenizer, function_call=choice).generations


def function(name: str, **more) -> dict:
    return {"type": "function", "function": {"name": name, **more}}


def choose(mode: str, *names: str) -> dict:
    tools = [function(name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("mode", ("auto", "required"))
def test_allowed_tools_of_a_chat_leave_out_the_others(tokenizer, mode):
    tools = [function(name, parameters={"type": "object"}) for name in ("f", "g", "h")]
    found = read_chat(tokenizer, tools=tools, tool_choice=choose(mode, "h", "f"))
    want = read_chat(tokenizer, tools=[tools[0], tools[2]], tool_choice=mode)
    assert found.generations[0].prompt_ids == want.generations[0].prompt_ids
    assert found.calls.schemas.keys() == {"f", "h"} and found.calls.is_forced == (mode != "auto")


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (choose("auto", "x"), "tool_choice names 'x', which is no tool"),
        (choose("any", "f"), "tool_choice must be"),
        (choose("required"), 'tool_choice "required" needs tools'),
        ({"type": "allowed_tools"}, "tool_choice must be"),
    ],
)
def test_wrong_allowed_tools_are_one_line(tokenizer, choice, message):
    with pytest.raises(APIError, match=message):
        read_chat(tokenizer, tools=[function("f")], tool_choice=choice)


# Other routes -------------------------------------------------------------------------------------


def counted(tokenizer, **fields) -> int:
    return tokenize(json.dumps(fields).encode(), tokenizer, 2048)["count"]


def test_tokenize_reads_all_fields_of_a_chat(tmp_path):
    """The count is that of the prompt of a chat with these fields."""
    source = "{{ messages[0].content }}{{ '!' * n }}{% if add_generation_prompt %}>>{% endif %}"
    tokenizer = make_tokenizer(tmp_path, template=source)
    few, many = ({"n": n} for n in (1, 5))
    assert counted(tokenizer, messages=CHAT, chat_template_kwargs=few) == len(PROMPT) + 3
    assert counted(tokenizer, messages=CHAT, chat_template_kwargs=many) == len(PROMPT) + 7
    more = {"add_generation_prompt": False, "temperature": 1}
    assert counted(tokenizer, messages=CHAT, chat_template_kwargs=few, **more) == len(PROMPT) + 1
    for fields in ({}, {"messages": CHAT, "prompt": PROMPT}):
        with pytest.raises(APIError, match="give a prompt, or the messages of a chat"):
            counted(tokenizer, **fields)


@pytest.mark.parametrize("id", (-1, 1 << 20, 10**30))
def test_detokenize_refuses_ids_that_are_no_tokens(tokenizer, id):
    with pytest.raises(APIError, match="token ids must be whole numbers from 0 to"):
        detokenize(json.dumps({"tokens": [5, id]}).encode(), tokenizer, 2048)
    assert detokenize(b'{"tokens": []}', tokenizer, 2048) == {"prompt": ""}


@pytest.mark.parametrize(
    ("method", "path", "status", "fix"),
    [
        ("POST", "/chat/completions", 404, "routes are those of /v1, such as /v1/chat/completions"),
        ("POST", "/v1/chat/completions/chat/completions", 404, "routes are those of /v1"),
        ("GET", "/v1/chat/completions", 405, "send POST"),
        ("DELETE", "/v1/models", 405, "send "),
    ],
)
def test_a_wrong_route_is_told_the_right_one(server, method, path, status, fix):
    found = httpx.request(method, server.url + path)
    error = found.json()["error"]
    assert found.status_code == status and error["type"] == "invalid_request_error"
    assert fix in error["message"] and "\n" not in error["message"]


@pytest.mark.parametrize(
    "data", (b"\x16\x03\x01\x02\0", b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n")
)
def test_what_is_no_http_gets_an_error_in_json(server, data):
    port = int(server.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        connection.sendall(data)
        found = b"".join(iter(lambda: connection.recv(4096), b""))
    head, _, body = found.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"

"""Prompts are formatted and tokenized in child processes that cannot hold up the server."""

import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from server import tokenizing
from server.errors import APIError
from server.plan import Limits, read_request
from server.tokenizing import TokenizerPool, TokenizerUnavailableError
from tokenizer import load_tokenizer

TINY = Path(__file__).parents[1] / "checkpoints/tiny-moe"
TEMPLATE = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
LIMIT = 0.6  # seconds of the CPU, instead of 2; tests/test_serve.py has a bomb with those
WORK = f"""
import sys
from server import tokenizing
tokenizing.TIME_LIMIT = {LIMIT}
tokenizing.work(sys.argv[1])
"""
BOMBS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "memory": "{{ 'a' * (messages | length * 10 ** 10) }}",
    "growth": "{% set ns = namespace(x='a' * 4096) %}"
    "{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
}


class LimitedPool(TokenizerPool):
    """Workers with a shorter time limit."""

    command = sys.executable, "-c", WORK


@pytest.fixture(scope="module", autouse=True)
def limit():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizing, "TIME_LIMIT", LIMIT)
        yield


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """A pool whose template is chosen by the first message: a bomb's name, or anything."""
    directory = tmp_path_factory.mktemp("model")
    for name in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copy(TINY / name, directory)
    cases = "".join(
        f"{{% elif messages[0].content == '{name}' %}}{bomb}" for name, bomb in BOMBS.items()
    )
    template = f"{{% if false %}}{cases}{{% else %}}{TEMPLATE}{{% endif %}}"
    (directory / "chat_template.jinja").write_text(template)
    pool = LimitedPool(directory, 64)
    pool.encode("warm")
    yield pool
    pool.close()
    assert all(process.poll() is not None for process in pool.processes)


def message(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def test_it_encodes_as_the_tokenizer_does(pool):
    tokenizer = load_tokenizer(pool.directory)
    for text in ("def main():\n    pass\n", "", "\u2028é\n\n\x00", "</s>" * 3):
        assert pool.encode(text) == tokenizer.encode(text)
        assert pool.chat(message(text)) == tokenizer.chat(message(text))


@pytest.mark.parametrize("name", ("self", "messages"))
def test_a_templates_variable_may_have_any_name(pool, name):
    assert pool.chat(message("a"), **{name: "b"}) == load_tokenizer(pool.directory).chat(
        message("a"), **{name: "b"}
    )
    assert pool.chat(message("a"), **{name: "b"}) == pool.chat(message("a"))


@pytest.mark.parametrize("fields", [{}, {"parse_special": True}, {"parse_special": False}])
@pytest.mark.parametrize("as_pool", [True, False])
def test_control_tokens_of_a_completion_are_parsed_unless_asked_otherwise(pool, fields, as_pool):
    special = fields.get("parse_special", True)
    prompts = ["</s>", "a</s>b<s>", "<s>a", "a", "</s"]
    body = json.dumps({"prompt": prompts, **fields}).encode()
    tokenizer = pool if as_pool else pool.vocabulary
    request = read_request(body, False, tokenizer, Limits(64, pool.vocab_size))
    got = [generation.prompt_ids for generation in request.generations]
    assert got == [pool.vocabulary.encode(prompt, special=special) for prompt in prompts]
    assert (pool.vocabulary.stop_ids[0] in got[0]) is special
    with pytest.raises(APIError, match=r"prompt has token \d+; the model's end at"):
        read_request(body, False, tokenizer, Limits(64, 2))
    chat = json.dumps({"messages": message("a</s>b"), **fields}).encode()  # always text
    (generation,) = read_request(chat, True, tokenizer, Limits(64, pool.vocab_size)).generations
    assert generation.prompt_ids == pool.vocabulary.encode("[a</s>b]", bos=False)


def test_a_text_beyond_the_context_is_refused_by_its_length(pool):
    tokenizer = pool.vocabulary
    longest = max((tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)), key=len)
    assert pool.encode(longest.decode() * 64)
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"over .* bytes, the most that the context can hold"):
        pool.encode("x" * 4_000_000)
    with pytest.raises(ValueError, match="shorten it"):
        pool.chat(message("x" * 4_000_000))
    assert time.monotonic() - start < 0.5


def test_an_error_is_a_value_error(pool):
    with pytest.raises(ValueError, match="not valid Unicode"):
        pool.encode("\ud800")
    assert pool.encode("fine")


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_fails_alone(pool, bomb):
    start = time.monotonic()
    failed = []

    def explode():
        try:
            pool.chat(message(bomb))
        except ValueError as error:
            failed.append(str(error))

    thread = threading.Thread(target=explode)
    thread.start()
    begin = time.monotonic()
    assert pool.encode("another client")
    assert time.monotonic() - begin < LIMIT + 1
    thread.join(LIMIT + 10)
    assert failed and time.monotonic() - start < LIMIT + 10
    assert pool.chat(message("x")) and pool.encode("y")


def test_a_long_prompt_has_more_time_and_a_busy_machine_takes_none(pool):
    other = LimitedPool(pool.directory, 1 << 20, workers=1)
    text = "def f(x):\n    return x\n" * 60_000
    found = []
    thread = threading.Thread(target=lambda: found.append(other.encode(text)))
    try:
        other.encode("warm")
        thread.start()
        time.sleep(0.1)
        os.killpg(other.processes[0].pid, signal.SIGSTOP)  # as if others had all cores
        time.sleep(LIMIT + 0.3)
        assert not found
        os.killpg(other.processes[0].pid, signal.SIGCONT)
        thread.join(30)
        assert found == [pool.vocabulary.encode(text)]
        with pytest.raises(ValueError, match="over 2 s or 1024 MiB"):
            other.chat(message("loops") + message("x" * 250_000))
    finally:
        other.close()
        thread.join(5)


def test_close_ends_a_request_in_flight(pool):
    other = TokenizerPool(pool.directory, 64, workers=1)
    other.encode("warm")
    errors = []

    def explode():
        try:
            other.chat(message("loops"))
        except ValueError as error:
            errors.append(str(error))

    thread = threading.Thread(target=explode)
    thread.start()
    time.sleep(0.3)
    start = time.monotonic()
    other.close()
    thread.join(2)
    assert errors and time.monotonic() - start < 1


def test_children_end_with_their_parent(pool):
    other = TokenizerPool(pool.directory, 64, workers=1)
    (process,) = other.processes
    other.encode("warm")
    process.stdin.close()  # as if the parent had been killed
    assert process.wait(5) == 0
    assert not os.path.exists(f"/proc/{process.pid}/fd")


def test_children_that_end_need_no_files(pool, tmp_path):
    """The checkpoint may be gone, or another model's, when a child has ended."""
    directory = Path(shutil.copytree(pool.directory, tmp_path / "model"))
    other = LimitedPool(directory, 64, workers=2)
    expected = [other.encode(text) for text in ("a b", "c")]
    shutil.rmtree(directory)
    for _ in range(2):
        with pytest.raises(ValueError, match="over 1 s or 1024 MiB"):
            other.chat(message("loops"))
        assert [other.encode(text) for text in ("a b", "c")] == expected
    other.check()
    other.close()


def kill_workers(pool: TokenizerPool) -> None:
    for process in pool.processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_killed_workers_are_started_again_or_named(pool):
    other = TokenizerPool(pool.directory, 64, workers=2)
    for ask in (lambda: other.encode("a"), other.check):
        kill_workers(other)
        ask()
    kill_workers(other)
    other.directory = pool.directory / "gone"
    for ask in (lambda: other.encode("a"), lambda: other.chat(message("a")), other.check):
        with pytest.raises(TokenizerUnavailableError, match=r"process ended \(.*gone"):
            ask()
    other.directory = pool.directory
    other.check()
    assert other.encode("a") == pool.encode("a")
    other.close()

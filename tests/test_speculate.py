"""Speculation: greedy tokens equal plain decoding's, samples have the model's distribution."""

import io
import itertools
import json
import re
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import FAMILIES, smoke_diagonal
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters

import generate
from cli.generate_options import build_parser, check_options
from generate import load_model, main
from model import ModelArgs, Transformer
from runtime import verification as verification
from runtime.drafters import LONG, LONG_MATCH, NGRAMS, SHORT, LookupDrafter
from runtime.sampling import Noise, Sampling, StepState, sample
from runtime.session import Session, SessionOptions
from runtime.speculation import Speculation
from runtime.verification import verify_sampled

GREEDY = Sampling(temperature=0)
PROMPT = [5, 17, 3, 99, 42, 8, 120, 5, 17, 3, 99, 11, 5, 17]
pytestmark = pytest.mark.usefixtures("few_threads")


def scramble(model: Transformer, seed: int = 1) -> Transformer:
    """Replace all weights by random ones."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


@pytest.fixture(scope="module")
def make(make_family):
    """(source of drafts, N, family, session options) -> Speculation.

    Drafts of "twin" come from the target's own weights, of "other" from random ones.
    """

    def made(
        source: str, count: int, name: str = "mixtral", length: int = 128, **options
    ) -> Speculation:
        directory = make_family(name).directory
        draft = {
            "lookup": lambda: None,
            "twin": lambda: load_model(directory, "cpu"),
            "other": lambda: scramble(load_model(directory, "cpu", torch.float32)),
        }[source]()
        session = Session(load_model(directory, "cpu"), length, SessionOptions(**options))
        return Speculation(session, count, draft)

    return made


@pytest.fixture(scope="module")
def plain(make_family):
    """(ids, count, sampling, family) -> tokens of plain decoding, with an empty cache."""
    sessions, known = {}, {}

    def tokens(ids, count: int, sampling: Sampling = GREEDY, name: str = "mixtral") -> list[int]:
        if name not in sessions:
            model = load_model(make_family(name).directory, "cpu")
            sessions[name] = Session(model, min(256, model.args.max_position))
        key = repr((name, ids, sampling))
        if count > len(known.get(key, ())):  # a shorter one is the beginning of a longer one
            sessions[name].reset()
            known[key] = list(sessions[name].stream(ids, count, sampling))
        return known[key][:count]

    return tokens


# Greedy -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "drafts"),
    smoke_diagonal(FAMILIES, itertools.product(("lookup", "twin", "other"), (1, 3, 7))),
    indirect=["family"],
)
def test_greedy_tokens_are_those_of_plain_decoding(family, make, plain, drafts):
    source, count = drafts
    speculation = make(source, count, family.name)
    expected = plain(PROMPT, 25, name=family.name)
    assert list(speculation.stream(PROMPT, 25, GREEDY)) == expected
    found = speculation.statistics()
    passes, drafted, accepted = (found[name] for name in ("passes", "drafted", "accepted"))
    assert speculation.delivered == 24 and found["tokens_per_pass"] == 24 / passes
    if source == "twin":  # everything is accepted
        assert passes == 24 / (count + 1) and accepted == 24 - passes
    if source == "other":
        assert drafted == passes * count and accepted < 0.1 * drafted
    if source == "lookup":
        assert drafted > 0 and accepted - (24 - passes) in (0, 1)


@pytest.mark.parametrize("source", ("lookup", "twin", "other"))
def test_the_path_of_a_compiled_session_gives_the_same(no_compiler, make, plain, source):
    speculation = make(source, 5, compile=True)
    for ids in (PROMPT, PROMPT[:3], PROMPT * 3):
        assert list(speculation.stream(ids, 30, GREEDY)) == plain(ids, 30)


@pytest.mark.parametrize("source", ("lookup", "twin"))
@pytest.mark.parametrize("penalty", (1.3, 1e9))
def test_a_repetition_penalty_counts_earlier_drafts(make, plain, source, penalty):
    sampling = Sampling(temperature=0, repetition_penalty=penalty)
    speculation = make(source, 4)
    answer = list(speculation.stream(PROMPT, 41, sampling))
    assert answer == plain(PROMPT, 41, sampling)
    distinct = len(set(answer) | set(PROMPT))
    assert penalty < 2 or distinct == len(answer) + len(set(PROMPT))
    assert source == "lookup" or speculation.accepted == 40 - speculation.passes == 32


@pytest.mark.parametrize("compiled", (False, True))
@pytest.mark.parametrize("known", (0, 1))
def test_refused_drafts_in_the_cache_are_never_read(no_compiler, make, plain, compiled, known):
    """After each pass overwrite what is past the known tokens; with one known token it shows."""
    speculation = make("other", 5, compile=compiled)
    verify = speculation.verify

    def verify_and_spoil(rows: int, count: int, candidates: int) -> None:
        verify(rows, count, candidates)
        for cache in speculation.states:
            cache.kv[:, :, :, int(speculation.position) - known :] = 1e3

    speculation.verify = verify_and_spoil
    same = list(speculation.stream(PROMPT, 30, GREEDY)) == plain(PROMPT, 30)
    assert same == (not known)


# Ends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source", ("lookup", "twin", pytest.param("other", marks=pytest.mark.slow))
)
def test_an_answer_may_end_within_accepted_drafts(make, plain, source):
    """No token too many; the next turn reuses the cache and is as if from nothing."""
    speculation = make(source, 5)
    for count in (1, 2, 6, 7, 13):
        answer = list(speculation.stream(PROMPT, count, GREEDY))
        assert answer == plain(PROMPT, count) and speculation.ids[0] == PROMPT + answer
        ids = PROMPT + answer + [9, 11, 4]
        assert list(speculation.stream(ids, 9, GREEDY)) == plain(ids, 9)
        assert speculation.prefilled <= 3 + 1


@pytest.mark.parametrize("source", ("lookup", "twin", "other"))
@pytest.mark.parametrize("compiled", (False, True))
def test_a_reader_may_stop_within_accepted_drafts(no_compiler, make, plain, source, compiled):
    """Also while the next pass is in flight, as on a GPU: nobody reads it."""
    speculation = make(source, 5, compile=compiled)
    speculation.overlaps = compiled
    for taken in (1, 2, 6, 7):
        stream = speculation.stream(PROMPT, 20, GREEDY)
        answer = list(itertools.islice(stream, taken))
        stream.close()
        assert speculation.ids[0] == PROMPT + answer
        for tail in ([9, 11, 4], [*plain(PROMPT, 20)[taken : taken + 2], 7]):
            ids = PROMPT + answer + tail
            assert list(speculation.stream(ids, 9, GREEDY)) == plain(ids, 9)


@pytest.mark.parametrize(
    "source", ("lookup", pytest.param("twin", marks=pytest.mark.slow), "other")
)
def test_a_session_and_its_speculation_take_turns(make, plain, source):
    speculation = make(source, 5)
    first = list(speculation.stream(PROMPT, 9, GREEDY))
    second = list(speculation.session.stream(PROMPT + first, 9, GREEDY))
    ids = PROMPT + first + second
    assert first + second + list(speculation.stream(ids, 9, GREEDY)) == plain(PROMPT, 27)


@pytest.mark.parametrize(
    ("compiled", "source"), smoke_diagonal((False, True), ("lookup", "twin", "other"))
)
def test_a_session_is_used_to_its_last_position(no_compiler, make, plain, source, compiled):
    """112 positions and 16 spare ones are the cache's 128; 15 drafts past the last fill them."""
    speculation = make(source, 15, length=112, compile=compiled)
    speculation.overlaps = compiled  # the next pass is in flight, as on a GPU
    assert speculation.cache_len == 128
    for length in range(108, 112):
        ids = (PROMPT * 10)[:length]
        assert list(speculation.stream(ids, 112 - length, GREEDY)) == plain(ids, 112 - length)


def test_impossible_speculation_is_refused(make, make_family):
    directory = make_family("mixtral").directory
    model = load_model(directory, "cpu")
    for count in (0, 16):
        with pytest.raises(ValueError, match=rf"--draft_tokens {count}: .* from 1 to 15"):
            Speculation(Session(model, 64), count)
    with pytest.raises(ValueError, match="one sequence, not 2"):
        Speculation(Session(model, 64, SessionOptions(batch=2)), 4, load_model(directory, "cpu"))
    with pytest.raises(ValueError, match="load it twice"):
        Speculation(Session(model, 64), 4, model)
    with torch.device("meta"):
        small = Transformer(ModelArgs("mixtral", 16, 1, 2, 2, 8, 16, 2, 1, 100, 64))
    message = r"vocabulary of 100 tokens .* 160: give --draft_checkpoint_path"
    with pytest.raises(ValueError, match=message):
        Speculation(Session(model, 64), 4, small)


def test_impossible_prompts_are_refused(make):
    speculation = make("twin", 4, length=64)
    for ids, count, message in (
        ([], 1, "prompt is empty"),
        ([160], 1, "from 0 to 159"),
        (PROMPT, 51, "at most 50"),
    ):
        with pytest.raises(ValueError, match=message):
            list(speculation.stream(ids, count, GREEDY))
    assert list(speculation.stream(PROMPT, 0, GREEDY)) == []
    assert speculation.statistics()["tokens_per_pass"] is None
    Session(speculation.drafter.model, 64)
    with pytest.raises(ValueError, match="another session has taken this model"):
        list(speculation.stream(PROMPT, 3, GREEDY))


# Lookup -------------------------------------------------------------------------------------------


def find_by_scan(ids: list[int], count: int) -> list[int]:
    """The drafts of a LookupDrafter, found without an index."""
    for n in NGRAMS:
        for start in range(len(ids) - 1, n - 1, -1):
            if ids[start - n : start] == ids[-n:]:
                text = list(ids)
                for at in range(start, start + count):  # past the end it continues itself
                    text.append(text[at])
                within = start + count <= len(ids)
                return text[start : start + count] if within else text[len(ids) :]
    return []


@given(
    ids=st.lists(st.integers(0, 3), max_size=40), cut=st.integers(0, 40), count=st.integers(1, 7)
)
@settings(max_examples=200, deadline=None)
def test_lookup_finds_what_a_scan_finds(ids, cut, count):
    drafter = LookupDrafter(Session(SMALL, 32), count)
    drafter.start_prompt(ids[:cut], GREEDY)
    text, drafter.target.ids[0] = drafter.text, ids
    assert drafter.find(count) == find_by_scan(ids, count) and text.ids == ids
    longest = next((n for n in NGRAMS if text.match() and text.match()[0] == n), None)
    expected = None if longest is None else LONG if longest >= LONG_MATCH else SHORT
    assert drafter.source() == expected
    drafter.start_prompt([*ids, 1, 2], GREEDY)
    assert text.ids == [*ids, 1, 2] and drafter.text is text
    drafter.start_prompt([7, *ids], GREEDY)
    assert drafter.text.ids == [7, *ids] and drafter.text.find(count) == find_by_scan(ids, count)


# Sampling -----------------------------------------------------------------------------------------


def small_model(seed: int) -> Transformer:
    args = ModelArgs(
        "mixtral",
        dim=16,
        n_layer=1,
        n_head=2,
        n_kv_head=2,
        head_dim=8,
        intermediate=16,
        n_expert=2,
        n_active=1,
        vocab_size=8,
        max_position=64,
    )
    return scramble(Transformer(args), seed)


SMALL = small_model(0)


def chi_square(found: Counter, expected: dict, total: int) -> float:
    """Return chi-square over its limit at 0.1 % (Wilson & Hilferty 1931): above 1 is a difference.

    Rare cells are merged.
    """
    possible = {cell for cell, p in expected.items() if p > 0}
    assert set(found) <= possible, "a token of probability 0 was drawn"
    cells = [(found[cell], total * p) for cell, p in expected.items() if total * p >= 5]
    rest = (total - sum(a for a, _ in cells), total - sum(b for _, b in cells))
    cells += [rest] if rest[1] > 1e-3 else []
    degrees = len(cells) - 1
    limit = degrees * (1 - 2 / (9 * degrees) + 3.09 * (2 / (9 * degrees)) ** 0.5) ** 3
    return sum((a - b) ** 2 / b for a, b in cells) / limit


def probabilities(logits: torch.Tensor, sampling: Sampling, seen) -> torch.Tensor:
    """Return the distribution of a Sampling: penalty, temperature, top_k, top_p, min_p in turn."""
    logits, penalty = logits.double().clone(), sampling.repetition_penalty
    for token in set(seen):
        logits[token] *= penalty if logits[token] < 0 else 1 / penalty
    logits /= sampling.temperature
    order = logits.argsort(descending=True)
    logits[order[sampling.top_k :]] = float("-inf")
    p = logits.softmax(0)
    logits[order[p[order].cumsum(0) - p[order] >= sampling.top_p]] = float("-inf")
    logits[p < sampling.min_p * p.max()] = float("-inf")
    return logits.softmax(0)


SETTINGS = (
    Sampling(temperature=1.0, top_k=12),
    Sampling(temperature=1.2, top_k=9, top_p=0.95, min_p=0.05, repetition_penalty=1.5),
)


@pytest.mark.parametrize(
    ("rule", "source", "setting"),
    smoke_diagonal(
        ("right", "accept all", "no residual"),
        ("certain", "drawn"),
        range(len(SETTINGS)),
        also=[("right", "drawn", 1)],
    ),
)
def test_verified_tokens_have_the_models_distribution(setting, source, rule, monkeypatch):
    """3000 verifications of 2 drafts; wrong rules fail."""
    V, N, total, sampling = 12, 2, 3000, SETTINGS[setting]
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(N + 1, V, generator=generator)
    q = (logits[:N] / 2 + torch.randn(N, V, generator=generator)).softmax(-1)
    seen, token = torch.zeros(1, V, dtype=torch.bool), torch.tensor([[3]])
    seen[0, [3, 5]] = True
    state = StepState(
        token,
        torch.zeros(1, 1, dtype=torch.int64),
        torch.zeros(1, dtype=torch.int64),
        seen,
        sampling.controls(V)[None],
        torch.tensor([11]),
    )
    best = probabilities(logits[0], sampling, [3, 5]).argsort(descending=True)
    first, second = Counter(), {}
    for n in range(total):
        state.position.fill_(n)
        if source == "drawn":
            drafts = torch.multinomial(q, 1, generator=generator).T
        else:  # the second likeliest, then any
            drafts = best[None, 1 : N + 1]
        given = q[None] if source == "drawn" else None
        if rule == "accept all":
            monkeypatch.setattr(verification, "uniform", lambda *_: torch.zeros(1, N))
        tokens = torch.cat((token, drafts), dim=1)
        counts, out = verify_sampled(logits[None], tokens, torch.tensor([N]), given, state, V)
        tokens, count = out[0].tolist(), counts.item()
        assert len(tokens) == N + 1 and 1 <= count <= N + 1
        assert len(set(tokens[count - 1 :])) == 1
        if rule == "no residual" and count == 1:  # after a refusal, draw from p
            noise = Noise(state.seeds, state.position, V)
            tokens[0] = sample(logits[:1], state.controls, seen, noise).item()
        first[tokens[0]] += 1
        if count > 1:
            second.setdefault(tokens[0], Counter())[tokens[1]] += 1
    expected = probabilities(logits[0], sampling, [3, 5]).tolist()
    worst = [chi_square(first, dict(enumerate(expected)), total)]
    for before, counts in second.items():
        if counts.total() >= 300:
            expected = probabilities(logits[1], sampling, [3, 5, before]).tolist()
            worst.append(chi_square(counts, dict(enumerate(expected)), counts.total()))
    assert len(worst) > 1
    assert max(worst) <= 1 if rule == "right" else worst[0] > 1


def exact_answers(model: Transformer, ids: list[int], count: int, sampling: Sampling) -> dict:
    """Return the probability of each answer of `count` tokens."""

    def logits_after(ids) -> torch.Tensor:
        model.setup_cache(1, 32)
        return model(torch.tensor([ids]), torch.arange(len(ids))[None])[0]

    answers = {(): 1.0}
    for _ in range(count):
        longer = {}
        for answer, mass in answers.items():
            text = [*ids, *answer]
            p = probabilities(logits_after(text), sampling, text)
            longer |= {(*answer, n): mass * p[n].item() for n in range(8) if p[n] > 0}
        answers = longer
    return answers


@pytest.mark.parametrize("source", ("lookup", pytest.param("draft", marks=pytest.mark.slow)))
@pytest.mark.parametrize("right", (True, False))
def test_answers_have_the_models_distribution(source, right, monkeypatch):
    """500 answers of 3 tokens have their exact probabilities; not so if every draft is accepted."""
    sampling, total = Sampling(temperature=0.35, top_k=3, repetition_penalty=1.2), 500
    ids, model = [0, 1, 2, 3, 4, 5, 6, 7, 2], small_model(0)
    expected = exact_answers(model, ids, 3, sampling)
    assert len(expected) == 27 and abs(sum(expected.values()) - 1) < 1e-9
    draft = small_model(1) if source == "draft" else None
    speculation = Speculation(Session(model, 32), 2, draft)
    if not right:
        always = lambda seeds, position, index, stream: torch.zeros(1, len(index))  # noqa: E731
        monkeypatch.setattr(verification, "uniform", always)
    found, passes, accepted = Counter(), 0, 0
    for seed in range(total):
        found[tuple(speculation.stream(ids, 3, replace(sampling, seed=seed)))] += 1
        passes += speculation.passes
        accepted += speculation.accepted
    assert passes < 2 * total and 0 < accepted < 2 * total
    if right:
        assert chi_square(found, expected, total) <= 1
    else:
        assert chi_square(found, expected, total) > 1


@pytest.mark.parametrize("source", ("lookup", "twin"))
def test_same_seed_same_tokens(make, source):
    speculation = make(source, 4)
    first = list(speculation.stream(PROMPT, 30, Sampling(1.5, seed=7)))
    speculation.reset()
    assert list(speculation.stream(PROMPT, 30, Sampling(1.5, seed=7))) == first
    assert list(speculation.stream(PROMPT, 30, Sampling(1.5, seed=8))) != first


def test_drafts_of_a_twin_are_always_accepted(make):
    """p is q up to rounding, if q is the distribution drawn from, with all settings."""
    speculation = make("twin", 4)
    sampling = Sampling(1.3, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.3, seed=1)
    assert len(list(speculation.stream(PROMPT, 61, sampling))) == 61
    counts = {"passes": 12, "drafted": 48, "accepted": 48, "tokens_per_pass": 5.0}
    assert speculation.statistics() == counts


# Compiled -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("source", ("lookup", "twin"))
def test_compiled_equals_eager_and_never_recompiles(make, plain, source):
    torch._dynamo.reset()
    speculation = make(source, 5, compile=True)
    for ids in (PROMPT, PROMPT * 3):
        assert list(speculation.stream(ids, 30, GREEDY)) == plain(ids, 30)
    assert len(list(speculation.stream(PROMPT, 31, Sampling(seed=1)))) == 31
    assert source == "lookup" or speculation.statistics()["tokens_per_pass"] == 6
    before = counters["stats"]["unique_graphs"]
    for length in range(1, 90, 7):
        temperature, top_p = 0.1 + length / 100, 0.5 + length / 320
        settings = Sampling(temperature, top_k=length, top_p=top_p, seed=length)
        list(speculation.stream([i % 150 for i in range(length)], 30, settings))
        list(speculation.stream([i % 9 for i in range(length)], 30, GREEDY))
    assert counters["stats"]["unique_graphs"] == before


# The command --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "batch", "passes"),
    (
        ("lookup", 1, {(1, 3)}),
        ("twin", 1, {(1, 3)}),
        ("lookup", 4, {(1, 3), (2, 3), (4, 1)}),
    ),
)
def test_kernels_of_all_passes_are_compiled_with_those_of_steps(
    make, source, batch, passes, monkeypatch
):
    """Those of each number of drafts up to the most, by rows: a lookup may find fewer.

    A model's drafts have probabilities; lookups before them have none.
    """
    speculation, found = make(source, 3, batch=batch), {}
    joins = speculation.session.joins_greedy = source == "lookup"
    given = [False] if source == "lookup" else [False, True]
    wanted = {(rows, count): given for rows, most in passes for count in range(1, most + 1)}
    speculation.sizes = [size for size in (1, 2, 4, 8) if size <= batch]

    def note(runner, state, drafts, q, result, reach, greedy) -> None:
        assert greedy == (q is None and not joins)
        assert len(state.token) == len(drafts) and (q is None or q.shape[:2] == drafts.shape)
        found.setdefault(tuple(drafts.shape), []).append(q is not None)

    monkeypatch.setattr("runtime.speculation.launch_pass", note)
    speculation.session.launch_more(SimpleNamespace(reaches=lambda queries, length: [None]))
    assert found == wanted


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Run generate.py in this process -> exit code, stdout, stderr."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))

        def run(*arguments: str, text: str = "") -> tuple[int, str, str]:
            out, errors = io.StringIO(), io.StringIO()
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(sys, "argv", ["generate.py", "--dtype", "fp32", *arguments])
                inner.setattr(sys, "stdin", io.StringIO(text))
                inner.setattr(sys, "stdout", out)
                inner.setattr(sys, "stderr", errors)
                try:
                    code = main()
                except SystemExit as exit:
                    code = exit.code
            return code, out.getvalue(), errors.getvalue()

        yield run


TEXT = "def read(path):\n    with open(path) as file:\n        return file.read()\n\n\n"


def drafts_of_each_kind() -> tuple[tuple[str, ...], ...]:
    """Options: lookup, then the embedded model as its own draft model."""
    return (
        ("--speculate", "lookup"),
        ("--draft_checkpoint_path", str(generate.embedded_checkpoint())),
    )


@pytest.mark.slow
def test_the_command_speculates(command):
    prompt = TEXT + "def read(path):\n"
    common = "--prompt", prompt, "--temperature", "0", "--max_new_tokens", "41", "--ignore_eos"
    _, expected, _ = command(*common, "--speculate", "off")
    for options in drafts_of_each_kind():
        code, text, errors = command(*common, *options, "--draft_tokens", "3")
        assert code == 0 and text == expected
        end = r", peak memory [\d.]+ [MG]B, [234]\.\d\d tokens/pass$"
        assert re.search(end, errors.strip())
        code, out, _ = command(*common, *options, "--num_samples", "2", "--json")
        results = json.loads(out)["results"]
        assert code == 0 and [result["text"] + "\n" for result in results] == [expected, expected]
        found = results[0]["speculation"]
        assert found == results[1]["speculation"] and results[0]["gb_s"] is None
        assert set(found) == {"passes", "drafted", "accepted", "tokens_per_pass"}
        assert found["drafted"] % 4 == 0 and found["accepted"] <= found["drafted"]
        assert found["tokens_per_pass"] == 40 / found["passes"]
    assert found["accepted"] == 40 - found["passes"] and found["passes"] == 8
    plain = json.loads(command(*common, "--json", "--speculate", "off")[1])
    assert "speculation" not in plain and plain["gb_s"] > 0


def test_the_command_speculates_by_itself(command):
    """By default, and with a draft model: the text of plain decoding, and the counts of passes."""
    prompt = TEXT * 3 + "def read(path):\n"
    common = "--prompt", prompt, "--temperature", "0", "--max_new_tokens", "24", "--ignore_eos"
    _, expected, _ = command(*common, "--speculate", "off")
    draft = "--draft_checkpoint_path", str(generate.embedded_checkpoint())
    for options in ((), ("--speculate", "auto", *draft)):
        _, out, _ = command(*common, *options, "--json")
        result = json.loads(out)
        found = result["speculation"]
        assert result["text"] + "\n" == expected and result["gb_s"] is None
        assert 0 < found["accepted"] <= found["drafted"]
        assert found["tokens_per_pass"] == 23 / found["passes"] > 1
    few = json.loads(command(*common, *draft, "--draft_vocab", "500", "--json")[1])
    assert few["text"] + "\n" == expected
    assert few["speculation"]["tokens_per_pass"] < 5  # with all tokens every draft is accepted
    seeded = "--prompt", prompt, "--seed", "3", "--max_new_tokens", "24", "--json"
    result, plain = (
        json.loads(command(*seeded, *more)[1]) for more in ((), ("--speculate", "off"))
    )
    assert result["text"] == plain["text"]  # the same seed, the same text
    assert "speculation" not in result and result["gb_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "prompts", "ranks", "kind"),
    (
        ("", 1, 1, "auto"),
        ("--interactive", 0, 1, "auto"),
        ("--compile", 1, 1, "off"),
        ("--compile --interactive", 0, 1, "auto"),
        ("--compile --interactive --speculate off", 0, 1, "off"),
        ("--compile --interactive --offload --gpu_experts 2", 0, 1, "off"),
        ("--compile --interactive", 0, 2, "off"),
        ("", 2, 1, "off"),
        ("--batch_size 1", 2, 1, "auto"),
        ("--batch_size 1 --compile", 2, 1, "off"),
        ("", 1, 2, "off"),
        ("--offload --gpu_experts 2", 1, 1, "off"),
        ("--speculate off", 1, 1, "off"),
        ("--speculate auto", 2, 1, "auto"),
        ("--speculate auto --compile", 1, 1, "auto"),
        ("--speculate mtp --compile", 1, 1, "mtp"),
        ("--speculate lookup --compile", 1, 1, "lookup"),
        ("--speculate lookup", 1, 2, "lookup"),
        ("--draft_checkpoint_path x", 1, 1, "model"),
        ("--draft_checkpoint_path x --compile", 1, 1, "model"),
        ("--speculate auto --draft_checkpoint_path x", 1, 1, "auto"),
    ),
)
def test_what_an_answer_speculates_with(arguments, prompts, ranks, kind, monkeypatch):
    monkeypatch.setattr("generate.process_group.size", lambda: ranks)
    options = build_parser().parse_args(arguments.split())
    check_options(options)
    assert generate.choose_speculation(options, prompts) == kind


@pytest.mark.parametrize("given", ((), ("--speculate", "auto")))
def test_a_chat_captures_its_passes_between_answers(given, no_compiler, make_family, monkeypatch):
    """The first answer takes plain steps, so that a chat starts as fast; the second has drafts.

    Passes that Inductor would compile for long are made on request alone. In fp32: in 16 bits some
    CPUs round another token.
    """
    monkeypatch.setattr(Session, "captures_fast", True)
    monkeypatch.setattr("generate.use_compile_cache", lambda folder: None)
    arguments = "--interactive", "--compile", "--device", "cpu", *given
    options = build_parser().parse_args(arguments)
    check_options(options)
    checkpoint = generate.open_source(make_family("mixtral").directory)
    speculation = generate.prepare_session(options, checkpoint, torch.device("cpu"), 128, [])
    made = []

    def answer(name: str, given) -> None:
        tokens = list(speculation.stream([5, 6, 7, 8] * 5, 30, GREEDY))
        made.append((tokens, len(speculation.steps), speculation.drafted))

    def turns(*_):
        return SimpleNamespace(handle=answer, last_message=lambda: None)

    monkeypatch.setattr("generate.Chat", turns)
    monkeypatch.setattr("generate.read_requests", lambda last: iter([("", "a"), ("", "b")]))
    generate.chat(speculation, None, options, GREEDY)
    (first, no_passes, _), (second, passes, drafted) = made
    assert first == second and (no_passes, passes) == (0, 4) and drafted
    monkeypatch.setattr(Session, "captures_fast", False)
    found = generate.prepare_session(options, checkpoint, torch.device("cpu"), 256, [])
    assert speculation.captures.waits and isinstance(found, Speculation) == bool(given)
    assert not given or not found.captures.waits


def test_greedy_and_sampled_answers_share_steps_where_kernels_choose(no_compiler, make, plain):
    """A greedy one has a top_k of 1: a server captures 16 steps and 8 passes less."""
    for source in ("lookup", "twin"):
        speculation = make(source, 3, compile=True)
        session = speculation.session
        session.joins_greedy = source == "lookup"  # a draft model's distributions are not greedy
        few = session.seen.shape[1]
        sampled = Sampling(temperature=1.0, top_k=20)
        assert session.candidates(GREEDY) == (few if source == "lookup" else 0)
        assert list(speculation.stream(PROMPT, 20, GREEDY)) == plain(PROMPT, 20)
        steps, passes = len(session.steps), len(speculation.steps)
        list(speculation.stream(PROMPT, 20, sampled))
        joined = (len(session.steps), len(speculation.steps)) == (steps, passes)
        assert joined == session.joins_greedy


def test_auto_on_several_ranks_is_refused(monkeypatch):
    monkeypatch.setattr("generate.process_group.size", lambda: 2)
    options = build_parser().parse_args(["--speculate", "auto"])
    with pytest.raises(ValueError, match="2 ranks would not agree: give --speculate lookup"):
        generate.choose_speculation(options, 1)


def test_a_stop_text_within_accepted_drafts(command):
    """The text ends at the stop text, or at the end-of-text token, wherever the drafts end."""
    draft = "--draft_checkpoint_path", str(generate.embedded_checkpoint()), "--draft_tokens", "7"
    common = "--prompt", TEXT, "--temperature", "0", "--max_new_tokens", "40"
    _, expected, _ = command(*common)
    for stop in sorted({expected[at : at + 3] for at in (2, 21)}):
        text = command(*common, *draft, "--stop", stop)[1]
        assert text == expected[: expected.index(stop)] + "\n"
    prompt = "if __name__ == '__main__':\n    main()\n"
    ending = "--prompt", prompt, "--temperature", "0", "--max_new_tokens", "200", "--json"
    plain, drafted = (json.loads(command(*ending, *more)[1]) for more in ((), draft))
    assert plain["finish_reason"] == drafted["finish_reason"] == "stop"
    assert plain["text"] == drafted["text"] and plain["new_tokens"] == drafted["new_tokens"]


def test_a_chat_continues_from_the_cache(command):
    common = "--interactive", "--temperature", "0", "--max_new_tokens", "8"
    lines = "import os\nimport sys\ndef main(\n/reset\nimport os\n/exit\n"
    _, expected, plain = command(*common, "--speculate", "off", text=lines)
    for options in (*drafts_of_each_kind(), ()):
        code, text, errors = command(*common, *options, text=lines)
        assert code == 0 and text == expected
        used = r"(\d+) tokens?(?: at [\d.,]+/s)?, context ([\d,]+) of"
        assert len(re.findall(used, plain)) == 4
        assert re.findall(used, errors) == re.findall(used, plain)


def test_mistakes_are_refused_before_weights_are_read(command, make_family, monkeypatch):
    monkeypatch.setattr(generate, "load_model", None)
    draft = "--draft_checkpoint_path", str(make_family("mixtral").directory)
    lookup = "--speculate", "lookup"
    for arguments, message in (
        (("--draft_tokens", "4"), "--draft_tokens needs a source of drafts"),
        ((*lookup, *draft), "leave one of them out"),
        (("--speculate", "off", *draft), "leave one of them out"),
        (("--speculate", "off", "--draft_tokens", "4"), "--draft_tokens needs a source of drafts"),
        ((*lookup, "--draft_vocab", "99"), "--draft_vocab needs a model or a head that drafts"),
        ((*draft, "--draft_vocab", "0"), "--draft_vocab 0: it must be"),
        (
            ("--speculate", "auto", "--draft_vocab", "99"),
            "--draft_vocab 99: this checkpoint has no",
        ),
        ((*lookup, "--draft_tokens", "16"), "--draft_tokens 16: it must be from 1 to 15"),
        ((*lookup, "--draft_tokens", "0"), "--draft_tokens 0: it must be from 1 to 15"),
        (draft, "vocabulary of 160 tokens and the model one of"),
        (("--draft_checkpoint_path", "nowhere"), "nowhere is not a directory"),
    ):
        code, out, errors = command(*arguments)
        assert code == 2 and out == "" and message in errors
        assert errors.startswith("error: ") and errors.count("\n") == 1
    assert command("--speculate", "trees")[0] == 2

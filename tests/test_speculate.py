"""Speculation: greedy tokens are those of plain decoding, draws have the model's distribution, whatever is drafted."""

import io
import itertools
import json
import re
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters

import generate
from args import ModelArgs
from generate import load_model, main
from model import Transformer
from session import Sampling, Session, sample
from speculate import NGRAM, DraftModel, Lookup, Speculation, accept

GREEDY = Sampling(temperature=0)
PROMPT = [5, 17, 3, 99, 42, 8, 120, 5, 17, 3, 99, 11, 5, 17]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """These models are so small that threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def scrambled(model: Transformer, seed: int = 1) -> Transformer:
    """The same model with other weights."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


@pytest.fixture(scope="module")
def make(make_family):
    """(source of drafts, N, family, session options) -> Speculation; "twin" is the target's own weights again."""

    def made(source: str, count: int, name: str = "mixtral", length: int = 128, **options) -> Speculation:
        directory = make_family(name).directory
        draft = {
            "lookup": lambda: None,
            "twin": lambda: load_model(directory, "cpu"),
            "other": lambda: scrambled(load_model(directory, "cpu", torch.float32)),
        }[source]()
        return Speculation(Session(load_model(directory, "cpu"), length, **options), count, draft)

    return made


@pytest.fixture(scope="module")
def plain(make_family):
    """(ids, how many, sampling, family) -> tokens of plain decoding from nothing."""
    sessions = {}

    def tokens(ids, count: int, sampling: Sampling = GREEDY, name: str = "mixtral") -> list[int]:
        if name not in sessions:
            sessions[name] = Session(load_model(make_family(name).directory, "cpu"), 256)
        sessions[name].reset()
        return list(sessions[name].stream(ids, count, sampling))

    return tokens


@pytest.fixture
def uncompiled(monkeypatch):
    """Sessions take the way of compiled ones (tensor positions, static shapes, a warm-up), with nothing compiled."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


# Greedy -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", (1, 3, 7))
@pytest.mark.parametrize("source", ("lookup", "twin", "other"))
def test_greedy_tokens_are_those_of_plain_decoding(family, make, plain, source, count):
    speculation = make(source, count, family.name)
    want = plain(PROMPT, 25, name=family.name)
    assert list(speculation.stream(PROMPT, 25, GREEDY)) == want
    facts = speculation.statistics()
    assert speculation.delivered == 24 and facts["tokens_per_pass"] == 24 / facts["passes"]
    if source == "twin":  # everything is accepted
        assert facts["passes"] == 24 / (count + 1) and facts["accepted"] == 24 - facts["passes"]
    if source == "other":
        assert facts["drafted"] == facts["passes"] * count and facts["accepted"] < 0.1 * facts["drafted"]
    if source == "lookup":
        assert facts["drafted"] > 0 and facts["accepted"] - (24 - facts["passes"]) in (0, 1)


@pytest.mark.parametrize("source", ("lookup", "twin", "other"))
def test_the_way_of_a_compiled_session_gives_the_same(uncompiled, make, plain, source):
    speculation = make(source, 5, compile=True)
    for ids in (PROMPT, PROMPT[:3], PROMPT * 3):
        assert list(speculation.stream(ids, 30, GREEDY)) == plain(ids, 30)


@pytest.mark.parametrize("source", ("lookup", "twin"))
@pytest.mark.parametrize("penalty", (1.3, 1e9))
def test_a_repetition_penalty_counts_the_drafts_before(make, plain, source, penalty):
    sampling = Sampling(temperature=0, repetition_penalty=penalty)
    speculation = make(source, 4)
    got = list(speculation.stream(PROMPT, 41, sampling))
    assert got == plain(PROMPT, 41, sampling)
    assert penalty < 2 or len(set(got) | set(PROMPT)) == len(got) + len(set(PROMPT))
    assert source == "lookup" or speculation.accepted == 40 - speculation.passes == 32


@pytest.mark.parametrize("compiled", (False, True))
@pytest.mark.parametrize("known", (0, 1))
def test_what_refused_drafts_left_in_the_cache_is_never_seen(uncompiled, make, plain, compiled, known):
    """Whatever stands past the known tokens after a pass; spoiling a known one as well is noticed."""
    speculation = make("other", 5, compile=compiled)
    verify = speculation.verify

    def verify_and_spoil(candidates: int) -> None:
        verify(candidates)
        for cache in speculation.caches:
            cache.kv[:, :, :, int(speculation.position) - known :] = 1e3

    speculation.verify = verify_and_spoil
    assert (list(speculation.stream(PROMPT, 30, GREEDY)) == plain(PROMPT, 30)) == (not known)


# Ends ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ("lookup", "twin", "other"))
def test_an_answer_may_end_inside_an_accepted_run(make, plain, source):
    """Never more than asked for, and what follows is as if from nothing: a turn of a chat reuses the cache."""
    speculation = make(source, 5)
    for count in (1, 2, 6, 7, 13):
        got = list(speculation.stream(PROMPT, count, GREEDY))
        assert got == plain(PROMPT, count) and speculation.ids[0] == PROMPT + got
        ids = PROMPT + got + [9, 11, 4]
        assert list(speculation.stream(ids, 9, GREEDY)) == plain(ids, 9)
        assert speculation.prefilled <= 3 + 1


@pytest.mark.parametrize("source", ("lookup", "twin", "other"))
@pytest.mark.parametrize("compiled", (False, True))
def test_a_reader_may_stop_inside_an_accepted_run(uncompiled, make, plain, source, compiled):
    speculation = make(source, 5, compile=compiled)
    for taken in (1, 2, 6, 7):
        stream = speculation.stream(PROMPT, 20, GREEDY)
        got = list(itertools.islice(stream, taken))
        stream.close()
        assert speculation.ids[0] == PROMPT + got
        for tail in ([9, 11, 4], [*plain(PROMPT, 20)[taken : taken + 2], 7]):
            assert list(speculation.stream(PROMPT + got + tail, 9, GREEDY)) == plain(PROMPT + got + tail, 9)


@pytest.mark.parametrize("source", ("lookup", "twin", "other"))
def test_a_session_and_its_speculation_take_turns(make, plain, source):
    speculation = make(source, 5)
    first = list(speculation.stream(PROMPT, 9, GREEDY))
    second = list(speculation.session.stream(PROMPT + first, 9, GREEDY))
    ids = PROMPT + first + second
    assert first + second + list(speculation.stream(ids, 9, GREEDY)) == plain(PROMPT, 27)


@pytest.mark.parametrize("source", ("lookup", "twin", "other"))
@pytest.mark.parametrize("compiled", (False, True))
def test_a_session_is_used_to_its_last_position(uncompiled, make, plain, source, compiled):
    """112 positions and 16 more are the cache's 128 slots; 15 drafts past the last token fill them."""
    speculation = make(source, 15, length=112, compile=compiled)
    assert speculation.slots == 128
    for length in range(108, 112):
        ids = (PROMPT * 10)[:length]
        assert list(speculation.stream(ids, 112 - length, GREEDY)) == plain(ids, 112 - length)


def test_what_cannot_be_is_refused(make, make_family):
    model = load_model(make_family("mixtral").directory, "cpu")
    for count in (0, 16):
        with pytest.raises(ValueError, match=rf"--draft_tokens {count}: .* from 1 to 15"):
            Speculation(Session(model, 64), count)
    with pytest.raises(ValueError, match="one sequence, not 2"):
        Speculation(Session(model, 64, batch=2))
    with pytest.raises(ValueError, match="load it twice"):
        Speculation(Session(model, 64), 4, model)
    with torch.device("meta"):
        small = Transformer(ModelArgs(16, 1, 2, 2, 8, 16, 2, 1, 100, 64))
    with pytest.raises(ValueError, match=r"vocabulary of 100 tokens .* 160: give --draft_checkpoint_path"):
        Speculation(Session(model, 64), 4, small)
    speculation = make("twin", 4, length=64)
    for ids, count, words in (([], 1, "prompt is empty"), ([160], 1, "from 0 to 159"), (PROMPT, 51, "at most 50")):
        with pytest.raises(ValueError, match=words):
            list(speculation.stream(ids, count, GREEDY))
    assert list(speculation.stream(PROMPT, 0, GREEDY)) == [] and speculation.statistics()["tokens_per_pass"] is None
    Session(speculation.drafter.model, 64)
    with pytest.raises(ValueError, match="another session has taken this model"):
        list(speculation.stream(PROMPT, 3, GREEDY))


# Lookup -------------------------------------------------------------------------------------------------------------


@given(ids=st.lists(st.integers(0, 3), max_size=40), cut=st.integers(0, 40), count=st.integers(1, 7))
@settings(max_examples=200, deadline=None)
def test_lookup_finds_what_a_scan_finds(ids, cut, count):
    def scan() -> list[int]:
        for n in range(min(NGRAM, len(ids) - 1), 0, -1):
            for start in range(len(ids) - 1, n - 1, -1):
                if ids[start - n : start] == ids[-n:]:
                    text = list(ids)  # what is found may reach past the end: then it goes on with itself
                    for at in range(start, start + count):
                        text.append(text[at])
                    return text[start : start + count] if start + count <= len(ids) else text[len(ids) :]
        return []

    lookup = Lookup(Session(SMALL, 32), count)
    lookup.begin([ids[:cut]], GREEDY)
    lookup.extend(ids[cut:])
    assert lookup.find() == scan()
    known = lookup.next
    lookup.begin([[*ids, 1, 2]], GREEDY)
    assert lookup.ids == [*ids, 1, 2] and lookup.next is known
    lookup.begin([[7, *ids]], GREEDY)
    assert lookup.ids == [7, *ids] and lookup.find() == scan()


# Sampling -----------------------------------------------------------------------------------------------------------


def small_model(seed: int) -> Transformer:
    args = ModelArgs(dim=16, n_layer=1, n_head=2, n_kv_head=2, head_dim=8, intermediate=16, n_expert=2, n_active=1,
                     vocab_size=8, max_position=64)  # fmt: skip
    return scrambled(Transformer(args), seed)


SMALL = small_model(0)


def chi_square(got: Counter, want: dict, total: int) -> float:
    """Against the limit at 0.1 % (Wilson & Hilferty 1931): above 1 is a difference. Rare cells are put together."""
    assert set(got) <= {cell for cell, p in want.items() if p > 0}, "what cannot be drawn was drawn"
    cells = [(got[cell], total * p) for cell, p in want.items() if total * p >= 5]
    rest = (total - sum(a for a, _ in cells), total - sum(b for _, b in cells))
    cells += [rest] if rest[1] > 1e-3 else []
    degrees = len(cells) - 1
    limit = degrees * (1 - 2 / (9 * degrees) + 3.09 * (2 / (9 * degrees)) ** 0.5) ** 3
    return sum((a - b) ** 2 / b for a, b in cells) / limit


def probabilities(logits: torch.Tensor, sampling: Sampling, seen) -> torch.Tensor:
    """The distribution that `Sampling` defines, step by step: penalty, temperature, top_k, top_p, min_p."""
    logits = logits.double().clone()
    for token in set(seen):
        logits[token] *= sampling.repetition_penalty if logits[token] < 0 else 1 / sampling.repetition_penalty
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


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
@pytest.mark.parametrize("source", ("certain", "drawn"))
@pytest.mark.parametrize("rule", ("right", "accept all", "no residual"))
def test_accepted_and_refused_drafts_together_have_the_models_distribution(sampling, source, rule):
    """3000 verdicts on 2 drafts; wrong rules are told from the right one."""
    V, N, total, generator = 12, 2, 3000, torch.Generator().manual_seed(5)
    logits = torch.randn(N + 1, V, generator=generator)
    q = (logits[:N] / 2 + torch.randn(N, V, generator=generator)).softmax(-1)
    seen, token = torch.zeros(1, V, dtype=torch.bool), torch.tensor([[3]])
    seen[0, [3, 5]] = True
    controls = torch.tensor(
        [sampling.temperature, sampling.top_k, min(2.0, sampling.top_p), sampling.min_p, sampling.repetition_penalty]
    )
    best = probabilities(logits[0], sampling, [3, 5]).argsort(descending=True)
    first, second = Counter(), {}
    for _ in range(total):
        # Certain drafts: the second likeliest, then any.
        drafts = torch.multinomial(q, 1, generator=generator).T if source == "drawn" else best[None, 1 : N + 1]
        noise = torch.empty(1, V).exponential_(generator=generator)
        uniform = torch.rand(N, 1, generator=generator)
        given = q if source == "drawn" else None
        if rule == "accept all":
            uniform.zero_()
        out = accept(logits, token, drafts, given, controls, seen, noise, uniform).tolist()
        assert len(out) == N + 2 and 1 <= out[-1] <= N + 1 and len(set(out[out[-1] - 1 : -1])) == 1
        if rule == "no residual" and out[-1] == 1:  # after a refusal, from p
            out[0] = sample(logits[:1], controls, seen, noise).item()
        first[out[0]] += 1
        if out[-1] > 1:
            second.setdefault(out[0], Counter())[out[1]] += 1
    worst = [chi_square(first, dict(enumerate(probabilities(logits[0], sampling, [3, 5]).tolist())), total)]
    for before, counts in second.items():
        if counts.total() >= 300:
            want = probabilities(logits[1], sampling, [3, 5, before]).tolist()
            worst.append(chi_square(counts, dict(enumerate(want)), counts.total()))
    assert len(worst) > 1
    assert max(worst) <= 1 if rule == "right" else worst[0] > 1


@pytest.mark.parametrize("source", ("lookup", "draft"))
@pytest.mark.parametrize("right", (True, False))
def test_answers_have_the_models_distribution(source, right):
    """500 answers of 3 tokens against their exact probabilities; one that accepts every draft is told from it."""
    sampling, total, ids = Sampling(temperature=0.35, top_k=3, repetition_penalty=1.2), 500, [0, 1, 2, 3, 4, 5, 6, 7, 2]
    model = small_model(0)

    def logits_after(ids) -> torch.Tensor:
        model.setup_cache(1, 32)
        return model(torch.tensor([ids]), torch.arange(len(ids))[None])[0]

    want = {(): 1.0}
    for _ in range(3):
        step = {}
        for said, mass in want.items():
            p = probabilities(logits_after([*ids, *said]), sampling, [*ids, *said])
            step |= {(*said, token): mass * p[token].item() for token in range(8) if p[token] > 0}
        want = step
    assert len(want) == 27 and abs(sum(want.values()) - 1) < 1e-9
    speculation = Speculation(Session(model, 32), 2, small_model(1) if source == "draft" else None)
    if not right:
        speculation.accept = lambda *given: accept(*given[:-1], given[-1] * 0)
    got, passes, accepted = Counter(), 0, 0
    for seed in range(total):
        got[tuple(speculation.stream(ids, 3, replace(sampling, seed=seed)))] += 1
        passes, accepted = passes + speculation.passes, accepted + speculation.accepted
    assert passes < 2 * total and 0 < accepted < 2 * total
    if right:
        assert chi_square(got, want, total) <= 1
    else:
        assert chi_square(got, want, total) > 1


@pytest.mark.parametrize("source", ("lookup", "twin"))
def test_same_seed_same_tokens(make, source):
    speculation = make(source, 4)
    first = list(speculation.stream(PROMPT, 30, Sampling(1.5, seed=7)))
    speculation.reset()
    assert list(speculation.stream(PROMPT, 30, Sampling(1.5, seed=7))) == first
    assert list(speculation.stream(PROMPT, 30, Sampling(1.5, seed=8))) != first


def test_a_twin_is_always_believed(make):
    """p is q up to rounding, if the draft's distribution is kept as it was drawn from, settings and all."""
    speculation = make("twin", 4)
    sampling = Sampling(1.3, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.3, seed=1)
    assert len(list(speculation.stream(PROMPT, 61, sampling))) == 61
    assert speculation.statistics() == {"passes": 12, "drafted": 48, "accepted": 48, "tokens_per_pass": 5.0}


# Compiled -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("source", ("lookup", "twin"))
def test_compiled_equals_eager_and_never_compiles_again(make, plain, source):
    torch._dynamo.reset()
    speculation = make(source, 5, compile=True)
    for ids in (PROMPT, PROMPT * 3):
        assert list(speculation.stream(ids, 30, GREEDY)) == plain(ids, 30)
    assert len(list(speculation.stream(PROMPT, 31, Sampling(seed=1)))) == 31
    assert source == "lookup" or speculation.statistics()["tokens_per_pass"] == 6
    before = counters["stats"]["unique_graphs"]
    for length in range(1, 90, 7):
        settings = Sampling(0.1 + length / 100, top_k=length, top_p=0.5 + length / 320, seed=length)
        list(speculation.stream([i % 150 for i in range(length)], 30, settings))
        list(speculation.stream([i % 9 for i in range(length)], 30, GREEDY))
    assert counters["stats"]["unique_graphs"] == before


# The command --------------------------------------------------------------------------------------------------------


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


def test_the_command_speculates(command):
    asked = ("--prompt", TEXT + "def read(path):\n", "--temperature", "0", "--max_new_tokens", "41", "--ignore_eos")
    _, want, _ = command(*asked)
    for options in (("--speculate", "lookup"), ("--draft_checkpoint_path", str(generate.embedded_checkpoint()))):
        code, got, errors = command(*asked, *options, "--draft_tokens", "3")
        assert code == 0 and got == want
        assert re.search(r", - GB/s, peak [\d.]+ GB, [234]\.\d\d tokens a pass$", errors.strip())
        code, got, _ = command(*asked, *options, "--num_samples", "2", "--json")
        results = json.loads(got)["results"]
        assert code == 0 and [result["text"] + "\n" for result in results] == [want, want]
        facts = results[0]["speculation"]
        assert facts == results[1]["speculation"] and results[0]["gb_s"] is None
        assert set(facts) == {"passes", "drafted", "accepted", "tokens_per_pass"} and facts["drafted"] % 4 == 0
        assert facts["tokens_per_pass"] == 40 / facts["passes"] and facts["accepted"] <= facts["drafted"]
    assert facts["accepted"] == 40 - facts["passes"] and facts["passes"] == 8
    assert "speculation" not in json.loads(command(*asked, "--json")[1])


def test_a_stop_inside_an_accepted_run(command):
    """The text ends at the stop, wherever in a run it is; so does an answer at the end-of-text token."""
    draft = ("--draft_checkpoint_path", str(generate.embedded_checkpoint()), "--draft_tokens", "7")
    asked = ("--prompt", TEXT, "--temperature", "0", "--max_new_tokens", "40")
    _, want, _ = command(*asked)
    for stop in sorted({want[at : at + 3] for at in range(2, 40, 6)}):
        assert command(*asked, *draft, "--stop", stop)[1] == want[: want.index(stop)] + "\n"
    ending = ("--prompt", "if __name__ == '__main__':\n    main()\n", "--temperature", "0", "--max_new_tokens", "200")
    plain, got = (json.loads(command(*ending, *more, "--json")[1]) for more in ((), draft))
    assert plain["finish_reason"] == got["finish_reason"] == "stop"
    assert (plain["text"], plain["new_tokens"]) == (got["text"], got["new_tokens"])


def test_a_chat_goes_on_from_what_the_cache_holds(command):
    asked = ("--interactive", "--temperature", "0", "--max_new_tokens", "12")
    lines = "import os\nimport sys\ndef main(\n/reset\nimport os\n/exit\n"
    _, want, plain = command(*asked, text=lines)
    for options in (("--speculate", "lookup"), ("--draft_checkpoint_path", str(generate.embedded_checkpoint()))):
        code, got, errors = command(*asked, *options, text=lines)
        assert code == 0 and got == want
        assert re.findall(r"prompt (\d+)", errors) == re.findall(r"prompt (\d+)", plain)


def test_refusals_come_before_weights_are_read(command, make_family, monkeypatch):
    monkeypatch.setattr(generate, "load_model", None)
    draft = ("--draft_checkpoint_path", str(make_family("mixtral").directory))
    for arguments, words in (
        (("--draft_tokens", "4"), "--draft_tokens needs a source of drafts"),
        (("--speculate", "lookup", *draft), "leave one of them out"),
        (("--speculate", "lookup", "--draft_tokens", "16"), "--draft_tokens 16: it must be from 1 to 15"),
        (("--speculate", "lookup", "--draft_tokens", "0"), "--draft_tokens 0: it must be from 1 to 15"),
        (draft, "vocabulary of 160 tokens and the model one of"),
        (("--draft_checkpoint_path", "nowhere"), "nowhere is not a directory"),
    ):
        code, out, errors = command(*arguments)
        assert code == 2 and out == "" and errors.startswith("error: ") and errors.count("\n") == 1 and words in errors
    assert command("--speculate", "trees")[0] == 2


def test_a_draft_model_draws_from_its_targets_generator(make):
    """Two generators of one seed would draw the same numbers for a draft and for the verdict on it."""
    speculation = make("twin", 2)
    assert isinstance(speculation.drafter, DraftModel)
    assert speculation.drafter.generator is speculation.session.generator

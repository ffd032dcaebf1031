"""Drafts for a sequence without neighbors: its text, and theirs, are those of plain steps."""

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from conftest import FAMILIES
from test_auto_speculation import AnyNumber
from test_batch import GREEDY, SAMPLINGS, answers_alone, make_session, random_requests, run
from test_sequence_state import KINDS
from test_speculate import chi_square, exact_answers, small_model

from generate import load_model
from runtime.drafting_batch import DraftingBatch
from runtime.loading import load_head
from runtime.sampling import NotFiniteError, Sampling
from runtime.session import Session, SessionOptions
from runtime.speculation import Speculation

pytestmark = pytest.mark.usefixtures("few_threads")
LIMIT = 4
# Accepted drafts of passes; passes with some after which the next step was one of a batch.
OUTCOMES = "none", "some", "all", "left"
RECURRENT = "qwen3_next", "qwen3_5_moe"


class Oracle:
    """Drafts the answers that it was given, wrong from a random token on."""

    q = None

    def __init__(self, target: Session, texts: list[list[int]], seed: int = 0):
        self.target, self.texts, self.random = target, texts, random.Random(seed)
        self.drafts = torch.zeros(1, LIMIT, dtype=torch.int64)

    def start_prompt(self, ids, sampling) -> None:
        pass

    def reset(self) -> None:
        pass

    def source(self) -> str:
        return "oracle"

    def propose(self, limit: int) -> int:
        known = self.target.ids[0]
        found = next(text for text in self.texts if text[: len(known)] == known)
        drafts = (found[len(known) :] + [0] * limit)[:limit]
        right = self.random.randint(0, limit)
        vocabulary = self.target.seen.shape[1]
        drafts[right:] = [(token + 1) % vocabulary for token in drafts[right:]]
        self.drafts[0, :limit] = torch.tensor(drafts)
        return limit


class Notes(AnyNumber):
    """Any numbers of drafts at random; counts what came of them, and plain steps after them."""

    def __init__(self, seed: int):
        super().__init__(LIMIT, seed)
        self.seen: Counter[str] = Counter()

    def record(self, source, asked, accepted, seconds) -> None:
        super().record(source, asked, accepted, seconds)
        if asked:
            self.seen["none" if not accepted else "all" if accepted == asked else "some"] += 1


def open_batch(session: Session, texts=None, most=None, overlaps=False, seed=0) -> DraftingBatch:
    """texts: prompts with answers that an Oracle drafts; None: lookup drafts."""
    speculation = Speculation(session, LIMIT, auto=True)
    speculation.control = Notes(seed)
    if texts is not None:
        speculation.drafter = Oracle(session, texts, seed)
    batch = DraftingBatch(speculation, most)
    batch.overlaps = speculation.overlaps = overlaps
    launch = batch.launch

    def noting():
        made = speculation.control.passes_made
        if batch.in_passes and made and made[-1][2]:
            speculation.control.seen["left"] += 1
        return launch()

    batch.launch = noting
    return batch


def with_drafts(requests: list[tuple]) -> list[tuple]:
    """Requests for a batch: sampled ones have seeds, so they do without drafts."""
    return [(*request, False, None, request[2].temperature == 0) for request in requests]


@pytest.mark.parametrize("overlaps", (False, True))
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_neighbors_come_and_go_between_passes(kind, seed, overlaps):
    """A neighbor begins right after a pass with accepted drafts: the next step is plain."""
    requests, arrivals = random_requests(seed, 14)
    arrivals = [6 * step for step in arrivals]  # some are alone for a while
    requests = [
        (ids, count, sampling if n % 3 == 2 else GREEDY)
        for n, (ids, count, sampling) in enumerate(requests)
    ]
    expected = answers_alone(kind, requests)
    texts = [ids + answer for (ids, *_), answer in zip(requests, expected, strict=True)]
    session = make_session(kind, rows=5, prefill_chunk=(7, 64)[seed % 2])
    batch = open_batch(session, texts, 3, overlaps, seed)
    assert run(batch, with_drafts(requests), arrivals) == expected
    assert min(batch.speculation.control.seen[name] for name in OUTCOMES) > 0


@pytest.mark.parametrize("source", ("lookup", "oracle"))
@pytest.mark.parametrize("rows", (1, 3))
@pytest.mark.parametrize("name", ("mixtral", *RECURRENT))
def test_every_recurrent_family(name, rows, source, make_family):
    """One after the other and side by side, with conversations that go on after a pass."""
    directory = make_family(name).directory
    plain = Session(load_model(directory, "cpu"), 256)
    prompts = [[5, 6, 7, 5, 6, 7, n] for n in range(3)] + [[9] * 30, [5, 6, 7, 5, 6, 7, 0, 3, 3]]
    requests = []
    for ids in prompts:
        answer = list(plain.stream(ids, 30, GREEDY))
        requests += [(ids, 30, GREEDY), (ids + answer[:20] + [1, 2], 12, GREEDY)]
    expected = [list(plain.stream(*request)) for request in requests]
    session = Session(load_model(directory, "cpu"), 256, SessionOptions(batch=rows))
    texts = [request[0] + answer for request, answer in zip(requests, expected, strict=True)]
    batch = open_batch(session, texts if source == "oracle" else None)
    assert [run(batch, [request])[0] for request in requests] == expected
    assert run(batch, requests, [7 * n for n in range(len(requests))]) == expected
    seen = batch.speculation.control.seen
    assert seen["none"] > 0 and (source == "lookup" or min(seen["some"], seen["all"]) > 3)
    assert source == "lookup" or rows == 1 or seen["left"] > 0


@pytest.mark.parametrize("name", ("mixtral", *RECURRENT))
def test_the_path_of_a_compiled_session(name, make_family, monkeypatch):
    """Positions are on the device; passes are those of row 0 beside rows of other texts."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr("runtime.session_steps.configure_inductor", lambda: None)
    directory = make_family(name).directory
    plain = Session(load_model(directory, "cpu"), 128)
    requests = [([n, *range(8 + n)], 25, GREEDY) for n in range(4)]
    expected = [list(plain.stream(*request)) for request in requests]
    texts = [request[0] + answer for request, answer in zip(requests, expected, strict=True)]
    options = SessionOptions(batch=3, compile=True)
    batch = open_batch(Session(load_model(directory, "cpu"), 128, options), texts)
    batch.prepare()
    assert {count for count, _ in batch.speculation.steps} == set(range(1, LIMIT + 1))
    for arrivals in ([0, 50, 100, 150], [0, 6, 20, 34]):
        assert run(batch, requests, arrivals) == expected
    assert batch.speculation.control.seen["left"] > 0


@pytest.mark.parametrize("overlaps", (False, True))
def test_a_sequence_may_end_within_a_pass(overlaps):
    """What follows continues the text up to that, or begins another."""
    ids, count = [1, 2, 3], 40
    (answer,) = answers_alone("plain", [(ids, count, GREEDY)])
    for end in range(1, 12):
        session = make_session(rows=2)
        batch = open_batch(session, [ids + answer], overlaps=overlaps, seed=end)
        sequence, found = batch.start(ids, count, GREEDY), []
        while batch.count:
            batch.prefill()
            found += [token.token for token in batch.step()]
            if len(found) >= end:
                batch.end(sequence)
        assert found[:end] == answer[:end]
        batch.speculation.drafter.texts.append([*ids, *answer[:end], 7])
        after = [*ids, *answer[:end], 7]
        (expected,) = answers_alone("plain", [(after, 9, GREEDY)])
        batch.speculation.drafter.texts.append(after + expected)
        assert run(batch, [(after, 9, GREEDY)]) == [expected]


def test_no_token_too_many():
    for count in (1, 2, 3, 5, 8):
        ids = [4, 5, 4, 5]
        (answer,) = answers_alone("plain", [(ids, count, GREEDY)])
        (longer,) = answers_alone("plain", [(ids, count + 9, GREEDY)])
        batch = open_batch(make_session(rows=2), [ids + longer], seed=count)
        assert run(batch, [(ids, count, GREEDY)]) == [answer]
        assert batch.session.last.tolist() == [-1, -1]


@pytest.mark.parametrize("case", ("watched", "edited", "refused"))
def test_some_sequences_have_no_drafts(case):
    """Watched ones keep their Details, edited ones their edits; a caller may refuse drafts."""
    sampling = SAMPLINGS[3] if case == "edited" else GREEDY
    batch = open_batch(make_session(rows=2), [])
    sequence = batch.start([1, 2, 3], 20, sampling, case == "watched", None, case != "refused")
    found = []
    while batch.count:
        batch.prefill()
        found += batch.step()
        if len(found) == 20:
            batch.end(sequence)
    assert [token.token for token in found] == answers_alone("plain", [([1, 2, 3], 20, sampling)])[
        0
    ]
    assert all(bool(token.details) == (case == "watched") for token in found)
    assert not batch.speculation.control.passes_made and sequence.drafted == 0


def test_counts_are_those_of_each_sequence():
    ids = [3, 1]
    (answer,) = answers_alone("plain", [(ids, 40, GREEDY)])
    batch = open_batch(make_session(rows=2), [ids + answer])
    sequence, tokens = batch.start(ids, 40, GREEDY), 0
    while batch.count:
        batch.prefill()
        tokens += len(batch.step())
        if tokens == 40:
            batch.end(sequence)
    made = batch.speculation.control.passes_made
    assert sequence.drafted == sum(asked for _, asked, _ in made) > sequence.accepted > 0
    # The prompt's token, and one of each pass; the last may have been one too many.
    assert 1 + len(made) + sequence.accepted - tokens in (0, 1)


def test_an_error_within_a_pass_ends_its_sequence_alone():
    requests = [([5, 5, 5, 5, 5], 30, GREEDY)]
    expected = answers_alone("plain", requests)
    batch = open_batch(make_session(rows=2))
    sequence, errors = batch.start(*requests[0]), []
    norm = batch.session.model.norm.weight
    kept = norm.clone()
    while batch.count:
        batch.prefill()
        found = batch.step()
        errors += [token.error for token in found if token.error]
        norm.fill_(float("nan"))
    norm.copy_(kept)
    assert sequence.row is None and [type(error) for error in errors] == [NotFiniteError]
    assert run(batch, requests) == expected


def test_sampled_text_keeps_its_distribution():
    """500 answers of 3 tokens, alone or beside another that begins or ends meanwhile."""
    sampling, total = Sampling(temperature=0.35, top_k=3), 500
    model, ids = small_model(0), [2, 0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4]
    expected = exact_answers(model, ids, 3, sampling)
    session = Session(model, 32, SessionOptions(batch=2))
    batch, found = open_batch(session), Counter()
    for seed in range(total):
        requests = [(ids, 3, replace(sampling, seed=seed)), ([1, 2], seed % 3 + 1, GREEDY)]
        found[tuple(run(batch, requests[: 1 + seed % 2], [0, seed % 4])[0])] += 1
    assert batch.speculation.control.seen["none"] > 50
    assert chi_square(found, expected, total) <= 1


@pytest.mark.parametrize("count", (1, 3))
def test_a_head_drafts_for_one_sequence(count, hybrid_directory):
    """Answers with and without drafts in turn; each begins where the head knows the text or not."""
    model = load_model(hybrid_directory, "cpu", torch.float32)
    texts = [list(range(20, 50)), [8, 9, 10]]
    plain = Session(load_model(hybrid_directory, "cpu", torch.float32), 128)
    session = Session(model, 128)
    head = load_head(hybrid_directory, model, torch.float32)
    batch = DraftingBatch(Speculation(session, count, head=head), 1)
    batch.prepare()
    accepted = 0
    for n in range(8):
        ids = texts[n // 2 % 2]
        plain.reset()
        answer = list(plain.stream(ids, 14, GREEDY))
        request = (ids, 14, GREEDY, False, None, n % 3 != 1)
        sequence, found = batch.start(*request), []
        while batch.count:
            batch.prefill()
            found += [token.token for token in batch.step()]
            if len(found) == 14:
                batch.end(sequence)
        assert found == answer
        accepted += sequence.accepted
        texts[n // 2 % 2] = ids + answer[: 5 + n] + [77]
    assert accepted > 5


def test_a_head_for_several_sequences_is_refused(hybrid_directory):
    model = load_model(hybrid_directory, "cpu", torch.float32)
    head = load_head(hybrid_directory, model, torch.float32)
    with pytest.raises(ValueError, match="a head drafts for one sequence, not 3"):
        Speculation(Session(model, 64, SessionOptions(batch=3)), 2, head=head)


def test_families_are_known():
    assert set(RECURRENT) <= set(FAMILIES)

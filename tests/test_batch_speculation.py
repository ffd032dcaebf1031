"""Drafts in a batch: each sequence's text is that of plain steps, alone and beside others."""

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from conftest import FAMILIES
from test_auto_speculation import AnyNumber
from test_batch import GREEDY, SAMPLINGS, answers_alone, make_session, random_requests, run
from test_sequence_state import EACH_KIND
from test_session import as_if_captured
from test_speculate import chi_square, exact_answers, small_model

from generate import load_model
from runtime.draft_control import FixedDrafts
from runtime.drafting_batch import DraftingBatch
from runtime.loading import load_head
from runtime.sampling import NotFiniteError, Sampling
from runtime.session import Session, SessionOptions
from runtime.session_prompts import capture_next
from runtime.speculation import Speculation, capture_between_answers

pytestmark = pytest.mark.usefixtures("few_threads")
LIMIT = 4
# Accepted drafts of passes; passes with some after which the next step was one of a batch.
OUTCOMES = "none", "some", "all", "left"
RECURRENT = "qwen3_next", "qwen3_5_moe", "qwen4_exp"


class Oracle:
    """Drafts the answers that it was given, wrong from a random token on."""

    q = None

    def __init__(self, target: Session, texts: list[list[int]], seed: int = 0, row: int = 0):
        self.target, self.texts, self.row = target, texts, row
        self.random = random.Random(seed + row)
        self.drafts = torch.zeros(1, LIMIT, dtype=torch.int64)

    def start_prompt(self, ids, sampling) -> None:
        pass

    def reset(self) -> None:
        pass

    def source(self) -> str:
        return "oracle"

    def exchange(self, other) -> None:
        pass

    def propose(self, limit: int) -> int:
        self.drafts[0, :limit] = torch.tensor(self.find(limit))
        return limit

    def find(self, limit: int) -> list[int]:
        known = self.target.ids[self.row]
        found = next(text for text in self.texts if text[: len(known)] == known)
        drafts = (found[len(known) :] + [0] * limit)[:limit]
        right = self.random.randint(0, limit)
        vocabulary = self.target.seen.shape[1]
        drafts[right:] = [(token + 1) % vocabulary for token in drafts[right:]]
        return drafts


class Notes(AnyNumber):
    """Any numbers of drafts at random; counts what came of them, and plain steps after them."""

    def __init__(self, seed: int):
        super().__init__(LIMIT, seed)
        self.seen: Counter[str] = Counter()
        self.has_left = False  # the last pass accepted drafts

    def record(self, outcomes, seconds) -> None:
        super().record(outcomes, seconds)
        drafting = [each for each in outcomes if each.asked]
        self.has_left = any(each.accepted for each in drafting)
        self.seen[f"{len(drafting)} of {len(outcomes)}"] += 1
        for _, asked, accepted, _ in drafting:
            self.seen["none" if not accepted else "all" if accepted == asked else "some"] += 1


def open_batch(session: Session, texts=None, most=None, overlaps=False, seed=0) -> DraftingBatch:
    """texts: prompts with answers that an Oracle drafts; None: lookup drafts."""
    speculation = Speculation(session, LIMIT, auto=True)
    speculation.control = Notes(seed)
    if texts is not None:
        speculation.lookups = [Oracle(session, texts, seed, row) for row in range(session.batch)]
        speculation.drafter = speculation.lookups[0]
    batch = DraftingBatch(speculation, most)
    batch.overlaps = speculation.overlaps = overlaps
    launch = batch.launch

    def noting():
        if batch.in_passes and speculation.control.has_left:
            speculation.control.seen["left"] += 1
        return launch()

    batch.launch = noting
    return batch


def with_drafts(requests: list[tuple]) -> list[tuple]:
    """Requests for a batch: sampled ones have seeds, so they do without drafts."""
    return [(*request, False, None, request[2].temperature == 0) for request in requests]


@pytest.mark.parametrize("overlaps", (False, True))
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", EACH_KIND)
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


@pytest.mark.parametrize("overlaps", (False, True))
@pytest.mark.parametrize("kind", EACH_KIND)
def test_neighbors_prompts_take_graphs_between_passes(kind, overlaps, monkeypatch):
    """As on a GPU, where graphs are brief: the sequence that has passes leaves row 0."""
    monkeypatch.setattr("runtime.session_prompts.seconds_of", lambda *_: 0.001)
    monkeypatch.setattr("runtime.session_prompts.ANYWHERE_CHUNKS", (16, 32, 64))
    requests, arrivals = random_requests(7, 14)
    requests = [(ids, 2 * count, GREEDY) for ids, count, _ in requests]
    expected = answers_alone(kind, requests)
    texts = [ids + answer for (ids, *_), answer in zip(requests, expected, strict=True)]
    session = make_session(kind, rows=5)
    batch = open_batch(session, texts, 3, overlaps)
    graphs = as_if_captured(session)
    while capture_next(session):
        pass
    graphs.keys.clear()
    assert run(batch, with_drafts(requests), [4 * step for step in arrivals]) == expected
    seen = batch.speculation.control.seen
    assert len(graphs.keys) > 5 and seen["left"] and seen["all"] + seen["some"]


def run_until(batch: DraftingBatch, requests: list[tuple], arrivals: list[int], ends: list[int]):
    """Start each request at its step, and end it after some tokens, as a stop text does."""
    found, numbers = [[] for _ in requests], {}
    for step in range(10_000):
        for n in [n for n, arrival in enumerate(arrivals) if arrival == step]:
            numbers[batch.start(*requests[n])] = n
        batch.prefill()
        for token in batch.step():
            n = numbers[token.sequence]
            found[n].append(token.token)
            if len(found[n]) == ends[n]:
                batch.end(token.sequence)
        if len(numbers) == len(requests) and not batch.count:
            return [answer[:end] for answer, end in zip(found, ends, strict=True)]
    raise AssertionError("the batch never ended")


PLAIN_WAYS = (  # sampled answers have a seed, and so no drafts; greedy ones beside them have some
    *(GREEDY, GREEDY, Sampling(temperature=0, repetition_penalty=1.3)),
    *(Sampling(temperature=1.3, top_k=20), Sampling(temperature=0.9, top_k=None, top_p=0.9)),
)


@pytest.mark.parametrize("overlaps", (False, True))
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", EACH_KIND)
def test_up_to_four_answers_share_passes(kind, seed, overlaps):
    """They begin and end at any time, within passes too; each has its own number of drafts."""
    rng = random.Random(seed)
    requests, _ = random_requests(seed, 12)
    requests = [
        (ids, 30, replace(PLAIN_WAYS[n % len(PLAIN_WAYS)], seed=n))
        for n, (ids, *_) in enumerate(requests)
    ]
    expected = answers_alone(kind, requests)
    texts = [request[0] + answer for request, answer in zip(requests, expected, strict=True)]
    ends = [rng.randrange(3, 31) for _ in requests]
    batch = open_batch(make_session(kind, rows=5), texts, 4, overlaps, seed)
    arrivals = sorted(rng.randrange(60) for _ in requests)
    found = run_until(batch, with_drafts(requests), arrivals, ends)
    assert found == [answer[:end] for answer, end in zip(expected, ends, strict=True)]
    seen = batch.speculation.control.seen
    assert min(seen[name] for name in ("none", "some", "all")) > 1
    for rows in (2, 3, 4):
        assert sum(seen[f"{n} of {rows}"] for n in range(1, rows + 1)) > 0
    assert seen["1 of 2"] + seen["2 of 3"] + seen["2 of 4"] > 0  # others had none
    assert batch.session.last.tolist() == [-1] * 5


def test_five_answers_have_no_drafts():
    """Their rows would not fit; when one has ended, the others have some."""
    requests = [([n, 1, 2, 3, 4, 5, 6, 7, 8], 12 + 20 * (n > 0), GREEDY) for n in range(5)]
    expected = answers_alone("plain", requests)
    texts = [request[0] + answer for request, answer in zip(requests, expected, strict=True)]
    batch = open_batch(make_session(rows=5), texts)
    assert run(batch, requests) == expected
    seen = batch.speculation.control.seen
    assert not any("of 5" in name for name in seen) and seen["4 of 4"] > 0


def test_a_neighbor_that_is_edited_or_watched_leaves_plain_steps():
    requests = [([1, 2, 3], 20, GREEDY), ([4, 5, 6], 20, SAMPLINGS[3])]
    expected = answers_alone("plain", requests)
    texts = [request[0] + answer for request, answer in zip(requests, expected, strict=True)]
    for request, others in ((requests[1], ()), (requests[0], (True,))):
        batch = open_batch(make_session(rows=2), texts)
        found = run(batch, [requests[0], (*request, *others)])
        assert found[0] == expected[0] and found[1] == expected[request is requests[1]]
        assert not any("of 2" in name for name in batch.speculation.control.seen)


def test_damage_to_one_row_ends_its_sequence_alone():
    requests = [([n, *range(9)], 30, GREEDY) for n in range(3)]
    expected = answers_alone("plain", requests)
    texts = [request[0] + answer for request, answer in zip(requests, expected, strict=True)]
    batch, found = open_batch(make_session(rows=3), texts), [[] for _ in requests]
    sequences = [batch.start(*request) for request in requests]
    while batch.count:
        batch.prefill()
        for token in batch.step():
            found[sequences.index(token.sequence)].append(token.error or token.token)
            if sum(map(len, found)) == 20:
                batch.session.states[0].kv[:, sequences[1].row] = float("nan")
        for sequence in sequences:
            if sequence.row is not None and not sequence.tokens_left:
                batch.end(sequence)
    *tokens, error = found[1]
    assert type(error) is NotFiniteError and expected[1][: len(tokens)] == tokens
    assert found[::2] == expected[::2] and batch.speculation.control.seen["3 of 3"] > 0


def test_the_time_of_a_pass_has_no_prompt_and_no_idle_time(monkeypatch):
    """The controller would take the first pass of an answer for a slow one."""
    clock = [0.0]

    def tick() -> float:
        clock[0] += 0.001
        return clock[0]

    monkeypatch.setattr("time.perf_counter", tick)
    batch, seconds = open_batch(make_session(rows=2)), []
    record = batch.speculation.control.record
    batch.speculation.control.record = lambda outcomes, spent: (
        seconds.append(spent),
        record(outcomes, spent),
    )
    prefill = batch.prefill

    def slow_prefill(*given) -> None:
        clock[0] += 100 * bool(batch.waiting)
        prefill(*given)

    batch.prefill = slow_prefill
    for n in range(3):
        ids = [n, *range(7, 20), *range(7, 20)]  # no short prompt: steps run those
        run(batch, [(ids, 12, GREEDY)] * (1 + n % 2), [0, 5])
        clock[0] += 100
    assert len(seconds) > 20 and max(seconds) < 1


@pytest.mark.slow
@pytest.mark.parametrize("source", ("oracle", "lookup"))
@pytest.mark.parametrize("rows", (1, 3))
@pytest.mark.parametrize("name", ("mixtral", *RECURRENT))
def test_every_recurrent_family(name, rows, source, make_family):
    """One after the other and side by side, with conversations that go on after a pass."""
    directory = make_family(name).directory
    plain = Session(load_model(directory, "cpu"), 256)
    prompts = [[5, 6, 7, 5, 6, 7, n] for n in range(3)] + [[9] * 30, [5, 6, 7, 5, 6, 7, 0, 3, 3]]
    requests, expected = [], []
    for ids in prompts:
        answer = list(plain.stream(ids, 30, GREEDY))
        after = ids + answer[:20] + [1, 2], 12, GREEDY
        requests += [(ids, 30, GREEDY), after]
        expected += [answer, list(plain.stream(*after))]
    session = Session(load_model(directory, "cpu"), 256, SessionOptions(batch=rows))
    texts = [request[0] + answer for request, answer in zip(requests, expected, strict=True)]
    batch = open_batch(session, texts if source == "oracle" else None)
    assert [run(batch, [request])[0] for request in requests] == expected
    assert run(batch, requests, [7 * n for n in range(len(requests))]) == expected
    seen = batch.speculation.control.seen
    assert seen["none"] > 0 and (source == "lookup" or min(seen["some"], seen["all"]) > 3)
    assert source == "lookup" or rows == 1 or seen["left"] > 0
    assert source == "lookup" or rows == 1 or min(seen["2 of 2"], seen["3 of 3"]) > 0


@pytest.mark.parametrize("compiled", (False, pytest.param(True, marks=pytest.mark.slow)))
@pytest.mark.parametrize("name", (*RECURRENT, "mixtral"))
def test_the_path_of_a_compiled_session(name, compiled, make_family, request):
    """Positions are on the device; a pass of three answers has four rows, of which one is idle."""
    if not compiled:
        request.getfixturevalue("no_compiler")
    directory = make_family(name).directory
    plain = Session(load_model(directory, "cpu"), 128)
    requests = [([n, *range(8 + n)], 18, GREEDY) for n in range(4)]
    expected = [list(plain.stream(*request)) for request in requests]
    texts = [request[0] + answer for request, answer in zip(requests, expected, strict=True)]
    options = SessionOptions(batch=4, compile=True)
    batch = open_batch(Session(load_model(directory, "cpu"), 128, options), texts)
    if compiled:  # what these answers need
        for size in (1, 2, 4):
            batch.speculation.captures.prepare(0, size)
    else:
        batch.prepare()
        while batch.speculation.captures.capture_next():
            pass
        made = {(rows, count) for rows, count, _ in batch.speculation.steps}
        assert made == {*((1, n) for n in range(1, LIMIT + 1)), (2, 1), (2, 2), (2, 3), (4, 1)}
    for arrivals in ([0, 36, 72, 108], [0, 4, 14, 24], [0, 2, 4, 36]):
        assert run(batch, requests, arrivals) == expected
    seen = batch.speculation.control.seen
    assert seen["left"] > 0 and sum(seen[f"{n} of 3"] for n in (1, 2, 3)) > 0


@pytest.mark.parametrize("overlaps", (False, True))
def test_a_sequence_may_end_within_a_pass(overlaps):
    """What follows continues the text up to that, or begins another."""
    ids, count = [1, 2, 3], 40
    (answer,) = answers_alone("plain", [(ids, count, GREEDY)])
    for end in (1, 2, 3, 5, 8, 11):
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
    assert sequence.drafted == sum(outcome.asked for outcome in made) > sequence.accepted > 0
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


@pytest.mark.slow
@pytest.mark.parametrize("right", (True, False))
def test_sampled_text_keeps_its_distribution(right, monkeypatch):
    """900 answers of 3 tokens, alone or beside others that begin or end meanwhile.

    Some are greedy, so a pass has both kinds. If every draft is accepted it is another text.
    """
    sampling, total = Sampling(temperature=0.35, top_k=3), 300
    model, ids = small_model(0), [2, 0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4]
    expected = exact_answers(model, ids, 3, sampling)
    if not right:
        accepts = lambda seeds, _, index, stream: torch.zeros(len(seeds), len(index))  # noqa: E731
        monkeypatch.setattr("runtime.verification.uniform", accepts)
    session = Session(model, 32, SessionOptions(batch=4))
    batch, found = open_batch(session), Counter()
    for seed in range(total):
        sampled = [(ids, 3, replace(sampling, seed=3 * seed + n)) for n in range(3)]
        requests = [*sampled, ([1, 2], seed % 3 + 3, GREEDY)]
        arrivals = [0, seed % 3, seed % 2, seed % 4 // 2]
        for answer in run(batch, requests, arrivals)[:3]:
            found[tuple(answer)] += 1
    seen = batch.speculation.control.seen
    for rows in (1, 2, 3, 4):
        assert sum(seen[f"{n} of {rows}"] for n in range(1, rows + 1)) > 20
    assert seen["none"] > 50 or not right
    try:
        off = chi_square(found, expected, 3 * total)
    except AssertionError:  # a token of probability 0
        off = 2.0
    assert (off <= 1) == right


def test_the_next_pass_is_in_flight_while_tokens_are_handled():
    """The reader of a batch's tokens, and its next prompt, do not wait for it."""
    requests = [([5, 6, 7, 8] * 5, 20, GREEDY), ([9, 8] * 6, 20, GREEDY)]
    expected = answers_alone("plain", requests)
    texts = [ids + answer for (ids, *_), answer in zip(requests, expected, strict=True)]
    batch = open_batch(make_session(rows=2), texts, overlaps=True)
    speculation = batch.speculation
    speculation.control = control = FixedDrafts(LIMIT)
    control.has_left = False
    for count in (3, 20, 11):  # the caller ends an answer within passes, and begins the next one
        for request, answer in zip(requests, expected, strict=True):
            found, sequence, recorded = [], batch.start(*request), []
            control.record = lambda outcomes, seconds, to=recorded: to.append(seconds)
            while len(found) < count:
                batch.prefill()
                begun = speculation.begun
                assert len(found) < 2 or (begun and begun.is_pass)
                found += [token.token for token in batch.step() if token.sequence is sequence]
            batch.end(sequence)
            assert found[:count] == answer[:count] and recorded
    assert not batch.count


def test_the_time_of_an_idle_server_is_no_time_of_a_pass():
    """Its answer ended at a stop text, and the pass in flight is not waited for."""
    ids = [5, 6, 7, 8] * 5
    (answer,) = answers_alone("plain", [(ids, 40, GREEDY)])
    batch, times = open_batch(make_session(rows=2), [ids + answer], overlaps=True), []
    batch.speculation.control = control = FixedDrafts(2)
    control.has_left = False
    control.record = lambda outcomes, seconds: times.append(seconds)
    for _ in range(2):
        sequence = batch.start(ids, 40, GREEDY)
        tokens = 0
        while tokens < 7:
            batch.prefill()
            tokens += len(batch.step())
        batch.end(sequence)
        assert batch.speculation.begun and not batch.count
        count = len(times)
        batch.start(ids[:9], 1, GREEDY)
        batch.prefill()
        assert len(times) == count and not batch.speculation.begun
        while batch.count:
            for token in batch.step():
                batch.end(token.sequence)


def open_later(kind: str = "plain", rows: int = 4, texts=None) -> DraftingBatch:
    """Return a batch as on a GPU, whose passes are captured between answers."""
    batch = open_batch(make_session(kind, rows, compile=True), texts)
    batch.speculation.captures.waits = True
    batch.prepare()
    return batch


@pytest.mark.parametrize("kind", EACH_KIND)
def test_passes_are_captured_between_answers(kind, no_compiler, caplog):
    """An answer has as many drafts as are there; it never waits for a pass to be captured."""
    caplog.set_level("INFO", "moe_fast")
    requests = [([5, 6, 7, 8] * 5, 20, GREEDY)]
    expected = answers_alone(kind, requests)
    batch = open_later(kind, texts=[requests[0][0] + expected[0]])
    speculation, captured, goes_on = batch.speculation, 0, True
    while goes_on:
        if captured % 3 == 1:
            batch.session.reset()
            speculation.control.seen.clear()
            before = dict(speculation.steps)
            assert run(batch, requests) == expected
            assert speculation.control.seen["1 of 1"] and speculation.steps == before
        goes_on = batch.speculation.captures.capture_next()
        captured += 1
    # Passes of one row, of two, which may have 3 drafts, and of four; greedy and sampled.
    assert captured == len(speculation.steps) == 2 * (4 + 3 + 1)
    assert caplog.text.count("16 passes with drafts are captured") == 1
    assert not batch.speculation.captures.capture_next()


@pytest.mark.parametrize("compiles_ahead", (True, False))
def test_kernels_of_passes_are_compiled_before_they_are_captured(
    compiles_ahead, no_compiler, monkeypatch
):
    """They are not compiled with those of steps. Until they are there, no pass is captured."""
    monkeypatch.setattr(Session, "captures_fast", True)
    monkeypatch.setattr(
        "runtime.speculation.runner_ahead",
        lambda session: session.runner if compiles_ahead else None,
    )
    begun, launched, is_there = [], [], []

    def compile_later(tasks, gpu):
        begun.append(tasks)
        return lambda: bool(is_there)

    monkeypatch.setattr("runtime.speculation.compile_later", compile_later)
    monkeypatch.setattr("runtime.speculation.gpu_of", lambda device: None)
    monkeypatch.setattr("runtime.speculation.collect", lambda launch: launch() or ["a"])
    monkeypatch.setattr(
        "runtime.speculation.launch_pass", lambda runner, state, drafts, *_: launched.append(drafts)
    )
    monkeypatch.setattr("runtime.runner.CompiledRunner.reaches", lambda *_: [None])
    monkeypatch.setattr(Session, "compile_kernels", lambda self: self.launch_more(self.runner))
    batch = DraftingBatch(Speculation(make_session("plain", 4, compile=True), LIMIT, auto=True))
    captures, steps = batch.speculation.captures, batch.speculation.steps
    assert not captures.capture_next() and not begun  # nothing is left
    batch.prepare()
    assert not launched and len(captures.left) == 2 * (4 + 3 + 1) and any(batch.left)
    if compiles_ahead:
        for _ in range(3):
            assert not captures.capture_next() and not steps and begun == [["a"]]
        wanted = [(1, n) for n in (1, 2, 3, 4)] + [(2, n) for n in (1, 2, 3)] + [(4, 1)]
        assert [tuple(drafts.shape) for drafts in launched] == wanted
        requests = [([5, 6, 7, 8] * 5, 20, GREEDY)]
        assert run(batch, requests) == answers_alone("plain", requests)  # by plain steps
        assert not steps
        is_there.append(True)
    assert captures.capture_next() and len(steps) == 1 and len(begun) == compiles_ahead


def test_kernels_of_passes_that_cannot_be_named_leave_plain_steps(no_compiler, caplog):
    """A server that has nothing to do goes on."""
    captures = open_later().speculation.captures

    def fail() -> None:
        raise RuntimeError("a kernel cannot run")

    captures.compile = fail
    assert captures.left and not captures.capture_next() and not captures.left
    assert "no more passes with drafts are captured: a kernel cannot run" in caplog.text


def test_no_pass_among_all_tokens_is_captured_between_answers(no_compiler, monkeypatch):
    """Inductor compiles its verification: such an answer has plain steps."""
    monkeypatch.setattr("runtime.pass_captures.MAX_CANDIDATES", 10)  # less than the vocabulary
    batch = open_later()
    while batch.speculation.captures.capture_next():
        pass
    speculation = batch.speculation
    assert {candidates for _, _, candidates in speculation.steps} == {0}
    ids, seen = [5, 6, 7, 8] * 5, speculation.control.seen
    run(batch, [(ids, 20, Sampling(1.0, top_k=None))])
    assert not seen and len(speculation.steps) == 8
    run(batch, [(ids, 20, GREEDY)])
    assert seen["1 of 1"]


def test_what_captures_its_passes_between_answers(no_compiler, monkeypatch):
    """Automatic lookups, where no part of a step is compiled for long."""
    for is_fast, auto, later in ((True, True, True), (False, True, False), (True, False, False)):
        monkeypatch.setattr(Session, "captures_fast", is_fast)
        session = make_session(rows=1, compile=True)
        batch = DraftingBatch(Speculation(session, LIMIT, auto=auto))
        batch.prepare()
        assert (
            batch.speculation.captures.waits == batch.speculation.captures.capture_next() == later
        )
        assert bool(batch.speculation.steps) != later or len(batch.speculation.steps) == 1
    monkeypatch.setattr(Session, "captures_fast", True)
    session, draft = make_session(rows=1, compile=True), make_session(rows=1).model
    speculation = Speculation(session, draft=draft, auto=True)
    capture_between_answers(speculation)
    assert not speculation.captures.waits


def test_a_pass_that_does_not_fit_into_memory_is_the_last_one(no_compiler, monkeypatch, caplog):
    """Answers have the drafts of those before it, and a session is as it was."""
    requests = [([5, 6, 7, 8] * 5, 20, GREEDY)]
    expected = answers_alone("plain", requests)
    batch = open_later(rows=1, texts=[requests[0][0] + expected[0]])
    speculation, session = batch.speculation, batch.session
    assert batch.speculation.captures.capture_next() and batch.speculation.captures.capture_next()

    def fail(*_) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    verify = speculation.verify_pass
    kept = [tensor.clone() for tensor in session.state]
    monkeypatch.setattr(speculation, "verify_pass", fail)
    assert not batch.speculation.captures.capture_next() and "Tried to allocate" in caplog.text
    monkeypatch.setattr(speculation, "verify_pass", verify)
    assert not batch.speculation.captures.capture_next() and sorted(speculation.steps) == [
        (1, 1, 0),
        (1, 2, 0),
    ]
    assert all(map(torch.equal, kept, session.state))
    assert session.before_edit == batch.write_masks  # grammars are followed
    assert run(batch, requests) == expected and speculation.control.seen["1 of 1"]


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
    for n in range(6):
        ids = texts[n // 2 % 2]
        plain.reset()
        answer = list(plain.stream(ids, 10, GREEDY))
        request = (ids, 10, GREEDY, False, None, n % 3 != 1)
        sequence, found = batch.start(*request), []
        while batch.count:
            batch.prefill()
            found += [token.token for token in batch.step()]
            if len(found) == 10:
                batch.end(sequence)
        assert found == answer
        accepted += sequence.accepted
        texts[n // 2 % 2] = ids + answer[: 5 + n] + [77]
    assert accepted > 3


def test_a_head_for_several_sequences_is_refused(hybrid_directory):
    model = load_model(hybrid_directory, "cpu", torch.float32)
    head = load_head(hybrid_directory, model, torch.float32)
    with pytest.raises(ValueError, match="a head drafts for one sequence, not 3"):
        Speculation(Session(model, 64, SessionOptions(batch=3)), 2, head=head)


def test_families_are_known():
    assert set(RECURRENT) <= set(FAMILIES)

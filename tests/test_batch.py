"""Sequences that decode together get the tokens that each would get alone."""

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from test_sequence_state import EACH_KIND, KINDS, make_model
from test_session import as_if_captured

from runtime.batch import SHARED_CHUNK, STEPPED_PROMPT, Batch, step_sizes
from runtime.logit_edits import edit_logits, make_edit_state, mask_logits, mask_words, set_edits
from runtime.sampling import NotFiniteError, Sampling, StepState
from runtime.session import Session, SessionOptions

LENGTH, VOCABULARY = 96, 64
GREEDY = Sampling(temperature=0)
SAMPLINGS = (
    GREEDY,
    Sampling(temperature=1.3, top_k=20, seed=5),
    Sampling(temperature=0.9, top_k=None, top_p=0.9, seed=6),
    Sampling(temperature=0, frequency_penalty=1.5, presence_penalty=-0.5),
    Sampling(temperature=1, seed=7, repetition_penalty=1.3, logit_bias={3: 4.0, 9: -100.0}),
    Sampling(temperature=0.7, seed=8, repetition_penalty=1.5),
)
pytestmark = pytest.mark.usefixtures("few_threads")


def make_session(kind: str = "plain", rows: int = 4, **options) -> Session:
    options = SessionOptions(batch=rows, cache_class=KINDS[kind], **options)
    return Session(make_model(kind), LENGTH, options)


ALONE: dict[str, list[int]] = {}  # answers by all that they depend on


def answers_alone(kind: str, requests: list[tuple], **options) -> list[list[int]]:
    """Return the answers of a session of one sequence, each computed once a process."""
    session, found = make_session(kind, 1, **options), []
    for ids, count, sampling in requests:
        key = repr((kind, options, ids, count, sampling))
        if key not in ALONE:
            session.reset()
            ALONE[key] = list(session.stream(ids, count, sampling))
        found.append([*ALONE[key]])
    return found


def run(batch: Batch, requests: list[tuple], arrivals: list[int] | None = None) -> list[list]:
    """Start each request at its step, and step until all have ended; return tokens or errors."""
    arrivals = list(arrivals or [0] * len(requests))
    found, numbers, left = [[] for _ in requests], {}, list(range(len(requests)))

    def take_step() -> None:
        for token in batch.step():
            answer = found[numbers[token.sequence]]
            answer.append(token.error or token.token)
            if len(answer) == requests[numbers[token.sequence]][1] and not token.error:
                batch.end(token.sequence)

    for step in range(10_000):
        for number in [n for n in left if arrivals[n] <= step]:
            left.remove(number)
            numbers[batch.start(*requests[number])] = number
        batch.prefill(take_step)
        take_step()
        if not left and not batch.count:
            return found
    raise AssertionError("the batch never ended")


def random_requests(seed: int, count: int) -> tuple[list[tuple], list[int]]:
    """Requests with prompts that share beginnings, and the steps at which they arrive."""
    rng = random.Random(seed)
    start = [rng.randrange(VOCABULARY) for _ in range(30)]
    requests = []
    for _ in range(count):
        own = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 20))]
        ids = start[: rng.randrange(31)] + own
        sampling = rng.choice(SAMPLINGS)
        if sampling.seed is not None:
            sampling = replace(sampling, seed=rng.randrange(1000))
        requests.append((ids, rng.randrange(1, 25), sampling))
    return requests, sorted(rng.randrange(40) for _ in range(count))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", EACH_KIND)
def test_neighbors_never_change_an_answer(kind, seed):
    requests, arrivals = random_requests(seed, 14)
    session = make_session(kind, rows=5, prefill_chunk=(7, 64)[seed % 2])
    assert run(Batch(session, 3), requests, arrivals) == answers_alone(kind, requests)


@pytest.mark.parametrize("kind", EACH_KIND)
def test_steps_between_layers_of_a_prompt_change_no_answer(kind, monkeypatch):
    monkeypatch.setattr("runtime.batch.STEP_EVERY", 1)
    requests, arrivals = random_requests(11, 14)
    requests = [(*request, n % 3 == 0) for n, request in enumerate(requests)]  # some are watched
    batch = Batch(make_session(kind, rows=5, prefill_chunk=7), 3)
    assert run(batch, requests, arrivals) == answers_alone(kind, [r[:3] for r in requests])


def test_a_step_that_fails_within_a_prompt_ends_all_sequences():
    batch = Batch(make_session(rows=3))
    first = batch.start([1, 2], 20, GREEDY)
    batch.prefill()
    second = batch.start(list(range(30)), 5, GREEDY)

    def fail() -> None:
        for sequence in (first, second):
            batch.end(sequence)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runtime.batch.STEP_EVERY", 1)
        batch.prefill(fail)
    assert batch.count == 0 and batch.session.cached[1] == 0
    requests, _ = random_requests(12, 4)
    assert run(batch, requests) == answers_alone("plain", requests)


@pytest.fixture
def replays_take(monkeypatch):
    """Return what sets the seconds that a replay takes, 1 until then."""

    def set_seconds(seconds: float) -> None:
        monkeypatch.setattr("runtime.session_prompts.seconds_of", lambda *_: seconds)

    set_seconds(1.0)
    return set_seconds


@pytest.mark.parametrize("kind", EACH_KIND)
def test_prompts_alone_take_graphs_of_all_positions(kind, replays_take):
    """As on a GPU, in row 0. Beside others, a prompt is interrupted: these graphs take too long."""
    requests = [([7 * n % 60 for n in range(k)], 4, GREEDY) for k in (10, 14, 30)]
    requests.append(([3 * n % 50 for n in range(40)], 4, GREEDY))  # another conversation
    session = make_session(kind, rows=3)
    graphs, batch = as_if_captured(session), Batch(session)
    while batch.prepare_next():
        pass
    assert graphs.keys == [(64, "anywhere", False)]  # no longer later turn fits
    graphs.keys.clear()
    for request in requests:  # the second one's last tokens run in steps
        assert run(batch, [request]) == answers_alone(kind, [request])
    assert graphs.keys == [(64, "anywhere", False)] * 3
    assert run(batch, requests) == answers_alone(kind, requests)
    assert len(graphs.keys) == 4  # the first one's alone: no other has a row yet
    assert run(batch, requests[::-1], [0, 1, 2, 3]) == answers_alone(kind, requests[::-1])


@pytest.mark.parametrize("seconds", (0.001, 0.02))
@pytest.mark.parametrize("kind", EACH_KIND)
def test_prompts_beside_others_take_graphs_that_are_brief(kind, seconds, replays_take, monkeypatch):
    """In row 0: the sequence that runs there moves. Longer ones run in chunks of such a graph."""
    replays_take(seconds)
    monkeypatch.setattr("runtime.session_prompts.ANYWHERE_CHUNKS", (16, 32, 64))
    requests, arrivals = random_requests(15, 14)
    session = make_session(kind, rows=5)
    graphs, batch = as_if_captured(session), Batch(session, 3)
    waits = []
    monkeypatch.setattr(batch, "every_layers", lambda step: waits.append(step) or step)
    while batch.prepare_next():
        pass
    graphs.keys.clear()
    assert run(batch, requests, arrivals) == answers_alone(kind, requests)
    assert {size for size, *_ in graphs.keys} == {16, 32, 64} and waits
    session.replay_seconds[32, "anywhere", False] = 1.0  # two chunks of 16 in its place
    graphs.keys.clear()
    batch.start([5, 6, 7], 8, GREEDY)
    batch.prefill()
    batch.start([9 * n % 64 for n in range(40)], 1, GREEDY)
    batch.prefill()
    assert len(graphs.keys) == (3 if seconds == 0.001 else 2)  # then the others step
    batch.step()
    batch.prefill()
    assert graphs.keys == [(16, "anywhere", False)] * 3


@pytest.mark.parametrize("kind", EACH_KIND)
def test_a_prompt_captured_ahead_changes_no_row(kind, replays_take):
    """Conversations go on in their rows, the first one among them; the last prompt ran beside."""
    requests, _ = random_requests(14, 4)
    session = make_session(kind, rows=3)
    graphs, batch = as_if_captured(session), Batch(session)
    texts = [r[0] + a for r, a in zip(requests, run(batch, requests), strict=True)]
    kept = [ids[:cached] for ids, cached in zip(session.ids, session.cached, strict=True)]
    memory = [[view.clone() for view in row] for row in session.memory.views]
    graphs.keys.clear()
    while batch.prepare_next():
        pass
    assert graphs.keys == [(64, "anywhere", False)] and not any(batch.left) and all(session.cached)
    assert kept == [ids[:cached] for ids, cached in zip(session.ids, session.cached, strict=True)]
    for before, after in zip(memory, session.memory.views, strict=True):
        assert all(map(torch.equal, before, after))
    turns = [([*text, n], 5, GREEDY) for n, text in enumerate(texts)]
    assert run(batch, turns) == answers_alone(kind, turns)


def test_a_watched_prompt_is_captured_when_a_server_has_nothing_to_do(replays_take):
    """No answer waits for a capture: the first prompts of a kind run without a graph."""
    session = make_session(rows=3)
    graphs, batch = as_if_captured(session), Batch(session)
    session.short_chunks = (8,)
    while batch.prepare_next():
        pass
    graphs.keys.clear()
    for length in (5, 30, 31, 60):  # turns of a conversation
        batch.start([7 * n % 60 for n in range(length)], 1, GREEDY, watch=True)
        while batch.count:
            batch.prefill()
            for token in batch.step():
                batch.end(token.sequence)
    expected = [(8, None, True), (64, "anywhere", True)]
    assert [*session.left] == expected == [*dict.fromkeys(graphs.keys)] and any(batch.left)
    del graphs.keys[:]
    while batch.prepare_next():
        pass
    assert graphs.keys == expected and not session.left


@pytest.mark.parametrize("kind", EACH_KIND)
def test_short_prompts_alone_take_the_graph_of_row_0(kind, monkeypatch):
    """As on a GPU, whatever row their sequence had before."""
    requests, _ = random_requests(13, 5)
    requests = [(ids[: 3 + 2 * n], 4, sampling) for n, (ids, _, sampling) in enumerate(requests)]
    expected = answers_alone(kind, requests)
    session, calls = make_session(kind, rows=3), []
    session.short_chunks = (8,)
    run_short_chunk = session.run_short_chunk
    monkeypatch.setattr(
        session,
        "run_short_chunk",
        lambda part, *rest: (calls.append(len(part)), run_short_chunk(part, *rest))[1],
    )
    batch = Batch(session)
    assert [run(batch, [request])[0] for request in requests] == expected
    assert len(calls) > 3 and max(calls) <= 8


def test_an_answer_that_ends_early_leaves_its_neighbors_alone():
    requests, _ = random_requests(9, 6)
    expected = answers_alone("plain", requests)
    batch, found = Batch(make_session(rows=3)), {}
    sequences = [batch.start(*request) for request in requests]
    for step in range(200):
        if step == 3:
            batch.end(sequences[1])
            batch.end(sequences[5])  # which has no row yet
        batch.prefill()
        for token in batch.step():
            found.setdefault(token.sequence, []).append(token.token)
            number = sequences.index(token.sequence)
            if len(found[token.sequence]) == requests[number][1]:
                batch.end(token.sequence)
    assert batch.count == 0 and sequences[5] not in found
    for number in (0, 2, 3, 4):
        assert found[sequences[number]] == expected[number]
    assert found[sequences[1]] == expected[1][: len(found[sequences[1]])]


def test_steps_are_no_larger_than_necessary(monkeypatch):
    session, sizes = make_session(rows=6), []
    decode = session.decode
    monkeypatch.setattr(session, "decode", lambda size, n: (sizes.append(size), decode(size, n)))
    lengths = (4, 20, 8)
    run(Batch(session, 4), [([n + 1], length, GREEDY) for n, length in enumerate(lengths)])
    assert sizes == [3] * 4 + [2] * 4 + [1] * 12  # the prompts run in the first step
    assert step_sizes(1) == [1] and step_sizes(6) == [1, 2, 4, 6]
    assert step_sizes(20) == [1, 2, 4, 8, 16, 20]


# Prefixes -----------------------------------------------------------------------------------------


def ask(batch: Batch, ids: list[int], count: int = 4) -> tuple[list[int], int]:
    """Return the answer to a prompt and the number of its tokens that were cached."""
    sequence, answer = batch.start(ids, count, GREEDY), []
    while batch.count:
        batch.prefill()
        for token in batch.step():
            answer.append(token.token)
            if len(answer) == count:
                batch.end(sequence)
    return answer, sequence.cached_tokens


def test_short_requests_between_do_not_make_a_conversation_cold():
    batch = Batch(make_session(rows=4))
    talk, known = list(range(1, 31)), 0
    for turn in range(3):
        answer, cached = ask(batch, talk)
        assert cached >= known
        known = len(talk)
        talk = talk + answer + [50 + turn, 51]
        # A title of the conversation, as chat pages ask for: another beginning.
        ask(batch, [60, 61, *talk[:5], turn])


def test_as_many_conversations_as_rows_stay_warm():
    batch = Batch(make_session(rows=4), max_batch=2)
    talks = [[40 + n, *range(20)] for n in range(4)]
    for turn in range(3):
        for n, talk in enumerate(talks):
            answer, cached = ask(batch, talk)
            # A recurrent layer goes back to a prompt's end.
            assert cached >= (len(talk) - 6 if turn else 0)
            talks[n] = talk + answer + [turn]
    assert ask(batch, talks[0])[1] > 20
    ask(batch, [63] * 20)
    assert ask(batch, talks[1])[1] == 0  # the fifth conversation took the oldest one's row


@pytest.mark.parametrize("kind", EACH_KIND)
def test_prompts_with_a_common_beginning_share_its_work(kind):
    batch = Batch(make_session(kind, rows=4))
    session = batch.session
    prompt = list(range(1, 40))
    requests = [(prompt, 6, replace(SAMPLINGS[1], seed=seed)) for seed in range(4)]
    expected = answers_alone(kind, requests)
    ask(batch, prompt[:30])  # a recurrent layer can go back to its end only
    before = session.prefilled
    assert run(batch, requests) == expected
    assert session.prefilled - before <= 4 * 9
    assert len({tuple(answer) for answer in expected}) > 1


@pytest.mark.parametrize("kind", EACH_KIND)
def test_short_prompts_run_in_the_steps_of_others(kind, monkeypatch):
    """No prompt is computed by itself, but that of a grammar or of edited logits."""
    requests = [([n, 7, 5 * n + 1][: 1 + n % 3], 9, SAMPLINGS[n % 3]) for n in range(6)]
    requests += [([3, 4], 5, SAMPLINGS[-1]), ([1] * STEPPED_PROMPT, 6, GREEDY)]
    expected = answers_alone(kind, requests)
    session, prompts = make_session(kind, rows=4), []
    prefill = session.prefill
    monkeypatch.setattr(
        session,
        "prefill",
        lambda row, ids, *rest: (prompts.append(ids), prefill(row, ids, *rest))[1],
    )
    assert run(Batch(session), requests, [0, 0, 0, 4, 6, 7, 7, 12]) == expected
    assert not prompts
    run(Batch(session), [([9, 9], 3, SAMPLINGS[3])])
    assert prompts == [[9, 9]]


def test_long_prompts_run_in_chunks_between_steps():
    length = 3 * SHARED_CHUNK
    session = Session(make_model(), length + 64, SessionOptions(batch=2))
    batch, calls = Batch(session), []
    first = batch.start([1, 2, 3], 60, GREEDY)
    for _ in range(3):
        batch.prefill()
        calls.append(len(batch.step()))
    second = batch.start([5] * length, 2, GREEDY)
    waits = 0
    while second.row is None or not second.tokens_left < 2:
        batch.prefill()
        assert first in [token.sequence for token in batch.step()]
        waits += 1
    assert waits == 3 and calls == [0, 0, 1]  # a short prompt runs in steps of its own


def test_only_a_prompt_alone_runs_in_long_chunks(monkeypatch):
    """Beside a running answer a prompt's chunk is a pause of that."""
    session, sizes = Session(make_model(), 256, SessionOptions(batch=2)), []
    session.prefill_chunk, start_row = 8 * SHARED_CHUNK, session.start_row
    note = lambda *given: (sizes.append(given[-1]), start_row(*given))[1]  # noqa: E731
    monkeypatch.setattr(session, "start_row", note)
    batch = Batch(session)
    for token in (5, 6):
        batch.start([token] * 20, 4, GREEDY)
        batch.prefill()
    assert sizes == [8 * SHARED_CHUNK, SHARED_CHUNK]


@pytest.mark.parametrize("kind", EACH_KIND)
def test_prepare_runs_chunks_of_prompts_and_forgets_them(kind, monkeypatch):
    """The second chunk reads the first one's cache: no request is the first to do that."""
    session, calls = make_session(kind, rows=2), []
    run_chunk = session.run_chunk
    monkeypatch.setattr(
        session, "run_chunk", lambda *args: (calls.append(args[-1]), run_chunk(*args))[1]
    )
    batch, requests = Batch(session), [([*range(20)], 6, GREEDY), ([*range(12)], 6, GREEDY)]
    batch.prepare()
    assert calls == [8, 16] and session.cached == [0, 0]
    assert run(batch, requests) == answers_alone(kind, requests)


# Edits of logits ----------------------------------------------------------------------------------


def test_edits_are_those_of_their_formula():
    edits = make_edit_state(3, 40, torch.device("cpu"))
    sampling = Sampling(frequency_penalty=0.5, presence_penalty=-0.25, logit_bias={7: 2.0, 39: -9})
    set_edits(edits, 1, sampling)
    state = StepState(
        token=torch.tensor([[4], [5], [6]]),
        position=torch.zeros(3, 1, dtype=torch.int64),
        last=torch.tensor([0, 0, -1]),
        seen=torch.zeros(3, 40, dtype=torch.bool),
        controls=torch.ones(3, 5),
        seeds=torch.zeros(3, dtype=torch.int64),
    )
    logits = torch.randn(3, 40)
    for tokens in ([4, 5, 6], [4, 5, 6], [9, 7, 6]):
        state.token.copy_(torch.tensor(tokens).unsqueeze(1))
        found = edit_logits(edits, state, logits)
    expected = logits.clone()
    counts = Counter([5, 5, 7])
    for token in range(40):
        count = counts[token]
        expected[1, token] -= 0.5 * count - 0.25 * (count > 0)
        expected[1, token] += {7: 2.0, 39: -9.0}.get(token, 0.0)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert torch.equal(found[[0, 2]], logits[[0, 2]])
    assert edits.counts[2].sum() == 0  # the idle row counts nothing
    edits.allowed[0] = 0
    edits.allowed[0, 1] = 1 << 3
    masked = mask_logits(logits, edits.allowed)
    assert mask_words(40) == 2 and masked[0].isfinite().nonzero().tolist() == [[35]]


class Alternating:
    """A grammar: even tokens, then odd ones, in turn. It ends in an error after `limit` tokens."""

    def __init__(self, limit: int = 1000):
        self.count, self.limit = 0, limit

    def mask(self, row: torch.Tensor) -> None:
        word = sum(1 << bit for bit in range(self.count % 2, 32, 2))
        row.fill_(word - (1 << 32) if word >> 31 else word)

    def advance(self, token: int) -> None:
        if token % 2 != self.count % 2:
            raise ValueError(f"token {token} is not allowed")
        self.count += 1
        if self.count > self.limit:
            raise ValueError("too long")


@pytest.mark.parametrize("sampling", (GREEDY, Sampling(temperature=2.0, top_k=None, seed=3)))
def test_a_grammar_is_obeyed_and_changes_no_neighbor(sampling):
    requests, _ = random_requests(3, 5)
    constrained = [([1, 2, n], 12, sampling, False, Alternating()) for n in range(3)]
    mixed = [*requests[:2], *constrained, *requests[2:]]
    found = run(Batch(make_session(rows=4)), mixed, [0, 0, 1, 2, 4, 5, 9, 9])
    assert found[:2] + found[5:] == answers_alone("plain", requests)
    for answer in found[2:5]:
        assert [token % 2 for token in answer] == [0, 1] * 6


def test_a_grammar_that_fails_ends_its_sequence_only():
    requests, _ = random_requests(4, 3)
    failing = ([1, 2], 12, GREEDY, False, Alternating(limit=5))
    found = run(Batch(make_session(rows=3)), [requests[0], failing, *requests[1:]])
    assert [found[0], *found[2:]] == answers_alone("plain", requests)
    assert len(found[1]) == 6 and str(found[1][-1]) == "too long"


def test_logits_that_are_not_finite_end_their_sequence_only():
    requests, _ = random_requests(5, 4)
    session = make_session(rows=4)
    session.model.embedding.weight.data[33] = float("nan")
    requests = [
        ([token % 32 for token in ids], count, replace(sampling, logit_bias={33: -100.0}))
        for ids, count, sampling in requests
    ]
    expected = []
    for ids, count, sampling in requests:
        single = make_session(rows=1)
        expected.append(list(single.stream(ids, count, sampling)))
    # The model of `session` is another one with the same weights.
    batch = Batch(session)
    found = run(batch, [requests[0], ([1, 33], 9, GREEDY), *requests[1:]])
    assert isinstance(found[1][-1], NotFiniteError) and len(found[1]) == 1
    assert [found[0], *found[2:]] == expected
    again = run(batch, requests)
    assert again == expected


def test_details_come_for_the_sequences_that_ask():
    session = make_session(rows=3)
    batch = Batch(session)
    plain, watched = batch.start([1, 2], 4, GREEDY), batch.start([1, 2], 4, GREEDY, watch=True)
    found = []
    for _ in range(6):
        batch.prefill()
        found += batch.step()
    assert all(token.details is None for token in found if token.sequence is plain)
    details = [token.details for token in found if token.sequence is watched]
    assert len(details) == 4 and all(d.top[0][1] == d.logprob for d in details)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("plain", "int8"))
def test_compiled_batches_equal_answers_given_alone(kind):
    torch._dynamo.reset()
    requests, arrivals = random_requests(1, 8)
    batch = Batch(make_session(kind, rows=4, compile=True), 4)
    batch.prepare()
    recompiles = torch._dynamo.utils.counters["recompiles"].copy()
    # Compiled code rounds the codes of an int8 cache in another way than eager code.
    expected = answers_alone(kind, requests, compile=kind == "int8")
    assert run(batch, requests, arrivals) == expected
    assert torch._dynamo.utils.counters["recompiles"] == recompiles

"""Rings of layers with a sliding window: tokens are those of caches that keep all positions."""

import json
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import smoke_diagonal
from ring_worker import answer
from test_batch import GREEDY, SAMPLINGS, run
from test_batch_speculation import OUTCOMES, open_batch, with_drafts
from test_tp import run_ranks

from formats.kv_cache import KV_CACHES
from model import Chunk, KVCache, ModelArgs, Transformer
from models import ARCHITECTURES, build_model
from ops.plain.pending import MAX_SNAPSHOTS
from ops.plain.ring import RING_SPARE, Ring, cache_slots
from runtime.batch import Batch
from runtime.loading import load_model
from runtime.memory import cache_bytes, plan_capacity
from runtime.session import Session, SessionOptions
from runtime.snapshots import RING_SLACK, snapshots_kept

WINDOW, SLOTS, LENGTH, VOCABULARY = 20, 128, 700, 64
KINDS = list(KV_CACHES)
TOLERANCE = {"plain": 1e-4, "int8": 1e-2}  # another order of sums may round another code
pytestmark = pytest.mark.usefixtures("few_threads")


def make_model(n_active: int = 2) -> Transformer:
    """Two layers with a window, and one without between them."""
    sizes = dict(dim=32, n_layer=3, n_head=4, intermediate=24, n_expert=6, n_active=n_active)
    heads = dict(n_kv_head=2, head_dim=8, sliding_window=WINDOW)
    model = Transformer(
        ModelArgs("mixtral", **sizes, **heads, vocab_size=VOCABULARY, max_position=4096)
    )
    model.layers[1].attention.window = None
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 2 * parameter.shape[-1] ** -0.5, generator=generator)
        else:
            parameter.data.fill_(1.0)
    return model


def open_session(kind: str, rows: int = 1, **options) -> Session:
    settings = SessionOptions(batch=rows, cache_class=KV_CACHES[kind], **options)
    session = Session(make_model(), LENGTH, settings)
    assert [state.kv.shape[3] for state in session.states] == [SLOTS, session.cache_len, SLOTS]
    return session


def keep_all_positions(patch: pytest.MonkeyPatch) -> None:
    for module in ("model", "ops.plain.attention"):
        patch.setattr(f"{module}.cache_slots", lambda length, window: length)


@pytest.fixture
def whole(monkeypatch):
    """Return what makes a session whose caches keep all positions."""

    def make(kind: str, **options) -> Session:
        with monkeypatch.context() as patch:
            keep_all_positions(patch)
            settings = SessionOptions(cache_class=KV_CACHES[kind], **options)
            session = Session(make_model(), LENGTH, settings)
        assert not any(isinstance(state, Ring) for state in session.states)
        # Masks are made at each call.
        mask = session.model.mask

        def whole_mask(*given):
            with monkeypatch.context() as patch:
                keep_all_positions(patch)
                return mask(*given)

        session.model.mask = whole_mask
        return session

    return make


def answers_alone(session: Session, requests: list[tuple]) -> list[list[int]]:
    found = []
    for ids, count, sampling in requests:
        session.reset()
        found.append(list(session.stream(ids, count, sampling)))
    return found


def text(length: int, seed: int = 1) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(VOCABULARY) for _ in range(length)]


def long_requests(seed: int, count: int) -> tuple[list[tuple], list[int]]:
    """Requests with prompts that share beginnings, many of them longer than a ring."""
    rng, start = random.Random(seed), text(400, seed)
    requests = []
    for _ in range(count):
        ids = start[: rng.choice((0, 20, 127, 260, 400))] + text(rng.randrange(1, 90), rng.random())
        sampling = rng.choice(SAMPLINGS)
        if sampling.seed is not None:
            sampling = replace(sampling, seed=rng.randrange(1000))
        requests.append((ids, rng.randrange(1, 30), sampling))
    return requests, sorted(rng.randrange(60) for _ in range(count))


@pytest.mark.parametrize(("kind", "chunk"), smoke_diagonal(KINDS, (5, 64, 200, 2048)))
def test_a_prompt_in_chunks_of_any_size(kind, chunk, whole):
    """Before a ring's window is full, at its end, and far beyond."""
    length = 300 if chunk == 5 else LENGTH
    ids, sessions = text(length), (open_session(kind), whole(kind))
    for start in (0, 5):  # again, from the middle of a prompt
        parts = [session.prefill(0, ids[start:], start, chunk) for session in sessions]
        for (got, *_), (want, *_) in zip(*parts, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE[kind])
        for session in sessions:
            session.reset()
            for _ in session.prefill(0, ids[:5], 0):
                pass


@pytest.mark.parametrize("first", (1, WINDOW, 60, SLOTS - 1, SLOTS, 300))
@pytest.mark.parametrize("kind", KINDS)
def test_calls_of_many_tokens_at_positions(kind, first, whole):
    """Two sequences at different positions, with one token to more than a ring's spare slots."""
    models = [session.model for session in (open_session(kind, 2), whole(kind, batch=2))]
    tokens = torch.tensor([text(LENGTH, 2), text(LENGTH, 3)])
    for model in models:
        for row, shift in ((0, 0), (1, 3)):
            model(tokens[row : row + 1, : first + shift], Chunk(torch.tensor([row]), first + shift))
    begin = torch.tensor([[first], [first + 3]])
    for count in (1, 16, RING_SPARE, RING_SPARE + 1, 200, 1):
        positions = begin + torch.arange(count)
        call = tokens.gather(1, positions), positions
        got, want = (model(*call, all_positions=True) for model in models)
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE[kind])
        begin = begin + count


@pytest.mark.parametrize("kind", KINDS)
def test_padding_and_idle_rows_leave_a_ring_as_it_is(kind):
    session = open_session(kind, 2)
    model, ids = session.model, text(300)
    for row in range(2):
        model(torch.tensor([ids]), Chunk(torch.tensor([row]), 300))
    before = [buffer.clone() for state in session.states[::2] for buffer in state.buffers()]
    for at in (300, 301, 500, LENGTH - 3):  # a warm-up, and idle rows, are at any position
        positions = torch.tensor([[at], [at + 1]]) + torch.arange(2)
        model(torch.zeros_like(positions), positions, torch.full((2,), -1))
    after = [buffer for state in session.states[::2] for buffer in state.buffers()]
    assert all(map(torch.equal, before, after))
    positions = torch.tensor([[300], [300]]) + torch.arange(8)
    model(torch.zeros_like(positions), positions, torch.tensor([2, -1]))
    changed = [(a != b).any(-1).any(0).any(1) for a, b in zip(before, after, strict=True)]
    assert all(rows[0].nonzero().flatten().tolist() == [44, 45, 46] for rows in changed)
    assert not any(rows[1].any() for rows in changed)


@pytest.mark.parametrize("kind", ("plain", pytest.param("int8", marks=pytest.mark.slow)))
def test_a_changed_prompt_goes_back_to_a_window_that_is_there(kind, whole):
    """A few tokens need no copy; more go back to a snapshot. No more is recomputed."""
    session, other, ids = open_session(kind, prefill_chunk=150), whole(kind), text(520)
    list(session.stream(ids, 1, GREEDY))
    kept = []
    for n, tokens in enumerate((RING_SLACK + 1, RING_SLACK + 2, 3, 200, 1, 150, 400)):
        known = session.ids[0]  # its last token is not in the cache yet
        end = len(known) - tokens
        prompt = [*known[:end], (known[end] + 1) % VOCABULARY, *text(60, n)]
        session.prefilled = other.prefilled = 0
        (want,) = answers_alone(other, [(prompt, 12, GREEDY)])
        assert list(session.stream(prompt, 12, GREEDY)) == want
        kept.append(len(prompt) - session.prefilled - end)
    assert [tokens == 0 for tokens in kept] == [True, False, True, False, True, False, False]
    assert -150 < min(kept) < max(kept) == 0


@pytest.mark.parametrize(("kind", "seed"), smoke_diagonal(KINDS, range(4)))
def test_neighbors_and_pages_of_conversations(kind, seed, whole, monkeypatch):
    """Sequences start, end, move between rows and share prefixes; steps come between layers."""
    monkeypatch.setattr("runtime.batch.STEP_EVERY", 1)
    requests, arrivals = long_requests(seed, 8)
    session = open_session(kind, 4, prefill_chunk=(70, 256)[seed // 2])
    assert run(Batch(session, 3), requests, arrivals) == answers_alone(whole(kind), requests)


@pytest.mark.parametrize("kind", ("int8", pytest.param("plain", marks=pytest.mark.slow)))
def test_refused_drafts(kind, whole):
    requests, arrivals = long_requests(5, 8)
    requests = [(ids, count + 10, GREEDY) for ids, count, _ in requests]
    want = answers_alone(whole(kind), requests)
    texts = [ids + answer for (ids, *_), answer in zip(requests, want, strict=True)]
    batch = open_batch(open_session(kind, 4, prefill_chunk=100), texts, 3, True)
    assert run(batch, with_drafts(requests), [6 * step for step in arrivals]) == want
    assert min(batch.speculation.control.seen[name] for name in OUTCOMES) > 0


@pytest.mark.parametrize(
    "sizes", (pytest.param((8,), marks=pytest.mark.slow), (8, 32, 64)), ids=str
)
def test_short_prompts_as_steps_of_many_tokens(sizes, whole):
    session, other, known = open_session("int8"), whole("int8"), []
    session.short_chunks = sizes  # as on a GPU
    for n, count in enumerate((3, 128, 60, 90, 5)):
        prompt = known + text(count, n)
        (want,) = answers_alone(other, [(prompt, 9, GREEDY)])
        assert list(session.stream(prompt, 9, GREEDY)) == want
        known = prompt + want
    assert len(known) > 2 * SLOTS


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_steps_and_prompts(kind, whole, monkeypatch):
    if (
        kind == "int8"
    ):  # compiled code rounds other codes: with all experts no router's choice turns
        monkeypatch.setitem(globals(), "make_model", partial(make_model, n_active=6))
    options = dict(compile=True, compile_prefill=True)
    session, other = open_session(kind, prefill_chunk=150, **options), whole(kind)
    for ids in (text(3), text(60), text(500), text(510)[:505]):
        (want,) = answers_alone(other, [(ids, 80, GREEDY)])
        got = list(session.stream(ids, 80, GREEDY))
        if kind == "int8":
            assert lead_of_first_difference(ids, got, want) < 0.2
        else:
            assert got == want


def lead_of_first_difference(ids: list[int], got: list[int], want: list[int]) -> float:
    """Return by how much fp32 logits, of standard deviation 2, prefer one answer's next token."""
    pairs = enumerate(zip(got, want, strict=True))
    end, tokens = next(((n, pair) for n, pair in pairs if pair[0] != pair[1]), (0, (0, 0)))
    model, known = make_model(), torch.tensor([ids + want[:end]])
    model.setup_cache(1, LENGTH)
    logits = model(known, torch.arange(known.shape[1]).unsqueeze(0))[0]
    return (logits[tokens[0]] - logits[tokens[1]]).abs().item()


def test_a_ring_has_room_for_a_window_and_a_call():
    for window in (1, 20, 64, 65, 128, 512, 1024, 4096):
        slots = cache_slots(1 << 20, window)
        assert slots % 128 == 0 and window + RING_SPARE <= slots < window + RING_SPARE + 128
        assert cache_slots(100, window) == 100
    assert cache_slots(1000, None) == 1000


def test_a_context_of_128k_costs_little_and_the_plan_knows_it():
    """gpt-oss-20b: half of the layers keep 256 positions."""
    with torch.device("meta"):
        model = build_model(ARCHITECTURES["gpt-oss-20b"])
    length, row = 131072, 2 * 8 * 64 * 2  # bytes of a position and layer
    rings = 12 * 256 * row
    want = 12 * length * row + (1 + MAX_SNAPSHOTS) * rings
    assert cache_bytes(model, 1, length, KVCache, torch.bfloat16) == want
    found = plan_capacity(model, KVCache, torch.bfloat16, int(4 * want / 0.9) + 2**22, 1)
    assert found.length >= length - 256 and found.rows == 4
    short = plan_capacity(model, KVCache, torch.bfloat16, want // 2, 1)
    assert 8192 <= short.length < length // 2 and short.rows >= 1
    assert [snapshots_kept(size) for size in (0, 10**6, 3 * 10**8, 10**9)] == [8, 8, 3, 2]


@pytest.mark.slow
@pytest.mark.parametrize("family", ("mixtral", "gpt_oss", "gemma4"))
def test_two_ranks_answer_as_one_with_whole_caches(family, make_family, monkeypatch):
    directory, length, count = make_family(family).directory, 180, 60
    command = run_ranks(2, "ring_worker", directory, str(length), str(count))
    out, errors = command.communicate(timeout=300)
    assert command.returncode == 0, errors
    found = json.loads(out.splitlines()[-1])
    assert min(found["slots"]) == SLOTS
    keep_all_positions(monkeypatch)
    want = answer(load_model(directory, "cpu"), length, count)
    assert min(want["slots"]) > SLOTS and found["tokens"] == want["tokens"]

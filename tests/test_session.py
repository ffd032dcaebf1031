"""Sampling, sessions and their compiled form, on small random models."""

import itertools
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from conftest import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from generate import load_model
from models.gpt_oss import GptOssArgs
from models.layers.yarn import Yarn
from models.random_weights import RandomWeights
from ops.plain.attention import BLOCK as CACHE_BLOCK
from ops.plain.topk import BLOCK, RANK_KERNEL_MAX, argmax, largest_by_rank, running_sum
from parallel.device import pick_device
from runtime import graphs
from runtime.outbox import Outbox
from runtime.runner import EagerRunner
from runtime.sampling import Noise, Sampling, sample
from runtime.session import Session, SessionOptions
from runtime.session_prompts import capture_next, short_chunk_sizes
from runtime.speculation import Speculation

GREEDY = Sampling(temperature=0)
PROMPT = [5, 17, 3, 99, 42, 8, 120]
# Limits of chi-square at 0.1 %, by degrees of freedom.
CHI_SQUARE = {
    0: 0.0,
    1: 10.8,
    2: 13.8,
    3: 16.3,
    4: 18.5,
    5: 20.5,
    6: 22.5,
    7: 24.3,
    9: 27.9,
    19: 43.8,
}


@pytest.fixture(scope="module")
def model(make_family):
    return load_model(make_family("mixtral").directory, "cpu")


def open_session(model, length: int, **options) -> Session:
    return Session(model, length, SessionOptions(**options))


def generate(
    session: Session, ids=PROMPT, count: int = 12, sampling: Sampling = GREEDY
) -> list[int]:
    """Continue `ids` in a session that has forgotten everything."""
    session.reset()
    return list(session.stream(ids, count, sampling))


# Sampling -----------------------------------------------------------------------------------------


def draw(logits, count, *, k, temperature=1.0, top_p=2.0, min_p=0.0, penalty=1.0, seen=None):
    """Draw `count` tokens from one row of logits [V], as one batch."""
    rows = logits.expand(count, -1)
    noise = Noise(torch.arange(count), torch.zeros(count, 1, dtype=torch.int64), len(logits))
    seen = torch.zeros_like(rows, dtype=torch.bool) if seen is None else seen.expand(count, -1)
    controls = torch.tensor([[temperature, k, top_p, min_p, penalty]])
    return sample(rows, controls, seen, noise).squeeze(1)


@pytest.mark.parametrize(
    "settings",
    (
        dict(k=20),
        dict(k=5),
        dict(k=20, temperature=0.5),
        dict(k=20, top_p=0.7),
        dict(k=10, top_p=0.8, temperature=1.5),
        dict(k=20, min_p=0.2),
        dict(k=8, top_p=0.9, min_p=0.05, temperature=0.8, penalty=1.4),
    ),
    ids=str,
)
def test_draws_follow_the_distribution_of_transformers(settings):
    """Chi-square at 0.1 % over 50,000 draws; excluded tokens are never drawn."""
    torch.manual_seed(3)
    logits, seen = torch.randn(20) * 2, torch.zeros(20, dtype=torch.bool)
    seen[[1, 4, 7]] = True
    warpers = [RepetitionPenaltyLogitsProcessor(settings.get("penalty", 1.0))]
    warpers += [TemperatureLogitsWarper(settings.get("temperature", 1.0))]
    warpers += [TopKLogitsWarper(settings["k"])]
    warpers += [TopPLogitsWarper(settings["top_p"])] if "top_p" in settings else []
    warpers += [MinPLogitsWarper(settings["min_p"])] if "min_p" in settings else []
    warped = LogitsProcessorList(warpers)(seen.nonzero().T, logits.clone().unsqueeze(0))
    expected = warped.softmax(-1)[0]
    count = 50_000
    drawn = draw(logits, count, seen=seen, **settings).bincount(minlength=20).float()
    kept = expected > 0
    assert drawn[~kept].sum() == 0
    chi2 = ((drawn - count * expected)[kept] ** 2 / (count * expected)[kept]).sum().item()
    degrees = int(kept.sum()) - 1
    assert chi2 <= CHI_SQUARE.get(degrees, 3.3 * degrees + 10)


@given(data=st.data(), count=st.integers(1, 40_000), rows=st.integers(1, 2))
@settings(max_examples=12, deadline=None)
def test_largest_by_rank_agrees_with_topk(data, count, rows):
    """Up to the order of equal values; a coarse grid makes many of them."""
    k = data.draw(st.integers(1, min(count, RANK_KERNEL_MAX // 4)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**20)))
    values = torch.randn(rows, count, generator=generator)
    values = (values * data.draw(st.sampled_from((1, 1000)))).round()
    best, indices = largest_by_rank(values, k)
    assert torch.equal(best, values.topk(k).values)
    assert torch.equal(values.gather(1, indices), best)
    assert all(len(set(row)) == k for row in indices.tolist())


@given(data=st.data(), count=st.integers(1, 3 * BLOCK), rows=st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_argmax_agrees_with_torch(data, count, rows):
    """A coarse grid makes many equal numbers: the first of them is taken. NaN is the largest."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**20)))
    x = torch.randn(rows, count, generator=generator).mul(data.draw(st.sampled_from((1, 99))))
    x = x.round()
    special = data.draw(st.sampled_from((0.0, float("nan"), float("inf"), float("-inf"))))
    x[data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, count - 1))] = special
    assert torch.equal(argmax(x), x.argmax(dim=-1, keepdim=True))


@pytest.mark.parametrize("count", (1, BLOCK, BLOCK + 1, 3 * BLOCK, 151_936))
def test_running_sum_agrees_with_cumsum(count):
    x = torch.rand(2, count, generator=torch.Generator().manual_seed(0))
    expected = x.double().cumsum(-1)
    assert running_sum(x).shape == x.shape
    assert ((running_sum(x).double() - expected) / expected).abs().max() < 2e-6


def test_greedy_takes_the_likeliest_after_the_penalty():
    logits, seen = torch.tensor([[1.0, 3.0, 2.5]]), torch.tensor([[False, True, False]])
    controls = torch.tensor([[1.0, 1.0, 2.0, 0.0, 1.0]])
    assert sample(logits, controls, seen, None).tolist() == [[1]]
    controls[0, 4] = 2.0
    assert sample(logits, controls, seen, None).tolist() == [[2]]


@pytest.mark.parametrize(
    "setting",
    (
        dict(top_k=0),
        dict(temperature=-1.0),
        dict(top_p=0.0),
        dict(top_p=1.5),
        dict(min_p=1.0),
        dict(repetition_penalty=0.0),
        dict(temperature=float("nan")),
        dict(seed=-1),
        dict(seed=10**20),
    ),
    ids=str,
)
def test_an_impossible_setting_is_refused_by_name(setting):
    with pytest.raises(ValueError, match=f"--{next(iter(setting))} "):
        Sampling(**setting)


# Sessions -----------------------------------------------------------------------------------------


def test_same_seed_same_tokens(model):
    session = Session(model, 64)
    first = generate(session, sampling=Sampling(temperature=1.5, seed=7))
    assert generate(session, sampling=Sampling(temperature=1.5, seed=7)) == first
    assert generate(session, sampling=Sampling(temperature=1.5, seed=8)) != first


def test_top_k_of_one_is_greedy(model):
    session = Session(model, 64)
    assert generate(session, sampling=Sampling(top_k=1)) == generate(session)


def test_a_repetition_penalty_covers_prompt_and_answer(model):
    """The penalty is so strong that no token comes twice."""
    sampling = Sampling(temperature=0, repetition_penalty=1e9)
    answer = generate(Session(model, 64), count=30, sampling=sampling)
    assert len(set(answer) | set(PROMPT)) == len(answer) + len(PROMPT)


@pytest.mark.parametrize("taken", (1, 4, 12))
def test_a_cached_prefix_is_not_recomputed(model, taken):
    """Stop reading an answer early and continue from there: same tokens as from nothing."""
    session = Session(model, 128)
    stream = session.stream(PROMPT, 12, GREEDY)
    ids = PROMPT + list(itertools.islice(stream, taken)) + [9, 11, 4]
    stream.close()
    prefilled = []

    def prefill(row, part, start, chunk):
        prefilled.append((len(part), start))
        return Session.prefill(session, row, part, start, chunk)

    session.prefill = prefill
    again = list(session.stream(ids, 12, GREEDY))
    assert prefilled[0][0] <= 4 and sum(prefilled[0]) == len(ids)
    assert again == generate(Session(model, 128), ids)


def test_the_same_prompt_again_gives_the_same_answer(model):
    session = Session(model, 64)
    first = list(session.stream(PROMPT, 5, GREEDY))
    assert list(session.stream(PROMPT, 5, GREEDY)) == first
    shorter = list(session.stream(PROMPT[:3], 5, GREEDY))
    assert shorter == generate(Session(model, 64), PROMPT[:3], 5)


@pytest.mark.parametrize(
    ("compile_prefill", "length"),
    [(False, 112), pytest.param(True, 64, marks=pytest.mark.slow)],
)
def test_a_session_is_used_to_its_last_position(model, compile_prefill, length):
    """The cache has no slack: 16 or (for padding) 64 spare positions make it exactly 128 long."""
    session = open_session(model, length, compile_prefill=compile_prefill)
    assert session.cache_len == 128
    count = length - len(PROMPT)
    assert generate(session, count=count) == generate(Session(model, 256), count=count)
    ids = (PROMPT * 30)[: length - 1]
    again = open_session(model, length, compile_prefill=compile_prefill)
    assert generate(again, ids, 1) == generate(Session(model, 256), ids, 1)


@pytest.mark.parametrize("chunk", (1, 16, 50))
def test_chunked_prefill_gives_the_same_tokens(model, chunk):
    ids = (PROMPT * 20)[:101]
    chunked = generate(open_session(model, 128, prefill_chunk=chunk), ids)
    assert chunked == generate(Session(model, 128), ids)


PROMPTS = [PROMPT, PROMPT * 5 + [3], [9], list(range(100, 60, -1)), [1, 2]]


@pytest.mark.parametrize(
    "count", (pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(5, marks=pytest.mark.slow))
)
def test_each_sequence_of_a_batch_is_as_if_alone(family, count):
    model = load_model(family.directory, "cpu")
    alone = [generate(Session(model, 64), ids, 9) for ids in PROMPTS]
    session = open_session(model, 64, batch=count)
    for first in range(0, len(PROMPTS), count):  # with 2, the last prompt has no neighbor
        some = PROMPTS[first : first + count]
        answers = list(zip(*session.stream_all(some, 9, GREEDY), strict=True))
        assert [list(answer) for answer in answers] == alone[first : first + count]


def test_a_batch_continues_from_its_cache(model):
    session, computed = open_session(model, 128, batch=2), []
    stream = session.stream_all(PROMPTS[:2], 12, GREEDY)
    answers = list(zip(*itertools.islice(stream, 5), strict=True))
    stream.close()
    more = [[*ids, *answer, 7] for ids, answer in zip(PROMPTS, answers, strict=False)]

    def prefill(row, part, start, chunk):
        computed.append(len(part))
        return Session.prefill(session, row, part, start, chunk)

    session.prefill = prefill
    continued = list(zip(*session.stream_all(more, 6, GREEDY), strict=True))
    assert max(computed) <= 3
    alone = [generate(Session(model, 128), ids, 6) for ids in more]
    assert [list(answer) for answer in continued] == alone


def test_sequences_of_a_batch_draw_differently(model):
    session = open_session(model, 64, batch=3)
    sampling = Sampling(temperature=2.0, seed=3)
    first = list(session.stream_all([PROMPT] * 3, 12, sampling))
    assert len(set(zip(*first, strict=True))) == 3
    session.reset()
    assert list(session.stream_all([PROMPT] * 3, 12, sampling)) == first


@pytest.fixture
def eager_backend(monkeypatch):
    """torch.compile traces (and Dynamo counts) as usual, but runs the traced graphs eagerly."""
    compile = torch.compile

    def compile_eagerly(function, **options):
        return compile(function, backend="eager", **options)

    monkeypatch.setattr(torch, "compile", compile_eagerly)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.slow
def test_another_length_does_not_recompile(family, eager_backend):
    """By Dynamo's own counts."""
    model = load_model(family.directory, "cpu")
    options = dict(compile=True, compile_prefill=True, batch=2, prefill_chunk=48)
    session = open_session(model, 100, **options)
    lengths = [33, 1, 2, 16, 47, 48, 49, 81]
    counts = []
    for length in lengths:
        session.reset()
        prompts = [(PROMPT * 20)[:length], (PROMPT * 20)[-length:]]
        list(session.stream_all(prompts, 3, GREEDY))
        counts.append(counters["stats"]["unique_graphs"])
    by_length = dict(zip(lengths, counts, strict=True))
    assert counts[0] > 0 and len(set(counts)) == 1, by_length


@pytest.mark.slow
@pytest.mark.parametrize("layers", (2, 6))
def test_layers_with_and_without_a_window_are_two_compiled_blocks(eager_backend, layers):
    """For any number of layers: begin, two blocks and logits, for prompt and step, and sampling."""
    args = GptOssArgs(
        "gpt_oss",
        dim=32,
        n_layer=layers,
        n_head=4,
        n_kv_head=2,
        head_dim=16,
        intermediate=32,
        n_expert=4,
        n_active=2,
        vocab_size=160,
        max_position=256,
        sliding_window=8,
        full_layers=tuple(range(1, layers, 2)),
        swiglu_limit=7.0,
        yarn=Yarn(4.0, 64),
    )
    counters.clear()
    model = load_model(RandomWeights(args), "cpu")
    generate(open_session(model, 100, compile=True, compile_prefill=True), count=6)
    assert counters["stats"]["unique_graphs"] == 2 * 4 + 1


@pytest.mark.parametrize(
    ("ids", "count", "message"),
    (
        (PROMPT, 58, "at most 57 with --max_new_tokens"),
        ([], 1, "prompt is empty"),
        (PROMPT, -1, "--max_new_tokens"),
        ([160], 1, "from 0 to 159"),
        ([-1], 1, "from 0 to 159"),
    ),
)
def test_an_impossible_prompt_is_refused_before_it_runs(model, ids, count, message):
    with pytest.raises(ValueError, match=message):
        generate(Session(model, 64), ids, count)


def test_a_session_beyond_the_models_positions_is_refused(model):
    longest = model.args.max_position
    assert Session(model, longest).max_seq_len == longest
    with pytest.raises(ValueError, match=f"{longest + 1}: .* for {longest} positions at most"):
        Session(model, longest + 1)


def test_more_prompts_than_sequences_are_refused(model):
    with pytest.raises(ValueError, match="3 prompts in a session for 2"):
        list(open_session(model, 64, batch=2).stream_all(PROMPTS[:3], 1, GREEDY))


def test_a_token_is_yielded_before_the_next_step_begins(model):
    """On the CPU a step takes the host's time: a token must not wait for the next one."""
    session, steps = Session(model, 64), []
    decode = session.decode

    def count_step(*args):
        steps.append(1)
        decode(*args)

    session.decode = count_step
    stream = session.stream(PROMPT, 5, GREEDY)
    for done in range(5):
        next(stream)
        assert len(steps) == done


def test_a_session_notices_that_its_model_was_taken(model):
    first = Session(model, 64)
    generate(first)
    second = Session(model, 64)
    assert len(generate(second)) == 12
    with pytest.raises(ValueError, match="another session has taken this model"):
        generate(first)


def test_a_stream_ends_where_the_next_one_begins(model):
    """It would go on with the other's cache."""
    session = Session(model, 64)
    expected = list(session.stream(PROMPT, 6, GREEDY))
    for opened in (session, Speculation(session, 2)):
        opened.reset()
        old = opened.stream(PROMPT, 6, GREEDY)
        assert next(old) == expected[0]
        assert list(opened.stream(PROMPT, 6, GREEDY)) == expected
        with pytest.raises(ValueError, match="another text has begun in this session"):
            next(old)
        assert list(opened.stream(PROMPT, 6, GREEDY)) == expected
    old = session.stream(PROMPT, 6, GREEDY)
    next(old)
    Session(model, 64)
    with pytest.raises(ValueError, match="another text has begun"):
        next(old)


@pytest.mark.parametrize("length", (0, -5))
def test_a_session_of_no_length_is_refused(model, length):
    with pytest.raises(ValueError, match=f"max_seq_len {length}: it must be at least 1"):
        Session(model, length)


def test_an_overflow_does_not_outlive_a_reset(model):
    session = Session(model, 64)
    expected = generate(session)
    for cache in session.states:
        cache.kv[1, :, :, 40:] = float("inf")
    session.reset()
    assert generate(session) == expected


def test_an_unseeded_draw_leaves_the_global_generator_alone(model):
    state = torch.get_rng_state()
    generate(Session(model, 64), sampling=Sampling())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_missing_device_is_named():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ValueError, match=r"no CUDA device.*--device cpu"):
        pick_device("cuda")
    with pytest.raises(ValueError, match="auto, cuda or cpu"):
        pick_device("gpu")
    assert pick_device("auto").type == "cpu"


# Compiled -----------------------------------------------------------------------------------------


def check_compiled(directory, dtype=None) -> None:
    """Compiled tokens equal the eager ones; neither lengths nor settings recompile."""
    model = load_model(directory, "cpu", dtype)
    most = min(192, model.args.max_position)  # PhiMoE's 128
    eager = generate(Session(model, most), count=48)
    torch._dynamo.reset()
    session = open_session(model, most, compile=True, compile_prefill=True)
    assert generate(session, count=48) == eager
    generate(session, sampling=Sampling(seed=0))
    before = counters["stats"]["unique_graphs"]
    kinds = {(type(block.ffn), getattr(block.attention, "window", None)) for block in model.layers}
    # Begin, logits and each kind of block, for prefill and for decode, and two ways to sample:
    # equal layers share one compiled function.
    assert before <= 2 * (2 + len(kinds)) + 2
    for length in range(1, most - 32, 16):
        temperature, top_p = 0.1 + length / 100, 0.5 + length / 320
        settings = Sampling(temperature, top_k=length, top_p=top_p, seed=length)
        generate(session, [i % 150 for i in range(length)], 3, settings)
    assert counters["stats"]["unique_graphs"] == before
    # A prompt that continues from the cache, padded or not.
    session.reset()
    ids = PROMPT + list(session.stream(PROMPT, 9, GREEDY)) + [3, 4, 5]
    assert list(session.stream(ids, 20, GREEDY)) == generate(Session(model, most), ids, 20)


@pytest.mark.parametrize(
    "backend", ("eager", pytest.param("inductor", marks=pytest.mark.slow)), ids=str
)
def test_compiled_equals_eager_and_never_recompiles(make_family, backend, monkeypatch):
    """Whether something recompiles does not depend on what compiles it."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    counters.clear()
    check_compiled(make_family("mixtral").directory)


def test_a_repeated_call_is_captured(monkeypatch):
    """The capture is fake: it runs the call, and its replay does nothing."""
    log = []

    class FakeCapture:
        def __init__(self, pool):
            log.append("capture")

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def replay(self):
            log.append("replay")

    def double(x):
        log.append(x)
        return (2 * x,)

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(graphs, "CapturedStep", FakeCapture)
    cache = graphs.GraphCache(torch.device("cpu"))
    x = [torch.full((2,), float(n)) for n in range(4)]
    assert cache("a", double, x[0])[0].tolist() == [0, 0] and log == [x[0]]
    # The fake replay leaves the result of the capture.
    found = cache("a", double, x[1]), cache("a", double, x[2])
    assert found[0][0].tolist() == [2, 2] and [log[2], *log[4:]] == ["capture", "replay"]
    assert log[3].tolist() == x[2].tolist()  # the captured call reads the tensors of the last one
    cache("a", double, x[3])
    assert found[1][0].data_ptr() != cache("a", double, x[3])[0].data_ptr()
    log.clear()
    cache.prepare("b", double, x[1])
    assert log[0] == "capture" and log[1].tolist() == [1, 1]
    cache("b", double, x[2])
    assert log[2:] == ["replay"] and log[1].tolist() == [2, 2]
    for n in range(graphs.MAX_GRAPHS):
        cache(n, double, x[3])
    assert len(cache.known) == graphs.MAX_GRAPHS and "a" not in cache.known
    log.clear()
    cache = graphs.GraphCache(torch.device("cpu"), captures_repeats=False)
    assert [cache("a", double, x[1])[0].tolist() for _ in range(3)] == [[2, 2]] * 3
    assert "capture" not in log
    cache.expect("a")
    cache("a", double, x[1])
    assert cache.has("a") and log.count("capture") == 1


def test_a_call_that_cannot_be_captured_runs_without(monkeypatch, caplog):
    """For want of memory: no answer fails for it, and no other capture is tried."""
    captures = []

    def fail(*_):
        captures.append(1)
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(graphs.GraphCache, "capture", fail)
    cache, x = graphs.GraphCache(torch.device("cpu")), torch.ones(1)
    cache.expect("a")
    for key in ("a", "a", "b", "b", "a"):
        assert cache(key, lambda x: (2 * x,), x)[0].item() == 2
    assert cache.is_full and captures == [1] and not (cache.has("a") or cache.has("b"))
    assert caplog.text.count("no more prompts are captured: CUDA out of memory") == 1


def test_an_outbox_keeps_two_steps_apart(monkeypatch):
    """Its memory is not pinned and its kernel is PyTorch's: this machine may have no GPU."""

    def post(token, count, slots):
        slots[count.item() % 2, : len(token)] = token.flatten()
        count.add_(1)

    class FakeEvent:
        def record(self, stream):
            pass

        def synchronize(self):
            pass

    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory=False, **o: zeros(*size, **o))
    monkeypatch.setattr("runtime.outbox.post_tokens", post)
    for name, fake in dict(Event=FakeEvent, synchronize=lambda: None).items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    outbox, token = Outbox(2, torch.device("cpu")), torch.tensor([[0], [0]])

    def step():
        token.add_(1)
        outbox.post(token)

    def warmed_up():
        step()
        return step

    first = outbox.counted(warmed_up)
    first()
    two = outbox.read_later()
    second = outbox.counted(warmed_up)  # posts while a token is unread
    second()
    four = outbox.read_later()
    assert two() == [2, 2] and four() == [4, 4]
    second()
    assert outbox.read_later()() == [5, 5] and outbox.posted == outbox.count.item() == 3

    def fails():  # a server goes on without the step that did not fit into memory
        step()
        raise torch.cuda.OutOfMemoryError

    with pytest.raises(torch.cuda.OutOfMemoryError):
        outbox.counted(fails)
    second()
    assert outbox.read_later()() == [7, 7] and outbox.posted == outbox.count.item() == 4


def check_details(model, session: Session) -> None:
    """Details of each token equal those of one call on all tokens; watching changes no token."""
    prompts = PROMPTS[: session.batch]
    plain = list(session.stream_all(prompts, 6, GREEDY))
    session.reset()
    session.watch, details, watched = True, [], []
    for tokens in session.stream_all(prompts, 6, GREEDY):
        watched.append(tokens)
        details.append(session.details)
    assert watched == plain
    for row, prompt in enumerate(prompts):
        ids = torch.tensor([session.ids[row]])
        model.setup_cache(1, 64)
        where = torch.arange(ids.shape[1])[None]
        logits, experts, weights = model(ids, where, all_positions=True, return_routing=True)
        logprobs, first = logits[0].log_softmax(dim=-1), len(prompt) - 1
        for n in range(6):
            found, at = details[n][row], first + n
            own = logprobs[at, watched[n][row]].item()
            assert found.logprob == pytest.approx(own, abs=1e-4)
            likeliest = logprobs[at].topk(20)[0].tolist()
            assert [value for _, value in found.top] == pytest.approx(likeliest, abs=1e-4)
            for token, value in found.top:
                assert logprobs[at, token].item() == pytest.approx(value, abs=1e-4)
            assert found.experts == experts[:, at].tolist()
            found_weights = torch.tensor(found.weights)
            torch.testing.assert_close(found_weights, weights[:, at], atol=1e-4, rtol=0)


@pytest.mark.parametrize("batch", (1, 3))
def test_a_watched_answer_has_the_details_of_the_model(family, batch):
    model = load_model(family.directory, "cpu")
    check_details(model, open_session(model, 64, batch=batch, prefill_chunk=9))


@pytest.mark.slow
def test_a_watched_answer_compiled(make_family):
    model = load_model(make_family("mixtral").directory, "cpu")
    check_details(model, open_session(model, 48, compile=True, compile_prefill=True))


@pytest.mark.slow
def test_many_sessions_of_a_model_can_be_compiled(make_family):
    """More lengths than Dynamo's own limit of eight recompilations."""
    model = load_model(make_family("mixtral", max_position_embeddings=704).directory, "cpu")
    for length in range(64, 64 * 11, 64):
        assert len(generate(open_session(model, length, compile=True), count=3)) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    (
        "qwen2_moe",
        "qwen3_moe",
        "olmoe",
        "granitemoe",
        "phimoe",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt_oss",
        "deepseek_v2",
        "deepseek_v3",
    ),
)
def test_other_families_compiled(make_family, name):
    counters.clear()
    check_compiled(make_family(name).directory)


@pytest.mark.parametrize("sizes", ((32,), (8, 32)), ids=str)
@pytest.mark.parametrize("count", (1, 5, 31, 32, 33, 64, 65))
def test_short_prompts_run_as_steps_of_many_tokens(model, count, sizes):
    """As a captured session runs them: also with a prefix in the cache, and watched."""
    plain, session = open_session(model, 128), None
    text = [(37 * n + 11) % 150 for n in range(count + 9)]
    prompts, want, details = (text[:count], text), [], []
    for prompt in prompts:
        want.append(generate(plain, prompt))
        plain.watch = True
        generate(plain, prompt, 1)
        plain.watch = False
        details.append(plain.details[0])
    session = open_session(model, 128)
    session.short_chunks = sizes  # as on a GPU
    for prompt, tokens, detail in zip(prompts, want, details, strict=True):
        assert list(session.stream(prompt, 12, GREEDY)) == tokens
        session.watch = True
        list(session.stream(prompt, 1, GREEDY))  # all but the last token are in the cache
        session.watch = False
        assert session.details[0].experts == detail.experts
        assert session.details[0].logprob == pytest.approx(detail.logprob, abs=1e-4)


class CalledGraphs:
    """A GraphCache that captures nothing, and notes the keys of its calls."""

    def __init__(self) -> None:
        self.keys, self.known, self.is_full = [], set(), False

    def __call__(self, key, function, *tensors: Tensor) -> tuple[Tensor, ...]:
        self.keys.append(key)
        self.known.add(key)
        return function(*tensors)

    def expect(self, key) -> None:
        pass

    def prepare(self, key, function, *tensors: Tensor) -> None:
        self(key, function, *tensors)

    def has(self, key) -> bool:
        return key in self.known


def as_if_captured(session: Session) -> CalledGraphs:
    """Let prompts run as those of a captured session on a GPU, by positions, too."""
    session.graphs, session.pads, session.short_chunks = CalledGraphs(), True, ()
    session.runner.can_capture = lambda tokens: True
    session.prefill_runner.takes_positions = lambda tokens, end: True
    return session.graphs


@pytest.mark.parametrize("name", FAMILIES)
def test_one_graph_runs_turns_of_every_family_at_all_positions(name, make_family):
    """As a captured session runs the turns of a chat, each with padding."""
    model = load_model(make_family(name).directory, "cpu", torch.float32)
    text = [(37 * n + 11) % 150 for n in range(127)]
    turns = (0, 30), (30, 60), (60, 64), (64, 115), (115, 127)

    def logits(session: Session) -> list[Tensor]:
        return [next(session.prefill(0, text[a:b], a))[0] for a, b in turns]

    want, session = logits(open_session(model, 128)), open_session(model, 128)
    graphs = as_if_captured(session)
    later = [(64, "anywhere", False)] * 4
    for first in ((32, 32, False), (64, "anywhere", False)):  # the graph is there by then
        for got, expected in zip(logits(session), want, strict=True):
            torch.testing.assert_close(got, expected, atol=1e-3, rtol=0)
        assert graphs.keys == [first, *later]
        graphs.keys.clear()
        session.reset()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_captured_ahead_leaves_the_text_of_every_family(name, make_family):
    """It goes on from keys and values, rings and states, some of whose tokens are pending."""
    model = load_model(make_family(name).directory, "cpu", torch.float32)
    text, answers = [(37 * n + 11) % 150 for n in range(71)], []
    for captures in (False, True):
        session = open_session(model, 128)
        for end in (66, 70):
            list(session.stream(text[:end], 1, GREEDY))
        if captures:
            graphs = as_if_captured(session)
            while capture_next(session):
                pass
            assert len(graphs.keys) == 4 and session.cached == [70]  # captured, then timed
        answers.append(list(session.stream(text[:71], 9, GREEDY)))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("sizes", ((32,), (8, 32)), ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_short_prompts_of_every_family(name, sizes, make_family):
    """Logits of a prompt, then of a second one, which reads what the first has left in the cache.

    In fp32: the order of sums alone may differ.
    """
    model = load_model(make_family(name).directory, "cpu", torch.float32)
    text = [(37 * n + 11) % 150 for n in range(60)]

    def logits(session: Session) -> list[Tensor]:
        found = []
        for first in (3, 30, 45):
            session.reset()
            for start, end in ((0, first), (first, first + 9)):
                found += [part[0] for part in session.prefill(0, text[start:end], start)][-1:]
        return found

    want = logits(open_session(model, 128))
    session = open_session(model, 128)
    session.short_chunks = sizes  # as on a GPU
    for got, expected in zip(logits(session), want, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-3, rtol=0)


def test_which_prompts_are_short(model):
    session = open_session(model, 256, prefill_chunk=100)
    assert [session.chunk_size(0, tokens) for tokens in (1, 64, 65)] == [100, 100, 100]
    session.short_chunks = (32,)
    assert [session.chunk_size(0, tokens) for tokens in (1, 64, 65)] == [32, 32, 100]
    assert [session.chunk_size(0, tokens, 16) for tokens in (1, 64, 65)] == [16, 16, 16]
    session.short_chunks = 8, 32  # the fewest chunks, of the smallest size
    assert [session.chunk_size(0, tokens) for tokens in (1, 8, 9, 64, 65)] == [8, 8, 32, 32, 100]
    session.short_chunks = (8,)
    assert [session.chunk_size(0, tokens) for tokens in (1, 8, 9, 16, 17)] == [8, 8, 8, 8, 100]


def test_a_short_prompt_runs_in_the_smallest_chunk_that_holds_it(model):
    """The decode runner gets few tokens at once, whose padding is not real."""
    calls = []

    class Recorder(EagerRunner):
        def begin(self, model, tokens, span):
            calls.append((tokens[0].tolist(), span[0].tolist()))
            return super().begin(model, tokens, span)

    session = open_session(model, 128)
    session.runner, session.short_chunks = Recorder(model), (8, 32)
    session.warm_up(0)
    assert [len(tokens) for tokens, _ in calls[::2]] == [8, 32]  # each twice
    calls.clear()
    text = [(37 * n + 11) % 150 for n in range(40)]
    list(session.stream(text[:5], 1, GREEDY))
    assert calls == [(text[:5] + text[4:5] * 3, list(range(8)))]
    list(session.stream(text, 1, GREEDY))  # five are in the cache
    assert [len(tokens) for tokens, _ in calls] == [8, 32, 8]
    assert calls[1] == (text[5:37], list(range(5, 37)))
    assert calls[2] == (text[37:] + text[-1:] * 5, list(range(37, 45)))


class BoundedRunner(EagerRunner):
    """Has two kinds of steps, as `FusedRunner`, and notes the bound of each."""

    def __init__(self, model, bound: int):
        super().__init__(model)
        self.bound, self.bounds = bound, []

    def reaches(self, queries: int, length: int) -> list[int | None]:
        return [self.bound, None]

    def begin(self, model, tokens, span):
        self.bounds.append(self.reach)
        return super().begin(model, tokens, span)


@pytest.mark.parametrize("lengths", ((10,), (10, 15), (15, 10)))
def test_a_step_takes_the_least_bound_that_fits_all_rows(model, lengths):
    """It changes within an answer: position 19 is the last one below the bound."""
    prompts = [[7 * n % 150 + 1 for n in range(length)] for length in lengths]
    want = list(open_session(model, 64, batch=len(lengths)).stream_all(prompts, 20, GREEDY))
    session = open_session(model, 64, batch=len(lengths))
    session.runner = BoundedRunner(model, 20)
    assert list(session.stream_all(prompts, 20, GREEDY)) == want
    short = 20 - max(lengths)
    assert session.runner.bounds == [20] * short + [None] * (19 - short)
    assert session.runner.reach is None  # prompts have no bound


def test_a_step_that_fails_leaves_no_bound(model, monkeypatch):
    """The next prompt may be longer than the bound."""
    session = open_session(model, 64)
    session.runner = BoundedRunner(model, 20)
    monkeypatch.setattr(session, "choose_tokens", Mock(side_effect=RuntimeError("no memory")))
    with pytest.raises(RuntimeError, match="no memory"):
        session.warm_up(0)()
    assert session.runner.bounds == [20] and session.runner.reach is None


def test_drafts_are_below_the_bound_too(model):
    want = generate(open_session(model, 64), PROMPT * 2, 30)
    session = open_session(model, 64)
    session.runner = BoundedRunner(model, 20)
    speculation, ends = Speculation(session, 3), []
    verify = speculation.verify

    def noting(rows: int, count: int, candidates: int) -> None:
        ends.append((session.cached[0] + count + 1, session.runner.reach))
        verify(rows, count, candidates)

    speculation.verify = noting
    assert list(speculation.stream(PROMPT * 2, 30, GREEDY)) == want
    assert ends and all((reach == 20) == (end <= 20) for end, reach in ends)


def test_steps_of_longer_texts_are_made_when_they_come(model):
    """A command knows its prompts and answers, and makes what these need before the first token."""
    want = list(open_session(model, 64).stream(PROMPT, 30, GREEDY))
    made, known = [], len(PROMPT) + 5
    session = open_session(model, 64, longest=known)
    session.runner = BoundedRunner(model, known)
    make = session.capture_within
    session.capture_within = lambda reach, *rest: made.append(reach) or make(reach, *rest)
    assert list(session.stream(PROMPT, 5, GREEDY)) == want[:5] and made == [known]
    session.reset()
    assert list(session.stream(PROMPT, 30, GREEDY)) == want and made == [known, known, None]
    session.reset()
    assert list(session.stream(PROMPT, 30, GREEDY)) == want and len(made) == 3


@pytest.mark.parametrize(
    ("lengths", "sizes"),
    ((None, [8, 32]), ((3,), [8]), ((9,), [32]), ((40,), [8, 32]), ((64,), [32]), ((65,), [])),
)
def test_short_prompts_that_are_expected_are_captured(lengths, sizes, model):
    session = open_session(model, 128, prompt_lengths=lengths)
    session.short_chunks, calls = (8, 32), []
    session.run_short_numbers = lambda numbers: calls.append(numbers.shape[1] // 2)
    session.warm_up(0)
    assert calls[::2] == sizes


def test_which_captured_sessions_have_short_prompts():
    assert short_chunk_sizes((8, 32), SessionOptions(), 1024) == (8, 32)
    assert short_chunk_sizes((8, 32), SessionOptions(), 1024 + CACHE_BLOCK) == (8,)
    assert not short_chunk_sizes((32,), SessionOptions(), 1024 + CACHE_BLOCK)
    assert short_chunk_sizes((8, 32), SessionOptions(batch=2), 1024) == (8,)
    assert not short_chunk_sizes((8, 32), SessionOptions(compile_prefill=True), 1024)


@pytest.mark.slow
def test_short_prompts_compiled(model):
    """All lengths and positions take the same code."""
    want = [generate(open_session(model, 128), PROMPT * n) for n in (1, 2, 6)]
    session = open_session(model, 128, compile=True)
    session.short_chunks = 8, 32
    session.warm_up(0)
    before = counters["stats"]["unique_graphs"]
    assert [generate(session, PROMPT * n) for n in (1, 2, 6)] == want
    assert counters["stats"]["unique_graphs"] == before


def test_short_captured_prompts_get_little_padding(model, monkeypatch):
    """Padding chooses experts, too. Compiled prompts take more, so that all take one branch."""

    def padding(tokens: int, start: int = 0) -> int:
        return session.padded(0, tokens, start)[0] - tokens

    session = open_session(model, 128)
    assert [padding(tokens) for tokens in (1, 5, 100)] == [0, 0, 0]
    session.pads = True  # as on a GPU
    found = [padding(tokens) for tokens in (1, 5, 8, 60, 65, 128)]
    assert found == [7, 3, 0, 4, 63, 0]
    session = open_session(model, 128, compile_prefill=True)
    assert [padding(tokens) for tokens in (1, 5, 64, 65)] == [63, 59, 0, 63]
    session = open_session(model, 256)
    as_if_captured(session)
    # A chunk gets a size that has a graph. No padding goes behind the cache: it would wrap around.
    starts = 1, session.cache_len - 256, session.cache_len - 255
    assert [padding(130, start) for start in starts] == [126, 126, 62]


def test_whether_a_chunk_runs_anywhere_is_asked_once(model, monkeypatch):
    """It looks at all layers, before a launch."""
    session, asked, sent = open_session(model, 256), [], []
    as_if_captured(session)

    def run_chunk(numbers: Tensor, Q: int, end: int) -> tuple[Tensor]:
        sent.append(numbers.tolist())
        return (torch.zeros(1),)

    monkeypatch.setattr(session, "runs_anywhere", lambda *chunk: asked.append(chunk) or True)
    monkeypatch.setattr(session, "run_chunk", run_chunk)
    next(session.prefill(0, [1] * 100, 3))
    assert asked == [(0, 128, 3)]
    assert [numbers[4 + 128 :] for numbers in sent] == [[*range(3, 3 + 128)]]

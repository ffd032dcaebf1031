"""Sampling, sessions and their compiled form, on small random models."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import recording
from args import ModelArgs, Yarn
from checkpoint import pick_device
from generate import load_model
from session import RANKED, Sampling, Session, largest, sample
from shapes import RandomWeights

GREEDY = Sampling(temperature=0)
PROMPT = [5, 17, 3, 99, 42, 8, 120]


@pytest.fixture(scope="module")
def model(make_family):
    return load_model(make_family("mixtral").directory, "cpu")


def tokens(session: Session, ids=PROMPT, count: int = 12, sampling: Sampling = GREEDY) -> list[int]:
    session.reset()
    return list(session.stream(ids, count, sampling))


# Sampling -----------------------------------------------------------------------------------------------------------


def draw(logits, count, *, k, temperature=1.0, top_p=2.0, min_p=0.0, penalty=1.0, seen=None):
    """`count` draws from one row of logits [V], as one batch."""
    rows = logits.expand(count, -1)
    noise = torch.empty(count, len(logits)).exponential_(generator=torch.Generator().manual_seed(0))
    seen = torch.zeros_like(rows, dtype=torch.bool) if seen is None else seen.expand(count, -1)
    return sample(rows, torch.tensor([temperature, k, top_p, min_p, penalty]), seen, noise).squeeze(1)


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
def test_draws_follow_the_distribution_that_transformers_defines(settings):
    """Chi-square at 0.1 % over 50,000 draws; a token outside the kept set is never drawn."""
    torch.manual_seed(3)
    logits, seen = torch.randn(20) * 2, torch.zeros(20, dtype=torch.bool)
    seen[[1, 4, 7]] = True
    warp = [RepetitionPenaltyLogitsProcessor(settings.get("penalty", 1.0))]
    warp += [TemperatureLogitsWarper(settings.get("temperature", 1.0)), TopKLogitsWarper(settings["k"])]
    warp += [TopPLogitsWarper(settings["top_p"])] if "top_p" in settings else []
    warp += [MinPLogitsWarper(settings["min_p"])] if "min_p" in settings else []
    want = LogitsProcessorList(warp)(seen.nonzero().T, logits.clone().unsqueeze(0)).softmax(-1)[0]
    count = 50_000
    got = draw(logits, count, seen=seen, **settings).bincount(minlength=20).float()
    kept = want > 0
    assert got[~kept].sum() == 0
    chi2 = ((got - count * want)[kept] ** 2 / (count * want)[kept]).sum().item()
    limits = {0: 0.0, 1: 10.8, 2: 13.8, 3: 16.3, 4: 18.5, 5: 20.5, 6: 22.5, 7: 24.3, 9: 27.9, 19: 43.8}
    degrees = int(kept.sum()) - 1
    assert chi2 <= limits.get(degrees, 3.3 * degrees + 10)


@given(data=st.data(), count=st.integers(1, 40_000), rows=st.integers(1, 2))
@settings(max_examples=12, deadline=None)
def test_the_largest_by_their_places_are_those_of_topk(data, count, rows):
    """Up to the order of equal values, of which a coarse grid gives many."""
    k = data.draw(st.integers(1, min(count, RANKED // 4)))
    values = torch.randn(rows, count, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 2**20))))
    values = (values * data.draw(st.sampled_from((1, 1000)))).round()
    best, indices = largest(values, k)
    assert torch.equal(best, values.topk(k).values) and torch.equal(values.gather(1, indices), best)
    assert all(len(set(row)) == k for row in indices.tolist())


def test_greedy_takes_the_likeliest_after_the_penalty():
    logits, seen = torch.tensor([[1.0, 3.0, 2.5]]), torch.tensor([[False, True, False]])
    controls = torch.tensor([1.0, 1.0, 2.0, 0.0, 1.0])
    assert sample(logits, controls, seen, None).tolist() == [[1]]
    controls[4] = 2.0
    assert sample(logits, controls, seen, None).tolist() == [[2]]


@pytest.mark.parametrize(
    "bad",
    (dict(top_k=0), dict(temperature=-1.0), dict(top_p=0.0), dict(top_p=1.5), dict(min_p=1.0),
     dict(repetition_penalty=0.0), dict(temperature=float("nan")), dict(seed=-1), dict(seed=10**20)),
    ids=str,
)  # fmt: skip
def test_impossible_settings_are_refused_by_name(bad):
    with pytest.raises(ValueError, match=f"--{next(iter(bad))} "):
        Sampling(**bad)


# Sessions -----------------------------------------------------------------------------------------------------------


def test_same_seed_same_tokens(model):
    session = Session(model, 64)
    first = tokens(session, sampling=Sampling(temperature=1.5, seed=7))
    assert tokens(session, sampling=Sampling(temperature=1.5, seed=7)) == first
    assert tokens(session, sampling=Sampling(temperature=1.5, seed=8)) != first


def test_top_k_of_one_is_greedy(model):
    session = Session(model, 64)
    assert tokens(session, sampling=Sampling(top_k=1)) == tokens(session)


def test_a_repetition_penalty_covers_prompt_and_answer(model):
    """With a penalty so strong that every seen token falls behind, none comes twice."""
    got = tokens(Session(model, 64), count=30, sampling=Sampling(temperature=0, repetition_penalty=1e9))
    assert len(set(got) | set(PROMPT)) == len(got) + len(PROMPT)


@pytest.mark.parametrize("taken", (1, 4, 12))
def test_what_the_cache_holds_is_not_computed_again(model, taken):
    """Stop reading an answer early, go on from there with more text: the same as from nothing."""
    session = Session(model, 128)
    stream = session.stream(PROMPT, 12, GREEDY)
    ids = PROMPT + list(itertools.islice(stream, taken)) + [9, 11, 4]
    stream.close()
    prefilled = []
    session.prefill = lambda row, part, start: (
        prefilled.append((len(part), start)),
        Session.prefill(session, row, part, start),
    )[1]
    again = list(session.stream(ids, 12, GREEDY))
    assert prefilled[0][0] <= 4 and sum(prefilled[0]) == len(ids)
    assert again == tokens(Session(model, 128), ids)


def test_the_same_prompt_again_still_gives_an_answer(model):
    session = Session(model, 64)
    first = list(session.stream(PROMPT, 5, GREEDY))
    assert list(session.stream(PROMPT, 5, GREEDY)) == first
    assert list(session.stream(PROMPT[:3], 5, GREEDY)) == tokens(Session(model, 64), PROMPT[:3], 5)


@pytest.mark.parametrize(("compile_prefill", "length"), [(False, 112), pytest.param(True, 64, marks=pytest.mark.slow)])
def test_a_session_is_used_to_its_last_position(model, compile_prefill, length):
    """With 16 or, for padding, 64 to spare they fill the cache's 128 slots: no slack hides a step too far."""
    session = Session(model, length, compile_prefill=compile_prefill)
    assert session.slots == 128
    assert tokens(session, count=length - len(PROMPT)) == tokens(Session(model, 256), count=length - len(PROMPT))
    ids, again = (PROMPT * 30)[: length - 1], Session(model, length, compile_prefill=compile_prefill)
    assert tokens(again, ids, 1) == tokens(Session(model, 256), ids, 1)


@pytest.mark.parametrize("chunk", (1, 16, 50))
def test_chunks_of_a_prompt_do_not_show(model, chunk):
    ids = (PROMPT * 20)[:101]
    assert tokens(Session(model, 128, prefill_chunk=chunk), ids) == tokens(Session(model, 128), ids)


PROMPTS = [PROMPT, PROMPT * 5 + [3], [9], list(range(100, 60, -1)), [1, 2]]


@pytest.mark.parametrize("count", (1, 2, 5))
def test_each_sequence_of_a_batch_is_as_if_alone(family, count):
    model = load_model(family.directory, "cpu")
    alone = [tokens(Session(model, 64), ids, 20) for ids in PROMPTS]
    session = Session(model, 64, batch=count)
    for first in range(0, len(PROMPTS), count):  # with 2, the last one has no neighbour
        some = PROMPTS[first : first + count]
        got = list(zip(*session.stream_all(some, 20, GREEDY), strict=True))
        assert [list(row) for row in got] == alone[first : first + count]


def test_a_batch_goes_on_from_what_its_cache_holds(model):
    session, computed = Session(model, 128, batch=2), []
    stream = session.stream_all(PROMPTS[:2], 12, GREEDY)
    answers = list(zip(*itertools.islice(stream, 5), strict=True))
    stream.close()
    more = [[*ids, *answer, 7] for ids, answer in zip(PROMPTS, answers, strict=False)]
    session.prefill = lambda row, part, start: (computed.append(len(part)), Session.prefill(session, row, part, start))[
        1
    ]
    got = list(zip(*session.stream_all(more, 6, GREEDY), strict=True))
    assert max(computed) <= 3
    assert [list(row) for row in got] == [tokens(Session(model, 128), ids, 6) for ids in more]


def test_draws_in_a_batch_differ_between_its_sequences(model):
    session = Session(model, 64, batch=3)
    first = list(session.stream_all([PROMPT] * 3, 12, Sampling(temperature=2.0, seed=3)))
    assert len(set(zip(*first, strict=True))) == 3
    session.reset()
    assert list(session.stream_all([PROMPT] * 3, 12, Sampling(temperature=2.0, seed=3))) == first


def test_nothing_is_compiled_again_for_another_length(family, monkeypatch):
    """Of Dynamo's own counts; what it hands over is run as it is, which makes no difference to them."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile(function, backend="eager", **options))
    torch.compiler.reset()
    model = load_model(family.directory, "cpu")
    session = Session(model, 100, compile=True, compile_prefill=True, batch=2, prefill_chunk=48)
    lengths = [33, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 47, 48, 49, 64, 79, 80, 81]
    counts = []
    for length in lengths:
        session.reset()
        list(session.stream_all([(PROMPT * 20)[:length], (PROMPT * 20)[-length:]], 3, GREEDY))
        counts.append(counters["stats"]["unique_graphs"])
    torch.compiler.reset()
    assert counts[0] > 0 and len(set(counts)) == 1, dict(zip(lengths, counts, strict=True))


@pytest.mark.parametrize("layers", (2, 6))
def test_layers_with_and_without_a_window_are_two_compiled_blocks(monkeypatch, layers):
    """However many layers there are: start, two blocks and finish, for a prompt and for a step, and the sampling."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile(function, backend="eager", **options))
    args = ModelArgs(
        dim=32, n_layer=layers, n_head=4, n_kv_head=2, head_dim=16, intermediate=32, n_expert=4, n_active=2,
        vocab_size=160, max_position=256, sliding_window=8, full_layers=tuple(range(1, layers, 2)),
        attention_sinks=True, router_bias=True, expert_bias=True, swiglu_limit=7.0, yarn=Yarn(4.0, 64),
    )  # fmt: skip
    torch.compiler.reset()
    counters.clear()
    session = Session(load_model(RandomWeights(args), "cpu"), 100, compile=True, compile_prefill=True)
    tokens(session, count=6)
    assert counters["stats"]["unique_graphs"] == 2 * 4 + 1
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("ids", "count", "words"),
    ((PROMPT, 58, "at most 57 with --max_new_tokens"), ([], 1, "prompt is empty"), (PROMPT, -1, "--max_new_tokens"),
     ([160], 1, "from 0 to 159"), ([-1], 1, "from 0 to 159")),
)  # fmt: skip
def test_what_cannot_be_run_is_refused_before_it_begins(model, ids, count, words):
    with pytest.raises(ValueError, match=words):
        tokens(Session(model, 64), ids, count)


def test_more_prompts_than_sequences_are_refused(model):
    with pytest.raises(ValueError, match="3 prompts in a session for 2"):
        list(Session(model, 64, batch=2).stream_all(PROMPTS[:3], 1, GREEDY))


def test_a_token_is_shown_before_the_next_step_begins(model):
    """On the host a step takes the host's time: a token must not wait for it, nor an unread one be computed."""
    session, steps = Session(model, 64), []
    decode = session.decode
    session.decode = lambda candidates: (steps.append(1), decode(candidates))
    stream = session.stream(PROMPT, 5, GREEDY)
    for done in range(5):
        next(stream)
        assert len(steps) == done


def test_a_session_notices_that_its_model_was_taken(model):
    first = Session(model, 64)
    tokens(first)
    second = Session(model, 64)
    assert len(tokens(second)) == 12
    with pytest.raises(ValueError, match="another session has taken this model"):
        tokens(first)


def test_an_overflow_does_not_outlive_a_reset(model):
    session = Session(model, 64)
    want = tokens(session)
    for cache in session.caches:
        cache.kv[1, :, :, 40:] = float("inf")
    session.reset()
    assert tokens(session) == want


def test_an_unseeded_draw_leaves_the_global_generator_alone(model):
    state = torch.get_rng_state()
    tokens(Session(model, 64), sampling=Sampling())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_missing_device_is_named():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ValueError, match=r"no CUDA device.*--device cpu"):
        pick_device("cuda")
    with pytest.raises(ValueError, match="auto, cuda or cpu"):
        pick_device("gpu")
    assert pick_device("auto").type == "cpu"


# Compiled -----------------------------------------------------------------------------------------------------------


def check_compiled(directory, dtype=None) -> None:
    """Compiled tokens are the eager ones, and neither lengths nor settings compile again."""
    model = load_model(directory, "cpu", dtype)
    eager = tokens(Session(model, 192), count=48)
    torch._dynamo.reset()
    session = Session(model, 192, compile=True, compile_prefill=True)
    assert tokens(session, count=48) == eager
    tokens(session, sampling=Sampling(seed=0))
    before = counters["stats"]["unique_graphs"]
    kinds = len({(type(block.ffn), getattr(block.attention, "window", None)) for block in model.layers})
    # start, finish and each kind of block, for prefill and for decode, and two ways to sample: equal layers share one.
    assert before <= 2 * (2 + kinds) + 2
    for length in range(1, 160, 8):
        settings = Sampling(0.1 + length / 100, top_k=length, top_p=0.5 + length / 320, seed=length)
        tokens(session, [i % 150 for i in range(length)], 3, settings)
    assert counters["stats"]["unique_graphs"] == before
    # A prompt that goes on from what the cache holds, padded or not.
    session.reset()
    ids = PROMPT + list(session.stream(PROMPT, 9, GREEDY)) + [3, 4, 5]
    assert list(session.stream(ids, 20, GREEDY)) == tokens(Session(model, 192), ids, 20)


def test_compiled_equals_eager_and_never_compiles_again(make_family):
    counters.clear()
    check_compiled(make_family("mixtral").directory)


def test_what_comes_again_is_recorded(monkeypatch):
    """With a recording that runs what is recorded, and again does nothing."""
    log = []

    class Fake:
        def __init__(self, generator, pool):
            log.append("record")

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
    monkeypatch.setattr(recording, "Recording", Fake)
    repeated = recording.Repeated(torch.Generator())
    x = [torch.full((2,), float(n)) for n in range(4)]
    assert repeated("a", double, x[0])[0].tolist() == [0, 0] and log == [x[0]]
    found = repeated("a", double, x[1]), repeated("a", double, x[2])  # the fake's result is that of its recording
    assert found[0][0].tolist() == [2, 2] and [log[2], *log[4:]] == ["record", "replay"]
    assert log[3].tolist() == x[2].tolist()  # what was recorded reads the tensors of the last call
    repeated("a", double, x[3])
    assert found[1][0].data_ptr() != repeated("a", double, x[3])[0].data_ptr()
    for n in range(recording.KINDS):
        repeated(n, double, x[3])
    assert len(repeated.known) == recording.KINDS and "a" not in repeated.known


def check_details(model, session: Session) -> None:
    """What is told of each token against the model run on all tokens at once; and that watching changes none."""
    plain = list(session.stream_all(PROMPTS[: session.batch], 6, GREEDY))
    session.reset()
    session.watch, told = True, []
    watched = [(found, told.append(session.details))[0] for found in session.stream_all(
        PROMPTS[: session.batch], 6, GREEDY)]  # fmt: skip
    assert watched == plain
    for row, prompt in enumerate(PROMPTS[: session.batch]):
        ids = torch.tensor([session.ids[row]])
        model.setup_cache(1, 64)
        where = torch.arange(ids.shape[1])[None]
        logits, experts, weights = model(ids, where, all_positions=True, return_routing=True)
        logprobs, first = logits[0].log_softmax(dim=-1), len(prompt) - 1
        for n in range(6):
            details, place = told[n][row], first + n
            assert details.logprob == pytest.approx(logprobs[place, watched[n][row]].item(), abs=1e-4)
            assert [value for _, value in details.top] == pytest.approx(logprobs[place].topk(20)[0].tolist(), abs=1e-4)
            assert all(logprobs[place, id].item() == pytest.approx(value, abs=1e-4) for id, value in details.top)
            assert details.experts == experts[:, place].tolist()
            torch.testing.assert_close(torch.tensor(details.weights), weights[:, place], atol=1e-4, rtol=0)


@pytest.mark.parametrize("batch", (1, 3))
def test_a_watched_answer_tells_what_the_model_said(family, batch):
    model = load_model(family.directory, "cpu")
    check_details(model, Session(model, 64, batch=batch, prefill_chunk=9))


@pytest.mark.slow
def test_a_watched_answer_compiled(make_family):
    model = load_model(make_family("mixtral").directory, "cpu")
    check_details(model, Session(model, 48, compile=True, compile_prefill=True))


@pytest.mark.slow
def test_many_sessions_of_a_model_can_be_compiled(make_family):
    """More lengths than Dynamo's own limit of eight recompilations."""
    model = load_model(make_family("mixtral").directory, "cpu")
    for length in range(64, 64 * 11, 64):
        assert len(tokens(Session(model, length, compile=True), count=3)) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ("qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "phimoe", "glm4_moe", "gpt_oss", "deepseek_v2", "deepseek_v3"),
)
def test_other_families_compiled(make_family, name):
    counters.clear()
    check_compiled(make_family(name).directory)

"""What only a GPU can show: the same tokens there, eager, compiled and recorded; weights streamed
past the host.
"""

import gc
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from unittest import mock

import pytest
import torch
import triton
from chunks import prompt
from conftest import FAMILIES, HYBRID_CHECKPOINT, NOT_FUSED
from test_batch import Alternating, random_requests, run
from test_indexed_attention import INDEXES, Peers, inputs
from test_token_draw import SETTINGS
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from triton.runtime.errors import OutOfResources

from benchmarks import gated_delta as delta_benchmark
from benchmarks import latent_attention as latent_benchmark
from benchmarks.cuda_timing import graph_seconds
from checkpoint import Checkpoint, Writer
from formats import FORMATS
from formats.kv_cache import KV_CACHES, Int8KVCache
from formats.packed import PackedExpertLinear
from formats.quantizer import pack_weight, plan_format, quantize
from generate import EMBEDDED, embedded_checkpoint, load_model
from host import upload_ahead
from model import ExpertLinear, Experts, KVCache, ModelArgs, swiglu, weighted_sum
from models import ARCHITECTURES, args_of_checkpoint, build_model
from models.glm4_moe import Glm4MoeArgs
from models.gpt_oss import GptOssArgs
from models.latent_family import LatentArgs
from models.layers.gated_delta_net import DeltaNet
from models.layers.yarn import Yarn
from models.random_weights import (
    RandomWeights,
    architecture,
    first_layers,
    number_format,
    random_prompt,
)
from offload.cpu_share import set_copies
from offload.experts import COUNTERS, expert_counters, offloaded_layers
from offload.plan import OffloadSettings
from ops import launch as jit
from ops.attention.delta_prompt import launch_delta_chunk, launch_ssm_chunk
from ops.attention.prompts import attend_prompt
from ops.declared import SWIGLU
from ops.inductor import configure_inductor
from ops.inductor_tuning import gpu_ms
from ops.plain.attention import SHORT_CACHE, attend_chunk
from ops.plain.gated_delta import chunk_in_torch, gated_delta_step
from ops.plain.mamba2 import ssm_chunk, ssm_step
from ops.plain.pending import in_place
from ops.products import experts as moe_decode
from ops.products import gemv, planes, prompt_rows
from ops.products.few_tokens import multiply_planes
from ops.products.tilings import Tiles
from ops.products.weights import packed_weight, plain_weight
from ops.step.rows import RowMemory
from ops.step.token_draw import GROUPS
from runtime import host_memory
from runtime.batch import Batch
from runtime.draft_control import FixedDrafts
from runtime.drafting_batch import DraftingBatch
from runtime.fused_attention import fuse_decode_attention
from runtime.fused_decode import FusedRunner
from runtime.host_memory import BUFFER_BYTES, BUFFERS, in_host_memory, pinned_uploads
from runtime.kernel_choice import choose_runner, why_not_fused
from runtime.loading import load_head
from runtime.memory import free_gpu_memory
from runtime.runner import CompiledRunner
from runtime.sampling import NotFiniteError, Sampling
from runtime.session import Session, SessionOptions
from runtime.session_prompts import ANYWHERE_CHUNKS, MAX_SHORT_CHUNKS, capture_next
from runtime.speculation import Speculation
from tests.delta_kernels_without_gpu import plane_error, random_few
from tests.delta_kernels_without_gpu import random_prompt as random_rule
from tests.mamba_kernels_without_gpu import PUBLISHED
from tests.mamba_kernels_without_gpu import random_call as random_mamba_call
from tests.prompts_without_gpu import prompt_errors
from tests.recurrent_without_gpu import after_tokens, from_gates, settle_second
from tests.token_draw_without_gpu import run as run_draw
from tokenizer import load_tokenizer

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
GREEDY = Sampling(temperature=0)


@pytest.fixture(autouse=True)
def without_a_compiler_bug(request):
    """Triton 3.6 fails on kernels of Gemma 4 with fp32 rows of up to 1,024 numbers.

    "operand #0 does not dominate this use", in a reduction that is stored before it is used again.
    Real models have longer rows, and bf16 is not affected.
    """
    small_gemma = "gemma4" in request.node.name
    with inductor.patch({"triton.persistent_reductions": False} if small_gemma else {}):
        yield


def logits(directory, device: str, dtype: torch.dtype, tokens: torch.Tensor) -> torch.Tensor:
    model = load_model(directory, device, dtype)
    model.setup_cache(1, 64)
    return model(
        tokens.to(device),
        torch.arange(tokens.shape[1], device=device).unsqueeze(0),
        all_positions=True,
    ).cpu()


# In bf16 a near tie of a router early in the text sends a token to another expert, and changes all
# tokens after it. The small models of these families have such ties at most positions: the median
# of transformers' own differences from fp32 is 0.04 to 0.09. So our median may be this many times
# the reference's. Measured: 1.0 times for Nemotron-H and 0.9 for Qwen3.5, which flip where the
# reference does; 2.0 for gpt-oss and 1.6 for PhiMoE, which flip at other positions (on a CPU); 1.2
# for Qwen3-Next (H200, where plain modules have 0.038). Qwen4-Exp's plain modules have 0.04 to 0.18
# in four random prompts of 40 tokens, in fp16 a tenth of that.
NEAR_TIES = {"gpt_oss": 3.0, "phimoe": 3.0, "qwen3_5_moe": 1.5, "nemotron_h": 1.5}
NEAR_TIES |= {"qwen3_next": 1.5, "qwen4_exp": 1.5}
# These flip in the fused kernels from the middle of the text on: a median of 0.065 for kolibri1
# (H200), of plain modules 0.023 for it and 0.048 for gemma4 (CPU). So their medians in bf16 may be
# twice as large. In fp16 the kernels are within 0.006 of fp32 (Triton's interpreter), except at a
# flip that plain modules have as well.
FLIPPED, FLIPPED_MEDIAN = ("gemma4", "kolibri1"), 0.13


def largest_median(name: str, reference: torch.Tensor, tolerance: float = 4e-2) -> float:
    """Return the limit of a family's median difference from fp32.

    reference: differences of plain modules or transformers, by position.
    """
    return max(tolerance, NEAR_TIES.get(name, 0.0) * reference.median().item())


@pytest.mark.parametrize("limit", (0, 64), ids=("grouped", "gathered"))
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name, limit, make_family, monkeypatch):
    monkeypatch.setattr(Experts, "gather_max_tokens", limit)
    family = make_family(name)
    want = family.peer(prompt()).logits[0]
    got = logits(family.directory, "cuda", torch.float32, prompt())[0]
    assert ((got - want).norm() / want.norm()).item() < 1e-4
    for dtype, tolerance in ((torch.bfloat16, 4e-2), (torch.float16, 2e-2)):
        got, theirs = (
            logits(family.directory, "cuda", dtype, prompt())[0],
            deepcopy(family.peer).to(dtype),
        )
        ours, peers = (
            (found - want).norm(dim=-1) / want.norm(dim=-1)
            for found in (got, theirs(prompt()).logits[0].float())
        )
        # A near tie changes all tokens after it, so a part of the positions is checked.
        assert ours.quantile(0.1).item() < 2 * peers.quantile(0.1).item() < 0.3, dtype
        assert ours.median().item() < largest_median(name, peers, tolerance), dtype


NEW_FAMILIES = ("glm4_moe_lite", "qwen3_next", "qwen3_5_moe", "qwen4_exp", "gemma4")
NEW_FAMILIES += ("laguna", "flint", "mellum", "kolibri1", "nemotron_h", "lfm2_moe", "kimi_linear")
NEW_FAMILIES += ("granitemoehybrid", "minimax_m2", "ernie4_5_moe", "afmoe")


def family_sessions(directory, dtype: torch.dtype = torch.float32, **options) -> list[Session]:
    """Return an eager and a captured session of a converted family."""
    models = (load_model(directory, "cuda", dtype) for _ in range(2))
    return [
        Session(
            model,
            256,
            SessionOptions(
                decode_kernels="inductor", compile=compile, compile_prefill=compile, **options
            ),
        )
        for model, compile in zip(models, (False, True), strict=True)
    ]


@pytest.mark.parametrize("batch", (1, 2))
@pytest.mark.parametrize("name", NEW_FAMILIES)
def test_a_familys_captured_tokens_are_the_eager_ones(name, batch, make_family):
    """Prompts in chunks, of any length; after the first answers nothing is compiled again."""
    directory = make_family(name).directory
    plain, captured = family_sessions(directory, prefill_chunk=64, batch=batch)
    assert captured.captured
    compiled = None
    for lengths in ((40, 150), (64, 7), (129, 65), (9, 128)):
        prompts = [prompt(length)[0].tolist() for length in lengths][:batch]
        plain.reset()
        captured.reset()
        want = list(plain.stream_all(prompts, 30, GREEDY))
        assert list(captured.stream_all(prompts, 30, GREEDY)) == want
        found = counters["stats"]["unique_graphs"], len(captured.steps)
        assert compiled in (None, found)
        compiled = found
    assert len(captured.steps) == 1  # greedy: one captured graph for every position


@pytest.mark.parametrize("mode", ("int4", "fp8b"))
@pytest.mark.parametrize("name", NEW_FAMILIES)
def test_a_quantized_familys_captured_tokens_are_the_eager_ones(name, mode, make_family, tmp_path):
    """In fp32, so that the attention kernel and plain attention round alike."""
    source = Checkpoint(make_family(name).directory)
    model = build_model(args_of_checkpoint(source))
    # Groups of 128 divide no row of these small models.
    format = plan_format(model, attention=mode, experts=mode, group_size=8)
    directory = quantize(source, format, model, tmp_path / mode, "cuda", progress=False)
    plain, captured = family_sessions(directory, prefill_chunk=64)
    ids = prompt(150)[0].tolist()
    want = list(plain.stream(ids, 30, GREEDY))
    for _ in range(2):  # compiled, then replayed
        captured.reset()
        assert list(captured.stream(ids, 30, GREEDY)) == want


@pytest.mark.parametrize("settings", (GREEDY, Sampling(temperature=1.0, seed=3)))
@pytest.mark.parametrize("value", (float("nan"), float("inf")))
@pytest.mark.parametrize("name", ("mixtral", *NEW_FAMILIES))
def test_a_captured_session_stops_if_logits_are_not_finite(name, value, settings, make_family):
    """The step replays over the damaged weight, and over the repaired one."""
    if name == "gemma4" and value == float("inf"):
        pytest.skip("its soft cap makes infinite logits finite")
    _, session = family_sessions(make_family(name).directory)
    ids = prompt()[0].tolist()
    want = list(session.stream(ids, 12, settings))
    weight = session.model.norm.weight
    saved = weight.clone()
    session.reset()
    stream = session.stream(ids, 12, settings)
    assert next(stream) == want[0]
    weight.data.view(-1)[3] = value
    with pytest.raises(NotFiniteError, match="check it with python checkpoint"):
        list(stream)
    weight.data.copy_(saved)
    session.reset()
    assert list(session.stream(ids, 12, settings)) == want


def embedded_session(device: str, dtype: torch.dtype, compile: bool) -> Session:
    return Session(
        load_model(embedded_checkpoint(), device, dtype),
        512,
        SessionOptions(decode_kernels="inductor", compile=compile, compile_prefill=compile),
    )


def embedded_prompt(characters: int) -> list[int]:
    tokenizer = load_tokenizer(embedded_checkpoint())
    return tokenizer.encode((EMBEDDED / "heldout.txt").read_text()[:characters])


def test_greedy_text_in_fp32_is_the_cpus_eager_and_compiled():
    ids = embedded_prompt(600)
    want = list(embedded_session("cpu", torch.float32, False).stream(ids, 100, GREEDY))
    for compile in (False, True):
        assert (
            list(embedded_session("cuda", torch.float32, compile).stream(ids, 100, GREEDY)) == want
        )


def check_near_tie(directory, ids: list[int], first: list[int], second: list[int]) -> None:
    """Check that two answers are equal, or differ first where fp32 finds a near-tie."""
    at = next((n for n, (a, b) in enumerate(zip(first, second, strict=True)) if a != b), None)
    if at is not None:
        model = load_model(directory, "cuda", torch.float32)
        model.setup_cache(1, 4096)
        tokens = torch.tensor([ids + first[:at]], device="cuda")
        row = model(tokens, torch.arange(tokens.shape[1], device="cuda").unsqueeze(0))[0]
        assert (row[first[at]] - row[second[at]]).abs() < 0.02 * row.abs().max()


def test_the_first_difference_in_bf16_is_a_near_tie():
    ids = embedded_prompt(600)
    eager = list(embedded_session("cuda", torch.bfloat16, False).stream(ids, 100, GREEDY))
    compiled = list(embedded_session("cuda", torch.bfloat16, True).stream(ids, 100, GREEDY))
    check_near_tie(embedded_checkpoint(), ids, eager, compiled)


@pytest.mark.parametrize(
    ("mode", "length", "cache"),
    (
        ("bf16", 512, "plain"),
        ("int8", 512, "plain"),
        ("int4", 512, "plain"),
        ("mxfp4", 512, "plain"),
        ("hqq4", 512, "plain"),
        ("bf16", 4096, "plain"),
        ("bf16", 4096, "int8"),
        ("int4", 512, "int8"),
    ),
)
def test_fused_decode_kernels_give_the_eager_tokens(mode, length, cache, tmp_path):
    """And a second prompt replays the same graph; a watched step has the same experts.

    length: of the cache. In a long one the first prompt's positions are several parts.
    """
    source = directory = embedded_checkpoint()
    if mode != "bf16":
        checkpoint = Checkpoint(source)
        model = build_model(args_of_checkpoint(checkpoint))
        group_size = None if mode == "int8" else 32
        format = plan_format(model, attention=mode, experts=mode, group_size=group_size)
        directory = quantize(checkpoint, format, model, tmp_path / mode, "cuda", progress=False)
    characters = 600 if length < 4096 else 9000
    answers, prompts = [], (embedded_prompt(characters), embedded_prompt(90))
    for kernels in (None, "fused"):
        model = load_model(directory, "cuda", torch.bfloat16)
        options = SessionOptions(cache_class=KV_CACHES[cache])
        if kernels:
            runner_class = choose_runner(model, kernels)
            options = replace(options, compile=True, runner_class=runner_class)
        session = Session(model, length, options)
        for ids in prompts:
            session.reset()
            answers.append(list(session.stream(ids, 100, GREEDY)))
        session.watch = True
        session.reset()
        stream = session.stream(prompts[0], 3, GREEDY)
        answers.append([(next(stream), session.details[0].experts)[1] for _ in range(3)])
    for ids, first, second in zip(prompts, answers[:2], answers[3:5], strict=True):
        check_near_tie(directory, ids, first, second)
    experts = (torch.tensor(answers[n]) for n in (2, 5))
    first, second = (found.sort(-1).values for found in experts)
    assert (first == second).float().mean() > 0.9


def fused_and_eager(tmp_path, mode: str, length: int, **options) -> list[Session]:
    """Return an eager session of the embedded model in a format, and one with fused kernels."""
    source = Checkpoint(embedded_checkpoint())
    model = build_model(args_of_checkpoint(source))
    group_size = None if mode == "int8" else 32
    format = plan_format(model, attention=mode, experts=mode, group_size=group_size)
    directory = quantize(source, format, model, tmp_path / mode, "cuda", progress=False)
    sessions = []
    for compile in (False, True):
        model = load_model(directory, "cuda", torch.bfloat16)
        kernels = dict(compile=True, runner_class=FusedRunner) if compile else {}
        sessions.append(Session(model, length, SessionOptions(**kernels, **options)))
    return [*sessions, directory]


@pytest.mark.parametrize("logits", ("normal", "rounded", "equal", "clustered", "masked", "damaged"))
def test_tokens_are_drawn_as_by_plain_pytorch(logits):
    """At full size: a group of the vocabulary has 297 tokens."""
    settings = (*SETTINGS[:3], *SETTINGS)
    case = dict(logits=logits, V=151936, groups=GROUPS, rows=settings, with_drafts=True)
    found = run_draw(case, "cuda")
    assert found["plain"] == found["fused"] and found["same"], found


@pytest.mark.parametrize(("mode", "length"), (("int4", 512), ("int8", 2048)))
def test_short_prompts_replay_one_graph_of_fused_kernels(mode, length, tmp_path):
    """Their tokens are the eager ones, in a short and in a long cache; nothing compiles again."""
    eager, fused, directory = fused_and_eager(tmp_path, mode, length)
    most = fused.runner.max_tokens
    assert most > 4 and fused.short_chunks
    list(fused.stream(embedded_prompt(200)[:2], 2, GREEDY))
    before, known = counters["stats"]["unique_graphs"], set(fused.graphs.known)
    longest = MAX_SHORT_CHUNKS * fused.short_chunks[-1]
    for count in (*range(1, most + 1), *(n for n in (9, 20, 40, 64, 100, 128) if n <= longest)):
        ids = embedded_prompt(200)[:count]
        eager.reset()
        fused.reset()
        first = list(eager.stream(ids, 20, GREEDY))
        check_near_tie(directory, ids, first, list(fused.stream(ids, 20, GREEDY)))
    assert counters["stats"]["unique_graphs"] == before
    assert set(fused.graphs.known) == known  # captured when it was warmed up


def test_a_repeated_launch_takes_other_pointers():
    """Rows that begin at a multiple of 16 bytes, and others; without and with pairs."""
    x = torch.randn(66 * 64, device="cuda").bfloat16()
    pairs = torch.arange(17, device="cuda", dtype=torch.int32).flip(0)
    prompt_rows._gather_rows.launched.clear()
    for _ in range(2):
        for begin in (0, 1, 64, 65):
            rows = x[begin:][: 64 * 64].view(64, 64)
            assert prompt_rows.gather_rows(rows, None, 1, None).equal(rows)
            assert prompt_rows.gather_rows(rows, pairs, 1, None).equal(rows[pairs.long()])
    assert len(prompt_rows._gather_rows.launched) == 4


@pytest.fixture
def broken_kernels(monkeypatch):
    """Return a set of names: these kernels do not fit the GPU while the test runs."""
    names, run = set(), triton.JITFunction.run

    def run_or_fail(kernel, *args, **options):
        if kernel.__name__ in names:
            raise OutOfResources(1 << 20, 1 << 10, "shared memory")
        return run(kernel, *args, **options)

    monkeypatch.setattr(triton.JITFunction, "run", run_or_fail)
    monkeypatch.setattr(jit, "specialize", None)  # no launch is remembered
    yield names
    jit.broken.clear()


@pytest.mark.parametrize(
    ("runner", "kernel"),
    (
        *((FusedRunner, name) for name in ("_multiply_sum", "_multiply_each", "join_tokens")),
        (FusedRunner, "attend_kernel"),
        *((FusedRunner, name) for name in ("_multiply_tiles", "_find_best", "_draw", "_grouped")),
        *((CompiledRunner, name) for name in ("_multiply_each", "_grouped")),
    ),
)
def test_a_kernel_that_cannot_run_is_replaced(runner, kernel, broken_kernels, tmp_path, caplog):
    """A prompt of a captured length, a short one, and their answers, with one line in the log."""
    eager, other, directory = fused_and_eager(tmp_path, "int4", 512)
    if runner is CompiledRunner:
        options = SessionOptions(decode_kernels="inductor", compile=True)
        other = Session(load_model(directory, "cuda", torch.bfloat16), 512, options)
    prompts = embedded_prompt(900)[:300], embedded_prompt(300)[:40]
    want = [list(eager.stream(ids, 20, GREEDY)) for ids in prompts if eager.reset() is None]
    broken_kernels.add(kernel)
    for ids, expected in zip(prompts, want, strict=True):
        for _ in range(3):  # the third one would replay a prompt's graph
            other.reset()
            check_near_tie(directory, ids, expected, list(other.stream(ids, 20, GREEDY)))
    lines = [record.message for record in caplog.records if "plain form" in record.message]
    assert lines and len(lines) == len(set(lines)) and all(kernel in line for line in lines)


@pytest.mark.parametrize("mode", ("int4", "int8"))
def test_a_batch_of_three_in_fused_kernels_gives_the_eager_tokens(mode, tmp_path):
    """Of three sequences, and of two beside an idle row."""
    eager, fused, directory = fused_and_eager(tmp_path, mode, 512, batch=3)
    prompts = [embedded_prompt(n) for n in (600, 40, 900)]
    assert fused.runner.max_tokens >= 3
    for count in (3, 2):
        eager.reset()
        fused.reset()
        answers = [
            list(zip(*session.stream_all(prompts[:count], 60, GREEDY), strict=True))
            for session in (eager, fused)
        ]
        assert fused.runner.is_fused
        for ids, first, second in zip(prompts, *answers, strict=False):
            check_near_tie(directory, ids, list(first), list(second))


@pytest.mark.parametrize("length", (512, 1500), ids=("read whole", "read in blocks"))
@pytest.mark.parametrize("drafts", (2, 4))
def test_speculation_in_fused_kernels_gives_the_eager_tokens(drafts, length, tmp_path):
    eager, fused, directory = fused_and_eager(tmp_path, "int4", length)
    speculation, ids = Speculation(fused, drafts), embedded_prompt(700)
    first = list(eager.stream(ids, 100, GREEDY))
    check_near_tie(directory, ids, first, list(speculation.stream(ids, 100, GREEDY)))
    assert fused.runner.is_fused and speculation.statistics()["tokens_per_pass"] > 1


def test_a_batch_in_fused_kernels_drafts_with_passes_captured_between_answers(tmp_path):
    """Some end within passes, while the next one is in flight; a capture fails at last."""
    eager, fused, directory = fused_and_eager(tmp_path, "int4", 512, batch=4)
    prompts = [embedded_prompt(n) for n in (600, 80, 400)]
    expected = [
        [tokens[0] for tokens in eager.stream_all([ids], 60, GREEDY)]
        for ids in prompts
        if eager.reset() is None
    ]
    speculation = Speculation(fused, 3, auto=True)
    batch, seen = DraftingBatch(speculation), []
    assert speculation.captures.waits
    speculation.control = FixedDrafts(3)
    speculation.control.record = lambda outcomes, seconds: seen.append(outcomes)
    for size in (1, 2, 4):
        speculation.captures.prepare(fused.candidates(GREEDY), size)

    def answer(ends: tuple[int, ...]) -> None:
        found: dict = {batch.start(ids, 60, GREEDY): [] for ids in prompts}
        left = dict(zip(found, ends, strict=True))
        while left:
            batch.prefill()
            for token in batch.step():
                found[token.sequence].append(token.token)
            for sequence in [one for one, end in left.items() if len(found[one]) >= end]:
                batch.end(sequence)
                del left[sequence]
        for ids, want, got in zip(prompts, expected, found.values(), strict=True):
            check_near_tie(directory, ids, want[: len(got)], got)

    answer((60, 60, 60))
    assert not any(outcome.asked for outcomes in seen for outcome in outcomes)
    captured, verify, calls = 0, speculation.verify, []
    end = time.monotonic() + 120
    while not speculation.captures.kernels_ready():  # compiled in the background
        assert time.monotonic() < end
        time.sleep(0.1)
    while batch.speculation.captures.capture_next():
        captured += 1
        if captured == 4:

            def fail(*given) -> None:
                verify(*given)
                calls.append(given)
                if len(calls) == 3:  # two warm it up
                    raise torch.cuda.OutOfMemoryError

            speculation.verify = fail
    assert captured == 4 and len(calls) == 3 and len(speculation.steps) == 4
    seen.clear()
    for ends in ((60, 60, 60), (60, 7, 30), (9, 60, 14)):
        answer(ends)
    rows = {len(outcomes) for outcomes in seen if any(outcome.asked for outcome in outcomes)}
    assert {1, 2} <= rows and any(outcome.accepted for outcomes in seen for outcome in outcomes)


@pytest.mark.parametrize("characters", ((600,), (500, 40), (40, 600)))
def test_an_answer_that_passes_256_positions_gives_the_eager_tokens(characters, tmp_path):
    """Two graphs take turns: attention in one part, and in several. The first answer captures both.

    Then no step is captured.
    """
    eager, fused, directory = fused_and_eager(tmp_path, "int4", 1500, batch=len(characters))
    prompts = [embedded_prompt(n) for n in characters]
    assert fused.runner.reaches(1, fused.cache_len) == [256, None]
    assert max(map(len, prompts)) < 240
    count, made = 300 - max(map(len, prompts)), []
    for _ in range(2):
        eager.reset()
        fused.reset()
        answers = [
            list(zip(*session.stream_all(prompts, count, GREEDY), strict=True))
            for session in (eager, fused)
        ]
        for ids, first, second in zip(prompts, *answers, strict=True):
            check_near_tie(directory, ids, list(first), list(second))
        made.append(dict(fused.steps))
    assert made[0] == made[1]


SHARED = (
    "qwen2_moe",
    "qwen3_next",
    "qwen3_5_moe",
    "laguna",
    "qwen4_exp",
)  # the shared expert has to be as wide as whole ones


# Quantized, some of their layers still have plain products, whose kernels are for bf16 alone.
PLAIN_PRODUCTS = "granitemoehybrid", "nemotron_h", "qwen3_5_moe", "qwen3_next", "qwen4_exp"
FUSED = [name for name in FAMILIES if name not in NOT_FUSED]


def several_tokens_apart(
    model, runner: FusedRunner, tokens: torch.Tensor, want: torch.Tensor
) -> torch.Tensor:
    """Return how far the first tokens' logits are, in one call, from those one after the other."""
    for state in model.states:
        state.reset()
    positions = torch.arange(runner.max_tokens, device="cuda").unsqueeze(0)
    few = tokens[:, : runner.max_tokens]
    found = model(few, positions, all_positions=True, runner=runner)[0].cpu()
    assert runner.is_fused and runner.max_tokens > 1
    want = want[: len(found)]
    return (found - want).norm(dim=-1) / want.norm(dim=-1)


@pytest.mark.parametrize(
    ("name", "mode", "dtype"),
    [
        *((name, mode, torch.bfloat16) for name in FUSED for mode in ("bf16", "fp8b")),
        *((name, "fp8b", torch.float16) for name in FUSED if name not in PLAIN_PRODUCTS),
    ],
)
def test_fused_decode_kernels_of_each_family(name, mode, dtype, make_family, tmp_path):
    """Their logits are as near to fp32's as those of plain modules.

    In bf16 a router's near tie early in the text changes all tokens after it, at one place in plain
    modules and at another in the kernels: there the tenth of the tokens that is nearest counts, and
    half of them where that has held. In fp16, whose errors are an eighth, half of them always do.
    """
    configure_inductor()
    wide = dict(shared_expert_intermediate_size=96) if name in SHARED else {}
    directory = make_family(name, **wide).directory
    if mode != "bf16":
        checkpoint = Checkpoint(directory)
        model = build_model(args_of_checkpoint(checkpoint))
        format = plan_format(model, attention=mode, experts=mode, group_size=16)
        directory = quantize(checkpoint, format, model, tmp_path / mode, "cuda", progress=False)
    tokens, differences = prompt().cuda(), []
    want = logits(directory, "cpu", torch.float32, tokens)[0]
    for fused in (False, True):
        model = load_model(directory, "cuda", dtype)
        assert why_not_fused(model, torch.device("cuda")) is None
        model.setup_cache(1, 64)
        runner = FusedRunner(model) if fused else None
        positions = torch.arange(tokens.shape[1], device="cuda").view(-1, 1, 1)
        steps = zip(tokens[0].view(-1, 1, 1), positions, strict=True)
        found = torch.cat([model(*step, runner=runner).cpu() for step in steps])
        if fused:  # and several tokens at once, over what the others have left in the cache
            several = several_tokens_apart(model, runner, tokens, found)
        differences.append((found - want).norm(dim=-1) / want.norm(dim=-1))
    plain, ours = differences
    assert ours.quantile(0.1).item() < 2 * plain.quantile(0.1).item() < 0.3
    assert several.quantile(0.1).item() < 0.3
    if dtype == torch.float16:
        assert ours.median().item() < 1e-2 and several.median().item() < 1e-2
    elif mode == "bf16" and name in FLIPPED:
        assert ours.median().item() < FLIPPED_MEDIAN
    elif mode == "bf16":
        assert ours.median().item() < largest_median(name, plain)
        assert name in NEAR_TIES or several.median().item() < 4e-2


@pytest.mark.parametrize("compile", (False, True), ids=("eager", "recorded"))
@pytest.mark.parametrize(
    "settings",
    (
        OffloadSettings(3, compute="gpu"),
        OffloadSettings(3, compute="cpu"),
        OffloadSettings(2, compute="cpu"),
    ),
)
def test_experts_in_host_memory(settings, compile):
    """The tokens are the resident model's, whoever multiplies what misses."""
    ids = embedded_prompt(600)
    want = list(embedded_session("cpu", torch.float32, False).stream(ids, 60, GREEDY))
    model = load_model(embedded_checkpoint(), "cuda", torch.float32, experts=settings)
    if settings.gpu_experts == 2:  # a half, whatever was measured
        set_copies(offloaded_layers(model), [0, 0, 1])
    runner_class = choose_runner(model)
    session = Session(model, 512, SessionOptions(compile=compile, runner_class=runner_class))
    assert session.captured == compile
    for _ in range(2):
        assert list(session.stream(ids, 60, GREEDY)) == want
    totals = {name: sum(counts[name] for counts in expert_counters(model)) for name in COUNTERS}
    assert totals["misses"] >= 40  # a prompt's experts are copied: 5 in each of 8 layers
    assert (totals["on_cpu"] > 100) == (settings.compute != "gpu")


def test_one_recorded_step_serves_every_prompt_and_setting():
    session = embedded_session("cuda", torch.bfloat16, True)
    settings = Sampling(temperature=1.0, seed=5)
    first = list(session.stream(embedded_prompt(200), 40, settings))
    list(session.stream(embedded_prompt(40), 5, GREEDY))
    before, steps = counters["stats"]["unique_graphs"], dict(session.steps)
    for characters in range(1, 900, 60):
        session.reset()
        list(
            session.stream(
                embedded_prompt(characters),
                5,
                Sampling(temperature=0.1 + characters / 500, top_p=0.9),
            )
        )
    assert counters["stats"]["unique_graphs"] == before and session.steps == steps
    session.reset()
    assert list(session.stream(embedded_prompt(200), 40, settings)) == first


@pytest.mark.parametrize("compile_prefill", (False, True))
def test_a_prompt_whose_length_comes_again_is_recorded(compile_prefill):
    """Three times the same lengths, with other tokens: run, recorded, replayed; then with a
    prefix.
    """
    plain = embedded_session("cuda", torch.float32, False)
    model = load_model(embedded_checkpoint(), "cuda", torch.float32)
    options = SessionOptions(
        decode_kernels="inductor", compile=True, compile_prefill=compile_prefill, prefill_chunk=128
    )
    session = Session(model, 512, options)
    text = embedded_prompt(3000)
    for turn in range(3):
        for length in (200, 130):
            ids = text[300 * turn + length :][:length]
            plain.reset()
            expected = list(plain.stream(ids, 20, GREEDY))
            for again in range(2):  # the second time the cache knows all but the last token
                assert list(session.stream(ids, 20, GREEDY)) == expected, (turn, length, again)
    recorded = {end for (_, end, _), run in session.graphs.known.items() if run is not None}
    assert {128, 192 if compile_prefill else 136, 256} <= recorded


def test_a_captured_prompt_has_the_bits_of_an_eager_one():
    """Of Gated DeltaNet and gated attention, with a shared expert."""
    args = first_layers(architecture("Qwen3.6-35B-A3B"), 4)
    model = load_model(RandomWeights(args, number_format("int4", args)), "cuda")
    session = Session(model, 608, SessionOptions(compile=True, runner_class=FusedRunner))
    for length in (200, 600):
        found = []
        for _ in range(4):  # eager, eager and captured, replayed twice
            session.reset()
            *_, (logits, *_) = session.prefill(0, random_prompt(args, length), 0)
            found.append(logits)
        assert all(map(found[0].equal, found[1:]))


@pytest.mark.parametrize("arch", ("Qwen3-30B-A3B", "Qwen3.6-35B-A3B", "gpt-oss-20b"))
def test_turns_of_a_chat_replay_one_graph(arch):
    """Longer ones than short prompts: from any position, as chunks whose end the host knows."""
    args, found = first_layers(architecture(arch), 4), []
    model = load_model(RandomWeights(args, number_format("int4", args)), "cuda")
    prompts = [random_prompt(args, length) for length in (200, 230, 250, 194)]
    for by_position in (False, True):
        session = Session(model, 2048, SessionOptions(compile=True, runner_class=FusedRunner))
        if not by_position:
            session.prefill_runner.takes_positions = lambda *_: False
        start = 0
        for ids in prompts:
            *_, (logits, *_) = session.prefill(0, ids, start)
            found.append(logits.float())
            start += len(ids)
    assert [key for key, run in session.graphs.known.items() if run] == [(256, "anywhere", False)]
    for want, got in zip(found[:4], found[4:], strict=True):
        assert (got - want).norm() < 0.03 * want.norm()


@pytest.mark.parametrize("arch", ("Qwen3-30B-A3B", "Qwen3.6-35B-A3B", "gpt-oss-20b"))
def test_prompts_captured_ahead_leave_a_conversation(arch):
    """A server's in row 0: its next turn has the bits of one without captures."""
    args, found = first_layers(architecture(arch), 4), []
    model = load_model(RandomWeights(args, number_format("int4", args)), "cuda")
    first, second = random_prompt(args, 300), random_prompt(args, 200)
    for captures in (False, True):
        options = SessionOptions(batch=2, compile=True, runner_class=FusedRunner)
        session = Session(model, 2048, options)
        for _ in session.prefill(0, first, 0):
            session.cached[0] = len(first)
        kept = [view.clone() for view in session.memory.views[0]]
        while captures and capture_next(session):
            pass
        assert all(map(torch.equal, kept, session.memory.views[0]))
        sizes = [size for (size, *_), run in session.graphs.known.items() if run]
        assert sizes == ([*ANYWHERE_CHUNKS] if captures else [])
        *_, (logits, *_) = session.prefill(0, second, len(first))
        found.append(logits)
    assert torch.equal(*found)
    session.watch, kept = True, []
    for turn, ids in enumerate((second, second[:5], second, second[:5])):  # eager, then replayed
        with session.keeping(0, len(first), 1024):
            *_, (logits, *_) = session.prefill(0, ids, len(first))
        kept.append(logits)
        while turn and capture_next(session):
            pass
        session.watch = True
    assert torch.equal(kept[0], kept[2]) and torch.equal(kept[1], kept[3])
    assert all(session.graphs.has(key) for key in ((256, "anywhere", True), (8, None, True)))


@pytest.mark.parametrize("arch", ("Qwen3-30B-A3B", "Qwen3.6-35B-A3B", "gpt-oss-20b"))
def test_a_prompt_beside_others_leaves_the_memory_of_one_alone(arch):
    """It replays the same graph in row 0, and the answer that ran there goes on in row 1."""
    args, greedy = first_layers(architecture(arch), 4), Sampling(temperature=0)
    model = load_model(RandomWeights(args, number_format("int4", args)), "cuda")
    options = SessionOptions(batch=2, compile=True, runner_class=FusedRunner)
    session = Session(model, 2048, options)
    batch, prompts = Batch(session), [random_prompt(args, n, seed=n) for n in (20, 700)]
    batch.prepare()
    while batch.prepare_next():
        pass
    session.replay_seconds.update(dict.fromkeys(session.replay_seconds, 0.001))
    session.replay_seconds[1024, "anywhere", False] = 1.0  # others wait for 768 tokens at most
    kept = []
    for beside in (False, True):
        session.reset()
        batch.forget()
        first = batch.start(prompts[0], 40, greedy) if beside else None
        for _ in range(4 * beside):
            batch.prefill()
            batch.step()
        batch.start(prompts[1], 1, greedy)
        batch.prefill()
        assert session.replayed and (first is None or first.row == 1)
        views = session.memory.views[0]
        kept.append([view[..., :700, :].clone() for view in views if view.shape[-2] >= 700])
        found = [token for _ in range(60) if batch.count for token in batch.step()]
    assert kept[0] and all(map(torch.equal, *kept))
    assert not any(token.error for token in found)


@pytest.mark.parametrize("name", ("mixtral", "qwen3_5_moe", "glm4_moe_lite"))
def test_short_prompts_replay_one_graph(name, make_family):
    """Of any length, from any position."""
    models = (load_model(make_family(name).directory, "cuda", torch.float32) for _ in range(2))
    plain, captured = (
        Session(model, 256, SessionOptions(decode_kernels="inductor", compile=compile))
        for model, compile in zip(models, (False, True), strict=True)
    )
    for length in (3, 30, 45, 64):
        ids = prompt(length)[0].tolist()
        for session in (plain, captured):
            session.reset()
        for _ in range(2):  # an answer, and one to the next turn
            want = list(plain.stream(ids, 20, GREEDY))
            assert list(captured.stream(ids, 20, GREEDY)) == want
            ids = ids + want + prompt(7)[0].tolist()
    assert [key for key, run in captured.graphs.known.items() if run] == [(32, None, False)]


def test_a_step_never_waits_for_the_device():
    """The host reads no value of an eager step (a captured one cannot synchronize)."""
    session = embedded_session("cuda", torch.bfloat16, False)
    list(session.stream(embedded_prompt(40), 2, GREEDY))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for candidates in (0, 256):
            session.decode(1, candidates)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("exchange", (False, True))
@pytest.mark.parametrize("length", (1, 777, 4000))
def test_rows_of_all_layers_move_in_one_kernel(length, exchange):
    def memory(device: str) -> RowMemory:
        generator, sizes = torch.Generator().manual_seed(0), (4, 2, 4096, 128)
        caches = [
            kind(sizes, torch.bfloat16, torch.device(device))
            for kind in (KVCache, Int8KVCache, KVCache)
        ]
        for buffer in (buffer for cache in caches for buffer in cache.buffers()):
            buffer.copy_(torch.randint(-90, 90, buffer.shape, generator=generator))
        state = torch.randn(4, 60, generator=generator).to(device)
        views = [[*(v for c in caches for v in c.row(n)), state[n].view(1, -1)] for n in range(4)]
        return RowMemory(views)

    on_cpu, on_gpu = memory("cpu"), memory("cuda")
    for moved in (on_cpu, on_gpu):
        (moved.exchange if exchange else moved.copy)(3, 1, length)
    for want, got in zip(on_cpu.views, on_gpu.views, strict=True):
        assert all(torch.equal(a, b.cpu()) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("least", (1, 1 << 16, 1 << 40))
def test_weights_are_those_of_files_that_were_copied_ahead(least, monkeypatch):
    """Tensors with a block of their own live in it, the others are copied from theirs."""
    directory, ids = embedded_checkpoint(), embedded_prompt(40)[:5]
    plain = load_model(directory, "cuda", torch.bfloat16)
    want = plain.state_dict()
    monkeypatch.setattr(upload_ahead, "LEAST", least)
    before = free_gpu_memory(torch.device("cuda"))
    upload_ahead.start(sorted(directory.glob("*.safetensors")))
    assert abs(free_gpu_memory(torch.device("cuda")) - before) < 300e6
    model = load_model(directory, "cuda", torch.bfloat16)
    assert not upload_ahead.current and (least > 1 or upload_ahead.taken_bytes() > 0)
    assert all(torch.equal(tensor, want[name]) for name, tensor in model.state_dict().items())
    answers = [list(Session(m, 256).stream(ids, 8, GREEDY)) for m in (plain, model)]
    assert answers[0] == answers[1]
    del model
    gc.collect()
    assert upload_ahead.taken_bytes() == 0


@pytest.mark.parametrize("longest", (None, 20))
def test_a_text_that_is_longer_than_expected_gives_the_same_tokens(longest, tmp_path):
    """A captured session makes the graphs of longer texts when they come."""
    _, fused, _ = fused_and_eager(tmp_path, "int4", 600)
    want = list(fused.stream(ids := embedded_prompt(1500)[:250], 12, GREEDY))
    options = replace(fused.options, longest=longest, prompt_lengths=(5,))
    session = Session(fused.model, 600, options)
    short = list(session.stream(ids[:5], 4, GREEDY))
    session.reset()
    assert list(session.stream(ids, 12, GREEDY)) == want
    session.reset()
    assert list(session.stream(ids[:5], 4, GREEDY)) == short


@pytest.mark.parametrize("rows", (1, 2))
def test_a_short_prompt_never_waits_for_the_device(rows):
    """Its first step is launched while the prompt runs, and so is a step that runs a prompt."""
    model = load_model(embedded_checkpoint(), "cuda", torch.bfloat16)
    session = Session(
        model, 512, SessionOptions(batch=rows, compile=True, decode_kernels="inductor")
    )
    ids = embedded_prompt(40)[:5]
    step = session.warm_up(0, 1)

    def answer() -> Callable[[], list[int]]:
        for _ in session.start_row(0, ids, GREEDY):
            pass
        first = session.first_tokens
        step()
        session.stop_row(0)
        session.cached[0] = 0
        session.set_prompt_token(0, ids, GREEDY)
        return first

    answer()()
    torch.cuda.set_sync_debug_mode("error")
    try:
        read = answer()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    session.reset()
    plain = Session(model, 512)
    assert read()[0] == next(plain.stream(ids, 1, GREEDY))


def test_a_stream_given_up_leaves_the_next_one_alone():
    """The look-ahead step of a closed stream may still be under way when another way of sampling
    is recorded.
    """
    session = embedded_session("cuda", torch.bfloat16, True)
    stream = session.stream(embedded_prompt(200), 40, GREEDY)
    next(stream)
    stream.close()
    settings = Sampling(temperature=1.0, seed=5)
    session.reset()
    got = list(session.stream(embedded_prompt(200), 40, settings))
    session.reset()
    assert list(session.stream(embedded_prompt(200), 40, settings)) == got


@pytest.mark.parametrize(
    "more",
    (
        (ModelArgs, "mixtral", {}),
        (ModelArgs, "mixtral", {"sliding_window": 150}),
        (
            GptOssArgs,
            "gpt_oss",
            {"sliding_window": 150, "full_layers": (1,), "yarn": Yarn(4.0, 1024)},
        ),
        (
            LatentArgs,
            "deepseek_v2",
            {"n_kv_head": 1, "head_dim": 48, "rotary_dim": 16, "kv_rank": 32, "value_dim": 32},
        ),
    ),
    ids=("all", "window", "gpt-oss", "latent"),
)
def test_a_long_cache_read_in_blocks_gives_the_cpus_tokens(more):
    """Answers that begin before and after the ends of blocks, of a cache long enough to be read
    in them.
    """
    args_class, family, sizes = more
    sizes = {"n_kv_head": 2, "head_dim": 32} | sizes
    args = args_class(
        family,
        dim=64,
        n_layer=2,
        n_head=4,
        intermediate=48,
        n_expert=6,
        n_active=2,
        vocab_size=300,
        max_position=4096,
        **sizes,
    )
    model = load_model(
        RandomWeights(args, {"name": "fp32"}), "cpu"
    )  # whose numbers are another device's others
    copy = deepcopy(model).cuda()
    sessions = {
        "cpu": Session(model, 1500),
        "cuda": Session(
            copy, 1500, SessionOptions(decode_kernels="inductor", compile=True, batch=2)
        ),
    }
    assert sessions["cuda"].cache_len > SHORT_CACHE
    for lengths in ((1, 120), (127, 128), (700, 250), (1400, 3)):
        prompts = [random_prompt(args, length, seed=length) for length in lengths]
        want = []
        for ids in prompts:
            sessions["cpu"].reset()
            want.append(list(sessions["cpu"].stream(ids, 20, GREEDY)))
        got = list(zip(*sessions["cuda"].stream_all(prompts, 20, GREEDY), strict=True))
        assert [list(row) for row in got] == want


@pytest.mark.parametrize(
    "more",
    (
        (ModelArgs, "qwen3_moe", {"qk_norm": "head", "clip_qkv": 1.5}),
        (ModelArgs, "olmoe", {"qk_norm": "full", "clip_qkv": 1.5}),
        (Glm4MoeArgs, "glm4_moe", {"head_dim": 128, "rotary_dim": 64}),
        (GptOssArgs, "gpt_oss", {"sliding_window": 150, "full_layers": (1,)}),
    ),
    ids=("norms", "norms of all heads", "half of a head turns", "window and sinks"),
)
def test_one_tokens_attention_in_one_kernel_gives_the_cpus_tokens(more, monkeypatch):
    """As several GPUs have it, and 4 bits; answers that begin before and after the ends of
    blocks.
    """
    args_class, family, sizes = more
    sizes = {"n_kv_head": 2, "head_dim": 32} | sizes
    args = args_class(
        family,
        dim=64,
        n_layer=2,
        n_head=4,
        intermediate=48,
        n_expert=6,
        n_active=2,
        vocab_size=300,
        max_position=4096,
        **sizes,
    )
    model = load_model(
        RandomWeights(args, {"name": "fp32"}), "cpu"
    )  # whose numbers are another device's others
    copy, alone, cases = deepcopy(model).cuda(), Session(model, 512), []
    for lengths in ((1, 120), (62, 127), (250, 490)):
        prompts = [random_prompt(args, length, seed=length) for length in lengths]
        want = []
        for ids in prompts:
            alone.reset()
            want.append(list(alone.stream(ids, 20, GREEDY)))
        cases.append((prompts, want))
    fuse_decode_attention(copy)
    monkeypatch.setattr("model.attend", None)  # the several kernels
    monkeypatch.setattr("models.layers.sinks.attend", None)
    session = Session(copy, 512, SessionOptions(decode_kernels="inductor", compile=True, batch=2))
    for prompts, want in cases:
        got = list(zip(*session.stream_all(prompts, 20, GREEDY), strict=True))
        assert [list(row) for row in got] == want


def test_what_the_compiler_times_is_the_gpu_and_not_the_host():
    x = torch.zeros(1, device="cuda")

    def call() -> None:
        time.sleep(200e-6)
        x.add_(1)

    assert gpu_ms(call) < 0.02


@pytest.mark.parametrize("length", (512, 1500), ids=("read whole", "read in blocks"))
@pytest.mark.parametrize("drafts", (2, 6))
def test_speculation_gives_the_plain_tokens(drafts, length):
    """By lookup, and by the model itself as a draft, of which all is accepted; 6 drafts take the
    grouped product.
    """
    ids = embedded_prompt(700)
    want = list(embedded_session("cpu", torch.float32, False).stream(ids, 100, GREEDY))
    for draft in (None, load_model(embedded_checkpoint(), "cuda", torch.float32)):
        session = Session(
            load_model(embedded_checkpoint(), "cuda", torch.float32),
            length,
            SessionOptions(decode_kernels="inductor", compile=True),
        )
        speculation = Speculation(session, drafts, draft)
        assert list(speculation.stream(ids, 100, GREEDY)) == want
        assert speculation.statistics()["tokens_per_pass"] > (1 if draft is None else drafts)


@pytest.mark.parametrize("length", (512, 1500), ids=("read whole", "read in blocks"))
@pytest.mark.parametrize(("drafts", "vocab"), ((1, 0), (3, 0), (7, 0), (3, 1001)))
def test_a_captured_head_drafts_the_plain_tokens(drafts, vocab, length, hybrid_directory):
    """In fp32 by Inductor: the tokens, passes and accepted drafts of eager code on the CPU.

    vocab: frequent ids that are drafted; 0: all.
    """
    draft_ids = load_tokenizer(hybrid_directory).frequent_ids(vocab)
    ids = load_tokenizer(hybrid_directory).encode((HYBRID_CHECKPOINT / "heldout.txt").read_text())
    found = []
    for device in ("cpu", "cuda"):
        model = load_model(hybrid_directory, device, torch.float32)
        head = load_head(hybrid_directory, model, torch.float32)
        settings = SessionOptions(decode_kernels="inductor", compile=device == "cuda")
        session = Session(model, length, settings)
        speculation = Speculation(session, drafts, head=head, draft_ids=draft_ids)
        for start, end in ((0, 300), (0, 340), (9000, 9100)):  # the second continues the first
            answer = list(speculation.stream(ids[start:end], 60, GREEDY))
            found.append((device, answer, speculation.passes, speculation.accepted))
    cpu, cuda = ([rest for name, *rest in found if name == at] for at in ("cpu", "cuda"))
    assert cuda == cpu
    assert sum(passes for _, passes, _ in cuda) < 150


@pytest.mark.parametrize(("drafts", "vocab"), ((1, 0), (3, 0), (7, 0), (3, 1001)))
def test_a_head_in_fused_kernels_gives_the_plain_tokens(drafts, vocab, hybrid_directory):
    """In bf16, if the kernels compute the head's layer. vocab: as above."""
    draft_ids = load_tokenizer(hybrid_directory).frequent_ids(vocab)
    ids = load_tokenizer(hybrid_directory).encode((HYBRID_CHECKPOINT / "heldout.txt").read_text())
    model = load_model(hybrid_directory, "cuda", torch.bfloat16)
    head = load_head(hybrid_directory, model, torch.bfloat16)
    first = list(Session(model, 600).stream(ids[:300], 100, GREEDY))
    session = Session(model, 600, SessionOptions(compile=True))
    speculation = Speculation(session, drafts, head=head, draft_ids=draft_ids)
    second = list(speculation.stream(ids[:300], 100, GREEDY))
    check_near_tie(hybrid_directory, ids[:300], first, second)
    is_fused = isinstance(speculation.drafter.runner, FusedRunner)
    assert is_fused == (why_not_fused(head, head.norm.weight.device) is None)
    assert speculation.statistics()["tokens_per_pass"] > 1.4


@pytest.mark.parametrize("compile", (False, True))
def test_a_batch_gives_each_sequences_own_tokens(compile):
    prompts = [embedded_prompt(n) for n in (600, 40, 1200)]
    model = load_model(embedded_checkpoint(), "cuda", torch.float32)
    alone = [list(Session(model, 600).stream(ids, 60, GREEDY)) for ids in prompts]
    session = Session(
        model,
        600,
        SessionOptions(
            decode_kernels="inductor",
            compile=compile,
            compile_prefill=compile,
            batch=3,
            prefill_chunk=100,
        ),
    )
    assert [
        list(row) for row in zip(*session.stream_all(prompts, 60, GREEDY), strict=True)
    ] == alone


@pytest.mark.parametrize("mode", FORMATS)
def test_products_of_a_format_are_those_of_its_unpacked_weights(mode):
    """One token, compiled, and the grouped kernel in each of its tiles, with empty experts and
    sizes none divides.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    E, A, width = 6, 2, 448 if 448 % FORMATS[mode].min_group == 0 else 512
    out = 192 if mode == "fp8b" else 200  # gate and up are whole blocks
    group = FORMATS[mode].choose_group(width, None if FORMATS[mode].has_own_group else 32)
    plain = ExpertLinear(E, width, out).cuda()
    plain.weight.normal_(0, 0.05, generator=generator)
    packed = PackedExpertLinear(plain, mode, group)
    parts = pack_weight(plain.weight, {"format": mode, "group_size": group}, torch.device("cuda"))
    for name, part in parts.items():
        setattr(packed, name, torch.nn.Parameter(part, requires_grad=False))
    weight = packed.unpack().double()
    indices, weights = (
        torch.tensor([[4, 1]], device="cuda"),
        torch.rand(1, A, device="cuda", generator=generator),
    )
    tiles = (
        (0, 7, 1, 0, 16, 20),
        (0, 70, 0, 1, 129, 3),
        (100, 0, 128, 129, 90, 60),
        (300, 256, 0, 513, 400, 100),
    )
    configure_inductor()
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)):
        for sizes in tiles:
            x = torch.randn(sum(sizes), width, device="cuda", generator=generator).to(dtype)
            grouped = packed.grouped(x, torch.tensor(sizes, device="cuda").cumsum(0).int())
            runs = zip(x.double().split(sizes), weight, strict=True)
            close(grouped, torch.cat([rows @ matrix.T for rows, matrix in runs]), tolerance)
        gathered = torch.compile(packed.gather) if dtype is torch.bfloat16 else packed.gather
        each = torch.einsum("ai,aoi->ao", x[:A].double(), weight[indices[0]])
        got = gathered(x[:A].unsqueeze(0), indices)
        close(got[0], each, tolerance)
        close(weighted_sum(got, weights), weights.double() @ each, tolerance)
        gated = packed.gather_gated
        gated = torch.compile(gated) if dtype is torch.bfloat16 else gated
        gate, up = (x[:1].double() @ weight[indices[0]].transpose(1, 2)).squeeze(1).chunk(2, dim=-1)
        close(gated(x[:1], indices, swiglu)[0], torch.nn.functional.silu(gate) * up, tolerance)


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    assert ((got - want).norm() / want.norm()).item() < tolerance


@pytest.mark.parametrize("mode", FORMATS)
def test_a_quantized_model_is_the_same_on_both_devices(mode, tmp_path):
    source = Checkpoint(embedded_checkpoint())
    args = args_of_checkpoint(source)
    format = plan_format(build_model(args), attention=mode, experts=mode)
    target = tmp_path / mode
    directory = quantize(source, format, build_model(args), target, "cuda", progress=False)
    ids = torch.tensor([embedded_prompt(600)[:60]])
    want, got = (logits(directory, device, torch.float32, ids) for device in ("cpu", "cuda"))
    close(got, want, 1e-4)
    if mode in ("int8", "hqq3"):  # the others compile the same way, and compiling takes long
        models = (load_model(directory, "cuda", torch.float32) for _ in range(2))
        sessions = (
            Session(model, 512, SessionOptions(decode_kernels="inductor", compile=compile))
            for model, compile in zip(models, (False, True), strict=True)
        )
        eager, compiled = (
            list(session.stream(ids[0].tolist(), 40, GREEDY)) for session in sessions
        )
        assert eager == compiled


@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name].has_gemv])
@pytest.mark.parametrize(
    ("out", "width", "experts", "tokens", "pairs", "gated"),
    (
        (200, 448, 0, 1, 1, False),
        (6144, 4096, 0, 1, 1, False),
        (1536, 2048, 6, 2, 8, True),
        (1024, 4096, 3, 1, 2, True),
        (2048, 768, 6, 4, 4, False),
        (520, 14336, 3, 2, 4, False),
        (5760, 2880, 4, 1, 4, False),
    ),
)
def test_the_product_for_one_token_of_4_bits(name, out, width, experts, tokens, pairs, gated):
    """The Triton kernel against unpacked weights in fp64, and in a graph whose inputs are changed
    in place.
    """
    row, generator = FORMATS[name], torch.Generator().manual_seed(out)
    if width % row.min_group:
        pytest.skip(f"rows of {width} numbers are no whole blocks of {row.min_group}")
    group = row.choose_group(width, None)
    weight = torch.randn(max(experts, 1), out, width, generator=generator)
    parts = {key: part.cuda() for key, part in row.pack(weight, group).items()}
    plain = row.unpack(parts, group).double()
    x = torch.randn(tokens, width, generator=generator).bfloat16().cuda()
    index = (
        torch.randint(experts, (tokens, pairs // tokens), generator=generator).cuda()
        if experts
        else None
    )
    given = list(parts.values()) if experts else [part[0] for part in parts.values()]

    def want() -> torch.Tensor:
        chosen = plain[index.flatten()] if experts else plain
        y = torch.einsum("noi,ni->no", chosen, x.double().repeat_interleave(pairs // tokens, 0))
        gate, up = y.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up if gated else y

    def got() -> torch.Tensor:
        dtype = x.dtype if gated else torch.float32
        return gemv.dot4(x, given, index, row.kind, group, gated, dtype)

    def error(y: torch.Tensor) -> float:
        return ((y.double() - want()).norm() / want().norm()).item()

    first = got()
    assert first.dtype == (x.dtype if gated else torch.float32)
    assert error(first) < (4e-3 if gated else 1e-4)  # a gated result is rounded to bf16
    assert torch.equal(first, got())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = got()
    x.mul_(-3)
    if experts:
        index.copy_((index + 1) % experts)
    graph.replay()
    assert error(recorded) < (4e-3 if gated else 1e-4)


@torch.no_grad()
@pytest.mark.parametrize("lanes", (32, 64, 128))
@pytest.mark.parametrize(
    "shape", ((2048, 768, 8), (2880, 2880, 4), (4096, 1792, 2), (2048, 512, 9))
)
@pytest.mark.parametrize("name", [n for n in FORMATS if FORMATS[n].has_gemv or n == "int8"])
def test_experts_of_one_token(name, shape, lanes):
    """The kernels that multiply integers against unpacked weights in fp64; and x that is no
    number.
    """
    (D, I, A), row, generator = shape, FORMATS[name], torch.Generator().manual_seed(shape[0])
    E, plain, kernel = A + 2, [], []
    if D % row.min_group or I % row.min_group:
        pytest.skip(f"rows are no whole blocks of {row.min_group}")
    for out, width in ((2 * I, D), (D, I)):
        group = row.choose_group(width, None)
        weight = torch.randn(E, out, width, generator=generator) * width**-0.5
        parts = {key: part.cuda() for key, part in row.pack(weight, group).items()}
        plain.append(row.unpack(parts, group).double())
        kernel.append(packed_weight(list(parts.values()), row.kind, group))
    x = torch.randn(1, D, generator=generator).bfloat16().cuda()
    h = torch.randn(A, I, generator=generator).bfloat16().cuda()
    indices = torch.randperm(E, generator=generator)[:A].view(1, A).cuda()
    routing = torch.rand(1, A, generator=generator).cuda()

    def multiply(x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        options = dict(tiles=Tiles(4, lanes, 2, lanes // 32), dtype=torch.float32)
        gated = moe_decode.multiply_each(x, kernel[0], indices, SWIGLU, **options)
        return gated, moe_decode.down(h, kernel[1], indices, routing, residual=x, **options)

    def error(got: torch.Tensor, want: torch.Tensor) -> float:
        return ((got.double() - want).norm() / want.norm()).item()

    gated, total = multiply(x, h)
    gate, up = (plain[0][indices[0]] @ x[0].double()).chunk(2, -1)
    assert error(gated, torch.nn.functional.silu(gate) * up) < 2e-4
    each = torch.einsum("adi,ai->ad", plain[1][indices[0]], h.double())
    want = (each * routing[0].double().unsqueeze(1)).sum(0, keepdim=True) + x.double()
    assert error(total, want) < 2e-4
    x[0, 77], h[A - 1, 3] = float("inf"), float("nan")
    assert not any(result.isfinite().any() for result in multiply(x, h))


@pytest.mark.parametrize("value", (float("inf"), float("nan")))
def test_the_product_of_4_bits_with_what_is_no_number_is_none(value):
    parts = FORMATS["int4"].pack(torch.randn(64, 2048), 128)
    x = torch.randn(1, 2048).bfloat16()
    x[0, 77] = value
    given = [part.cuda() for part in parts.values()], None, "int4", 128, False, torch.float32
    y = gemv.dot4(x.cuda(), *given)
    assert not y.isfinite().any()


@torch.no_grad()
@pytest.mark.parametrize("queries", (1, 5, 32))
@pytest.mark.parametrize("length", (205, 16384))
@pytest.mark.parametrize("kind", (KVCache, Int8KVCache), ids=("plain", "int8"))
@pytest.mark.parametrize("arch", ("DeepSeek-V2-Lite", "GLM-4.7-Flash"))
def test_latent_attention_of_few_tokens(arch, kind, length, queries):
    """The kernels against plain attention, in a graph, and the cache after both."""
    args = ARCHITECTURES[arch]
    layer = latent_benchmark.random_layer(args, length, kind)
    plain, width = layer.plain[0], layer.plain[0].wqkv.weight.shape[0]
    qkv = torch.randn(1, queries, width, device="cuda", dtype=torch.bfloat16)
    for position in (0, 1, 32, 150, length - queries):
        context = latent_benchmark.make_context(args, length, position, queries)
        own = slice(position, position + queries)
        want = plain.core(qkv, context).float()
        expected = [part.clone() for part in plain.cache.stored() if part is not None]
        layer.fused_core(qkv, context)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                y = layer.fused_core(qkv, context)
        for part in plain.cache.stored():
            if part is not None:
                part[:, :, :, own] = 0
        graph.replay()
        assert ((y.float() - want).norm() / want.norm()).item() < 2e-2, position
        found = [part for part in plain.cache.stored() if part is not None]
        for part, other in zip(found, expected, strict=True):
            ours, theirs = (stored[:, :, :, own].float() for stored in (part, other))
            assert ((ours - theirs).norm() / theirs.norm()).item() < 1e-2, position
            part[:, :, :, own] = other[:, :, :, own]
            assert torch.equal(part, other), position


@pytest.mark.parametrize("last", (None, (0, -1, 0)))
def test_one_token_of_a_delta_layer(last):
    """The fused kernel against PyTorch, in a graph, and rows without a token, which keep all."""
    layer, gone = delta_benchmark.random_layer(3), [1] if last else []
    before = {name: tensor.clone() for name, tensor in layer.items()}
    want = {name: tensor.clone() for name, tensor in layer.items()}
    last = None if last is None else torch.tensor(last).cuda()

    def step() -> torch.Tensor:
        return delta_benchmark.fused_step(layer, last)

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    for _ in range(2):
        graph.replay()
    for _ in range(3):
        wanted = delta_benchmark.plain_step(want)
    real = [row for row in range(3) if row not in gone]
    assert delta_benchmark.difference(y[real], wanted[real]) < 1e-2
    assert delta_benchmark.difference(layer["state"][real], want["state"][real]) < 1e-3
    window = delta_benchmark.window_of
    assert torch.equal(window(layer)[real], window(want)[real])
    for name in ("state", "inputs"):
        assert torch.equal(layer[name][gone], before[name][gone])
    assert not layer["arrivals"].any()


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "format", "layers"),
    (
        ("qwen3_moe", "fp8", 1),
        ("olmoe", "int4", 1),
        ("gpt_oss", "mxfp4", 1),
        ("granitemoe", "int8", 1),
        ("qwen2_moe", "q4_0", 1),
        ("qwen3_next", "int4", 2),
        ("lfm2_moe", "int4", 2),
        ("deepseek_v2", "int8", 1),
        ("glm4_moe_lite", "int4", 1),
    ),
)
def test_a_long_prompt_by_kernels_is_the_plain_one(family, format, layers):
    for dense in (False, True):
        count, options = 1 if dense else layers, dict(dense=dense)
        for padding in (0, 7):
            found = prompt_errors(family, format, count, "cuda", padding=padding, **options)
            assert found["logits"] < 3e-3 and found["states"] < 2e-3, found


@pytest.mark.parametrize("family", ("qwen3_moe", "olmoe", "qwen2_moe", "qwen3_next", "gpt_oss"))
def test_chunks_at_positions_by_kernels_are_the_plain_ones(family):
    layers = 2 if family == "qwen3_next" else 1
    found = prompt_errors(family, "int4", layers, "cuda", positions=True, padding=7)
    assert found["logits"] < 3e-3 and found["states"] < 2e-3, found


@torch.no_grad()
@pytest.mark.parametrize("tokens", (2, 3, 4, 8, 16))
@pytest.mark.parametrize("accepted", ((3, None, 0), (16, 1, 9)))
@pytest.mark.parametrize("padded", (False, True))
def test_few_tokens_of_a_delta_layer(padded, accepted, tokens):
    """The fused kernels against PyTorch, in a graph, at Qwen3.6-35B-A3B's sizes: the result, and
    all that the state keeps.
    """
    last = (tokens // 2, -1, tokens - 1) if padded else None
    sizes = 3, tokens, 16, 32, 128, 128, 4, last, accepted
    layer, projected, context = random_few(*sizes, torch.bfloat16)
    layer, projected = layer.cuda(), projected.cuda()
    context = context._replace(positions=context.positions.cuda())
    if last is not None:
        context = context._replace(last=context.last.cuda())
    start = [buffer.clone() for buffer in layer.state.buffers()]
    want = layer.core(projected, context)
    expected = {name: buffer.clone() for name, buffer in layer.state.named_buffers()}
    with mock.patch.object(DeltaNet, "mixes_by_kernels", lambda *_: True):
        layer.core(projected, context)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = layer.core(projected, context)
    for buffer, value in zip(layer.state.buffers(), start, strict=True):
        buffer.copy_(value)
    graph.replay()
    for row in range(3):
        real = tokens if last is None else last[row] + 1
        if real:
            assert delta_benchmark.difference(got[row, :real], want[row, :real]) < 2e-2
    used = {"gates": tokens, "inputs": 3 + tokens}
    buffers = dict(layer.state.named_buffers())
    assert not buffers.pop("arrivals").any()
    for name, buffer in buffers.items():
        pair = (t[:3].float().unsqueeze(-1)[:, : used.get(name)] for t in (buffer, expected[name]))
        assert delta_benchmark.difference(*pair) < 5e-3, name


@torch.no_grad()
@pytest.mark.parametrize("tokens", (2, 3, 4))
def test_tokens_of_a_delta_layer_as_planes(tokens):
    layer, projected, context = random_few(
        *(1, tokens, 16, 32, 128, 128, 4, None, (3,)), torch.bfloat16
    )
    context = context._replace(positions=context.positions.cuda())
    assert plane_error(layer.cuda(), projected.cuda(), context) < 5e-3  # y is rounded to bf16


@torch.no_grad()
@pytest.mark.parametrize("tokens", (2, 3, 4))
@pytest.mark.parametrize("mode", ("int4", "int8"))
@pytest.mark.parametrize(("out", "width"), ((528, 512), (12288, 2048), (2048, 4096)))
def test_products_of_planes(out, width, mode, tokens):
    """Compare with fp64: with a norm and a narrow weight beside, and with a residual."""
    generator = torch.Generator("cuda").manual_seed(tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    plain, group = normal(out, width) * width**-0.5, 128 if mode == "int4" else 16
    parts = FORMATS[mode].pack(plain, group)
    weight = packed_weight(list(parts.values()), FORMATS[mode].kind, group)
    plain = FORMATS[mode].unpack(parts, group).double()
    x, norm, narrow = (normal(*n, width).bfloat16() for n in ((tokens,), (), (64,)))
    y, beside = (torch.empty(tokens, n, device="cuda") for n in (out, 64))
    made = planes.make_planes(x, norm, weight)
    multiply_planes(made, weight, y, eps=1e-6, beside=(plain_weight(narrow), beside))
    scaled, exact = x.double() * norm.double(), x.double()
    normed = scaled * (exact.square().mean(1, keepdim=True) + 1e-6).rsqrt()
    close(y, normed @ plain.T, 3e-4)
    close(beside, normed @ narrow.double().T, 5e-3)  # x times the norm's weight is rounded
    residual = normal(tokens, out)
    multiply_planes(made._replace(squares=None), weight, y, residual, scale=0.5)
    close(y, 0.5 * scaled @ plain.T + residual, 3e-4)


@torch.no_grad()
@pytest.mark.parametrize("kind", ("delta", "mamba"))
def test_pending_tokens_of_all_layers_by_one_kernel(kind):
    """All that a state keeps, of the second of three layers: the bits of the kernel of one layer.

    Of four sequences one has none pending, one refuses all, and one is idle.
    """
    accepted = None, 3, 0, 5
    if kind == "delta":
        layer, _, context = random_few(4, 4, 16, 32, 128, 128, 4, None, accepted, torch.bfloat16)
    else:
        call = 4, 4, *PUBLISHED[0], 4, None, accepted, torch.bfloat16
        layer, _, context = random_mamba_call(*call)
    layer, position = layer.cuda(), context.positions[:, :1].cuda()
    last = torch.tensor([0, 0, 0, -1]).cuda()
    alone, second = deepcopy(layer.state), deepcopy(layer.state)
    memory = alone.state, alone.pending(), [*layer.weights()]
    alone.take_in(*memory, position, last, None, alone.arrivals)
    settle_second(layer, second, position, last)
    for name, buffer in alone.named_buffers():
        assert torch.equal(buffer, dict(second.named_buffers())[name]), name
    assert not torch.equal(alone.state, layer.state.state)


@torch.no_grad()
@pytest.mark.parametrize("tokens", (1, 4))
@pytest.mark.parametrize("sizes", PUBLISHED)
def test_few_tokens_of_a_mamba_layer(sizes, tokens):
    """The kernel against PyTorch, in a graph, and all that the state keeps. Programs of more
    sequences than run at once give the same bits each time: no one updates what others still read.
    """
    accepted = (None, 3, 0, 5) * 8
    call = random_mamba_call(32, tokens, *sizes, 4, None, accepted, torch.bfloat16)
    layer, projected, context = call[0].cuda(), call[1].cuda(), call[2]
    context = context._replace(positions=context.positions.cuda())
    buffers = dict(layer.state.named_buffers())
    start = {name: buffer.clone() for name, buffer in buffers.items()}

    def replay(graph: torch.cuda.CUDAGraph) -> dict[str, torch.Tensor]:
        for name, value in start.items():
            buffers[name].copy_(value)
        graph.replay()
        return {"y": layer.output_norm(y, None)} | {name: t.clone() for name, t in buffers.items()}

    want = {"y": layer.core(projected, context)} | {name: t.clone() for name, t in buffers.items()}
    layer.fused_core(projected, context)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer.fused_core(projected, context)
    found = replay(graph)
    for name in ("y", "state"):
        assert delta_benchmark.difference(found[name][:32], want[name][:32]) < 2e-2, name
    pending = tokens if tokens > 1 else 0
    for name, count in {"inputs": 3 + pending, "gates": pending, "first": None}.items():
        assert torch.equal(found[name][:32, :count], want[name][:32, :count]), name
    assert not layer.state.arrivals.any()
    for _ in range(300):
        assert all(torch.equal(tensor, found[name]) for name, tensor in replay(graph).items())


@pytest.mark.parametrize("tokens", (1, 5, 64, 150, 2048))
def test_a_prompt_of_a_delta_layer(tokens):
    """`rule_difference` ends the process if a state is too far from that of the plain form."""
    assert delta_benchmark.rule_difference(tokens, "tf32x3") < 1e-4


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("tokens", (64, 256, 2048))
@pytest.mark.parametrize("form", (from_gates(launch_delta_chunk), in_place(chunk_in_torch)))
def test_a_prompt_with_a_decay_for_each_channel(form, tokens, dtype):
    """At Kimi Linear's sizes."""
    q, k, v, g, beta, state = random_rule(1, tokens, 32, 32, 128, 128, dtype)
    channels = 2.7 * torch.nn.functional.softplus(torch.randn(*g.shape, 128))
    check_recurrent_prompt(form, gated_delta_step, (q, k, v, -channels, beta), (), state)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("tokens", (64, 200, 2048))
@pytest.mark.parametrize("heads, groups", ((64, 8), (48, 1)), ids=("Nemotron 3 Nano", "Granite 4"))
@pytest.mark.parametrize("form", (from_gates(launch_ssm_chunk), in_place(ssm_chunk)))
def test_a_prompt_of_mamba2(form, heads, groups, tokens, dtype):
    x = torch.randn(1, tokens, heads, 64).to(dtype)
    b, c = (torch.randn(1, tokens, groups, 128).to(dtype) for _ in "bc")
    dt, skip = torch.nn.functional.softplus(torch.randn(1, tokens, heads)), torch.randn(heads)
    g = -dt * torch.rand(heads).add(0.5)
    check_recurrent_prompt(
        form, ssm_step, (x, b, c, dt, g), (skip,), torch.randn(1, heads, 64, 128)
    )


@torch.no_grad()
def check_recurrent_prompt(form, step, inputs, weights, state):
    """Compare kernels or a plain form with tokens one by one, eager and in a graph.

    inputs: [B, Q, ...]. Uninitialized memory is NaN in the eager call.
    """
    inputs, weights = ([x.cuda() for x in given] for given in (inputs, weights))
    given, want, after = (*inputs, *weights, state.cuda()), [], state.cuda()
    for token in range(inputs[0].shape[1]):
        out, after = step(*(x[:, token] for x in inputs), *weights, after)
        want.append(out)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        eager = after_tokens(form, *given)
    finally:
        torch.use_deterministic_algorithms(False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = after_tokens(form, *given)
    graph.replay()
    for found in (eager, replayed):
        for got, wanted in zip(found, (torch.stack(want, 1), after), strict=True):
            most = 1e-2 if inputs[0].dtype == torch.bfloat16 else 5e-5
            assert delta_benchmark.difference(got, wanted) < most


@pytest.mark.parametrize(
    ("Q", "S", "width"),
    ((2048, 7048, 128), (1024, 4096, 256), (700, 700, 64), (3000, 3001, 128), (520, 1500, 32)),
)
def test_attention_of_a_long_chunk(Q, S, width):
    """By our kernel against fp32 of the plain form. Keys of other positions follow in the cache."""
    q = torch.randn(Q, 8, width, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 2, S + 7, width, device="cuda", dtype=torch.bfloat16)[:, :, :S].unbind()
    want = attend_chunk(q.float(), k.float(), v.float(), None, None)
    assert delta_benchmark.difference(attend_prompt(q, k, v, None, None), want) < 6e-3


@pytest.mark.parametrize("width", (128, 192, 256))
def test_attention_of_a_latent_prompt(width):
    """SDPA's choice for the widths of latent attention against fp32 of its plain form."""
    q = torch.randn(256, 16, width, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(16, 256, width, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    v[..., 128:] = 0  # values are padded to the width of keys
    graph = torch.cuda.CUDAGraph()
    attend_chunk(q, k, v, None, None)
    with torch.cuda.graph(graph):
        got = attend_chunk(q, k, v, None, None)
    graph.replay()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        want = attend_chunk(q.float(), k.float(), v.float(), None, None)
    assert delta_benchmark.difference(got, want) < 1e-2


@pytest.mark.parametrize("family", (None, "qwen3_5_moe"))
def test_batches_equal_answers_given_alone(family, make_family):
    """In fp32, captured: neighbors, penalties and grammars change no answer; nothing recompiles."""
    torch._dynamo.reset()
    source = make_family(family).directory if family else embedded_checkpoint()
    model = load_model(source, "cuda", torch.float32)
    requests, arrivals = random_requests(2, 14)
    alone, expected = (
        Session(model, 96, SessionOptions(decode_kernels="inductor", compile=True)),
        [],
    )
    for ids, count, sampling in requests:
        alone.reset()
        expected.append(list(alone.stream(ids, count, sampling)))
    batch = Batch(
        Session(model, 96, SessionOptions(batch=8, compile=True, decode_kernels="inductor")), 4
    )
    batch.prepare()
    before = counters["stats"]["unique_graphs"]
    assert run(batch, requests, arrivals) == expected
    assert batch.overlaps and counters["stats"]["unique_graphs"] == before
    constrained = [([1, 2, n], 12, GREEDY, False, Alternating()) for n in range(2)]
    found = run(batch, [*constrained, *requests[:3]])
    assert found[2:] == expected[:3]
    for answer in found[:2]:
        assert [token % 2 for token in answer] == [0, 1] * 6


def test_a_timed_function_runs_after_what_computes_its_arguments():
    """Experts' indices that are not yet there would be addresses outside of the weights."""
    x, seen = torch.zeros(1, device="cuda"), []
    torch.cuda._sleep(100_000_000)  # clocks
    x.fill_(1)
    graph_seconds(lambda _: seen.append(x.clone()), [None], repeats=1)
    assert seen[0].item() == 1


@pytest.mark.parametrize("length", (320, 4096))
@pytest.mark.parametrize("compiled", (False, True))
@pytest.mark.parametrize("sizes", INDEXES)
def test_an_index_chooses_what_transformers_chooses(sizes, compiled, length):
    """A prompt in chunks, several tokens, then one by one."""
    peers, x = Peers(sizes), inputs(300)
    want = peers.expect(x)
    configure_inductor()
    peers.allocate(1, length, device="cuda")
    x = x.cuda()
    found = [peers.chunk(x[:, :150], 150), peers.chunk(x[:, 150:280], 280)]
    step = torch.compile(peers.step, dynamic=False, fullgraph=True) if compiled else peers.step
    for own in torch.arange(280, 300).split([4, 4, 4, *[1] * 8]):
        found.append(step(x[:, own.cuda()], own.unsqueeze(0).cuda()))
    torch.testing.assert_close(torch.cat(found, dim=1).cpu(), want, rtol=0, atol=1e-4)


def test_a_graph_reads_a_table_in_host_memory():
    weight, owner = torch.randn(1 << 20, 40), torch.nn.Module()
    before = torch.cuda.memory_allocated()
    table = in_host_memory(weight, owner, torch.device("cuda", torch.cuda.current_device()))
    assert table.is_cuda and table.shape == weight.shape
    assert torch.cuda.memory_allocated() == before
    index = torch.randint(len(table), (16,), device="cuda")
    look_up = torch.compile(lambda rows: table[rows] * 2)
    look_up(index)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = look_up(index)
    for _ in range(3):
        index.random_(len(table))
        graph.replay()
        assert torch.equal(found.cpu(), weight[index.cpu()] * 2)


@pytest.mark.parametrize("pins", (True, False), ids=("pinned", "not pinned"))
def test_tensors_on_the_gpu_have_the_files_bytes(pins, tmp_path, monkeypatch):
    """Of fewer bytes than a buffer, as many, one more, and many buffers; whole and sliced."""
    cuda, size, tensors = torch.device("cuda"), 4096, {}
    for dtype in (torch.bfloat16, torch.int8, torch.uint8, torch.int32):
        for count in (0, 1, size // dtype.itemsize, size // dtype.itemsize + 1, 100_003):
            random = torch.randint(0, 100, (count, 3), dtype=torch.int32)
            tensors[f"{dtype}.{count}".removeprefix("torch.")] = random.to(dtype)
    large = torch.randint(0, 256, (5 * BUFFERS, BUFFER_BYTES // 3), dtype=torch.uint8)
    with Writer(tmp_path / "model", {}, {"name": "bf16"}) as writer:
        writer.write("rest.safetensors", tensors | {"large": large})
    if not pins:
        monkeypatch.setattr(host_memory, "register_host_memory", lambda *_: False)
    checkpoint, found = Checkpoint(tmp_path / "model"), {}
    for of_buffer, names in ((size, tensors), (BUFFER_BYTES, ["large"])):
        with pinned_uploads(cuda, of_buffer):
            for name in names:
                for index in (None, (slice(1, 9),), (slice(None), slice(1, 2))):
                    found[name, index and str(index)] = checkpoint.read(name, index, cuda)
    for name, tensor in (tensors | {"large": large}).items():
        for index in (None, (slice(1, 9),), (slice(None), slice(1, 2))):
            read, want = found[name, index and str(index)], tensor[index or ()]
            assert read.is_cuda and read.dtype == want.dtype, name
            assert torch.equal(read.cpu(), want), (name, index)

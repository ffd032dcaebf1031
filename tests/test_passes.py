"""A step without drafts right after a pass: its tokens and its state are those of plain decoding.

Others shipped recurrent models in which that step began from a state with refused drafts, or
without accepted ones.
"""

import itertools
from functools import partial

import pytest
import torch
from conftest import FAMILIES
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from without_gpu import run_without_gpu

from generate import embedded_checkpoint, load_model
from models.layers.gated_delta_net import DeltaState
from ops.step import draft_check, token_draw
from runtime.fused_decode import FusedRunner
from runtime.kernel_choice import passes_are_kernels
from runtime.runner import CompiledRunner, EagerRunner
from runtime.sampling import Sampling
from runtime.session import Session, SessionOptions
from runtime.speculation import Speculation
from tests.passes_without_gpu import (
    PROMPT,
    SCRIPT,
    ScriptedDrafter,
    drive,
    drive_several,
    speculate,
)

GREEDY = Sampling(temperature=0)
RECURRENT = "qwen3_next", "qwen3_5_moe", "qwen4_exp"
# Drafts are often accepted where few tokens can be drawn.
SAMPLED = Sampling(temperature=0.5, top_k=3, seed=2)
pytestmark = pytest.mark.usefixtures("few_threads")


def check(found: dict, greedy: bool) -> None:
    """Check the results of `drive`."""
    assert found["checked"] and found["error"] < 1e-4, found
    if greedy:  # the script says how many drafts are right
        assert found["same"], found
        script = [SCRIPT[n % len(SCRIPT)] for n in range(len(found["passes"]))]
        assert [tuple(each) for each in found["passes"]] == script
        assert found["after"] == [0, 1, 2, 3]  # none, some and all accepted, then no draft


@pytest.mark.parametrize("compiled", (False, True))
@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_after_a_pass_is_as_in_plain_decoding(name, compiled, make_family, no_compiler):
    directory = make_family(name).directory
    check(drive(directory, GREEDY, compile=compiled), greedy=True)
    if name in RECURRENT or not compiled:
        found = drive(directory, SAMPLED, compile=compiled)
        check(found, greedy=False)
        assert len(found["after"]) > 1 or name not in RECURRENT


@pytest.mark.parametrize(
    "sampling",
    (pytest.param(GREEDY, marks=pytest.mark.slow), Sampling(temperature=0.3, top_k=3, seed=2)),
)
def test_the_embedded_hybrid(sampling, hybrid_directory):
    check(drive(hybrid_directory, sampling), greedy=sampling is GREEDY)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECURRENT)
def test_compiled_steps_and_passes(name, make_family):
    for sampling in (GREEDY, SAMPLED):
        found = drive(make_family(name).directory, sampling, compile=True)
        check(found, greedy=sampling is GREEDY)


@pytest.mark.slow
def test_the_kernels_in_the_interpreter(make_family):
    """Gated DeltaNet, the verification and the bookkeeping by kernels, all else eager."""
    directory = make_family("qwen3_next", linear_value_head_dim=16).directory
    variables = {"TRITON_INTERPRET": "1"}
    greedy, sampled, several = run_without_gpu("passes_without_gpu.py", str(directory), **variables)
    assert greedy["same"] and greedy["after"] == [0, 1, 2]
    for found in (greedy, sampled):
        assert found["checked"] and found["error"] < 1e-4
    assert several["same"] and several["passes"]["2"] > 0


@pytest.mark.parametrize("rows", (2, pytest.param(3, marks=pytest.mark.slow)))
def test_passes_of_several_rows_of_the_embedded_hybrid(rows, hybrid_directory):
    found = drive_several(hybrid_directory, rows, 24)
    assert found["same"] and found["passes"][rows] > 3


@pytest.mark.parametrize("wrong", ("refused tokens stay", "accepted ones are lost"))
def test_a_faulty_state_is_found(wrong, make_family, monkeypatch):
    """The check fails if a layer takes in a token too many or too few."""
    take_in, more = DeltaState.take_in, 1 if wrong.startswith("refused") else -1

    def faulty(state, pending, weights, position, *rest) -> None:
        take_in(state, pending, weights, position + more, *rest)

    monkeypatch.setattr(DeltaState, "take_in", staticmethod(faulty))
    found = drive(make_family("qwen3_next").directory, GREEDY)
    assert not found["same"] or found["error"] > 1e-3


# Numbers of drafts --------------------------------------------------------------------------------


def test_a_pass_has_any_number_of_drafts_and_a_step_has_none(make_family, no_compiler):
    """One step is made for each number and way of sampling, on its first use."""
    directory = make_family("mixtral").directory
    script = [(n, n) for n in (5, 0, 1, 4, 2, 3)]
    plain = Session(speculate(directory, GREEDY, [], 1, [(0, 0)])[0].model, 128)
    text = PROMPT + list(plain.stream(PROMPT, 40, GREEDY))
    options = dict(compile=True)
    speculation, found, passes = speculate(directory, GREEDY, text, 21, script, **options)
    assert found == text[len(PROMPT) :][:21] and passes == [(n, n) for n in (5, 0, 1, 4, 2, 3)]
    assert set(speculation.steps) == {(1, n, 0) for n in range(1, 6)}
    assert speculation.drafted == speculation.accepted == 15 and speculation.delivered == 20


class InFlight(Session):
    """A session whose steps seem to be in flight until they are read, as those of a GPU."""

    events: list[str]

    def read_tokens(self, posted: bool = True):
        read = super().read_tokens(posted)
        self.events.append("launch" if posted else "prompt")

        def wait() -> list[int]:
            self.events.append("read")
            return read()

        return wait


def test_steps_without_drafts_overlap_as_plain_ones_do(make_family, no_compiler):
    """The next step is launched before a token is read; drafts are looked up while it runs."""
    model = load_model(make_family("mixtral").directory, "cpu")
    session = InFlight(model, 128, SessionOptions())
    session.events, session.captured = [], True
    session.capture = lambda step, *_: step
    want = list(session.stream(PROMPT, 8, GREEDY))
    plain = session.events
    session.reset()
    speculation = Speculation(session, 3)
    speculation.drafter = ScriptedDrafter(session, [], [(0, 0)])
    source = speculation.drafter.source

    def noting() -> str | None:
        session.events.append("look up")
        return source()

    speculation.drafter.source, session.events = noting, []
    assert list(speculation.stream(PROMPT, 8, GREEDY)) == want
    looked = [event for event in session.events if event == "look up"]
    events = [event for event in session.events if event != "look up"]
    assert len(looked) == 7 and speculation.passes == 7
    assert events[:4] == ["prompt", "read", "launch", "launch"]
    assert events[4:] == ["read", "launch"] * 5 + ["read", "read"]
    assert plain[:3] == ["prompt", "launch", "read"]


@pytest.mark.parametrize("overlaps", (False, True))
def test_the_next_pass_runs_while_the_tokens_are_read(overlaps, make_family):
    """The reader of a captured session's tokens keeps no pass waiting."""
    model = load_model(make_family("mixtral").directory, "cpu")
    session, events = Session(model, 128), []
    text = PROMPT + list(session.stream(PROMPT, 24, GREEDY))
    session.reset()
    speculation = Speculation(session, 5)
    speculation.drafter = ScriptedDrafter(session, text, [(3, 3)])
    speculation.overlaps, verify = overlaps, speculation.verify
    speculation.verify = lambda *given: (events.append("pass"), verify(*given))
    for token in speculation.stream(PROMPT, 21, GREEDY):
        events.append(token)
    given, parts = text[len(PROMPT) :][:21], [1, 4, 4, 4, 4, 4]
    assert [event for event in events if event != "pass"] == given
    # A pass comes before the tokens of the one before it, or after them.
    before = [sum(event != "pass" for event in events[:at]) for at in range(len(events))]
    at_pass = [count for count, event in zip(before, events, strict=True) if event == "pass"]
    ends = [0, *itertools.accumulate(parts)]
    assert at_pass == (ends[:5] if overlaps else ends[1:6])


def test_the_host_waits_for_a_pass_before_it_writes_drafts(make_family, monkeypatch):
    """Kernels read drafts where the host writes them, and a pass may be in flight, unread."""
    events: list[str] = []

    class Ended:
        def record(self, stream) -> None:
            events.append("record")

        def synchronize(self) -> None:
            events.append("wait")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    session = Session(load_model(make_family("mixtral").directory, "cpu"), 128)
    speculation = Speculation(session, 5)
    speculation.drafter = drafter = ScriptedDrafter(session, [1] * 99, [(3, 0)])
    speculation.ended, speculation.overlaps = Ended(), True
    propose, verify = drafter.propose, speculation.verify
    drafter.propose = lambda limit: (events.append("write"), propose(limit))[1]
    speculation.verify = lambda *given: (events.append("pass"), verify(*given))
    stream = speculation.stream(PROMPT, 9, GREEDY)
    for _ in range(3):
        next(stream)
    stream.close()  # a pass is in flight
    next(speculation.stream(PROMPT[:9], 9, GREEDY))
    turn = ["wait", "write", "pass", "record"]
    assert events == [*turn, "wait", *turn, "wait", *turn, *turn]


# Beside the model ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "drafts"), ((1, 1), (1, 3), (1, 15), (2, 3), (4, 1)))
@pytest.mark.parametrize("sampling", (GREEDY, SAMPLED))
def test_a_pass_has_at_most_five_kernels_beside_the_model(
    sampling, rows, drafts, make_family, monkeypatch
):
    """On a GPU with the fused kernels; without drafts it is a plain step."""
    launched: list[str] = []

    def note(kernel, *args, **options) -> None:
        launched.append(getattr(kernel, "__name__", None) or kernel.fn.__name__)

    for module in (draft_check, token_draw):
        monkeypatch.setattr(module, "launch", note)
    model = load_model(make_family("qwen3_next").directory, "cpu")
    options = SessionOptions(batch=rows)
    session = Session(model, 128, options)
    session.runner = FusedRunner(model)
    monkeypatch.setattr(session.runner, "runs", lambda *_: True)
    logits = torch.zeros(rows, drafts + 1, session.seen.shape[1])
    speculation = Speculation(session, 15)
    session.model = lambda *_, **options: logits
    with CountOperators() as operators:
        speculation.verify(rows, drafts, session.candidates(sampling))
    ranks = ["_rank"] if session.candidates(sampling) else []
    names = ["_begin_pass", "_find_best", *ranks, "_check_drafts", "_accept"]
    assert launched == names and not operators.found
    speculation = Speculation(Session(model, 128, options), 15)  # the plain form, for comparison
    speculation.session.model = session.model
    with CountOperators() as operators:
        speculation.verify(rows, drafts, session.candidates(sampling))
    assert len(operators.found) > len(names)


def test_passes_are_captured_fast_where_all_of_them_is_kernels(monkeypatch):
    """A layer, a head or a norm without a kernel is compiled by Inductor, for seconds."""
    session = Session(load_model(embedded_checkpoint(), "cpu"), 128)
    runner = FusedRunner(session.model)
    assert not passes_are_kernels(runner) and not session.captures_fast  # no kernel runs on a CPU
    monkeypatch.setattr("runtime.kernel_choice.is_all_kernels", lambda *_: True)
    assert passes_are_kernels(runner)
    session.runner, session.captured = runner, True
    assert session.captures_fast
    layer = next(iter(runner.layers.values()))
    for holder, name, value in (
        *((runner, "head", None), (runner, "begin_kernels", None), (runner.head, "norm", None)),
        (layer, "mixers", [None]),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(holder, name, value)
            assert not passes_are_kernels(runner)
    others = EagerRunner(session.model), CompiledRunner(session.model)
    assert not any(map(passes_are_kernels, others))


class CountOperators(TorchDispatchMode):
    """Notes operators that would launch kernels: all but views and empty tensors."""

    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.overloadpacket.__name__
        if not operator.is_view and name not in ("empty", "empty_like"):
            self.found.append(name)
        return operator(*args, **(kwargs or {}))


# Compiled code ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "numbers"), ((1, (1, 2, 3, 5, 7, 4)), (2, (1, 2, 3, 4))))
@pytest.mark.parametrize("fused", (False, True))
@pytest.mark.parametrize("name", ("mixtral", "qwen3_next"))
def test_numbers_of_drafts_share_compiled_code(
    name, fused, rows, numbers, make_family, monkeypatch
):
    """The compiler sees two tokens of each sequence, and then any number of them."""
    frames = CompileCounter()
    compiler = partial(torch.compile, backend=frames)
    monkeypatch.setattr(
        torch, "compile", lambda *args, **options: compiler(*args, **plain(options))
    )
    torch._dynamo.reset()
    model = load_model(make_family(name).directory, "cpu")
    session, counts = Session(model, 128, SessionOptions(batch=rows)), []
    session.runner = (FusedRunner if fused else CompiledRunner)(model)
    session.runner.layers = {}  # no kernels here
    session.compiled = True
    speculation = Speculation(session, 15)
    speculation.begin_pass, speculation.verify_pass = CompiledRunner(model).pass_steps()
    for drafts in numbers:
        for candidates in (0, 100):
            speculation.verify(rows, drafts, candidates)
        counts.append(frames.frame_count)
    assert counts[0] and counts[2] == counts[-1], counts


def plain(options: dict) -> dict:
    """Return options of torch.compile that any backend has."""
    return {name: value for name, value in options.items() if name != "options"}

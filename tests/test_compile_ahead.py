"""Kernels that are compiled before a step needs them, in other processes."""

import json
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from without_gpu import run_without_gpu

from host import compile_helper
from ops import inductor, launch
from ops.gpu import KNOWN
from ops.step import rows
from runtime import compile_ahead as ahead

GPU = KNOWN["sm_90"]


@pytest.mark.slow
@pytest.mark.parametrize("count", (2, pytest.param(0, marks=pytest.mark.slow)))
def test_launches_find_what_the_helper_has_compiled(count, tmp_path):
    case = "Qwen3-30B-A3B:int4"
    script = "compile_ahead_without_gpu.py"
    found = run_without_gpu(script, case, str(count), TRITON_CACHE_DIR=str(tmp_path))
    assert {"_gather_rows", "attend_kernel", "merge_kernel", "join_tokens"} < set(found["kernels"])
    assert found["ahead"] == [count or found["tasks"], 0]  # the second run has nothing to do
    assert found["compiled"] > 0 and found["added"] == 0
    assert found["later"] == ([2, False, True] if count else [0, True, True])


@pytest.mark.slow
def test_a_first_token_compiles_nothing_late():
    """Neither do short prompts. Two layers of each kind: dense, with a window, recurrent."""
    layers = {"Qwen3-30B-A3B:int4": 2, "gpt-oss-20b:mxfp4": 4, "GLM-4.7-Flash:int4": 3}
    layers["Qwen3.6-35B-A3B:int4"] = 8
    cases = [str(part) for case in layers.items() for part in case]
    found = run_without_gpu("compile_ahead_without_gpu.py", "late", *cases)
    assert found == {case: [] for case in layers}


def move_task(block: int) -> str:
    """Return a launch that takes a second to compile. Triton's blocks are powers of two."""
    sizes = {"bytes": 8, "exchange": False, "block": block}
    move = {"class": ["ops.step.rows", "Move"], "fields": sizes}
    args = [{"tensor": "int64"}, 0, 1, 100, move]
    task = {"kernel": ["ops.step.rows", "_move"], "args": args, "options": {"num_warps": 1}}
    return json.dumps(task)


def test_a_kernel_that_does_not_compile_ends_no_other(tmp_path):
    """Its error is a class of ours, which cannot be pickled."""
    tasks = [move_task(block) for block in (48, 64)]
    helper = compile_helper.Helper()
    found = dict(helper.compile(GPU, tasks, tmp_path))
    helper.close()
    assert found[0].startswith("_move") and found[1] is None and any(tmp_path.iterdir())


class FakeHelper:
    """Stands for the helper: compiles only the first `count` tasks, once it is let go."""

    def __init__(self, count: int):
        self.count, self.closed, self.given = count, False, None
        self.goes_on = threading.Event()
        self.goes_on.set()

    def compile(self, gpu, tasks, cache, nice=0):
        self.given, self.nice = list(tasks), nice
        assert self.goes_on.wait(60)
        ended = range(min(self.count, len(tasks)))
        yield from ((number, "why" if number == 1 else None) for number in ended)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def compile_some(monkeypatch, tmp_path):
    """Return a function: compile tasks by a helper that ends early -> the helper, how many."""
    monkeypatch.setattr(ahead, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(ahead, "signature", lambda task: task)
    monkeypatch.setattr(ahead, "keep_keys", lambda tasks: None)
    monkeypatch.setattr(ahead, "remembered", [])

    def run(tasks: list[str], count: int) -> tuple[FakeHelper, int]:
        fake = FakeHelper(count)
        monkeypatch.setattr(compile_helper, "started", [fake])
        monkeypatch.setattr(ahead, "started", compile_helper.started)
        return fake, ahead.compile_ahead(tasks, GPU)

    return run


def test_a_task_is_compiled_once(compile_some):
    fake, count = compile_some(["a", "b", "c"], 2)  # b fails, and c is never reached
    assert count == 3 and fake.given == ["a", "b", "c"] and fake.closed
    fake, count = compile_some(["a", "b", "c", "d"], 4)
    assert count == 3 and fake.given == ["b", "c", "d"]  # b is the first now, and c fails
    fake, count = compile_some(["a", "b", "d"], 4)
    assert count == 0 and fake.given is None and fake.closed


@pytest.fixture
def compile_later(compile_some, monkeypatch):
    """Return a function: compile tasks in the background by this helper -> what tells the end."""

    def run(tasks: list[str], fake: FakeHelper):
        monkeypatch.setattr(ahead, "Helper", lambda environment: fake)
        return ahead.compile_later(tasks, GPU)

    return run


def wait_until(condition) -> bool:
    """Return whether a condition comes true within a minute."""
    end = time.monotonic() + 60
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return found


def test_tasks_are_compiled_in_the_background(compile_later, compile_some, caplog):
    """Once, at low priority, without a progress bar; the next start reads none of them ahead."""
    caplog.set_level("INFO", "moe_fast")
    compile_some(["a"], 1)
    fake = FakeHelper(1)
    fake.goes_on.clear()
    is_there = compile_later(["a", "b"], fake)
    assert wait_until(lambda: fake.given == ["b"]) and fake.nice > 0 and not is_there()
    fake.goes_on.set()
    assert wait_until(is_there) and fake.closed
    assert "1 of 1 kernels compiled in the background in 0.0 s" in caplog.text
    fake = FakeHelper(2)
    assert compile_later(["a", "b"], fake)() and fake.given is None  # no helper is started
    ahead.remembered[:] = [ahead.folder() / "model"]
    assert wait_until(compile_later(["a", "c"], FakeHelper(1)))
    compile_some(["a"], 1)
    assert json.loads(ahead.remembered[0].read_text()) == ["a"]


@pytest.mark.parametrize(("count", "why"), ((2, "why"), (1, "the helper has ended")))
def test_kernels_that_are_not_compiled_in_the_background_are_an_error(count, why, compile_later):
    """An error, and a helper that ends early: they are never there."""
    fake = FakeHelper(count)
    is_there = compile_later(["a", "b", "c"], fake)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"2 kernels are not compiled: {why}"):
            wait_until(is_there)
    assert fake.closed


def test_a_helper_that_cannot_be_started_is_an_error(compile_some, monkeypatch):
    def fail(environment):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(ahead, "Helper", fail)
    with pytest.raises(RuntimeError, match="Cannot allocate memory"):
        wait_until(ahead.compile_later(["a"], GPU))


LEAVES = """
import sys, threading, time
from pathlib import Path
from ops.gpu import KNOWN
from runtime import compile_ahead as ahead

cache, task = Path(sys.argv[1]), sys.argv[2]
ahead.cache_folder = lambda: cache
ahead.signature = lambda task: task
helpers, Helper = [], ahead.Helper

def start(environment):
    helpers.append(Helper(environment))
    return helpers[0]

ahead.Helper = start
assert not ahead.compile_later([task], KNOWN["sm_90"])()
while not helpers:
    time.sleep(0.01)
print(helpers[0].process.pid, flush=True)
"""


def test_the_end_of_a_process_waits_for_no_helper_and_leaves_none(tmp_path):
    """It ends at once, and the helper, which has just begun, ends before it has compiled."""
    pytest.importorskip("triton", reason="the helper compiles with it")
    run = subprocess.run(
        [sys.executable, "-c", LEAVES, str(tmp_path), move_task(64)],
        cwd=compile_helper.ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    running = Path("/proc") / run.stdout.strip() / "stat"

    def has_ended() -> bool:
        try:
            return running.read_text().rpartition(")")[2].split()[0] == "Z"
        except FileNotFoundError:
            return True

    assert wait_until(has_ended)
    assert [path.name for path in tmp_path.iterdir()] in ([], [compile_helper.MARKERS])
    assert not list(tmp_path.rglob("*.cubin")) and not list(tmp_path.rglob("*.ptx"))


def test_a_model_that_was_compiled_starts_no_helper(monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(ahead, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(ahead, "start", lambda: started.append(1))
    monkeypatch.setattr(ahead, "remembered", [])

    class Source:
        args, format = {"dim": 64}, {"name": "int4"}

    cuda = torch.device("cuda")
    ahead.start_compiling(Source, torch.device("cpu"))
    assert not started
    for expected in (1, 1):  # the second time it is known
        ahead.start_compiling(Source, cuda)
        assert len(started) == expected
        assert ahead.compile_ahead([], GPU) == 0


def test_kernels_of_the_last_run_are_read_while_weights_load(compile_some, monkeypatch, tmp_path):
    class Source:
        args, format = {"dim": 64}, {"name": "int4"}

    loaded = []

    class Code:
        run = property(lambda self: loaded.append(self.task))

        def __init__(self, task: str):
            if task == "b":
                raise RuntimeError("it does not fit")
            self.task = task

    monkeypatch.setattr(ahead, "start", lambda: None)
    monkeypatch.setattr(ahead, "code_of", Code)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    cuda = torch.device("cuda")
    ahead.start_compiling(Source, cuda)
    assert not ahead.reading  # nothing is known yet
    compile_some(["a", "b", "c", "d"], 3)  # b fails, and d is never reached
    ahead.marker("b").touch()
    ahead.start_compiling(Source, cuda)
    ahead.compile_ahead([], GPU)  # waits for them
    assert loaded == ["a", "c"] and not ahead.reading
    for text in ("", "damaged"):
        ahead.remembered[0].write_text(text)
        ahead.start_compiling(Source, cuda)
        ahead.stop_compiling()
    assert loaded == ["a", "c"] and not ahead.reading


def test_keys_of_kernels_are_kept_for_the_same_sources(monkeypatch, tmp_path):
    """They name compiled code: a change of a source has to change them."""
    monkeypatch.setattr(ahead, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(ahead, "KERNELS", tmp_path)
    known = {}
    monkeypatch.setattr(ahead, "known_keys", known)
    monkeypatch.setattr(launch, "known_keys", known)
    source, kernel = tmp_path / "a.py", rows._move
    source.write_text("1")
    ahead.folder().mkdir(parents=True)
    ahead.read_keys()
    assert not known
    task = json.dumps({"kernel": ["ops.step.rows", "_move"]})
    ahead.keep_keys([task])
    ahead.read_keys()
    assert known == {"ops.step.rows._move": kernel.cache_key} and len(kernel.cache_key) == 64
    known["ops.step.rows._move"] = "as kept"
    assert kernel.cache_key == "as kept"
    ahead.keep_keys([task])  # nothing new
    ahead.read_keys()
    assert kernel.cache_key != "as kept"
    known.clear()
    source.write_text("12")
    ahead.read_keys()
    assert not known
    ahead.keep_keys([task])
    ahead.keys_file().write_text("[]")
    ahead.read_keys()
    assert not known


def test_a_function_is_compiled_when_it_is_first_called(monkeypatch):
    made, options = [], []

    def fake_compile(function, **given):
        made.append(given)
        return function

    monkeypatch.setattr(torch, "compile", fake_compile)
    monkeypatch.setattr(inductor, "configure_inductor", lambda: options.append("set"))
    double = inductor.compiled(lambda x: 2 * x, dynamic=False)
    assert not made and not options
    assert [double(3), double(4)] == [6, 8]
    assert made == [{"fullgraph": True, "dynamic": False}] and options == ["set"]


def test_what_runs_once_is_compiled_without_tuning():
    import torch._inductor.config as config

    seen = []

    def note(x: torch.Tensor) -> torch.Tensor:
        seen.append(config.coordinate_descent_tuning)
        return x

    inductor.configure_inductor()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **_: function)
        call = inductor.compiled(note)
        with inductor.without_tuning():
            call(torch.ones(1))
        call(torch.ones(1))
    assert seen == [False, True]

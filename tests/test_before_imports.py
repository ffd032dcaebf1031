"""What a command begins before it imports torch, and that none of it is necessary."""

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from cli.command import command
from host import before_imports, compile_helper, free_memory
from hub.manage import read_model_ahead

ROOT = Path(__file__).parents[1]
# Print where Python keeps bytecode, here and in a child: after `keep_bytecode`, and with a torch.
KEEP = """
import argparse, json, subprocess, sys
from pathlib import Path
from host.before_imports import keep_bytecode

keep_bytecode(argparse.Namespace(compile_cache=Path(sys.argv[1]) if sys.argv[1] else None))
import torch
child = "import sys; print(sys.pycache_prefix, sys.dont_write_bytecode)"
child = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout
print(json.dumps([sys.pycache_prefix, sys.dont_write_bytecode, torch.VALUE, child.split()]))
"""


def keep_bytecode(folder: Path, cache: Path | str, **variables: str) -> list:
    """Run KEEP with a package `torch` in this folder."""
    (folder / "torch").mkdir(exist_ok=True)
    (folder / "torch" / "__init__.py").write_text("VALUE = 1\n")
    names = ("PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {"PYTHONPATH": os.pathsep.join((str(folder), str(ROOT)))} | variables
    command = [sys.executable, "-c", KEEP, str(cache)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_bytecode_of_torch_is_kept_where_python_would_keep_none(tmp_path):
    cache, forbidden = tmp_path / "cache", {"PYTHONDONTWRITEBYTECODE": "1"}
    for _ in range(2):  # the second run reads it
        prefix, *found, child = keep_bytecode(tmp_path, cache, **forbidden)
        assert prefix == str(cache / "python") and found == [False, 1]
        assert child == [prefix, "False"]  # Inductor's processes import torch, too
        kept = [path for path in cache.rglob("*.pyc") if path.parent.name == "torch"]
        assert len(kept) == 1 and not (tmp_path / "torch" / "__pycache__").exists()
    own = {"XDG_CACHE_HOME": str(tmp_path / "user")}
    prefix, *_ = keep_bytecode(tmp_path, "", **forbidden, **own)
    assert prefix == str(tmp_path / "user/moe-fast/compiled/python")
    assert (tmp_path / "user/moe-fast/compiled").stat().st_mode & 0o777 == 0o700


def test_pythons_own_folders_of_bytecode_stay(tmp_path):
    forbidden = {"PYTHONDONTWRITEBYTECODE": "1"}
    cache, expected = tmp_path / "cache", [None, False, 1, ["None", "False"]]
    assert keep_bytecode(tmp_path, cache) == expected  # torch's folder can be written
    assert list((tmp_path / "torch").rglob("*.pyc"))
    # Now it has bytecode, which is read in any case.
    expected = [None, True, 1, ["None", "True"]]
    assert keep_bytecode(tmp_path, cache, **forbidden) == expected
    own = {"PYTHONPYCACHEPREFIX": str(tmp_path / "own")}
    assert keep_bytecode(tmp_path, cache, **own)[0] == own["PYTHONPYCACHEPREFIX"]
    assert not cache.exists()


def test_a_cache_that_cannot_be_made_stops_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    found = keep_bytecode(tmp_path, tmp_path / "file" / "x", PYTHONDONTWRITEBYTECODE="1")
    assert found[:2] == [None, True]


class FakeDriver:
    """Stands for libcuda: notes its calls."""

    def __init__(self, code: int):
        self.code, self.calls = code, []

    def __getattr__(self, name: str):
        def call(*arguments) -> int:
            self.calls.append(name)
            return self.code

        return call


@pytest.mark.parametrize(
    ("code", "calls"),
    ((0, ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]), (100, ["cuInit"])),
)
def test_a_context_is_created_on_a_gpu_alone(code, calls, tmp_path, monkeypatch):
    fake = FakeDriver(code)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: fake)
    monkeypatch.setattr(compile_helper, "NVIDIA", tmp_path)
    assert before_imports.create_context(argparse.Namespace(device="cpu")) is None
    before_imports.create_context(argparse.Namespace(device="auto")).join()
    assert fake.calls == calls
    monkeypatch.setattr(compile_helper, "NVIDIA", tmp_path / "none")
    assert before_imports.create_context(argparse.Namespace(device="auto")) is None


def test_no_driver_is_no_error(monkeypatch):
    def missing(name: str):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    before_imports.retain_context()


@pytest.fixture
def advised(monkeypatch):
    """Return a function: the names and ranges of files that options have the system read."""
    found, threads = [], []

    def advise(descriptor: int, start: int, size: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        found.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, start, size))

    def read(**options) -> list[tuple[str, int, int]]:
        found.clear()
        defaults = {"model": None, "revision": None, "checkpoint_path": None, "dry_run": False}
        defaults |= {"device": "cpu", "offload": False}
        read_model_ahead(argparse.Namespace(**defaults | options))
        while threads:
            if thread := threads.pop():
                thread.join()
        return list(found)

    begin = before_imports.read_ahead
    monkeypatch.setattr(os, "posix_fadvise", advise)
    monkeypatch.setattr(before_imports, "PIECE", 10)
    monkeypatch.setattr("hub.manage.read_ahead", lambda paths: threads.append(begin(paths)))
    monkeypatch.setattr(before_imports, "free_host_memory", lambda: 1000)
    return read


def test_weights_on_disk_are_read_ahead(advised, tmp_path, monkeypatch):
    folder = tmp_path / "OWNER/NAME/model_bf16"
    folder.mkdir(parents=True)
    for name, size in (("b.safetensors", 5), ("a.safetensors", 25), ("tokenizer.json", 7)):
        (folder / name).write_bytes(bytes(size))
    pieces = [("a.safetensors", start, 10) for start in (0, 10, 20)] + [("b.safetensors", 0, 10)]
    assert advised(checkpoint_path=folder) == pieces
    assert advised(checkpoint_path=folder / "b.safetensors") == pieces[-1:]  # as a GGUF file is
    assert advised(checkpoint_path=folder, dry_run=True) == []
    assert advised(checkpoint_path=folder, prepare_only=True) == []
    assert advised(checkpoint_path=tmp_path / "none") == advised() == []
    monkeypatch.setenv("MOE_FAST_CHECKPOINTS", str(tmp_path))
    assert advised(model="OWNER/NAME:bf16") == []  # no config.json: it is not complete
    (folder / "config.json").write_text('{"moe_fast": 1}')
    assert advised(model="OWNER/NAME:bf16") == pieces
    assert advised(model="OWNER/OTHER") == advised(model="no name") == []


def test_more_than_memory_holds_is_not_read_ahead(advised, tmp_path):
    (tmp_path / "a.safetensors").write_bytes(bytes(500))
    assert len(advised(checkpoint_path=tmp_path)) == 50
    (tmp_path / "b.safetensors").write_bytes(bytes(1))
    assert advised(checkpoint_path=tmp_path) == []


def test_the_memory_is_known():
    assert before_imports.free_host_memory() > 1 << 20


def test_garbage_is_collected_from_main_on():
    found = []
    gc.disable()  # as `check_arguments` does
    try:
        command()(lambda: found.append(gc.isenabled()) or 0)()
        assert found == [True] and gc.get_freeze_count() > 1000
    finally:
        gc.enable()
        gc.unfreeze()


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """Stands for Triton, and counts how often it hashes its compiler; the folder of its cache."""
    triton = types.SimpleNamespace(hashed=0, package=tmp_path / "triton", cache=tmp_path / "cache")
    for name in ("runtime", "compiler", "_C"):
        (triton.package / name).mkdir(parents=True)
    (triton.package / "_C" / "libtriton.so").write_text("compiler")
    (triton.package / "compiler" / "code.py").write_text("generator")

    def import_anew() -> types.ModuleType:
        names = "triton", "triton.runtime", "triton.runtime.cache"
        modules = [types.ModuleType(name) for name in names]
        modules[1].cache = modules[2]
        for module in modules:
            monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(before_imports, "hashing", [])
        modules[2].__file__ = str(triton.package / "runtime" / "cache.py")
        modules[2].triton_key = compute
        return modules[2]

    def compute() -> str:
        triton.hashed += 1
        return f"hash {triton.hashed}"

    triton.import_anew = import_anew
    return triton


def hash_in_a_thread(compiler) -> str:
    """Return the hash that launches of a new process find."""
    module = compiler.import_anew()
    for _ in range(2):
        before_imports.start_hashing(compiler.cache)
        before_imports.wait_for_hash()
    return module.triton_key()


def test_tritons_hash_is_kept_while_its_files_are_the_same(compiler):
    compiler.import_anew()
    before_imports.wait_for_hash()
    assert compiler.hashed == 0
    assert hash_in_a_thread(compiler) == "hash 2"  # once by the thread, once here
    for _ in range(2):
        assert hash_in_a_thread(compiler) == "hash 1"
    assert compiler.hashed == 2
    for changed in ("_C/libtriton.so", "compiler/code.py", "compiler/new.py"):
        (compiler.package / changed).write_text("another version")
        before = compiler.hashed
        hash_in_a_thread(compiler)
        assert compiler.hashed == before + 2
        assert hash_in_a_thread(compiler) == f"hash {before + 1}"


NESTED = pytest.param("[" * 100_000, id="nested")


@pytest.mark.parametrize("text", ("", "{", "[]", '{"files": 1}', "null", NESTED))
def test_a_damaged_file_of_the_hash_is_replaced(compiler, text):
    compiler.cache.mkdir()
    (compiler.cache / before_imports.HASH_FILE).write_text(text)
    hash_in_a_thread(compiler)
    assert hash_in_a_thread(compiler) == "hash 1"


def test_a_hash_that_cannot_be_kept_is_computed(compiler):
    compiler.cache.write_text("no folder")
    hash_in_a_thread(compiler)
    assert compiler.hashed == 2


def test_another_version_of_triton_is_not_hashed(monkeypatch, tmp_path):
    runtime = types.ModuleType("triton.runtime")
    monkeypatch.setitem(sys.modules, runtime.__name__, runtime)
    monkeypatch.delitem(sys.modules, "triton.runtime.cache", raising=False)
    before_imports.hash_triton(tmp_path)  # it has no `cache`
    runtime.cache = types.SimpleNamespace(__file__=str(tmp_path / "runtime" / "cache.py"))
    before_imports.hash_triton(tmp_path)  # which computes no hash
    assert not list(tmp_path.iterdir())


def test_the_tokenizer_is_loaded_while_torchs_libraries_are():
    """Before torch is imported, which then finds its libraries."""
    script = """
import argparse, sys, threading
from pathlib import Path
from hub.manage import read_model_ahead

folder = Path("checkpoints/tiny-moe")
options = dict(checkpoint_path=folder, model=None, dry_run=False, device="cpu", offload=False)
read_model_ahead(argparse.Namespace(**options))
for thread in threading.enumerate():
    if thread.name == "libraries of torch":
        thread.join()
import tokenizer
assert "torch" not in sys.modules
assert list(tokenizer.loaded_ahead) == [folder]
assert "libtorch_cpu" in Path("/proc/self/maps").read_text()
import torch
assert torch.ones(2).sum() == 2
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def test_a_system_without_torchs_libraries_loads_none(tmp_path, monkeypatch):
    spec = types.SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    for found in (None, spec):
        monkeypatch.setattr(before_imports.PathFinder, "find_spec", lambda name, found=found: found)
        before_imports.load_libraries()
    before_imports.load_each({str(tmp_path / "none.so"): os.RTLD_NOW})


def test_a_system_without_proc_has_all_of_its_memory(monkeypatch):
    def without_proc(path, *arguments):
        if str(path).startswith("/proc/"):
            raise FileNotFoundError(path)
        return open(path, *arguments)

    monkeypatch.setattr(free_memory, "open", without_proc, raising=False)
    assert before_imports.free_host_memory() > 1 << 27

"""Imports of commands do less (host/quick_imports.py), and leave what was there before."""

import argparse
import collections
import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from host.quick_imports import NEED_KERNELS, CompiledTexts, finish, quicken

ROOT = Path(__file__).parents[1]
BEGIN = """
import argparse, os, sys
from pathlib import Path
from host.quick_imports import finish, quicken

quicken(argparse.Namespace(compile_cache=Path(sys.argv[1])))
import torch
import torch.nn.functional as F

def is_postponed():
    return not {"torch._decomp", "torch._prims", "torch._refs"} & sys.modules.keys()
"""
# Every family's model, in bytes and in packed formats, and its caches, without the kernels.
PLAN = """
from formats.kv_cache import KV_CACHES
from models import ARCHITECTURES, build_model
from models.random_weights import first_layers, number_format
from runtime.memory import cache_bytes
from tp import ModelShard

finish()
assert is_postponed()
families = {args.family: args for args in reversed(ARCHITECTURES.values())}
for args in families.values():
    lists = [layers for name, layers in vars(args).items() if name.endswith("_layers") and layers]
    last = max((0, *args.dense_layers, *(layers[0] for layers in lists)))
    args = first_layers(args, min(args.n_layer, last + 2))  # of all kinds
    model = build_model(args, torch.bfloat16)
    for kind in KV_CACHES.values():
        try:
            cache_bytes(model, 1, 300, kind, torch.bfloat16)
        except ValueError:  # the family has no such cache
            pass
    for mode in ("int4", "int8", "mxfp4"):
        try:
            format = number_format(mode, args)
        except ValueError:  # its sizes do not fit into the format's groups
            continue
        ModelShard(args, format | {"dtype": "bf16"})
assert is_postponed()
"""
# Arguments are "NAME:CODE". Each CODE runs in a copy of this process, which has imported torch
# alone. Then the kernels of the meta device are there, and NAME is; without a NAME they are not.
NEED = """
def check(needed, code):
    assert is_postponed()
    exec(code, globals())
    if not needed:
        assert is_postponed()
        return
    finish()
    rows, index = torch.empty(5, 4, device="meta"), torch.empty(2, dtype=torch.long, device="meta")
    assert F.embedding(index, rows).shape == (2, 4)
    for name in ("torch._meta_registrations", needed):
        module = sys.modules[name]
        assert Path(module.__file__).is_file() and module.__spec__.name == name
        assert module.__spec__.loader is module.__loader__
        parent, _, leaf = name.rpartition(".")
        assert getattr(sys.modules[parent], leaf) is module

for needed in sys.argv[2:]:
    name, _, code = needed.partition(":")
    child = os.fork()
    if not child:
        check(name, code or f"import {name}")
        os._exit(0)  # an error before this ends the copy with a traceback and 1
    assert os.waitpid(child, 0)[1] == 0, needed
"""


def run(*arguments: str) -> None:
    command = [sys.executable, "-c", BEGIN + NEED, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr


NEEDED_QUICKLY = "torch._dynamo"  # which imports the others
OTHERS = sorted(NEED_KERNELS - {"torch._inductor", NEEDED_QUICKLY})


@pytest.mark.parametrize(
    "names",
    (
        pytest.param((f":{PLAN}", NEEDED_QUICKLY), id="quick"),
        pytest.param(OTHERS, id="others", marks=pytest.mark.slow),
    ),
)
def test_what_needs_the_kernels_of_the_meta_device_imports_them(tmp_path, names):
    """Modules of PyTorch, and arithmetic of this project; to plan models and caches does not."""
    code = "from models import import_meta_kernels as need\nneed()"
    run(str(tmp_path), *names, f"torch._decomp:{code}")


def make_classes() -> list:
    """Return values of classes that are made of text."""
    data = dataclasses.make_dataclass("Data", [("a", int), ("b", str, "x")], frozen=True)
    pair = collections.namedtuple("Pair", "left right")
    return [repr(data(1)), data(2) == data(2), hash(data(3)) == hash(data(3)), pair(1, right=2)[1]]


def test_texts_are_compiled_once(tmp_path, monkeypatch):
    options = argparse.Namespace(compile_cache=tmp_path)
    monkeypatch.setattr(sys, "argv", ["/x/program.py"])
    expected = make_classes()
    quicken(options)
    assert make_classes() == expected
    finish()
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("texts-program-")
    before, written = file.read_bytes(), file.stat().st_mtime_ns
    texts = CompiledTexts(file)
    assert len(texts.found) > 4
    quicken(options)
    monkeypatch.setattr("builtins.compile", None)  # what is called now fails
    assert make_classes() == expected
    monkeypatch.undo()
    finish()
    assert (file.read_bytes(), file.stat().st_mtime_ns) == (before, written)


@pytest.mark.parametrize("damage", [b"", b"no code", b"i\x01\x00\x00\x00", b"\xfb" * 100])
def test_a_damaged_file_of_texts_is_replaced(tmp_path, damage):
    file = tmp_path / "texts"
    file.write_bytes(damage)
    texts, namespace = CompiledTexts(file), {}
    assert texts.run("eval", "1 + 2", {}) == 3
    texts.run("exec", "x = 5", {}, namespace)
    texts.write()
    assert namespace == {"x": 5}
    assert CompiledTexts(file).found.keys() == {("eval", "1 + 2"), ("exec", "x = 5")}
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


def test_texts_that_are_no_longer_used_leave_the_file(tmp_path):
    for text in ("1", "2"):
        texts = CompiledTexts(tmp_path / "texts")
        assert texts.run("eval", text) == int(text)
        texts.write()
    assert CompiledTexts(tmp_path / "texts").found.keys() == {("eval", "2")}


def test_a_frame_knows_its_module_and_all_is_undone(tmp_path):
    original, finders = inspect.getmodule, list(sys.meta_path)
    quicken(argparse.Namespace(compile_cache=tmp_path / "file" / "x"))
    try:
        frame = inspect.currentframe()
        assert inspect.getmodule(frame) is sys.modules[__name__]
        assert inspect.getmodule(make_classes) is sys.modules[__name__]
        assert inspect.getmodule(3) is None
        assert "exec" in vars(dataclasses) and "eval" in vars(collections)
    finally:
        finish()
    assert inspect.getmodule is original and sys.meta_path == finders  # torch was there
    assert "exec" not in vars(dataclasses) and "eval" not in vars(collections)


def test_a_cache_that_cannot_be_made_stops_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    quicken(argparse.Namespace(compile_cache=tmp_path / "file" / "x"))
    try:
        assert "exec" not in vars(dataclasses)
        assert make_classes()
    finally:
        finish()

"""A family is one file and its rows in models/__init__.py: without them, all others still run."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from models import FAMILIES

ROOT = Path(__file__).parents[1]
FILES = sorted({type(family).__module__.split(".")[1] for family in FAMILIES.values()})
FAST = ("deepseek",)  # a file of two families
# The finder of an editable installation would find the removed file in the repository.
WITHOUT_EDITABLE = """
import sys

sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in getattr(f, "__module__", "")]
"""
# Convert a checkpoint in Hugging Face layout and print 8 greedy tokens.
DECODE = """
from generate import load_model
from models.converter import convert
from runtime.sampling import Sampling
from runtime.session import Session

source, target, *ids = sys.argv[1:]
model = load_model(convert(source, target, dtype="fp32", progress=False), "cpu")
print(*Session(model, 64).stream(list(map(int, ids)), 8, Sampling(temperature=0)))
"""
# Print the errors for a family by its name, and by its config.json.
REFUSE = """
from models import args_from_hf, family_named

for read, value in ((family_named, sys.argv[1]), (args_from_hf, {"model_type": sys.argv[1]})):
    try:
        read(value)
    except ValueError as error:
        print(error)
"""


def copy_code(target: Path) -> None:
    """Copy the repository's packages and scripts."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    ignore = shutil.ignore_patterns("__pycache__")
    for package in tools["packages"]:
        if "." not in package:
            shutil.copytree(ROOT / package, target / package, ignore=ignore)
    for path in ROOT.glob("*.py"):
        shutil.copy(path, target)


def copy_without(file: str, target: Path) -> list[str]:
    """Copy the repository's code without models/FILE.py; return the names of its families."""
    copy_code(target)
    (target / "models" / f"{file}.py").unlink()
    registry = target / "models" / "__init__.py"
    registry.write_text(without_family(registry.read_text(), file))
    families = FAMILIES.values()
    return [f.name for f in families if type(f).__module__ == f"models.{file}"]


def without_family(registry: str, file: str) -> str:
    """Remove the import of models.FILE and the rows of its classes; nothing else may name them."""
    lines, classes = registry.splitlines(keepends=True), []
    for node in ast.parse(registry).body:
        if isinstance(node, ast.ImportFrom) and node.module == f"models.{file}":
            classes += [alias.name for alias in node.names]
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    assert classes
    row = re.compile(rf'    "\w+": ({"|".join(classes)})\(\),\n')
    kept = [line for line in lines if not row.fullmatch(line)]
    assert len(lines) - len(kept) == len(classes)
    text = "".join(kept)
    assert not re.search(rf"\b({'|'.join(classes)})\b", text)
    return text


def run(code: str, copy: Path, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WITHOUT_EDITABLE + code, *arguments]
    found = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "file", [pytest.param(f, marks=() if f in FAST else pytest.mark.slow) for f in FILES]
)
def test_other_families_run_without_this_one(file, make_family, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    removed = copy_without(file, copy)
    other = make_family("olmoe" if file == "mixtral" else "mixtral")
    ids = torch.tensor([[5, 17, 3, 141, 59]])
    want = other.peer.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=8,
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
    )
    paths = str(other.hf_directory), str(tmp_path / "out")
    output = run(DECODE, copy, *paths, *map(str, ids[0].tolist()))
    assert list(map(int, output.split())) == want[0, ids.shape[1] :].tolist()
    for name in removed:
        errors = run(REFUSE, copy, name).splitlines()
        assert len(errors) == 2 and all("is not supported" in line for line in errors)

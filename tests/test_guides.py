"""What docs and examples promise: a guide followed step by step, an example that forks the core."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from generate import EMBEDDED
from tests.test_family_removal import WITHOUT_EDITABLE, copy_code, copy_without

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs/adding_a_format.md").read_text()
MODEL_GUIDE = (ROOT / "docs/adding_a_model.md").read_text()
BETWEEN = "\n---\n"
# Commands, one after the other in one process: importing PyTorch takes 3 s.
BOTH = f"""
import json, runpy, sys
for line in json.loads(sys.argv[1]):
    sys.argv = line
    try:
        runpy.run_path(line[0], run_name="__main__")
    except SystemExit as ended:
        assert not ended.code, ended.code
    print({BETWEEN!r}, end="")
"""
IMPORT = re.compile(r"^from formats\.words import .*\n", re.M)


def step(number: int) -> str:
    """Return the text of a step."""
    return re.search(rf"^## Step {number}:.*?(?=^## )", GUIDE, re.M | re.S)[0]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def apply(diff: str, path: Path) -> None:
    """Insert a diff's added lines behind the lines that stand before them."""
    text, before = path.read_text(), ""
    for line in diff.splitlines():
        if line.startswith("+"):
            assert text.count(before) == 1, before
            text = text.replace(before, f"{before}{line[1:]}\n")
        elif not line.startswith("@@"):
            before = f"{line[1:]}\n"
            assert before in text
    path.write_text(text)


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """Return a copy of the code, which imports nothing of the repository."""
    target = tmp_path_factory.mktemp("guide")
    copy_code(target)
    shutil.copytree(EMBEDDED, target / EMBEDDED.relative_to(ROOT))
    (target / "sitecustomize.py").write_text(WITHOUT_EDITABLE)
    return target


def run(copy: Path, *arguments: str) -> str:
    """Run a command of the guide in the copy; return what it prints."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=copy,
        capture_output=True,
        text=True,
        env={
            "PATH": os.environ["PATH"],  # by which g++ finds its own programs
            "PYTHONPATH": str(copy),
            "HOME": str(copy),
            "OMP_NUM_THREADS": "1",
        },
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_errors(found: str) -> None:
    """Check the errors of products that check.py prints, against the guide's bounds."""
    rows = re.findall(r"torch\.(\w+): gather_gated (\S+), gather (\S+), grouped (\S+)", found)
    assert [dtype for dtype, *_ in rows] == ["float32", "bfloat16"]
    for dtype, *errors in rows:
        assert max(map(float, errors)) < (1e-5 if dtype == "float32" else 4e-3), (dtype, errors)


@pytest.mark.slow
def test_the_guide_to_a_format_runs(copy, directory, tmp_path):
    file = copy / "formats/int5.py"
    (code,), (diff,), (check,) = (
        blocks(step(1), "python"),
        blocks(step(2), "diff"),
        blocks(step(3), "python"),
    )
    file.write_text(code)
    apply(diff, copy / "formats/__init__.py")
    (copy / "check.py").write_text(check)
    found = run(copy, "check.py", "int5")
    promised = re.search(r"It prints.*?:\n\n(.*?)\n\n", step(3), re.S)[1]
    for line, expected in zip(found.splitlines(), promised.splitlines(), strict=True):
        assert re.sub(r"[\d.e+-]+", "", line) == re.sub(r"[\d.e+-]+", "", expected.strip())
    assert "bits a weight      5.125" in found
    check_errors(found)

    method, function, imports = blocks(step(4), "python")
    plain, fast = IMPORT.sub(lambda _: imports, code, count=1), f"{method}\n\n{function}"
    file.write_text(f"{plain.rstrip()}\n\n{fast}")
    check_errors(run(copy, "check.py", "int5"))

    target = tmp_path / "model_int5"
    quantizing = "--checkpoint_path", str(directory), "--output_dir", str(target), "--mode", "int5"
    options = "--checkpoint_path", str(target), "--prompt", "import os", "--max_new_tokens", "20"
    lines = json.dumps([["quantize.py", *quantizing], ["generate.py", *options]])
    printed, text, _ = run(copy, "-c", BOTH, lines).split(BETWEEN)
    assert str(target) in printed and len(text) > 20


@pytest.fixture(scope="module")
def family_copy(tmp_path_factory) -> Path:
    """Return a copy without Qwen2-MoE, into which the guide to a model has put it again."""
    target = tmp_path_factory.mktemp("family")
    copy_without("qwen2_moe", target)
    shutil.copytree(ROOT / "tests", target / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("checkpoints", "scripts"):
        shutil.copytree(ROOT / folder, target / folder, dirs_exist_ok=True)
    shutil.copy(ROOT / "pyproject.toml", target)
    (target / "sitecustomize.py").write_text(WITHOUT_EDITABLE)
    (target / "models/qwen2_moe.py").write_text("\n\n".join(blocks(MODEL_GUIDE, "python")))
    (diff,) = blocks(MODEL_GUIDE, "diff")
    apply(diff, target / "models/__init__.py")
    return target


def commands(guide: str) -> list[str]:
    """Return the commands of a guide's tests."""
    return re.findall(r"^    python -m (pytest .*)$", guide, re.M)


def test_the_guide_to_a_model_is_its_family(family_copy):
    """So `tests/test_model.py -k qwen2_moe` holds the guide's code to transformers, too."""
    for name in ("qwen2_moe", "__init__"):
        path = Path("models", f"{name}.py")
        assert (family_copy / path).read_text() == (ROOT / path).read_text(), name


@pytest.mark.slow
@pytest.mark.parametrize("command", commands(MODEL_GUIDE))
def test_the_guide_to_a_model_runs(family_copy, command):
    """Its tests, which compare with transformers."""
    # The copy's folder is the one that a process imports; importing it takes 3 s.
    where = "from importlib.util import find_spec; print(find_spec('models').origin)"
    assert run(family_copy, "-c", where).startswith(str(family_copy))
    found = run(
        family_copy, "-m", *command.replace("NAME", "qwen2_moe").split(), "-p", "no:cacheprovider"
    )
    assert re.search(r"\d+ passed", found) and "failed" not in found


EXPERIMENTS = re.findall(
    r"^    ((?:[A-Z_]+=\S+ )?python \S.*)$", (ROOT / "experiments/README.md").read_text(), re.M
)
WRITES = "convert_hf_checkpoint.py"  # into checkpoints/, which tests/test_tiny_hybrid.py does aside


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in EXPERIMENTS if WRITES not in c])
def test_a_command_of_the_experiments_runs(command):
    assert len(EXPERIMENTS) >= 5
    command = command.replace("python", sys.executable, 1)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_fork_of_the_router_changes_the_answer_and_leaves_the_kernels():
    done = subprocess.run(
        [sys.executable, ROOT / "examples/custom_routing.py"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    plain, scaled, declared = map(float, re.findall(r"perplexity ([\d.]+)", done.stdout))
    assert plain < scaled == declared
    assert re.findall(r"kernels for (\d) of 8 layers", done.stdout) == ["8", "0", "8"]

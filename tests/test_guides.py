"""What docs and examples promise: a guide followed step by step, an example that forks the core."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from generate import EMBEDDED
from tests.test_family_removal import WITHOUT_EDITABLE, copy_code

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs/adding_a_format.md").read_text()
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
        env={"PYTHONPATH": str(copy), "HOME": str(copy), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_errors(found: str) -> None:
    """Check the errors of products that check.py prints, against the guide's bounds."""
    rows = re.findall(r"torch\.(\w+): gather_gated (\S+), gather (\S+), grouped (\S+)", found)
    assert [dtype for dtype, *_ in rows] == ["float32", "bfloat16"]
    for dtype, *errors in rows:
        assert max(map(float, errors)) < (1e-5 if dtype == "float32" else 4e-3), (dtype, errors)


def test_the_guide_to_a_format_runs(copy):
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

    directory = run(copy, "-c", "import generate; print(generate.embedded_checkpoint())").strip()
    run(copy, "quantize.py", "--checkpoint_path", directory, "--mode", "int5")
    target = Path(directory).with_name("model_int5")
    options = "--checkpoint_path", str(target), "--prompt", "import os", "--max_new_tokens", "20"
    assert len(run(copy, "generate.py", *options)) > 20


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

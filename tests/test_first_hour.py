"""docs/first_hour.md, run as one shell script from the project's root into a folder of its own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from serve import build_parser

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "first_hour.md").read_text()
COMMANDS = "\n".join(re.findall(r"^```sh\n(.*?)^```", PAGE, re.S | re.M))


def test_the_page_names_scripts_and_ports_that_exist():
    scripts = set(re.findall(r"python ((?:\w+/)?\w+\.py)", PAGE))
    assert len(scripts) >= 5 and all((ROOT / name).exists() for name in scripts)
    line = re.search(r"python serve\.py (.+) &", COMMANDS)[1]
    assert build_parser().parse_args(line.split()).port == 8765


@pytest.mark.slow
def test_the_first_hour_runs(tmp_path):
    for name in ("answers.json", "text.txt", "small"):  # the page's outputs go here
        assert not (ROOT / name).exists()
    commands = re.sub(r"(?<=[ ])(small|answers\.json|text\.txt)\b", rf"{tmp_path}/\1", COMMANDS)
    bin = Path(sys.executable).parent
    environment = os.environ | {
        "PATH": f"{bin}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "OMP_NUM_THREADS": "1",
    }
    script = ["bash", "-eu", "-o", "pipefail", "-c", commands]
    run = subprocess.run(script, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    assert len(json.loads((tmp_path / "answers.json").read_text())["results"]) == 4
    assert "Traceback" not in run.stderr
    assert '"object": "text_completion"' in run.stdout or '"object":"text_completion"' in run.stdout
    first, second = re.findall(r"perplexity ([\d.]+)", run.stdout)
    assert float(first) < float(second) < 2 * float(first)

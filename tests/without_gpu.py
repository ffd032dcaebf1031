"""Runs the scripts that interpret or compile Triton kernels without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run_without_gpu(script: str, *arguments: str, given: object = None, **variables: str):
    """Run a script of tests/ in a process of its own -> the JSON of its last line.

    given: becomes its stdin, as JSON. variables: of its environment; Triton reads TRITON_INTERPRET
    when it is imported. Skips the test without Triton, or if Triton's private API has changed.
    """
    pytest.importorskip("triton", reason="ops/ needs triton")
    run = subprocess.run(
        [sys.executable, ROOT / "tests" / script, *arguments],
        cwd=ROOT,
        input=json.dumps(given),
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | variables,
    )
    if run.returncode and "ImportError" in run.stderr:
        pytest.skip(f"Triton's private API has changed: {run.stderr.splitlines()[-1]}")
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])

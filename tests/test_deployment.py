"""The Dockerfile and the systemd unit name what exists."""

import json
import re
import shlex
import tomllib
from pathlib import Path

from serve import build_parser
from server.app import Endpoints, make_app

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
UNIT = (ROOT / "scripts" / "moe-fast.service").read_text()


def test_the_image_starts_the_server_for_other_hosts():
    command = json.loads(re.search(r"^ENTRYPOINT (.+)$", DOCKERFILE, re.M)[1])
    assert command[:2] == ["python", "serve.py"]
    options = build_parser().parse_args(command[2:])
    assert options.host == "0.0.0.0"
    assert f"EXPOSE {options.port}\n" in DOCKERFILE
    assert hasattr(Endpoints, "health") and f"127.0.0.1:{options.port}/health" in DOCKERFILE
    assert '"/health"' in Path(make_app.__code__.co_filename).read_text()


def test_the_image_installs_an_extra_that_exists_and_runs_without_rights():
    extra = re.search(r"--editable '\.\[(\w+)\]'", DOCKERFILE)[1]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extra in project["optional-dependencies"]
    assert DOCKERFILE.index("\nUSER ") < DOCKERFILE.index("\nENTRYPOINT ")
    ignored = (ROOT / ".dockerignore").read_text().split()
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert not set(ignored) & {*packages["packages"], "constraints.txt", "pyproject.toml"}


def test_the_unit_starts_the_server_with_a_key_from_a_file():
    line = re.search(r"^ExecStart=((?:.+\\\n)*.+)$", UNIT, re.M)[1].replace("\\\n", " ")
    command = shlex.split(line)
    assert command[1] == "serve.py" and "--api_key" not in command
    build_parser().parse_args(command[2:])
    assert "EnvironmentFile=" in UNIT and "RestartPreventExitStatus=2" in UNIT

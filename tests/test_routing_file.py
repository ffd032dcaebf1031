"""generate.py --save_routing: the experts of each new token."""

import errno
import json
from pathlib import Path

import pytest
import torch

from cli.conversation import save_messages
from cli.generate_options import build_parser, check_options
from cli.routing_file import RoutingRecorder
from cli.script_options import check_study, study_parser
from generate import check_trace, run
from runtime.loading import load_model
from runtime.sampling import Sampling
from runtime.session import Session
from tokenizer import load_tokenizer

GREEDY = ("--temperature", "0", "--dtype", "fp32", "--ignore_eos")


def test_experts_are_those_of_the_pass_that_chose_each_token(directory, tmp_path, capsys):
    path, prompts = tmp_path / "routing.json", ("import os\n", "def main():\n")
    path.write_text("an earlier file")
    arguments = [f"--prompt={prompt}" for prompt in prompts]
    arguments += ["--checkpoint_path", str(directory), "--save_routing", str(path)]
    run(build_parser().parse_args([*arguments, *GREEDY, "--max_new_tokens", "5"]))
    found = json.loads(path.read_text())
    assert found["moe_fast_routing"] == 1 and found["format"] == "bf16"
    assert [answer["prompt"] for answer in found["answers"]] == list(prompts)
    assert list(tmp_path.iterdir()) == [path]
    model, tokenizer = load_model(directory, "cpu", torch.float32), load_tokenizer(directory)
    session = Session(model, 64)
    session.watch = True
    for prompt, answer in zip(prompts, found["answers"], strict=True):
        ids = tokenizer.encode(prompt)
        assert len(answer["tokens"]) == len(answer["experts"]) == len(answer["weights"]) == 5
        for text, experts, weights in zip(
            *(answer[name] for name in ("tokens", "experts", "weights")), strict=True
        ):
            session.reset()
            token = next(session.stream(ids, 1, Sampling(temperature=0)))
            assert tokenizer.token_bytes(token).decode() == text
            assert session.details[0].experts == experts
            expected = torch.tensor(session.details[0].weights)
            torch.testing.assert_close(torch.tensor(weights), expected, atol=1e-4, rtol=0)
            ids.append(token)


def test_a_full_disk_is_that_of_the_file(tmp_path, monkeypatch):
    def fail(self, *_):
        raise OSError(errno.ENOSPC, "No space left on device")  # a write knows no name

    recorder = RoutingRecorder(tmp_path / "x.json", "tiny", "bf16")
    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(
        ValueError, match=r"--save_routing: .*/x\.json: No space left on device; free"
    ):
        recorder.write()
    with pytest.raises(ValueError, match=r"^.*/chat\.json: No space left on device; free"):
        save_messages([], tmp_path / "chat.json")


@pytest.mark.parametrize(
    "options", (("--speculate", "lookup"), ("--interactive",), ("--save_routing", "/nowhere/x"))
)
def test_routing_that_cannot_be_saved_is_refused(options, tmp_path):
    given = build_parser().parse_args(["--save_routing", str(tmp_path / "x"), *options])
    with pytest.raises(ValueError, match="--save_routing"):
        check_options(given)


def test_a_part_of_a_trace_is_refused(tmp_path):
    trace = tmp_path / "x.json"
    trace.write_text('{"a": [\n1]}\n')
    check_trace(trace)
    for text in ("", '{"a": [\n', '{"a": [{"b": 1},'):
        trace.write_text(text)
        (tmp_path / "x.json.tmp").write_text(text)
        with pytest.raises(ValueError, match=r"--profile .*x\.json: it could not be written"):
            check_trace(trace)
        assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    with pytest.raises(ValueError):
        check_trace(tmp_path / "none")


def test_a_file_that_is_read_is_not_written(tmp_path):
    """By whatever name."""
    prompts, link = tmp_path / "prompts.txt", tmp_path / "link"
    prompts.write_text("import os")
    link.symlink_to(prompts)
    for first, second in (
        (("--prompts_file", prompts), ("--save_routing", link)),
        (("--prompts_file", link), ("--profile", prompts)),
        (("--profile", tmp_path / "x"), ("--save_routing", tmp_path / "." / "x")),
    ):
        given = build_parser().parse_args([str(part) for part in (*first, *second)])
        with pytest.raises(ValueError, match=f"{first[0]} and {second[0]} are one file"):
            check_options(given)
    options = ["--text_file", str(prompts), "--profile", str(link)]
    with pytest.raises(ValueError, match="--text_file and --profile are one file"):
        check_study(study_parser().parse_args(options))

"""A staged directory: whole or absent after any end of its process, and nothing left for ever."""

import json
import multiprocessing
import os
import signal

import pytest

from cli.staging import LOCK, StagedDirectory, recover

fork = multiprocessing.get_context("fork")


def names(directory) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def put(directory, text: str) -> None:
    directory.mkdir()
    (directory / "file").write_text(text)


def stage(target, text: str) -> None:
    staged = StagedDirectory(target)
    try:
        (staged.path / "file").write_text(text)
        staged.commit()
    finally:
        staged.close()


def test_it_appears_at_commit(tmp_path):
    target = tmp_path / "out"
    staged = StagedDirectory(target)
    (staged.path / "file").write_text("new")
    assert not target.exists() and len(names(tmp_path)) == 1
    staged.commit()
    staged.close()
    assert names(tmp_path) == ["out"] and names(target) == ["file"]


def test_it_replaces_what_is_there(tmp_path):
    put(tmp_path / "out", "old")
    stage(tmp_path / "out", "new")
    assert names(tmp_path) == ["out"] and (tmp_path / "out/file").read_text() == "new"


def test_close_without_commit_removes_it(tmp_path):
    staged = StagedDirectory(tmp_path / "out")
    (staged.path / "deep/er").mkdir(parents=True)
    (staged.path / "link").symlink_to(tmp_path)
    staged.close()
    assert names(tmp_path) == []


def test_recover_leaves_living_writers_and_others_files(tmp_path):
    staged = StagedDirectory(tmp_path / "out")
    for name in (".mine.01234567.tmp", ".mine.01234567.old", "plain"):
        put(tmp_path / name, "the user's")
    before = names(tmp_path)
    process = fork.Process(target=recover, args=(tmp_path,))
    process.start()
    process.join()
    assert names(tmp_path) == before
    staged.close()
    assert len(names(tmp_path)) == 3


@pytest.mark.parametrize("number", (signal.SIGKILL, signal.SIGTERM))
def test_a_killed_writer_is_cleaned_up_by_the_next(tmp_path, number, caplog):
    def write_and_die():
        staged = StagedDirectory(tmp_path / "out")
        (staged.path / "file").write_text("half")
        os.kill(os.getpid(), number)

    process = fork.Process(target=write_and_die)
    process.start()
    process.join()
    assert len(names(tmp_path)) == 1
    stage(tmp_path / "other", "new")
    assert names(tmp_path) == ["other"]
    [record] = caplog.records
    assert "left behind by a run that was killed" in record.getMessage()


def killed_at_rename(target, count: int) -> None:
    """Stage into `target`, and die before the rename with this number."""
    from pathlib import Path

    rename, calls = Path.rename, []

    def counted(self, other):
        calls.append(other)
        if len(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(self, other)

    Path.rename = counted
    stage(target, "new")


@pytest.mark.parametrize("count, text", ((1, "old"), (2, "new")))
def test_a_kill_around_the_renames_leaves_old_or_new(tmp_path, count, text):
    target = tmp_path / "out"
    put(target, "old")
    process = fork.Process(target=killed_at_rename, args=(target, count))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    recover(tmp_path)
    assert names(tmp_path) == ["out"] and names(target) == ["file"]
    assert (target / "file").read_text() == text


def test_an_interruption_after_the_renames_leaves_the_new(tmp_path, monkeypatch, caplog):
    put(tmp_path / "out", "old")

    def interrupted(path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("cli.staging.shutil.rmtree", interrupted)
        stage(tmp_path / "out", "new")  # returns: it would be wrong that nothing was written
    assert "the next run tries again" in caplog.text
    recover(tmp_path)
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == ["file"]
    assert (tmp_path / "out/file").read_text() == "new"


@pytest.mark.parametrize(
    "record",
    (
        b"",
        b"{",
        b"[]",
        b'{"target": 1, "backup": 2}',
        json.dumps({"target": "out", "backup": "precious"}).encode(),
        json.dumps({"target": "..", "backup": "..."}).encode(),
        json.dumps({"target": "../x", "backup": ".../x.01234567.old"}).encode(),
        b"\xff" * 5000,
    ),
)
def test_a_foreign_record_removes_nothing_else(tmp_path, record):
    put(tmp_path / "precious", "the user's")
    put(tmp_path / "out", "whole")
    (tmp_path / "out" / LOCK).write_bytes(record)
    recover(tmp_path)
    assert names(tmp_path) == ["out", "precious"] and names(tmp_path / "out") == ["file"]


def test_every_step_may_be_the_last(tmp_path):
    """Die before each file operation in turn: the target is absent, old or new, the rest clean."""
    for replace in (False, True):
        for step in range(1, 60):
            folder = tmp_path / f"{replace}-{step}"
            folder.mkdir()
            if replace:
                put(folder / "out", "old")
            process = fork.Process(target=die_at, args=(folder, step))
            process.start()
            process.join()
            recover(folder)
            whole = ["out"] if (folder / "out").exists() else []
            assert names(folder) == whole, (replace, step)
            if replace or whole:
                assert names(folder / "out") == ["file"], (replace, step)
                assert (folder / "out/file").read_text() in ("new", "old")
            if process.exitcode == 0:
                break
        assert process.exitcode == 0 and (folder / "out/file").read_text() == "new"
        assert step > 8


def die_at(folder, step: int) -> None:
    """Stage `folder/out`, killed before its file operation number `step`."""
    import sys

    seen = []

    def hook(event, arguments):
        touches = event == "open" or event.startswith(("os.", "shutil."))
        if touches and any(str(folder) in str(argument) for argument in arguments):
            seen.append(event)
            if len(seen) == step:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    stage(folder / "out", "new")

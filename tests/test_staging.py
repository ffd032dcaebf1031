"""A staged directory: whole or absent after any end of its process, and nothing left for ever."""

import json
import multiprocessing
import os
import signal

import pytest

from host.resumable import ResumableDirectory, partial_path, remove_partial
from host.staging import LOCK, StagedDirectory, recover, remove, remove_tree, take_lock

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


def test_what_another_process_has_made_stays(tmp_path):
    """Both began before it was there. A reader of the first one keeps its files."""
    target = tmp_path / "out"
    first, second = StagedDirectory(target), StagedDirectory(target)
    for staged, text in ((first, "first"), (second, "second")):
        (staged.path / "file").write_text(text)
    first.commit(replace=False)
    with open(target / "file") as reader, pytest.raises(OSError):
        second.commit(replace=False)
        assert os.fstat(reader.fileno()).st_nlink
    first.close()
    second.close()
    assert names(tmp_path) == ["out"] and (target / "file").read_text() == "first"


def test_a_partial_directory_leaves_what_another_process_has_made(tmp_path):
    target = tmp_path / "out"
    staged = ResumableDirectory(target, {})
    (staged.path / "file").write_text("second")
    put(target, "first")
    with pytest.raises(OSError):
        staged.commit(replace=False)
    assert (target / "file").read_text() == "first"
    staged.commit()
    staged.close()
    assert names(tmp_path) == ["out"] and (target / "file").read_text() == "second"


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
        patched.setattr("host.staging.shutil.rmtree", interrupted)
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
        b"[" * 5000,
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


# Links: they are removed or replaced, and their targets never change ------------------------------


@pytest.fixture
def precious(tmp_path):
    """A folder of the user with a file, a folder, and a lock file that may be anybody's."""
    folder = tmp_path / "home/precious"
    folder.parent.mkdir()
    put(folder, "the user's")
    put(folder / "deep", "the user's")
    (folder / LOCK).write_text("the user's")
    before = contents(folder)
    yield folder
    assert contents(folder) == before


def contents(folder) -> dict[str, str]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_text() for path in paths}


def test_staging_replaces_a_link(tmp_path, precious):
    (tmp_path / "out").symlink_to(precious)
    stage(tmp_path / "out", "new")
    assert names(tmp_path) == ["home", "out"] and not (tmp_path / "out").is_symlink()
    for place in (tmp_path / "gone", precious):
        (tmp_path / "link").symlink_to(place)
        remove_tree(tmp_path / "link")
    assert names(tmp_path) == ["home", "out"]


@pytest.mark.parametrize("name", (".out.01234567.tmp", ".out.01234567.old", "out"))
def test_recover_leaves_links(tmp_path, precious, name):
    record = {"target": "out", "backup": ".out.01234567.old"}
    (precious / LOCK).write_text(json.dumps(record))
    before = contents(precious)
    (tmp_path / name).symlink_to(precious)
    recover(tmp_path)
    assert contents(precious) == before and (tmp_path / name).is_symlink()
    (precious / LOCK).write_text("the user's")


@pytest.mark.parametrize("odd", ("link", "fifo", "directory"))
def test_a_lock_is_a_file_of_its_own(tmp_path, precious, odd):
    place = tmp_path / "out"
    place.mkdir()
    if odd == "link":
        (place / LOCK).symlink_to(precious / "file")
        os.close(take_lock(place / LOCK, create=True))
        assert not (place / LOCK).is_symlink()
        return
    os.mkfifo(place / LOCK) if odd == "fifo" else (place / LOCK).mkdir()
    with pytest.raises(OSError):
        take_lock(place / LOCK, create=True)


PARTS = ("", "checkpoint", "downloads", "progress.jsonl", LOCK, "checkpoint/one")


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("act", ("resume", "other", "remove"))
def test_a_partial_directory_follows_no_link(tmp_path, precious, part, act):
    """Each of its parts in turn is a link to something of the user's."""
    target = tmp_path / "model"
    first = ResumableDirectory(target, {"of": 1})
    (first.path / "one").write_text("the user's")
    first.add({"file": "one", "bytes": 10})
    first.close()
    link = partial_path(target) / part
    is_file = link.is_file()
    if os.path.lexists(link):
        remove(link)
    link.symlink_to(precious / "file" if is_file else precious)
    if act == "remove":
        remove_partial(target)
    else:
        again = ResumableDirectory(target, {"of": 1 if act == "resume" else 2})
        kept = part in ("downloads", LOCK) and act == "resume"
        assert set(again.files) == ({"one"} if kept else set())
        (again.path / "two").write_text("new")
        again.add({"file": "two", "bytes": 3})
        again.commit()
        again.close()
        assert (target / "two").is_file() and not (target / "two").is_symlink()
    assert not os.path.lexists(partial_path(target))


def test_damaged_parts_are_made_again(tmp_path, caplog):
    def is_whole(path, entry):
        return path.read_text() == entry["text"]

    entries = (
        *({"file": name, "bytes": 1, "text": "1"} for name in "abc"),
        *({"file": "../out", "bytes": 1, "text": "1"}, {"file": 1}, {"bytes": 1}, [], None, 3),
    )
    first = ResumableDirectory(tmp_path / "model", {})
    for name in "abcd":
        (first.path / name).write_text("1")
    (first.root / "out").write_text("1")
    for entry in entries:
        first._append(entry)
    (first.path / "b").write_text("2")  # the size is the same
    first.close()
    again = ResumableDirectory(tmp_path / "model", {}, is_whole)
    again.close()
    assert set(again.files) == {"a", "c"} and names(again.path) == ["a", "c"]
    assert "b is damaged: making it again" in caplog.text

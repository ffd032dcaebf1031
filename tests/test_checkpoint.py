"""The on-disk format: round trips, failed writes, damaged files."""

import json
import os
import re
import resource
import stat
import sys
import tempfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
from conftest import any_text
from hypothesis import given, settings
from hypothesis import strategies as st

import checkpoint
from benchmarks.load_checkpoint import Peak
from checkpoint import DTYPES, Checkpoint, SafetensorsFile, Writer
from host.staging import StagedDirectory

ARGS = {"dim": 64, "dense_layers": [0, 2], "rope_theta": 1e6}
FORMAT = {"name": "int4", "group": 128}


def some_tensors() -> dict:
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(-100, 100, (3, 5, 7), generator=generator)
    tensors = {name: random.to(dtype) for name, (dtype, _) in DTYPES.items()}
    tensors |= {
        "scalar": torch.tensor(1.5),
        "strided": torch.arange(24.0).view(4, 6).t(),
        "empty": torch.empty(0, 3),
    }
    return tensors


def write(target: Path, force: bool = False, args=ARGS) -> dict:
    tensors = some_tensors()
    other = {"second": torch.randn(100, 100).bfloat16()}
    with Writer(target, args, FORMAT, force) as writer:
        writer.write("layer_00.safetensors", tensors)
        writer.write("rest.safetensors", other)
    return tensors | other


def contents(directory: Path) -> dict:
    return {
        path.relative_to(directory): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool((a.float() == b.float()).all())


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """A valid checkpoint, shared: do not modify it."""
    target = tmp_path_factory.mktemp("written") / "model_int4"
    write(target)
    return target


@pytest.fixture
def copied(tmp_path, written) -> Path:
    """A copy of the valid checkpoint, for the test to damage."""
    target = tmp_path / "model_int4"
    target.mkdir()
    for name, data in contents(written).items():
        (target / name).write_bytes(data)
    return target


def test_round_trip(tmp_path):
    target = tmp_path / "model_int4"
    tensors = write(target)
    opened = Checkpoint(target)
    assert opened.args == ARGS and opened.format == FORMAT
    assert opened.tensors == {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()
    }
    for name, tensor in tensors.items():
        assert same(opened.read(name), tensor), name
        assert opened.nbytes(name) == tensor.nbytes
    opened.verify(progress=False)
    assert sorted(os.listdir(tmp_path)) == ["model_int4"]


def test_files_are_exchanged_with_the_safetensors_library(written, tmp_path):
    tensors = some_tensors()
    loaded = safetensors.torch.load_file(written / "layer_00.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(same(loaded[name], tensor) for name, tensor in tensors.items())
    safetensors.torch.save_file(
        {n: t.contiguous() for n, t in tensors.items()}, tmp_path / "x", {"made": "elsewhere"}
    )
    shard = SafetensorsFile(tmp_path / "x")
    assert shard.tensors.keys() == tensors.keys()
    assert all(same(shard.read(name), tensor) for name, tensor in tensors.items())


def test_an_unaligned_tensor_is_read(tmp_path):
    header = {
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
    }
    text = json.dumps(header).encode()
    data = bytes([7, 8, 9]) + torch.tensor([1.25, -2.5]).numpy().tobytes()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + data)
    tensor = SafetensorsFile(tmp_path / "x").read("b")
    assert tensor.tolist() == [1.25, -2.5] and tensor.data_ptr() % 4 == 0


@pytest.mark.parametrize(
    "spans",
    [([0, 4], [8, 12]), ([0, 8], [4, 12]), ([4, 8], [8, 12])],
    ids=["gap", "overlap", "late"],
)
def test_gaps_and_overlaps_between_tensors_are_refused(tmp_path, spans):
    shapes = [(end - start) // 4 for start, end in spans]
    header = {
        name: {"dtype": "F32", "shape": [n], "data_offsets": span}
        for name, n, span in zip("ab", shapes, spans, strict=True)
    }
    text = json.dumps(header).encode()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + bytes(12))
    with pytest.raises(ValueError, match="overlap or leave a gap"):
        SafetensorsFile(tmp_path / "x")


def test_written_tensors_are_aligned_to_their_element_size(written):
    path = written / "layer_00.safetensors"
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    assert header.keys() == some_tensors().keys()
    for name, entry in header.items():
        itemsize = SafetensorsFile(path).tensors[name][1].itemsize
        assert (start + entry["data_offsets"][0]) % itemsize == 0, name


def test_a_dtype_without_a_counterpart_is_refused_by_name(tmp_path):
    header = {"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}
    text = json.dumps(header).encode()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + bytes(1))
    with pytest.raises(ValueError, match="unsupported dtype F4 of a"):
        SafetensorsFile(tmp_path / "x")


def test_read_a_slice(written):
    opened, full = Checkpoint(written), some_tensors()["bf16"]
    for index in [
        (slice(1, 3),),
        (slice(None), slice(2, 4)),
        (slice(0, 2), slice(None), slice(5, 7)),
    ]:
        part = opened.read("bf16", index)
        assert same(part, full[index]) and part.is_contiguous()


def test_writing_to_a_tensor_changes_neither_the_file_nor_the_next_read(written):
    before = contents(written)
    opened = Checkpoint(written)
    opened.read("second").zero_()
    assert opened.read("second").any()
    assert contents(written) == before


def test_permissions_follow_the_umask(tmp_path):
    def mode(path: Path) -> int:
        return stat.S_IMODE(path.stat().st_mode)

    target = tmp_path / "model_int4"
    write(target)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    assert mode(target) == mode(tmp_path / "folder")
    assert {mode(path) for path in target.iterdir()} == {mode(tmp_path / "file")}


def test_a_file_that_changes_after_opening(copied):
    path = copied / "rest.safetensors"
    opened = Checkpoint(copied)
    opened.check_unchanged("second")
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(ValueError, match="has changed since it was opened; start again"):
        opened.check_unchanged("second")
    with pytest.raises(ValueError, match=r"cannot be read any more \(.+\); start again"):
        opened.read("second")
    path.unlink()
    for call in (opened.check_unchanged, opened.read):
        with pytest.raises(ValueError, match="cannot be read any more") as error:
            call("second")
        assert "\n" not in str(error.value)


def test_side_files(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"\x00\x01")
    with Writer(tmp_path / "out", ARGS, FORMAT) as writer:
        writer.copy(tmp_path / "tokenizer.model")
        writer.write_json("generation_config.json", {"eos_token_id": [1, 2]})
    assert (tmp_path / "out/tokenizer.model").read_bytes() == b"\x00\x01"
    assert json.loads((tmp_path / "out/generation_config.json").read_text()) == {
        "eos_token_id": [1, 2]
    }
    assert Checkpoint(tmp_path / "out").tensors == {}


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="reads memory from Linux's /proc"
)
def test_writing_and_reading_copy_nothing(tmp_path):
    tensor = torch.ones(128 << 18)  # 128 MiB
    other = torch.ones(128 << 18, dtype=torch.bfloat16)
    with Peak() as peak:
        with Writer(tmp_path / "out", ARGS, FORMAT) as writer:
            writer.write("x.safetensors", {"a": tensor, "b": other})
        read = Checkpoint(tmp_path / "out").read("a")
        assert read.sum() == tensor.numel()
    assert 0 < peak.bytes < 16 << 20


# Failed writes


@pytest.mark.parametrize("error", [RuntimeError("mine"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("force", [False, True])
def test_a_failed_write_leaves_what_was_there(tmp_path, error, force):
    if force:
        write(tmp_path / "out")
    before = contents(tmp_path)
    with pytest.raises(type(error)), Writer(tmp_path / "out", {}, FORMAT, force) as writer:
        writer.write("x.safetensors", {"a": torch.ones(3)})
        raise error
    assert contents(tmp_path) == before
    assert os.listdir(tmp_path) == (["out"] if force else [])


def test_an_existing_target_is_refused_without_force(tmp_path):
    write(tmp_path / "out")
    before = contents(tmp_path)
    with pytest.raises(ValueError, match="--force"):
        write(tmp_path / "out")
    assert contents(tmp_path) == before


def test_a_target_of_another_process_is_not_replaced_in_the_last_moment(tmp_path, monkeypatch):
    """It appears between the check and the rename."""
    commit = StagedDirectory.commit

    def late(staged, **options):
        monkeypatch.setattr(StagedDirectory, "commit", commit)
        write(tmp_path / "out")
        (tmp_path / "out" / "first").write_text("")
        commit(staged, **options)

    monkeypatch.setattr(StagedDirectory, "commit", late)
    with pytest.raises(ValueError, match="out exists; give --force to replace it"):
        write(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "first").is_file()


def test_a_file_is_written_once(tmp_path):
    with (
        pytest.raises(ValueError, match="File exists"),
        Writer(tmp_path / "out", {}, FORMAT) as writer,
    ):
        writer.write("x.safetensors", {"a": torch.ones(3)})
        writer.write("x.safetensors", {"b": torch.ones(3)})
    assert os.listdir(tmp_path) == []


def test_force_replaces_only_at_the_end(tmp_path):
    write(tmp_path / "out")
    with Writer(tmp_path / "out", {"new": 1}, FORMAT, force=True) as writer:
        writer.write("x.safetensors", {"a": torch.ones(3)})
        assert Checkpoint(tmp_path / "out").args == ARGS
    assert Checkpoint(tmp_path / "out").args == {"new": 1}
    assert not (tmp_path / "out/layer_00.safetensors").exists()
    assert os.listdir(tmp_path) == ["out"]


def test_force_replaces_only_a_checkpoint(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="not replaced"):
        write(tmp_path, force=True)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_a_failed_rename_restores_the_old_checkpoint(tmp_path, monkeypatch):
    write(tmp_path / "out")
    before, rename = contents(tmp_path), Path.rename

    def failing(self, target):
        if target == tmp_path / "out" and not (self / "layer_00.safetensors").exists():
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with (
        pytest.raises(ValueError, match="Input/output error"),
        Writer(tmp_path / "out", {}, FORMAT, True) as writer,
    ):
        writer.write("x.safetensors", {"a": torch.ones(3)})
    assert contents(tmp_path) == before and os.listdir(tmp_path) == ["out"]


def test_a_target_that_cannot_be_created(tmp_path):
    (tmp_path / "file").write_text("")
    for target in (tmp_path / "none" / "out", tmp_path / "file" / "out"):
        with pytest.raises(ValueError, match="cannot write"):
            write(target)


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path):
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, old[1]))
    try:
        with pytest.raises(ValueError, match="free some space") as error:
            write(tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert "\n" not in str(error.value)
    assert os.listdir(tmp_path) == []


# Damaged checkpoints


def edit(path: Path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


DAMAGE = {
    "no config": (lambda d: (d / "config.json").unlink(), "config.json is missing"),
    "config is not JSON": (
        lambda d: (d / "config.json").write_text("{"),
        "config.json cannot be read",
    ),
    "config is a list": (lambda d: (d / "config.json").write_text("[]"), "JSON object"),
    "another program's config": (
        lambda d: (d / "config.json").write_text("{}"),
        "not of a moe-fast checkpoint",
    ),
    "a later version": (
        lambda d: edit(d / "config.json", lambda c: c.update(moe_fast=99)),
        "format version 99",
    ),
    "no args": (lambda d: edit(d / "config.json", lambda c: c.pop("args")), "lacks its args"),
    "no index": (lambda d: (d / "index.json").unlink(), "index.json is missing"),
    "no files": (
        lambda d: edit(d / "index.json", lambda c: c.pop("files")),
        "index.json makes no sense",
    ),
    "no tensor entry": (
        lambda d: edit(d / "index.json", lambda c: c["tensors"].update(fp32=1)),
        "makes no sense",
    ),
    "a file outside": (
        lambda d: edit(
            d / "index.json", lambda c: c["files"].update({"../x": {"bytes": 1, "crc32": 1}})
        ),
        "outside",
    ),
    "a missing file": (lambda d: (d / "rest.safetensors").unlink(), "rest.safetensors is missing"),
    "a truncated file": (
        lambda d: os.truncate(d / "rest.safetensors", 9000),
        "rest.safetensors is damaged or truncated",
    ),
    "a file too long": (
        lambda d: os.truncate(d / "rest.safetensors", 90000),
        "rest.safetensors is damaged or truncated",
    ),
    "an empty file": (
        lambda d: os.truncate(d / "rest.safetensors", 0),
        "rest.safetensors is damaged or truncated",
    ),
    "another size": (
        lambda d: edit(d / "index.json", lambda c: c["files"]["rest.safetensors"].update(bytes=1)),
        "1 bytes",
    ),
    "another shape": (
        lambda d: edit(d / "index.json", lambda c: c["tensors"]["bf16"].update(shape=[5, 3, 7])),
        "bf16",
    ),
    "another dtype": (
        lambda d: edit(d / "index.json", lambda c: c["tensors"]["bf16"].update(dtype="fp16")),
        "bf16",
    ),
    "another file": (
        lambda d: edit(
            d / "index.json", lambda c: c["tensors"]["bf16"].update(file="rest.safetensors")
        ),
        "bf16",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_checkpoint(copied, case):
    damage, message = DAMAGE[case]
    damage(copied)
    with pytest.raises(ValueError, match=message) as error:
        Checkpoint(copied)
    assert "\n" not in str(error.value)


def test_verify_finds_one_flipped_bit(copied):
    path = copied / "rest.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    opened = Checkpoint(copied)
    with pytest.raises(ValueError, match=r"rest\.safetensors differs"):
        opened.verify(progress=False)


def test_an_edited_config_is_refused(copied):
    edit(copied / "config.json", lambda config: config["args"].update(rope_theta=1e4))
    with pytest.raises(ValueError, match=r"config\.json differs"):
        Checkpoint(copied)
    edit(copied / "index.json", lambda index: index.pop("config_crc32"))  # as version one wrote it
    Checkpoint(copied).verify(progress=False)


def test_a_hugging_face_directory_gets_the_command_that_converts_it(tmp_path):
    directory = tmp_path / "my model"
    directory.mkdir()
    (directory / "config.json").write_text(
        '{"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}'
    )
    with pytest.raises(ValueError, match="convert") as error:
        Checkpoint(directory)
    assert str(error.value).endswith(
        f"python convert_hf_checkpoint.py --checkpoint_dir '{directory}'"
    )
    write(directory / "model_bf16")
    with pytest.raises(ValueError, match=f"use {re.escape(str(directory / 'model_bf16'))}$"):
        Checkpoint(directory)


def test_no_such_directory(tmp_path):
    with pytest.raises(ValueError, match="not a directory"):
        Checkpoint(tmp_path / "none")


@st.composite
def damaged(draw, data: bytes, within: int):
    """`data` with some of its first `within` bytes changed, or truncated."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(0, 3))):
        changed[draw(st.integers(0, min(within, len(data)) - 1))] = draw(
            st.sampled_from(b'09-"[]{},:e\x00\xff') | st.integers(0, 255)
        )
    return bytes(changed[: draw(st.integers(0, len(data)) | st.just(len(data)))])


def read_all(files: dict) -> None:
    """Open, read and verify a checkpoint of these files; only a ValueError may be raised."""
    with tempfile.TemporaryDirectory() as directory:
        for path, value in files.items():
            (Path(directory) / path).write_bytes(value)
        try:
            opened = Checkpoint(directory)
            for tensor in opened.tensors:
                opened.read(tensor)
            opened.verify(progress=False)
        except ValueError as error:
            assert str(error)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_bytes_raise_only_value_errors(written, data):
    files = contents(written)
    name = data.draw(st.sampled_from(sorted(files)))
    files[name] = data.draw(damaged(files[name], within=2000))
    read_all(files)


ANY_JSON = (
    st.none()
    | st.booleans()
    | st.integers(-1, 9)
    | st.integers()
    | st.floats()
    | any_text(max_size=3)
)
ANY_JSON |= st.lists(ANY_JSON, max_size=3) | st.dictionaries(
    any_text(max_size=3), ANY_JSON, max_size=2
)


@st.composite
def replaced(draw, value):
    """The JSON `value` with one item inside it replaced or removed."""
    if not value or not isinstance(value, dict | list) or draw(st.integers(0, 4)) == 0:
        return draw(ANY_JSON)
    value = value.copy()
    key = draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
    if draw(st.integers(0, 4)) == 0:
        del value[key]
    else:
        value[key] = draw(replaced(value[key]))
    return value


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_other_json_raises_only_value_errors(written, data):
    files = contents(written)
    name = data.draw(st.sampled_from(sorted(files)))
    if name.suffix == ".json":
        files[name] = json.dumps(data.draw(replaced(json.loads(files[name])))).encode()
    else:
        end = 8 + int.from_bytes(files[name][:8], "little")
        header = json.dumps(data.draw(replaced(json.loads(files[name][8:end])))).encode()
        files[name] = len(header).to_bytes(8, "little") + header + files[name][end:]
    read_all(files)


def test_the_command(copied, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["checkpoint.py", str(copied), "--verify"])
    assert checkpoint.main() == 0
    assert "rope_theta: 1000000.0" in capsys.readouterr().out
    (copied / "index.json").unlink()
    assert checkpoint.main() == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1

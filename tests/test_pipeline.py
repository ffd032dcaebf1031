"""Stages in threads, and safetensors files that are written in pieces."""

import contextlib
import errno
import os
import threading
import time
import zlib

import pytest
import safetensors.torch
import torch
from conftest import any_text
from hypothesis import given, settings
from hypothesis import strategies as st

import checkpoint
from checkpoint import (
    DTYPES,
    Checkpoint,
    Piece,
    SafetensorsFile,
    Writer,
    crc32,
    entries_of,
    is_finite,
    split_rows,
    tensor_order,
)
from host import safetensors_output
from host.pipeline import ahead, in_threads
from host.safetensors_output import FileRange, make_header
from models.pieces import consecutive_sources
from models.tensors import WHOLE, Recipe

DTYPE_LIST = [dtype for dtype, _ in DTYPES.values()]


# Stages -------------------------------------------------------------------------------------------


def test_items_come_in_order_and_some_ahead():
    made = []

    def items():
        for n in range(40):
            made.append(n)
            yield n

    stage = ahead(ahead(items(), 3), 2)
    assert next(stage) == 0
    time.sleep(0.1)
    assert 1 < len(made) <= 1 + 2 + 3 + 2 * 3 + 2  # what each stage holds and has taken
    assert list(stage) == list(range(1, 40))
    assert threading.active_count() == 1 or not any(
        thread.name == "moe-fast-stage" for thread in threading.enumerate()
    )


@pytest.mark.parametrize("error", (ValueError("why"), KeyboardInterrupt()))
def test_an_error_comes_after_the_items_before_it(error):
    def items():
        yield from range(3)
        raise error

    found = []
    with pytest.raises(type(error)):
        for n in ahead(ahead(items(), 1), 1):
            found.append(n)
    assert found == [0, 1, 2]


def test_a_closed_stage_closes_those_before_it():
    closed = []

    def items():
        try:
            yield from iter(int, 1)  # it has no end
        finally:
            closed.append(threading.current_thread().name)

    with contextlib.closing(ahead(ahead(items(), 2), 2)) as stage:
        next(stage)
    assert closed == ["moe-fast-stage"]


def test_work_in_threads_is_in_order():
    prepared = []

    def work(n: int) -> int:
        time.sleep(0.01 * (n % 3))
        return n * n

    found = list(in_threads(work, range(20), 3, lambda: prepared.append(1)))
    assert found == [n * n for n in range(20)] and 1 <= len(prepared) <= 3
    with pytest.raises(ZeroDivisionError):
        list(in_threads(lambda n: 1 // n, (1, 0, 1), 2, int))


# Files --------------------------------------------------------------------------------------------


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(256, (size,), dtype=torch.uint8).view(dtype).view(shape)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 99))
def test_a_file_has_the_bytes_that_the_library_writes(tmp_path_factory, data, seed):
    """In any order of its tensors, and in any pieces of them."""
    torch.manual_seed(seed)
    shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
    names = any_text(min_size=1, max_size=5)
    given = data.draw(st.dictionaries(names, st.tuples(shapes, st.sampled_from(DTYPE_LIST))))
    tensors = {name: random_tensor(*entry) for name, entry in given.items()}
    folder = tmp_path_factory.mktemp("file")
    safetensors.torch.save_file(tensors, folder / "theirs")
    pieces = []
    for name in data.draw(st.permutations(list(tensors))):
        tensor = tensors[name]
        rows = tensor.split(1) if tensor.dim() and data.draw(st.booleans()) else [tensor]
        pieces += [Piece(name, part) for part in rows]
    written = []
    with Writer(folder / "ours", {}, {"name": "x"}) as writer:
        writer.write_pieces({"a.safetensors": given}, pieces, written.append)
    found = (folder / "ours" / "a.safetensors").read_bytes()
    assert found == (folder / "theirs").read_bytes()
    opened = Checkpoint(folder / "ours")
    assert opened.files["a.safetensors"] == (len(found), zlib.crc32(found))
    assert sum(written) == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("broken", (None, "missing", "refused", "short"))
def test_unchanged_bytes_are_copied_from_their_file(tmp_path, monkeypatch, broken):
    """The system copies them; where it cannot, they are written as others are."""
    tensors = {"a": random_tensor((3, 40), torch.bfloat16), "b": random_tensor((7,), torch.uint8)}
    safetensors.torch.save_file(tensors, tmp_path / "source")
    source = SafetensorsFile(tmp_path / "source", keep_open=True)
    copy, copied = getattr(os, "copy_file_range", None), []

    def counted(*arguments):
        if broken == "refused":
            raise OSError(errno.EXDEV, "between two file systems")
        copied.append(1)
        return copy(*arguments[:2], 5, arguments[3]) if len(copied) == 1 else 0

    if broken == "missing":
        monkeypatch.delattr(os, "copy_file_range")
    elif broken is not None:
        monkeypatch.setattr(os, "copy_file_range", counted)
    pieces = []
    for name in tensor_order(source.tensors):
        origin = source.origin(name)
        for rows in source.read(name).split(2):
            pieces.append(Piece(name, rows, origin))
            origin = FileRange(origin.path, origin.begin + rows.nbytes)
    with Writer(tmp_path / "ours", {}, {"name": "x"}) as writer:
        writer.write_pieces({"a.safetensors": source.tensors}, pieces)
    made = Checkpoint(tmp_path / "ours")
    assert (tmp_path / "ours" / "a.safetensors").read_bytes() == source.path.read_bytes()
    assert made.files["a.safetensors"][1] == zlib.crc32(source.path.read_bytes())


def test_files_follow_each_other(tmp_path):
    layouts = {f"{n}.safetensors": {f"{n}": ((4,), torch.int32)} for n in range(5)}
    pieces = (Piece(str(n), torch.full((4,), n, dtype=torch.int32)) for n in range(5))
    with Writer(tmp_path / "out", {}, {"name": "x"}) as writer:
        writer.write_pieces(layouts, pieces)
    opened = Checkpoint(tmp_path / "out")
    assert [opened.read(str(n)).unique().item() for n in range(5)] == list(range(5))


@pytest.mark.parametrize("where", ("reserve", "write", "flush"))
def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch, where):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    if where == "reserve":
        monkeypatch.setattr(os, "posix_fallocate", full)
    else:
        monkeypatch.setattr(safetensors_output.SafetensorsOutput, where, full)
    with (
        pytest.raises(ValueError, match=r"cannot write .*No space left"),
        Writer(tmp_path / "out", {}, {"name": "x"}) as writer,
    ):
        writer.write("a.safetensors", {"a": torch.ones(5)})
    assert not list(tmp_path.iterdir())


def test_a_file_system_that_reserves_nothing(tmp_path, monkeypatch):
    def unable(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unable)
    with Writer(tmp_path / "out", {}, {"name": "x"}) as writer:
        writer.write("a.safetensors", {"a": torch.ones(5)})
    Checkpoint(tmp_path / "out").verify(progress=False)


def test_the_checksum_is_zlibs():
    data = os.urandom(1000)
    assert crc32(data[300:], crc32(data[:300])) == zlib.crc32(data)


# Tensors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (*checkpoint.NOT_FINITE, torch.float64))
@pytest.mark.parametrize("bad", (float("nan"), float("inf"), -float("inf"), None))
def test_numbers_that_are_not_finite(dtype, bad, monkeypatch):
    """Each place of a block and of its last part; the largest numbers are finite."""
    monkeypatch.setattr(checkpoint, "FINITE_BLOCK", 8)
    top = torch.finfo(dtype).max
    for place in range(19):
        tensor = torch.linspace(-1, 1, 19).to(dtype)
        tensor[0 if place else 1], tensor[-1 if place < 18 else 1] = top, -top
        if bad is not None:
            if dtype == torch.float8_e4m3fn:
                tensor.view(torch.uint8)[place] = 0xFF if bad < 0 else 0x7F
            else:
                tensor[place] = bad
        assert is_finite(tensor) == (bad is None)
        assert is_finite(tensor[place : place + 1]) == (bad is None)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_every_number_of_16_bits(dtype):
    numbers = torch.arange(1 << 16).to(torch.int16).view(dtype)
    finite = numbers.isfinite()
    assert is_finite(numbers[finite]) and not finite.all()
    assert not any(is_finite(number) for number in numbers[~finite].split(1))


def test_sources_that_follow_each_other():
    rows = slice(0, 3), slice(3, 6)
    stacked = {(f"{e}{n}"): (e, rows[n]) for e in range(12) for n in (1, 0)}
    names = [f"{e}{n}" for e in range(12) for n in (0, 1)]
    assert consecutive_sources(Recipe((12, 6, 4), stacked)) == names
    assert consecutive_sources(Recipe((6, 4), {"b": (rows[1],), "a": (rows[0],)})) == ["a", "b"]
    assert consecutive_sources(Recipe((6, 4), {"a": WHOLE})) == ["a"]
    gap = {name: place for name, place in stacked.items() if name != "31"}
    for recipe in (
        Recipe((12, 6, 4), gap),
        Recipe((6, 4), {"a": WHOLE}, transform=torch.neg),
        Recipe((4, 6), {"a": (slice(0, 4), rows[0]), "b": (slice(0, 4), rows[1])}),
        Recipe((2, 6, 4), {"a": (slice(0, 2), rows[0]), "b": (slice(0, 2), rows[1])}),
    ):
        assert consecutive_sources(recipe) is None


def test_pieces_are_rows(monkeypatch):
    monkeypatch.setattr(checkpoint, "PIECE_BYTES", 64)
    for shape in ((), (3,), (40,), (5, 8), (3, 100), (7, 2, 3)):
        tensor = random_tensor(shape, torch.int32)
        pieces = list(split_rows(tensor))
        assert torch.equal(torch.cat([piece.reshape(-1) for piece in pieces]), tensor.reshape(-1))
        assert all(len(piece) == 1 or piece.nbytes <= 64 for piece in pieces[tensor.dim() == 0 :])


def test_a_header_is_padded():
    header = make_header(entries_of({"name": ((2,), torch.float32)}))
    assert len(header) % 8 == 0 and int.from_bytes(header[:8], "little") == len(header) - 8

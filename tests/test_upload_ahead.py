"""Files that are copied to the GPU before torch is imported: plain memory stands for the GPU's."""

import ctypes
import os
import threading
from argparse import Namespace
from pathlib import Path

import numpy
import pytest
import torch

from checkpoint import Checkpoint, Writer
from host import upload_ahead
from host.files import stamp
from host.upload_ahead import SPARE, Staging
from hub.manage import read_model_ahead
from runtime import memory

SIZE = 1000  # bytes of a piece


class FakeDriver:
    """Stands for `upload_ahead.Driver`. fails: a function that raises."""

    def __init__(self, free: int = SPARE + (1 << 20), fails: str = ""):
        self.free_memory, self.fails, self.blocks, self.copied = free, fails, {}, 0
        self.may_copy, self.is_copying = threading.Event(), threading.Event()
        self.may_copy.set()

    def enter(self) -> None:
        self.check("enter")

    def check(self, name: str) -> None:
        if name == self.fails:
            raise OSError(f"{name}: error 2")

    def free_bytes(self) -> int:
        return self.free_memory

    def allocate(self, size: int) -> int:
        self.check("allocate")
        block = ctypes.create_string_buffer(size)
        self.blocks[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def free(self, address: int) -> None:
        del self.blocks[address]

    allocate_host, free_host = allocate, free

    def copy(self, target: int, source: int, size: int) -> None:
        self.is_copying.set()
        self.may_copy.wait()
        self.check("copy")
        ctypes.memmove(target, source, size)
        self.copied += size


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A checkpoint of three files, and nothing left over at the end."""
    monkeypatch.setattr(upload_ahead, "PIECE", SIZE)
    monkeypatch.setattr(upload_ahead, "LEAST", SIZE)
    monkeypatch.setattr(upload_ahead, "taken", {})
    monkeypatch.setattr(upload_ahead, "current", [])
    with Writer(tmp_path / "model", args={}, format={"name": "fp32"}) as writer:
        for n, size in enumerate((40, 700, 333)):
            tensors = {f"{n}.a": torch.randn(size, 2), f"{n}.b": torch.randn(3).bfloat16()}
            writer.write(f"{n}.safetensors", tensors)
    return tmp_path / "model"


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def stage(folder: Path, driver: FakeDriver, workers: int = 2) -> Staging:
    staging = Staging(driver, files(folder), workers)
    upload_ahead.current.append(staging)
    return staging


def copy_of(path: Path, file: upload_ahead.StagedFile) -> bytes:
    """Return the file with its tensors as the copy has them."""
    data = bytearray(path.read_bytes())
    for block in file.blocks.values():
        here = slice(block.begin, block.begin + block.size)
        data[here] = ctypes.string_at(block.address, block.size)
    return bytes(data)


@pytest.mark.parametrize("workers", (1, 2, 8))
def test_files_arrive_whole(folder, workers):
    driver = FakeDriver()
    staging = stage(folder, driver, workers)
    all_copied(staging)
    sizes = [[block.size for block in file.blocks.values()] for file in staging.files.values()]
    assert sizes == [[326], [5600, 6], [2664, 6]]  # a large tensor has a block of its own
    for path in files(folder):
        found = staging.find(stamp(path.stat()))
        assert copy_of(path, found) == path.read_bytes()
    assert upload_ahead.staged_bytes() == sum(map(sum, sizes))
    staging.close()
    assert not driver.blocks and upload_ahead.staged_bytes() == 0


def all_copied(staging: Staging) -> None:
    for file in staging.files.values():
        assert file.done.wait(10)


class HostMemory:
    """Bytes of a `Part` as memory of the host, which is kept as a tensor of the GPU keeps it."""

    def __init__(self, part: upload_ahead.Part):
        given = part.__cuda_array_interface__
        self.part, shape, (address, _) = part, given["shape"], given["data"]
        self.__array_interface__ = dict(shape=shape, typestr="|u1", data=(address, False))


def test_tensors_take_the_copies(folder, monkeypatch):
    """One with a block lives in it as long as it is used; tensors that share one are copied."""
    driver, source = FakeDriver(), Checkpoint(folder)
    want = {name: source.read(name) for name in source.tensors}
    staging = stage(folder, driver)
    all_copied(staging)
    total, found, as_tensor = upload_ahead.staged_bytes(), {}, torch.as_tensor

    def of_host(part: upload_ahead.Part, device: torch.device) -> torch.Tensor:
        return as_tensor(numpy.asarray(HostMemory(part)))

    with monkeypatch.context() as patch:
        patch.setattr(torch, "as_tensor", of_host)
        for name in want:
            found[name] = source.read(name, device="cuda")
            assert found[name].dtype == want[name].dtype and torch.equal(found[name], want[name])
    assert upload_ahead.taken_bytes() == 5600 + 6 + 2664 + 6
    assert upload_ahead.staged_bytes() == total - upload_ahead.taken_bytes() == 326
    shard = source._shard_of["1.a"]
    assert upload_ahead.take(shard._stamp, shard._begins["1.a"], 5600) is None  # again
    upload_ahead.close()
    assert {found[name].data_ptr() for name in ("1.a", "1.b", "2.a", "2.b")} == driver.blocks.keys()
    assert torch.equal(found["2.a"], want["2.a"])
    del found["2.a"]
    assert upload_ahead.taken_bytes() == 5600 + 12 and len(driver.blocks) == 3
    assert torch.equal(source.read("2.a"), want["2.a"])  # from its file
    found.clear()
    assert upload_ahead.taken_bytes() == 0 and not driver.blocks


def test_a_damaged_file_is_left_to_its_reader(folder):
    for path, data in zip(
        files(folder), (b"", b"\xff" * 30, b"\x02" + bytes(7) + b"[]"), strict=True
    ):
        path.write_bytes(data)
    staging = stage(folder, FakeDriver())
    staging.close()
    assert upload_ahead.staged_bytes() == 0


def test_a_file_that_changed_is_read_from_the_disk(folder):
    driver = FakeDriver()
    driver.may_copy.clear()
    staging = stage(folder, driver, 1)
    assert driver.is_copying.wait(10)
    path = files(folder)[1]  # the largest is begun first
    before = path.stat()
    os.utime(path, ns=(0, 0))
    driver.may_copy.set()
    assert staging.find(stamp(before)) is None
    assert staging.find(stamp(path.stat())) is None
    staging.close()
    assert not driver.blocks


@pytest.mark.parametrize("fails", ("enter", "allocate", "copy", "memory"))
def test_without_memory_or_driver_files_are_read_from_the_disk(folder, fails):
    driver = FakeDriver(SPARE, fails)
    if fails != "memory":
        driver.free_memory += 1 << 20
    staging = stage(folder, driver)
    assert all(staging.find(stamp(path.stat())) is None for path in files(folder))
    staging.close()
    assert driver.copied == 0 and upload_ahead.staged_bytes() == 0


def test_copies_end_with_the_model(folder):
    """`close` waits for the piece that is being copied, and for no more."""
    driver = FakeDriver()
    driver.may_copy.clear()
    staging = stage(folder, driver, 1)
    assert driver.is_copying.wait(10)
    staging.is_ended = True
    driver.may_copy.set()
    upload_ahead.close()
    assert driver.copied == SIZE and not driver.blocks and not upload_ahead.current


def test_copies_count_as_free_memory(folder, monkeypatch):
    class Properties:
        is_integrated = False

    driver = FakeDriver()
    all_copied(stage(folder, driver))
    cuda = dict(
        mem_get_info=lambda device: (10**9, 2 * 10**9),
        get_device_properties=lambda device: Properties,
        memory_reserved=lambda device: 7,
        memory_allocated=lambda device: 5,
    )
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    total = upload_ahead.staged_bytes()
    assert memory.free_gpu_memory(torch.device("cuda")) == 10**9 + 2 + total
    assert memory.free_gpu_memory(torch.device("cuda", 1)) == 10**9 + 2
    upload_ahead.close()
    assert memory.free_gpu_memory(torch.device("cuda", 0)) == 10**9 + 2


def test_which_commands_copy_ahead(folder, monkeypatch):
    begun = []
    monkeypatch.setattr("hub.manage.may_have_gpu", lambda options: options.device != "cpu")
    monkeypatch.setattr("hub.manage.load_tokenizer_ahead", lambda path: None)
    monkeypatch.setattr(upload_ahead, "start", lambda paths: begun.append(paths))
    plain = dict(model=None, revision=None, checkpoint_path=folder, dry_run=False)
    plain |= dict(device="auto", offload=False)
    for changed in ({"device": "cpu"}, {"offload": True}, {"dry_run": True}):
        read_model_ahead(Namespace(**plain | changed))
    read_model_ahead(Namespace(**plain | {"checkpoint_path": files(folder)[0]}))  # as a GGUF file
    monkeypatch.setenv("WORLD_SIZE", "2")
    read_model_ahead(Namespace(**plain))
    assert not begun
    monkeypatch.setenv("WORLD_SIZE", "1")
    read_model_ahead(Namespace(**plain))
    assert begun == [files(folder)]


def test_no_driver_is_no_error(folder, monkeypatch):
    def missing(name: str):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    upload_ahead.start(files(folder))
    assert not upload_ahead.current
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())  # an old one
    upload_ahead.start(files(folder))
    assert not upload_ahead.current

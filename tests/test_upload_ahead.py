"""Files that are copied to the GPU before torch is imported: plain memory stands for the GPU's."""

import ctypes
import os
import threading
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from checkpoint import Checkpoint, SafetensorsFile, Writer
from cli import upload_ahead
from cli.files import stamp
from cli.upload_ahead import SPARE, Staging
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


def copy_of(file: upload_ahead.StagedFile) -> bytes:
    return ctypes.string_at(file.address, file.size)


@pytest.mark.parametrize("workers", (1, 2, 8))
def test_files_arrive_whole(folder, workers):
    driver = FakeDriver()
    staging = stage(folder, driver, workers)
    for path in files(folder):
        found = upload_ahead.uploaded(stamp(path.stat()))
        assert found is None or copy_of(found) == path.read_bytes()
    total = sum(path.stat().st_size for path in files(folder))
    assert upload_ahead.staged_bytes() <= total  # a file that no thread has begun is given up
    staging.close()
    assert not driver.blocks and upload_ahead.staged_bytes() == 0


def all_copied(staging: Staging) -> None:
    for file in staging.files.values():
        assert file.done.wait(10)


def as_tensor_of_host(part: upload_ahead.Part, device: torch.device) -> torch.Tensor:
    """Stands for `torch.as_tensor` of a GPU's memory."""
    (size,), (address, _) = (part.__cuda_array_interface__[k] for k in ("shape", "data"))
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)


def test_tensors_are_read_from_the_copies_once(folder, monkeypatch):
    """Each file's memory is freed after its last tensor."""
    driver, source = FakeDriver(), Checkpoint(folder)
    want = {name: source.read(name) for name in source.tensors}
    staging = stage(folder, driver)
    all_copied(staging)
    monkeypatch.setattr(torch, "as_tensor", as_tensor_of_host)
    monkeypatch.setattr(SafetensorsFile, "_read_header", None)  # no file is opened any more
    for n in range(3):
        for name in (f"{n}.a", f"{n}.b"):
            assert upload_ahead.staged_bytes() == sum(p.stat().st_size for p in files(folder)[n:])
            found = source.read(name, device="cuda")
            assert found.dtype == want[name].dtype and torch.equal(found, want[name])
    assert upload_ahead.staged_bytes() == 0
    upload_ahead.close()
    assert not driver.blocks
    assert torch.equal(source.read("0.a"), want["0.a"])  # from its file


def test_a_file_that_changed_is_read_from_the_disk(folder):
    driver = FakeDriver()
    driver.may_copy.clear()
    staging = stage(folder, driver, 1)
    assert driver.is_copying.wait(10)
    path = files(folder)[1]  # the largest is begun first
    before = path.stat()
    os.utime(path, ns=(0, 0))
    driver.may_copy.set()
    assert upload_ahead.uploaded(stamp(before)) is None
    assert upload_ahead.uploaded(stamp(path.stat())) is None
    staging.close()
    assert not driver.blocks


@pytest.mark.parametrize("fails", ("enter", "allocate", "copy", "memory"))
def test_without_memory_or_driver_files_are_read_from_the_disk(folder, fails):
    driver = FakeDriver(SPARE, fails)
    if fails != "memory":
        driver.free_memory += 1 << 20
    staging = stage(folder, driver)
    assert all(upload_ahead.uploaded(stamp(path.stat())) is None for path in files(folder))
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
    total = sum(path.stat().st_size for path in files(folder))
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
    assert not begun
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

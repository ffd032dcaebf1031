"""Uploads through pinned buffers: plain memory stands for both sides here."""

import sys
import threading
from collections.abc import Callable

import pytest
import torch

from checkpoint import DTYPES, Checkpoint, Writer
from ops.upload import Uploader, active, to_device, uploading
from runtime import host_memory
from runtime.host_memory import SWITCH_SECONDS, pinned_uploads

CPU, SIZE = torch.device("cpu"), 1000  # bytes of a buffer
ODD_SIZES = 0, 1, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE, 3 * SIZE + 7


class Stream:
    """Stands for a GPU's stream: notes when copies are marked, and which of them are waited for."""

    def __init__(self):
        self.marked, self.waited = 0, []

    def mark(self, device: torch.device) -> Callable[[], object]:
        number, self.marked = self.marked, self.marked + 1
        return lambda: self.waited.append((number, self.marked))


@pytest.fixture
def stream() -> Stream:
    return Stream()


@pytest.fixture
def uploader(stream) -> Uploader:
    return Uploader(torch.zeros(3 * SIZE, dtype=torch.uint8).split(SIZE), CPU, stream.mark)


def numbers(count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, 100, (count,), generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_tensors_of_any_size_arrive(dtype, uploader):
    for size in ODD_SIZES:
        tensor = numbers(size, dtype[0])
        sent = uploader.send(tensor)
        assert sent.dtype == tensor.dtype and sent is not tensor
        assert torch.equal(sent.view(torch.uint8), tensor.view(torch.uint8)), size
    assert uploader.send(torch.tensor(1.5)).item() == 1.5
    assert uploader.send(torch.empty(0, 3)).shape == (0, 3)


def test_a_buffer_is_filled_again_when_the_gpu_has_read_it(uploader, stream):
    for size in (SIZE * 4 + 1, 1, SIZE * 2):
        uploader.send(numbers(size, torch.uint8))
    # Piece n waits for the copy of piece n - 3, when n copies have been marked.
    assert stream.marked == 8 and stream.waited == [(n - 3, n) for n in range(3, 8)]


def test_reads_take_the_uploader_within_its_block_alone(uploader, stream, tmp_path):
    tensors = {name: numbers(900, dtype).view(3, 300) for name, (dtype, _) in DTYPES.items()}
    with Writer(tmp_path / "model", {}, {"name": "bf16"}) as writer:
        writer.write("rest.safetensors", tensors)
    checkpoint = Checkpoint(tmp_path / "model")
    with uploading(uploader):
        for name, tensor in tensors.items():
            for index in (None, (slice(1, 3),), (slice(0, 3), slice(5, 290, 3))):
                before, found = stream.marked, checkpoint.read(name, index)
                expected = (tensor if index is None else tensor[index]).contiguous()
                assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), name
                assert found.is_contiguous() and stream.marked - before == -(-found.nbytes // SIZE)
        assert to_device(tensors["bf16"].t(), "meta").is_meta  # another device
        other = threading.Thread(target=checkpoint.read, args=("bf16",))
        before = stream.marked
        other.start()
        other.join()
        assert stream.marked == before  # another thread has none
    checkpoint.read("bf16")
    assert stream.marked == before


def test_the_cpu_takes_no_buffers():
    with pinned_uploads(CPU):
        tensor = torch.ones(3)
        assert to_device(tensor, CPU) is tensor


@pytest.mark.parametrize("pins", (True, False))
def test_threads_take_turns_while_buffers_are_there(pins, monkeypatch):
    """Without memory that can be pinned, tensors are copied plainly."""
    ended, before = [], sys.getswitchinterval()
    monkeypatch.setattr(host_memory, "register_host_memory", lambda *_: pins)
    monkeypatch.setattr(torch.cuda, "synchronize", ended.append)
    with pytest.raises(KeyError), pinned_uploads(torch.device("cuda"), 4096):
        assert (active.get() is not None) == pins
        assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS if pins else before)
        raise KeyError
    assert active.get() is None and sys.getswitchinterval() == before
    assert len(ended) == pins

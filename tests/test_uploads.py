"""Uploads through pinned buffers: plain memory stands for both sides here."""

import sys
import threading
from collections.abc import Callable

import pytest
import torch

from checkpoint import DTYPES, Checkpoint, Writer
from runtime import host_memory
from runtime.host_memory import SWITCH_SECONDS, pinned_uploads
from runtime.uploads import Uploads

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
def uploads(stream) -> Uploads:
    buffers = torch.zeros(3 * SIZE, dtype=torch.uint8).split(SIZE)
    return Uploads(lambda owner: buffers, CPU, stream.mark)


def numbers(count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, 100, (count,), generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_tensors_of_any_size_arrive(dtype, uploads):
    for size in ODD_SIZES:
        tensor = numbers(size, dtype[0])
        sent = uploads.send(tensor)
        assert sent.dtype == tensor.dtype and sent is not tensor
        assert torch.equal(sent.view(torch.uint8), tensor.view(torch.uint8)), size
    assert uploads.send(torch.tensor(1.5)).item() == 1.5
    assert uploads.send(torch.empty(0, 3)).shape == (0, 3)


def test_a_buffer_is_filled_again_when_the_gpu_has_read_it(uploads, stream):
    for size in (SIZE * 4 + 1, 1, SIZE * 2):
        uploads.send(numbers(size, torch.uint8))
    # Piece n waits for the copy of piece n - 3, when n copies have been marked.
    assert stream.marked == 8 and stream.waited == [(n - 3, n) for n in range(3, 8)]


def test_reads_take_the_uploads_within_its_block_alone(uploads, stream, tmp_path):
    tensors = {name: numbers(900, dtype).view(3, 300) for name, (dtype, _) in DTYPES.items()}
    with Writer(tmp_path / "model", {}, {"name": "bf16"}) as writer:
        writer.write("rest.safetensors", tensors)
    checkpoint = Checkpoint(tmp_path / "model")
    with uploads:
        for name, tensor in tensors.items():
            for index in (None, (slice(1, 3),), (slice(0, 3), slice(5, 290, 3))):
                before, found = stream.marked, checkpoint.read(name, index)
                expected = (tensor if index is None else tensor[index]).contiguous()
                assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), name
                assert found.is_contiguous() and stream.marked - before == -(-found.nbytes // SIZE)
        before = stream.marked
        assert tensors["bf16"].to("meta").is_meta  # another device
        assert tensors["bf16"].to(torch.float32).dtype == torch.float32  # another type
        assert tensors["bf16"].to("cpu", torch.float32).dtype == torch.float32
        assert tensors["bf16"].to(device="cpu") is tensors["bf16"] and stream.marked == before
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
        assert tensor.to(CPU) is tensor


@pytest.mark.parametrize("pins", (True, False))
def test_threads_take_turns_while_buffers_are_there(pins, monkeypatch):
    """Without memory that can be pinned, tensors are copied plainly. The first copy asks for it."""
    ended, sent, asked, before = [], [], [], sys.getswitchinterval()
    monkeypatch.setattr(host_memory, "register_host_memory", lambda *_: asked.append(1) or pins)
    monkeypatch.setattr(torch.cuda, "synchronize", ended.append)
    monkeypatch.setattr(Uploads, "send", lambda self, tensor: sent.append(tensor))
    monkeypatch.setattr(Uploads, "takes", lambda self, tensor, *to: tensor.is_cpu)
    with pytest.raises(KeyError), pinned_uploads(torch.device("cuda"), 4096):
        assert not asked
        for _ in range(2):
            torch.ones(3).to(CPU)
        assert len(sent) == 2 * pins and asked == [1]
        assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
        raise KeyError
    torch.ones(3).to(CPU)
    assert len(sent) == 2 * pins and sys.getswitchinterval() == before
    assert len(ended) == 1

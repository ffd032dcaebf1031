"""Process groups: join the ranks that torchrun has started, share values, compare them.

Every rank runs the same program. `share` broadcasts host values that may differ (a
seed, a typed line, a request) from rank 0. Without torchrun there is one rank, and no
function here communicates.
"""

import gc
import json
import os
import secrets
import signal
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from cli.command import first_line
from ops.ranks.all_reduce import Inbox
from ops.ranks.mailbox import TokenInbox
from parallel import heartbeat
from parallel.device import pick_device

NO_TIMEOUT = timedelta(days=1)  # for collectives: see parallel/heartbeat.py
ANSWER_TIMEOUT = timedelta(seconds=30)  # for all ranks to finish the same answer

Value = TypeVar("Value")


@dataclass
class State:
    """State of this process in the group. The defaults are for a single process.

    parallel/all_reduce.py uses the last five fields. They are here so that `stop` frees
    the symmetric memory.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None  # of tensors; the default group shares host values
    store: dist.Store | None = None
    answers: int = 0  # calls of check_same_tokens
    buffer: Tensor | None = None  # uint8, in symmetric memory
    inbox: Inbox | None = None  # in symmetric memory
    token_inbox: TokenInbox | None = None  # in symmetric memory
    token_dim: int = 0  # D of its messages
    choice: list[tuple[int, str]] = field(default_factory=list)  # (largest bytes, method), sorted


_state = State()


def state() -> State:
    """Return the current state; `start` and `stop` replace it."""
    return _state


def rank() -> int:
    return _state.rank


def size() -> int:
    """Return N, the number of ranks."""
    return _state.size


def is_main() -> bool:
    """Return whether this is rank 0. Only rank 0 prints."""
    return _state.rank == 0


# Start and stop -----------------------------------------------------------------------


def start(name: str = "auto") -> torch.device:
    """Join the ranks that torchrun has started, if any -> this rank's device.

    name: auto, cuda or cpu. Raises ValueError for a missing device and for more
    processes than GPUs.
    """
    global _state
    rank, size = read_rank()
    if size == 1:
        return pick_device(name)
    with signals_end_process():  # other ranks may never come
        run_collective(dist.init_process_group, "gloo", timeout=NO_TIMEOUT)
        _state = State(rank, size, store=dist.distributed_c10d._get_default_store())
        heartbeat.enter(rank, size, _state.store)
        device = _pick_rank_device(name)
        backend = "nccl" if device.type == "cuda" else "gloo"
        _state.group = run_collective(dist.new_group, backend=backend, timeout=NO_TIMEOUT)
    heartbeat.start_thread()
    return device


@contextmanager
def signals_end_process() -> Iterator[None]:
    """Within, SIGINT and SIGTERM end the process: a wait in C++ runs no Python handler."""
    before = {}
    if threading.current_thread() is threading.main_thread():  # Python sets handlers there alone
        before = {n: signal.signal(n, signal.SIG_DFL) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def read_rank() -> tuple[int, int]:
    """Return rank and number of ranks from torchrun's environment; 0, 1 without it.

    Raises ValueError if the environment has only a part of it.
    """
    if "WORLD_SIZE" not in os.environ:
        return 0, 1
    names = ["WORLD_SIZE"]
    if os.environ["WORLD_SIZE"] != "1":
        names += ["RANK", "LOCAL_RANK", "MASTER_PORT"]
    for name in names:
        value = os.environ.get(name, "")
        if not value.isdecimal() or (name == "WORLD_SIZE" and int(value) < 1):
            others = ", ".join(name for name in names if name in os.environ)
            raise ValueError(
                f"the environment has {others}, but {name} is {value!r:.40}: start with torchrun, "
                "or unset WORLD_SIZE"
            )
    size = int(os.environ["WORLD_SIZE"])
    rank = int(os.environ["RANK"]) if size > 1 else 0
    if rank >= size:  # it would wait for ever
        fix = "start with torchrun, or unset WORLD_SIZE"
        raise ValueError(f"the environment has RANK {rank} and WORLD_SIZE {size}: {fix}")
    return rank, size


def _pick_rank_device(name: str) -> torch.device:
    device = pick_device(name)
    if device.type != "cuda":
        return device
    local_rank, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local_rank >= gpus:
        raise ValueError(f"process {local_rank} of this host has no GPU: start {gpus} per host")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    # NVLink SHARP is missing on some fabrics, and no faster for messages of a few KB.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    return device


def stop() -> None:
    """Wait for all ranks, then leave the group."""
    global _state
    if size() == 1:
        return
    run_collective(dist.barrier)
    heartbeat.stop_thread()
    _state = State()
    gc.collect()  # free captured CUDA graphs: NCCL's destruction would wait for them
    dist.destroy_process_group()


def run_collective(collective: Callable, *args, **options):
    """Call a collective. Raises ConnectionError with one line if another rank has ended."""
    try:
        return collective(*args, **options)
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError as error:
        cause = first_line(error)
        message = f"another process of this run has ended: start all again ({cause:.100})"
        raise ConnectionError(message) from None


# Host values --------------------------------------------------------------------------


def share(make: Callable[[], Value]) -> Value:
    """Call `make` on rank 0 and return its value on all ranks.

    If it raises ValueError or OSError, all ranks raise ValueError.
    """
    if size() == 1:
        return make()
    box = [None]
    if is_main():
        try:
            box = [make()]
        except (ValueError, OSError) as error:
            box = [ValueError(str(error))]
    run_collective(dist.broadcast_object_list, box, src=0)
    if isinstance(box[0], ValueError):
        raise box[0]
    return box[0]


def share_each(make: Callable[[], Iterator[Value]]) -> Iterator[Value]:
    """Iterate over `make()` on rank 0, and yield its values on all ranks."""
    values = make() if is_main() else iter(())
    while found := share(lambda: [*zip((0,), values, strict=False)]):  # [] at the end
        yield found[0][1]


def common_seed(seed: int | None) -> int | None:
    """Return seed; if it is None and there are several ranks, one that rank 0 draws for all."""
    return seed if seed is not None or size() == 1 else share(lambda: secrets.randbits(62))


def total(number: int) -> int:
    """Sum a number over all ranks."""
    if size() == 1:
        return number
    numbers = torch.tensor(number)
    run_collective(dist.all_reduce, numbers)
    return int(numbers)


def least(number: int) -> int:
    """Return the smallest of all ranks' numbers."""
    if size() == 1:
        return number
    numbers = torch.tensor(number)
    run_collective(dist.all_reduce, numbers, op=dist.ReduceOp.MIN)
    return int(numbers)


# Checks -------------------------------------------------------------------------------


def check_agreement(options: dict, source) -> None:
    """Raise ValueError on every rank unless all have the same options, model and software.

    This compares options other than paths, the source's args, format and checksums, the
    version of torch, and the GPU's name. The message names the difference.
    """
    if size() == 1:
        return
    weights = json.dumps(
        [source.args, source.format, getattr(source, "files", None)], sort_keys=True
    )
    own = {"torch": torch.__version__, "checkpoint": f"{zlib.crc32(weights.encode()):08x}"}
    if dist.get_backend(_state.group) == "nccl":
        own["GPU"] = torch.cuda.get_device_name()
    own |= {
        f"--{name}": value for name, value in options.items() if not isinstance(value, os.PathLike)
    }
    ranks = [None] * size()
    run_collective(dist.all_gather_object, ranks, own)
    for other, theirs in enumerate(ranks):
        for name in {**ranks[0], **theirs}:
            first, second = ranks[0].get(name), theirs.get(name)
            if first != second:
                values = f"{name}, {first} and {second}"
                raise ValueError(f"ranks 0 and {other} differ in {values}: start all alike")


def check_same_tokens(ids: Sequence[Sequence[int]]) -> None:
    """Raise ValueError unless all ranks have generated these tokens. Call after each answer."""
    if size() == 1:
        return
    _state.answers += 1
    keys = [f"tokens/{_state.answers}/{other}" for other in range(size())]
    store = _state.store
    store.set(keys[rank()], str(zlib.crc32(json.dumps(ids).encode())))
    try:
        store.wait(keys, ANSWER_TIMEOUT)
        same = len(set(store.multi_get(keys))) == 1
    except RuntimeError:
        same = False
    # All ranks have finished the previous answer, so its keys have been read.
    store.delete_key(f"tokens/{_state.answers - 1}/{rank()}")
    if not same:
        fix = "use identical GPUs; if they are, report a bug"
        raise ValueError(f"the ranks have chosen different tokens: {fix}")

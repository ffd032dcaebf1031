"""Several processes that run one program, each on its part of a model: joining, agreeing, summing, and how they end.

torchrun starts them and says who is who; `start` joins them. Every process runs the same lines, so a host's values
that may differ (a seed, a line typed, a prompt) are rank 0's, given to all by `share`. Sums over ranks have the same
bits on each. Alone, without torchrun, everything here does nothing.
"""

import gc
import json
import os
import secrets
import select
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import collective
from checkpoint import pick_device
from layers import operator, weighted_sum

PULSE = 5.0  # seconds between a rank's signs of life
LOST_AFTER = 20.0  # seconds without one until it counts as lost
# A collective may wait for a rank that compiles, reads a slow disk, or waits for its user: that is not an error. That a
# rank is lost is noticed by `_watch` within 25 s, whatever is being waited for, a recorded CUDA graph too.
PATIENCE = timedelta(days=1)
SAME_TOKENS = timedelta(seconds=30)  # between the ends of one answer on two ranks
LARGEST_MESSAGE = 32 << 20  # bytes of symmetric memory
LARGEST_PUSH = 128 << 10  # bytes
SIZES = tuple(kilobytes << 10 for kilobytes in (8, 32, 128, 512, 2048, 8192, 32768))  # up to which a way is chosen

Value = TypeVar("Value")


# Processes ----------------------------------------------------------------------------------------------------------


@dataclass
class _World:
    """What this process knows of the others. Alone it is as below."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None  # of the model's collectives; the default group is for values of the host
    store: dist.Store | None = None
    wake: int = -1  # a pipe to the thread that watches
    watcher: threading.Thread | None = None
    done: bool = False
    answers: int = 0
    last_word: threading.Lock = field(default_factory=threading.Lock)
    buffer: Tensor | None = None  # uint8, in symmetric memory, as the next
    inbox: collective.Inbox | None = None
    choice: list[tuple[int, str]] = field(default_factory=list)  # up to so many bytes, by this method; rising


_world = _World()


def rank() -> int:
    return _world.rank


def size() -> int:
    """N, the number of ranks."""
    return _world.size


def is_main() -> bool:
    """Whether this is the rank that prints."""
    return _world.rank == 0


def start(name: str = "auto") -> torch.device:
    """Join the ranks that torchrun has started, if any -> this rank's device: name is auto, cuda or cpu.

    Raises ValueError for a device that is not there, and for more processes than GPUs.
    """
    global _world
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return pick_device(name)
    me, ranks, local = (int(os.environ[variable]) for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    with_others(dist.init_process_group, "gloo", timeout=PATIENCE)
    _world = _World(me, ranks, store=dist.distributed_c10d._get_default_store())
    _world.store.set(f"pulse/{me}", "0")
    device = pick_device(name)
    if device.type == "cuda":
        if local >= torch.cuda.device_count():
            raise ValueError(f"process {local} of this host has no GPU: start {torch.cuda.device_count()} a host")
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # sums in the switch: not on every fabric, no gain for few KB
    _world.group = with_others(dist.new_group, backend="nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
    read, _world.wake = os.pipe()
    os.set_blocking(_world.wake, False)
    # Python runs no handler while it waits for a GPU, but the number of a signal gets into the pipe at once.
    signal.set_wakeup_fd(_world.wake)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    _world.watcher = threading.Thread(target=_watch, args=(_world.store.clone(), read), daemon=True)
    _world.watcher.start()
    return device


def stop() -> None:
    """Leave the others, once all have come this far."""
    global _world
    if _world.size == 1:
        return
    with_others(dist.barrier)
    _world.done = True
    signal.set_wakeup_fd(-1)
    os.write(_world.wake, b"\0")
    _world.watcher.join()
    _world = _World()
    gc.collect()  # recorded steps, which NCCL's communicator would wait for
    dist.destroy_process_group()


def _watch(store: dist.Store, wake: int) -> None:
    """A thread's work: end this process when a signal says so, or once another rank gives no sign of life."""
    world, beats, seen = _world, 0, {}
    while not world.done:
        if select.select([wake], [], [], PULSE)[0]:
            number = os.read(wake, 1)[0]
            if number == signal.SIGINT:
                os._exit(130)
            if number == signal.SIGTERM:
                with suppress(RuntimeError):
                    if world.rank and store.check(["failed/0"]):  # rank 0 has said why
                        os._exit(2)
                _end("another process of this run has ended, or torchrun was told to", 1)
            continue
        try:
            beats += 1
            store.set(f"pulse/{world.rank}", str(beats))
            found = store.multi_get([f"pulse/{other}" for other in range(world.size)])
        except RuntimeError:
            if not world.done:
                _end("the process that all others meet at has ended: start all of them again", 1)
            return
        for other, beat in enumerate(found):
            if seen.get(other, ("", 0))[0] != beat:
                seen[other] = beat, time.monotonic()
            elif time.monotonic() - seen[other][1] > LOST_AFTER and not world.done:
                _end(f"rank {other} gives no sign of life: start all processes again", 1)


def _say(message: str) -> bool:
    """One line on stderr, the first and the last that this process has to say of its end; whether it was."""
    first = _world.last_word.acquire(blocking=False)
    if first:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        os.write(2, f"error: {'' if is_main() else f'rank {rank()}: '}{message}\n".encode())
    return first


def _end(message: str, code: int) -> NoReturn:
    """Say why and end this process: not by an exception, since a GPU may never answer again."""
    if not _say(message):
        time.sleep(5)  # another thread is at it
    os._exit(code)


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def attempt(work: Callable[[], int], out_of_memory: str = "") -> int:
    """The exit code of a command's work; a mistake of its user is one line, and 2 (`fail`).

    out_of_memory: what to do where the GPU's does not do, for the line that tells of it.
    """
    try:
        return work()
    except (ValueError, OSError, torch.cuda.OutOfMemoryError) as error:
        told = first_line(error)
        if out_of_memory and isinstance(error, torch.cuda.OutOfMemoryError):
            told = f"out of GPU memory ({told}): {out_of_memory}"
        return fail(told)


def fail(message: str) -> int:
    """Print a mistake as one line and return the exit code, 2; of several ranks that make the same, rank 0 alone does.

    With several ranks the process ends here: whatever the others still wait for will not come.
    """
    if size() == 1:
        print(f"error: {message}", file=sys.stderr)
        return 2
    moment, store = timedelta(seconds=2), _world.store
    if is_main():
        _say(message)  # before others can end, since torchrun ends this one with the first of them
    with suppress(RuntimeError):  # not all have failed, or they are no more
        store.set(f"failed/{rank()}", message)
        if is_main():  # which may be what keeps the store
            store.wait([f"failed/{other}" for other in range(1, size())], moment)
            time.sleep(0.2)
        else:
            store.wait(["failed/0"], moment)
            if store.get("failed/0").decode() == message and _world.last_word.acquire(blocking=False):
                os._exit(2)
    _say(message)
    os._exit(2)


def leave(code: int) -> None:
    """With several ranks, end this process at once and in silence; the others will notice."""
    if size() > 1:
        os._exit(code)


def with_others(collective: Callable, *args, **options):
    """What a collective returns. Raises ConnectionError, one line, where another rank is gone."""
    try:
        return collective(*args, **options)
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError as error:
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConnectionError(f"another process of this run has ended: start all again ({cause:.100})") from None


def share(make: Callable[[], Value]) -> Value:
    """What `make` returns on rank 0, on every rank; its ValueError or OSError likewise."""
    if size() == 1:
        return make()
    box = [None]
    if is_main():
        try:
            box = [make()]
        except (ValueError, OSError) as error:
            box = [ValueError(str(error))]
    with_others(dist.broadcast_object_list, box, src=0)
    if isinstance(box[0], ValueError):
        raise box[0]
    return box[0]


def share_each(make: Callable[[], Iterator[Value]]) -> Iterator[Value]:
    """What rank 0's iterator yields, one by one, on every rank."""
    values = make() if is_main() else iter(())
    while (found := share(lambda: [*zip((0,), values, strict=False)])):  # fmt: skip
        yield found[0][1]


def agree(options: dict, source) -> None:
    """Raises ValueError on every rank, naming what differs, unless all ranks have the same options (but for paths),
    checkpoint (args, format, checksums), torch and kind of GPU."""
    if size() == 1:
        return
    weights = json.dumps([source.args, source.format, getattr(source, "files", None)], sort_keys=True)
    said = {"torch": torch.__version__, "checkpoint": f"{zlib.crc32(weights.encode()):08x}"}
    if dist.get_backend(_world.group) == "nccl":
        said["GPU"] = torch.cuda.get_device_name()
    said |= {f"--{name}": value for name, value in options.items() if not isinstance(value, os.PathLike)}
    all_said = [None] * size()
    with_others(dist.all_gather_object, all_said, said)
    for other, theirs in enumerate(all_said):
        for name in {**all_said[0], **theirs}:
            pair = all_said[0].get(name), theirs.get(name)
            if pair[0] != pair[1]:
                raise ValueError(f"ranks 0 and {other} differ in {name}, {pair[0]} and {pair[1]}: start all alike")


def common_seed(seed: int | None) -> int | None:
    """The seed that was given, or one that rank 0 draws for all; None if alone."""
    return seed if seed is not None or size() == 1 else share(lambda: secrets.randbits(62))


def total(number: int) -> int:
    """The sum over all ranks."""
    if size() == 1:
        return number
    numbers = torch.tensor(number)
    with_others(dist.all_reduce, numbers)
    return int(numbers)


def check_tokens(ids: Sequence[Sequence[int]]) -> None:
    """To be called at the end of an answer. Raises ValueError unless all ranks have chosen the same tokens."""
    if size() == 1:
        return
    _world.answers += 1
    keys = [f"tokens/{_world.answers}/{other}" for other in range(size())]
    _world.store.set(keys[rank()], str(zlib.crc32(json.dumps(ids).encode())))
    try:
        _world.store.wait(keys, SAME_TOKENS)
        same = len(set(_world.store.multi_get(keys))) == 1
    except RuntimeError:
        same = False
    _world.store.delete_key(f"tokens/{_world.answers - 1}/{rank()}")  # who is here has read those
    if not same:
        raise ValueError("the ranks have chosen different tokens: use GPUs of one kind, and report it if they are")


# Collectives --------------------------------------------------------------------------------------------------------


_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name from torch 2.13 on, before


@operator("moe_fast::all_reduce")
def all_reduce(x: Tensor) -> Tensor:
    """The sum of x over the ranks, the same bits on each. An operator of ours, so that a compiled block stays whole."""
    return _sum(x, None, x)


@all_reduce.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@operator("moe_fast::sum_and_join")
def sum_and_join(x: Tensor, y: Tensor, weights: Tensor | None, scale: float, weight: Tensor, bias: Tensor | None,
                 eps: float, rows: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """x + scale * the sum of y over the ranks, the norm of that, and its product with rows (`collective.fixed_join`),
    the same bits on each. x [..., D]; y the same, or with weights as in `_sum`."""
    return collective.fixed_join(x, _sum(y, weights, x), scale, weight, bias, eps, rows)


@sum_and_join.register_fake
def _(x: Tensor, y: Tensor, weights: Tensor | None, scale: float, weight: Tensor, bias: Tensor | None, eps: float,
      rows: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    total, normed = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    return total, normed, collective.new_scores(x, rows)


@operator("moe_fast::all_gather")
def all_gather(x: Tensor, ranks: int) -> Tensor:
    """x [..., n] -> [ranks * ..., n], that of rank 0 first."""
    y = x.new_empty(ranks * x.shape[0], *x.shape[1:])
    with_others(_gather, y, x.contiguous(), group=_world.group)
    return y


@all_gather.register_fake
def _(x: Tensor, ranks: int) -> Tensor:
    return x.new_empty(ranks * x.shape[0], *x.shape[1:])


def _sum(y: Tensor, weights: Tensor | None, like: Tensor) -> Tensor:
    """`sum_over_ranks` by what was measured as the fastest for so many bytes, where it takes them.

    y: of the shape and dtype of `like`; or, with weights fp32 [T, A], [T, A, D] to be added up first, which a push does
    by itself for one token.
    """
    method = next((method for most, method in _world.choice if like.nbytes <= most), "library")
    method = method if can_sum(method, like.nbytes) else "library"
    if weights is not None:
        if method == "push" and like.numel() == like.shape[-1]:
            return with_others(collective.push_sum, y.contiguous(), _world.inbox, like, weights.contiguous())
        y = weighted_sum(y, weights).to(like.dtype).view_as(like)
    return with_others(sum_over_ranks, method, y.contiguous())


def sum_over_ranks(method: str, x: Tensor) -> Tensor:
    """The sum of a contiguous x by one of `methods`, each of which can be recorded in a CUDA graph.

    The bits are the same on all ranks: the library computes each number once and hands it on, as does two-shot; in
    one-shot every rank adds all parts up, in the order of ranks (PyTorch's `load_and_reduce`), as it does after a push.
    """
    if method == "push":
        return collective.push_sum(x, _world.inbox, x)
    if method == "library":
        y = x.clone()
        dist.all_reduce(y, group=_world.group)
        return y
    buffer = _world.buffer[: x.nbytes].view(x.dtype).view(x.shape)
    if method == "one-shot":
        return torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, x, "sum", _world.group.group_name)
    buffer.copy_(x)
    return torch.ops.symm_mem.two_shot_all_reduce_out(buffer, "sum", _world.group.group_name, torch.empty_like(x))


def can_sum(method: str, nbytes: int) -> bool:
    """Whether one of `methods` takes a message of so many bytes."""
    most = LARGEST_PUSH if method == "push" else LARGEST_MESSAGE
    return method == "library" or (nbytes <= most and nbytes % 4 == 0)


def _symmetric(device: torch.device, *shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Zeros in memory that all ranks of a host can read and write, and where each rank's are, int64 [N]."""
    # Imported here, because it is of no use without GPUs.
    import torch.distributed._symmetric_memory as symmetric

    tensor = symmetric.empty(*shape, dtype=dtype, device=device).zero_()
    return tensor, torch.tensor(symmetric.rendezvous(tensor, _world.group).buffer_ptrs, device=device)


def methods(device: torch.device) -> list[str]:
    """The ways to sum that there are; those through symmetric memory need GPUs of one host that read each other's."""
    found = ["library"]
    if device.type != "cuda" or int(os.environ.get("LOCAL_WORLD_SIZE", 0)) != size():
        return found
    own = torch.cuda.current_device()
    if total(int(all(torch.cuda.can_device_access_peer(own, n) for n in range(size()) if n != own))) < size():
        return found
    if _world.buffer is None:
        _world.buffer, _ = _symmetric(device, LARGEST_MESSAGE, dtype=torch.uint8)
        programs = LARGEST_PUSH // 4 // collective.WORDS
        inbox = _symmetric(device, 2, size(), programs, collective.WORDS, dtype=torch.int64)
        turns = torch.zeros(programs, dtype=torch.int32, device=device)
        _world.inbox = collective.Inbox(*inbox, turns, rank())
        torch.cuda.synchronize()
        dist.barrier()  # no one writes before all have cleared
    return [*found, "one-shot", "two-shot", "push"]


def seconds(work: Callable[[], object], calls: int = 20) -> float:
    """Time of a sum, or what has one, on CUDA, inside a recorded graph as when decoding; the slowest rank's."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's own thread goes on asking for events
        for _ in range(calls):
            work()
    times = []
    for _ in range(4):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / calls)
    slowest = torch.tensor(min(times))
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def choose(dtype: torch.dtype, device: torch.device) -> str:
    """Measure how to sum messages from a token's to a prompt's, keep the fastest way by size -> what came of it."""
    if len(found := methods(device)) == 1 or dtype not in (torch.bfloat16, torch.float32):
        return "sums over ranks by the library"
    _world.choice, said = [], []
    for nbytes in SIZES:
        x = torch.zeros(nbytes // dtype.itemsize, dtype=dtype, device=device)
        times = {method: seconds(partial(sum_over_ranks, method, x)) for method in found if can_sum(method, nbytes)}
        best = min(times, key=times.get)
        _world.choice.append((nbytes, best))
        said.append(f"{nbytes >> 10} KB {best} {times[best] * 1e6:.1f} us (library {times['library'] * 1e6:.1f})")
    return "sums over ranks: " + ", ".join(said)

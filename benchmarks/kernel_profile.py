"""The kernels of a decode step or a prompt: their times, and the speed where reads are known."""

import statistics
from collections.abc import Callable, Sequence

import torch

from formats.packed import Packed, PackedExpertLinear
from model import ExpertLinear, Linear, Transformer
from runtime.session import Session

Event = tuple[str, float, float]  # name, start and duration in us


def record_kernels(run: Callable[[], object]) -> list[Event]:
    """Return each kernel and copy that `run` starts, in any order."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    events = [event for event in profile.events() if event.device_type == cuda]
    return [(e.name, e.time_range.start, e.time_range.elapsed_us()) for e in events]


def cuda_kernels(session: Session, steps: int, position: int) -> list[Event]:
    """Return each kernel and copy of `steps` steps from a position on, sampling included."""
    step = next(iter(session.steps.values()))
    session.position.fill_(position)
    session.cached = [position + steps] * session.batch  # by which the session chooses kernels

    def run() -> None:
        for _ in range(steps):
            step()

    return record_kernels(run)


def weight_reads(model: Transformer) -> list[int]:
    """Return the bytes that a token reads of each product's weights, in order of definition."""
    sizes, args = [], model.args
    for module in model.modules():
        if isinstance(module, Linear | ExpertLinear | Packed):
            size = sum(parameter.nbytes for parameter in module.parameters())
            stacked = isinstance(module, ExpertLinear | PackedExpertLinear)
            sizes.append(size * args.n_active // args.n_expert if stacked else size)
    return sizes


def known_reads(times: Sequence[float], reads: Sequence[int], bandwidth: float) -> dict[int, int]:
    """Match kernels with weight reads where that is certain: index in `times` -> bytes.

    times: us; reads: bytes; both in order; bandwidth: bytes/s. Names do not tell what a kernel
    reads, but each weight is read by one kernel, in order, no faster than memory allows. A match
    is certain if the earliest kernel that this allows is the latest too. Reads below 1 us are not
    matched.
    """
    bounds = [size / bandwidth / 1.05 * 1e6 for size in reads]  # 5 %: bandwidth is measured too
    kept = [(bound, size) for bound, size in zip(bounds, reads, strict=True) if bound >= 1]

    def match(backwards: bool) -> list[int]:
        order = iter(range(len(times))[::-1] if backwards else range(len(times)))
        found = []
        for bound, _ in reversed(kept) if backwards else kept:
            found += next(([n] for n in order if times[n] >= bound), [])
        return found

    first, last = match(False), match(True)[::-1]
    matched = zip(first, last, kept, strict=True) if len(first) == len(kept) else ()
    return {n: size for n, other, (_, size) in matched if n == other}


def split_steps(events: Sequence[Event], steps: int) -> list[list[Event]]:
    """Return the events of each step. Raises ValueError if steps differ."""
    events = sorted(events, key=lambda event: event[1])
    size = len(events) // steps
    split = [events[n * size : (n + 1) * size] for n in range(steps)]
    names = [name for name, _, _ in split[0]]
    same = all([name for name, _, _ in step] == names for step in split)
    if not size or len(events) % steps or not same:
        seen = f"{len(events)} kernels seen, not the same in each of {steps} steps"
        raise ValueError(f"--kernels: {seen}: run again")
    return split


def added_times(step: Sequence[Event]) -> tuple[list[float], float]:
    """Return what each kernel adds to a step, us, and the share of it in which no kernel ran.

    A kernel adds the time from the end of all earlier ones to its own end: kernels overlap.
    """
    end, idle, added = step[0][1], 0.0, []
    for _, start, duration in step:
        idle += max(0.0, start - end)
        added.append(max(0.0, start + duration - end))
        end += added[-1]
    return added, idle / sum(added)


def kernel_table(
    events: Sequence[Event], steps: int, layers: int, reads: Sequence[int], bandwidth: float
) -> dict:
    """Return a step's times, medians over `steps` equal steps, with a row for each kernel's name.

    gaps: share of the span in which no kernel ran; the profiler may widen it. A row's `per` is
    "layer" if its launches are a multiple of the layers, else "token"; us_per is the time of all
    its launches in one of them; adds_us what they add to it (`added_times`); gb_s the speed of
    those whose bytes are known (`known_reads`), or None.
    """
    split = split_steps(events, steps)
    names = [name for name, _, _ in split[0]]
    added, gaps = zip(*map(added_times, split), strict=True)
    adds = [statistics.median(times) for times in zip(*added, strict=True)]
    times = [statistics.median(step[n][2] for step in split) for n in range(len(names))]
    known, rows = known_reads(times, reads, bandwidth), []
    for name in dict.fromkeys(names):
        at = [n for n in range(len(names)) if names[n] == name]
        read, total = [n for n in at if n in known], sum(times[n] for n in at)
        per, count = ("token", 1) if len(at) % layers else ("layer", layers)
        speed = None
        if read:
            speed = sum(known[n] for n in read) / sum(times[n] for n in read) / 1e3
        rows.append(
            {
                "name": name,
                "per": per,
                "launches": len(at) // count,
                "us": total / len(at),
                "us_per": total / count,
                "adds_us": sum(adds[n] for n in at) / count,
                "gb_s": speed,
            }
        )
    rows.sort(key=lambda row: -row["us"] * names.count(row["name"]))
    return {
        "steps": steps,
        "span_us": statistics.median(map(sum, added)),
        "kernels_us": sum(times),
        "gaps": statistics.median(gaps),
        "rows": rows,
    }


def kernel_lines(table: dict) -> list[str]:
    """Return a `kernel_table` as text."""
    times = f"{table['span_us']:.1f} us, kernels {table['kernels_us']:.1f} us"
    lines = [
        f"  median of {table['steps']}: {times}, gaps {table['gaps']:.1%}",
        "    launches      us each  us in all   adds us   GB/s  name",
    ]
    form = (
        "  {launches:4} a {per}  {us:9.2f}  {us_per:9.2f}  {adds_us:8.2f}  {speed:>5}  {name:.80}"
    )
    for row in table["rows"]:
        speed = "" if row["gb_s"] is None else round(row["gb_s"])
        lines.append(form.format(**row, speed=speed))
    return lines


def launch_lines(events: Sequence[Event], layers: int) -> list[str]:
    """Return the launches of a layer as text: in order, with what each adds, medians over layers.

    A kernel that has not the same number of launches in each layer has one row, a mean.
    """
    events = sorted(events, key=lambda event: event[1])
    added, idle = added_times(events)
    names = [name for name, _, _ in events]
    rows: dict[tuple[str, int], list[int]] = {}
    for name in dict.fromkeys(names):
        at = [n for n in range(len(names)) if names[n] == name]
        each = 1 if len(at) % layers else len(at) // layers
        for place, n in enumerate(at):
            rows.setdefault((name, place % each), []).append(n)
    total = sum(added)
    lines = [
        f"  {total:.1f} us from the first kernel to the last, {idle:.1%} idle",
        "  launches   us each  adds us  name",
    ]
    for (name, _), at in sorted(rows.items(), key=lambda row: row[1][0]):
        times = [(events[n][2], added[n]) for n in at]
        mean = statistics.median if len(at) == layers else statistics.mean
        us, adds = map(mean, zip(*times, strict=True))
        lines.append(f"  {len(at):8}  {us:8.2f} {adds:8.2f}  {name:.90}")
    return lines

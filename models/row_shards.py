"""Shards of weights in several formats: each range of rows has a shard of its own."""

import math
import re

from models.family import Shard


def shard_of(table: dict[str, Shard], path: str) -> Shard | None:
    """Return a module's shard: that of its own path, if layers differ, or of all layers."""
    return table.get(path) or table.get(re.sub(r"^layers\.\d+\.", "", path))


def range_shards(table: dict[str, Shard], format: dict) -> dict[str, Shard]:
    """Return the shards of weights in several formats: one for each range of rows, by its path.

    Raises ValueError for a range that ends within a segment.
    """
    found = {}
    for path, counts in format.get("rows", {}).items():
        shard = shard_of(table, path)
        along = 1 if ".experts." in path else 0  # the output dimension
        left = list(shard.segments) if shard and shard.axis == along else []
        for number, count in enumerate(counts if shard else []):
            if shard.axis != along:
                found[f"{path}.{number}"] = shard
                continue
            segments = []
            while left and count > 0:
                segments.append(left.pop(0))
                count -= math.prod(segments[-1])
            if count:
                raise ValueError(f"{path} has ranges of rows that no rank can share: start 1")
            found[f"{path}.{number}"] = Shard(along, tuple(segments))
    return found


def local_format(format: dict, ranges: dict[str, Shard], ranks: int) -> dict:
    """Return a format with the rows that one rank has of each range."""
    rows = {}
    for path, counts in format.get("rows", {}).items():
        shards = [ranges.get(f"{path}.{number}") for number in range(len(counts))]
        along = 1 if ".experts." in path else 0
        rows[path] = [
            local_rows(shard, ranks) if shard and shard.axis == along else count
            for shard, count in zip(shards, counts, strict=True)
        ]
    return format | {"rows": rows}


def local_rows(shard: Shard, ranks: int) -> int:
    """Return the rows of one rank."""
    return sum(count // min(count, ranks) * width for count, width in shard.segments)

"""Which experts a model chooses how often: with it a cache starts with the ones that are used most.

`scripts/study_offload.py --profile FILE` writes one; expert_profile.json beside a checkpoint's
weights travels with it.
"""

import errno
import json
from dataclasses import dataclass
from pathlib import Path

FILE_NAME = "expert_profile.json"


@dataclass(frozen=True)
class Profile:
    """How often each layer with experts chose each of its E experts."""

    counts: list[list[int]]
    path: Path | None = None  # for messages

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({"counts": self.counts}) + "\n")

    def by_use(self, layers: int, experts: int) -> list[list[int]]:
        """Return by layer its experts, the most used ones last.

        Raises ValueError for the profile of another model.
        """
        if [len(row) for row in self.counts] != [experts] * layers:
            shape = f"{len(self.counts)} layers of {len(self.counts[0]) if self.counts else 0}"
            raise ValueError(
                f"{self.path}: it is about {shape} experts and the model has {layers} of "
                f"{experts}: make it anew with scripts/study_offload.py --profile"
            )
        return [
            sorted(range(experts), key=lambda expert, row=row: (row[expert], -expert))
            for row in self.counts
        ]

    def hit_ratio(self, slots: int) -> float:
        """Return the share of uses that the R = slots most used experts have, of all layers."""
        used = sum(sum(sorted(row)[-slots:]) for row in self.counts)
        return used / max(1, sum(map(sum, self.counts)))


def read_profile(path: Path) -> Profile:
    """Return the profile in a file. Raises ValueError if it has none."""
    try:
        if path.exists() and not path.is_file():  # a device may have no end
            raise OSError(errno.EINVAL, "not a regular file")
        counts = json.loads(path.read_text())["counts"]
        valid = all(type(n) is int and n >= 0 for row in counts for n in row)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        cause = getattr(error, "strerror", None) or type(error).__name__
        raise ValueError(
            f"{path}: it cannot be read as a profile ({cause}): "
            "make it with scripts/study_offload.py --profile"
        ) from None
    if not valid:
        raise ValueError(f"{path}: its counts are no numbers of uses: make it anew")
    return Profile(counts, path)

"""One rank of tests/test_ring.py: `ranks.py N ring_worker CHECKPOINT LENGTH COUNT`.

Rank 0 prints the greedy tokens after a prompt of LENGTH tokens, in chunks, and the slots of each
layer's cache.
"""

import json
import sys

import torch

from generate import load_model
from parallel import process_group
from runtime.sampling import Sampling
from runtime.session import Session, SessionOptions


def prompt(length: int) -> list[int]:
    return [(37 * n * n + 11 * n + 5) % 150 for n in range(length)]


def answer(model, length: int, count: int) -> dict:
    session = Session(model, length + count, SessionOptions(prefill_chunk=100))
    tokens = list(session.stream(prompt(length), count, Sampling(temperature=0)))
    process_group.check_same_tokens(session.ids)
    return {"tokens": tokens, "slots": [state.kv.shape[3] for state in session.states]}


def main() -> None:
    torch.set_num_threads(1)
    process_group.start("cpu")
    found = answer(load_model(sys.argv[1], "cpu"), *map(int, sys.argv[2:4]))
    if process_group.is_main():
        print(json.dumps(found))
    process_group.stop()


if __name__ == "__main__":
    main()

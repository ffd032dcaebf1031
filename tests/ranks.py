"""Run a module's `main` on several ranks: `python tests/ranks.py RANKS MODULE ARGUMENTS...`.

The ranks are forked after the module's imports, which take longer than most cases. Tests of
torchrun itself are in tests/test_tp.py.
"""

import importlib
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable


def run_rank(rank: int, ranks: int, port: int, main: Callable[[], int | None]) -> None:
    """Run `main` in the environment that torchrun gives a rank, and exit with what it returns."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    sys.exit(main())


def main() -> int:
    _, ranks, module, *arguments = sys.argv
    work = importlib.import_module(module).main
    sys.argv = [module, *arguments]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    given = [(rank, int(ranks), port, work) for rank in range(int(ranks))]
    processes = [fork.Process(target=run_rank, args=one) for one in given]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return int(any(process.exitcode for process in processes))


if __name__ == "__main__":
    sys.exit(main())

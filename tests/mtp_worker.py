"""One rank of tests/test_mtp.py: `ranks.py N mtp_worker FOLDER` runs FOLDER/cases.json.

Rank 0 writes FOLDER/found.json. It has for each case the tokens, the drafts of all passes, and the
head's bytes that each rank holds.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from generate import load_model
from parallel import process_group
from runtime.loading import load_head
from runtime.sampling import Sampling
from runtime.session import Session
from runtime.speculation import Speculation

DRAFTS = 3


def run_case(directory: str, parallel: str, prompt: list[int], temperature: float) -> dict:
    """Continue a prompt by 16 tokens with drafts of the checkpoint's head."""
    model = load_model(directory, "cpu", parallel=parallel)
    head = load_head(directory, model, parallel=parallel)
    speculation = Speculation(Session(model, 64), DRAFTS, head=head)
    drafter, drafts = speculation.drafter, []
    propose = drafter.propose

    def propose_and_keep(limit: int) -> int:
        count = propose(limit)
        drafts.append(drafter.drafts[0].tolist())
        return count

    drafter.propose = propose_and_keep
    tokens = list(speculation.stream(prompt, 16, Sampling(temperature, seed=3)))
    process_group.check_same_tokens([tokens])
    held = [None] * process_group.size()
    shared = {id(parameter) for parameter in model.parameters()}
    own = sum(p.nbytes for p in head.parameters() if id(p) not in shared)
    dist.all_gather_object(held, own) if len(held) > 1 else held.__setitem__(0, own)
    return {"tokens": tokens, "drafts": drafts, "bytes_held": held}


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    process_group.start("cpu")
    cases = json.loads((folder / "cases.json").read_text())
    found = {name: run_case(*case) for name, case in cases.items()}
    if process_group.is_main():
        (folder / "found.json").write_text(json.dumps(found))
    process_group.stop()


if __name__ == "__main__":
    main()

"""One rank of tests/test_tp.py: `ranks.py N tp_worker FOLDER` runs FOLDER/cases.json.

Rank 0 writes FOLDER/found.json. It has for each case the largest difference of logits, the
greedy tokens, whether all ranks had the same bits, the bytes that each rank read, and whether
the compiler was loaded.
"""

import json
import sys
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from checkpoint import Checkpoint
from generate import load_model
from model import Transformer
from parallel import process_group
from runtime.runner import CompiledRunner
from runtime.sampling import Sampling
from runtime.session import Session, SessionOptions

PROMPTS = [3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62, 64], [7, 11, 13]
NEW_TOKENS = 8


def prompt_logits(model: Transformer) -> torch.Tensor:
    """Return the first prompt's logits at all positions.

    All tokens but the last run at once (experts are grouped), the last alone (gathered).
    """
    model.setup_cache(1, 32)
    tokens = torch.tensor([PROMPTS[0]])
    parts = tokens[:, :-1], tokens[:, -1:]
    where = torch.arange(tokens.shape[1])[None].split([part.shape[1] for part in parts], dim=1)
    logits = [model(*call, all_positions=True) for call in zip(parts, where, strict=True)]
    return torch.cat(logits, dim=1)


def compiled_logits(model: Transformer) -> torch.Tensor:
    """Return the logits of the first two tokens, run one by one by compiled blocks."""
    model.setup_cache(1, 32)
    runner = CompiledRunner(model)
    # Only blocks are compiled to C++; logits are traced, which checks the all-gather's fake.
    runner.compiled_begin = type(model).begin
    runner.compiled_logits = torch.compile(type(model).logits, fullgraph=True, backend="aot_eager")
    steps = enumerate(PROMPTS[0][:2])
    calls = [(torch.tensor([[token]]), torch.tensor([[n]])) for n, token in steps]
    return torch.stack([model(*call, runner=runner) for call in calls], dim=1)


def greedy_tokens(model: Transformer) -> list[list[int]]:
    """Return the next tokens of both prompts, decoded together."""
    session = Session(model, 32, SessionOptions(batch=len(PROMPTS)))
    steps = list(session.stream_all(PROMPTS, NEW_TOKENS, Sampling(temperature=0)))
    process_group.check_same_tokens(session.ids)
    return [list(row) for row in zip(*steps, strict=True)]


class CountingCheckpoint(Checkpoint):
    """Counts the bytes read from it."""

    bytes_read = 0

    def read(self, name, index=None, device="cpu"):
        tensor = super().read(name, index, device)
        self.bytes_read += tensor.nbytes
        return tensor


def gather(value) -> list:
    """Return the values of all ranks."""
    values = [None] * process_group.size()
    dist.all_gather_object(values, value)
    return values


def run_case(case: dict) -> dict:
    """Run one case -> what FOLDER/found.json has of it."""
    source = CountingCheckpoint(case["checkpoint"])
    model = load_model(source, "cpu", parallel=case["parallel"])
    expected = load_file(Path(case["checkpoint"]) / "expected" / "logits.safetensors")["logits"]
    logits = compiled_logits(model) if case["compiled"] else prompt_logits(model)
    expected = expected[:, : logits.shape[1]]
    return {
        "difference": (logits - expected).abs().max().item(),
        "tokens": greedy_tokens(model) if case["greedy"] else None,
        "same_bits": len(set(gather(zlib.crc32(logits.numpy().tobytes())))) == 1,
        "bytes_read": gather(source.bytes_read),
        "compiler": "torch._dynamo" in sys.modules,
        "bytes_held": gather(sum(parameter.nbytes for parameter in model.parameters())),
    }


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    process_group.start("cpu")
    assert process_group.least(process_group.rank() + 3) == 3
    cases = json.loads((folder / "cases.json").read_text())
    found = {name: run_case(case) for name, case in cases.items()}
    if process_group.is_main():
        (folder / "found.json").write_text(json.dumps(found))
    process_group.stop()


if __name__ == "__main__":
    main()

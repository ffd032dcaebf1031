"""One rank of tests/test_tp.py: `torchrun ... tp_worker.py FOLDER` runs each case of FOLDER/cases.json.

Rank 0 writes FOLDER/found.json: for each case the largest difference of logits, the greedy tokens, whether all ranks
had the same bits, the bytes that each rank read, and whether the compiler was loaded.
"""

import json
import sys
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

import world
from checkpoint import Checkpoint
from generate import load_model
from model import Block, Stages, Transformer
from session import Sampling, Session

PROMPTS = [3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62, 64], [7, 11, 13]
NEW = 8


def logits(model: Transformer) -> torch.Tensor:
    """Of the first prompt at all positions: those of its many tokens but one, which are grouped by expert, and those of
    the last one, whose experts are gathered."""
    model.setup_cache(1, 32)
    tokens = torch.tensor([PROMPTS[0]])
    parts = tokens[:, :-1], tokens[:, -1:]
    where = torch.arange(tokens.shape[1])[None].split([part.shape[1] for part in parts], dim=1)
    return torch.cat([model(*call, all_positions=True) for call in zip(parts, where, strict=True)], dim=1)


def compiled_logits(model: Transformer) -> torch.Tensor:
    """Of the first two tokens, one after the other, by compiled blocks: what a decode step has of collectives."""
    model.setup_cache(1, 32)
    finish = torch.compile(Transformer.finish, fullgraph=True, backend="aot_eager")  # traced, but not made C++ of
    stages = Stages(block=torch.compile(Block.forward, fullgraph=True), finish=finish)
    steps = [(torch.tensor([[token]]), torch.tensor([[n]])) for n, token in enumerate(PROMPTS[0][:2])]
    return torch.stack([model(*step, stages=stages) for step in steps], dim=1)


def greedy(model: Transformer) -> list[list[int]]:
    """The next tokens of both prompts, decoded together."""
    session = Session(model, 32, batch=len(PROMPTS))
    steps = list(session.stream_all(PROMPTS, NEW, Sampling(temperature=0)))
    world.check_tokens(session.ids)
    return [list(row) for row in zip(*steps, strict=True)]


class Counting(Checkpoint):
    """A checkpoint that counts the bytes asked of it."""

    bytes_read = 0

    def read(self, name, index=None, device="cpu"):
        tensor = super().read(name, index, device)
        self.bytes_read += tensor.nbytes
        return tensor


def everyone(value) -> list:
    values = [None] * world.size()
    dist.all_gather_object(values, value)
    return values


def main() -> None:
    folder, found = Path(sys.argv[1]), {}
    torch.set_num_threads(1)
    world.start("cpu")
    for name, case in json.loads((folder / "cases.json").read_text()).items():
        source = Counting(case["checkpoint"])
        model = load_model(source, "cpu", parallel=case["parallel"])
        expected = load_file(Path(case["checkpoint"]) / "expected" / "logits.safetensors")["logits"]
        ours = compiled_logits(model) if case["compiled"] else logits(model)
        expected = expected[:, : ours.shape[1]]
        found[name] = {
            "difference": (ours - expected).abs().max().item(),
            "tokens": greedy(model) if case["greedy"] else None,
            "same_bits": len(set(everyone(zlib.crc32(ours.numpy().tobytes())))) == 1,
            "bytes_read": everyone(source.bytes_read),
            "compiler": "torch._dynamo" in sys.modules,
            "bytes_held": everyone(sum(parameter.nbytes for parameter in model.parameters())),
        }
    if world.is_main():
        (folder / "found.json").write_text(json.dumps(found))
    world.stop()


if __name__ == "__main__":
    main()

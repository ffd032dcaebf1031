"""Speed of loading a checkpoint to the device, and the host memory that it takes.

    python benchmarks/load_checkpoint.py --arch Mixtral-8x7B --layers 4

Writes a converted checkpoint with random weights at real shapes into a temporary folder, loads it
twice (the second time from the page cache) and prints one JSON object. Prediction: host memory
grows by less than one tensor + 1 GB, because a tensor is mapped, copied to the device and unmapped
before the next one.
"""

import json
import re
import tempfile
import threading
import time
from pathlib import Path

import torch

from checkpoint import Checkpoint, Writer
from cli.parser import Parser
from generate import load_model
from models import args_of_checkpoint
from models.random_weights import RandomWeights, architecture, first_layers
from parallel.device import pick_device
from tp import ModelShard


def anonymous_bytes() -> int:
    """Return this process's anonymous memory (RssAnon), which mapped files are no part of."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) * 1024


class Peak:
    """`with Peak() as peak: ...`; then `peak.bytes` is the largest growth of anonymous memory."""

    def __enter__(self) -> "Peak":
        self.start, self.bytes, self.done = anonymous_bytes(), 0, threading.Event()
        self.watcher = threading.Thread(target=self.watch, daemon=True)
        self.watcher.start()
        return self

    def watch(self) -> None:
        while not self.done.wait(0.001):
            self.bytes = max(self.bytes, anonymous_bytes() - self.start)

    def __exit__(self, *_) -> None:
        self.done.set()
        self.watcher.join()


def write_checkpoint(source: RandomWeights, target: Path, device: torch.device) -> None:
    """Write random weights as a checkpoint, one file a layer."""
    layers = range(source.args["n_layer"])
    model = ModelShard(args_of_checkpoint(source), source.format, "tensor", rank=0, ranks=1).model
    stored = [name for name, _ in model.named_parameters()]
    files = {f"layer_{layer:02d}.safetensors": f"layers.{layer}." for layer in layers}
    with Writer(target, args=source.args, format=source.format) as writer:
        for file, prefix in files.items():
            names = [name for name in stored if name.startswith(prefix)]
            writer.write(file, {name: source.read(name, device=device).cpu() for name in names})
        rest = [name for name in stored if not name.startswith("layers.")]
        tensors = {name: source.read(name, device=device).cpu() for name in rest}
        writer.write("rest.safetensors", tensors)


def measure(source: RandomWeights, target: Path, device: torch.device) -> dict:
    """Write a checkpoint to `target` and load it twice; return seconds, bytes and GB/s."""
    start = time.perf_counter()
    write_checkpoint(source, target, device)
    result = {"write_s": time.perf_counter() - start}
    checkpoint = Checkpoint(target)
    sizes = [checkpoint.nbytes(name) for name in checkpoint.tensors]
    result |= {"bytes": sum(sizes), "largest_tensor_bytes": max(sizes)}
    torch.zeros(1, device=device)  # the device's own context is no part of the figures
    for turn in ("first", "second"):
        start = time.perf_counter()
        with Peak() as peak:
            load_model(target, device)
        seconds = time.perf_counter() - start
        result[f"{turn}_load_s"] = seconds
        result[f"{turn}_gb_s"] = result["bytes"] / 1e9 / seconds
        result[f"{turn}_host_bytes"] = peak.bytes
    return result


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/load_checkpoint.py --arch Mixtral-8x7B --layers 4",
            "python benchmarks/load_checkpoint.py --arch OLMoE-1B-7B --layers 2 --device cpu",
        ),
    )
    parser.add_argument("--arch", default="Mixtral-8x7B")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    return parser


def main() -> None:
    options = build_parser().parse_args()
    device = pick_device(options.device)
    source = RandomWeights(first_layers(architecture(options.arch), options.layers))
    result = {"arch": options.arch, "layers": options.layers, "device": str(device)}
    with tempfile.TemporaryDirectory() as folder:
        result |= measure(source, Path(folder) / "model_bf16", device)
    print(json.dumps(result))


if __name__ == "__main__":
    main()

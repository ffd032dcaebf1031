"""How fast a checkpoint streams to the device, and how much host memory that takes.

    python benchmarks/load_checkpoint.py --arch Mixtral-8x7B --layers 4

Writes a converted checkpoint with random weights at real shapes into a temporary folder, loads it twice (the second
time from the page cache) and prints one JSON object. Prediction: host memory grows by less than one tensor + 1 GB,
because a tensor is mapped, copied to the device and unmapped before the next one.
"""

import json
import re
import tempfile
import threading
import time
from pathlib import Path

import torch

from checkpoint import Checkpoint, Writer, pick_device
from command import Parser
from generate import load_model
from shapes import RandomWeights, architecture, first_layers


def anonymous_bytes() -> int:
    """Anonymous memory of this process (RssAnon): what mapped files take is not in it."""
    return int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


class Peak:
    """`with Peak() as peak: ...`: afterwards `peak.bytes` is the most anonymous memory seen above that at the start."""

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
    args = first_layers(architecture(options.arch), options.layers)
    source, result = RandomWeights(args), {"arch": options.arch, "layers": options.layers, "device": str(device)}
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "model_bf16"
        start = time.perf_counter()
        with Writer(target, args=source.args, format=source.format) as writer:
            for layer in range(args.n_layer):
                names = [name for name in source.shapes if name.startswith(f"layers.{layer}.")]
                writer.write(f"layer_{layer:02d}.safetensors", {n: source.read(n, device=device).cpu() for n in names})
            rest = [name for name in source.shapes if not name.startswith("layers.")]
            writer.write("rest.safetensors", {n: source.read(n, device=device).cpu() for n in rest})
        result["write_s"] = time.perf_counter() - start
        result["bytes"] = sum(Checkpoint(target).nbytes(name) for name in Checkpoint(target).tensors)
        result["largest_tensor_bytes"] = max(Checkpoint(target).nbytes(name) for name in Checkpoint(target).tensors)
        torch.zeros(1, device=device)  # the device's own context is not part of the figure
        for turn in ("first", "second"):
            start = time.perf_counter()
            with Peak() as peak:
                model = load_model(target, device)
            result[f"{turn}_load_s"] = time.perf_counter() - start
            result[f"{turn}_gb_s"] = result["bytes"] / 1e9 / result[f"{turn}_load_s"]
            result[f"{turn}_host_bytes"] = peak.bytes
            del model
    print(json.dumps(result))


if __name__ == "__main__":
    main()

"""The CUDA kernels of a recorded decode step, with the time of each: python benchmarks/decode_kernels.py --arch ARCH

Prints kernels by their share of the step: launches a step, mean microseconds, name. With few layers the names of a
layer's kernels are the same as at full depth; those of the head and of sampling are launched once.
"""

import argparse
import dataclasses

from benchmark import RandomWeights, architecture, cuda_kernels, number_format
from generate import load_model
from session import Sampling, Session


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="Mixtral-8x7B")
    parser.add_argument("--mode", default="bf16", help="as in benchmark.py")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    args = dataclasses.replace(architecture(options.arch), n_layer=options.layers)
    session = Session(load_model(RandomWeights(args, number_format(options.mode, args)), "cuda"), 256, compile=True)
    list(session.stream(range(5), 5, Sampling(seed=0)))
    for event in sorted(cuda_kernels(session, options.steps), key=lambda event: -event.device_time_total):
        mean = event.device_time_total / event.count
        print(f"{event.count / options.steps:7.1f} x {mean:8.2f} us  {event.key[:100]}")


if __name__ == "__main__":
    main()

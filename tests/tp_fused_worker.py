"""One rank of a test of tests/test_tp.py: fused decode kernels of a checkpoint, on GPUs.

    torchrun ... tp_fused_worker.py FOLDER CHECKPOINT

FOLDER/prompt.json has token ids, FOLDER/forced.json, if it exists, an answer. Rank 0 writes
FOLDER/found.json: its own answer, whether all ranks had the same x after every layer of every
token, and whether products were sent. FOLDER/logits.safetensors: the logits at each token of the
answer, the forced one if any.
"""

import json
import sys
import zlib
from pathlib import Path

import torch
from safetensors.torch import save_file
from tp_worker import gather

from generate import load_model
from parallel import process_group
from runtime.fused_decode import FusedRunner
from runtime.kernel_choice import choose_runner
from runtime.sampling import Sampling
from runtime.session import Session, SessionOptions

NEW_TOKENS = 80


class RecordingRunner(FusedRunner):
    """Keeps a checksum of x after each layer."""

    def __init__(self, model):
        super().__init__(model)
        self.sums: list[int] = []

    def block(self, *arguments):
        x, *rest = super().block(*arguments)
        self.sums.append(zlib.crc32(x.cpu().view(torch.int16).numpy().tobytes()))
        return x, *rest


def main() -> None:
    folder, checkpoint = map(Path, sys.argv[1:])
    device = process_group.start("cuda")
    model = load_model(checkpoint, device, torch.bfloat16)
    runner_class = choose_runner(model, "auto")
    session = Session(model, 256, SessionOptions(compile=True, runner_class=runner_class))
    prompt = json.loads((folder / "prompt.json").read_text())
    answers = []
    for _ in range(2):  # captured, then replayed
        session.reset()
        answers.append(list(session.stream(prompt, NEW_TOKENS, Sampling(temperature=0))))
        process_group.check_same_tokens(session.ids)
    forced = folder / "forced.json"
    answer = json.loads(forced.read_text()) if forced.exists() else answers[0]
    session.reset()
    runner, logits = RecordingRunner(model), []
    for position, token in enumerate([*prompt, *answer]):
        call = (torch.tensor([[value]], device=device) for value in (token, position))
        logits.append(model(*call, runner=runner).float().cpu())
    same_bits = len(set(map(tuple, gather(runner.sums)))) == 1 if process_group.size() > 1 else True
    if process_group.is_main():
        found = {"answers": answers, "same_bits": same_bits, "runner": runner_class.__name__}
        found["sent"] = process_group.state().token_dim > 0
        (folder / "found.json").write_text(json.dumps(found))
        save_file(
            {"logits": torch.cat(logits)[len(prompt) - 1 : -1]}, folder / "logits.safetensors"
        )
    process_group.stop()


if __name__ == "__main__":
    main()

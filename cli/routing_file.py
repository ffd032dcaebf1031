"""The experts of generated tokens as a file, which the chat page opens."""

import json
from pathlib import Path

from cli.command import describe_os_error
from host.files import replace_text

VERSION = 1
DIGITS = 4  # a weight's


class RoutingRecorder:
    """Collects the experts and weights of answers' tokens, and writes them.

    The file is JSON: {"moe_fast_routing": 1, "model", "format", "answers": [{"prompt", "tokens"
    [T], "experts" [T][L][A], "weights" [T][L][A]}]}, of the pass that chose each token.
    """

    def __init__(self, path: Path, model: str, format: str):
        self.path, self.model, self.format = path, model, format
        self.answers: list[dict] = []
        self.first = 0  # answer of the present batch

    def begin(self, prompts: list[str]) -> None:
        """Begin a batch of answers."""
        self.first = len(self.answers)
        empty = {"tokens": (), "experts": (), "weights": ()}
        self.answers += [
            {"prompt": prompt} | {name: list(value) for name, value in empty.items()}
            for prompt in prompts
        ]

    def add(self, number: int, text: str, experts: list, weights: list) -> None:
        """Add the next token of an answer of the batch. experts, weights: [L][A]."""
        answer = self.answers[self.first + number]
        answer["tokens"].append(text)
        answer["experts"].append(experts)
        answer["weights"].append([[round(weight, DIGITS) for weight in row] for row in weights])

    def write(self) -> None:
        """Write the file, or leave what was there. Raises ValueError if it cannot be written."""
        value = {"moe_fast_routing": VERSION, "model": self.model, "format": self.format}
        text = json.dumps(value | {"answers": self.answers})
        try:
            replace_text(self.path, text + "\n")
        except OSError as error:
            why = describe_os_error(error, str(self.path))
            raise ValueError(f"--save_routing: {why}") from None

"""Random prompts, and their chunks through a model."""

from pathlib import Path

import torch
from torch import Tensor

from generate import load_model
from model import Chunk, Transformer
from runtime.sampling import Sampling
from runtime.session import Session, SessionOptions


def prompt(length: int = 40, seed: int = 1, batch: int = 1) -> Tensor:
    """Draw tokens [batch, length] of a vocabulary of 160."""
    return torch.randint(160, (batch, length), generator=torch.Generator().manual_seed(seed))


def run(model: Transformer, tokens: Tensor, start: int = 0, **options) -> Tensor:
    """Run tokens [1, Q] as a chunk of row 0 -> logits [1, Q, V]."""
    chunk = Chunk(torch.tensor([0]), start + tokens.shape[1])
    return model(tokens, chunk, all_positions=True, **options)


def run_chunks(model: Transformer, tokens: Tensor, *sizes: int, length: int = 384) -> Tensor:
    """Run tokens [1, Q] in chunks of these sizes and of the rest -> logits [1, Q, V].

    length: positions of the new cache.
    """
    model.setup_cache(1, length)
    rest, start, parts = tokens.shape[1] - sum(sizes), 0, []
    for part in tokens.split((*sizes, rest) if rest else sizes, dim=1):
        parts.append(run(model, part, start))
        start += part.shape[1]
    return torch.cat(parts, dim=1)


def all_logits(directory: Path, tokens: Tensor, *sizes: int) -> Tensor:
    """Run a checkpoint's model in fp32, as `run_chunks` does."""
    return run_chunks(load_model(directory, "cpu"), tokens, *sizes)


def assert_compiled_is_eager(directory: Path, ids: list[int]) -> None:
    """Compare greedy tokens of a compiled session, whose prompt has padding, with eager ones."""
    found, compiled = [], SessionOptions(compile=True, compile_prefill=True, prefill_chunk=64)
    for options in (SessionOptions(), compiled):
        session = Session(load_model(directory, "cpu"), 160, options)
        found.append(list(session.stream(ids, 12, Sampling(temperature=0))))
    assert found[0] == found[1]

"""The begin of a step: embeddings and RoPE of a few tokens, in one kernel.

It does what `model.Transformer.begin` does where no layer reads masks. Inductor would take seconds
to import and to compile that.
"""

from dataclasses import dataclass

from torch import Tensor

from ops.launch import await_previous, check_shapes, jit, launch, tl


@dataclass(frozen=True)
class Rows:
    """Settings of `_begin`."""

    dim: int  # D
    rope: int  # numbers of a position in RoPE's table
    block: int = 1024  # numbers that a program copies


@jit
def _copy(source, target, row, to, begin, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Copy BLOCK numbers of a row of `source`, from number `begin` on, to row `to` of `target`."""
    number = begin + tl.arange(0, BLOCK)
    is_there = number < WIDTH
    tl.store(
        target + to * WIDTH + number, tl.load(source + row * WIDTH + number, is_there), is_there
    )


# Grid [T, blocks of the wider row]. A token is -1 if no logit was finite: any embedding serves.
@jit
def _begin(tokens, positions, embedding, table, x, rope, s: tl.constexpr, PDL: tl.constexpr):
    token, begin = tl.program_id(0).to(tl.int64), tl.program_id(1) * s.block
    await_previous(PDL)
    id, position = tl.load(tokens + token), tl.load(positions + token)
    if begin < s.dim:
        _copy(embedding, x, tl.maximum(id, 0), token, begin, s.dim, s.block)
    if begin < s.rope:
        _copy(table, rope, position, token, begin, s.rope, s.block)


def begin_tokens(
    tokens: Tensor, positions: Tensor, embedding: Tensor, table: Tensor
) -> tuple[Tensor, Tensor]:
    """Return embeddings x [B, Q, D] and RoPE [B, Q, 1, R] of tokens at positions, int64 [B, Q].

    embedding [V, D]; table fp32 [S, R], as of `Transformer.make_rope_table`.
    """
    D, R, shape = embedding.shape[1], table.shape[1], tokens.shape
    check_shapes(positions=(positions, shape))
    x, rope = embedding.new_empty(*shape, D), table.new_empty(*shape, 1, R)
    s = Rows(D, R)
    tensors = tokens.contiguous(), positions.contiguous(), embedding, table, x, rope
    launch(_begin, (tokens.numel(), -(-max(D, R) // s.block)), *tensors, settings=s)
    return x, rope

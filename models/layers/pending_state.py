"""What recurrent layers keep of a sequence: a state, the last inputs of its convolution, and tokens
that the state has not taken in.

Tokens of a call of 2 to MAX_TENTATIVE are pending: the next call takes in those before its own
position, from their inputs. A state after each of them would be more memory.

Letters: B sequences, Q tokens, N channels of the convolution, W its width, M = MAX_TENTATIVE.
"""

import torch
from torch import Tensor, nn

from model import Context, KVCache, Linear, Transformer, new_parameter
from ops.inductor import materialize
from ops.plain.pending import last_inputs

MAX_TENTATIVE = 16  # tokens of one call that can still be refused
MAX_SNAPSHOTS = 8  # runtime/snapshots.py keeps no more of a sequence
PROMPT_CHUNK = 2048  # tokens of a prompt that run at once, if it is not changed


class PendingState(nn.Module):
    """Each sequence's state and pending tokens, updated in place.

    It implements the protocol of runtime/sequence_state.py. A subclass gives the buffers, each of
    [batch, ...], with `state` first, then `inputs` [batch, W - 1 + M, N], what gives the pending
    tokens' gates [batch, M, ...], and `first` [batch, H]: 1 + the first pending token's position.
    """

    state: Tensor
    inputs: Tensor
    first: Tensor

    def __init__(self, width: int, buffers: dict[str, Tensor]):
        super().__init__()
        self.width = width
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=False)

    def keep_pending(
        self,
        rows: Tensor,
        count: Tensor,
        position: Tensor,
        inputs: tuple[Tensor, Tensor],
        **gates: Tensor,
    ) -> None:
        """Make a call's tokens the pending ones; an idle row's stay.

        inputs: the window before the call [B, W - 1, N], and the call's own [B, Q, N].
        """
        first = (position + 1).expand(-1, self.first.shape[1])
        values = {"inputs": torch.cat(inputs, dim=1), **gates, "first": first}
        for name, value in values.items():
            buffer = getattr(self, name)[:, : value.shape[1]]
            exists = (count > 0).view(-1, *[1] * (value.dim() - 1))
            buffer.index_copy_(0, rows, torch.where(exists, value, buffer[rows]))

    def keep_state(
        self,
        rows: Tensor,
        count: Tensor,
        inputs: tuple[Tensor, Tensor],
        after: Tensor,
        is_step: bool,
    ) -> None:
        """Store the state after a call's tokens. inputs: as of `keep_pending`.

        is_step: rows = 0 ...
        """
        moved = last_inputs(*inputs, count)
        if is_step:
            self.state[: len(rows)].copy_(after)
            self.window[: len(rows)].copy_(moved)
        else:
            self.state.index_copy_(0, rows, after)
            self.window.index_copy_(0, rows, moved)

    def pending(self) -> list[Tensor]:
        """Return the pending tokens: inputs, what gives their gates, and `first`."""
        return [buffer for name, buffer in self.named_buffers() if name != "state"]

    @property
    def window(self) -> Tensor:
        """The last inputs that the state has taken in, [batch, W - 1, N]."""
        return self.inputs[:, : self.width - 1]

    def recurrent(self, row: int) -> list[Tensor]:
        """Return a row's state, with its pending tokens."""
        return [buffer[row] for buffer in self.buffers()]

    def row(self, row: int) -> list[Tensor]:
        """Return a row's memory as views [1, all values]."""
        return [buffer[row].view(1, -1) for buffer in self.buffers()]

    def reset(self, row: int | None = None) -> None:
        """Forget a row's sequence, or all."""
        for buffer in self.buffers():
            (buffer if row is None else buffer[row]).zero_()

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers())


def call_place(
    context: Context, B: int, Q: int, device: torch.device
) -> tuple[Tensor | None, Tensor]:
    """Return the row of a chunk or None, and the positions where the sequences begin, [B, 1]."""
    if context.chunk is None:
        return None, context.positions[:, :1]
    return context.chunk.row, torch.full((B, 1), context.chunk.end - Q, device=device)


def real_counts(context: Context, B: int, Q: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return how many of each sequence's tokens are real, [B], and which, bool [B, Q, 1]."""
    count = torch.full((B,), Q, device=device) if context.last is None else context.last + 1
    return count, (torch.arange(Q, device=device) < count.unsqueeze(1)).unsqueeze(-1)


class Convolution(nn.Module):
    """Holds the weight [N, W], and the bias [N], of a depthwise causal convolution."""

    def __init__(self, channels: int, width: int, bias: bool = False):
        super().__init__()
        self.weight = new_parameter(channels, width)
        self.bias = new_parameter(channels) if bias else None


class RecurrentLayer(nn.Module):
    """[B, Q, D] -> same, in place of an attention layer.

    A wide product of x and a narrow one make what `mix` takes. The narrow one gives the gates: it
    is apart since it is never packed, as an error of the decay grows with every token.
    """

    window = None
    reads_masks = False
    projections: tuple[tuple[str, str], str]  # names of both products, and of the last one
    narrow: int  # outputs of the narrow product

    def make_state(self, batch: int, like: Tensor) -> PendingState:
        raise NotImplementedError

    def has_kernels(self) -> bool:
        """Whether `mix_few` runs on the state's device."""
        raise NotImplementedError

    def mix(self, wide: Tensor, narrow: Tensor, context: Context) -> Tensor:
        """All between the projections."""
        raise NotImplementedError

    def mix_few(self, wide: Tensor, narrow: Tensor, context: Context) -> Tensor:
        """`mix` of a few tokens, by kernels."""
        raise NotImplementedError

    def allocate(
        self, batch: int, length: int, cache_class: type[KVCache], like: Tensor
    ) -> PendingState:
        """Make this layer's state, of any length, on the device of `like`, and return it."""
        self.state = self.make_state(batch, like)
        return self.state

    def products(self) -> list[nn.Module | None]:
        """Return the modules of the wide product, the narrow one (None: joined), and the last."""
        (wide, narrow), last = self.projections
        return [getattr(self, name) for name in (wide, narrow, last)]

    def join_projections(self) -> None:
        """Make the first two products one, unless the wide is packed: a step has a kernel less."""
        wide, narrow, _ = self.products()
        if type(wide) is Linear and narrow is not None:
            joined = torch.cat((wide.weight, narrow.weight))
            wide.weight = nn.Parameter(joined, requires_grad=False)
            setattr(self, self.projections[0][1], None)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        wide, narrow, last = self.products()
        y = wide(x)
        y = self.core(y, context) if narrow is None else self.mix(y, narrow(x), context)
        # Materialized, or Inductor recomputes the gated norm in every row of the product.
        return last(materialize(y))

    def core(self, projected: Tensor, context: Context) -> Tensor:
        """The joined results of both projections -> the input of the last product."""
        return self.mix(*self.split(projected), context)

    def split(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        return projected.split((projected.shape[-1] - self.narrow, self.narrow), dim=-1)

    def is_few(self, projected: Tensor, context: Context) -> bool:
        return projected.shape[1] <= MAX_TENTATIVE and context.chunk is None

    def takes(self, projected: Tensor, context: Context) -> bool:
        """Whether `fused_core` takes this call: as of `runtime.fused_attention`."""
        return self.is_few(projected, context) and self.has_kernels()

    def fused_core(self, projected: Tensor, context: Context) -> Tensor:
        """`core` by kernels alone, without the compiler."""
        return self.mix_few(*self.split(projected), context)


def join_projections(model: Transformer) -> None:
    """Join the first products of all recurrent layers that are on a GPU."""
    for block in model.layers:
        if isinstance(block.attention, RecurrentLayer) and model.embedding.weight.is_cuda:
            block.attention.join_projections()

"""What recurrent layers keep of a sequence: a state, the last inputs of its convolution, and tokens
that the state has not taken in.

Tokens of a call of 2 to MAX_TENTATIVE are pending: `settle`, or the next call, takes in those
before its own position, from their inputs. A state after each of them would be more memory.

Letters: B sequences, Q tokens, N channels of the convolution, W its width, M = MAX_TENTATIVE.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from model import Context, KVCache, Linear, Transformer, new_parameter
from ops.attention.recurrent_parts import convolve_prompt
from ops.inductor import materialize
from ops.plain.pending import MAX_SNAPSHOTS, MAX_TENTATIVE

PROMPT_CHUNK = 2048  # tokens of a prompt that run at once, if it is not changed


class RecurrentInputs(NamedTuple):
    """What a layer appends for a call's tokens."""

    x: Tensor  # [B, Q, N], before the convolution
    gates: Tensor  # [B, Q, numbers that make a token's gates]
    weights: Any  # a NamedTuple: those between the projections, as the kernels take them


class PendingState(nn.Module):
    """Each sequence's state, the last W - 1 inputs of its convolution, and its pending tokens.

    All are updated in place. It implements the protocol of runtime/sequence_state.py.
    """

    state: Tensor
    inputs: Tensor
    gates: Tensor
    first: Tensor
    arrivals: Tensor
    take_in: Callable  # the operator `take_in_pending` of the layer's kernels

    def __init__(self, batch: int, sizes: Any, like: Tensor, shape: tuple[int, ...], counters: int):
        """sizes: have `width`, `channels` and `gates`. shape: of a sequence's state, heads first.

        counters: of programs that share a sequence's inputs.
        """
        super().__init__()
        self.sizes, self.width = sizes, sizes.width
        M, device = MAX_TENTATIVE, like.device
        # `state`, then those of `ops.attention.delta_state.Pending`. `arrivals` is no row's memory:
        # scratch of the kernels, zeros between calls.
        buffers = {
            "state": torch.zeros(batch, *shape, dtype=torch.float32, device=device),
            "inputs": like.new_zeros(batch, self.width - 1 + M, sizes.channels),
            "gates": like.new_zeros(batch, M, sizes.gates),
            "first": torch.zeros(batch, shape[0], dtype=torch.int64, device=device),
            "arrivals": torch.zeros(batch, counters, dtype=torch.int32, device=device),
        }
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=False)

    def advance(
        self,
        x: Tensor,
        gates: Tensor,
        weights: Any,
        last: Tensor | None,
        state: Tensor,
        row: Tensor | None,
    ) -> Tensor:
        """Return what a call's tokens read from the state [B, Q, ...]; update that in place.

        x [B, Q, N]: convolved. last, row: as in `gated_delta_chunk`.
        """
        raise NotImplementedError

    def append(self, values: RecurrentInputs, context: Context) -> Tensor:
        """Take in the call's real tokens; return what they read from the state, [B, Q, ...].

        Fewer sequences than there are rows are the first ones. A row whose sequence begins with a
        chunk has been reset.
        """
        (x, gates, weights), (B, Q, _), chunk = values, values.x.shape, context.chunk
        rows = row = call_rows(context, B, x.device)
        # Compiled in any case: Dynamo would compile the begin of a sequence apart.
        if chunk is None or torch.compiler.is_compiling() or chunk.end > Q:
            place = call_begins(context, B, Q, x.device), context.last, chunk and chunk.row
            self.take_in(self.state, self.pending(), [*weights], *place, self.arrivals)
        state, window, inputs = self.state, self.window, None
        if 1 < Q <= MAX_TENTATIVE:  # they will be pending: copies take them in
            state, window, row = state[rows], window[rows], None
            inputs = torch.cat((window, x), dim=1)
        elif Q == 1 and chunk is None:  # a step
            state, window, row = state[:B], window[:B], None
        taps = weights.conv, getattr(weights, "conv_bias", None)
        convolved = convolve_prompt(x, window, *taps, context.last, row)
        y = self.advance(convolved, gates, weights, context.last, state, row)
        if inputs is not None:
            count, begins = (f(context, B, Q, x.device) for f in (count_real, call_begins))
            self.keep_pending(rows, count, begins, inputs, gates)
        return y

    def keep_pending(
        self, rows: Tensor, count: Tensor, begins: Tensor, inputs: Tensor, gates: Tensor
    ) -> None:
        """Make a call's tokens the pending ones; an idle row's stay.

        begins: of `call_begins`. inputs: those before the call [B, W - 1, N], then the call's own
        [B, Q, N].
        """
        first = (begins + 1).expand(-1, self.first.shape[1])
        for memory, value in zip(self.pending(), (inputs, gates, first), strict=True):
            buffer = memory[:, : value.shape[1]]
            exists = (count > 0).view(-1, *[1] * (value.dim() - 1))
            buffer.index_copy_(0, rows, torch.where(exists, value, buffer[rows]))

    def pending(self) -> list[Tensor]:
        """Return the pending tokens: inputs, what gives their gates, and `first`."""
        return [self.inputs, self.gates, self.first]

    @property
    def window(self) -> Tensor:
        """The last inputs that the state has taken in, [batch, W - 1, N]."""
        return self.inputs[:, : self.width - 1]

    def memory(self) -> list[Tensor]:
        """Return all that is remembered of the rows: the state, and the pending tokens."""
        return [self.state, *self.pending()]

    def recurrent(self, row: int) -> list[Tensor]:
        """Return a row's state, with its pending tokens."""
        return [tensor[row] for tensor in self.memory()]

    def row(self, row: int) -> list[Tensor]:
        """Return a row's memory as views [1, all values]."""
        return [tensor[row].view(1, -1) for tensor in self.memory()]

    def reset(self, row: int | None = None) -> None:
        """Forget a row's sequence, or all."""
        for tensor in self.memory():
            (tensor if row is None else tensor[row]).zero_()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.memory())


def snapshot_numbers(args: Any, sizes: Any, state: int) -> int:
    """Return the numbers of all copies that are kept of a sequence. state: numbers of a layer's."""
    pending = (sizes.width - 1 + MAX_TENTATIVE) * sizes.channels
    return MAX_SNAPSHOTS * (args.n_layer - len(args.full_layers)) * (state + pending)


def call_place(context: Context, B: int, Q: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the rows of a call's sequences, and where they begin."""
    return call_rows(context, B, device), call_begins(context, B, Q, device)


def call_rows(context: Context, B: int, device: torch.device) -> Tensor:
    """Return the rows of a call's sequences, int64 [B]."""
    return torch.arange(B, device=device) if context.chunk is None else context.chunk.row


def call_begins(context: Context, B: int, Q: int, device: torch.device) -> Tensor:
    """Return the positions where a call's tokens begin, int64 [B, 1]."""
    if context.chunk is None:
        return context.positions[:, :1]
    return torch.full((B, 1), context.chunk.end - Q, device=device)


def count_real(context: Context, B: int, Q: int, device: torch.device) -> Tensor:
    """Return how many of each sequence's Q tokens are real, [B]."""
    return torch.full((B,), Q, device=device) if context.last is None else context.last + 1


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
    state_class: Callable[..., PendingState]
    narrow: int  # outputs of the narrow product
    settle: Callable  # the function of the layer's kernels

    def make_state(self, batch: int, like: Tensor) -> PendingState:
        """Return the state of `batch` sequences, on the device of `like`."""
        return self.state_class(batch, self.sizes, like)

    def weights(self) -> Any:
        """Return the weights between the projections, as the kernels take them."""
        raise NotImplementedError

    def tensors(self) -> list[Tensor]:
        """Return what `settle` takes of the layer."""
        memory = self.state
        return [memory.state, *memory.pending(), *self.weights(), memory.arrivals]

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

    def takes(self, projected: Tensor, context: Context) -> bool:
        """Whether `fused_core` takes this call: as in `runtime.fused_attention`."""
        is_few = projected.shape[1] <= MAX_TENTATIVE and context.chunk is None
        return is_few and self.has_kernels()

    def mixes_by_kernels(self, projected: Tensor, context: Context) -> bool:
        """Whether `mix` runs them: in compiled code. Eager code keeps the reference."""
        return torch.compiler.is_compiling() and self.takes(projected, context)

    def fused_core(self, projected: Tensor, context: Context, *planes) -> Tensor:
        """`core` by kernels alone, without the compiler."""
        return self.mix_few(*self.split(projected), context, *planes)


class RecurrentTransformer(Transformer):
    """A model of which some layers are recurrent."""

    def tie_weights(self) -> None:
        """Join the first products of recurrent layers on a GPU, too."""
        super().tie_weights()
        for block in self.layers:
            if isinstance(block.attention, RecurrentLayer) and self.embedding.weight.is_cuda:
                block.attention.join_projections()

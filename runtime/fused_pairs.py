"""The input of a head for multi-token prediction (models/multi_token.py), by kernels of ours."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from model import RMSNorm, Transformer
from ops.products import dense
from ops.products.few_tokens import multiply_planes
from ops.products.planes import make_planes, takes_planes
from ops.products.weights import Weight
from ops.step.chain import PairInputs, join_pairs
from runtime.fused_layer import kernel_weight
from runtime.plain_forms import undeclared


def begin_pairs(model: Any) -> Callable | None:
    """Return what begins a call of a head; None, if its input is another, or it is no head."""
    if not hasattr(model, "hidden_norm") or type(model).begin is not Transformer.begin:
        return None
    embeds = [kind for kind in type(model).__mro__ if "embed" in vars(kind)]
    norms = model.embedding_norm, model.hidden_norm
    is_plain = len(embeds) == 2 and not any(undeclared(norm, RMSNorm) for norm in norms)
    if not is_plain or model.fc.bias is not None:
        return None
    try:
        weight = kernel_weight(model.fc)
    except ValueError:
        return None
    return partial(run_pairs, model, weight)


def run_pairs(head: Any, fc: Weight, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [B, Q, D] and RoPE [B, Q, 1, R] of tokens at positions, int64 [B, Q].

    head: `hidden` is set, as for `HeadModel.embed`.
    """
    norms = head.embedding_norm.weight, head.hidden_norm.weight
    inputs = PairInputs(head.embedding.weight, head.rope_table, *norms)
    pairs, rope = join_pairs(tokens, positions, head.hidden, inputs, head.embedding_norm.eps)
    pairs = pairs.flatten(0, 1)
    if takes_planes(fc, len(pairs), pairs.dtype):
        x = pairs.new_empty(len(pairs), fc.out)
        multiply_planes(make_planes(pairs, None, fc), fc, x)
    else:
        x = dense.dense_product(pairs, fc)
    return x.view(*tokens.shape, -1), rope

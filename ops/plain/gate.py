"""Gates of attention's output, in plain PyTorch.

Letters: H query heads, C head dim.
"""

import torch.nn.functional as F
from torch import Tensor


def gate_heads(heads: Tensor, gate: Tensor, activation: str) -> Tensor:
    """Multiply heads [..., H * C] by an activation of their gate, [..., H * C] or [..., H].

    activation: one of ops.declared.OUTPUT_GATES.
    """
    factor = gate.sigmoid() if activation == "sigmoid" else F.softplus(gate.float()).to(gate.dtype)
    if gate.shape[-1] == heads.shape[-1]:
        return heads * factor
    return (heads.unflatten(-1, (gate.shape[-1], -1)) * factor.unsqueeze(-1)).flatten(-2)

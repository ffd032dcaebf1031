"""A causal convolution over few positions, each channel by itself, in PyTorch.

The reference for the kernel of ops/attention/short_conv.py.

Letters: B sequences, Q tokens, N channels, W the convolution's width.
"""

from torch import Tensor


def causal_conv(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve each channel with its last W inputs: inputs [B, W - 1 + Q, N] -> [B, Q, N].

    The first W - 1 inputs are those before the call's tokens. weight [N, W], bias [N]. The sum is
    fp32.
    """
    Q, W = inputs.shape[1] - weight.shape[1] + 1, weight.shape[1]
    wide, taps = inputs.float(), weight.float()
    y = sum(wide[:, n : n + Q] * taps[:, n] for n in range(W))
    return (y if bias is None else y + bias.float()).to(inputs.dtype)

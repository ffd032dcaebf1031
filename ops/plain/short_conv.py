"""A causal convolution over few positions, each channel by itself, in PyTorch.

The reference for the kernel of ops/attention/short_conv.py.

Letters: B sequences, Q tokens, N channels, W the convolution's width.
"""

from torch import Tensor


def causal_conv(inputs: Tensor, weight: Tensor, bias: Tensor | None, dilation: int = 1) -> Tensor:
    """Convolve each channel with W of its last inputs: inputs [B, R - 1 + Q, N] -> [B, Q, N].

    The inputs are `dilation` positions apart, of R = (W - 1) dilation + 1; the first R - 1 are
    those before the call's tokens. weight [N, W], bias [N]. The sum is fp32.
    """
    before = (weight.shape[1] - 1) * dilation
    Q, W = inputs.shape[1] - before, weight.shape[1]
    wide, taps = inputs.float(), weight.float()
    y = sum(wide[:, n * dilation : n * dilation + Q] * taps[:, n] for n in range(W))
    return (y if bias is None else y + bias.float()).to(inputs.dtype)

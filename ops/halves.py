"""Two bf16 numbers in a word of 32 bits, the first in its low half -> fp32."""

from ops.launch import jit, tl


@jit
def low_half(words):
    return (words << 16).to(tl.float32, bitcast=True)


@jit
def high_half(words):
    return (words & -65536).to(tl.float32, bitcast=True)

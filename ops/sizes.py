"""Sizes of grids and tiles, on the host: Triton's own functions take 4 us a call there."""


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def pow2(n: int) -> int:
    """Return the least power of two from n on; of 0, 0."""
    return 1 << (n - 1).bit_length() if n else 0

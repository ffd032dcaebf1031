"""Offloading: experts live in host memory, and each layer keeps some of them on the GPU."""

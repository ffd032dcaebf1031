"""Offloading: experts are in host memory, and each layer caches some of them on the GPU."""

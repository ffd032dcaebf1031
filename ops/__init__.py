"""Triton kernels, custom operators, and everything that touches Inductor's private API."""

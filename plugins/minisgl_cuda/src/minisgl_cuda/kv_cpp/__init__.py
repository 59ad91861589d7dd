"""KV backend ``cuda`` in CUDA C++, compiled for the machine's GPU at first use."""

from .backend import CudaKVKernels

__all__ = ["CudaKVKernels"]

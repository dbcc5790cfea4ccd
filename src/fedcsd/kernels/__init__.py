"""Arithmetic in C for what PyTorch does slowly on a CPU, compiled at first use; PyTorch does the rest."""

from fedcsd.kernels.convolution import convolution

__all__ = ["convolution"]

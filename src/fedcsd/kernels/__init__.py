"""Arithmetic in C for what PyTorch does slowly on a CPU, compiled at first use; PyTorch does the rest."""

from fedcsd.kernels.convolution import convolution
from fedcsd.kernels.csd import csd

__all__ = ["convolution", "csd"]

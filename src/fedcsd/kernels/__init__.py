"""Arithmetic in C and CUDA for what PyTorch does slowly, compiled at first use; PyTorch does the rest."""

from fedcsd.kernels.convolution import convolution
from fedcsd.kernels.csd import csd

__all__ = ["convolution", "csd"]

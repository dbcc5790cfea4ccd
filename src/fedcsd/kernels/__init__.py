"""Compute in C and CUDA what PyTorch computes slowly; the sources are compiled at first use.

Networks and losses in PyTorch's operators do not belong here.
"""

from fedcsd.kernels.convolution import convolution
from fedcsd.kernels.csd import csd

__all__ = ["convolution", "csd"]

"""Compare the compiled convolution with PyTorch's operators on one thread; medians of interleaved runs.

python benchmarks/convolution.py
"""

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from fedcsd.kernels.build import library
from fedcsd.kernels.convolution import convolution, plain
from fedcsd.models.simple_cnn import SimpleCNN

SHAPES = [(1, 6, 5, 28), (6, 16, 5, 12), (3, 32, 3, 32), (16, 32, 3, 32)]  # channels in, out, kernel, image


class Plain(SimpleCNN):
    """Return the simple CNN with PyTorch's convolutions."""

    def forward(self, x: Tensor) -> Tensor:
        x = plain(x, self.conv1.weight, self.conv1.bias, 0, 2, True)
        x = plain(x, self.conv2.weight, self.conv2.bias, 0, 2, True)
        return self.classifier(self.fc2(self.fc1(x.flatten(1))))  # type: ignore[no-any-return]


def compare(what: str, *ways: Callable[[], object], seconds: float = 3.0) -> None:
    """Processor time of each way, in turns, so that whatever else the machine does meets them alike."""
    times: list[list[float]] = [[] for _ in ways]
    for way in ways:
        way()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 5:
        for way, taken in zip(ways, times, strict=True):
            start = time.thread_time()
            way()
            taken.append(1000 * (time.thread_time() - start))
    before, now = (statistics.median(taken) for taken in times)
    print(f"{what:44} PyTorch {before:7.2f} ms   kernel {now:7.2f} ms   {before / now:4.1f} ×", flush=True)


def step(model: SimpleCNN, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]


def theirs(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return plain(x, weight, bias, padding=0, pool=2, relu=True)


def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return convolution(x, weight, bias, pool=2, relu=True)


def layer(convolve: Callable[..., Tensor], *tensors: Tensor) -> None:
    out = convolve(*tensors)
    torch.autograd.grad(out, tensors, torch.ones_like(out))


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if library() is None:
        sys.exit("no compiled kernel here: install gcc")
    models = Plain((1, 28, 28), 10), SimpleCNN((1, 28, 28), 10)
    for batch in (10, 64):
        x, y = torch.randn(batch, 1, 28, 28), torch.randint(0, 10, (batch,))
        compare(f"simple CNN, step of {batch}", *(partial(step, model, x, y) for model in models))
    x = torch.randn(500, 1, 28, 28)
    with torch.no_grad():
        compare("simple CNN, forward of 500", *(partial(model, x) for model in models))
    for channels, planes, side, size in SHAPES:
        for batch in (10, 64):
            x = torch.randn(batch, channels, size, size, requires_grad=True)
            weight = torch.randn(planes, channels, side, side, requires_grad=True)
            bias = torch.randn(planes, requires_grad=True)
            compare(
                f"{channels} → {planes}, {side}×{side}, images {size}×{size}, batch {batch}",
                partial(layer, theirs, x, weight, bias),
                partial(layer, ours, x, weight, bias),
                seconds=1,
            )


if __name__ == "__main__":
    main()

"""Test FedCSD's fused loss on a GPU."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fedcsd.kernels import csd
from helpers.csd import (
    VARIANTS,
    close,
    decided,
    example,
    finite_where_pytorch_has_it,
    kernels,
    result,
    stacked_is_a_loop,
)


@pytest.mark.gpu
class TestOnAGpu:
    @pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(map(str, v.values())))
    @pytest.mark.parametrize(
        ("batch", "classes"), [(1, 2), (9, 10), (64, 10), (70, 33), (64, 100), (5, 130), (3, 1000)]
    )
    def test_every_variant(
        self, calls: list[bool], variant: dict[str, Any], batch: int, classes: int
    ) -> None:
        how = {"mu": 0.3, "tau": 4.0, **variant}
        for size in (1.0, 50.0, 1e4):
            tensors = example(batch, classes, seed=batch, size=size)
            tensors[2][::2] = 0  # type: ignore[index]
            assert how["mask"] != "adaptive" or decided(tensors[1], tensors[3])
            there = [f if f is None else f.cuda() for f in tensors]
            found = result(there, **how)
            close(found, tensors, how)
            assert all(torch.equal(a, b) for a, b in zip(found, result(there, **how), strict=True))
            with torch.no_grad():
                assert torch.equal(csd(*there, **how)[0], found[0])
        assert calls == [True, True, False] * 3

    @pytest.mark.parametrize("shared", [True, False])
    @pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(map(str, v.values())))
    def test_stacked(self, calls: list[bool], shared: bool, variant: dict[str, Any]) -> None:
        stacked_is_a_loop("cuda", shared, variant)
        assert len(calls) == 2 + 3

    def test_what_is_not_finite_stays_so(self, calls: list[bool]) -> None:
        finite_where_pytorch_has_it("cuda")
        assert calls

    def test_a_teacher_that_knows_nothing_is_filtered(self) -> None:
        for classes in (2, 3, 10, 100, 130):
            z, _, p, y = (f.cuda() for f in example(20, classes))  # type: ignore[union-attr]
            loss = csd(z, torch.full_like(z, 7.3), p, y, mu=1.0, tau=10.0)[0]
            torch.testing.assert_close(loss, F.cross_entropy(z, y, reduction="none"))

    def test_a_label_that_is_no_class_gives_nan(self) -> None:
        z, t, p, y = (f.cuda() for f in example())  # type: ignore[union-attr]
        y[3], y[5] = 10, -1
        loss = csd(z, t, p, y, mu=1.0, tau=1.0)[0]
        assert loss.isnan().nonzero()[:, 0].tolist() == [3, 5]

    def test_many_classes_are_left_to_pytorch(self, calls: list[bool]) -> None:
        z, t, p, y = (f.cuda() for f in example(3, kernels.CLASSES + 1))  # type: ignore[union-attr]
        assert csd(z, t, p, y, mu=1.0, tau=1.0)[0].isfinite().all()
        assert calls == []

    def test_captured_in_a_graph(self) -> None:
        z, t, p, y = (f.cuda() for f in example())  # type: ignore[union-attr]
        expected = result((z, t, p, y), mu=0.3, tau=4.0)
        z.requires_grad_()
        weights = torch.linspace(-1, 2, len(y), device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.autograd.grad((csd(z, t, p, y, mu=0.3, tau=4.0)[0] * weights).sum(), z)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = csd(z, t, p, y, mu=0.3, tau=4.0)[0]
            (gradient,) = torch.autograd.grad((loss * weights).sum(), z)
        graph.replay()
        assert torch.equal(loss.detach(), expected[0])
        assert torch.equal(gradient, expected[2])

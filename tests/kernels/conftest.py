"""A fixture that counts calls of FedCSD's kernel."""

from typing import Any

import pytest

from helpers.csd import kernels


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each time the kernel ran, whether the slope was wanted."""
    seen: list[bool] = []
    kernel = kernels._forward

    def counted(*arguments: Any, slope: bool = True) -> Any:
        seen.append(slope)
        return kernel(*arguments, slope=slope)

    monkeypatch.setattr(kernels, "_forward", counted)
    return seen

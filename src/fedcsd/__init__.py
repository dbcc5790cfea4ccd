"""Federated learning on skewed data: FedCSD and the methods it is compared with.

Names are loaded when they are first used, so that `import fedcsd` and `fedcsd --help` do not wait
for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_homes = {
    "run": "fedcsd.jobs",
    "resume": "fedcsd.jobs",
    "load_run": "fedcsd.jobs",
    "Run": "fedcsd.jobs",
    "compare": "fedcsd.comparison",
    "FedAvg": "fedcsd.methods.fedavg",
    "FedCSD": "fedcsd.methods.fedcsd",
    "Method": "fedcsd.methods",
    "Dataset": "fedcsd.data",
    "UserError": "fedcsd.errors",
    "RunStopped": "fedcsd.errors",
}

if TYPE_CHECKING:
    from fedcsd.comparison import compare
    from fedcsd.data import Dataset
    from fedcsd.errors import RunStopped, UserError
    from fedcsd.jobs import Run, load_run, resume, run
    from fedcsd.methods import Method
    from fedcsd.methods.fedavg import FedAvg
    from fedcsd.methods.fedcsd import FedCSD

__all__ = [
    "Dataset",
    "FedAvg",
    "FedCSD",
    "Method",
    "Run",
    "RunStopped",
    "UserError",
    "compare",
    "load_run",
    "resume",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _homes:
        raise AttributeError(f"module 'fedcsd' has no attribute {name!r}")
    return getattr(import_module(_homes[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

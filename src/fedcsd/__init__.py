"""Train federated models on skewed data with FedCSD and the methods it is compared with.

Names are loaded when they are first used, so that `import fedcsd` and `fedcsd --help` do not wait
for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedcsd.__version__ import __version__ as __version__

_homes = {
    "run": "fedcsd.experiments.running",
    "resume": "fedcsd.experiments.resuming",
    "load_run": "fedcsd.experiments.running",
    "Run": "fedcsd.experiments.running",
    "compare": "fedcsd.results.comparison",
    "ConfidencePenalty": "fedcsd.methods.confidence_penalty",
    "Ditto": "fedcsd.methods.ditto",
    "FeatureDistillation": "fedcsd.methods.feature_distillation",
    "FedAdagrad": "fedcsd.methods.fedadagrad",
    "FedAdam": "fedcsd.methods.fedadam",
    "FedAvg": "fedcsd.methods.fedavg",
    "FedAvgM": "fedcsd.methods.fedavgm",
    "FedBN": "fedcsd.methods.fedbn",
    "FedCSD": "fedcsd.methods.fedcsd",
    "FedDC": "fedcsd.methods.feddc",
    "FedDyn": "fedcsd.methods.feddyn",
    "FedGKD": "fedcsd.methods.fedgkd",
    "FedNova": "fedcsd.methods.fednova",
    "FedNTD": "fedcsd.methods.fedntd",
    "FedPer": "fedcsd.methods.fedper",
    "FedProto": "fedcsd.methods.fedproto",
    "FedProx": "fedcsd.methods.fedprox",
    "FedYogi": "fedcsd.methods.fedyogi",
    "LabelSmoothing": "fedcsd.methods.label_smoothing",
    "LogitDistillation": "fedcsd.methods.logit_distillation",
    "Moon": "fedcsd.methods.moon",
    "Scaffold": "fedcsd.methods.scaffold",
    "Method": "fedcsd.methods",
    "Dataset": "fedcsd.data",
    "UserError": "fedcsd.errors",
    "RunStopped": "fedcsd.errors",
    "Diverged": "fedcsd.errors",
}

if TYPE_CHECKING:
    from fedcsd.data import Dataset
    from fedcsd.errors import Diverged, RunStopped, UserError
    from fedcsd.experiments.resuming import resume
    from fedcsd.experiments.running import Run, load_run, run
    from fedcsd.methods import Method
    from fedcsd.methods.confidence_penalty import ConfidencePenalty
    from fedcsd.methods.ditto import Ditto
    from fedcsd.methods.feature_distillation import FeatureDistillation
    from fedcsd.methods.fedadagrad import FedAdagrad
    from fedcsd.methods.fedadam import FedAdam
    from fedcsd.methods.fedavg import FedAvg
    from fedcsd.methods.fedavgm import FedAvgM
    from fedcsd.methods.fedbn import FedBN
    from fedcsd.methods.fedcsd import FedCSD
    from fedcsd.methods.feddc import FedDC
    from fedcsd.methods.feddyn import FedDyn
    from fedcsd.methods.fedgkd import FedGKD
    from fedcsd.methods.fednova import FedNova
    from fedcsd.methods.fedntd import FedNTD
    from fedcsd.methods.fedper import FedPer
    from fedcsd.methods.fedproto import FedProto
    from fedcsd.methods.fedprox import FedProx
    from fedcsd.methods.fedyogi import FedYogi
    from fedcsd.methods.label_smoothing import LabelSmoothing
    from fedcsd.methods.logit_distillation import LogitDistillation
    from fedcsd.methods.moon import Moon
    from fedcsd.methods.scaffold import Scaffold
    from fedcsd.results.comparison import compare

__all__ = [
    "ConfidencePenalty",
    "Dataset",
    "Ditto",
    "Diverged",
    "FeatureDistillation",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedBN",
    "FedCSD",
    "FedDC",
    "FedDyn",
    "FedGKD",
    "FedNTD",
    "FedNova",
    "FedPer",
    "FedProto",
    "FedProx",
    "FedYogi",
    "LabelSmoothing",
    "LogitDistillation",
    "Method",
    "Moon",
    "Run",
    "RunStopped",
    "Scaffold",
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
    return sorted([*__all__, "__version__"])

"""Check every reply before it counts, and refuse a wrong one with the reason.

The server runs the method's client half once, on a few empty images, and compares names, shapes and types
of a reply with that result.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedcsd.deploy.settings import Deployment
from fedcsd.deploy.wire import Malformed, Parcel
from fedcsd.federation.setup import Setup
from fedcsd.messages import Notes, Reply, Request
from fedcsd.training.worker import Worker
from fedcsd.training.workspace import Workspace
from fedcsd.weights import Layout, Values, Weights

FAR = 1000.0  # times the norm of the global model; no round of training moves weights so far
NOTES = {"held_accuracy_local"}  # measured only where clients hold data out, unlike here
LENGTH = 200  # of a text from a node that is shown
SAMPLES = 8

ValueKind = tuple[tuple[int, ...], torch.dtype, bool] | None
"""shape and type of a tensor, and True for a model's weights; None for a number"""


def shown(text: object) -> str:
    """Return text from a node in a form that is safe to print."""
    return "".join(c if c.isprintable() else "?" for c in str(text)[:LENGTH])


class Checks:
    """Turns parcels into replies, or refuses them."""

    def __init__(self, experiment: Setup, deployment: Deployment):
        self.experiment, self.deployment = experiment, deployment
        self.layout: Layout = experiment.network.layout
        self.worker = _rehearsal(experiment)
        self._kinds: dict[str, tuple[dict[str, ValueKind], set[str]]] = {}

    def kinds(self, request: Request) -> tuple[dict[str, ValueKind], set[str]]:
        """Return the kinds of values in a right reply to this request, and the names of its measurements."""
        if request.function not in self._kinds:
            with torch.random.fork_rng(devices=[]):
                reply = self.worker.answer(request, 0, {})
            found = {name: _kind(value) for name, value in reply.values.items()}
            self._kinds[request.function] = found, set(reply.notes) | NOTES
        return self._kinds[request.function]

    def reply(self, parcel: Parcel, request: Request, client: int, samples: int) -> Reply:
        """Return the reply in a parcel; raise Malformed with the reason if it cannot be used."""
        header = parcel.header
        if header.get("problem"):
            return Reply(client, samples, problem=f"client {client}: {shown(header['problem'])}")
        if type(header.get("samples")) is not int or header["samples"] != samples:
            raise Malformed(f"it counts {shown(header.get('samples'))} samples, and has {samples}")
        kinds, notes = self.kinds(request)
        values = self._values(parcel, kinds, nan=request.kind == "personal")
        for name, value in values.items():
            self._check_size(name, value, request.values)
        state = {"kept": 1} if header.get("kept") is True else {}
        return Reply(client, samples, values, _notes(header.get("notes"), notes), state)

    def _values(self, parcel: Parcel, kinds: Mapping[str, ValueKind], *, nan: bool) -> dict[str, Any]:
        """Return the values of a reply; with `nan` a number may be NaN (a client without data to test on)."""
        entries = parcel.header.get("entries")
        if not isinstance(entries, dict) or set(entries) != {f"v.{name}" for name in kinds}:
            found = sorted(entries) if isinstance(entries, dict) else []
            raise Malformed(
                f"it holds {shown(', '.join(map(str, found))) or 'nothing'}, not {', '.join(kinds)}"
            )
        values: dict[str, Any] = {}
        for name, kind in kinds.items():
            entry = entries[f"v.{name}"]
            if not isinstance(entry, dict):
                raise Malformed(f"{name} is not described")
            if kind is None:
                number = entry.get("number")
                unknown = nan and isinstance(number, float) and math.isnan(number)
                values[name] = number if unknown else _number(number, name)
                continue
            array = parcel.arrays.get(str(entry.get("tensor")))
            if array is None:
                raise Malformed(f"{name} is missing")
            tensor = torch.from_numpy(array)
            if (tuple(tensor.shape), tensor.dtype) != kind[:2]:
                raise Malformed(f"{name} is {_text(_kind(tensor))}, not {_text(kind)}")
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise Malformed(f"{name} has values that are not finite")
            values[name] = Weights(self.layout, tensor) if kind[2] else tensor
        if strange := set(parcel.arrays) - {str(entry.get("tensor")) for entry in entries.values()}:
            raise Malformed(f"it holds more than it should: {shown(min(strange))}")
        return values

    def _check_size(self, name: str, value: Any, sent: Values) -> None:
        """Refuse a value so large that it would drown all others."""
        base = next((v for v in sent.values() if isinstance(v, Weights)), None)
        norm = float(base.flat.norm()) if base is not None else 1.0
        limit = FAR * (1 + norm)
        if isinstance(value, Weights):
            start = sent.get("weights", base)
            away = value.flat if start is None else value.flat - start.flat
            limit = self.deployment.max_update_norm or limit
            if float(away.double().norm()) > limit:
                raise Malformed(
                    f"{name} are {float(away.double().norm()):.3g} from the global ones, over {limit:.3g}"
                )
        elif isinstance(value, Tensor) and value.is_floating_point():
            limit /= min(1.0, self.experiment.settings.lr)  # a gradient is larger than a step
            if float(value.double().norm()) > limit:
                raise Malformed(f"{name} has norm {float(value.double().norm()):.3g}, over {limit:.3g}")


def _rehearsal(experiment: Setup) -> Worker:
    """Make a worker with one client of a few empty images."""
    data = experiment.data
    x = torch.zeros((SAMPLES, *data.shape), dtype=data.x_train.dtype)
    y = torch.arange(SAMPLES) % data.classes
    small = replace(data, x_train=x, y_train=y, x_test=x, y_test=y, groups=None, key="")
    settings = replace(experiment.settings, epochs=1, batch_size=SAMPLES, holdout=0.0, lr=1e-6)
    parts = [torch.arange(SAMPLES)]
    return Worker(Workspace(settings, small, parts, [], experiment.factory), experiment.method)


def _kind(value: Any) -> ValueKind:
    if isinstance(value, Weights):
        return tuple(value.flat.shape), value.flat.dtype, True
    return (tuple(value.shape), value.dtype, False) if isinstance(value, Tensor) else None


def _text(kind: ValueKind) -> str:
    return "a number" if kind is None else f"{list(kind[0])} {str(kind[1]).removeprefix('torch.')}"


def _number(value: Any, name: str) -> int | float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e15:
        raise Malformed(f"{name} is not a number within reason")
    return value


def _notes(notes: Any, known: set[str]) -> Notes:
    """Return the method's measurements, each a sum and a count; others are left out."""
    found: Notes = {}
    for name, pair in notes.items() if isinstance(notes, dict) else ():
        if name in known and isinstance(pair, (list, tuple)) and len(pair) == 2:
            total, count = (float(_number(number, f"measurement {name}")) for number in pair)
            if count < 0 or not math.isfinite(total):
                raise Malformed(f"measurement {name} is not within reason")
            found[name] = total, count
    return found

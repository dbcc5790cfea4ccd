"""Answer the server's requests at a node, with its data, its disk and the method's client half."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedcsd import data as fedcsd_data
from fedcsd.__version__ import __version__
from fedcsd.aggregation import lerp
from fedcsd.config import Settings
from fedcsd.config.options import build
from fedcsd.config.toml import parse_assignments
from fedcsd.data import Dataset
from fedcsd.deploy.node.store import MEGABYTES, Store, checksum
from fedcsd.deploy.settings import Deployment
from fedcsd.deploy.wire import Parcel
from fedcsd.errors import UserError, one_line
from fedcsd.experiments.choices import make_method
from fedcsd.experiments.experiment import factory_of, prepare
from fedcsd.messages import Reply, Request, described, restored
from fedcsd.training.worker import Worker
from fedcsd.training.workspace import Workspace
from fedcsd.weights import Layout, Values, Weights

KEPT = 2  # workers in memory: an experiment that changes is not built anew for every message


@dataclass
class Assignment:
    """A run needs these at a node; they are built once."""

    worker: Worker
    client: int
    store: Store

    @property
    def layout(self) -> Layout:
        return self.worker.workspace.model.layout


class Node:
    """Answers parcels one after another, and keeps the worker of a run for the next parcel."""

    def __init__(self, config: Mapping[str, Any], home: Path):
        self.config, self.home = dict(config), Path(config.get("state", home)).expanduser()
        self.assignments: dict[str, Assignment] = {}
        torch.set_num_threads(1)  # as in the simulator: sums depend on it

    @property
    def name(self) -> str:
        """Name of the site, or number of the partition, which stays the same after a restart."""
        known = self.config.get("site", self.config.get("partition-id"))
        if known is None:
            raise UserError("the node config names no site: start the node with --node-config 'site=\"…\"'")
        return str(known)

    def answer(self, parcel: Parcel) -> Parcel:
        """Return the reply to one parcel; an error is a reply too, as one line of text."""
        try:
            kind = parcel.header["kind"]
            return {"join": self.join, "ask": self.ask, "evaluate": self.evaluate}[kind](parcel)
        except UserError as error:
            return self._error(str(error))
        except Exception as error:
            return self._error(one_line(error))

    def _error(self, text: str) -> Parcel:
        name = str(self.config.get("site", self.config.get("partition-id", "unnamed")))
        return Parcel({"error": text, "name": name})

    def join(self, parcel: Parcel) -> Parcel:
        """Tell the server the name of this node and facts about its data, for a run that starts or continues."""
        header = parcel.header
        about: dict[str, Any] = {"name": self.name, "version": __version__}
        if header["mode"] == "sites":
            data = self.data(header["config"])
            about |= {"samples": len(data.y_train), "test": len(data.y_test)}
            about |= {"classes": data.classes, "shape": list(data.shape), "dtype": str(data.x_train.dtype)}
            about |= data.normalisation
        else:
            assignment = self.assignment({**header, "client": int(self.name)})
            workspace = assignment.worker.workspace
            about |= {"samples": len(workspace.parts[assignment.client])}
            about |= {"model": assignment.layout.fingerprint(), "data": workspace.data.fingerprint()}
        return Parcel(about)

    def data(self, config: Mapping[str, Any]) -> Dataset:
        """Load the site's data, with the options of the server and the node config."""
        if not self.config.get("data"):
            raise UserError('the node config names no data: add data="/path/to/the/site\'s/data"')
        options = parse_assignments(str(self.config.get("data-options", "")).split(), "data-options")
        path = Path(str(self.config["data"])).expanduser()
        if not path.exists():
            raise UserError(f"the node's data is not there: {path}")
        return fedcsd_data.load(str(path), {**config.get("data_options", {}), **options})

    def assignment(self, header: Mapping[str, Any]) -> Assignment:
        """Return what a run needs here; it is built on first use."""
        key = json.dumps([header["run"], header["mode"], header["config"], header["client"]], sort_keys=True)
        if key not in self.assignments:
            number, config = int(header["client"]), header["config"]
            sites = header["mode"] == "sites"
            worker = self.own_worker(config, number) if sites else whole_worker(json.dumps(config))
            parts = worker.workspace.parts
            if not number < len(parts):
                raise UserError(f"this node is client {number}, and the run has {len(parts)} clients")
            if not (run := str(header["run"])).isalnum():
                raise UserError(f"{run[:20]!r} is no name of a run")
            limit = float(self.config.get("state-megabytes", MEGABYTES))
            store = Store(self.home / self.name.replace("/", "_"), run, limit)
            self.assignments = dict([*self.assignments.items()][-(KEPT - 1) :])
            self.assignments[key] = Assignment(worker, number, store)
        return self.assignments[key]

    def own_worker(self, config: Mapping[str, Any], number: int) -> Worker:
        """Build the worker whose one client holds all data of this site."""
        data, agreed = self.data(config), config["agreed"]
        settings = build(Settings, config["settings"])
        if list(data.shape) != agreed["shape"] or data.classes > agreed["classes"]:
            raise UserError(
                f"the data here has images of shape {list(data.shape)} in {data.classes} classes, "
                f"the federation {agreed['shape']} in {agreed['classes']}"
            )
        data = replace(data, classes=agreed["classes"])
        if data.scale is not None:
            data = data.normalised(agreed["mean"], agreed["std"])
        nothing = torch.empty(0, dtype=torch.int64)
        parts = [nothing] * settings.clients
        parts[number] = torch.arange(len(data.y_train))
        model = factory_of(config["model"], None, data)
        return Worker(Workspace(settings, data, parts, [], model), make_method(config["method"]))

    def ask(self, parcel: Parcel) -> Parcel:
        """Run one function of the method's client half."""
        header = parcel.header
        assignment, began = self.assignment(header), time.perf_counter()
        values, lacks = self.values(parcel, assignment)
        if lacks:
            return Parcel({"lacks": lacks})
        store, worker, client = assignment.store, assignment.worker, assignment.client
        state = store.state(header["version"], assignment.layout) if header["version"] else {}
        request = Request(header["round"], header["function"], values)
        reply = worker.answer(request, client, {} if state is None else state)
        deployment = build(Deployment, header["deploy"])
        reply = replace(reply, values=protected(reply.values, worker, client, deployment))
        if not reply.problem and (reply.state or header["version"]):
            store.keep_state(header["round"] + 1, reply.state, header["needed"])
        answer = packed(reply)
        answer.header |= {"seconds": time.perf_counter() - began, "lost": state is None}
        return answer

    def values(self, parcel: Parcel, assignment: Assignment) -> tuple[Values, list[str]]:
        """Return the values of a request, and the names of those that must be sent again.

        A value was sent with the parcel, is held from an earlier message, or is computed from weights that
        are held (the teacher is the mean of two models).
        """
        header, store, layout = parcel.header, assignment.store, assignment.layout
        tensors = {name: torch.from_numpy(array) for name, array in parcel.arrays.items()}
        entries: dict[str, Any] = header["entries"]
        sent = {n: e for n, e in entries.items() if "number" in e or e["tensor"] in tensors}
        values = restored(sent, tensors, layout)  # names still begin with "v.", as in messages
        known = {v.token: v for v in values.values() if isinstance(v, Weights)}

        def find(token: int, check: int) -> Weights | None:
            return known.get(token) or store.weights(token, layout, check)

        lacks = []
        for name, entry in entries.items():
            if name in values:
                continue
            found = find(entry["token"], entry["crc"])
            if found is None and entry.get("recipe"):
                first, second, t = entry["recipe"]
                parents = [
                    find(token, check) for token, check in zip((first, second), entry["crcs"], strict=True)
                ]
                if parents[0] is not None and parents[1] is not None:
                    flat = lerp(parents[0], parents[1], t).flat
                    # Another processor may round otherwise: only the same bits are the same teacher.
                    found = Weights(layout, flat, entry["token"]) if checksum(flat) == entry["crc"] else None
            if found is None:
                lacks.append(name)
            else:
                values[name] = known[found.token] = found
        store.hold(header["round"], known.values())
        return {name[2:]: values[name] for name in entries if name in values}, lacks

    def evaluate(self, parcel: Parcel) -> Parcel:
        """Test a model on the site's own test data: count the right predictions and sum the loss."""
        assignment = self.assignment(parcel.header)
        values, lacks = self.values(parcel, assignment)
        if lacks:
            return Parcel({"lacks": lacks})
        request = Request(parcel.header["round"], "evaluate", values)
        replies, _ = assignment.worker.evaluate_all(request)
        return Parcel(
            {
                "right": sum(int(r["correct"].sum()) for r in replies),
                "loss": sum(r.notes["loss"][0] for r in replies),
                "test": sum(r.samples for r in replies),
            }
        )


@lru_cache(maxsize=KEPT)
def whole_worker(config: str) -> Worker:
    """Build the worker with all clients of a partition, of which a node answers for one.

    The nodes of a simulation that are in one process share it.
    """
    return prepare(json.loads(config)).worker()


def packed(reply: Reply) -> Parcel:
    """Pack a reply for the server; the client's state stays here."""
    tensors, entries = described({f"v.{name}": value for name, value in reply.values.items()})
    header = {"samples": reply.samples, "notes": reply.notes, "problem": reply.problem, "entries": entries}
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    return Parcel({**header, "kept": bool(reply.state)}, arrays)


def protected(values: Values, worker: Worker, number: int, deployment: Deployment) -> Values:
    """Protect the values that the method declares as private: hide classes of few samples, and add noise."""
    hidden, workspace = dict(values), worker.workspace
    for name, which in worker.method.reveals.items():
        private, held = values.get(name), values.get(which)
        if not isinstance(private, Tensor) or not isinstance(held, Tensor):
            continue
        if deployment.prototype_min_count:
            labels = workspace.data.y_train[workspace.parts[number]]
            counts = torch.bincount(labels, minlength=workspace.data.classes)
            held = held & (counts >= deployment.prototype_min_count)
            private = private * held.reshape(-1, *[1] * (private.ndim - 1))
        if deployment.prototype_noise:
            # The run's seed would not do: the server knows it and could subtract the noise.
            generator = torch.Generator()
            generator.seed()
            noise = torch.randn(private.shape, generator=generator, dtype=private.dtype)
            private = private + deployment.prototype_noise * noise
        hidden |= {name: private, which: held}
    return hidden

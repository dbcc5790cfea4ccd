"""Start a run over sites that each have their own data, which the server never sees."""

import json
import math
from collections.abc import Mapping
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from fedcsd.config.options import plain
from fedcsd.config.settings import defaults_where
from fedcsd.config.toml import parse_assignments
from fedcsd.data import Dataset
from fedcsd.data.partition import Rows
from fedcsd.deploy.server.checks import shown
from fedcsd.deploy.server.roster import Roster
from fedcsd.deploy.server.session import Session
from fedcsd.deploy.wire import Malformed
from fedcsd.errors import UserError
from fedcsd.experiments import running as jobs
from fedcsd.experiments.experiment import config_of
from fedcsd.experiments.resuming import continued
from fedcsd.experiments.runs.run_folder import RunDirectory

MOST = 10_000_000  # samples of a site
KINDS = {"torch.uint8": torch.uint8, "torch.float32": torch.float32}


def begin(session: Session) -> tuple[jobs.Job | None, Roster]:
    """Ask the sites about their data, agree on what must be the same for all, and start or continue the run."""
    options = parse_assignments(str(session.config.get("data_options", "")).split(), "data_options")
    hello = {**session.hello, "config": {"data_options": options}}
    roster = Roster(session.transport, hello, _checked)
    if session.resume:
        agreed = RunDirectory.open(session.out).config["deploy"]["agreed"]
        values, given = with_sites(session.values, agreed)
        changes = {"rounds": session.values.get("rounds")}
        given = {"data": given["data"]}  # who has how much is in the run directory
        job = continued(session.out, given=given, changes=changes, deployed=True)
    else:
        agreed = agree(session, roster)
        values, given = with_sites(session.values, agreed)
        facts = {**session.facts, "agreed": agreed}
        overwrite = bool(session.config.get("overwrite", False))
        job = jobs.begin(values, given=given, out=session.out, overwrite=overwrite, deploy=facts)
    if job is None:
        return None, roster
    config = config_of(job.experiment)
    model = config["model"] if isinstance(config["model"], dict) else {"name": config["model"]}
    roster.hello["config"] = {
        "settings": plain(job.experiment.settings),
        "model": model,
        "method": config["method"],
        "data_options": options,
        "agreed": {key: agreed[key] for key in ("shape", "classes", "mean", "std") if key in agreed},
    }
    roster.assign(lambda about: _numbered(about, agreed))
    return job, roster


def _checked(about: Mapping[str, Any]) -> None:
    if not 0 < about["samples"] <= MOST or not 0 <= about["test"] <= MOST:
        raise Malformed(f"it counts {about['samples']} samples")
    shape, classes = about["shape"], about["classes"]
    sizes = all(type(side) is int and 0 < side <= 10_000 for side in shape) and len(shape) in (1, 3)
    if about["dtype"] not in KINDS or type(classes) is not int or not 2 <= classes <= 100_000 or not sizes:
        raise Malformed(f"its data cannot be trained on: {shown(shape)} {shown(about['dtype'])}")
    if math.prod(shape) > MOST:
        raise Malformed(f"its images are too large: {shape}")
    channels = shape[0] if len(shape) == 3 else 1
    for numbers in (about.get(key, ()) for key in ("mean", "std")):
        if len(numbers) not in (0, channels) or not all(-1e6 < number < 1e6 for number in numbers):
            raise Malformed("the mean or deviation of its pixels is not within reason")


def _numbered(about: Mapping[str, Any], agreed: Mapping[str, Any]) -> int:
    _checked(about)
    if about["name"] not in agreed["names"]:
        raise Malformed(f"the run began without this site: its sites are {', '.join(agreed['names'])}")
    client: int = agreed["names"].index(about["name"])
    if about["samples"] != agreed["samples"][client]:
        raise Malformed(f"it has {about['samples']} samples and had {agreed['samples'][client]}")
    return client


def agree(session: Session, roster: Roster) -> dict[str, Any]:
    """Wait for the sites; return what holds for all: classes, image shape, mean and deviation of pixels."""
    wanted = int(session.values.get("clients", 0))
    if not wanted:
        raise UserError("say how many sites there are: clients=… in the app's config")
    roster.wait(lambda: roster.about, wanted, "sites", float(session.config.get("join_timeout", 0)))
    sites = sorted(roster.about.values(), key=lambda about: str(about["name"]))
    kinds = {json.dumps([about["shape"], about["dtype"]]) for about in sites}
    if len(kinds) > 1:
        what = "; ".join(f"{about['name']}: {about['shape']} {about['dtype']}" for about in sites)
        raise UserError(f"the sites' images differ ({what}): bring them to one size with data_options size=…")
    agreed = {
        "names": [about["name"] for about in sites],
        "samples": [about["samples"] for about in sites],
        "tests": [about["test"] for about in sites],
        "classes": max(about["classes"] for about in sites),
        "shape": list(sites[0]["shape"]),
        "dtype": sites[0]["dtype"],
    }
    if all("mean" in about and "std" in about for about in sites):
        agreed |= pooled(sites)
    return agreed


def pooled(sites: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return mean and deviation of the pixels of all sites together, by channel."""
    shares = np.array([about["samples"] for about in sites], dtype=np.float64)
    shares /= shares.sum()
    means, deviations = (np.array([about[key] for about in sites]) for key in ("mean", "std"))
    mean = shares @ means
    square = shares @ (deviations**2 + means**2)
    return {"mean": mean.tolist(), "std": np.sqrt(np.maximum(square - mean**2, 1e-12)).tolist()}


def with_sites(values: Mapping[str, Any], agreed: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return settings and objects of an experiment whose data is at the sites: only size and kind are here."""
    total = sum(agreed["samples"])
    x = torch.zeros((1, *agreed["shape"]), dtype=KINDS[agreed["dtype"]])
    none = torch.empty(0, dtype=torch.int64)
    key = blake2b(json.dumps(dict(agreed), sort_keys=True).encode(), digest_size=16).hexdigest()
    data = Dataset("sites", x, torch.zeros(total, dtype=torch.int64), x[:0], none, agreed["classes"], key=key)
    if "mean" in agreed:
        data = data.normalised(agreed["mean"], agreed["std"])
    starts = np.cumsum([0, *agreed["samples"]])
    parts: list[Rows] = [np.arange(a, b) for a, b in pairwise(starts)]
    named = {
        **values,
        **defaults_where(deals=True, on_resume="fixed"),
        "data": {"name": "data of the sites"},
        "partition": "iid",
    }
    return named, {"data": data, "parts": (parts, [])}

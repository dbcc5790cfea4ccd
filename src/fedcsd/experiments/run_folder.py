"""A run on disk: what was asked for, what was measured, and enough to go on after any interruption.

config.toml        all settings, with versions and host facts
partition.npz      which training rows each client holds, and how many of each class
metrics.jsonl      one JSON object a round
checkpoints/       the last two, each complete with the files of clients/ that it names
clients/           what methods keep of each client, if that is kept on disk
summary.json       written when the run is finished
diverged.json      written when it ended in a divergence instead
model.safetensors  the final global model
"""

import json
import math
import os
import shlex
import shutil
import time
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tomli_w

from fedcsd.config import Settings
from fedcsd.data.partition import UNREADABLE, Counts, Rows, packed, unpacked
from fedcsd.errors import Busy, Divergence, UserError, no_run, note
from fedcsd.experiments.provenance import facts
from fedcsd.experiments.recorded import RecordedRun
from fedcsd.federation import states
from fedcsd.files import names_in, write_whole, writing
from fedcsd.messages import Torn, finite, header_of, pack, parsed, unpack
from fedcsd.weights import Layout, Value

T = TypeVar("T")
CHECKPOINTS_KEPT = 2
OWN = {
    "config.toml",
    "partition.npz",
    "metrics.jsonl",
    "checkpoints",
    states.FOLDER,
    "summary.json",
    "diverged.json",
    "model.safetensors",
    "lock",
    "curves.png",
    "report.html",
    "mlflow.json",
    "tensorboard",
    "analysis",
}
FOLDERS = {"checkpoints", "tensorboard", "analysis", states.FOLDER}


def _versions(path: Path) -> dict[str, Any]:
    """The versions that a config.toml notes; nothing if it is not one of ours."""
    with suppress(OSError, ValueError):
        return dict(tomllib.loads(path.read_text(encoding="utf-8")).get("versions", {}))
    return {}


class RunDirectory(RecordedRun):
    """The files of one run. `create` starts a new one, `open` takes up one that exists."""

    def __init__(self, path: Path):
        self.path = path
        self._lock: Any = None
        self._saved, self._saving = -math.inf, 0.0  # when the last checkpoint was made, and how long it took

    @classmethod
    def create(
        cls,
        path: Path,
        config: Mapping[str, Any],
        partition: tuple[list[Rows], list[Rows], int, Counts | None],
        needed: int,
        *,
        overwrite: bool = False,
    ) -> "RunDirectory":
        """A new run directory with its config and partition; never over one that exists, unless told."""
        run = cls(path)
        run.check_free(overwrite)
        with writing(path, "choose another --out"):
            path.mkdir(parents=True, exist_ok=True)
            run.lock()
            run._clear()
            (path / "checkpoints").mkdir(exist_ok=True)
            free = shutil.disk_usage(path).free
            if free < needed:
                raise UserError(
                    f"{path} has {free / 1e6:.0f} MB free and the run needs about {needed / 1e6:.0f} MB: "
                    "free some space or choose another --out"
                )
            write_whole(path / "partition.npz", packed(*partition))
            write_whole(path / "config.toml", tomli_w.dumps({**config, **facts(config["device"])}).encode())
        return run

    def check_free(self, overwrite: bool) -> None:
        """Refuse a place that holds anything but what an earlier run, or the start of one, left there."""
        path = self.path
        content = names_in(path) - {"lock"}
        if (is_run := "fedcsd" in _versions(path / "config.toml")) and not overwrite:
            raise UserError(
                f"{path} holds a run already: {self.again} goes on with it, --overwrite replaces it, or choose another --out"
            )
        begun = {"partition.npz", "checkpoints"} if not any((path / "checkpoints").glob("*")) else set()
        strange = sorted(name for name in content - (OWN if is_run else begun) if not name.startswith("."))
        if strange:
            found = "a comparison" if "comparison.json" in content else f"other files ({strange[0]})"
            raise UserError(f"{path} holds {found}: choose another --out")

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        if not (path / "config.toml").is_file():
            raise no_run(path)
        run = cls(path)
        if "facts" not in run.config:
            raise UserError(f"{path / 'config.toml'} is not of a run")
        return run

    def _clear(self) -> None:
        # Without its config it is no run any more, so that goes first.
        for name in ("config.toml", *sorted(OWN - FOLDERS - {"config.toml", "lock"})):
            (self.path / name).unlink(missing_ok=True)
        for _, checkpoint in self._checkpoints():
            checkpoint.unlink()
        self._sweep()
        made = [*(self.path / "analysis").glob("*.*"), *(self.path / "tensorboard").glob("events.*")]
        for file in made:  # of a run that is no more
            file.unlink()
        for folder in (self._clients, self.path / "analysis", self.path / "tensorboard"):
            with suppress(OSError):  # none there, or someone's own files in it
                folder.rmdir()

    def lock(self) -> None:
        """One process at a time trains a run. The lock dies with its process."""
        try:
            import fcntl
        except ImportError:  # not on Windows
            return
        self._lock = open(self.path / "lock", "a")  # noqa: SIM115
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Busy(f"another process is training {self.path} right now") from None

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def config(self) -> dict[str, Any]:
        """The settings and facts of the run, with what was changed since it began."""
        try:
            return tomllib.loads((self.path / "config.toml").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read {self.path / 'config.toml'}: {error}") from None

    @property
    def again(self) -> str:
        """The command that takes it up."""
        here = f"fedcsd resume {shlex.quote(str(self.path))}"
        return str(self.config.get("deploy", {}).get("again", here))

    def change(self, rounds: int, changes: Mapping[str, Any], code: Mapping[str, Any]) -> None:
        """Settings, or facts about code, that differ after this many rounds; the config keeps what they were."""
        config = self.config
        facts = config["facts"]
        before = {k: config.get(k, getattr(Settings, k)) for k in changes}  # an old run lacks new settings
        news = [f"after round {rounds}: {k} {before[k]} -> {v}" for k, v in changes.items() if before[k] != v]
        news += [
            f"after round {rounds}: code of the {k.removesuffix('_code')} {facts[k]} -> {v}"
            for k, v in code.items()
        ]
        if news:
            began = before | facts.get("began", {})
            config["facts"] = {**facts, **code, "changes": facts.get("changes", []) + news, "began": began}
            write_whole(self.path / "config.toml", tomli_w.dumps({**config, **changes}).encode())

    def partition(self) -> tuple[list[Rows], list[Rows]]:
        """The clients' training rows, and the rows they hold out (none without --holdout)."""
        try:
            with np.load(self.path / "partition.npz", allow_pickle=False) as file:
                held = unpacked(file["held_rows"], file["held_sizes"]) if "held_rows" in file else []
                return unpacked(file["rows"], file["sizes"]), held
        except UNREADABLE as error:
            why = getattr(error, "strerror", None) or "it is damaged"
            raise UserError(f"cannot read {self.path / 'partition.npz'}: {why}") from None

    def counts(self) -> Counts | None:
        """How many training samples of each class each client has; None if that is not known."""
        try:
            with np.load(self.path / "partition.npz", allow_pickle=False) as file:
                counts: Counts | None = file.get("counts")
                return counts
        except UNREADABLE:
            return None

    def history(self) -> list[dict[str, Any]]:
        """The rounds measured so far. A line that was cut off or is none of a round is left out."""
        path, records = self.path / "metrics.jsonl", []
        for line in path.read_bytes().splitlines() if path.exists() else []:
            with suppress(ValueError):
                records.append(parsed(line))
        records = [r for r in records if isinstance(r, dict) and isinstance(r.get("round"), int)]
        if len(records) != (rounds := (self.summary or {}).get("rounds", len(records))):
            note(f"{path} is damaged: of the {rounds} rounds that were trained {len(records)} are in it")
        return records

    def keep_history(self, rounds: int) -> list[dict[str, Any]]:
        """Forget what was measured after this many rounds: it will be measured again."""
        records = [r for r in self.history() if r["round"] <= rounds]
        write_whole(self.path / "metrics.jsonl", b"".join(_line(r) for r in records))
        return records

    def record(self, record: Mapping[str, Any]) -> None:
        with open(self.path / "metrics.jsonl", "ab") as file:
            file.write(_line(record))

    def due(self, settings: Settings, round: int) -> bool:
        """Whether a checkpoint is to be made now. Left open, they may take a twentieth of the time: rounds
        that are lost with a machine are trained again, to the same bits. States on disk are only let go
        by a checkpoint, so that each round has one."""
        if settings.checkpoint_every or settings.client_state == "disk":
            return round % max(1, settings.checkpoint_every) == 0
        return time.monotonic() - self._saved >= 19 * self._saving

    def checkpoint(self, header: Mapping[str, Any], values: Mapping[str, Value]) -> None:
        """Save a complete state; the last two are kept."""
        began = time.monotonic()
        (self.path / "checkpoints").mkdir(exist_ok=True)
        with suppress(FileNotFoundError), open(self.path / "metrics.jsonl", "ab") as file:
            os.fsync(file.fileno())  # what a checkpoint has behind it is measured for good
        write_whole(self._checkpoint_path(header["round"]), pack(header, values, checksum=True))
        for _, path in self._checkpoints()[CHECKPOINTS_KEPT:]:
            path.unlink(missing_ok=True)
        self._sweep()
        self._saved = time.monotonic()
        self._saving = self._saved - began

    def settle(self, rounds: int) -> None:
        """Remove what a run that goes on after this many rounds has passed over or left behind."""
        for number, path in self._checkpoints():
            if number > rounds:
                path.unlink()
        self._sweep()

    def _sweep(self) -> None:
        headers = []
        for _, path in self._checkpoints() if self._clients.is_dir() else ():
            with suppress(Torn):
                headers.append(header_of(path))
        states.sweep(self._clients, headers)

    @property
    def _clients(self) -> Path:
        return self.path / states.FOLDER

    def latest(self, layout: Layout) -> tuple[dict[str, Any], dict[str, Value]] | None:
        """The newest checkpoint that is complete with what it names; a torn one is passed over."""
        lost = ""
        passed: list[int] = []
        for number, path in self._checkpoints():
            with suppress(Torn):
                header, values = unpack(path.read_bytes(), layout)
                missing = states.first_lost(self._clients, header, layout)
                if not missing:
                    if passed:
                        torn = f"{self.path}: what was saved after round {passed[0]} is damaged"
                        note(f"{torn}; going back to round {number}")
                    return header, values
                lost = lost or missing
            passed.append(number)
        if lost:
            raise UserError(
                f"{self._clients / lost} is missing or damaged and there is no complete checkpoint without it: "
                f"restore it, or remove {self.path} and start again"
            )
        if self.summary is not None:
            raise UserError(f"{self.path} is finished and has no checkpoint: remove it and start again")
        if passed or (self.path / "metrics.jsonl").exists():
            note(f"{self.path}: no checkpoint is complete; starting again from round 1")
        return None

    def _checkpoint_path(self, round: int) -> Path:
        return self.path / "checkpoints" / f"round-{round:06d}.safetensors"

    def _checkpoints(self) -> list[tuple[int, Path]]:
        """Newest first."""
        found = [
            (int(p.stem.partition("-")[2]), p)
            for p in (self.path / "checkpoints").glob("round-*.safetensors")
        ]
        return sorted(found, reverse=True)

    @property
    def rounds_saved(self) -> int:
        return max((number for number, _ in self._checkpoints()), default=0)

    @property
    def summary(self) -> dict[str, Any] | None:
        """The result of a finished run, None while it is not finished."""
        return self._end("summary.json", dict[str, Any])

    @property
    def divergence(self) -> Divergence | None:
        """How the run ended, if it ended in a divergence and was not taken up since."""
        return self._end("diverged.json", Divergence)

    def _end(self, name: str, kind: Callable[..., T]) -> T | None:
        """What a file says of the run's end; None if it is not there."""
        path = self.path / name
        try:
            return kind(**parsed(path.read_bytes())) if path.exists() else None
        except (OSError, ValueError, TypeError):
            raise UserError(f"{path} is damaged: restore it") from None

    def diverged(self, divergence: Divergence) -> None:
        write_whole(self.path / "diverged.json", (json.dumps(vars(divergence), indent=2) + "\n").encode())

    def reopen(self) -> None:
        """The run goes on: it has no end any more."""
        for name in ("summary.json", "diverged.json"):
            (self.path / name).unlink(missing_ok=True)

    def finish(self, summary: Mapping[str, Any], model: bytes) -> None:
        write_whole(self.path / "model.safetensors", model)
        write_whole(self.path / "summary.json", (json.dumps(finite(summary), indent=2) + "\n").encode())


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(finite(record)).encode() + b"\n"

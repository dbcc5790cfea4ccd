"""Keep a run on disk: settings, measurements, and a state to continue from after any interruption.

config.toml        all settings, with versions, host and facts (format, digests of data, model and code, changes)
partition.npz      training rows of each client, and how many of each class
metrics.jsonl      one JSON object a round
checkpoints/       the last two, each complete with the files of clients/ that it names
clients/           clients' states, if they are kept on disk
summary.json       the result of a finished run
diverged.json      the divergence that ended a run instead
model.safetensors  the final global model
"""

import json
import shlex
import shutil
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tomli_w

from fedcsd.data.partition import UNREADABLE, Counts, Rows, packed, unpacked
from fedcsd.errors import Busy, Divergence, UserError, no_run, note
from fedcsd.experiments.runs.checkpoints import Checkpoints
from fedcsd.experiments.runs.provenance import environment
from fedcsd.experiments.runs.recorded import FORMAT, Change, RecordedRun
from fedcsd.federation import states
from fedcsd.files import names_in, write_whole, writing
from fedcsd.messages import finite, parsed
from fedcsd.weights import Layout, Value

T = TypeVar("T")
FILES = (
    "partition.npz",
    "metrics.jsonl",
    "summary.json",
    "diverged.json",
    "model.safetensors",
    "curves.png",
    "report.html",
    "mlflow.json",
)
MADE = {
    "checkpoints": "round-*.safetensors",
    states.FOLDER: "*-r*.safetensors",
    "analysis": "*.*",
    "tensorboard": "events.*",
}
"""The folders in a run's folder, and their files that belong to the run."""


class RunDirectory(RecordedRun):
    """Read and write the files of one run. `create` starts a new one, `open` finds one that exists."""

    def __init__(self, path: Path):
        self.path, self.checkpoints = path, Checkpoints(path)
        self._lock: Any = None

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
        """Create a run's folder with config and partition. An existing run is only replaced on request."""
        run = cls(path)
        run.check_free(overwrite)
        with writing(path, "choose another --out"):
            path.mkdir(parents=True, exist_ok=True)
            run.lock()
            run._clear()
            free = shutil.disk_usage(path).free
            if free < needed:
                raise UserError(
                    f"{path} has {free / 1e6:.0f} MB free and the run needs about {needed / 1e6:.0f} MB: "
                    "free some space or choose another --out"
                )
            write_whole(path / "partition.npz", packed(*partition))
            run._write_config({**config, **environment(config["device"])})
        return run

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        """Return the run in a folder. A folder without a run, or with one of another format, is refused."""
        if not (path / "config.toml").is_file():
            raise no_run(path)
        run = cls(path)
        config = run.config
        if "facts" not in config:
            raise UserError(f"{path / 'config.toml'} is not of a run")
        if (found := config["facts"].get("format")) != FORMAT:
            wrote = config.get("versions", {}).get("fedcsd", "another version")
            raise UserError(
                f"{path} has format {found or 0} (of fedcsd {wrote}) and this fedcsd reads format {FORMAT}: "
                "train the run again"
            )
        return run

    def check_free(self, overwrite: bool) -> None:
        """Refuse a folder with files that are not a run's, or with a run that is not to be replaced."""
        path, content = self.path, names_in(self.path) - {"lock"}
        with suppress(OSError, ValueError):
            if "facts" in tomllib.loads((path / "config.toml").read_text(encoding="utf-8")):
                if not overwrite:
                    raise UserError(
                        f"{path} holds a run already: {self.again} goes on with it, "
                        "--overwrite replaces it, or choose another --out"
                    )
                content -= {"config.toml", *FILES, *MADE}
        if not any((path / "checkpoints").glob("*")):
            content -= {"partition.npz", "checkpoints"}  # a run that was killed at its start
        if strange := sorted(name for name in content if not name.startswith(".")):
            found = "a comparison" if "comparison.json" in content else f"other files ({strange[0]})"
            raise UserError(f"{path} holds {found}: choose another --out")

    def _clear(self) -> None:
        """Remove a run's files; a user's files in its folders stay."""
        for name in ("config.toml", *FILES):  # without its config it is no run any more
            (self.path / name).unlink(missing_ok=True)
        for folder, pattern in MADE.items():
            for file in (self.path / folder).glob(pattern):
                file.unlink()
            with suppress(OSError):
                (self.path / folder).rmdir()

    def lock(self) -> None:
        """Keep other processes from training this run. The lock ends with the process."""
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
        """Let other processes train this run."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def config(self) -> dict[str, Any]:
        """Settings and facts of the run, as they are now."""
        try:
            return tomllib.loads((self.path / "config.toml").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read {self.path / 'config.toml'}: {error}") from None

    def _write_config(self, config: Mapping[str, Any]) -> None:
        write_whole(self.path / "config.toml", tomli_w.dumps(config).encode())

    @property
    def again(self) -> str:
        """The command that continues the run."""
        here = f"fedcsd resume {shlex.quote(str(self.path))}"
        return str(self.config.get("deploy", {}).get("again", here))

    def change(self, round: int, settings: Mapping[str, Any], code: Mapping[str, str]) -> None:
        """Note settings, and digests of code, that differ after this round."""
        config = self.config
        facts = config["facts"]
        new = [Change(round, "setting", k, config[k], v) for k, v in settings.items() if config[k] != v]
        new += [Change(round, "code", k, facts["code"][k], v) for k, v in code.items()]
        if new:
            facts["changes"] = [*facts.get("changes", []), *map(asdict, new)]
            facts["code"] |= code
            self._write_config({**config, **settings})

    def relocate(self, tables: Mapping[str, Any]) -> None:
        """Note where data and files outside the run's folder are now."""
        with writing(self.path):
            self._write_config({**self.config, **tables})

    def latest(self, layout: Layout) -> tuple[dict[str, Any], dict[str, Value]] | None:
        """Return header and values of the newest complete checkpoint, or None to start from round 1."""
        found = self.checkpoints.latest(layout)
        if not found and self.summary is not None:
            raise UserError(f"{self.path} is finished and has no checkpoint: remove it and start again")
        if not found and (self.checkpoints.rounds_saved or (self.path / "metrics.jsonl").exists()):
            note(f"{self.path}: no checkpoint is complete; starting again from round 1")
        return found

    def partition(self) -> tuple[list[Rows], list[Rows]]:
        """Return the clients' training rows, and the rows that they hold out (none without --holdout)."""
        try:
            with np.load(self.path / "partition.npz", allow_pickle=False) as file:
                held = unpacked(file["held_rows"], file["held_sizes"]) if "held_rows" in file else []
                return unpacked(file["rows"], file["sizes"]), held
        except UNREADABLE as error:
            why = getattr(error, "strerror", None) or "it is damaged"
            raise UserError(f"cannot read {self.path / 'partition.npz'}: {why}") from None

    def counts(self) -> Counts | None:
        """Return the number of training samples of each class at each client, or None if it is not known."""
        try:
            with np.load(self.path / "partition.npz", allow_pickle=False) as file:
                counts: Counts | None = file.get("counts")
                return counts
        except UNREADABLE:
            return None

    def history(self) -> list[dict[str, Any]]:
        """Return the records of the rounds so far, without lines that are damaged."""
        path, records = self.path / "metrics.jsonl", []
        for line in path.read_bytes().splitlines() if path.exists() else []:
            with suppress(ValueError):
                records.append(parsed(line))
        records = [r for r in records if isinstance(r, dict) and isinstance(r.get("round"), int)]
        if len(records) != (rounds := (self.summary or {}).get("rounds", len(records))):
            note(f"{path} is damaged: of the {rounds} rounds that were trained {len(records)} are in it")
        return records

    def keep_history(self, rounds: int) -> list[dict[str, Any]]:
        """Remove the records after this many rounds and return the others."""
        records = [r for r in self.history() if r["round"] <= rounds]
        write_whole(self.path / "metrics.jsonl", b"".join(_line(r) for r in records))
        return records

    def record(self, record: Mapping[str, Any]) -> None:
        """Add the record of a round."""
        with open(self.path / "metrics.jsonl", "ab") as file:
            file.write(_line(record))

    @property
    def summary(self) -> dict[str, Any] | None:
        """The result of a finished run, None while it is not finished."""
        return self._ending("summary.json", dict[str, Any])

    @property
    def divergence(self) -> Divergence | None:
        """The divergence that ended the run, None without one or if the run was continued."""
        return self._ending("diverged.json", Divergence)

    def _ending(self, name: str, kind: Callable[..., T]) -> T | None:
        path = self.path / name
        try:
            return kind(**parsed(path.read_bytes())) if path.exists() else None
        except (OSError, ValueError, TypeError):
            raise UserError(f"{path} is damaged: restore it") from None

    def diverged(self, divergence: Divergence) -> None:
        """Note the divergence that ended the run."""
        write_whole(self.path / "diverged.json", (json.dumps(vars(divergence), indent=2) + "\n").encode())

    def finish(self, summary: Mapping[str, Any], model: bytes) -> None:
        """Write the final model and the result."""
        write_whole(self.path / "model.safetensors", model)
        write_whole(self.path / "summary.json", (json.dumps(finite(summary), indent=2) + "\n").encode())

    def remove_ending(self) -> None:
        """Make a run that has ended one that goes on."""
        for name in ("summary.json", "diverged.json"):
            (self.path / name).unlink(missing_ok=True)


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(finite(record)).encode() + b"\n"

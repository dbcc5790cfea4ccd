"""Keep the checkpoints of a run: the last two complete states, each with the clients' files that it names."""

import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedcsd.config import Settings
from fedcsd.errors import UserError, note
from fedcsd.federation import states
from fedcsd.files import write_whole
from fedcsd.messages import Torn, header_of, pack, unpack
from fedcsd.weights import Layout, Value

FOLDER = "checkpoints"
KEPT = 2


class Checkpoints:
    """Write, find and remove the checkpoints in a run's folder."""

    def __init__(self, run: Path):
        self.run, self.folder, self.clients = run, run / FOLDER, run / states.FOLDER
        self._saved, self._saving = -math.inf, 0.0  # when the last one was written, and the seconds it took

    def due(self, settings: Settings, round: int) -> bool:
        """Tell if a checkpoint is due after this round.

        By default they take a twentieth of the time: lost rounds are trained again, to the same bits.
        Client states on disk are only freed by a checkpoint, so each round has one then.
        """
        if settings.checkpoint_every or settings.client_state == "disk":
            return round % max(1, settings.checkpoint_every) == 0
        return time.monotonic() - self._saved >= 19 * self._saving

    def save(self, header: Mapping[str, Any], values: Mapping[str, Value]) -> None:
        """Write a complete state and remove the checkpoints before the last two."""
        began = time.monotonic()
        with suppress(FileNotFoundError), open(self.run / "metrics.jsonl", "ab") as file:
            os.fsync(file.fileno())  # a checkpoint needs the records of its rounds
        write_whole(self.folder / f"round-{header['round']:06d}.safetensors", pack(header, values))
        for _, path in self.found()[KEPT:]:
            path.unlink(missing_ok=True)
        self.sweep()
        self._saved = time.monotonic()
        self._saving = self._saved - began

    def latest(self, layout: Layout) -> tuple[dict[str, Any], dict[str, Value]] | None:
        """Return header and values of the newest complete checkpoint, or None if there is none.

        A client's file that is lost is an error where no older checkpoint does without it.
        """
        lost, passed = "", list[int]()
        for number, path in self.found():
            with suppress(Torn):
                header, values = unpack(path.read_bytes(), layout)
                missing = states.first_lost(self.clients, header, layout)
                if not missing:
                    if passed:
                        torn = f"{self.run}: the checkpoint of round {passed[0]} is damaged"
                        note(f"{torn}; going back to round {number}")
                    return header, values
                lost = lost or missing
            passed.append(number)
        if lost:
            raise UserError(
                f"{self.clients / lost} is missing or damaged and there is no complete checkpoint without it: "
                f"restore it, or remove {self.run} and start again"
            )
        return None

    def remove_after(self, round: int) -> None:
        """Remove checkpoints of later rounds, and clients' files that no checkpoint names."""
        for number, path in self.found():
            if number > round:
                path.unlink()
        self.sweep()

    def sweep(self) -> None:
        """Remove the clients' files that no checkpoint names."""
        headers = []
        for _, path in self.found() if self.clients.is_dir() else ():
            with suppress(Torn):
                headers.append(header_of(path))
        states.sweep(self.clients, headers)

    def found(self) -> list[tuple[int, Path]]:
        """Return the rounds and files of all checkpoints, newest first."""
        files = self.folder.glob("round-*.safetensors")
        return sorted(((int(p.stem.partition("-")[2]), p) for p in files), reverse=True)

    @property
    def rounds_saved(self) -> int:
        """Round of the newest checkpoint, 0 without one."""
        return max((number for number, _ in self.found()), default=0)

"""Store at a node what methods keep of its client, and the weights that it was sent last.

    RUN/states/000005.safetensors         state of the client after round 5
    RUN/held/000005-0123456789ab.float32  weights that were sent in round 5, by token

The server names the state that counts: a reply that came too late is no part of the run, and a server
that was killed goes back to its last checkpoint. So a state has a version, and the versions that the
server may still name stay. All others are removed, and so are the oldest runs.
"""

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from fedcsd.messages import Torn, pack, unpack
from fedcsd.weights import Layout, Values, Weights

RUNS, MEGABYTES = 8, 4096  # limits of a node's store; the run in progress always stays
ROUNDS_HELD = 2


def checksum(flat: Tensor) -> int:
    """Return a checksum of a flat tensor's bytes."""
    return crc32(flat.contiguous().numpy().tobytes())


class Store:
    """Reads and writes the folder of one run at a node."""

    def __init__(self, folder: Path, run: str, megabytes: float = MEGABYTES):
        self.folder, self.runs, self.megabytes = folder / run, folder, megabytes
        self._weights: dict[int, tuple[int, Weights]] = {}  # by token: the round, and the weights
        for name in ("states", "held"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)

    def state(self, version: int, layout: Layout) -> Values | None:
        """Return the client's state after this round, or None if it is lost."""
        try:
            return unpack(self._state(version).read_bytes(), layout)[1]
        except (OSError, Torn):
            return None

    def keep_state(self, version: int, state: Values, needed: Iterable[int]) -> None:
        """Write a new version of the state; keep those that the server may still go back to."""
        if state:
            _write(self._state(version), pack({}, state))
        names = {self._state(v).name for v in (version, *needed)}
        for path in (self.folder / "states").iterdir():
            if path.name not in names:
                path.unlink(missing_ok=True)
        self._bound()

    def _state(self, version: int) -> Path:
        return self.folder / "states" / f"{int(version):06d}.safetensors"

    def weights(self, token: int, layout: Layout, check: int) -> Weights | None:
        """Return weights that were sent earlier, or None if they are not here with this checksum."""
        found = self._weights.get(token, (0, None))[1]
        if found is None:
            path = next((self.folder / "held").glob(f"*-{token:012x}.*"), None)
            with suppress(OSError):
                flat = np.fromfile(path, path.suffix[1:]) if path else np.empty(0)
                if len(flat) == layout.size:
                    found = Weights(layout, torch.from_numpy(flat), token)
        return found if found is not None and checksum(found.flat) == check else None

    def hold(self, round: int, some: Iterable[Weights]) -> None:
        """Hold weights of this round; those of the round before stay, for the teacher that is computed from them."""
        for weights in some:
            kind = str(weights.flat.dtype).removeprefix("torch.")
            path = self.folder / "held" / f"{round:06d}-{weights.token:012x}.{kind}"
            before = next((self.folder / "held").glob(f"*-{weights.token:012x}.{kind}"), None)
            if before is None:
                _write(path, weights.flat.contiguous().numpy().tobytes())
            else:
                os.replace(before, path)
            self._weights[weights.token] = round, weights
        files = list((self.folder / "held").iterdir())
        rounds = sorted({p.name[:6] for p in files if p.name[:6] <= f"{round:06d}"})[-ROUNDS_HELD:]
        for path in files:
            if path.name[:6] not in rounds:
                path.unlink(missing_ok=True)
        self._weights = {t: (r, w) for t, (r, w) in self._weights.items() if f"{r:06d}" in rounds}

    def _bound(self) -> None:
        """Remove the oldest runs if there are too many or they take too much room."""
        others = [p for p in self.runs.iterdir() if p.is_dir() and p != self.folder]
        others.sort(key=lambda p: p.stat().st_mtime, reverse=True)
        os.utime(self.folder)
        room = self.megabytes * 1e6 - _size(self.folder)
        for number, path in enumerate(others, 2):
            room -= _size(path)
            if number > RUNS or room < 0:
                shutil.rmtree(path, ignore_errors=True)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _write(path: Path, content: bytes) -> None:
    """Write a file completely or not at all; a reply is sent only after this."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    os.replace(temporary, path)

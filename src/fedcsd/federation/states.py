"""What methods keep of each client from round to round: in memory, or on disk where that is too much.

On disk there is one file for each client and version: `000012-r000005.safetensors` is what client 12
kept after round 5. Once that round is over the file is never written again, so a checkpoint only
names its versions, and going back to one means going back to a list of names.
"""

import re
import shutil
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedcsd.config import Settings
from fedcsd.errors import RunStopped
from fedcsd.files import flush, writing
from fedcsd.messages import Torn, pack, unpack
from fedcsd.weights import Layout, Value, Values

FOLDER = "clients"
OURS = re.compile(r"\d{6,}-r\d{6,}\.safetensors")
Saved = dict[str, Any]
"""the part of a checkpoint's header that is about clients"""


def file_name(client: int, round: int) -> str:
    return f"{client:06d}-r{round:06d}.safetensors"


def versions(header: Mapping[str, Any]) -> dict[int, int]:
    """Of each client with a file, the round it is from; none in a checkpoint that holds the states itself."""
    return {int(client): round for client, round in header.get("clients", {}).items()}


def read(path: Path, layout: Layout) -> Values:
    """One client's state; Torn if it is missing, incomplete or damaged."""
    try:
        return unpack(path.read_bytes(), layout)[1]
    except OSError as error:
        raise Torn(error.strerror or str(error)) from error


def first_lost(folder: Path, header: Mapping[str, Any], layout: Layout) -> str:
    """The first file that a checkpoint names and that is missing or damaged; empty if all are whole."""
    for client, round in versions(header).items():
        try:
            read(folder / file_name(client, round), layout)
        except Torn:
            return file_name(client, round)
    return ""


def sweep(folder: Path, headers: Iterable[Mapping[str, Any]]) -> None:
    """Remove the files that none of these checkpoints names."""
    named = {file_name(*version) for header in headers for version in versions(header).items()}
    for path in folder.glob("*.safetensors"):
        if OURS.fullmatch(path.name) and path.name not in named:
            path.unlink(missing_ok=True)


class States(Mapping[int, Values]):
    """The clients that have a state, and their states, by number."""

    @abstractmethod
    def put(self, client: int, state: Values, round: int) -> None:
        """What a client keeps from this round on (counted from 1); an empty state is forgotten."""

    @abstractmethod
    def snapshot(self) -> Any:
        """What `restore` needs to undo the round that begins now."""

    @abstractmethod
    def restore(self, snapshot: Any) -> None: ...

    @abstractmethod
    def save(self, round: int) -> tuple[Saved, dict[str, Value]]:
        """What a checkpoint after this round holds of the clients: for its header, and as values."""

    @abstractmethod
    def load(self, header: Mapping[str, Any], values: Mapping[str, Value]) -> None:
        """What `save` gave, whichever kind of states it was that saved it."""


class MemoryStates(States):
    """States in memory; every checkpoint holds all of them."""

    def __init__(self, folder: Path | None = None, layout: Layout | None = None):
        self.folder, self.layout = folder, layout  # where a run that kept them on disk has them
        self._states: dict[int, Values] = {}

    def __getitem__(self, client: int) -> Values:
        return self._states[client]

    def __iter__(self) -> Iterator[int]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def put(self, client: int, state: Values, round: int) -> None:
        if state:
            self._states[client] = state
        else:
            self._states.pop(client, None)

    def snapshot(self) -> dict[int, Values]:
        return dict(self._states)

    def restore(self, snapshot: dict[int, Values]) -> None:
        self._states = dict(snapshot)

    def save(self, round: int) -> tuple[Saved, dict[str, Value]]:
        return {}, {f"{k}.{name}": value for k, state in self.items() for name, value in state.items()}

    def load(self, header: Mapping[str, Any], values: Mapping[str, Value]) -> None:
        self._states = _by_client(values)
        for client, round in versions(header).items():
            assert self.folder is not None
            assert self.layout is not None
            self._states[client] = read(self.folder / file_name(client, round), self.layout)


class DiskStates(States):
    """States in files; memory holds only which version of each client is the present one."""

    def __init__(self, folder: Path, layout: Layout, copies: float = 0):
        self.folder, self.layout = folder, layout
        self.copies = copies  # files there will be at most, if it is known
        self._versions: dict[int, int] = {}
        self._replaced: list[Path] = []  # in this round, and of use only to undo it
        self._saved = 0  # checkpoints name versions up to this round
        self._fits = False

    def __getitem__(self, client: int) -> Values:
        path = self.folder / file_name(client, self._versions[client])
        try:
            return read(path, self.layout)
        except Torn as error:
            raise RunStopped(f"cannot read what client {client} keeps, {path}: {error}") from error

    def __contains__(self, client: object) -> bool:
        return client in self._versions  # without reading the file

    def __iter__(self) -> Iterator[int]:
        return iter(self._versions)

    def __len__(self) -> int:
        return len(self._versions)

    def put(self, client: int, state: Values, round: int) -> None:
        before = self._versions.get(client)
        if state:
            self._write(self.folder / file_name(client, round), pack({}, state, checksum=True))
            self._versions[client] = round
        else:
            self._versions.pop(client, None)
        if before is not None and self._saved < before < round:
            self._replaced.append(self.folder / file_name(client, before))

    def _write(self, path: Path, content: bytes) -> None:
        # No checkpoint names this file yet, so it may be torn by a kill, and it can be flushed later.
        with writing(path, error=RunStopped):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._check_space(len(content))
            path.write_bytes(content)

    def _check_space(self, size: int) -> None:
        """Stop at the first state, not after hours, if such a state of all clients will not fit."""
        if self._fits:
            return
        needed = size * (self.copies - sum(1 for _ in self.folder.iterdir()))
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise RunStopped(
                f"{self.folder} has {free / 1e6:.0f} MB free and what clients keep will need about "
                f"{needed / 1e6:.0f} MB more: free some space"
            )
        self._fits = True

    def snapshot(self) -> dict[int, int]:
        for path in self._replaced:  # the round before is over, nobody goes back to what it replaced
            path.unlink(missing_ok=True)
        self._replaced = []
        return dict(self._versions)

    def restore(self, snapshot: dict[int, int]) -> None:
        undone = set(self._versions.items()) - set(snapshot.items())
        self._versions, self._replaced = dict(snapshot), []
        for version in undone:
            (self.folder / file_name(*version)).unlink(missing_ok=True)

    def save(self, round: int) -> tuple[Saved, dict[str, Value]]:
        new = [version for version in self._versions.items() if version[1] > self._saved]
        for version in new:
            flush(self.folder / file_name(*version))
        for folder in (self.folder, self.folder.parent) if new else ():
            flush(folder)
        self._saved = round
        return {"clients": {str(client): round for client, round in self._versions.items()}}, {}

    def load(self, header: Mapping[str, Any], values: Mapping[str, Value]) -> None:
        self._versions, self._saved = versions(header), header["round"]
        if values:  # the run kept its states in memory until now
            self._saved = header["round"] - 1
            for client, state in _by_client(values).items():
                self.put(client, state, header["round"])


def _by_client(values: Mapping[str, Value]) -> dict[int, Values]:
    states: dict[int, dict[str, Value]] = {}
    for name, value in values.items():
        client, _, key = name.partition(".")
        states.setdefault(int(client), {})[key] = value
    return dict(states)


@contextmanager
def client_states(settings: Settings, layout: Layout, run: Path | None) -> Iterator[States]:
    """The states of a run's clients; those on disk go with the run, or away if it has no directory."""
    folder = run / FOLDER if run else None
    if settings.client_state == "memory":
        yield MemoryStates(folder, layout)
        return
    # The present ones, and what two checkpoints, or one and the round in progress, replaced of them.
    copies = settings.clients * (1 + 2 * min(1, settings.participation * max(1, settings.checkpoint_every)))
    if folder:
        yield DiskStates(folder, layout, copies)
        return
    with TemporaryDirectory(prefix="fedcsd-clients-") as name:
        yield DiskStates(Path(name), layout, copies)

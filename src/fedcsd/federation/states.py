"""A method keeps a state of each client from round to round, in memory or on disk.

On disk each client and version has a file: `000012-r000005.safetensors` is the state of client 12 after
round 5. After that round the file is never written again, so a checkpoint only names its versions, and
going back to one means going back to a list of names.
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
Header = Mapping[str, Any]
"""the header of a checkpoint"""


def file_name(client: int, round: int) -> str:
    return f"{client:06d}-r{round:06d}.safetensors"


def versions(header: Header) -> dict[int, int]:
    """Return the round that each client's file is from; none in a checkpoint that holds the states itself."""
    return {int(client): round for client, round in header.get("clients", {}).items()}


def read(path: Path, layout: Layout) -> Values:
    """Read one client's state; raise Torn if it is missing, incomplete or damaged."""
    try:
        return unpack(path.read_bytes(), layout)[1]
    except OSError as error:
        raise Torn(error.strerror or str(error)) from error


def first_lost(folder: Path, header: Header, layout: Layout) -> str:
    """Return the first file of a checkpoint that is missing or damaged; "" if all are whole."""
    for version in versions(header).items():
        try:
            read(folder / file_name(*version), layout)
        except Torn:
            return file_name(*version)
    return ""


def sweep(folder: Path, headers: Iterable[Header]) -> None:
    """Remove the files that none of these checkpoints names."""
    named = {file_name(*version) for header in headers for version in versions(header).items()}
    for path in folder.glob("*.safetensors"):
        if OURS.fullmatch(path.name) and path.name not in named:
            path.unlink(missing_ok=True)


class States(Mapping[int, Values]):
    """The states of the clients that have one, which a round that fails must not change."""

    @abstractmethod
    def put(self, client: int, state: Values, round: int) -> None:
        """Keep a client's state from this round on (counted from 1); forget an empty one."""

    @abstractmethod
    def snapshot(self) -> Any:
        """Begin a round; return what `restore` needs to undo it."""

    @abstractmethod
    def restore(self, snapshot: Any) -> None: ...

    @abstractmethod
    def save(self, round: int) -> tuple[Header, dict[str, Value]]:
        """Return the part of a checkpoint after this round: of its header, and values."""

    @abstractmethod
    def load(self, header: Header, values: Mapping[str, Value]) -> None:
        """Load a checkpoint, in memory or on disk whichever kind of states saved it."""


class MemoryStates(States):
    """States in memory, where every checkpoint holds all of them."""

    def __init__(self, folder: Path | None = None, layout: Layout | None = None):
        self.folder, self.layout = folder, layout  # for the files of a run that kept them on disk until now
        self._states: dict[int, Values] = {}

    def __getitem__(self, client: int) -> Values:
        return self._states[client]

    def __iter__(self) -> Iterator[int]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def put(self, client: int, state: Values, round: int) -> None:
        self._states[client] = state
        if not state:
            del self._states[client]

    def snapshot(self) -> dict[int, Values]:
        return dict(self._states)

    def restore(self, snapshot: dict[int, Values]) -> None:
        self._states = dict(snapshot)

    def save(self, round: int) -> tuple[Header, dict[str, Value]]:
        return {}, {f"{k}.{name}": value for k, state in self.items() for name, value in state.items()}

    def load(self, header: Header, values: Mapping[str, Value]) -> None:
        self._states = _by_client(values)
        for client, round in versions(header).items():
            assert self.folder is not None
            assert self.layout is not None
            self._states[client] = read(self.folder / file_name(client, round), self.layout)


class DiskStates(States):
    """States in files, where memory holds only the present version of each client."""

    def __init__(self, folder: Path, layout: Layout, copies: float = 0):
        self.folder, self.layout = folder, layout
        self.copies = copies  # files that there will be at most, if that is known
        self._versions: dict[int, int] = {}
        self._replaced: list[Path] = []  # in this round, to undo it
        self._saved = 0  # checkpoints name versions up to this round
        self._fits = False

    def __getitem__(self, client: int) -> Values:
        path = self.folder / file_name(client, self._versions[client])
        try:
            return read(path, self.layout)
        except Torn as error:
            raise RunStopped(f"cannot read the state of client {client}, {path}: {error}") from error

    def __contains__(self, client: object) -> bool:
        return client in self._versions  # without reading the file

    def __iter__(self) -> Iterator[int]:
        return iter(self._versions)

    def __len__(self) -> int:
        return len(self._versions)

    def put(self, client: int, state: Values, round: int) -> None:
        before = self._versions.pop(client, None)
        if state:
            self._write(self.folder / file_name(client, round), pack({}, state))
            self._versions[client] = round
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
                f"{self.folder} has {free / 1e6:.0f} MB free and the clients' states will need about "
                f"{needed / 1e6:.0f} MB more: free some space"
            )
        self._fits = True

    def snapshot(self) -> dict[int, int]:
        for path in self._replaced:  # the round before is over and cannot be undone any more
            path.unlink(missing_ok=True)
        self._replaced = []
        return dict(self._versions)

    def restore(self, snapshot: dict[int, int]) -> None:
        undone = set(self._versions.items()) - set(snapshot.items())
        self._versions, self._replaced = dict(snapshot), []
        for version in undone:
            (self.folder / file_name(*version)).unlink(missing_ok=True)

    def save(self, round: int) -> tuple[Header, dict[str, Value]]:
        new = [self.folder / file_name(*v) for v in self._versions.items() if v[1] > self._saved]
        for path in [*new, self.folder, self.folder.parent] if new else []:
            flush(path)
        self._saved = round
        return {"clients": {str(client): round for client, round in self._versions.items()}}, {}

    def load(self, header: Header, values: Mapping[str, Value]) -> None:
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
    """Open the states of a run's clients; files of a run without a folder are removed at the end."""
    folder = run / FOLDER if run else None
    if settings.client_state == "memory":
        yield MemoryStates(folder, layout)
        return
    # The present versions, and those that two checkpoints, or one and the round in progress, have replaced.
    copies = settings.clients * (1 + 2 * min(1, settings.participation * max(1, settings.checkpoint_every)))
    if folder:
        yield DiskStates(folder, layout, copies)
        return
    with TemporaryDirectory(prefix="fedcsd-clients-") as name:
        yield DiskStates(Path(name), layout, copies)

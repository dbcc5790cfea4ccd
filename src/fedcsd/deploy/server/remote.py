"""Record at the server which state of each node counts, and which weights each node holds."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fedcsd.deploy.node.store import ROUNDS_HELD, checksum
from fedcsd.deploy.settings import Deployment
from fedcsd.deploy.wire import Parcel
from fedcsd.experiments.runs.checkpoints import KEPT
from fedcsd.federation.states import Header, States
from fedcsd.messages import Request, described
from fedcsd.weights import Value, Values, Weights


class NodeStates(States):
    """The states lie at the nodes; the server keeps the round after which each was stored last."""

    def __init__(self) -> None:
        self._versions: dict[int, int] = {}
        self._saved: list[dict[int, int]] = []  # versions in the checkpoints

    def __getitem__(self, client: int) -> Values:
        return {"version": self._versions[client]}

    def __iter__(self) -> Iterator[int]:
        return iter(self._versions)

    def __len__(self) -> int:
        return len(self._versions)

    def put(self, client: int, state: Values, round: int) -> None:
        if state:
            self._versions[client] = round
        else:
            self._versions.pop(client, None)

    def wanted(self, client: int) -> tuple[int, list[int]]:
        """Return the version that counts (0: none), and all versions that the run may still go back to."""
        now = self._versions.get(client, 0)
        return now, sorted({now, *(saved.get(client, 0) for saved in self._saved)} - {0})

    def snapshot(self) -> dict[int, int]:
        return dict(self._versions)

    def restore(self, snapshot: dict[int, int]) -> None:
        self._versions = dict(snapshot)

    def save(self, round: int) -> tuple[Header, dict[str, Value]]:
        self._saved = [*self._saved, dict(self._versions)][-KEPT:]
        return {"nodes": {str(client): version for client, version in self._versions.items()}}, {}

    def load(self, header: Mapping[str, Any], values: Mapping[str, Value]) -> None:
        self._versions = {int(client): version for client, version in header.get("nodes", {}).items()}
        self._saved = [dict(self._versions)]


class Holdings:
    """Records the weights that each client holds, as its answers have shown."""

    def __init__(self, deployment: Deployment):
        self.deployment = deployment
        self._held: dict[int, dict[int, set[int]]] = {}  # of each client, by round
        self._sums: dict[int, int] = {}  # checksums, by token

    def message(self, values: Values) -> "Outgoing":
        """Describe a request's values once for all clients."""
        tensors, entries = described({f"v.{name}": value for name, value in values.items()})
        for name, value in values.items():
            if not isinstance(value, Weights):
                continue
            if value.token not in self._sums:
                self._sums[value.token] = checksum(value.flat)
            entry = entries[f"v.{name}"]
            entry["crc"] = self._sums[value.token]
            recipe = value.recipe if self.deployment.client_teacher else None
            known = recipe and recipe[0] in self._sums and recipe[1] in self._sums
            entry["recipe"] = list(recipe) if recipe and known else None
            entry["crcs"] = [self._sums[token] for token in recipe[:2]] if recipe and known else None
        return Outgoing(self, {name: tensor.numpy() for name, tensor in tensors.items()}, entries)

    def held(self, client: int) -> set[int]:
        return set().union(*self._held.get(client, {}).values())

    def holds(self, client: int, request: Request) -> None:
        """Record that a client has answered: it holds the weights of the request."""
        rounds = self._held.setdefault(client, {})
        tokens = {value.token for value in request.values.values() if isinstance(value, Weights)}
        rounds.setdefault(request.round, set()).update(tokens)
        for old in sorted(rounds)[:-ROUNDS_HELD]:
            del rounds[old]

    def forget(self, client: int) -> None:
        self._held.pop(client, None)


@dataclass(frozen=True)
class Outgoing:
    """The values of a request, which are sent to one client after another."""

    holdings: Holdings
    arrays: Mapping[str, Any]
    entries: Mapping[str, Any]

    def parcel(
        self, header: dict[str, Any], client: int, *, everything: bool = False, weights: bool = False
    ) -> Parcel:
        """Return what this client must be sent; with `weights` the model is always in it."""
        held = set() if everything else self.holdings.held(client)
        here = held | {e["token"] for e in self.entries.values() if "token" in e and not e["recipe"]}
        needed = set()
        for name, entry in self.entries.items():
            if "number" in entry:
                continue
            made = not everything and entry.get("recipe") and set(entry["recipe"][:2]) <= here
            if not (entry.get("token") in held or made) or (weights and name == "v.weights"):
                needed.add(entry["tensor"])
        arrays = {name: array for name, array in self.arrays.items() if name in needed}
        return Parcel({**header, "entries": dict(self.entries)}, arrays)

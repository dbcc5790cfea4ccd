"""A method is a dataclass of options with two halves, one for the server and one for the clients."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor

from fedcsd.messages import Reply
from fedcsd.training import Client
from fedcsd.weights import Layout, Value, Values, Weights


class Server:
    """The server holds named weights, tensors and numbers, all of them checkpointed.

    A method sets what it needs as attributes (`server.teacher = …`). Values are replaced, never
    changed in place, so that a round that is cut off leaves nothing half done.
    """

    weights: Weights

    classes: int
    features: int
    """size of the penultimate features"""
    clients: int
    """number of clients in the federation"""

    def __init__(self, weights: Weights, classes: int, features: int = 0, clients: int = 0):
        self.values: dict[str, Value]
        facts = {"classes": classes, "features": features, "clients": clients}
        vars(self).update(facts, values={"weights": weights})

    def __getattr__(self, name: str) -> Any:
        try:
            return object.__getattribute__(self, "values")[name]
        except KeyError:
            raise AttributeError(f"the server has no {name!r}: set it in the method's start()") from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("values", "classes", "features", "clients"):
            raise AttributeError(f"server.{name} is given: choose another name for what the method remembers")
        if name == "weights" and not isinstance(value, Weights):
            raise TypeError(
                f"server.weights must be weights, such as server.weights.like(flat); it is a {type(value).__name__}"
            )
        if not isinstance(value, (Weights, Tensor, int, float)):
            raise TypeError(
                f"server.{name} must be weights, a tensor or a number, so that it can be saved; it is a {type(value).__name__}"
            )
        if isinstance(value, Tensor):
            value = value.to(self.weights.flat.device)  # a GPU, if the clients are there
        self.values[name] = value


class Ask(Protocol):
    """Send a request to the round's cohort and yield the replies, one by one in a fixed order.

    The function is one of the method's client half; the values are its arguments. The method does not
    know where the clients are.
    """

    def __call__(self, function: Callable[..., Values], /, **values: Value) -> Iterator[Reply]: ...


@dataclass(frozen=True)
class Method(ABC):
    """The base of all methods has two halves.

    - `start` and `round` run on the server.
    - The functions that `round` asks for run at the clients, with the client as first argument.
    """

    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    """options by the name of a preset: `fedcsd:m1` sets `presets["m1"]`"""
    trains: ClassVar[tuple[str, ...]] = ("train",)
    """client functions that train the model; the others answer without training"""
    reveals: ClassVar[dict[str, str]] = {"prototypes": "held"}
    """private values of replies, one row a class; each with the value that says which classes it is of"""

    def start(self, server: Server) -> None:  # noqa: B027  (most methods need nothing)
        """Set the server's values before the first round."""

    @abstractmethod
    def round(self, server: Server, ask: Ask) -> None:
        """Train one round: ask the cohort, set the server's new values."""

    def local(self, layout: Layout) -> Tensor | None:
        """Return true for the numbers of the weights that never leave their client [size].

        The global model keeps its initial values there. None, the default: the method has no such part.
        """
        return None

    def personal(self, client: Client, weights: Weights) -> Weights:
        """Return the model that a client uses for itself.

        A method that overrides this is personalised: after each round each client's own model is tested
        on its own data.
        """
        return weights

    @property
    def personalised(self) -> bool:
        """Tell whether clients have models of their own."""
        return type(self).personal is not Method.personal

    def test_personal(self, client: Client, weights: Weights) -> Values:
        """Test a client's own model; after a round of a personalised method every client is asked this."""
        return {"accuracy": client.accuracy(self.personal(client, weights))}

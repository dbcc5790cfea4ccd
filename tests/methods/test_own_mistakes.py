"""Test that every mistake in a user's method is told in plain words and with its place."""

import json
import warnings
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch

import fedcsd
from fedcsd.aggregation import weighted_mean
from fedcsd.errors import Diverged, MethodFailed, Note
from fedcsd.federation.backends import memory
from fedcsd.federation.backends.device import DeviceBackend
from fedcsd.federation.rounds import Federation
from fedcsd.methods import Ask, Server
from fedcsd.methods.fedavg import FedAvg
from fedcsd.training import Batch, Client
from fedcsd.weights import Values, Weights
from helpers.federations import small
from helpers.runs import run_once


class Bad(FedAvg):
    kind: str = ""

    def __init__(self, kind: str):
        object.__setattr__(self, "kind", kind)

    def round(self, server: Server, ask: Ask) -> None:
        if self.kind == "misspelt":
            list(ask(self.trian, weights=server.weights))
        elif self.kind == "text":
            server.note = "x"
        elif self.kind == "tensor":
            server.weights = weighted_mean(ask(self.train, weights=server.weights)).flat
        elif self.kind == "unread":
            ask(self.train, weights=server.weights)
        elif self.kind == "zip":
            list(
                zip(
                    ask(self.train, weights=server.weights),
                    ask(self.train, weights=server.weights),
                    strict=True,
                )
            )
        elif self.kind == "sent":
            list(ask(self.train, weights=server.weights, how="fast"))
        elif self.kind == "argument":
            list(ask(self.train, wieghts=server.weights))
        elif self.kind == "lambda":
            list(ask(lambda client: {}))
        else:
            super().round(server, ask)

    def train(self, client: Client, weights: Weights) -> Values:
        if self.kind == "lost":
            return client.train(weights, self.loss, gradient=lambda w, g: g + 100 * w)
        loss = {"measure": self.measured, "each": self.each}.get(self.kind, self.loss)
        result = client.train(weights, loss)
        if self.kind == "nothing":
            return None
        if self.kind == "library":
            return json.loads("{")
        if self.kind == "silent":
            raise AssertionError
        if self.kind == "array":
            return {**result, "x": [1, 2]}
        if self.kind == "state":
            client.state["x"] = "text"
        return result

    def each(self, batch):
        return batch.logits.log_softmax(1)

    def measured(self, batch):
        return self.loss(batch), {"mean": batch.logits.mean()}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("unread", r"did not read all replies of ask\(self\.train"),
        ("zip", r"read all replies of ask\(self\.train, …\) before asking again"),
        ("lambda", "ask takes a function of the method itself"),
        ("sent", r"a request's 'how' is a str: only weights.* \(test_own_mistakes\.py, line \d+\)"),
        (
            "argument",
            r"train is called as train\(self, client, wieghts=…\), but it is train\(self, client, weights\) in ",
        ),
        ("nothing", r"client \d failed: .*train must return a dict of values; it returned a NoneType\n"),
        ("library", r"JSONDecodeError: .* \(test_own_mistakes\.py, line \d+\)"),
        ("silent", r"client \d failed: AssertionError \(test_own_mistakes\.py, line \d+\)"),
        ("array", r"client \d failed: TypeError: a reply's 'x' is a list: only weights, .*kept\n"),
        ("state", r"client \d failed: TypeError: the state's 'x' is a str: only weights, .*kept\n"),
        (
            "each",
            r"the loss has shape \[\d+, \d+\]: .* for each sample, here \[\d+\], or their mean \(test_own_mistakes\.py, line \d+\)",
        ),
        ("lost", "gradient= must change the gradient in place"),
        (
            "misspelt",
            r"the method's round\(\) failed: AttributeError: .*trian.* \(test_own_mistakes\.py, line \d+\)",
        ),
        (
            "text",
            r"the method's round\(\) failed: TypeError: server\.note must be .* \(test_own_mistakes\.py",
        ),
        ("tensor", r"server\.weights must be weights, .*; it is a Tensor \(test_own_mistakes\.py"),
        (
            "measure",
            r"the loss measures 'mean' with shape \[\]: return a number for each sample, here \[\d+\]",
        ),
    ],
)
def test_mistakes_in_a_method_are_named(kind: str, message: str) -> None:
    with pytest.raises(MethodFailed, match=message):
        run_once(Bad(kind))


def test_a_full_gpu_is_no_mistake_of_the_method(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(method: FedAvg, server: Server, ask: Ask) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 436.00 MiB.")

    monkeypatch.setattr(memory, "advice", lambda: "train fewer runs at once (--jobs)")
    with pytest.raises(fedcsd.RunStopped) as stopped:
        run_once(made(round=full))
    assert not isinstance(stopped.value, MethodFailed)
    assert "the GPU's memory is full in the method's round(): train fewer runs at once" in str(stopped.value)


def made(**functions: Callable[..., Any]) -> FedAvg:
    """Return a method with these functions."""
    for name, function in functions.items():
        function.__name__ = name
    method: FedAvg = type("Mine", (FedAvg,), functions)()
    return method


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        (
            {"train": lambda self, client, weights: {"weights": weights.flat}},
            r"the weights of a reply must be weights, as client\.train returns them.*; they are a Tensor",
        ),
        (
            {"train": lambda self, client, weights: {}},
            "the weights of a reply must be weights, as client.train .*; there are none",
        ),
        (
            {"train": lambda self, client, weights: {"weights": weights.with_parameters(weights.flat[:5])}},
            r"with_parameters takes a tensor \[\d+\], .*; it was given \[5\] \(test_own_mistakes\.py, line \d+\)",
        ),
        ({"loss": lambda self, batch: batch.cross_entropy.detach()}, "the loss does not depend on the model's"),
        ({"loss": lambda self, batch: None}, "the loss must be a tensor; it is a NoneType"),
        ({"loss": lambda self, batch: batch.logits.mean(0)}, r"it must be a number for each sample, here \[\d+\], or"),
    ],
)  # fmt: skip
def test_what_a_client_s_half_gives_is_checked(
    functions: dict[str, Callable[..., Any]], message: str
) -> None:
    with pytest.raises(MethodFailed, match=message):
        run_once(made(**functions))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda self, batch: batch.cross_entropy.detach(), "the loss does not depend on the model's outputs"),
        (lambda self, batch, labels: batch.cross_entropy, r"but it is loss\(self, batch, labels\) in "),
    ],
)
def test_clients_that_are_trained_as_one_are_told_the_same(loss: Callable[..., Any], message: str) -> None:
    experiment = small(made(loss=loss))
    with pytest.raises(MethodFailed, match=message):
        Federation(experiment, DeviceBackend(experiment.worker(), "stacked")).step()
    Federation(small(), DeviceBackend(small().worker(), "stacked")).step()


class Narrow(FedAvg):
    def train(self, client: Client) -> Values:  # type: ignore[override]
        return {}


class Asks(FedAvg):
    def round(self, server: Server) -> None:  # type: ignore[override]
        pass


class Wide(FedAvg):
    def loss(self, batch: Batch, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return batch.cross_entropy


class Selfless(FedAvg):
    def loss(batch) -> torch.Tensor:
        return batch.cross_entropy


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (Narrow, r"train is called as train\(self, client, weights=…\), but it is train\(self, client\) in "),
        (Asks, r"round is called as round\(self, server, ask\), but it is round\(self, server\) in "),
        (Wide, r"loss is called as loss\(self, batch\), but it is loss\(self, batch, labels\) in "),
        (Selfless, r"loss is called as loss\(self, batch\), but it is loss\(batch\) in "),
    ],
)
def test_a_function_with_other_arguments_is_told_which_it_is_called_with(
    method: type[FedAvg], message: str
) -> None:
    with pytest.raises(MethodFailed, match=message + r"test_own_mistakes\.py, line \d+"):
        run_once(method())


def test_a_type_error_inside_a_function_stays_what_it_is() -> None:
    with pytest.raises(
        MethodFailed, match=r"TypeError: unsupported operand .* \(test_own_mistakes\.py, line"
    ):
        run_once(made(loss=lambda self, batch: batch.cross_entropy + None))


def given(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that gives something more."""

    @wraps(function)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named, more=None)

    return wrapper


@pytest.mark.parametrize("name", ["round", "train", "loss"])
def test_a_type_error_inside_a_decorated_function_stays_what_it_is(name: str) -> None:
    functions = {
        "round": lambda self, server, ask, more: more + 1,
        "train": lambda self, client, weights, more: more + 1,
        "loss": lambda self, batch, more: more + 1,
    }
    functions[name].__name__ = name
    with pytest.raises(
        MethodFailed, match=r"TypeError: unsupported operand .* \(test_own_mistakes\.py, line"
    ):
        run_once(made(**{name: given(functions[name])}))


def test_weights_of_another_size_are_refused_at_once() -> None:
    weights = small().weights
    for wrong in (weights.flat[:5], weights.flat[None], [1.0]):
        with pytest.raises(ValueError, match=r"like takes a tensor \[\d+\], .*; it was given (\[|a list)"):
            weights.like(wrong)
    with pytest.raises(ValueError, match=r"with_parameters takes"):
        weights.with_parameters(weights.parameters[:5])


def test_a_loss_of_one_s_own_may_be_why_a_run_diverges() -> None:
    with pytest.raises(
        Diverged, match=r"lower the learning rate .* or see whether the method's own loss gives NaN"
    ):
        run_once(made(loss=lambda self, batch: batch.cross_entropy * float("nan")))
    with pytest.raises(Diverged, match=r"\(--lr, now 1e\+30\) or leave such clients out"):
        run_once("fedavg", lr=1e30)


def asks_only(self: FedAvg, server: Server, ask: Ask) -> None:
    list(ask(self.train, weights=server.weights))


def test_a_round_that_leaves_the_model_as_it_was_is_noted_once() -> None:
    with pytest.warns(
        Note, match=r"Mine\.round\(\) left the global model as it was: set server\.weights"
    ) as said:
        run_once(made(round=asks_only))
    assert len([w for w in said if w.category is Note]) == 1


@pytest.mark.parametrize("kind", ["built in", "own", "personal", "nobody"])
def test_a_round_that_may_leave_the_model_is_not_noted(kind: str) -> None:
    local = made(round=asks_only, personal=lambda self, client, weights: weights)
    with warnings.catch_warnings():
        warnings.simplefilter("error", Note)
        if kind == "nobody":
            run_once(made(round=asks_only), dropout=0.999)
        elif kind == "built in":
            run_once("fedavg", lr=1e-30)
        else:
            run_once(made() if kind == "own" else local)


def test_a_method_must_be_mended_before_its_run_goes_on(tmp_path: Path) -> None:
    broken = made(loss=lambda self, batch: 1 / 0)
    with pytest.raises(MethodFailed, match=r"no round was finished; mend it, then: fedcsd resume "):
        run_once(broken, out=tmp_path / "run")
    with pytest.raises(MethodFailed) as caught:
        fedcsd.compare({"mine": broken}, out=tmp_path / "all", clients=3, rounds=1, train_size=200)
    assert "; go on with: the same command again" in str(caught.value)
    assert "fedcsd resume" not in str(caught.value)

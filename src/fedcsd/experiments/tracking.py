"""Callbacks that track a run: a function after each round, TensorBoard, MLflow."""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from fedcsd.errors import UserError, note, reason
from fedcsd.federation.callbacks import Callbacks
from fedcsd.federation.evaluation import Record
from fedcsd.measurements import number
from fedcsd.plugins import short

OnRound = Callable[[Record, int], object]
"""called after every round with its record and the number of rounds in all"""

PATIENCE = 60.0  # seconds until a server that did not answer is tried again
Status = Literal["FINISHED", "FAILED", "KILLED"]


class EachRound(Callbacks):
    """Callbacks that call a function after each round."""

    def __init__(self, on_round: OnRound | None):
        self.on_round = on_round

    def round(self, record: Record, rounds: int) -> None:
        if self.on_round:
            self.on_round(record, rounds)


class Several(Callbacks):
    """Callbacks that pass every call on to several others."""

    def __init__(self, *others: Callbacks):
        self.others = others

    def reply(self, function: str, done: int, clients: int) -> None:
        for other in self.others:
            other.reply(function, done, clients)

    def round(self, record: Record, rounds: int) -> None:
        for other in self.others:
            other.round(record, rounds)


def check_trackers(config: Mapping[str, Any]) -> None:
    """Refuse a tracker whose extra is not installed or whose server does not answer, before a run is made."""
    if config.get("tensorboard"):
        _summary_writer()
    if uri := config.get("mlflow"):
        client = _client(uri)
        with _in_one_line(uri):
            client.search_experiments(max_results=1)


@contextmanager
def tracked(
    callbacks: Callbacks | None, config: Mapping[str, Any], folder: Path | None, history: Sequence[Record]
) -> Iterator[Callbacks]:
    """Return the given callbacks and the trackers of the settings as one; `history` are rounds done before."""
    trackers: list[TensorBoard | MLflow] = []
    if config.get("tensorboard"):
        trackers.append(TensorBoard(folder, config, history))
    if config.get("mlflow"):
        trackers.append(MLflow(config["mlflow"], folder, config, history))
    status: Status = "FAILED"
    try:
        yield Several(*trackers, *([callbacks] if callbacks else []))
        status = "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        for tracker in trackers:
            tracker.close(status)


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a round by name, those of a group as `domain_accuracy/amazon`."""
    return {
        key: float(value)
        for key, value in flattened(record, "/").items()
        if key != "round" and math.isfinite(number(value))
    }


def settings_text(config: Mapping[str, Any]) -> dict[str, str]:
    """Return every setting by name, options of a choice as `method.mu`."""
    return {key: str(value) for key, value in flattened(config).items()}


def flattened(values: Mapping[str, Any], mark: str = ".") -> dict[str, Any]:
    """Return values without groups: those of a group have its name, the mark and their own name."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        group = isinstance(value, Mapping)
        flat |= {f"{key}{mark}{k}": v for k, v in value.items()} if group else {key: value}
    return flat


class TensorBoard(Callbacks):
    """Callbacks that write event files into the run's directory.

    A run that was cut off may have left files without its last rounds, so one that goes on writes all again.
    """

    def __init__(self, folder: Path | None, config: Mapping[str, Any], history: Sequence[Record]):
        if folder is None:
            raise UserError("tensorboard writes into the run's directory: give one (out=…)")
        self.writer = _summary_writer()(str(folder / "tensorboard"), purge_step=1)
        for record in history:
            self.round(record, len(history))
        if not history:
            rows = "".join(f"| {key} | {value} |\n" for key, value in settings_text(config).items())
            self.writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}", 0)

    def round(self, record: Record, rounds: int) -> None:
        try:
            for key, value in scalars(record).items():
                self.writer.add_scalar(key, value, record["round"])
        except OSError as error:
            note(f"TensorBoard's files cannot be written, and training goes on: {error}")

    def close(self, status: Status) -> None:
        with suppress(OSError):
            self.writer.close()


class MLflow(Callbacks):
    """Callbacks that send each round to an MLflow server; training goes on while it does not answer.

    Metrics that could not be sent are kept and sent later: MLflow's asynchronous logging drops them.
    """

    def __init__(
        self, uri: str, folder: Path | None, config: Mapping[str, Any], history: Sequence[Record] = ()
    ):
        self.uri, self.pending, self.noted, self.next = uri, list[Any](), False, 0.0
        self.client = _client(uri)
        with _in_one_line(uri):
            self.run = self._take_up(folder) or self._begin(folder, config)
            sent = self.client.get_run(self.run).data.metrics.get("rounds_done", 0)
        for record in history:
            if record["round"] > sent:
                self._add(record)

    def _take_up(self, folder: Path | None) -> str | None:
        """Return the run that was begun on that server for this directory, if there is one."""
        try:
            kept = json.loads((folder / "mlflow.json").read_text(encoding="utf-8")) if folder else {}
        except (OSError, ValueError):
            return None
        if kept.get("uri") != self.uri:
            return None
        self.client.update_run(kept["run"], status="RUNNING")
        return str(kept["run"])

    def _begin(self, folder: Path | None, config: Mapping[str, Any]) -> str:
        from mlflow.entities import Param

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedcsd")
        found = self.client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self.client.create_experiment(name)
        label = folder.name if folder else short(config["method"]["name"])
        run = str(self.client.create_run(experiment, run_name=label).info.run_id)
        params = [Param(key, value[:500]) for key, value in settings_text(config).items()]
        for start in range(0, len(params), 100):  # the most that one message may have
            self.client.log_batch(run, params=params[start : start + 100])
        if folder:
            (folder / "mlflow.json").write_text(json.dumps({"uri": self.uri, "run": run}) + "\n")
        return run

    def round(self, record: Record, rounds: int) -> None:
        self._add(record)
        if time.monotonic() >= self.next:
            self._send()

    def _add(self, record: Record) -> None:
        from mlflow.entities import Metric

        now, step = int(time.time() * 1000), record["round"]
        values = {**scalars(record), "rounds_done": float(step)}
        self.pending += [Metric(key, value, now, step) for key, value in values.items()]

    def _send(self) -> bool:
        try:
            while self.pending:
                self.client.log_batch(self.run, metrics=self.pending[:1000])
                del self.pending[:1000]
        except Exception as error:  # any error must leave the training alone
            self.next = time.monotonic() + PATIENCE
            if not self.noted:
                later = "training goes on, and it is tried again"
                note(f"MLflow at {self.uri} does not answer; {later}: {reason(error)}")
            self.noted = True
            return False
        return True

    def close(self, status: Status) -> None:
        try:
            if self._send():
                self.client.set_terminated(self.run, status)
                return
        except Exception as error:
            note(f"MLflow at {self.uri} was not told of the end: {reason(error)}")
            return
        rounds = len({metric.step for metric in self.pending})
        lost = f"has not got {rounds} round{'s' * (rounds > 1)}"
        note(f"MLflow at {self.uri} {lost}; metrics.jsonl has all of them")


QUICK = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # its own settings wait for minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""set unless the user has set it"""


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise _missing("tensorboard") from None
    return SummaryWriter


def _client(uri: str) -> Any:
    if urlsplit(uri).password:
        raise UserError(
            "mlflow: a password does not belong into the address, which is written into the run's files: "
            "use MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        )
    for name, value in QUICK.items():
        os.environ.setdefault(name, value)
    try:
        from mlflow import MlflowClient
    except ImportError:
        raise _missing("mlflow") from None
    with _in_one_line(uri):
        return MlflowClient(tracking_uri=uri)


@contextmanager
def _in_one_line(uri: str) -> Iterator[None]:
    """Report an error of MLflow, requests or a database in one line."""
    try:
        yield
    except Exception as error:
        raise UserError(f"MLflow at {uri} cannot be used: {reason(error)}") from None


def _missing(extra: str) -> UserError:
    return UserError(f"--{extra} needs a package that is not installed: pip install 'fedcsd[{extra}]'")

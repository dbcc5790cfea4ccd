"""Who is told of a run as it trains: a function after each round, TensorBoard, an MLflow server."""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from fedcsd.errors import UserError, note
from fedcsd.federation.callbacks import Callbacks
from fedcsd.federation.evaluation import Record
from fedcsd.plugins import short

OnRound = Callable[[Record, int], object]
"""Called after every round with its record and the number of rounds in all."""

PATIENCE = 60.0  # seconds until a tracking server that did not answer is tried again
Status = Literal["FINISHED", "FAILED", "KILLED"]


class EachRound(Callbacks):
    """Calls a function after each round."""

    def __init__(self, on_round: OnRound | None):
        self.on_round = on_round

    def round(self, record: Record, rounds: int) -> None:
        if self.on_round:
            self.on_round(record, rounds)


class Several(Callbacks):
    """Tells all of them."""

    def __init__(self, *watches: Callbacks):
        self.watches = watches

    def reply(self, function: str, done: int, clients: int) -> None:
        for watch in self.watches:
            watch.reply(function, done, clients)

    def round(self, record: Record, rounds: int) -> None:
        for watch in self.watches:
            watch.round(record, rounds)


def check(config: Mapping[str, Any]) -> None:
    """Refuse what a run asks for and cannot have, before anything of it is made: an extra that is missing, a
    server that does not answer."""
    if config.get("tensorboard"):
        _summary_writer()
    if uri := config.get("mlflow"):
        client = _client(uri)
        with _told(uri):
            client.search_experiments(max_results=1)


@contextmanager
def tracked(
    watch: Callbacks | None, config: Mapping[str, Any], folder: Path | None, history: Sequence[Record]
) -> Iterator[Callbacks]:
    """What watches a run: the given watch, and what its settings ask for. `history` are the rounds that are
    done already."""
    trackers: list[TensorBoard | MLflow] = []
    if config.get("tensorboard"):
        trackers.append(TensorBoard(folder, config, history))
    if config.get("mlflow"):
        trackers.append(MLflow(config["mlflow"], folder, config, history))
    status: Status = "FAILED"
    try:
        yield Several(*trackers, *([watch] if watch else []))
        status = "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        for tracker in trackers:
            tracker.close(status)


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a round by name; groups such as `domain_accuracy` are `domain_accuracy/amazon`. What is
    not finite is left out, and so are the lists of all classes and clients."""
    return {
        key: float(value)
        for key, value in flattened(record, "/").items()
        if key != "round" and isinstance(value, (int, float)) and math.isfinite(value)
    }


def settings_text(config: Mapping[str, Any]) -> dict[str, str]:
    """Every setting by name, options of a choice as `method.mu`."""
    return {key: str(value) for key, value in flattened(config).items()}


def flattened(values: Mapping[str, Any], mark: str = ".") -> dict[str, Any]:
    """Values without groups: those of a group by its name, the mark and their own."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= (
            {f"{key}{mark}{k}": v for k, v in value.items()} if isinstance(value, Mapping) else {key: value}
        )
    return flat


class TensorBoard(Callbacks):
    """Writes event files into the run's directory. What a run that was cut off had left there may lack its
    last rounds, so that one that goes on replaces them all."""

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
    """Sends each round to an MLflow server. What it does not take is kept and sent later; training goes on."""

    def __init__(
        self, uri: str, folder: Path | None, config: Mapping[str, Any], history: Sequence[Record] = ()
    ):
        self.uri, self.pending, self.told, self.next = uri, list[Any](), False, 0.0
        self.client = _client(uri)
        with _told(uri):
            self.run = self._take_up(folder) or self._begin(folder, config)
            sent = self.client.get_run(self.run).data.metrics.get("rounds_done", 0)
        for record in history:
            if record["round"] > sent:
                self._add(record)

    def _take_up(self, folder: Path | None) -> str | None:
        """The run that was begun on that server for this directory, if there is one."""
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
        for start in range(0, len(params), 100):  # as many as one message may have
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
        except Exception as error:  # whatever it is, it must not end the training
            self.next = time.monotonic() + PATIENCE
            if not self.told:
                note(
                    f"MLflow at {self.uri} does not answer; training goes on, and it is tried again: {in_one_line(error)}"
                )
            self.told = True
            return False
        return True

    def close(self, status: Status) -> None:
        try:
            if self._send():
                self.client.set_terminated(self.run, status)
                return
        except Exception as error:
            note(f"MLflow at {self.uri} was not told of the end: {in_one_line(error)}")
            return
        rounds = len({metric.step for metric in self.pending})
        note(
            f"MLflow at {self.uri} has not got {rounds} round{'s' * (rounds > 1)}; metrics.jsonl has all of them"
        )


QUICK = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # its own settings wait for minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""What is set unless the user has set it."""


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise missing("tensorboard", "--tensorboard") from None
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
        raise missing("mlflow", "--mlflow") from None
    with _told(uri):
        return MlflowClient(tracking_uri=uri)


@contextmanager
def _told(uri: str) -> Iterator[None]:
    """What MLflow, requests or a database have to say, as one line."""
    try:
        yield
    except Exception as error:
        raise UserError(f"MLflow at {uri} cannot be used: {in_one_line(error)}") from None


def missing(extra: str, option: str) -> UserError:
    return UserError(f"{option} needs a package that is not installed: pip install 'fedcsd[{extra}]'")


def in_one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]}…"

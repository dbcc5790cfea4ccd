"""The records of a run, whether they lie in a folder of its own or in an archive of many runs."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from fedcsd.config.settings import settings_where
from fedcsd.config.toml import FACTS
from fedcsd.data.partition import Counts
from fedcsd.errors import Divergence

FORMAT = 1
"""Number of the form of config.toml, comparison.json and the facts. Whoever changes the form raises it and converts
the committed results."""
MENDING = settings_where(on_resume="mends")


@dataclass(frozen=True)
class Change:
    """A setting, or a version of code, that a run has from a round on."""

    round: int
    """rounds that were trained before the change"""
    kind: Literal["setting", "code"]
    name: str
    """the setting; of code: method, model or package"""
    before: Any
    after: Any

    def __str__(self) -> str:
        what = f"code of the {self.name}" if self.kind == "code" else self.name
        return f"after round {self.round}: {what} {self.before} -> {self.after}"

    @property
    def mends(self) -> bool:
        """Tell if it lets a run go on after a divergence."""
        return self.kind == "setting" and self.name in MENDING


class RecordedRun(ABC):
    """The settings, rounds and ending of a run. Tables, plots and reports read runs through this class."""

    path: Path

    @property
    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Return the settings and facts of the run, with the changes since it began."""

    @property
    @abstractmethod
    def summary(self) -> dict[str, Any] | None:
        """Return the result of a finished run; None while the run is not finished."""

    @property
    @abstractmethod
    def divergence(self) -> Divergence | None:
        """Return how the run diverged; None if it did not, or was resumed since."""

    @abstractmethod
    def history(self) -> list[dict[str, Any]]:
        """Return one record a round."""

    @abstractmethod
    def counts(self) -> Counts | None:
        """Return the training samples of each class at each client; None if they are not known."""

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings of the run, without facts."""
        return {key: value for key, value in self.config.items() if key not in FACTS}

    @property
    def changes(self) -> list[Change]:
        """Return the changes since the run began, in order."""
        return [Change(**change) for change in self.config["facts"].get("changes", [])]

    @property
    def began(self) -> dict[str, Any]:
        """Return the settings before changes after a divergence."""
        return {**self.settings, **{c.name: c.before for c in reversed(self.changes) if c.mends}}

    def code(self, name: str) -> list[tuple[int, str]]:
        """Return the digests of the code (method, model, package) that trained the run.

        Each comes with the rounds that were trained before it. Built-in methods and models have none.
        """
        last = self.config["facts"]["code"].get(name, "")
        changes = [c for c in self.changes if c.kind == "code" and c.name == name]
        used = [(0, changes[0].before if changes else last), *((c.round, c.after) for c in changes)]
        trained = [this for this, after in pairwise(used) if this[0] < after[0]]
        return [*trained, used[-1]] if last else []

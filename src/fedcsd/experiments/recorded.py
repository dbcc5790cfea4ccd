"""The records of a run, whether they lie in a folder of its own or in an archive of many runs."""

import re
from abc import ABC, abstractmethod
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedcsd.config.settings import settings_where
from fedcsd.config.toml import FACTS
from fedcsd.data.partition import Counts
from fedcsd.errors import Divergence

CODE_CHANGE = re.compile(r"after round (\d+): code of the (method|model) (.+) -> (.+)")
MENDING = settings_where(on_resume="mends")


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
    def began(self) -> dict[str, Any]:
        """Return the settings before any change after a divergence."""
        before = self.config["facts"].get("began", {})
        return {**self.settings, **{k: v for k, v in before.items() if k in MENDING}}

    @property
    def mended(self) -> list[str]:
        """Return the changes that followed a divergence, as config.toml has them."""
        changes = self.config["facts"].get("changes", [])
        return [c for c in changes if c.partition(": ")[2].partition(" ")[0] in MENDING]

    def code(self, key: str = "method") -> list[tuple[int, str]]:
        """Return the versions of the user's method file (or with "model_code" of the model file) that trained the run.

        Each comes with the round after which it was used. A built-in method or model has none.
        """
        facts, what = self.config["facts"], key.removesuffix("_code")
        found = [CODE_CHANGE.fullmatch(change) for change in facts.get("changes", [])]
        changes = [match.groups() for match in found if match and match[2] == what]
        used = [(0, changes[0][2] if changes else facts.get(key, ""))]
        used += [(int(round), new) for round, _, _, new in changes]
        trained = [this for this, after in pairwise(used) if this[0] < after[0]]
        return [*trained, used[-1]] if used[-1][1] else []

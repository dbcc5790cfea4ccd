"""Callbacks for a run's progress: progress bars, tracking and Python's `on_round` are made with them."""

from fedcsd.federation.evaluation import Record


class Callbacks:
    """Callbacks for a run's progress; the base class ignores them."""

    def reply(self, function: str, done: int, clients: int) -> None:
        """Called for each reply to a request: `done` of `clients` have answered."""

    def round(self, record: Record, rounds: int) -> None:
        """Called when a round is trained, recorded and saved; the run has `rounds` in all."""

    def diverged(self, round: int) -> None:
        """Called when a run of a comparison diverges in this round; the comparison goes on."""

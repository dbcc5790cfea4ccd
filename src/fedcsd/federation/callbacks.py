"""Progress bars, tracking and Python's `on_round` are callbacks."""

from fedcsd.federation.evaluation import Record


class Callbacks:
    """Callbacks for a run's progress; the base class ignores them."""

    def reply(self, function: str, done: int, clients: int) -> None:
        """Show a reply to a request: `done` of `clients` have answered."""

    def round(self, record: Record, rounds: int) -> None:
        """Show a round that is trained, recorded and saved; the run has `rounds` in all."""

    def diverged(self, round: int) -> None:
        """Show that a run of a comparison diverged in this round; the comparison goes on."""

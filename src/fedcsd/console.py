"""What a person sees in the terminal: progress while training, tables at the end."""

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from fedcsd.federation import Watch
from fedcsd.naming import short

console = Console(highlight=False, markup=False)

PLAIN_SECONDS = 5.0  # between lines of progress where the output is not a terminal


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Training:
    """Live progress of one run after another: round, accuracy, time left.

    On a terminal a bar that moves; elsewhere (a log file) a line every few seconds.
    """

    def __init__(self) -> None:
        self.bar = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("round {task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
        )
        self.live = console.is_terminal

    def __enter__(self) -> "Training":
        if self.live:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self.bar.stop()

    def follow(self, label: str, rounds: int, more: int = 0) -> "RunProgress":
        """Progress of one run; `more` runs of the same length come after it."""
        return RunProgress(self, label, rounds, more)


class RunProgress(Watch):
    """Shows one run."""

    def __init__(self, training: Training, label: str, rounds: int, more: int):
        self.training, self.label, self.more = training, label, more
        self.began = self.said = time.monotonic()
        self.first: int | None = None
        self.note = "starting"
        self.task = training.bar.add_task(label, total=rounds, note="starting")

    def round(self, record: Mapping[str, Any], rounds: int) -> None:
        now, done = time.monotonic(), record["round"]
        if self.first is None:
            self.first = done - 1
        pace = (now - self.began) / (done - self.first)
        left = pace * (rounds - done + self.more * rounds)
        parts = [f"accuracy {100 * record['test_accuracy']:.2f} %"]
        if record.get("logit_drift") is not None:
            parts.append(f"drift {record['logit_drift']:.2f}")
        if record["diverged"]:
            parts.append(f"{record['diverged']} left out")
        parts.append(
            f"in {duration(now - self.began)}"
            if done == rounds
            else f"{duration(left)} left{' in all' if self.more else ''}"
        )
        self._show("  ".join(parts), done, rounds, now)

    def reply(self, function: str, done: int, clients: int) -> None:
        """Within a round, on a terminal: how many clients have answered."""
        if self.training.live and time.monotonic() - self.said > 0.2:
            self.said = time.monotonic()
            self.training.bar.update(self.task, note=f"{self.note}  {function} {done}/{clients}")

    def _show(self, note: str, done: int, rounds: int, now: float) -> None:
        self.note = note
        if self.training.live:
            self.training.bar.update(self.task, completed=done, total=rounds, note=note)
        elif done == rounds or now - self.said > PLAIN_SECONDS:
            self.said = now
            print(f"{self.label}: round {done}/{rounds}  {note}", flush=True)


def show_table(head: Sequence[str], cells: Sequence[Sequence[str]], left: int = 1) -> None:
    """A table; its first `left` columns are text, the others numbers."""
    table = Table(header_style="bold")
    for index, name in enumerate(head):
        table.add_column(Text(name), overflow="fold", justify="left" if index < left else "right")
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def show_run(settings: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
    """The result of one run as a small table."""
    method = short(settings["method"]["name"])
    rows = [
        ["final accuracy", f"{100 * summary['final_accuracy']:.2f} %"],
        ["mean of the last ten rounds", f"{100 * summary['mean_of_last_ten_accuracy']:.2f} %"],
        [
            "best round (not the result)",
            f"{100 * summary['best_accuracy']:.2f} % in round {summary['best_round']}",
        ],
        [
            "sent to clients / by clients",
            f"{summary['bytes_down'] / 1e6:.2f} / {summary['bytes_up'] / 1e6:.2f} MB",
        ],
        ["time", duration(summary["seconds"])],
    ]
    if "mean_logit_drift" in summary:
        rows.insert(
            3,
            [
                "logit / feature drift, mean",
                f"{summary['mean_logit_drift']:.3f} / {summary['mean_feature_drift']:.3f}",
            ],
        )
    if summary["diverged"]:
        rows.append(["left out for divergence", f"{summary['diverged']} times"])
    data = settings["data"] if isinstance(settings["data"], str) else settings["data"]["name"]
    title = f"{method} on {data}, {settings['clients']} clients, {summary['rounds']} rounds"
    show_table(["", title], rows)


BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """A curve in one line of text, from 0 to the largest value."""
    if len(values) > width:
        values = [values[i * len(values) // width] for i in range(width)]
    top = max(values) or 1.0
    return "".join(BLOCKS[min(7, int(8 * v / top))] for v in values)


def say(text: str = "", *, bold: str = "") -> None:
    """A line of text, never wrapped; `bold` stands before it."""
    console.print(Text.assemble((bold, "bold"), text), soft_wrap=True)

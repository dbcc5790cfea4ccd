"""Print progress while something is trained or measured, and the tables and lines of results."""

import math
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, JustifyMethod
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from fedcsd.federation.callbacks import Callbacks
from fedcsd.measurements import MEASUREMENTS, number
from fedcsd.plugins import short
from fedcsd.results import comparison
from fedcsd.results.rows import Row
from fedcsd.results.tables import known

console = Console(highlight=False, markup=False)

PLAIN_SECONDS = 5.0  # between lines of progress where the output is no terminal
LONG_SECONDS = 30.0  # of a round there, after which the replies are counted
LOOK_SECONDS = 2.0  # between looks at the runs of other processes
NAME_WIDTH, HEAD_WIDTH = 20, 12  # of a method's name and of a column's, before they are folded
BLOCKS = "▁▂▃▄▅▆▇█"


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


class ProgressDisplay:
    """Show the progress of one piece of work after another.

    A terminal has a bar that moves; a log file gets a line every few seconds.
    """

    def __init__(self) -> None:
        self.bar = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[unit]} {task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
        )
        self.live = console.is_terminal
        self.task: TaskID | None = None
        self.unit, self.total = "", 0
        self.began = self.said = 0.0
        self.work = self.seconds = 0.0  # of all rounds so far; a round counts as work of its run's weight

    def __enter__(self) -> "ProgressDisplay":
        if self.live:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.bar.stop()

    def begin(self, label: str, total: int, unit: str, note: str = "") -> None:
        """Start the next piece of work, with a bar of its own."""
        self.move_up()
        self.task = self.bar.add_task(label, total=total, unit=unit, note=note)
        self.unit, self.total = unit, total
        self.began = self.said = time.monotonic()

    def show(self, label: str, done: int, note: str, plain: str = "") -> None:
        """Show how much is done; `plain` is the line for a log file if it is another one."""
        now = time.monotonic()
        if self.live and self.task is not None:
            self.bar.update(self.task, description=label, completed=done, total=self.total, note=note)
        elif done == self.total or now - self.said > PLAIN_SECONDS:
            self.said = now
            print((plain or f"{label}: {self.unit} {done}/{self.total}  {note}").rstrip(), flush=True)

    def move_up(self) -> None:
        """Print the bar of the last piece of work as a line: many bars at once would hide the one that moves."""
        if self.task is not None and self.live:
            if self.unit != "run":  # which others trained
                self.bar.print(self.bar.make_tasks_table([t for t in self.bar.tasks if t.id == self.task]))
            self.bar.remove_task(self.task)
        self.task, self.unit = None, ""

    def follow(
        self,
        label: str,
        rounds: int,
        more: int = 0,
        *,
        weight: float = 1.0,
        ahead: Callable[[], Sequence[float]] | None = None,
        jobs: int = 1,
    ) -> "RunProgress":
        """Return the callbacks that show one run.

        Args:
            more: runs of the same length that come after it
            weight: the work of one of its rounds
            ahead: returns the work that is left of each run after it, in place of `more`
            jobs: processes that share this work
        """
        return RunProgress(self, label, rounds, weight, ahead or (lambda: [weight * rounds] * more), jobs)

    def wait(self, ahead: Sequence[float]) -> None:
        """Show that other processes train all runs that are left; `ahead` is the work left of each."""
        label = "waiting for other processes"
        left = f"{duration(max(ahead) * self.seconds / self.work)} left" if self.work else ""
        if self.unit != "run":
            self.begin(label, len(ahead), "run")
            self.said = 0.0
        self.show(label, self.total - len(ahead), left, f"{label}: {counted(len(ahead), 'run')}  {left}")

    def step(self, what: str, done: int, total: int) -> None:
        """Show work that is no run, such as the steps of a picture."""
        if (self.unit, self.total) != ("step", total):
            self.begin(what, total, "step")
        seconds = (time.monotonic() - self.began) / max(done, 1) * (total - done)
        self.show(what, done, f"{duration(seconds)} left" if done < total else "")


class RunProgress(Callbacks):
    """Callbacks that show one run: round, accuracy, and the time that is left."""

    def __init__(
        self,
        display: ProgressDisplay,
        label: str,
        rounds: int,
        weight: float,
        ahead: Callable[[], Sequence[float]],
        jobs: int,
    ):
        self.display, self.label, self.weight, self.jobs = display, label, weight, jobs
        self.look, self.ahead = ahead, ahead()
        self.first: int | None = None
        self.note = "starting"
        display.begin(label, rounds, "round", self.note)
        self.last = self.looked = display.began

    def stage(self, text: str) -> None:
        """Show what is started before the first round; rounds are timed from here on."""
        self.display.began = self.last = time.monotonic()
        self._say(text)

    def reply(self, function: str, done: int, clients: int) -> None:
        now, live = time.monotonic(), self.display.live
        if now - self.display.said > (0.2 if live else LONG_SECONDS):
            self.display.said = now
            self._say(f"{self.note}  " * live + f"{function} {done}/{clients}")

    def round(self, record: Mapping[str, Any], rounds: int) -> None:
        display, now, done = self.display, time.monotonic(), record["round"]
        if self.first is None:
            self.first = done - 1
        display.total = rounds
        display.work, display.seconds = display.work + self.weight, display.seconds + now - self.last
        self.last = now
        if done == rounds or now - self.looked > LOOK_SECONDS:
            self.looked, self.ahead = now, self.look()
        parts = [f"accuracy {100 * record['test_accuracy']:.2f} %"]
        if record.get("logit_drift") is not None:
            parts.append(f"drift {record['logit_drift']:.2f}")
        lost = (name for name in ("diverged", "refused", "late", "missing") if record.get(name))
        parts += [f"{record[name]} {MEASUREMENTS[name].title}" for name in lost]
        if done == rounds:
            parts.append(f"in {duration(now - display.began)}")
        own = (now - display.began) / (done - self.first) * (rounds - done)
        if self.ahead and (done < rounds or not display.live):  # else the next run's bar says it
            parts.append(f"{duration(self._left(own))} left in all, {self._to_come()}")
        elif done < rounds:
            parts.append(f"{duration(own)} left")
        self.note = "  ".join(parts)
        display.show(self.label, done, self.note)

    def diverged(self, round: int) -> None:
        text = f"{self.label} diverged in round {round}"
        if self.display.live:
            self.display.bar.print(Text(f"✗ {text}"))
            if self.display.task is not None:
                self.display.bar.remove_task(self.display.task)
            self.display.task = None
        else:
            more = f"  {self._to_come()}" if self.ahead else ""
            print(f"{self.label}: diverged in round {round}{more}", flush=True)

    def _say(self, text: str) -> None:
        if self.display.live and self.display.task is not None:
            self.display.bar.update(self.display.task, note=text)
        else:
            print(f"{self.label}: {text}", flush=True)

    def _left(self, own: float) -> float:
        """Return the seconds left of all runs: this one at its own pace, those to come at the pace of all so far."""
        pace = self.display.seconds / self.display.work
        return max(own, *(pace * work for work in self.ahead), (own + pace * sum(self.ahead)) / self.jobs)

    def _to_come(self) -> str:
        return counted(len(self.ahead), "more run")


def show_table(
    head: Sequence[str],
    cells: Sequence[Sequence[str]],
    left: int = 1,
    *,
    wide: bool = False,
    fit: bool = False,
    bold: Callable[[int, int], bool] = lambda row, column: False,
) -> list[str]:
    """Print a table and return the names of the columns that had no room.

    Args:
        left: number of columns that are text; the others are numbers
        wide: a log file gets the whole width
        fit: so too, and only the first column is ever folded; a terminal that is too narrow lacks the last columns
        bold: tells whether the cell of a row and a column stands out
    """

    def made(columns: int) -> Table:
        table = Table(header_style="bold")
        for index, name in enumerate(head[:columns]):
            whole = fit and index > 0
            side: JustifyMethod = "left" if index < left else "right"
            heading = Text(textwrap.fill(name, HEAD_WIDTH) if whole else name)
            least = min(NAME_WIDTH, max(len(row[0]) for row in cells)) if fit and not whole else None
            table.add_column(heading, overflow="fold", no_wrap=whole, min_width=least, justify=side)
        for place, row in enumerate(cells):
            table.add_row(
                *(Text(cell, "bold green" * bold(place, i)) for i, cell in enumerate(row[:columns]))
            )
        return table

    def widths(columns: int) -> Measurement:
        return made(columns).__rich_measure__(console, console.options.update(width=1000))

    screen, columns = console, len(head)
    if (wide or fit) and not console.is_terminal:
        screen = Console(width=widths(columns).maximum)
    while fit and columns > 3 and widths(columns).minimum > screen.width:
        columns -= 1
    screen.print(made(columns))
    return list(head[columns:])


def show_comparison(
    rows: Sequence[Row], seeds: Sequence[int], settings: Mapping[str, Any] | None = None
) -> None:
    """Print the table of a comparison with its best values in bold, and the remarks on it."""
    made = comparison.table(rows)
    head, columns = made.head, [list(column) for column in zip(*made.texts, strict=True)]
    spreads = 2 + (len(rows) > 1) + any(row.own for row in rows)
    columns[1:spreads] = map(aligned, columns[1:spreads])
    missing = show_table(
        head,
        list(zip(*columns, strict=True)),
        spreads,
        fit=True,
        bold=lambda row, column: made.best[row][column],
    )
    if missing:
        say(f"no room here for {', '.join(missing)}: see the files below")
    for text in [*comparison.legend(rows, seeds, settings), *comparison.remarks(rows)]:
        say(text)


def aligned(texts: Sequence[str]) -> list[str]:
    """Pad numbers with something behind them, so that their decimal points stand below one another."""
    places = [text.find(".") for text in texts]
    return [" " * (max(places) - p) + text if p >= 0 else text for text, p in zip(texts, places, strict=True)]


def show_run(settings: Mapping[str, Any], summary: Mapping[str, Any], finished: bool = True) -> None:
    """Print the summary of one run, finished or not: its accuracy and all else that was measured."""
    method, rounds = short(settings["method"]["name"]), summary["rounds"]

    def percent(name: str) -> str:
        value = 100 * number(summary.get(name))
        return f"{value:.2f} %" if math.isfinite(value) else "–"

    last = (
        "the last ten rounds" if rounds >= 10 else f"all {rounds} rounds" if rounds > 1 else "the only round"
    )
    best, at = percent("best_accuracy"), summary.get("best_round")
    rows = [
        ["final accuracy" if finished else "accuracy so far", percent("final_accuracy")],
        [f"mean of {last}", percent("mean_of_last_ten_accuracy")],
        ["best round (not the result)", best + f" in round {at}" * bool(at and best != "–")],
    ]
    for row in MEASUREMENTS.values():
        value = row.factor * number(summary.get(row.key))
        if not row.summary or row.key in ("final_accuracy", "final_loss") or math.isnan(value):
            continue
        if row.name == "seconds":
            rows.append(["time", duration(value)])
        elif row.unit != "clients":
            title = (row.column or row.title) + ", mean" * (row.summary == "mean")
            rows.append([title, f"{value:.{row.digits}f} {row.unit}".rstrip()])
        elif value:
            rows.append([f"clients {row.title}", f"{value:.0f} times"])
    data = settings["data"] if isinstance(settings["data"], str) else settings["data"]["name"]
    title = f"{method} on {data}, {settings['clients']} clients, {counted(rounds, 'round')}"
    show_table(["", title], rows)


def sparkline(values: Sequence[Any], width: int = 60) -> str:
    """Return a curve as one line of text, from 0 to the largest value, with gaps where there is no number."""
    if len(values) > width:
        values = [values[i * len(values) // width] for i in range(width)]
    top = max(known([*map(number, values)]), default=1.0) or 1.0
    return "".join(BLOCKS[min(7, int(8 * v / top))] if math.isfinite(v) else " " for v in map(number, values))


def show_written(paths: Sequence[Path]) -> None:
    """Print the paths of files that were written, a line for those that differ in their suffix only."""
    suffixes: dict[Path, list[str]] = {}
    for path in paths:
        suffixes.setdefault(path.with_suffix(""), []).append(path.suffix)
    for stem, (first, *others) in suffixes.items():
        say(f"written: {stem}{first}" + (f" ({', '.join(others)})" if others else ""))


def say(text: str = "", *, bold: str = "") -> None:
    """Print a line of text that is never wrapped; `bold` stands before it."""
    console.print(Text.assemble((bold, "bold"), text), soft_wrap=True)

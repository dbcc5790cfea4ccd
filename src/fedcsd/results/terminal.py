"""What a person sees in the terminal: progress while training, tables at the end."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console, JustifyMethod
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from fedcsd.experiments.summary import number
from fedcsd.federation.callbacks import Callbacks
from fedcsd.plugins import short
from fedcsd.results import tables
from fedcsd.results.tables import Row

console = Console(highlight=False, markup=False)

PLAIN_SECONDS = 5.0  # between lines of progress where the output is not a terminal
LOOK_SECONDS = 2.0  # between looks at what other processes have done
LONG_SECONDS = 30.0  # of a round there, after which clients are counted


NAME_WIDTH, HEAD_WIDTH = 20, 12  # of a method's name and a column's, before they are folded


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


class Training:
    """Live progress of one run after another: round, accuracy, time left.

    On a terminal a bar that moves; elsewhere (a log file) a line every few seconds.
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
        self.current: TaskID | None = None
        self.stepping, self.began, self.said = 0, 0.0, 0.0
        self.waiting = 0  # runs of other processes, when that began
        self.work, self.seconds = 0.0, 0.0  # of all runs so far; a round is work of its weight

    def __enter__(self) -> "Training":
        if self.live:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.bar.stop()

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
        """Progress of one run. `more` runs of the same length come after it, unless `ahead` says how much
        work is left of each, where a round of this one is work of `weight`; `jobs` processes do it."""
        self.move_up()
        progress = RunProgress(self, label, rounds, weight, ahead or (lambda: [weight * rounds] * more), jobs)
        self.current = progress.task
        return progress

    def wait(self, ahead: Sequence[float]) -> None:
        """Other processes train all that is left, each run by itself: how many runs, and until when."""
        now, text = time.monotonic(), "waiting for other processes"
        note = f"{duration(max(ahead) * self.seconds / self.work)} left" if self.work else ""
        if self.waiting == 0:
            self.move_up()
            self.waiting, self.said = len(ahead), 0.0
            self.current = self.bar.add_task(text, total=len(ahead), note="", unit="run")
        if self.live and self.current is not None:
            self.bar.update(self.current, completed=self.waiting - len(ahead), note=note)
        elif now - self.said > PLAIN_SECONDS:
            self.said = now
            print(f"{text}: {counted(len(ahead), 'run')}  {note}".rstrip(), flush=True)

    def step(self, what: str, done: int, total: int) -> None:
        """Progress of something that is no run, such as what a picture needs."""
        now = time.monotonic()
        if self.stepping != total:
            self.move_up()
            self.stepping, self.began, self.said = total, now, now
            self.current = self.bar.add_task(what, total=total, note="", unit="step")
        left = f"{duration((now - self.began) / max(done, 1) * (total - done))} left" if done < total else ""
        if self.live and self.current is not None:
            self.bar.update(self.current, description=what, completed=done, note=left)
        elif done == total or now - self.said > PLAIN_SECONDS:
            self.said = now
            print(f"{what}: step {done}/{total}  {left}".rstrip(), flush=True)

    def move_up(self) -> None:
        """What has ended moves up: a display higher than the terminal would hide what goes on."""
        if self.current is not None and self.live:
            if not self.waiting:
                done = [task for task in self.bar.tasks if task.id == self.current]
                self.bar.print(self.bar.make_tasks_table(done))
            self.bar.remove_task(self.current)
        self.current, self.stepping, self.waiting = None, 0, 0


class RunProgress(Callbacks):
    """Shows one run."""

    def __init__(
        self,
        training: Training,
        label: str,
        rounds: int,
        weight: float,
        ahead: Callable[[], Sequence[float]],
        jobs: int,
    ):
        self.training, self.label, self.weight, self.jobs = training, label, weight, jobs
        self.look, self.ahead = ahead, ahead()
        self.began = self.said = self.last = self.looked = time.monotonic()
        self.first: int | None = None
        self.note = "starting"
        self.task = training.bar.add_task(label, total=rounds, note="starting", unit="round")

    def round(self, record: Mapping[str, Any], rounds: int) -> None:
        now, done = time.monotonic(), record["round"]
        if self.first is None:
            self.first = done - 1
        training = self.training
        training.work, training.seconds = training.work + self.weight, training.seconds + now - self.last
        self.last = now
        # This run at its own pace; methods differ, so those to come at the pace of all so far.
        own = (now - self.began) / (done - self.first) * (rounds - done)
        if done == rounds or now - self.looked > LOOK_SECONDS:
            self.looked, self.ahead = now, self.look()
        pace = training.seconds / training.work
        left = max(own, *(pace * work for work in self.ahead), (own + pace * sum(self.ahead)) / self.jobs)
        parts = [f"accuracy {100 * record['test_accuracy']:.2f} %"]
        if record.get("logit_drift") is not None:
            parts.append(f"drift {record['logit_drift']:.2f}")
        if record["diverged"]:
            parts.append(f"{record['diverged']} left out")
        parts += [f"{record[name]} {name}" for name in ("refused", "late", "missing") if record.get(name)]
        if done == rounds:
            parts.append(f"in {duration(now - self.began)}")
        if self.ahead and (done < rounds or not self.training.live):  # else the next run's bar says it
            parts.append(f"{duration(left)} left in all, {self.to_come}")
        elif done < rounds:
            parts.append(f"{duration(left)} left")
        self._show("  ".join(parts), done, rounds, now)

    @property
    def to_come(self) -> str:
        return counted(len(self.ahead), "more run")

    def diverged(self, round: int) -> None:
        if self.training.live:
            self.training.bar.print(Text(f"✗ {self.label} diverged in round {round}"))
            self.training.bar.remove_task(self.task)
            self.training.current = None
        else:
            more = f"  {self.to_come}" if self.ahead else ""
            print(f"{self.label}: diverged in round {round}{more}", flush=True)

    def stage(self, text: str) -> None:
        """Before the first round: what is being started. Rounds are timed from here on."""
        self.began = self.last = time.monotonic()
        if self.training.live:
            self.training.bar.update(self.task, note=text)
        else:
            print(f"{self.label}: {text}", flush=True)

    def reply(self, function: str, done: int, clients: int) -> None:
        """Within a round: how many clients have answered. Without a terminal only in a long one."""
        now = time.monotonic()
        if now - self.said <= (0.2 if self.training.live else LONG_SECONDS):
            return
        self.said = now
        if self.training.live:
            self.training.bar.update(self.task, note=f"{self.note}  {function} {done}/{clients}")
        else:
            print(f"{self.label}: {function} {done}/{clients}", flush=True)

    def _show(self, note: str, done: int, rounds: int, now: float) -> None:
        self.note = note
        if self.training.live:
            self.training.bar.update(self.task, completed=done, total=rounds, note=note)
        elif done == rounds or now - self.said > PLAIN_SECONDS:
            self.said = now
            print(f"{self.label}: round {done}/{rounds}  {note}", flush=True)


class Work:
    """Progress of work that is not rounds: what is at work, how much of all is done, time left."""

    def __init__(self, what: str):
        self.what, self.began, self.said = what, time.monotonic(), time.monotonic()
        self.bar = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
            transient=True,
        )
        self.task = self.bar.add_task("starting", total=None, note="")

    def __enter__(self) -> "Work":
        if console.is_terminal:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def __call__(self, label: str, done: int, total: int) -> None:
        now = time.monotonic()
        note = f"{done}/{total} {self.what}"
        if 0 < done < total:
            note += f"  {duration((now - self.began) / done * (total - done))} left"
        if console.is_terminal:
            self.bar.update(self.task, description=label, completed=done, total=total, note=note)
        elif now - self.said > PLAIN_SECONDS:
            self.said = now
            print(f"{label}: {note}", flush=True)


def show_table(
    head: Sequence[str], cells: Sequence[Sequence[str]], left: int = 1, *, wide: bool = False
) -> None:
    """A table; its first `left` columns are text, the others numbers. A wide one is as wide as it needs to
    be where nothing limits it, in a log file."""
    table = Table(header_style="bold")
    for index, name in enumerate(head):
        table.add_column(Text(name), overflow="fold", justify="left" if index < left else "right")
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))
    free = wide and not console.is_terminal
    (
        Console(width=table.__rich_measure__(console, console.options.update(width=1000)).maximum)
        if free
        else console
    ).print(table)


def show_comparison(
    rows: Sequence[Row], seeds: Sequence[int], settings: Mapping[str, Any] | None = None
) -> None:
    """The table of a comparison, the best values standing out, and what one should know of it.

    Numbers are never broken. Where a terminal is too narrow, long names are folded, and then the last
    columns are left out; a log file has all of them.
    """
    head, cells = tables.table(rows)
    columns = [list(column) for column in zip(*cells, strict=True)]
    spreads = 2 + (len(rows) > 1) + any(row.own for row in rows)
    columns[1:spreads] = map(aligned, columns[1:spreads])
    widths = [
        max(min(len(name), HEAD_WIDTH), *map(len, column)) for name, column in zip(head, columns, strict=True)
    ]
    fitting = len(widths)
    if console.is_terminal:
        room, narrow = console.width - 1, min(widths[0], NAME_WIDTH)
        while fitting > 3 and narrow + sum(widths[1:fitting]) + 3 * fitting > room:
            fitting -= 1
        widths[0] = min(widths[0], max(narrow, room - sum(widths[1:fitting]) - 3 * fitting))
    shown = Table(header_style="bold")
    for index in range(fitting):
        side: JustifyMethod = "left" if index < spreads else "right"
        shown.add_column(Text(head[index]), overflow="fold", justify=side, width=widths[index])
    best = {"accuracy (%)": tables.best_of(rows), "own data (%)": tables.best_of(rows, "own")}
    for place, line in enumerate(zip(*columns[:fitting], strict=True)):
        bold = [name in best and best[name][place] for name in head[:fitting]]
        shown.add_row(*(Text(cell, "bold green" * b) for cell, b in zip(line, bold, strict=True)))
    (console if console.is_terminal else Console(width=sum(widths) + 3 * fitting + 1)).print(shown)
    if fitting < len(head):
        say(f"no room here for {', '.join(head[fitting:])}: see the files below")
    for text in [*tables.legend(rows, seeds, settings or {}), *tables.remarks(rows)]:
        say(text)


def aligned(texts: Sequence[str]) -> list[str]:
    """Numbers with something behind them, one above the other at the decimal point."""
    places = [text.find(".") for text in texts]
    return [" " * (max(places) - p) + text if p >= 0 else text for text, p in zip(texts, places, strict=True)]


def show_run(settings: Mapping[str, Any], summary: Mapping[str, Any], finished: bool = True) -> None:
    """The result of one run, or how far it is, as a small table."""
    method, rounds = short(settings["method"]["name"]), summary["rounds"]

    def text(form: str, *keys: str, factor: float = 1.0) -> str:
        values = [factor * number(summary.get(key)) for key in keys]
        return form.format(*values) if all(map(math.isfinite, values)) else "–"

    last = (
        "the last ten rounds" if rounds >= 10 else f"all {rounds} rounds" if rounds > 1 else "the only round"
    )
    best, seconds = text("{:.2f} %", "best_accuracy", factor=100), number(summary.get("seconds"))
    at = f" in round {summary['best_round']}" if summary.get("best_round") else ""
    rows = [
        ["final accuracy" if finished else "accuracy so far", text("{:.2f} %", "final_accuracy", factor=100)],
        [f"mean of {last}", text("{:.2f} %", "mean_of_last_ten_accuracy", factor=100)],
        ["best round (not the result)", best + at * (best != "–")],
        [
            "sent to clients / by clients",
            text("{:.2f} / {:.2f} MB", "bytes_down", "bytes_up", factor=1e-6),
        ],
        ["time", duration(seconds) if math.isfinite(seconds) else "–"],
    ]
    if "mean_logit_drift" in summary:
        drifts = text("{:.3f} / {:.3f}", "mean_logit_drift", "mean_feature_drift")
        rows.insert(3, ["logit / feature drift, mean", drifts])
    for key, model in (("client_accuracy", "global model"), ("client_accuracy_personal", "own models")):
        if f"{key}_mean" in summary:
            figures = "{:.2f} % (worst tenth {:.2f} %)", f"{key}_mean", f"{key}_worst_decile"
            rows.append([f"{model}, clients' own data", text(*figures, factor=100)])
    if number(summary.get("diverged")) > 0:
        rows.append(["left out for divergence", f"{summary['diverged']} times"])
    if "refused" in summary:
        rows.append(["answers refused / late / missing", "{refused} / {late} / {missing}".format(**summary)])
    data = settings["data"] if isinstance(settings["data"], str) else settings["data"]["name"]
    title = f"{method} on {data}, {settings['clients']} clients, {rounds} round{'s' * (rounds != 1)}"
    show_table(["", title], rows)


BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[Any], width: int = 60) -> str:
    """A curve in one line of text, from 0 to the largest value; a gap for what is no number."""
    if len(values) > width:
        values = [values[i * len(values) // width] for i in range(width)]
    top = max(tables.known([*map(number, values)]), default=1.0) or 1.0
    return "".join(BLOCKS[min(7, int(8 * v / top))] if math.isfinite(v) else " " for v in map(number, values))


def say(text: str = "", *, bold: str = "") -> None:
    """A line of text, never wrapped; `bold` stands before it."""
    console.print(Text.assemble((bold, "bold"), text), soft_wrap=True)

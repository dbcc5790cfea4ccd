"""Test progress as a person sees it, on a terminal and in a log."""

import io
import re

import pytest
from rich.console import Console

from fedcsd.experiments.summary import summarise
from fedcsd.results import terminal as console


def test_progress_says_what_is_left_of_the_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    display = console.ProgressDisplay()
    record = {"round": 1, "test_accuracy": 0.5, "diverged": 0}
    display.follow("a", 1, more=2).round(record, 1)
    display.follow("b", 3, more=1).diverged(1)
    display.follow("c", 1).round(record, 1)
    a, b, c = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"a: round 1/1  accuracy 50\.00 %  in 0:00  0:00 left in all, 2 more runs", a)
    assert b == "b: diverged in round 1  1 more run"
    assert c == "c: round 1/1  accuracy 50.00 %  in 0:00"


def test_progress_counts_what_other_processes_do(capsys: pytest.CaptureFixture[str]) -> None:
    """Four processes, this one's round takes ten seconds: what is left is as long as the longest, or as
    all of it shared out; what the others have done meanwhile is not waited for again."""
    display = console.ProgressDisplay()
    left = [[20.0] * 8, [20.0] * 8, [3.0, 5.0], []]
    progress = display.follow("a", 3, weight=10.0, ahead=lambda: left.pop(0), jobs=4)
    for number in (1, 2, 3):
        for shown, clock in ((display, "began"), (display, "said"), (progress, "last"), (progress, "looked")):
            setattr(shown, clock, getattr(shown, clock) - 10)
        progress.round({"round": number, "test_accuracy": 0.5, "diverged": 0}, 3)
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.endswith("0:45 left in all, 8 more runs")  # (2 rounds + 8 · 20 s) / 4
    assert second.endswith("0:10 left in all, 2 more runs")  # its own last round
    assert third.endswith("in 0:30")


def test_waiting_for_other_processes_says_how_long(capsys: pytest.CaptureFixture[str]) -> None:
    display = console.ProgressDisplay()
    display.wait([5.0, 5.0])
    display.said -= console.PLAIN_SECONDS + 1
    display.work, display.seconds = 10.0, 20.0  # this machine is half as fast as expected
    display.wait([30.0])
    display.wait([20.0])
    first, second = capsys.readouterr().out.splitlines()
    assert first == "waiting for other processes: 2 runs"
    assert second == "waiting for other processes: 1 run  1:00 left"


def test_a_long_round_shows_who_has_answered(capsys: pytest.CaptureFixture[str]) -> None:
    display = console.ProgressDisplay()
    progress = display.follow("a", 2)
    progress.reply("train", 1, 10)
    display.said -= console.LONG_SECONDS + 1
    progress.reply("train", 2, 10)
    progress.reply("train", 3, 10)
    assert capsys.readouterr().out == "a: train 2/10\n"


@pytest.mark.parametrize(
    ("rounds", "label"),
    [(1, "mean of the only round"), (2, "mean of all 2 rounds"), (12, "mean of the last ten")],
)
def test_a_mean_is_named_as_what_it_is(rounds: int, label: str, capsys: pytest.CaptureFixture[str]) -> None:
    record = {
        "test_accuracy": 0.5,
        "test_loss": 1,
        "bytes_up": 1,
        "bytes_down": 1,
        "seconds": 1,
        "diverged": 0,
    }
    summary = summarise([{**record, "round": number + 1} for number in range(rounds)])
    console.show_run({"method": {"name": "fedavg"}, "data": "digits", "clients": 3}, summary)
    assert label in capsys.readouterr().out


def test_a_terminal_shows_the_run_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Console(width=100, height=5, force_terminal=True, color_system=None, file=io.StringIO())
    monkeypatch.setattr(console, "console", screen)
    with console.ProgressDisplay() as display:
        for number in range(10):
            display.follow(f"run {number}", 1, more=9 - number).round(
                {"round": 1, "test_accuracy": 0.5, "diverged": 0}, 1
            )
            assert [task.description for task in display.bar.tasks] == [f"run {number}"]
        display.wait([1.0, 2.0])
        display.wait([1.0])
        assert [(task.description, task.completed) for task in display.bar.tasks] == [
            ("waiting for other processes", 1)
        ]
        display.follow("last", 1)
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "run 0" in shown
    assert "run 9" in shown

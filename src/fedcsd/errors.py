"""Errors that a user can put right, their text in one line, and notes."""

import os
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from difflib import SequenceMatcher, get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO


class UserError(Exception):
    """A mistake that the user can put right; the program prints one line and exits with status 2."""


class Busy(UserError):
    """Another process is training this run."""


class RunStopped(Exception):
    """Report that a run ended before its last round; the program prints one line and exits with status 1."""


class MethodFailed(RunStopped):
    """Report an error in a method's own code, at the server or at a client."""


@dataclass(frozen=True)
class Divergence:
    """Record the round in which a run left the range of finite numbers, and how."""

    round: int
    message: str

    def __str__(self) -> str:
        return f"diverged in round {self.round}: {self.message}"


class Diverged(RunStopped):
    """Training left the range of finite numbers in a round (0 while the round is not known)."""

    def __init__(self, problem: str, round: int = 0, advice: str = ""):
        super().__init__(f"round {round}, " * bool(round) + problem + f": {advice}" * bool(advice))
        self.divergence = Divergence(round, problem)


@dataclass(frozen=True)
class Ending:
    """Record the early end of a run or of several; `str` makes the sentence.

    A RunStopped or KeyboardInterrupt carries it as its only argument (`end`).
    """

    cause: str = ""
    """what happened; empty after Ctrl-C"""
    run: str = ""
    """the run of a comparison that was in training"""
    saved: int | None = None
    """rounds that are saved; None for a run without a folder"""
    left: int | None = None
    """runs that are left to train; None for a single run"""
    command: str = ""
    """continues the work"""
    mend: bool = False
    """the method's code must be mended first"""

    def __str__(self) -> str:
        parts = [self.cause]
        if self.saved is not None:
            parts.append(saved_text(self.saved))
        if self.left is not None:
            runs = f"{self.left} run{'s' * (self.left > 1)} left to train"
            parts.append(runs if self.left else "all runs are finished")
        parts = [": ".join(filter(None, (self.run, "; ".join(filter(None, parts)))))]
        if self.command:
            parts.append(f"{'mend it, then' if self.mend else 'go on with'}: {self.command}")
        return "; ".join(filter(None, parts))


def saved_text(rounds: int) -> str:
    """Return the sentence about the rounds of a run that are saved."""
    told = {0: "no round was finished", 1: "round 1 is saved"}
    return told.get(rounds, f"rounds 1 to {rounds} are saved")


def end(error: BaseException, **facts: Any) -> None:
    """Set fields of the Ending that an exception carries; its text so far becomes the cause."""
    ending = error.args[0] if error.args and isinstance(error.args[0], Ending) else Ending(str(error))
    error.args = (replace(ending, **facts),)


def reason(error: BaseException) -> str:
    """Return an error's text in one line without file names, or its class if it has no text."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    lines = filter(None, map(str.strip, text.splitlines()))
    return next(lines, type(error).__name__)[:300]


def one_line(error: BaseException) -> str:
    """Return class and text of an error in one line, with the place in the user's own code if it was there."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({Path(error.filename).name}, line {error.lineno})"
    packages = tuple(sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib"))
    stdlib = sysconfig.get_path("stdlib") + os.sep
    specs = filter(None, map(find_spec, ("fedcsd", "torch")))
    foreign = tuple(str(Path(spec.origin or "-").parent) + os.sep for spec in specs)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((*foreign, "<frozen"))
        and (frame.filename.startswith(packages) or not frame.filename.startswith(stdlib))
    ]
    frames = [f for f in frames if not f.filename.startswith(packages)] or frames  # a method may be installed
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    lines = filter(None, map(str.strip, str(error).splitlines()))
    return f"{type(error).__name__}: {next(lines, '')}".rstrip(": ") + place


class Note(UserWarning):
    """A fact that a user should know: a warning in Python, one line in the program."""


def note(text: str) -> None:
    """Tell the user a fact that stops nothing."""
    warnings.warn(text, Note, stacklevel=2)


def show_notes() -> None:
    """Print each note once, as a plain line; other warnings are shown as before."""
    show_others, said = warnings.showwarning, set[str]()

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if not issubclass(category, Note):
            show_others(message, category, filename, lineno, file, line)
        elif str(message) not in said:
            said.add(str(message))
            print(f"note: {message}", file=file or sys.stderr, flush=True)

    warnings.showwarning = show


def nearest(name: object, known: Iterable[str]) -> str:
    """Return the one or two known names that are most like this one as "a or b".

    Return "" if none is like it, or if three are: then all names are the better hint.
    """
    by_lower, word = {k.lower(): k for k in sorted(known)}, str(name).lower()
    near = get_close_matches(word, by_lower, n=3, cutoff=0.55)
    ratios = [SequenceMatcher(None, k, word).ratio() for k in near]
    near = [k for k, ratio in zip(near, ratios, strict=True) if ratio > ratios[0] - 0.1]
    return " or ".join(by_lower[k] for k in near) if len(near) < 3 else ""


def unknown(kind: str, name: object, known: Iterable[str]) -> UserError:
    """Return the error for an unknown name; it lists the nearest valid names, or all of them."""
    return UserError(f"unknown {kind} {str(name)!r}: {_instead(name, known)}")


def no_option(name: object, of: str, known: Iterable[str]) -> UserError:
    """Return the error for an option that a thing does not have."""
    names = list(known)
    return UserError(
        f"{str(name)!r} is no option of {of}: {_instead(name, names)}"
        if names
        else f"{of} has no options, but {name} is given"
    )


def _instead(name: object, known: Iterable[str]) -> str:
    names = sorted(known)
    near = nearest(name, names)
    return f"did you mean {near}?" if near else f"choose from {', '.join(names)}"


def no_run(path: Path, *, to_train: bool = True) -> UserError:
    """Return the error for a folder that holds no run; it names a run below that folder."""
    if path.parent.is_file():
        return UserError(f"{path.parent} is an archive: it has no weights of its runs")
    configs = sorted(path.glob("*/config.toml")) or sorted(path.glob("*/*/config.toml"))
    names = [f"name one of its runs, such as {configs[0].parent}"] if configs else []
    if any((path / name).exists() for name in ("comparison.json", "planned.json")):
        again = "the same `fedcsd compare` goes on with it, with more --rounds if you like"
        return UserError(
            f"{path} holds a comparison: {'; '.join([*names, *[again] * (to_train or not names)])}"
        )
    if configs:
        return UserError(f"{path} holds no run, but some are below it: name one, such as {configs[0].parent}")
    why = "it has no config.toml" if path.exists() else "it does not exist"
    return UserError(f"{path} holds no run ({why})")

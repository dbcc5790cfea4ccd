"""What can go wrong that is not a bug, and how a name that is not known is answered."""

import re
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path
from typing import TextIO


class UserError(Exception):
    """Something the user can put right: shown as one line, without a traceback (exit status 2)."""


class Busy(UserError):
    """Another process is training this run."""


class RunStopped(Exception):
    """A run that ended before its last round; what is saved can be resumed (exit status 1)."""


class MethodFailed(RunStopped):
    """A method's own code is wrong, at the server or at a client."""


@dataclass(frozen=True)
class Divergence:
    """Where a run left the range of finite numbers."""

    round: int
    message: str

    def __str__(self) -> str:
        return f"diverged in round {self.round}: {self.message}"


class Diverged(RunStopped):
    """Local training left the range of finite numbers; `problem` is the message without advice."""

    def __init__(self, message: str, problem: str = ""):
        super().__init__(message)
        self.divergence = Divergence(0, problem or message)  # whoever counts the rounds sets the round


class Note(UserWarning):
    """Something that a user should know and that stops nothing: a warning in Python, one line in the program."""


def note(text: str) -> None:
    warnings.warn(text, Note, stacklevel=2)


def show_notes() -> None:
    """From here on a note is a plain line, and each is shown once; other warnings stay as they are."""
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
    """The names that are most like this one and nearly alike in that, "a or b"; empty if none is, or if they
    are three that only have other digits."""
    by_lower, word = {k.lower(): k for k in sorted(known)}, str(name).lower()
    near = get_close_matches(word, by_lower, n=3, cutoff=0.55)
    alike = [SequenceMatcher(None, k, word).ratio() for k in near]
    near = [k for k, ratio in zip(near, alike, strict=True) if ratio > alike[0] - 0.1]
    if len(near) == 3 and {re.sub(r"\d", "", k) for k in near} == {re.sub(r"\d", "", word)}:
        return ""
    return " or ".join(by_lower[k] for k in near)


def unknown(kind: str, name: object, known: Iterable[str]) -> UserError:
    """The error for a name that is not known: names the nearest valid ones, or all of them."""
    return UserError(f"unknown {kind} {str(name)!r}: {_instead(name, known)}")


def no_option(name: object, of: str, known: Iterable[str]) -> UserError:
    """The error for an option that a thing does not have."""
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
    """What to say of a folder that was given as a run's, to train it further or to look at it."""
    inside = sorted(config.parent for config in path.glob("*/config.toml"))
    if any((path / name).exists() for name in ("comparison.json", "planned.json")):
        advice = [f"name one of its runs, such as {inside[0]}"] if inside else []
        if to_train or not inside:
            advice.append("the same `fedcsd compare` goes on with it, with more --rounds if you like")
        return UserError(f"{path} holds a comparison: {'; '.join(advice)}")
    if inside:
        return UserError(f"{path} holds no run but {len(inside)} of them: name one, such as {inside[0]}")
    deeper = sorted(config.parent for config in path.glob("*/*/config.toml"))
    if deeper:
        folders = [run.parent for run in deeper]
        most = max(dict.fromkeys(folders), key=folders.count)
        one = deeper[folders.index(most)]
        return UserError(
            f"{path} holds no run, but {most} has {folders.count(most)}: name that folder, or a run in it, such as {one}"
        )
    return UserError(
        f"{path} holds no run ({'it has no config.toml' if path.exists() else 'it does not exist'})"
    )

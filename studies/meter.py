"""Measure the parts of a round's seconds with a clock around the package's own functions, for scale.py.

The package is not changed: `fedcsd.experiments.running.train` calls its functions as always, and they are
timed from outside. Each reply carries a note of the lane that worked on it, and when; the note is taken
out again before anyone reads it; clocks of processes on one Linux machine agree.
"""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from fedcsd.experiments.runs.checkpoints import Checkpoints
from fedcsd.experiments.runs.run_folder import RunDirectory
from fedcsd.federation.backends.device import DeviceBackend
from fedcsd.federation.backends.local import LocalBackend
from fedcsd.federation.callbacks import Callbacks
from fedcsd.federation.evaluation import Record
from fedcsd.federation.rounds import Federation
from fedcsd.messages import Reply
from fedcsd.training.worker import Worker

SPAN, LANE = "meter: from, to", "meter: lane"
Span = tuple[float, float]
clock = time.perf_counter


@dataclass
class Phase:
    """Keep the times of an exchange with the cohort: when each lane worked, and when the server had a reply in hand."""

    lanes: int
    began: float
    ended: float = 0.0
    work: dict[int, list[Span]] = field(default_factory=lambda: defaultdict(list))
    server: list[Span] = field(default_factory=list)

    def parts(self) -> dict[str, float]:
        """Return the parts of the phase's wall seconds; each is a mean over lanes, and they add up to the whole.

        training      a lane works for a client
        imbalance     a lane has done its last client and another has not
        aggregation   it waits while the server takes in a reply
        messages      the other gaps: dealing, packing, pipes, unpacking
        """
        spans = [sorted(some) for some in self.work.values()]
        spans += [[] for _ in range(self.lanes - len(spans))]
        last = max((some[-1][1] for some in spans if some), default=self.began)
        training = imbalance = gaps = served = 0.0
        until = self._served_until()
        for some in spans:
            edges = [(self.began, self.began), *some]
            training += sum(end - start for start, end in some)
            waits = [(before[1], after[0]) for before, after in pairwise(edges)] + [(last, self.ended)]
            imbalance += last - edges[-1][1]
            gaps += sum(end - start for start, end in waits)
            served += float(sum(until(end) - until(start) for start, end in waits))
        parts = {"training": training, "imbalance": imbalance, "aggregation": served}
        parts["messages"] = gaps - served
        return {name: seconds / len(spans) for name, seconds in parts.items()}

    def _served_until(self) -> Callable[[float], float]:
        """Seconds that the server had a reply in hand before some moment."""
        times = np.array([self.began, *(t for span in self.server for t in span), self.ended])
        steps = np.diff(times) * (np.arange(len(times) - 1) % 2)
        sums = np.concatenate([[0.0], np.cumsum(steps)])
        return lambda moment: float(np.interp(moment, times, sums))


class Meter(Callbacks):
    """Divide every round into its parts. `told` is called before the first round and after each, outside of the timed part."""

    PLACES: ClassVar[list[tuple[type, str]]] = [
        (Federation, "step"),
        (Federation, "_evaluate"),
        (Federation, "_personal"),
        (Federation, "save"),
        (RunDirectory, "record"),
        (Checkpoints, "save"),
        *((backend, name) for backend in (LocalBackend, DeviceBackend) for name in ("evaluate", "ask")),
        (Worker, "answer"),
    ]
    LABELS: ClassVar[dict[str, str]] = {
        "step": "step",
        "_evaluate": "whole evaluation",
        "_personal": "evaluation",
        "evaluate": "evaluation",
        "record": "line",
        "save": "checkpoint",
    }

    def __init__(self, told: Callable[[int, int], None]):
        self.told = told
        self.rounds: list[dict[str, float]] = []
        """seconds of each round by part, with "wall" and "training" """
        self._begin()

    def _begin(self) -> None:
        self.phases: list[Phase] = []
        self.seconds: dict[str, float] = defaultdict(float)
        self.moments: dict[str, float] = {}
        self.began = clock()

    def round(self, record: Record, rounds: int) -> None:
        now = clock()
        self.rounds.append(self._taken_apart(now - self.began))
        self.told(record["round"], rounds)
        self._begin()

    def _taken_apart(self, wall: float) -> dict[str, float]:
        parts: dict[str, float] = defaultdict(float)
        for phase in self.phases:
            for name, seconds in phase.parts().items():
                parts[name] += seconds
        parts["cohort"] = self.phases[0].began - self.moments["step"]
        parts["aggregation"] += self.moments["whole evaluation"] - self.phases[-1].ended
        parts["aggregation"] += sum(b.began - a.ended for a, b in pairwise(self.phases))
        parts["evaluation"] = self.seconds["evaluation"]
        parts["metrics"] = (
            self.seconds["whole evaluation"] - self.seconds["evaluation"] + self.seconds["line"]
        )
        parts["checkpoint"] = self.seconds["checkpoint"]
        parts["rest"] = wall - sum(parts.values())
        return {"wall": wall, **parts}

    def install(self) -> None:
        """Put clocks around the functions of a round. To be called before lanes are forked."""
        for owner, name in self.PLACES:
            if name in self.LABELS:
                self._time(owner, name, self.LABELS[name])
            elif name == "ask":
                self._follow(owner)
        _span_answers()

    def _time(self, owner: type, name: str, label: str) -> None:
        inner = getattr(owner, name)

        def timed(*arguments: Any) -> Any:
            if label == "step" and not self.rounds:
                self.told(0, 0)
                self._begin()
            began = clock()
            self.moments[label] = began
            try:
                return inner(*arguments)
            finally:
                self.seconds[label] += clock() - began

        setattr(owner, name, timed)

    def _follow(self, backend: type) -> None:
        inner = backend.ask  # type: ignore[attr-defined]

        def ask(self_: Any, request: Any, *arguments: Any) -> Iterator[Reply]:
            replies = inner(self_, request, *arguments)
            personal = request.kind == "personal"  # a part of evaluation
            return replies if personal else self._phase(replies, len(getattr(self_, "lanes", "1")))

        backend.ask = ask  # type: ignore[attr-defined]

    def _phase(self, replies: Iterator[Reply], lanes: int) -> Iterator[Reply]:
        phase = Phase(lanes, clock())
        self.phases.append(phase)
        for reply in replies:
            notes = dict(reply.notes)
            phase.work[int(notes.pop(LANE)[0])].append(notes.pop(SPAN))
            given = clock()
            yield replace(reply, notes=notes)
            phase.server.append((given, clock()))
        phase.ended = clock()


def _span_answers() -> None:
    """Let each answer of a worker say when it was worked on, and in which process."""
    inner = Worker.answer

    def answer(worker: Worker, request: Any, number: int, state: Any) -> Reply:
        began = clock()
        reply = inner(worker, request, number, state)
        return replace(reply, notes={**reply.notes, SPAN: (began, clock()), LANE: (os.getpid(), 0)})

    Worker.answer = answer  # type: ignore[method-assign, assignment]

"""Run clients that train as one, each in a thread of its own up to its training."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

from fedcsd.training.engines.stacked import Stacked
from fedcsd.training.task import Task, Trained


class Turn:
    """A thread that runs one client's answer up to its training and goes on with the result.

    Only one turn runs at a time. The thread stays for the next answer, since what PyTorch and its
    libraries keep for each thread takes longer to make than an answer.
    """

    def __init__(self) -> None:
        self.answer: Callable[[Turn], Any] | None = None
        self.task: Task | None = None
        """the training that it waits for"""
        self.result: Any = None
        """of that training, or of the whole answer; an exception if it failed"""
        self._mine, self._yours = threading.Lock(), threading.Lock()  # released by the other side, in turn
        self._mine.acquire()
        self._yours.acquire()
        threading.Thread(target=self._serve, daemon=True).start()

    def go_on(self) -> None:
        """Run to the next training or to the end."""
        self._mine.release()
        try:
            self._yours.acquire()
        except BaseException:
            self._yours.acquire()  # it runs: no other turn may
            raise

    def train(self, task: Task) -> Trained:
        """Wait for the result of a training; the client's engine."""
        self.task = task
        self._yours.release()
        self._mine.acquire()
        self.task = None
        if isinstance(self.result, BaseException):
            raise self.result
        task.start_generators()  # other clients drew meanwhile, this one's training drew nothing
        return cast(Trained, self.result)

    def close(self) -> None:
        """End the thread, which must not run now; a training that it waits for fails."""
        self.answer, self.result = None, RuntimeError("the round was stopped")
        self._mine.release()

    def _serve(self) -> None:
        while self._mine.acquire() and self.answer is not None:
            try:
                result = self.answer(self)
            except BaseException as error:
                result = error
            if self.answer is None:
                return
            self.result = result
            self._yours.release()


def take_turns(engine: Stacked, turns: Sequence[Turn], answers: Sequence[Callable[[Turn], Any]]) -> list[Any]:
    """Return the results of the answers or their exceptions; their trainings are one."""
    for turn, answer in zip(turns, answers, strict=True):
        turn.answer = answer
    going = list(turns)
    while going:
        for turn in going:
            turn.go_on()
        going = [turn for turn in going if turn.task is not None]
        tasks = [turn.task for turn in going if turn.task is not None]
        try:
            results: list[Any] = list(engine.train_all(tasks))
        except BaseException as error:
            results = [error] * len(tasks)
        for turn, result in zip(going, results, strict=True):
            turn.result = result
    return [turn.result for turn in turns]

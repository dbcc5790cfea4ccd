"""Clients whose trainings are one: each is answered in a thread of its own, up to its training."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

from fedcsd.training.engines.stacked import Stacked
from fedcsd.training.task import Task, Trained


class Turn:
    """Runs one client's answer until it comes to a training, stops there, and goes on with the result: a
    thread of its own, of which only one runs at a time. It stays for the next answer, since what PyTorch
    and its libraries keep for each thread takes longer to make than an answer."""

    def __init__(self) -> None:
        self.answer: Callable[[Turn], Any] | None = None
        self.task: Task | None = None
        """the training that it waits for"""
        self.trained = False
        """whether it has ever come to one"""
        self.result: Any = None
        """of that training, or of the whole answer; an exception if it failed"""
        self._mine, self._yours = threading.Lock(), threading.Lock()  # released by the other side, in turn
        self._mine.acquire()
        self._yours.acquire()
        threading.Thread(target=self._serve, daemon=True).start()

    def go_on(self) -> None:
        """Let it run to its next training, or to its end."""
        self._mine.release()
        try:
            self._yours.acquire()
        except BaseException:
            self._yours.acquire()  # it runs: nobody else may
            raise

    def train(self, task: Task) -> Trained:
        self.task, self.trained = task, True
        self._yours.release()
        self._mine.acquire()
        self.task = None
        if isinstance(self.result, BaseException):
            raise self.result
        return cast(Trained, self.result)

    def close(self) -> None:
        """To be called when it stands still; a training that it waits for will not come."""
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
    """What these answer, or the exceptions that they end with; trainings that they come to are one."""
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

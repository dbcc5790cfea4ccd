"""Clients of a device that are trained as one."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from fedcsd import seeds
from fedcsd.federation.backends import memory
from fedcsd.federation.backends.streams import Replies, State
from fedcsd.messages import Reply, Request
from fedcsd.training.engines.launcher import Launcher
from fedcsd.training.engines.stacked import Stacked
from fedcsd.training.engines.turns import Turn, take_turns
from fedcsd.training.task import Engine
from fedcsd.training.worker import Worker

WIDEST = 128  # clients trained as one


class Group:
    """Runs clients in threads of their own, one at a time, up to their training, which is one for all."""

    def __init__(self, worker: Worker, server_device: torch.device):
        self.worker, self.server_device = worker, server_device
        self.cuda = worker.workspace.device.type == "cuda"
        self.launcher = Launcher() if self.cuda else None
        sizes = [len(rows) for rows in worker.workspace.parts]
        self.engine = Stacked(sizes, min(WIDEST, len(sizes)), self.launcher)
        self.turns: list[Turn] = []

    def run(self, request: Request, clients: Sequence[int], state: State) -> Replies:
        """Ask clients, as many at a time as are trained as one."""
        for start in range(0, len(clients), self.engine.width):
            yield from self._together(request, clients[start : start + self.engine.width], state)

    def _together(
        self, request: Request, clients: Sequence[int], state: State
    ) -> list[Reply | BaseException]:
        def answers(client: int) -> Callable[[Engine], Reply]:
            def answer(engine: Engine) -> Reply:
                with self._stream():
                    return self.worker.answer(request, client, state(client), engine=engine)

            return answer

        if self.cuda:
            self.engine.stream.wait_stream(torch.cuda.default_stream())
        with self._stream(), seeds.kept(cuda=self.cuda):
            replies = self._answered(request, [answers(client) for client in clients])
            number = len(self.engine.sizes)
            replies = [
                memory.delivered(r, self.server_device, number) if isinstance(r, Reply) else r
                for r in replies
            ]
        if self.cuda:
            torch.cuda.default_stream().wait_stream(self.engine.stream)
        return replies

    def _answered(self, request: Request, answers: Sequence[Callable[[Engine], Reply]]) -> list[Any]:
        """Run the answers: in turns if they train, or else one after another in this thread."""
        if request.kind != "train":
            return [self._alone(answer) for answer in answers]
        self.turns += [Turn() for _ in range(len(answers) - len(self.turns))]
        try:
            return take_turns(self.engine, self.turns[: len(answers)], answers)
        except BaseException:  # some turns stand still before their training
            self._close_turns()
            raise

    def _alone(self, answer: Callable[[Engine], Reply]) -> Reply | BaseException:
        try:
            return answer(self.worker.engine)
        except Exception as error:
            return error

    def _stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.engine.stream) if self.cuda else nullcontext()

    def _close_turns(self) -> None:
        for turn in self.turns:
            turn.close()
        self.turns = []

    def close(self) -> None:
        self._close_turns()
        if self.launcher is not None:
            self.launcher.close()

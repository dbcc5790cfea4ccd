"""Send parcels to nodes and receive their answers over Flower's grid, and count the bytes."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from fedcsd.deploy.wire import Malformed, Parcel, content_of, parcel_of, size_of
from fedcsd.errors import RunStopped

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.serverapp import Grid

PULLED_AT_ONCE = 8  # replies that are in memory at once before they are checked
ONLINE_CHECK = 1.0  # seconds between queries of the nodes that are online


@dataclass(frozen=True)
class Arrival:
    """The answer to a message is a parcel, or the reason why there is none."""

    message: str
    parcel: Parcel | None = None
    wrong: str = ""
    """why the content cannot be used"""
    failed: str = ""
    """why the node could not answer"""
    gone: bool = False
    """the node or the message was lost; it may be sent again"""


class Transport:
    """Sends and receives over a grid, and counts the bytes."""

    def __init__(self, grid: "Grid", *, alone: bool = False, clipping_norm: float = 0.0):
        self.grid, self.alone, self.clipping_norm = grid, alone, clipping_norm
        self.down = self.up = 0
        self._online: tuple[float, set[int]] = (0.0, set())

    def online(self) -> set[int]:
        """Return the nodes that are online."""
        if time.monotonic() - self._online[0] > ONLINE_CHECK:
            self._online = time.monotonic(), set(self._safely(self.grid.get_node_ids))
        return self._online[1]

    def send(self, node: int, parcel: Parcel, kind: str, group: str) -> str:
        """Send a parcel; return the id of the message, or "" if it was not taken."""
        from flwr.app import Message

        alone = self.alone and kind == "train"
        content = content_of(parcel, alone=alone, clipping_norm=self.clipping_norm if alone else 0.0)
        message = Message(content, node, kind, group_id=group)
        self.down += size_of(message)
        sent = list(self._safely(self.grid.push_messages, [message]))
        return str(sent[0]) if sent and sent[0] else ""

    def collect(self, messages: Iterable[str]) -> Iterator[Arrival]:
        """Yield the answers that have arrived."""
        wanted = iter(list(messages))
        while some := list(islice(wanted, PULLED_AT_ONCE)):
            try:
                arrived = list(self.grid.pull_messages(some))
            except Exception:  # one of several may be unreadable
                for one in some:
                    yield from self._one(one)
                continue
            while arrived:
                yield self._arrival(arrived.pop())

    def _one(self, message: str) -> Iterator[Arrival]:
        try:
            for arrived in self.grid.pull_messages([message]):
                yield self._arrival(arrived)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, MemoryError) as error:
            yield Arrival(message, wrong=f"it cannot be read ({type(error).__name__})")
        except Exception as error:
            raise _lost(error) from error

    def _arrival(self, message: "Message") -> Arrival:
        about = message.metadata.reply_to_message_id
        if message.has_error():
            from flwr.common.constant import ErrorCode

            gone = message.error.code in (
                ErrorCode.NODE_UNAVAILABLE,
                ErrorCode.MESSAGE_UNAVAILABLE,
                ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
            )
            return Arrival(about, failed=str(message.error.reason), gone=gone)
        self.up += size_of(message)
        try:
            return Arrival(about, parcel_of(message.content))
        except Malformed as error:
            return Arrival(about, wrong=str(error))
        except Exception as error:
            return Arrival(about, wrong=f"it cannot be read ({type(error).__name__})")

    def _safely(self, function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:
            raise _lost(error) from error


def _lost(error: Exception) -> RunStopped:
    return RunStopped(f"the connection to the SuperLink failed: {type(error).__name__}: {str(error)[:200]}")

"""The clients of fetchd: :class:`FetchClient` for the invoker, :class:`DescriptorClient` for a container.

A FetchClient opens a connection per call (a unix socket: 0.1 ms), so any number of threads may use it, and it survives
a restart of fetchd.  When fetchd refuses a request, the client raises the error that fetchd names.
"""

from __future__ import annotations

import os
import select
import time
from typing import Self, TypeVar

from relay.clients.channel import Channel, ChannelClosed
from relay.protocol.messages import (
    DigestsFound,
    DigestsWanted,
    Done,
    DoorClose,
    DoorGrant,
    DoorList,
    DoorOpen,
    DoorOpened,
    Doors,
    FetchCancel,
    FetchDone,
    FetchStart,
    FetchStarted,
    FetchWait,
    Inspect,
    Inspected,
    MetricsPage,
    MetricsQuery,
    MoreSlabs,
    PoolChanged,
    PoolWatch,
    Refused,
    SegmentOffer,
    SegmentWanted,
    Status,
    StatusQuery,
    from_plain,
    to_plain,
)
from relay.protocol.segment import SegmentReader
from thaw.errors import PlatformError, ProtocolError, Unavailable, from_info
from thaw.ids import GroupId, InstanceId
from thaw.model import ModelFacts

T = TypeVar("T")

DEADLINE_S = 30.0
"""The limit for questions that fetchd answers from memory, or after a few round trips to a store."""


class FetchClient:
    """Every method raises Unavailable when fetchd does not listen, and PlatformError when ``deadline_s`` passes."""

    def __init__(self, path: str) -> None:
        self.path = path

    def inspect(self, uri: str, namespaces: tuple[str, ...] = (), *, deadline_s: float = 60.0) -> ModelFacts:
        """Raises ModelNotFound, ModelCorrupt, ModelUnsupported, StoreUnavailable, and Throttled at once when each of
        the namespaces has too many inspections on this host."""
        return self._ask(Inspect(uri, namespaces), Inspected, deadline_s).facts

    def inspect_adapter(
        self, uri: str, namespace: str, base: str = "", max_rank: int = 0, *, deadline_s: float = 60.0
    ) -> ModelFacts:
        """As :meth:`inspect`.  With a ``base``, raises ModelUnsupported for an adapter that does not fit it."""
        return self._ask(Inspect(uri, (namespace,), True, base, max_rank), Inspected, deadline_s).facts

    def digests(self, uri: str, version: str, file: str, *, deadline_s: float = 60.0) -> tuple[str, ...]:
        """The digests of a file's chunks; none for a model without an index.  Raises what :meth:`inspect` raises, and
        ModelChanged when the store has another version."""
        return self._ask(DigestsWanted(uri, version, file), DigestsFound, deadline_s).chunks_blake3

    def start(self, request: FetchStart, *, deadline_s: float = 60.0) -> FetchStarted:
        """Begin a fetch, join one that runs, or find the segment resident.  Raises StaleEpoch, MemoryTooSmall,
        Throttled, BadRequest.
        """
        return self._ask(request, FetchStarted, deadline_s)

    def wait(self, group_id: GroupId, stage: int, *, deadline_s: float) -> FetchDone:
        """Wait until ``ranges`` have arrived (``later_ranges`` may still be coming).  Raises the fetch's error."""
        return self._ask(FetchWait(group_id, stage), FetchDone, deadline_s)

    def cancel(self, group_id: GroupId, epoch: int, *, deadline_s: float = DEADLINE_S) -> None:
        self._ask(FetchCancel(group_id, epoch), Done, deadline_s)

    def open_descriptor_socket(self, instance_id: InstanceId, *, deadline_s: float = DEADLINE_S) -> str:
        """The path of the instance's descriptor socket."""
        return self._ask(DoorOpen(instance_id), DoorOpened, deadline_s).path

    def grant_segment(
        self, instance_id: InstanceId, segment_id: str, group_id: GroupId, stage: int, *, deadline_s: float = DEADLINE_S
    ) -> None:
        self._ask(DoorGrant(instance_id, segment_id, group_id, stage), Done, deadline_s)

    def close_descriptor_socket(self, instance_id: InstanceId, *, deadline_s: float = DEADLINE_S) -> None:
        self._ask(DoorClose(instance_id), Done, deadline_s)

    def descriptor_sockets(self, *, deadline_s: float = DEADLINE_S) -> tuple[InstanceId, ...]:
        return self._ask(DoorList(), Doors, deadline_s).instance_ids

    def status(self, *, deadline_s: float = DEADLINE_S) -> Status:
        return self._ask(StatusQuery(), Status, deadline_s)

    def await_pool_change(self, version: int, *, timeout_s: float, deadline_s: float = DEADLINE_S) -> int:
        """Wait until a segment has become complete or was released since ``version``, at most ``timeout_s``.  Return
        the pool's version.
        """
        question = PoolWatch(version, round(timeout_s * 1000))
        return self._ask(question, PoolChanged, timeout_s + deadline_s).version

    def metrics(self, *, deadline_s: float = DEADLINE_S) -> str:
        """fetchd's metrics as Prometheus text."""
        return self._ask(MetricsQuery(), MetricsPage, deadline_s).text

    def _ask(self, message: object, answer: type[T], deadline_s: float) -> T:
        channel = _connect(self.path, deadline_s)
        try:
            channel.send(to_plain(message))
            plain, _ = channel.receive()
        except TimeoutError as e:
            raise PlatformError(f"fetchd did not answer {type(message).__name__} within {deadline_s:g} s") from e
        except (OSError, ChannelClosed) as e:
            raise Unavailable(f"the connection to fetchd broke: {e}", hint="see fetchd's log") from e
        finally:
            channel.close()
        return _expect(plain, answer)


class DescriptorClient:
    """A connection to a container's descriptor socket.  Keep it open while a segment from it is mapped: fetchd may take
    the end of the connection for the end of the container.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    @classmethod
    def connect(cls, path: str, *, deadline_s: float = 10.0) -> Self:
        return cls(_connect(path, deadline_s))

    def segment(self, *, deadline_s: float) -> SegmentReader:
        """See :meth:`granted`."""
        return SegmentReader(*self.granted(deadline_s=deadline_s))

    def granted(self, *, deadline_s: float) -> tuple[SegmentOffer, list[int]]:
        """The next segment granted to this instance: the n-th call returns the n-th grant.  The reader that gets the
        descriptors owns them.  Raises the fetch's error.

        After a deadline has passed, this connection cannot be used again; connect anew.
        """
        deadline = time.monotonic() + deadline_s
        fds: list[int] = []
        try:
            self._channel.set_timeout(deadline_s)
            self._channel.send(to_plain(SegmentWanted()))
            plain, received = self._channel.receive()
            fds += received
            offer = _expect(plain, SegmentOffer)
            while len(fds) < offer.n_slabs + 1:
                self._channel.set_timeout(max(deadline - time.monotonic(), 0.001))
                plain, received = self._channel.receive()
                fds += received
                more = _expect(plain, MoreSlabs)
                if not received or more.first != len(fds) - len(received) - 1:
                    raise ProtocolError(f"slabs from {more.first} on came out of order")
            mine, fds = fds, []  # the caller's reader closes them
            return offer, mine
        except TimeoutError as e:
            raise PlatformError(f"no segment was granted within {deadline_s:g} s") from e
        except (OSError, ChannelClosed) as e:
            raise Unavailable(
                f"the descriptor socket broke: {e}", hint="fetchd has died or closed it; see its log"
            ) from e
        finally:
            for fd in fds:
                os.close(fd)

    def wait_closed(self) -> None:
        """Wait until fetchd has closed the connection, or has ended."""
        poll = select.poll()
        poll.register(self._channel.sock, select.POLLRDHUP)
        poll.poll()

    def close(self) -> None:
        self._channel.close()


def _connect(path: str, deadline_s: float) -> Channel:
    try:
        return Channel.connect(path, timeout_s=deadline_s)
    except OSError as e:
        raise Unavailable(f"fetchd does not listen on {path}: {e}", hint="start thaw-fetchd") from e


def _expect(plain: object, answer: type[T]) -> T:
    message = from_plain(plain)
    if isinstance(message, Refused):
        raise from_info(message.error)
    if not isinstance(message, answer):
        raise ProtocolError(f"expected {answer.__name__}, got {type(message).__name__}")
    return message

"""Every transport with its real server or store.  Chunks and windows are small, so that tests reach their limits."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import redis

from relay.protocol.frames import Priority
from relay.protocol.messages import GroupCredential, GroupLink
from relay.state import credentials
from relay.transports.base import Flow, Transport
from relay.transports.connect import connect
from relay.transports.object import ObjectTransport
from relay.transports.redis_in import RedisLane
from relay.transports.tcp import TcpTransport
from relay.transports.tcp_in import TcpLane
from thaw.ids import GroupId, random_hex_id
from thaw.plan import TransportKind

KINDS = ("redis", "tcp", "auto", "dir", "s3")
FLOW = Flow(chunk_bytes=1000, window_bytes=20_000, resume_s=5.0)


class Group:
    """One pipeline group with one kind of transport."""

    def __init__(self, kind: str, address: str, credential: GroupCredential, group_id: GroupId) -> None:
        self.kind, self.address, self.credential, self.group_id = kind, address, credential, group_id
        self._made: list[Transport] = []

    def stage(self, stage: int, n_stages: int = 2, flow: Flow = FLOW) -> Transport:
        known_as = {"dir": TransportKind.OBJECT, "s3": TransportKind.OBJECT, "auto": TransportKind.REDIS}
        host = "127.0.0.1" if self.kind in ("tcp", "auto") else ""
        link = GroupLink(known_as.get(self.kind, self.kind), self.address, self.credential, host)
        self._made.append(connect(link, self.group_id, stage, n_stages, flow=flow))
        return self._made[-1]

    def close(self) -> None:
        for transport in self._made:
            transport.close()


@contextmanager
def group_on_redis(kind: str, url: str) -> Iterator[Group]:
    """A group with a real credential, on one server that is both state server and relay server."""
    group_id = GroupId(random_hex_id())
    with redis.Redis.from_url(url) as client:
        ref = credentials.issue(client, client, group_id)
        group = Group(kind, url, credentials.read(client, ref), group_id)
        try:
            yield group
        finally:
            group.close()
            credentials.revoke(client, client, group_id)


@contextmanager
def group_in_store(kind: str, uri: str) -> Iterator[Group]:
    group = Group(kind, uri, GroupCredential("", "the group's secret"), GroupId(random_hex_id()))
    try:
        yield group
    finally:
        group.close()


def settle(receiver: Transport, *priorities: Priority) -> None:
    """Return when a part of a message of each of ``priorities`` has arrived at the receiver's sockets."""
    if isinstance(receiver, ObjectTransport):
        return  # an object is in the store as soon as it was sent
    inbox: Any = receiver._inbox  # type: ignore[attr-defined]
    awaited = TcpLane if isinstance(receiver, TcpTransport) else RedisLane
    for fd, lane in list(inbox._lanes.items()):
        if isinstance(lane, awaited) and lane.priority in priorities:
            waiter = select.poll()
            waiter.register(fd, select.POLLIN)
            assert waiter.poll(10_000), f"nothing came at priority {lane.priority.name}"


def cut(transport: Transport) -> None:
    """Break every connection of this end, as if the network had forgotten the connections."""
    inbox: Any = transport._inbox  # type: ignore[attr-defined]
    for fd in list(inbox._lanes):
        # the connection is cut already, or its owner has just closed it
        with contextlib.suppress(OSError), socket.socket(fileno=socket.dup(fd)) as sock:
            sock.shutdown(socket.SHUT_RDWR)


class Worker:
    """A thread whose failure makes the test fail."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.error: BaseException | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout_s: float = 30.0) -> None:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as e:  # noqa: BLE001  join() raises it in the test's thread
            self.error = e

"""Descriptor sockets: the unix sockets through which containers get their segments, and nothing else.

fetchd makes a socket before its container exists, because a stem cell does not know its model yet.  The socket answers
once the invoker grants a segment.  The container keeps its connection while it maps the segment.  A hold ends with
DoorClose.  If the invoker that opened the socket has ended, the end of the container's connection ends the hold.
"""

from __future__ import annotations

import os
import re
import select
import threading
from pathlib import Path
from typing import Final

from fetchd.segments import Segment, SegmentStore
from fetchd.server import UnixServer
from relay.clients.channel import Channel
from relay.protocol.messages import MoreSlabs, Refused, SegmentOffer, SegmentWanted, from_plain, to_plain
from thaw.errors import BadRequest, NotFound
from thaw.logs import Log

FDS_PER_MESSAGE: Final = 200
"""Below the kernel's limit of 253 per message."""
_SEND_TIMEOUT_S: Final = 10.0
_CONNECTIONS: Final = 16
"""The most connections of one socket.  A container needs two: its engine's and, briefly, its proxy's."""
_INSTANCE_ID: Final = re.compile(r"\A[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}\Z")


class DescriptorSocket:
    """The socket of one container.  The n-th question on a connection is answered with the n-th of ``grants``."""

    def __init__(self, path: str, instance_id: str, owner: int, table: DescriptorSockets, log: Log) -> None:
        self.instance_id, self.owner = instance_id, owner
        self.holder = f"door:{instance_id}"
        self.grants: list[Segment] = []
        self.connections = 0
        self.closed = False
        self.changed = threading.Condition()
        self._table = table
        # mode 0666: the directory and the mount decide which processes can reach the socket
        self.server = UnixServer(path, 0o666, self._serve, log, most=_CONNECTIONS)

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        self.server.close()

    def grant(self, segment: Segment) -> None:
        with self.changed:
            self.grants.append(segment)
            self.changed.notify_all()

    def _serve(self, channel: Channel) -> None:
        with self.changed:
            self.connections += 1
        try:
            answered = 0
            while True:
                if not isinstance(from_plain(channel.receive()[0]), SegmentWanted):
                    channel.send(to_plain(Refused(BadRequest("a descriptor socket answers SegmentWanted only").info())))
                    return
                segment = self._granted(answered)
                if segment is None:
                    return
                answered += 1
                self._offer(channel, segment)
        finally:
            with self.changed:
                self.connections -= 1
            self._table.left(self)

    def _granted(self, number: int) -> Segment | None:
        with self.changed:
            self.changed.wait_for(lambda: self.closed or len(self.grants) > number)
            return None if self.closed else self.grants[number]

    def _offer(self, channel: Channel, segment: Segment) -> None:
        segment.indexed.wait()  # this wait ends, because every fetch ends and then sets the event
        if segment.error is not None and not segment.tensors:
            channel.send(to_plain(Refused(segment.error)))
            return
        fds = segment.read_only_fds()
        offer = SegmentOffer(
            segment.segment_id,
            segment.n_bytes,
            segment.pool.slab_bytes,
            len(segment.slabs),
            segment.layout,
            segment.tensors,
            segment.first_bytes,
        )
        channel.set_timeout(_SEND_TIMEOUT_S)
        channel.send(to_plain(offer), tuple(fds[:FDS_PER_MESSAGE]))
        for first in range(FDS_PER_MESSAGE, len(fds), FDS_PER_MESSAGE):
            channel.send(to_plain(MoreSlabs(first - 1)), tuple(fds[first : first + FDS_PER_MESSAGE]))
        channel.set_timeout(None)


class DescriptorSockets:
    def __init__(self, directory: str, store: SegmentStore, log: Log) -> None:
        self._directory, self._store, self._log = Path(directory), store, log
        self._lock = threading.RLock()
        self._sockets: dict[str, DescriptorSocket] = {}
        self._owners: dict[int, bool] = {}  # pid of an invoker → whether the invoker lives
        self._directory.mkdir(parents=True, exist_ok=True)
        self._directory.chmod(0o711)  # a process must know a socket's name, and cannot list the names
        for left_over in self._directory.glob("*.sock"):
            left_over.unlink()

    def open(self, instance_id: str, owner: int) -> str:
        """Open the instance's socket, unless it is open, and return its path.  ``owner`` becomes its owner."""
        if not _INSTANCE_ID.match(instance_id):
            raise BadRequest(f"{instance_id!r:.80} cannot name a descriptor socket")
        with self._lock:
            descriptor_socket = self._sockets.get(instance_id)
            if descriptor_socket is None:
                path = str(self._directory / f"{instance_id}.sock")
                descriptor_socket = self._sockets[instance_id] = DescriptorSocket(
                    path, instance_id, owner, self, self._log
                )
            descriptor_socket.owner = owner
            self._watch(owner)
            return descriptor_socket.server.path

    def grant(self, instance_id: str, segment_id: str, fetch: str) -> None:
        """Give the instance a segment.  The hold of ``fetch`` on it passes over to the socket."""
        with self._lock:
            descriptor_socket = self._sockets.get(instance_id)
            if descriptor_socket is None:
                raise NotFound(f"no descriptor socket of instance {instance_id}", hint="open it first")
            if any(s.segment_id == segment_id for s in descriptor_socket.grants):
                return
            segment = self._store.hold(segment_id, descriptor_socket.holder)
            self._store.drop(segment, fetch)
            descriptor_socket.grant(segment)

    def close(self, instance_id: str) -> None:
        with self._lock:
            descriptor_socket = self._sockets.pop(instance_id, None)
        if descriptor_socket is None:
            return
        descriptor_socket.close()
        for segment in descriptor_socket.grants:
            self._store.drop(segment, descriptor_socket.holder)

    def instances(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(self._sockets)

    def left(self, descriptor_socket: DescriptorSocket) -> None:
        """A connection of ``descriptor_socket`` ended.  If its invoker has ended too, close an abandoned socket."""
        with self._lock:
            orphaned = not self._owners.get(descriptor_socket.owner, True)
        if orphaned:
            self._close_abandoned(descriptor_socket)

    def stop(self) -> None:
        for instance_id in self.instances():
            self.close(instance_id)

    def _close_abandoned(self, descriptor_socket: DescriptorSocket) -> None:
        if descriptor_socket.grants and not descriptor_socket.connections and not descriptor_socket.closed:
            self._log.event("descriptor_socket_abandoned", instance_id=descriptor_socket.instance_id)
            self.close(descriptor_socket.instance_id)

    def _watch(self, pid: int) -> None:
        """Watch an invoker for its end.  An invoker of another pid namespace (pid 0) cannot be watched."""
        if pid <= 0 or self._owners.get(pid):
            return
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return  # the invoker has ended before it got an answer; the next one will open the socket again
        self._owners[pid] = True
        threading.Thread(target=self._await_exit, args=(pid, pidfd), name="owner", daemon=True).start()

    def _await_exit(self, pid: int, pidfd: int) -> None:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll()
        os.close(pidfd)
        with self._lock:
            self._owners[pid] = False
            orphans = [d for d in self._sockets.values() if d.owner == pid]
        for descriptor_socket in orphans:
            self._close_abandoned(descriptor_socket)

"""Redis, and TCP where both ends can: the short cut is negotiated per link, and given up without losing order.

::

    send ──┬── short cut up ────▶ TcpOut ──────────────▶ lane ──┐
           └── else ────▶ redis Sender ──▶ relay ──────▶ lane ──┴──▶ one Assembly a link, by number

The messages of a link have one series of numbers for both paths.  The receiver puts them together by number, so a
message that overtakes others in the server waits for them, and a message that comes on both paths counts once.  A link
begins on redis; a helper thread dials meanwhile.  When a short cut breaks and cannot be dialled again, redis carries
its unacknowledged frames.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from relay.protocol.frames import FrameHeader, Priority
from relay.protocol.messages import GroupCredential
from relay.transports.assembly import Assembly
from relay.transports.base import Flow, Message
from relay.transports.inbox import Inbox
from relay.transports.quota import LinkQuota
from relay.transports.redis_in import open_lanes
from relay.transports.redis_out import Sender
from relay.transports.redis_server import GroupRelay
from relay.transports.tcp import TcpEnds
from relay.transports.tcp_out import NoRoute, TcpOut
from thaw.errors import PlatformError, WorkerLost
from thaw.ids import GroupId
from thaw.process.lasting import LastingThread
from thaw.tracing.hops import HopPath

_DIAL_S: Final = 1.0
_TRY_AGAIN_S: Final = 1.0
"""A link that is in use and on redis is dialled this often: its receiver may have started later."""
_MOVE_S: Final = 10.0

LinkId = tuple[int, Priority]


@dataclass(slots=True)
class _Link:
    sender: Sender
    shortcut: TcpOut | None
    lock: threading.Lock = field(default_factory=threading.Lock)
    seq: int = 0
    up: bool = False
    broken: str = ""
    next_try_s: float = 0.0


class AutoTransport:
    """Stage ``stage`` of ``group_id``.  See base.Transport.  ``no_shortcut`` says why this end has only redis."""

    def __init__(
        self,
        url: str,
        group_id: GroupId,
        stage: int,
        peers: Sequence[int],
        *,
        host_address: str,
        credential: GroupCredential,
        flow: Flow | None = None,
    ) -> None:
        flow = flow or Flow()
        relay = GroupRelay(url, credential, group_id)
        self._inbox = Inbox(stage)
        held = 2 * flow.most_bytes  # upper limit of how far a short cut is ahead, with its last chunk
        assemblies = {
            (p, priority): Assembly(p, max_message_bytes=flow.max_message_bytes, hold_bytes=held)
            for p in peers
            for priority in Priority
        }
        quotas = {p: LinkQuota(flow) for p in peers}
        self._senders = {p: Sender(relay, self._inbox, stage, p, flow, quotas) for p in Priority}
        self._links: dict[LinkId, _Link] = {}
        self._links_lock = threading.Lock()
        self.no_shortcut = ""
        self._ends: TcpEnds | None = None
        by_priority = {priority: {p: assemblies[p, priority] for p in peers} for priority in Priority}
        open_lanes(relay, self._inbox, stage, by_priority, flow)
        try:
            self._ends = TcpEnds(relay, credential.secret, self._inbox, stage, assemblies, host_address, flow)
        except (OSError, PlatformError) as e:
            self.no_shortcut = str(e)
        self._jobs: queue.SimpleQueue[LinkId | None] = queue.SimpleQueue()
        self._helper = LastingThread(self._help, f"stage-{stage}-shortcuts")
        self._helper.start()

    def send(self, receiver: int, message: FrameHeader, payload: bytes | memoryview, *, deadline_s: float) -> None:
        link = self._link((receiver, message.priority))
        with link.lock:
            if broken := link.broken or link.sender.broken(receiver) or (link.shortcut and link.shortcut.broken):
                raise WorkerLost(f"the link to stage {receiver} broke: {broken}")
            if link.up:
                self._by_shortcut(link, receiver, message, payload, deadline_s)
            else:
                link.sender.send(receiver, message, payload, deadline_s, link.seq)
            link.seq += 1
            if not link.up and link.shortcut is not None and time.monotonic() >= link.next_try_s:
                link.next_try_s = time.monotonic() + _TRY_AGAIN_S
                self._jobs.put((receiver, message.priority))

    def receive(self, *, deadline_s: float) -> Message:
        try:
            return self._inbox.receive(deadline_s)
        except TimeoutError:
            for sender in self._senders.values():
                sender.check()
            raise

    def close(self) -> None:
        self._jobs.put(None)
        if self._ends is not None:
            self._ends.close()
        for sender in self._senders.values():
            sender.close()
        self._inbox.close()
        self._helper.join()

    def path(self, receiver: int, priority: Priority = Priority.INFERENCE) -> HopPath:
        return HopPath.TCP if self._link((receiver, priority)).up else HopPath.RELAY

    def _link(self, link_id: LinkId) -> _Link:
        found = self._links.get(link_id)
        if found is None:
            with self._links_lock:
                found = self._links.get(link_id)
                if found is None:
                    receiver, priority = link_id
                    shortcut = (
                        None
                        if self._ends is None
                        else self._ends.link(receiver, priority, on_lost=lambda: self._jobs.put(link_id))
                    )
                    found = self._links[link_id] = _Link(self._senders[priority], shortcut)
        return found

    def _by_shortcut(
        self, link: _Link, receiver: int, message: FrameHeader, payload: bytes | memoryview, deadline_s: float
    ) -> None:
        assert link.shortcut is not None  # noqa: S101  only then is it up
        try:
            link.shortcut.send_as(link.seq, message, payload, deadline_s)
        except NoRoute:
            try:
                self._fall_back(link, receiver, link.seq)
                link.sender.send(receiver, message, payload, deadline_s, link.seq)
            except BaseException as e:
                link.broken = f"a message was cut off: {e}"  # the receiver may have a part of it: its number is used up
                raise

    def _fall_back(self, link: _Link, receiver: int, before_seq: int) -> None:
        """Send by redis the frames that the short cut did not deliver, up to the message in progress.

        The caller sends the message in progress again.
        """
        assert link.shortcut is not None  # noqa: S101
        link.up = False
        frames = [frame for frame in link.shortcut.abandon() if frame.seq < before_seq]
        link.sender.send_frames(receiver, frames, _MOVE_S)

    def _help(self) -> None:
        while (link_id := self._jobs.get()) is not None:
            link = self._link(link_id)
            with link.lock:
                self._dial(link, link_id[0])

    def _dial(self, link: _Link, receiver: int) -> None:
        assert link.shortcut is not None  # noqa: S101
        try:
            link.sender.settle(_DIAL_S)  # no later send may use redis, so none would read its confirmations
            link.shortcut.connect(_DIAL_S)
            link.up = True
        except (OSError, PlatformError):
            if link.up:
                self._surrender(link, receiver)

    def _surrender(self, link: _Link, receiver: int) -> None:
        try:
            self._fall_back(link, receiver, link.seq)
        except PlatformError:
            return  # the relay server cannot be reached either: the next send reports it

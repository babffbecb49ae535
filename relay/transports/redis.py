"""The Redis transport: one stream per (group, from, to, priority), trimmed by acknowledgement, with a time to live.

::

    sender                          relay                                  receiver
    XADD <stream> 8-0 f <frame> ──▶ <stream>: 7-0 8-0 ──(blocked XREAD)──▶ into the message's memory
                                    <stream>: ∅       ◀── XTRIM MINID 8-1 ─┘
    XREAD BLOCK <credit> (only when ◀─ <credit>: 4194304-0 ◀── XADD: bytes taken so far, every quarter of a window
          a window ahead)

A frame's id is its number (message + 1, chunk), so the server itself refuses a frame that comes twice after a lost
connection; a reader goes on from the last id it has, and credit is a sum, not a count of what was popped.  ``send``
returns when the server has the frame.  Every priority has its own connections in both directions, so a half-sent bulk
message delays no other priority.
"""

from __future__ import annotations

from collections.abc import Sequence

from relay.protocol.frames import FrameHeader, Priority
from relay.protocol.messages import GroupCredential
from relay.transports.assembly import Assembly
from relay.transports.base import Flow, Message
from relay.transports.inbox import Inbox
from relay.transports.quota import LinkQuota
from relay.transports.redis_in import open_lanes
from relay.transports.redis_out import Sender
from relay.transports.redis_server import GroupRelay
from thaw.ids import GroupId
from thaw.tracing.hops import HopPath


class RedisTransport:
    """Stage ``stage`` of ``group_id``, talking with ``peers``.  See base.Transport."""

    def __init__(
        self,
        url: str,
        group_id: GroupId,
        stage: int,
        peers: Sequence[int],
        *,
        credential: GroupCredential | None = None,
        flow: Flow | None = None,
    ) -> None:
        flow = flow or Flow()
        relay = GroupRelay(url, credential or GroupCredential("", ""), group_id)
        self._stage, self._inbox = stage, Inbox(stage)
        quotas = {p: LinkQuota(flow) for p in peers}
        self._senders = {p: Sender(relay, self._inbox, stage, p, flow, quotas) for p in Priority}
        open_lanes(relay, self._inbox, stage, {priority: _assemblies(peers, flow) for priority in Priority}, flow)

    def send(self, receiver: int, message: FrameHeader, payload: bytes | memoryview, *, deadline_s: float) -> None:
        self._senders[message.priority].send(receiver, message, payload, deadline_s)

    def receive(self, *, deadline_s: float) -> Message:
        try:
            return self._inbox.receive(deadline_s)
        except TimeoutError:
            for sender in self._senders.values():
                sender.check()  # perhaps nothing comes because an earlier frame was refused
            raise

    def path(self, receiver: int, priority: Priority = Priority.INFERENCE) -> HopPath:
        return HopPath.RELAY

    def close(self) -> None:
        for sender in self._senders.values():
            sender.close()
        self._inbox.close()


def _assemblies(peers: Sequence[int], flow: Flow) -> dict[int, Assembly]:
    return {p: Assembly(p, max_message_bytes=flow.max_message_bytes) for p in peers}

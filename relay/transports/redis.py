"""The Redis transport: one stream per (group, from, to, priority), trimmed by acknowledgement, with a time to live.

The receiver reads a chunk, deletes it (that is the acknowledgement), and pushes credit for its bytes; a sender that
is a window ahead blocks on the credit list.  Both survive a lost connection: a chunk not deleted is read again and
dropped by its number, a chunk not acknowledged to the sender is sent again and dropped likewise.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Final

import redis

from relay import redis_link
from relay.frames import FrameHeader, Priority, decode
from relay.transports.base import CHUNK_BYTES, WINDOW_BYTES, Assembly, Message, split
from thaw.errors import ProtocolError, Unavailable
from thaw.ids import GroupId

TTL_MS: Final = 120_000
"""What nobody reads is gone after this; a live group touches its streams far more often."""


class RedisTransport:
    """Stage ``stage`` of ``group_id``, talking with ``peers``.  One thread sends, one receives."""

    def __init__(self, url: str, group_id: GroupId, stage: int, peers: tuple[int, ...], *,
                 chunk_bytes: int = CHUNK_BYTES, window_bytes: int = WINDOW_BYTES) -> None:  # fmt: skip
        self._group, self._stage, self._peers = group_id, stage, peers
        self._chunk_bytes, self._window_bytes = chunk_bytes, window_bytes
        self._out = redis_link.connect_blocking(url)
        self._in = redis_link.connect_blocking(url)
        self._seq: dict[tuple[int, Priority], int] = {}
        self._ahead_bytes: dict[tuple[int, Priority], int] = {}
        self._assemblies = {(p, priority): Assembly() for p in peers for priority in Priority}
        # highest priority first: XREAD answers its streams in the order they were asked for
        self._positions: dict[Any, Any] = {self._key(p, stage, priority): b"0" for priority in Priority for p in peers}
        self._sources = {self._key(p, stage, priority): (p, priority) for priority in Priority for p in peers}
        self._ready: dict[Priority, deque[Message]] = {priority: deque() for priority in Priority}

    def send(self, receiver: int, message: FrameHeader, payload: bytes | memoryview, *, deadline_s: float) -> None:
        """See Transport.send.  Chunks leave one by one: the receiver has the first while the last is on its way."""
        until = time.monotonic() + deadline_s
        link = (receiver, message.priority)
        key = self._key(self._stage, receiver, message.priority)
        seq = self._seq.get(link, 0)
        header = FrameHeader(message.kind, message.priority, message.flags, bytes.fromhex(self._group),
                             message.stream_id, seq, step=message.step)  # fmt: skip
        for frame in split(header, memoryview(payload).cast("B"), self._chunk_bytes):
            self._await_credit(link, key, len(frame), until)
            with redis_link.translated("send to a stage"):
                pipe = self._out.pipeline(transaction=False)
                pipe.xadd(key, {"f": frame})
                pipe.pexpire(key, TTL_MS)
                pipe.execute()
            self._ahead_bytes[link] = self._ahead_bytes.get(link, 0) + len(frame)
        self._seq[link] = seq + 1

    def receive(self, *, deadline_s: float) -> Message:
        until = time.monotonic() + deadline_s
        while True:
            for priority in Priority:
                if self._ready[priority]:
                    return self._ready[priority].popleft()
            left_ms = int((until - time.monotonic()) * 1000)
            if left_ms <= 0:
                raise TimeoutError(f"stage {self._stage}: nothing came in {deadline_s} s")
            self._read(left_ms)

    def close(self) -> None:
        self._out.close()
        self._in.close()

    def _read(self, block_ms: int) -> None:
        with redis_link.translated("receive from a stage"):
            reply: Any = self._in.xread(self._positions, count=16, block=block_ms)
        for raw_key, entries in reply or []:
            key = redis_link.text(raw_key)
            sender, priority = self._sources[key]
            n_bytes = 0
            for entry_id, fields in entries:
                self._positions[key] = entry_id
                n_bytes += len(fields[b"f"])
                self._take(sender, priority, fields[b"f"])
            self._acknowledge(key, [entry_id for entry_id, _ in entries], n_bytes)

    def _take(self, sender: int, priority: Priority, data: bytes) -> None:
        frame = decode(data)
        if frame.header.group_id != bytes.fromhex(self._group) or frame.header.priority is not priority:
            raise ProtocolError(f"stage {sender}: a frame of another group or priority")
        message = self._assemblies[sender, priority].add(sender, frame.header, frame.payload)
        if message is not None:
            self._ready[priority].append(message)

    def _acknowledge(self, key: str, entry_ids: list[bytes], n_bytes: int) -> None:
        with redis_link.translated("acknowledge to a stage"):
            pipe = self._in.pipeline(transaction=False)
            pipe.xdel(key, *entry_ids)
            pipe.rpush(_credit(key), n_bytes)
            pipe.pexpire(_credit(key), TTL_MS)
            pipe.execute()

    def _await_credit(self, link: tuple[int, Priority], key: str, n_bytes: int, until: float) -> None:
        while self._ahead_bytes.get(link, 0) + n_bytes > self._window_bytes and self._ahead_bytes[link] > 0:
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise Unavailable(f"stage {link[0]} does not keep up: {self._ahead_bytes[link]} bytes are unread",
                                  hint="is the stage alive?")  # fmt: skip
            with redis_link.translated("wait for credit"):
                reply: Any = self._out.blpop([_credit(key)], timeout=left_s)
            if reply is not None:
                self._ahead_bytes[link] -= int(reply[1])

    def _key(self, sender: int, receiver: int, priority: Priority) -> str:
        return f"thaw:relay:{self._group}:{sender}:{receiver}:{priority.value}"


def _credit(key: str) -> str:
    return key + ":credit"


def drop_group(client: redis.Redis, group_id: GroupId) -> None:
    """Delete every stream of a group that has ended."""
    with redis_link.translated("drop a group's streams"):
        for key in client.scan_iter(match=f"thaw:relay:{group_id}:*", count=200):
            client.delete(key)

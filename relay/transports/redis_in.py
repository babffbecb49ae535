"""The receiving end of the Redis transport: one XREAD at a time, whose answer is parsed while it comes (redis.py).

A reply is read into one buffer; a payload that does not fit is read from the socket into its message's memory.  Nothing
is allocated before the frame's header was checked.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Final

from relay.protocol.frames import (
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    FrameHeader,
    Priority,
    check_payload,
    check_sum,
    crc32c,
    decode_header,
)
from relay.transports.assembly import Assembly
from relay.transports.base import Flow, Message
from relay.transports.inbox import Inbox
from relay.transports.redis_server import REMEMBERED_MS, GroupRelay, unanswered
from relay.transports.resp import BUFFER_BYTES, READ_BYTES, Connection, command, gave_up
from thaw.errors import PlatformError, ProtocolError, WorkerLost

_READ_COUNT: Final = {Priority.INFERENCE: 8, Priority.KV: 2, Priority.BULK: 2}
"""The most frames in one answer of a stream: the relay server holds them for a slow reader beside the stream itself."""
_ACK_FRAMES: Final = 16
_ACK_BYTES: Final = 256 * 1024
"""Frames or bytes that are acknowledged together: trimming each frame would cost the server as much as carrying it."""
_BACKOFF_S: Final = (0.01, 0.05, 0.2, 0.5)
_MAX_HEAD_BYTES: Final = 512
_DONT_WAIT: Final = socket.MSG_DONTWAIT
_REPLY: Final = re.compile(rb"(?:\*(-?\d{1,9})|-([^\r\n]*))\r\n")
_ONE: Final = re.compile(
    rb"\*1\r\n\*2\r\n\$\d{1,4}\r\n([^\r\n]+)\r\n\*1\r\n\*2\r\n\$\d{1,4}\r\n(\d+)-(\d+)\r\n\*2\r\n\$1\r\nf\r\n\$(\d{1,9})\r\n"
)
"""A reply with one frame.  Nearly all replies between stages are such, so they are parsed in one step."""
_STREAM: Final = re.compile(rb"\*2\r\n\$\d{1,4}\r\n([^\r\n]+)\r\n\*(\d{1,9})\r\n")
_ENTRY: Final = re.compile(rb"\*2\r\n\$\d{1,4}\r\n(\d+)-(\d+)\r\n\*2\r\n\$1\r\nf\r\n\$(\d{1,9})\r\n")


class RedisLane:
    """All streams to one stage at one priority: one connection with one XREAD at a time.  See inbox.Lane.

    The next XREAD is sent when the caller asks for the next message (``arm``), not before it has this one: the present
    message would have to wait for the system call.
    """

    def __init__(
        self,
        relay: GroupRelay,
        inbox: Inbox,
        stage: int,
        assemblies: dict[int, Assembly],
        priority: Priority,
        flow: Flow,
    ) -> None:
        self.priority = priority
        self._relay, self._inbox, self._flow, self._assemblies = relay, inbox, flow, assemblies
        self._keys = {relay.stream(p, stage, priority).encode(): p for p in assemblies}
        self._ids = dict.fromkeys(self._keys, (0, 0))
        self._taken = dict.fromkeys(self._keys, 0)  # bytes
        self._credited = dict.fromkeys(self._keys, 0)
        self._owed_frames = self._owed_bytes = 0
        self._credit_step_bytes = max(1, flow.credit_bytes // 2)
        self._ack_bytes = min(_ACK_BYTES, self._credit_step_bytes)  # with a step it stays below credit_bytes
        self._read: set[bytes] = set()  # streams with frames that were taken and not acknowledged
        self._question = command("XREAD", "COUNT", _READ_COUNT[priority], "BLOCK", 0, "STREAMS", *self._keys)
        self._question = self._question.replace(b"*%d" % (6 + len(self._keys)), b"*%d" % (6 + 2 * len(self._keys)), 1)
        self._connection: Connection | None = None
        self._parser: Generator[None] = self._parse()
        self._target: memoryview | None = None
        self._crc = 0  # checksum of the received part of the payload in progress
        self._armed = False
        self._between = True  # the parser waits for the first byte of a reply
        self._lost_since: float | None = None
        self._failures = 0
        self._retry_s = 0.0

    def advance(self) -> None:
        connection = self._connection
        if connection is None:
            return
        try:
            while True:
                self._fill(connection)
                if not (self._between and self._one()):
                    next(self._parser)
                if self._target is None:
                    return
        except BlockingIOError:
            return
        except OSError as e:
            self._lose(e)
        except (ProtocolError, PlatformError):
            self._lose(None)
            raise

    def arm(self) -> None:
        """Acknowledge the messages that were taken and ask for more."""
        if self._armed or self._connection is None:
            return
        try:
            self._connection.sock.sendall(
                self._acknowledgements() + self._question + b"".join(map(_id_argument, self._ids.values()))
            )
        except OSError as e:
            self._lose(e)
        else:
            self._armed = True

    def revive(self, now_s: float) -> float | None:
        if self._connection is not None:
            return None
        if now_s < self._retry_s:
            return self._retry_s
        try:
            connection = self._relay.connect(self.priority, self._flow.resume_s)
        except OSError as e:
            return self._not_yet(now_s, e)
        connection.wait_at_most(5.0)
        self._connection, self._parser, self._target = connection, self._parse(), None
        self._armed, self._between = False, True
        self._lost_since, self._failures = None, 0
        self._owed_frames = _ACK_FRAMES
        self._read.update(key for key, at in self._ids.items() if at != (0, 0))  # the last acknowledgement may be lost
        self._credited = dict.fromkeys(self._keys, 0)
        self._inbox.watch(connection.sock.fileno(), self)
        self.arm()
        return None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _fill(self, connection: Connection) -> None:
        """Read once: into the memory of the message in progress, or into the buffer if there is none.

        The checksum of each piece of a payload is computed while the next piece is on its way.
        """
        if self._target is not None:
            count = connection.sock.recv_into(self._target, 0, _DONT_WAIT)
            self._crc = crc32c(self._target[:count], self._crc)
            self._target = self._target[count:] if count < len(self._target) else None
        else:
            count = self._fill_buffer(connection)
        if count == 0:
            raise ConnectionResetError("the relay server closed the connection")

    @staticmethod
    def _fill_buffer(connection: Connection) -> int:
        if connection.start == connection.end:
            connection.start = connection.end = 0
        elif connection.end == BUFFER_BYTES:
            connection.compact()
        count = connection.sock.recv_into(connection.view[connection.end : connection.end + READ_BYTES], 0, _DONT_WAIT)
        connection.end += count
        return count

    def _parse(self) -> Generator[None]:
        """Parse one reply after the other, and deliver the complete messages.  Yields when it needs more bytes."""
        while True:
            self._between = True
            reply = yield from self._match(_REPLY)
            self._between = False
            if reply[1] is not None:
                self._refused(bytes(reply[1]).decode("utf-8", "replace"))
            n_messages = 0
            for _ in range(int(reply[0])):
                stream = yield from self._match(_STREAM)
                key, n_entries = bytes(stream[0]), int(stream[1])
                for _ in range(n_entries):
                    entry = yield from self._match(_ENTRY)
                    for message in (yield from self._frame(key, int(entry[2]))):
                        n_messages += 1
                        self._inbox.deliver(message)
                    self._took(key, (int(entry[0]), int(entry[1])), int(entry[2]))
            self._armed = False
            if not n_messages:
                self.arm()

    def _one(self) -> bool:
        """Take a complete reply in one step if it holds one frame that is a whole message.  False for any other."""
        connection = self._connection
        assert connection is not None  # noqa: S101
        found = _ONE.match(connection.buffer, connection.start, connection.end)
        if found is None:
            return False
        at, n_bytes = found.end(), int(found[4])
        if at + n_bytes + 2 > connection.end:
            return False
        key, entry_id = bytes(found[1]), (int(found[2]), int(found[3]))
        before, connection.start = connection.start, at
        sender, header = self._header(key, n_bytes)
        payload = bytes(connection.view[at + HEADER_BYTES : at + n_bytes])
        check_payload(header, payload)
        message = self._assemblies[sender].whole(header, payload)
        if message is None:
            connection.start = before
            return False
        self._inbox.deliver(message)
        connection.start = at + n_bytes + 2
        self._took(key, entry_id, n_bytes)  # only after the checks: a damaged frame must be refused again
        self._armed = False
        return True

    def _took(self, key: bytes, entry_id: tuple[int, int], n_bytes: int) -> None:
        self._ids[key] = entry_id
        self._taken[key] += n_bytes
        self._owed_bytes += n_bytes
        self._owed_frames += 1
        self._read.add(key)

    def _frame(self, key: bytes, n_bytes: int) -> Generator[None, None, Sequence[Message]]:
        connection = self._connection
        assert connection is not None  # noqa: S101  a parser lives as long as its connection
        while connection.end - connection.start < min(HEADER_BYTES, n_bytes):
            yield None
        sender, header = self._header(key, n_bytes)
        place = self._assemblies[sender].place(header)
        have = min(header.n_bytes, connection.end - connection.start)
        place[:have] = connection.view[connection.start : connection.start + have]
        self._crc = crc32c(place[:have])
        connection.start += have
        if have < header.n_bytes:
            self._target = place[have:]
            while self._target is not None:
                yield None
        while connection.end - connection.start < 2:
            yield None
        connection.start += 2  # \r\n
        check_sum(header, self._crc)
        return self._assemblies[sender].take(header, place)

    def _header(self, key: bytes, n_bytes: int) -> tuple[int, FrameHeader]:
        """Return the sender and the header at the buffer's start.  No memory was allocated by the header's numbers."""
        connection, sender = self._connection, self._keys.get(key)
        assert connection is not None  # noqa: S101
        if sender is None:
            raise ProtocolError(f"the relay server answers with {key!r}, which nobody asked for")
        if not HEADER_BYTES <= n_bytes <= HEADER_BYTES + MAX_PAYLOAD_BYTES:
            raise ProtocolError(f"stage {sender}: not a frame: an entry of {n_bytes} bytes")
        header = decode_header(connection.view[connection.start : connection.start + HEADER_BYTES])
        connection.start += HEADER_BYTES
        if header.group_id != self._relay.group_bytes or header.priority is not self.priority:
            raise ProtocolError(f"stage {sender}: a frame of another group or priority")
        if header.n_bytes != n_bytes - HEADER_BYTES:
            raise ProtocolError(
                f"stage {sender}: frame claims {header.n_bytes} bytes and carries {n_bytes - HEADER_BYTES}"
            )
        return sender, header

    def _match(self, pattern: re.Pattern[bytes]) -> Generator[None, None, tuple[bytes, ...]]:
        connection = self._connection
        assert connection is not None  # noqa: S101
        while True:
            found = pattern.match(connection.buffer, connection.start, connection.end)
            if found is not None:
                connection.start = found.end()
                return found.groups()  # copied now: the next read changes the bytes behind a match object
            n_lines = connection.buffer.count(b"\r\n", connection.start, connection.end)
            if n_lines >= pattern.pattern.count(rb"\r\n") or connection.end - connection.start > _MAX_HEAD_BYTES:
                raise ProtocolError("not a frame: the relay holds an entry of another shape")
            yield None

    def _refused(self, message: str) -> None:
        if message.startswith(("UNBLOCKED", "LOADING")):
            raise ConnectionResetError(message)
        raise WorkerLost(f"the relay server refuses group {self._relay.group_id}: {message}")

    def _acknowledgements(self) -> bytes:
        if self._owed_frames < _ACK_FRAMES and self._owed_bytes < self._ack_bytes:
            return b""
        self._owed_frames = self._owed_bytes = 0
        acks = []
        for key in self._read:
            message, chunk = self._ids[key]
            acks.append(unanswered("XTRIM", key, "MINID", "=", f"{message}-{chunk + 1}"))
            taken = self._taken[key]
            if taken - self._credited[key] >= self._credit_step_bytes:
                self._credited[key] = taken
                credit = key + b":credit"
                acks += (
                    unanswered("XADD", credit, "MAXLEN", 1, f"{taken}-0", "c", ""),
                    unanswered("PEXPIRE", credit, REMEMBERED_MS),
                )
        self._read.clear()
        return b"".join(acks)

    def _lose(self, e: OSError | None) -> None:
        if self._connection is not None:
            self._inbox.forget(self._connection.sock.fileno())
            self._connection.close()
            self._connection = None
        self._inbox.idle(self)

    def _not_yet(self, now_s: float, e: OSError) -> float:
        self._lost_since = now_s if self._lost_since is None else self._lost_since
        if now_s - self._lost_since >= self._flow.resume_s:
            raise gave_up("receive from a stage", e) from e
        self._retry_s = now_s + _BACKOFF_S[min(self._failures, len(_BACKOFF_S) - 1)]
        self._failures += 1
        return self._retry_s


def open_lanes(
    relay: GroupRelay, inbox: Inbox, stage: int, assemblies: Mapping[Priority, dict[int, Assembly]], flow: Flow
) -> None:
    """Open a lane for each priority.  Raises WorkerLost, and closes ``inbox``, if the server does not know it."""
    try:
        with inbox.lock:
            for priority in Priority:
                lane = RedisLane(relay, inbox, stage, assemblies[priority], priority, flow)
                inbox.idle(lane)
                lane.revive(time.monotonic())
    except BaseException:
        inbox.close()
        raise


def _id_argument(at: tuple[int, int]) -> bytes:
    text = b"%d-%d" % at
    return b"$%d\r\n%b\r\n" % (len(text), text)

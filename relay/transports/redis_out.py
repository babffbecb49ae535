"""The sending end of the Redis transport: it appends frames, and keeps them until the server has confirmed them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from relay.protocol.frames import HEADER_BYTES, FrameHeader, Priority, encode_chunk
from relay.transports.base import Flow, closed, split
from relay.transports.inbox import BUSY_S, LOSS_ONLY, Inbox
from relay.transports.quota import LinkQuota
from relay.transports.redis_server import SKIP_REPLY, TOUCH_S, GroupRelay, memory_full
from relay.transports.resp import SMALL_BYTES, Connection, Refused, command, gave_up
from thaw.errors import PlatformError, ProtocolError, Unavailable, WorkerLost

_PIPELINE_BYTES: Final = 4 * 1024 * 1024
"""The most bytes written without the server's confirmation: more than a wire holds, and little for its memory."""
_SILENT: Final = 7
"""Number of small messages that are sent before one that the server confirms.  Confirming each would cost the server a
write, and this side a read, for every message.  Messages that are not confirmed yet are kept."""
_RETRY_S: Final = 0.2


class _Link:
    """The link to one receiver, at one priority."""

    def __init__(self, relay: GroupRelay, stage: int, receiver: int, priority: Priority, quota: LinkQuota) -> None:
        self.receiver, self.key = receiver, relay.stream(stage, receiver, priority)
        self.quota = quota
        self.credit_keys = {f"{relay.stream(stage, receiver, p)}:credit".encode(): p for p in Priority}
        self.prefix = command("XADD", self.key).replace(b"*2", b"*5", 1)
        self.silent_prefix = SKIP_REPLY + self.prefix
        self.seq = 0
        self.touched_s = -TOUCH_S
        self.broken = ""


class Frame(Protocol):
    """A frame that another transport has made (tcp_out.py)."""

    seq: int
    chunk: int
    head: bytes
    payload: bytes | memoryview


@dataclass(slots=True)
class _Entry:
    """A frame on its way to the relay server: the bytes to write, kept until the relay server has confirmed them."""

    link: _Link
    parts: tuple[bytes | memoryview, ...]
    n_bytes: int
    silent: bool = False  # the relay server was told not to confirm it: the next confirmation covers it too
    repeated: bool = False  # written before, silently or on a lost connection: the relay server may have it


class Sender:
    """One stage's sending end at one priority: one connection, one message at a time.

    A small message is written and kept until the server has confirmed it, or a later one.  A later ``send`` reads the
    confirmation, or a ``receive`` that has waited in vain asks for it (``check``).  When the connection is lost, the
    thread that receives sends the kept messages again, so a Sender is a lane of the inbox too.
    """

    def __init__(
        self,
        relay: GroupRelay,
        inbox: Inbox,
        stage: int,
        priority: Priority,
        flow: Flow,
        quotas: Mapping[int, LinkQuota],
    ) -> None:
        """``quotas``: by receiver; the senders of all priorities share them."""
        self.priority = priority
        self._relay, self._inbox, self._stage, self._flow, self._quotas = relay, inbox, stage, flow, quotas
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._links: dict[int, _Link] = {}
        self._connection: Connection | None = None
        self._unwritten: deque[_Entry] = deque()
        self._unconfirmed: deque[_Entry] = deque()
        self._kept_bytes = 0
        self._n_answers = 0  # confirmations that the relay server owes
        self._n_silent = 0  # silent entries since the last one that the relay server must confirm

    def send(
        self,
        receiver: int,
        message: FrameHeader,
        payload: bytes | memoryview,
        deadline_s: float,
        seq: int | None = None,
    ) -> None:
        """``seq``: the message's number, from a caller that has another path to the receiver beside this one."""
        until = time.monotonic() + deadline_s
        with self._lock:
            link = self._link(receiver)
            if link.broken:
                raise WorkerLost(f"the link to stage {receiver} broke: {link.broken}")
            self._send(link, link.seq if seq is None else seq, message, payload, until)
            if self._n_answers and self._n_silent > _SILENT // 2:
                self._take_confirmations()  # those of earlier messages, while this one is on its way

    def send_frames(self, receiver: int, frames: Sequence[Frame], deadline_s: float) -> None:
        """Send frames that another path did not deliver."""
        until = time.monotonic() + deadline_s
        with self._lock:
            link = self._link(receiver)
            try:
                for frame in frames:
                    self._take_room(link, HEADER_BYTES + len(frame.payload), until)
                    payload = memoryview(frame.payload)
                    self._unwritten.append(_entry(link, frame.seq, frame.chunk, frame.head, payload, self._touch(link)))
                    self._pump(_PIPELINE_BYTES, until)
                self._pump(0, until)
            except BaseException as e:
                self._cut_off(link, e)  # the caller does not have the frames any more
                raise

    def broken(self, receiver: int) -> str:
        """Why nothing can be sent to ``receiver`` any more; empty while it can."""
        link = self._links.get(receiver)
        return "" if link is None else link.broken

    def check(self) -> None:
        """Raise the relay server's refusal, if it refused a frame since the last call.

        Silent frames are sent again, this time with a confirmation.  The server refuses a frame that it has as known,
        and refuses again a frame for which it had no room.
        """
        if self._unconfirmed and self._connection is not None and self._lock.acquire(blocking=False):
            try:
                self._settle(self._flow.resume_s)
            finally:
                self._lock.release()

    def settle(self, deadline_s: float) -> None:
        """Return when the relay server has confirmed everything; for a caller that uses another path from now on."""
        with self._lock:
            self._settle(deadline_s)

    def _settle(self, deadline_s: float) -> None:
        until = time.monotonic() + deadline_s
        while self._unconfirmed or self._unwritten:
            if not self._n_answers:
                self._repeat()
            self._pump(0, until)

    def advance(self) -> None:
        """Called when the connection was lost.  A thread that sends notices it by itself."""
        if self._lock.acquire(blocking=False):
            try:
                self._drop()
                self._inbox.idle(self)
            finally:
                self._lock.release()

    def arm(self) -> None: ...

    def revive(self, now_s: float) -> float | None:
        if self._connection is not None:
            return None
        if not self._lock.acquire(blocking=False):
            return now_s + BUSY_S
        try:
            if self._connection is None and self._unconfirmed:
                self._pump(_PIPELINE_BYTES, now_s + self._flow.resume_s)
        finally:
            self._lock.release()
        return None

    def close(self) -> None:
        self._closed.set()
        connection = self._connection
        if connection is not None:
            connection.interrupt()
        with self._lock:
            self._drop()

    def _link(self, receiver: int) -> _Link:
        link = self._links.get(receiver)
        if link is None:
            link = self._links[receiver] = _Link(
                self._relay, self._stage, receiver, self.priority, self._quotas[receiver]
            )
        return link

    def _send(self, link: _Link, seq: int, message: FrameHeader, payload: bytes | memoryview, until: float) -> None:
        n_bytes = len(payload) if isinstance(payload, bytes) else payload.nbytes
        if n_bytes <= SMALL_BYTES and n_bytes <= self._flow.chunk_bytes:
            self._take_room(link, n_bytes + HEADER_BYTES, until)
            self._send_small(link, seq, message, bytes(payload), until)
            return
        link.quota.begin(self.priority)
        try:
            room = min(n_bytes, max(self._flow.at_once_bytes, self._flow.chunk_bytes)) + HEADER_BYTES
            self._take_room(link, room, until)
            self._send_chunks(link, seq, message, payload, until, room)
        finally:
            link.quota.end(self.priority)

    def _send_chunks(
        self, link: _Link, seq: int, message: FrameHeader, payload: bytes | memoryview, until: float, room: int
    ) -> None:
        """``room``: bytes of the quota that were taken for the message, a chunk or more."""
        try:
            for number, head, part in split(message, self._relay.group_bytes, seq, payload, self._flow):
                room -= HEADER_BYTES + len(part)
                if room < 0:
                    self._take_room(link, -room, until)
                    room = 0
                self._unwritten.append(_entry(link, seq, number, head, part, self._touch(link)))
                self._pump(_PIPELINE_BYTES, until)
            self._pump(0, until)  # the caller may reuse the payload afterwards
        except BaseException as e:
            self._cut_off(link, e)
            raise
        link.seq = seq + 1

    def _send_small(self, link: _Link, seq: int, message: FrameHeader, payload: bytes, until: float) -> None:
        """Send one frame.  A later call reads its confirmation."""
        head = encode_chunk(message, self._relay.group_bytes, seq, 0, 1, payload)
        n_bytes = HEADER_BYTES + len(payload)
        connection, frame_id = self._connection, b"%d-0" % (seq + 1)
        at_once = connection is not None and not self._unwritten and self._kept_bytes <= _PIPELINE_BYTES
        silent = at_once and self._n_silent < _SILENT
        wire = b"%b$%d\r\n%b\r\n$1\r\nf\r\n$%d\r\n%b%b\r\n%b" % (
            link.silent_prefix if silent else link.prefix,
            len(frame_id),
            frame_id,
            n_bytes,
            head,
            payload,
            self._touch(link),
        )
        entry = _Entry(link, (wire,), n_bytes, silent)
        try:
            if connection is not None and at_once:
                self._wrote(entry)  # before the write, so that an entry that is lost half-way is repeated
                try:
                    connection.sock.sendall(wire)
                except OSError as e:
                    self._lost(e, until)
            else:
                self._unwritten.append(entry)
            if self._connection is None or self._unwritten:
                self._pump(_PIPELINE_BYTES, until)
        except BaseException as e:
            self._cut_off(link, e)
            raise
        link.seq = seq + 1

    def _cut_off(self, link: _Link, e: BaseException) -> None:
        link.broken = link.broken or f"a message was cut off: {e}"
        self._forget_entries()

    def _touch(self, link: _Link) -> bytes:
        now = time.monotonic()
        if now - link.touched_s < TOUCH_S:
            return b""
        link.touched_s = now
        return self._relay.touch(link.key)

    def _pump(self, most_bytes: int, until: float) -> None:
        """Write the waiting entries; take confirmations until at most ``most_bytes`` are not confirmed."""
        while True:
            try:
                connection = self._connection or self._connect(until)
                while self._unwritten:
                    connection.send(*self._unwritten[0].parts)
                    self._wrote(self._unwritten.popleft())
                while self._n_answers and self._kept_bytes > most_bytes:
                    self._confirm(connection, until)
                return
            except OSError as e:
                self._lost(e, until)

    def _wrote(self, entry: _Entry) -> None:
        self._unconfirmed.append(entry)
        self._kept_bytes += entry.n_bytes
        if entry.silent:
            self._n_silent += 1
        else:
            self._n_silent = 0
            self._n_answers += 1

    def _confirm(self, connection: Connection, until: float) -> None:
        try:
            connection.reply(max(0.001, min(5.0, until - time.monotonic())))
        except Refused as e:
            self._confirmed(e)
        else:
            self._confirmed(None)

    def _take_confirmations(self) -> None:
        if self._connection is None:
            return
        try:
            for reply in self._connection.replies(self._n_answers):
                self._confirmed(reply if isinstance(reply, Refused) else None)
        except OSError:
            self._drop()
            self._inbox.idle(self)  # the thread that receives sends unconfirmed entries again

    def _confirmed(self, refused: Refused | None) -> None:
        self._n_answers -= 1
        while True:
            entry = self._unconfirmed.popleft()
            self._kept_bytes -= entry.n_bytes
            if not entry.silent:
                break
        if refused is not None and not (entry.repeated and "equal or smaller" in refused.message):
            error = _refusal(entry.link, refused)
            entry.link.broken = error.message
            raise error from refused

    def _take_room(self, link: _Link, n_bytes: int, until: float) -> None:
        """Wait for ``n_bytes`` of the quota.  Raises Unavailable at the deadline; nothing was taken then."""
        if link.quota.take(self.priority, n_bytes):
            return
        link.quota.begin(self.priority)
        try:
            known = link.quota.reported()  # before take(): a report that comes after take() must end the wait
            while not link.quota.take(self.priority, n_bytes):
                self._await_credit(link, known, until)
                known = link.quota.reported()
        finally:
            link.quota.end(self.priority)

    def _await_credit(self, link: _Link, known: Sequence[int], until: float) -> None:
        """Wait until the receiver reports that it has taken more than ``known`` (bytes, by priority) at any priority.

        Another priority may have borrowed our part, and its thread may be the first that reads the report.
        """
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise Unavailable(
                f"stage {link.receiver} does not keep up: {link.quota.unread_bytes} bytes are unread",
                hint="is the stage alive?",
            )
        self._pump(0, until)
        positions = (f"{known[p]}-0" for p in link.credit_keys.values())
        try:
            reply = (self._connection or self._connect(until)).call(
                "XREAD",
                "COUNT",
                1,
                "BLOCK",
                max(1, int(left_s * 1000)),
                "STREAMS",
                *link.credit_keys,
                *positions,
                wait_s=left_s + 5.0,
            )
        except OSError as e:
            self._lost(e, until)
            return
        for key, entries in reply or ():
            link.quota.report(link.credit_keys[bytes(key)], int(entries[-1][0].partition(b"-")[0]))

    def _connect(self, until: float) -> Connection:
        if self._closed.is_set():
            raise closed(self._stage)
        connection = self._connection = self._relay.connect(self.priority, until - time.monotonic())
        self._repeat()
        self._inbox.watch(connection.sock.fileno(), self, LOSS_ONLY)
        return connection

    def _repeat(self) -> None:
        """Queue all entries that are not confirmed once more, this time with a confirmation."""
        for entry in self._unconfirmed:
            if entry.silent:
                entry.parts, entry.silent = (memoryview(entry.parts[0])[len(SKIP_REPLY) :],), False
            entry.repeated = True
        self._unwritten.extendleft(reversed(self._unconfirmed))
        self._unconfirmed.clear()
        self._kept_bytes = self._n_answers = self._n_silent = 0

    def _lost(self, e: OSError, until: float) -> None:
        """Forget the connection and wait a little, or give up."""
        now, was_up = time.monotonic(), self._connection is not None
        self._drop()
        if self._closed.is_set():
            raise closed(self._stage) from e
        if now >= until:
            raise gave_up("send to a stage", e) from e
        if not was_up:
            self._closed.wait(min(_RETRY_S, until - now))

    def _drop(self) -> None:
        if self._connection is not None:
            self._inbox.forget(self._connection.sock.fileno())
            self._connection.close()
            self._connection = None

    def _forget_entries(self) -> None:
        self._unwritten.clear()
        self._unconfirmed.clear()
        self._kept_bytes = self._n_answers = self._n_silent = 0
        self._drop()  # its replies would be taken for those of later frames


def _entry(link: _Link, seq: int, number: int, head: bytes, payload: bytes | memoryview, touch: bytes) -> _Entry:
    frame_id = b"%d-%d" % (seq + 1, number)
    n_bytes = HEADER_BYTES + len(payload)
    prefix = b"%b$%d\r\n%b\r\n$1\r\nf\r\n$%d\r\n%b" % (link.prefix, len(frame_id), frame_id, n_bytes, head)
    return _Entry(link, (prefix, payload, b"\r\n" + touch), n_bytes)


def _refusal(link: _Link, e: Refused) -> PlatformError:
    if "equal or smaller" in e.message:
        return ProtocolError(f"stage {link.receiver}: somebody else writes to {link.key}")
    if e.word == "OOM":
        return memory_full()
    return WorkerLost(f"send to stage {link.receiver}: the relay server refused: {e.message}")

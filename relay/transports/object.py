"""The object transport: stages that can reach nothing but a store leave frames there for one another.

::

    <root>/<group>/<to>/<priority>-<from>-<message>-<chunk>      one object: HMAC-SHA256 │ frame v1

Names sort in the order of reading: by priority, then sender, then number.  A reader deletes an object after reading it,
and that is the acknowledgement: a sender that is a window ahead waits until enough of its objects are gone.  A name
says which frame it is, so writing one twice changes nothing, and a request to a store that was away is simply repeated.
The HMAC, by the group's secret over name and frame, stops forgery; the store's own access rules say who may read.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from relay.protocol.frames import HEADER_BYTES, MAX_PAYLOAD_BYTES, FrameHeader, Priority, check_payload, decode_header
from relay.transports.assembly import Assembly
from relay.transports.base import Flow, Message, closed, split
from thaw.errors import ProtocolError, StoreUnavailable, Unavailable
from thaw.ids import GroupId
from thaw.tracing.hops import HopPath

CHUNK_BYTES: Final = 4 * 1024 * 1024
"""Chunks are large, because a request costs milliseconds for any size."""
TTL_S: Final = 120.0
_SWEEP_S: Final = 30.0
_RETRY_S: Final = 0.2
_MAC_BYTES: Final = 32
_NAME: Final = re.compile(r"\A([0-2])-([0-9]{3})-([0-9a-f]{16})-([0-9a-f]{8})\Z")


@dataclass(frozen=True, slots=True)
class Entry:
    name: str
    n_bytes: int
    age_s: float


class Session(Protocol):
    """A store as one thread uses it.  Names are below one folder of a group.  Raises StoreUnavailable."""

    def put(self, folder: str, name: str, parts: Sequence[bytes | memoryview]) -> None:
        """Write the whole object or nothing: no reader sees a part."""

    def get(self, folder: str, name: str, most_bytes: int) -> bytes | None:
        """Return the object, None when it is gone.  Raises ProtocolError, without reading it, above ``most_bytes``."""

    def delete(self, folder: str, name: str) -> None:
        """Delete an object; it may be gone already."""

    def list(self, folder: str, prefix: str = "") -> list[Entry]:
        """Return the entries, sorted by name."""

    def wait(self, folder: str, timeout_s: float, *, eager: bool) -> None:
        """Sleep until something in ``folder`` may have changed since the last ``list``, or until ``interrupt``.

        If the store does not notify, each wait is a little longer than the last; ``eager`` begins with the shortest.
        """

    def interrupt(self) -> None: ...

    def close(self) -> None: ...


class Store(Protocol):
    def session(self) -> Session: ...


class ObjectTransport:
    """Stage ``stage`` of ``group_id``, talking with ``peers`` through ``store``.  See base.Transport."""

    def __init__(
        self,
        store: Store,
        group_id: GroupId,
        stage: int,
        peers: Sequence[int],
        *,
        secret: str = "",
        flow: Flow | None = None,
        ttl_s: float = TTL_S,
    ) -> None:
        flow = flow or Flow(chunk_bytes=CHUNK_BYTES)
        self._receiver = _Receiver(store.session(), group_id, stage, peers, secret, flow)
        self._senders = {p: _Sender(store.session(), group_id, stage, p, secret, flow, ttl_s) for p in Priority}

    def send(self, receiver: int, message: FrameHeader, payload: bytes | memoryview, *, deadline_s: float) -> None:
        self._senders[message.priority].send(receiver, message, payload, deadline_s)

    def receive(self, *, deadline_s: float) -> Message:
        return self._receiver.receive(deadline_s)

    def path(self, receiver: int, priority: Priority = Priority.INFERENCE) -> HopPath:
        return HopPath.OBJECT

    def close(self) -> None:
        for sender in self._senders.values():
            sender.close()
        self._receiver.close()


class _Closing:
    """``close`` may come from another thread: it ends a wait, and closes the session once no thread uses it."""

    def __init__(self, session: Session, stage: int) -> None:
        self._session, self._stage = session, stage
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self._session.interrupt()
            with self._lock:
                self._session.close()


# ── out ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _Link:
    receiver: int
    seq: int = 0
    ahead_bytes: int = 0  # upper limit of the unread bytes: what was read since the last listing is not known
    swept_s: float = 0.0
    broken: str = ""


class _Sender(_Closing):
    """One stage's sending end at one priority."""

    def __init__(
        self, session: Session, group_id: GroupId, stage: int, priority: Priority, secret: str, flow: Flow, ttl_s: float
    ) -> None:
        super().__init__(session, stage)
        self._group_id, self._group_bytes, self._priority = group_id, bytes.fromhex(group_id), priority
        self._secret, self._flow, self._ttl_s = secret.encode(), flow, ttl_s
        self._links: dict[int, _Link] = {}

    def send(self, receiver: int, message: FrameHeader, payload: bytes | memoryview, deadline_s: float) -> None:
        until = time.monotonic() + deadline_s
        with self._lock:
            link = self._links.setdefault(receiver, _Link(receiver))
            if link.broken:
                raise Unavailable(f"the link to stage {receiver} broke: {link.broken}")
            self._sweep(link)
            n_bytes = len(payload) if isinstance(payload, bytes) else payload.nbytes
            self._await_room(link, min(n_bytes + HEADER_BYTES, self._flow.window_bytes), until)
            try:
                for number, head, part in split(message, self._group_bytes, link.seq, payload, self._flow):
                    if number:
                        self._await_room(link, HEADER_BYTES + len(part), until)
                    self._put(link, number, head, part, until)
            except BaseException as e:
                link.broken = f"a message was cut off: {e}"
                raise
            link.seq += 1

    def _put(self, link: _Link, number: int, head: bytes, part: bytes | memoryview, until: float) -> None:
        name = f"{self._prefix()}{link.seq:016x}-{number:08x}"
        mac = _mac(self._secret, link.receiver, name, head, part)
        while True:
            try:
                self._session.put(self._folder(link), name, (mac, head, part))
                break
            except StoreUnavailable as e:
                self._again(e, until)
        link.ahead_bytes += HEADER_BYTES + len(part)

    def _await_room(self, link: _Link, n_bytes: int, until: float) -> None:
        eager = True
        while link.ahead_bytes and link.ahead_bytes + n_bytes > self._flow.window_bytes:
            try:
                unread = self._session.list(self._folder(link), self._prefix())
            except StoreUnavailable as e:
                self._again(e, until)
                continue
            link.ahead_bytes = sum(entry.n_bytes - _MAC_BYTES for entry in unread)
            if not link.ahead_bytes or link.ahead_bytes + n_bytes <= self._flow.window_bytes:
                return
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise Unavailable(
                    f"stage {link.receiver} does not keep up: {link.ahead_bytes} bytes are unread",
                    hint="is the stage alive?",
                )
            self._session.wait(self._folder(link), left_s, eager=eager)
            eager = False
            if self._closed.is_set():
                raise closed(self._stage)

    def _sweep(self, link: _Link) -> None:
        """Delete objects that have been unread for so long that their reader must be gone."""
        now = time.monotonic()
        if now - link.swept_s < min(_SWEEP_S, self._ttl_s):
            return
        first, link.swept_s = link.swept_s == 0.0, now
        if first:
            return
        try:
            for entry in self._session.list(self._folder(link), self._prefix()):
                if entry.age_s >= self._ttl_s:
                    self._session.delete(self._folder(link), entry.name)
        except StoreUnavailable:
            link.swept_s = 0.0  # the next message begins a new interval

    def _again(self, e: StoreUnavailable, until: float) -> None:
        left_s = until - time.monotonic()
        if self._closed.wait(max(0.0, min(_RETRY_S, left_s))):
            raise closed(self._stage) from e
        if left_s <= 0:
            raise Unavailable(f"the store does not answer: {e.message}", hint=e.hint) from e

    def _folder(self, link: _Link) -> str:
        return f"{self._group_id}/{link.receiver}"

    def _prefix(self) -> str:
        return f"{self._priority.value}-{self._stage:03d}-"


# ── in ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Receiver(_Closing):
    def __init__(
        self, session: Session, group_id: GroupId, stage: int, peers: Sequence[int], secret: str, flow: Flow
    ) -> None:
        super().__init__(session, stage)
        self._group_bytes, self._folder = bytes.fromhex(group_id), f"{group_id}/{stage}"
        self._secret, self._flow = secret.encode(), flow
        self._assemblies = {
            (p, priority): Assembly(p, max_message_bytes=flow.max_message_bytes) for p in peers for priority in Priority
        }
        self._ready: tuple[deque[Message], ...] = tuple(deque() for _ in Priority)
        self._read: list[str] = []  # names that were taken; the next call deletes them
        self._missing: set[str] = set()  # frames behind a gap in the last listing

    def receive(self, deadline_s: float) -> Message:
        until = time.monotonic() + deadline_s
        with self._lock:
            return self._receive(until, deadline_s)

    def _receive(self, until: float, deadline_s: float) -> Message:
        eager, lost_since = True, 0.0
        while not self._closed.is_set():
            try:
                took = self._read_next()
                lost_since = 0.0
            except StoreUnavailable as e:
                now = time.monotonic()
                lost_since = lost_since or now
                if now - lost_since >= self._flow.resume_s:
                    raise Unavailable(f"the store does not answer: {e.message}", hint=e.hint) from e
                self._closed.wait(max(0.0, min(_RETRY_S, until - now)))
                took = False
            for queue in self._ready:
                if queue:
                    return queue.popleft()
            left_s = until - time.monotonic()
            if took and left_s > 0:
                eager = True
                continue
            if left_s <= 0:
                raise TimeoutError(f"stage {self._stage}: nothing came in {deadline_s} s")
            if not lost_since:
                self._session.wait(self._folder, min(left_s, _RETRY_S) if self._missing else left_s, eager=eager)
            eager = False
        raise closed(self._stage)

    def _read_next(self) -> bool:
        """Take all inference frames of one listing, and at most one less urgent frame.  False if there was none."""
        while self._read:
            self._session.delete(self._folder, self._read[-1])
            self._read.pop()
        took, missing = False, set()
        for entry in self._session.list(self._folder):
            found = _NAME.match(entry.name)
            if found is None:
                raise ProtocolError(f"stage {self._stage}: an object that is no frame: {entry.name!r:.80}")
            priority, sender = Priority(int(found[1])), int(found[2])
            assembly = self._assemblies.get((sender, priority))
            if assembly is None:
                raise ProtocolError(f"stage {self._stage}: a frame of stage {sender}, which is no peer")
            at = (int(found[3], 16), int(found[4], 16))
            if at > assembly.position:
                missing.add(entry.name)
                continue
            took = self._take(entry, assembly, priority, at) or took
            if took and priority is not Priority.INFERENCE:
                break  # something more urgent may have come meanwhile
        if not took and missing & self._missing:
            raise ProtocolError(f"stage {self._stage}: frames before {min(missing)} are lost")
        self._missing = missing if not took else set()  # a listing is no snapshot: a gap counts when it is seen twice
        return took

    def _take(self, entry: Entry, assembly: Assembly, priority: Priority, at: tuple[int, int]) -> bool:
        if at < assembly.position:
            self._read.append(entry.name)
            return False
        data = self._session.get(self._folder, entry.name, _MAC_BYTES + HEADER_BYTES + MAX_PAYLOAD_BYTES)
        if data is None:
            return False
        view = memoryview(data)
        header = self._checked(entry.name, view, at, priority)
        place = assembly.place(header)
        place[:] = view[_MAC_BYTES + HEADER_BYTES :]
        check_payload(header, place)
        for message in assembly.take(header, place):
            self._ready[message.priority].append(message)
        self._read.append(entry.name)
        return True

    def _checked(self, name: str, data: memoryview, at: tuple[int, int], priority: Priority) -> FrameHeader:
        if len(data) < _MAC_BYTES + HEADER_BYTES:
            raise ProtocolError(f"not a frame: an object of {len(data)} bytes")
        head, payload = data[_MAC_BYTES : _MAC_BYTES + HEADER_BYTES], data[_MAC_BYTES + HEADER_BYTES :]
        if not hmac.compare_digest(data[:_MAC_BYTES], _mac(self._secret, self._stage, name, head, payload)):
            raise ProtocolError(f"not a frame of this group, or damaged: {name}")
        header = decode_header(head)
        if header.group_id != self._group_bytes or header.priority is not priority:
            raise ProtocolError(f"{name}: a frame of another group or priority")
        if (header.seq, header.chunk) != at or header.n_bytes != len(payload):
            raise ProtocolError(
                f"{name}: frame {header.seq}-{header.chunk} claims {header.n_bytes} bytes and carries {len(payload)}"
            )
        return header


def _mac(secret: bytes, receiver: int, name: str, head: bytes | memoryview, payload: bytes | memoryview) -> bytes:
    mac = hmac.new(secret, f"{receiver}/{name}".encode(), hashlib.sha256)
    mac.update(head)
    mac.update(payload)
    return mac.digest()

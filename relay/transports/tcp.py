"""The TCP transport: stages find one another's addresses at the redis relay, and then do without it.

::

    stage 1: listens on host_address ──XADD──▶ relay  thaw:relay:<group>:at:1 = 10.0.0.7:40123
    stage 0: XREAD BLOCK ◀─────────────────────┘
             └── connect, handshake (handshake.py), frames v1 ──▶ stage 1;   acknowledgements come back the same way

A stage listens on ``host_address`` only.  Each (from, to, priority) has a connection, made when it is first used.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from relay.protocol.frames import (
    HEADER_BYTES,
    FrameHeader,
    FrameKind,
    Priority,
    check_payload,
    check_sum,
    crc32c,
    decode_header,
    encode_header,
)
from relay.protocol.messages import GroupCredential
from relay.transports import handshake
from relay.transports.assembly import Assembly
from relay.transports.base import Flow, Message
from relay.transports.inbox import Inbox
from relay.transports.redis_server import GroupRelay
from relay.transports.resp import BUFFER_BYTES, READ_BYTES, tune
from relay.transports.tcp_out import Dial, TcpOut
from thaw.errors import PlatformError, ProtocolError
from thaw.hops import HopPath
from thaw.ids import GroupId
from thaw.lasting import LastingThread

_HANDSHAKE_S: Final = 3.0
_MAX_STRANGERS: Final = 32
"""The most connections that have not proved anything yet; a further one replaces the oldest."""
_ACK_BYTES: Final = 128 * 1024
_ADDRESS_TTL_MS: Final = 24 * 3600 * 1000
_NOTHING: Final = memoryview(b"")

Assemblies = dict[tuple[int, Priority], Assembly]


class TcpTransport:
    """Stage ``stage`` of ``group_id``, reachable at ``host_address``.  See base.Transport."""

    def __init__(self, url: str, group_id: GroupId, stage: int, peers: Sequence[int], *, host_address: str,
                 credential: GroupCredential | None = None, flow: Flow | None = None) -> None:  # fmt: skip
        self._flow = flow or Flow()
        self._stage = stage
        self._inbox = Inbox(stage)
        assemblies = {(p, priority): Assembly(p, max_message_bytes=self._flow.max_message_bytes)
                      for p in peers for priority in Priority}  # fmt: skip
        credential = credential or GroupCredential("", "")
        try:
            self._ends = TcpEnds(GroupRelay(url, credential, group_id), credential.secret, self._inbox, stage,
                                 assemblies, host_address, self._flow)  # fmt: skip
        except BaseException:
            self._inbox.close()
            raise

    def send(self, receiver: int, message: FrameHeader, payload: bytes | memoryview, *, deadline_s: float) -> None:
        self._ends.link(receiver, message.priority).send(message, payload, deadline_s)

    def receive(self, *, deadline_s: float) -> Message:
        return self._inbox.receive(deadline_s)

    def path(self, receiver: int, priority: Priority = Priority.INFERENCE) -> HopPath:
        return HopPath.TCP

    def close(self) -> None:
        self._ends.close()
        self._inbox.close()


class TcpEnds:
    """A stage's listener, and its links to others."""

    def __init__(self, relay: GroupRelay, secret: str, inbox: Inbox, stage: int, assemblies: Assemblies,
                 host_address: str, flow: Flow) -> None:  # fmt: skip
        self._relay, self._secret, self._inbox, self._stage, self._flow = relay, secret, inbox, stage, flow
        self._links: dict[tuple[int, Priority], TcpOut] = {}
        self._lock = threading.Lock()
        self._porter = _Porter(relay.group_bytes, secret, inbox, stage, assemblies, host_address, flow)
        try:
            self._publish()
        except BaseException:
            self._porter.close()
            raise

    def _publish(self) -> None:
        """Publish at the relay server the address on which this stage listens."""
        connection = self._relay.connect(Priority.INFERENCE, self._flow.resume_s)
        try:
            connection.call("XADD", self._relay.address_key(self._stage), "MAXLEN", 1, "*", "a", self._porter.address)
            connection.call("PEXPIRE", self._relay.address_key(self._stage), _ADDRESS_TTL_MS)
        finally:
            connection.close()

    def link(self, receiver: int, priority: Priority, on_lost: Callable[[], None] | None = None) -> TcpOut:
        """``on_lost``: the caller has another path when this one is lost, so a dial does not wait for the receiver."""
        found = self._links.get((receiver, priority))
        if found is not None:
            return found
        with self._lock:
            found = self._links.get((receiver, priority))
            if found is None:
                found = self._links[receiver, priority] = TcpOut(
                    self._dialer(receiver, priority, patient=on_lost is None), self._inbox, self._stage, receiver,
                    priority, self._flow, self._relay.group_bytes, on_lost)  # fmt: skip
            return found

    def close(self) -> None:
        self._porter.close()
        for link in list(self._links.values()):
            link.close()

    def _dialer(self, receiver: int, priority: Priority, *, patient: bool) -> Dial:
        says = handshake.Hello(self._relay.group_bytes, self._stage, receiver, priority)

        def dial(timeout_s: float) -> tuple[socket.socket, tuple[int, int]]:
            until = time.monotonic() + timeout_s
            host, _, port = self._address_of(receiver, timeout_s if patient else 0.001).rpartition(":")
            left_s = max(0.01, min(_HANDSHAKE_S, until - time.monotonic()))
            sock = socket.create_connection((host.strip("[]"), int(port)), left_s)
            try:
                tune(sock, priority)
                greeting = _exactly(sock, handshake.GREETING_BYTES)
                proof = handshake.hello(greeting, says, self._secret)
                sock.sendall(proof)
                position = handshake.read_welcome(proof, _exactly(sock, handshake.WELCOME_BYTES), self._secret)
                sock.setblocking(False)
            except BaseException:
                sock.close()
                raise
            return sock, position

        return dial

    def _address_of(self, stage: int, timeout_s: float) -> str:
        """Return the address of ``stage``; wait until it is published.  Raises TimeoutError."""
        connection = self._relay.connect(Priority.INFERENCE, max(timeout_s, 1.0))
        try:
            reply = connection.call("XREAD", "COUNT", 1, "BLOCK", max(1, int(timeout_s * 1000)), "STREAMS",
                                    self._relay.address_key(stage), "0", wait_s=timeout_s + 1.0)  # fmt: skip
        finally:
            connection.close()
        if reply is None:
            raise TimeoutError(f"stage {stage} has not said where it listens")
        return str(reply[0][1][-1][1][1].decode())


def _exactly(sock: socket.socket, n_bytes: int) -> bytes:
    data = sock.recv(n_bytes, socket.MSG_WAITALL)
    while len(data) < n_bytes:
        more = sock.recv(n_bytes - len(data))
        if not more:
            raise ConnectionRefusedError("the listener closed the connection: another group or secret?")
        data += more
    return data


# ── in ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class TcpLane:
    """One connection on which messages come.  See inbox.Lane."""

    def __init__(self, sock: socket.socket, inbox: Inbox, assembly: Assembly, says: handshake.Hello,
                 flow: Flow) -> None:  # fmt: skip
        self.priority, self.sender = says.priority, says.sender
        self._sock, self._inbox, self._assembly, self._group_id = sock, inbox, assembly, says.group_id
        self._ack_bytes = min(flow.credit_bytes, _ACK_BYTES)
        self._owed = 0  # bytes taken and not acknowledged
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._header: FrameHeader | None = None
        self._place = self._target = _NOTHING
        self._crc = 0  # of the part of the frame in progress that has come

    def advance(self) -> None:
        try:
            if self._header is None:
                self._fill()
                while self._one():
                    pass
            while self._begin() and self._rest():
                self._finish()
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        except ProtocolError:
            self.close()
            raise
        if self._owed >= self._ack_bytes:
            self.arm()

    def arm(self) -> None:
        """Tell the sender which frames it need not keep any longer."""
        if self._owed < self._ack_bytes:
            return
        if self._assembly.is_ahead:  # of frames in the relay server: the position does not cover yet what came here
            self._inbox.arm_again(self)
            return
        seq, chunk = self._assembly.position
        ack = encode_header(FrameHeader(FrameKind.ACK, self.priority, 0, self._group_id, seq=seq, chunk=chunk,
                                        n_chunks=chunk + 1))  # fmt: skip
        try:
            if self._sock.send(ack) != len(ack):
                self.close()
        except BlockingIOError:
            return  # the sender does not read acknowledgements, so it does not wait for room
        except OSError:
            self.close()
        else:
            self._owed = 0

    def revive(self, now_s: float) -> float | None:
        return None  # the sender connects again

    def close(self) -> None:
        if self._sock.fileno() >= 0:
            self._inbox.forget(self._sock.fileno())
            self._sock.close()

    def _fill(self) -> None:
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == BUFFER_BYTES:
            rest = bytes(self._view[self._start : self._end])
            self._view[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        count = self._sock.recv_into(self._view[self._end : self._end + READ_BYTES])
        if count == 0:
            raise ConnectionResetError("the sender closed the connection")
        self._end += count

    def _one(self) -> bool:
        """Take a message of one frame that is complete in the buffer, in one step.  False if there is none."""
        at = self._start + HEADER_BYTES
        if self._end < at:
            return False
        header = self._next_header()
        end = at + header.n_bytes
        if header.n_chunks != 1 or end > self._end:
            return False
        payload = bytes(self._view[at:end])
        check_payload(header, payload)
        message = self._assembly.whole(header, payload)
        if message is None:
            return False
        self._start = end
        self._owed += HEADER_BYTES + header.n_bytes
        self._inbox.deliver(message)
        return True

    def _next_header(self) -> FrameHeader:
        header = decode_header(self._view[self._start : self._start + HEADER_BYTES])
        if header.group_id != self._group_id or header.priority is not self.priority:
            raise ProtocolError(f"stage {self.sender}: a frame of another group or priority")
        return header

    def _begin(self) -> bool:
        """Begin a frame that is incomplete, or only a part of its message.  True when one is in progress."""
        if self._header is None:
            if self._end - self._start < HEADER_BYTES:
                return False
            header = self._next_header()
            self._start += HEADER_BYTES
            place = self._assembly.place(header)
            have = min(header.n_bytes, self._end - self._start)
            place[:have] = self._view[self._start : self._start + have]
            self._crc = crc32c(self._view[self._start : self._start + have])
            self._start += have
            self._header, self._place, self._target = header, place, place[have:]
        return True

    def _rest(self) -> bool:
        """Receive the missing bytes of the frame into its place.  True when it is complete.  The checksum of each piece
        is computed while the next piece is on its way."""
        while self._target:
            try:
                count = self._sock.recv_into(self._target)
            except BlockingIOError:
                return False
            if count == 0:
                raise ConnectionResetError("the sender closed the connection")
            self._crc = crc32c(self._target[:count], self._crc)
            self._target = self._target[count:]
        return True

    def _finish(self) -> None:
        header, place = self._header, self._place
        self._header, self._place, self._target = None, _NOTHING, _NOTHING  # only the caller keeps views of a message
        assert header is not None  # noqa: S101
        check_sum(header, self._crc)
        self._owed += HEADER_BYTES + header.n_bytes
        for message in self._assembly.take(header, place):
            self._inbox.deliver(message)


@dataclass(slots=True)
class _Stranger:
    sock: socket.socket
    greeting: bytes
    until: float
    data: bytes = b""


class _Porter:
    """Accepts connections and admits peers that know the secret.  It has a thread of its own: two stages that both
    send first would otherwise wait for each other."""

    def __init__(self, group_id: bytes, secret: str, inbox: Inbox, stage: int, assemblies: Assemblies,
                 host_address: str, flow: Flow) -> None:  # fmt: skip
        self._group_id, self._secret, self._inbox, self._stage = group_id, secret, inbox, stage
        self._assemblies, self._flow = assemblies, flow
        self._lanes: dict[tuple[int, Priority], TcpLane] = {}
        self._strangers: dict[int, _Stranger] = {}
        self._listener = _listen(host_address)
        host, port = self._listener.getsockname()[:2]
        self.address = f"{host}:{port}"
        self._wake_in, self._wake_out = socket.socketpair()
        self._thread = LastingThread(self._run, f"stage-{stage}-porter")
        self._thread.start()

    def close(self) -> None:
        self._wake_out.close()
        self._thread.join()

    def _run(self) -> None:
        with select.epoll() as epoll, self._listener, self._wake_in:
            epoll.register(self._listener, select.EPOLLIN)
            epoll.register(self._wake_in, select.EPOLLIN)
            while True:
                for fd, _ in epoll.poll(self._patience_s()):
                    if fd == self._wake_in.fileno():
                        self._dismiss(list(self._strangers))
                        return
                    if fd == self._listener.fileno():
                        self._greet(epoll)
                    else:
                        self._listen_to(fd)
                now = time.monotonic()
                self._dismiss([fd for fd, s in self._strangers.items() if s.until <= now])

    def _patience_s(self) -> float | None:
        """The seconds until the first stranger has been silent for too long; None while there is no stranger."""
        if not self._strangers:
            return None
        return max(0.0, min(s.until for s in self._strangers.values()) - time.monotonic())

    def _greet(self, epoll: select.epoll) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # the peer has gone again
        if len(self._strangers) >= _MAX_STRANGERS:
            self._dismiss([next(iter(self._strangers))])
        sock.setblocking(False)
        greeting = handshake.greeting(handshake.nonce())
        try:
            sock.send(greeting)
        except OSError:
            sock.close()
            return
        self._strangers[sock.fileno()] = _Stranger(sock, greeting, time.monotonic() + _HANDSHAKE_S)
        epoll.register(sock, select.EPOLLIN)

    def _listen_to(self, fd: int) -> None:
        stranger = self._strangers.get(fd)
        if stranger is None:
            return
        try:
            data = stranger.sock.recv(handshake.HELLO_BYTES - len(stranger.data))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        stranger.data += data
        if not data:
            self._dismiss([fd])
        elif len(stranger.data) == handshake.HELLO_BYTES:
            self._judge(fd, stranger)

    def _judge(self, fd: int, stranger: _Stranger) -> None:
        try:
            says = handshake.read_hello(stranger.greeting, stranger.data, self._secret)
        except ProtocolError:
            self._dismiss([fd])
            return
        assembly = self._assemblies.get((says.sender, says.priority))
        if says.group_id != self._group_id or says.receiver != self._stage or assembly is None:
            self._dismiss([fd])
            return
        del self._strangers[fd]
        sock = socket.socket(fileno=socket.dup(fd))  # a number of its own: this one is still known to our epoll
        stranger.sock.close()
        self._admit(sock, says, assembly, stranger.data)

    def _admit(self, sock: socket.socket, says: handshake.Hello, assembly: Assembly, hello: bytes) -> None:
        sock.setblocking(False)
        tune(sock, says.priority)
        with self._inbox.lock:  # once the position is sent, nothing of the earlier connection may be taken
            before = self._lanes.get((says.sender, says.priority))
            if before is not None:
                before.close()
            lane = self._lanes[says.sender, says.priority] = TcpLane(sock, self._inbox, assembly, says, self._flow)
            try:
                self._inbox.watch(sock.fileno(), lane)
                sock.send(handshake.welcome(hello, assembly.position, self._secret))
            except (OSError, PlatformError):
                lane.close()

    def _dismiss(self, fds: list[int]) -> None:
        for fd in fds:
            self._strangers.pop(fd).sock.close()


def _listen(host_address: str) -> socket.socket:
    """A listener on one address of this host, never on all of them."""
    host, _, port = host_address.rpartition(":") if host_address.count(":") == 1 else (host_address, "", "0")
    if host.strip("[]") in ("", "0.0.0.0", "::", "*"):
        raise PlatformError(f"a stage does not listen on {host_address!r}", hint="give one address of the host")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host.strip("[]"), int(port)))
        listener.listen(_MAX_STRANGERS)
        listener.setblocking(False)
    except OSError as e:
        listener.close()
        raise PlatformError(f"cannot listen on {host_address}: {e}", hint="is it an address of this host?") from e
    return listener

"""The TCP transport: stages find one another's addresses at the relay server, and then send directly.

::

    stage 1: listens on host_address ──XADD──▶ relay  thaw:relay:<group>:at:1 = 10.0.0.7:40123
    stage 0: XREAD BLOCK ◀─────────────────────┘
             └── connect, handshake (handshake.py), frames v1 ──▶ stage 1;   acknowledgements come back the same way

A stage listens on ``host_address`` only.  Each (from, to, priority) has a connection, which is made when it is first
used.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from relay.protocol.frames import (
    FrameHeader,
    Priority,
)
from relay.protocol.messages import GroupCredential
from relay.transports import handshake
from relay.transports.assembly import Assembly
from relay.transports.base import Flow, Message
from relay.transports.inbox import Inbox
from relay.transports.redis_server import GroupRelay
from relay.transports.resp import tune
from relay.transports.tcp_accept import HANDSHAKE_S, Assemblies, TcpAcceptor
from relay.transports.tcp_out import Dial, TcpOut
from thaw.ids import GroupId
from thaw.tracing.hops import HopPath

_ADDRESS_TTL_MS: Final = 24 * 3600 * 1000


class TcpTransport:
    """Stage ``stage`` of ``group_id``, reachable at ``host_address``.  See base.Transport."""

    def __init__(
        self,
        url: str,
        group_id: GroupId,
        stage: int,
        peers: Sequence[int],
        *,
        host_address: str,
        credential: GroupCredential | None = None,
        flow: Flow | None = None,
    ) -> None:
        self._flow = flow or Flow()
        self._stage = stage
        self._inbox = Inbox(stage)
        assemblies = {
            (p, priority): Assembly(p, max_message_bytes=self._flow.max_message_bytes)
            for p in peers
            for priority in Priority
        }
        credential = credential or GroupCredential("", "")
        try:
            self._ends = TcpEnds(
                GroupRelay(url, credential, group_id),
                credential.secret,
                self._inbox,
                stage,
                assemblies,
                host_address,
                self._flow,
            )
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

    def __init__(
        self,
        relay: GroupRelay,
        secret: str,
        inbox: Inbox,
        stage: int,
        assemblies: Assemblies,
        host_address: str,
        flow: Flow,
    ) -> None:
        self._relay, self._secret, self._inbox, self._stage, self._flow = relay, secret, inbox, stage, flow
        self._links: dict[tuple[int, Priority], TcpOut] = {}
        self._lock = threading.Lock()
        self._acceptor = TcpAcceptor(relay.group_bytes, secret, inbox, stage, assemblies, host_address, flow)
        try:
            self._publish()
        except BaseException:
            self._acceptor.close()
            raise

    def _publish(self) -> None:
        """Publish at the relay server the address on which this stage listens."""
        connection = self._relay.connect(Priority.INFERENCE, self._flow.resume_s)
        try:
            connection.call("XADD", self._relay.address_key(self._stage), "MAXLEN", 1, "*", "a", self._acceptor.address)
            connection.call("PEXPIRE", self._relay.address_key(self._stage), _ADDRESS_TTL_MS)
        finally:
            connection.close()

    def link(self, receiver: int, priority: Priority, on_lost: Callable[[], None] | None = None) -> TcpOut:
        """The link to ``receiver``.  With ``on_lost``, the caller has another path when this one is lost, so dialing
        does not wait until the receiver has published its address.
        """
        found = self._links.get((receiver, priority))
        if found is not None:
            return found
        with self._lock:
            found = self._links.get((receiver, priority))
            if found is None:
                found = self._links[receiver, priority] = TcpOut(
                    self._dialer(receiver, priority, patient=on_lost is None),
                    self._inbox,
                    self._stage,
                    receiver,
                    priority,
                    self._flow,
                    self._relay.group_bytes,
                    on_lost,
                )
            return found

    def close(self) -> None:
        self._acceptor.close()
        for link in list(self._links.values()):
            link.close()

    def _dialer(self, receiver: int, priority: Priority, *, patient: bool) -> Dial:
        says = handshake.Hello(self._relay.group_bytes, self._stage, receiver, priority)

        def dial(timeout_s: float) -> tuple[socket.socket, tuple[int, int]]:
            until = time.monotonic() + timeout_s
            host, _, port = self._address_of(receiver, timeout_s if patient else 0.001).rpartition(":")
            left_s = max(0.01, min(HANDSHAKE_S, until - time.monotonic()))
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
            reply = connection.call(
                "XREAD",
                "COUNT",
                1,
                "BLOCK",
                max(1, int(timeout_s * 1000)),
                "STREAMS",
                self._relay.address_key(stage),
                "0",
                wait_s=timeout_s + 1.0,
            )
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

"""The listener of one stage: it accepts connections, and admits those whose peer knows the group's secret (tcp.py)."""

from __future__ import annotations

import select
import socket
import time
from dataclasses import dataclass
from typing import Final

from relay.protocol.frames import (
    Priority,
)
from relay.transports import handshake
from relay.transports.assembly import Assembly
from relay.transports.base import Flow
from relay.transports.inbox import Inbox
from relay.transports.resp import tune
from relay.transports.tcp_in import TcpLane
from thaw.errors import PlatformError, ProtocolError
from thaw.process.lasting import LastingThread

HANDSHAKE_S: Final = 3.0
_MAX_NEWCOMERS: Final = 32
"""The most connections whose peer has not yet proved that it knows the secret; a further one replaces the oldest."""

Assemblies = dict[tuple[int, Priority], Assembly]


@dataclass(slots=True)
class _Newcomer:
    sock: socket.socket
    greeting: bytes
    until: float
    data: bytes = b""


class TcpAcceptor:
    """Accepts connections and admits peers that know the secret.  It has a thread of its own: otherwise two stages that
    both send first would wait for each other.
    """

    def __init__(
        self,
        group_id: bytes,
        secret: str,
        inbox: Inbox,
        stage: int,
        assemblies: Assemblies,
        host_address: str,
        flow: Flow,
    ) -> None:
        self._group_id, self._secret, self._inbox, self._stage = group_id, secret, inbox, stage
        self._assemblies, self._flow = assemblies, flow
        self._lanes: dict[tuple[int, Priority], TcpLane] = {}
        self._newcomers: dict[int, _Newcomer] = {}
        self._listener = _listen(host_address)
        host, port = self._listener.getsockname()[:2]
        self.address = f"{host}:{port}"
        self._wake_in, self._wake_out = socket.socketpair()
        self._thread = LastingThread(self._run, f"stage-{stage}-acceptor")
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
                        self._refuse(list(self._newcomers))
                        return
                    if fd == self._listener.fileno():
                        self._accept(epoll)
                    else:
                        self._read_proof(fd)
                now = time.monotonic()
                self._refuse([fd for fd, s in self._newcomers.items() if s.until <= now])

    def _patience_s(self) -> float | None:
        """The seconds until the first newcomer has been silent for too long; None while there is no newcomer."""
        if not self._newcomers:
            return None
        return max(0.0, min(s.until for s in self._newcomers.values()) - time.monotonic())

    def _accept(self, epoll: select.epoll) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # the peer has closed already
        if len(self._newcomers) >= _MAX_NEWCOMERS:
            self._refuse([next(iter(self._newcomers))])
        sock.setblocking(False)
        greeting = handshake.greeting(handshake.nonce())
        try:
            sock.send(greeting)
        except OSError:
            sock.close()
            return
        self._newcomers[sock.fileno()] = _Newcomer(sock, greeting, time.monotonic() + HANDSHAKE_S)
        epoll.register(sock, select.EPOLLIN)

    def _read_proof(self, fd: int) -> None:
        newcomer = self._newcomers.get(fd)
        if newcomer is None:
            return
        try:
            data = newcomer.sock.recv(handshake.HELLO_BYTES - len(newcomer.data))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        newcomer.data += data
        if not data:
            self._refuse([fd])
        elif len(newcomer.data) == handshake.HELLO_BYTES:
            self._authenticate(fd, newcomer)

    def _authenticate(self, fd: int, newcomer: _Newcomer) -> None:
        try:
            says = handshake.read_hello(newcomer.greeting, newcomer.data, self._secret)
        except ProtocolError:
            self._refuse([fd])
            return
        assembly = self._assemblies.get((says.sender, says.priority))
        if says.group_id != self._group_id or says.receiver != self._stage or assembly is None:
            self._refuse([fd])
            return
        del self._newcomers[fd]
        sock = socket.socket(fileno=socket.dup(fd))  # a new descriptor, because our epoll still watches the old one
        newcomer.sock.close()
        self._admit(sock, says, assembly, newcomer.data)

    def _admit(self, sock: socket.socket, says: handshake.Hello, assembly: Assembly, hello: bytes) -> None:
        sock.setblocking(False)
        tune(sock, says.priority)
        with self._inbox.lock:  # once the position is sent, no frame of the earlier connection may be accepted
            before = self._lanes.get((says.sender, says.priority))
            if before is not None:
                before.close()
            lane = self._lanes[says.sender, says.priority] = TcpLane(sock, self._inbox, assembly, says, self._flow)
            try:
                self._inbox.watch(sock.fileno(), lane)
                sock.send(handshake.welcome(hello, assembly.position, self._secret))
            except (OSError, PlatformError):
                lane.close()

    def _refuse(self, fds: list[int]) -> None:
        for fd in fds:
            self._newcomers.pop(fd).sock.close()


def _listen(host_address: str) -> socket.socket:
    """Listen on one address of this host, never on all of them."""
    host, _, port = host_address.rpartition(":") if host_address.count(":") == 1 else (host_address, "", "0")
    if host.strip("[]") in ("", "0.0.0.0", "::", "*"):
        raise PlatformError(f"a stage does not listen on {host_address!r}", hint="give one address of the host")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host.strip("[]"), int(port)))
        listener.listen(_MAX_NEWCOMERS)
        listener.setblocking(False)
    except OSError as e:
        listener.close()
        raise PlatformError(f"cannot listen on {host_address}: {e}", hint="is it an address of this host?") from e
    return listener

"""Fetches give way to inference: fetchd marks its sockets, and a queue in the network must honour the mark.

The mark is DSCP CS1 ("lower effort", RFC 8622's predecessor) in every packet from the SYN on, and SO_PRIORITY "bulk"
for this host's own queue.  A server that reflects the mark of a SYN (net.ipv4.tcp_reflect_tos) also marks its answers,
which carry the model's bytes.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from typing import Any, Final

from fetchd.meter import KEPT
from fetchd.pacing import NetworkLink
from thaw.logs import Log

TOS_CS1: Final = 0x20
_PRIORITY_BULK: Final = 2  # TC_PRIO_BULK
_RTM_GETADDR, _RTM_GETQDISC = 22, 38
_NLM_F_REQUEST_DUMP: Final = 0x301
_NLMSG_DONE, _NLMSG_ERROR = 3, 2
_IFA_ADDRESS, _IFA_LOCAL, _TCA_KIND = 1, 2, 1
_RANKING_QDISCS: Final = frozenset({"prio", "htb"})
_LOOPBACK: Final = ("127.", "::1")


def mark(sock: socket.socket) -> None:
    """Mark a socket before its connect().  A socket whose family has no such option stays unmarked."""
    try:
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, TOS_CS1)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, TOS_CS1)  # IPv6 too: it may carry mapped IPv4
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, _PRIORITY_BULK)  # last: IP_TOS sets it as well
    except OSError:
        return


class AddressRefused(OSError):
    """The caller does not want a connection to this address."""


def _welcome(_address: str, _port: int) -> str:
    return ""


def connect_marked(
    address: tuple[str, int],
    timeout: float | None = None,
    _source: Any = None,
    *,
    refusal: Callable[[str, int], str] = _welcome,
) -> socket.socket:
    """Connect like socket.create_connection, with a marked socket.  ``refusal`` is asked about each address of the host
    and says why it must not be connected to.  ``timeout`` is for all addresses together: a name may have hundreds of
    them.  Raises OSError."""
    last: OSError = OSError(f"{address[0]} has no address")
    try:
        found = socket.getaddrinfo(*address, 0, socket.SOCK_STREAM)
    except UnicodeError as e:  # a label of more than 63 characters
        raise OSError(f"{address[0]!r:.200} is not a host: {e}") from e
    deadline_s = None if timeout is None else time.monotonic() + timeout
    for number, (family, kind, proto, _, place) in enumerate(found):
        if problem := refusal(str(place[0]), int(place[1])):
            last = AddressRefused(problem)
            continue
        sock = socket.socket(family, kind, proto)
        try:
            mark(sock)
            sock.settimeout(_share(deadline_s, len(found) - number))
            sock.connect(place)
            sock.settimeout(timeout)
            return sock
        except OSError as e:
            sock.close()
            last = e
    raise last


def _share(deadline_s: float | None, n_left: int) -> float | None:
    """Return the time limit for the next address.  An address that does not answer must leave time for the others.
    Raises TimeoutError when no time is left."""
    if deadline_s is None:
        return None
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("no address answered in time")
    return left_s if n_left == 1 else left_s / 2


class InterfaceWatch:
    """Checks the interfaces over which stores are reached; without ``log`` it checks nothing."""

    def __init__(self, link: NetworkLink, log: Log | None) -> None:
        self._link, self._log = link, log
        self._seen: set[str] = set()

    def look(self, host: str) -> None:
        """Make fetches leave room on the link if no queue towards ``host`` lets inference pass them."""
        if self._log is None or not host or host in self._seen:
            return
        self._seen.add(host)
        interface = unranked_interface(host)
        if interface and not self._link.yields:
            self._link.set_yields()
            self._log.event(
                "link_yields", interface=interface, host=host, why="it has no prio or htb qdisc", share_of_measured=KEPT
            )


def unranked_interface(host: str) -> str:
    """The interface over which ``host`` is reached, if its queue has no priorities; else, or if local, empty."""
    try:
        address = _source_address(host)
        index = _interface_of(address) if not address.startswith(_LOOPBACK) else 0
        if not index or _RANKING_QDISCS & _qdiscs_of(index):
            return ""
        return socket.if_indextoname(index)
    except OSError:
        return ""  # no netlink, or no such host: nothing is known, so nothing is slowed down


def _source_address(host: str) -> str:
    family, kind, proto, _, place = socket.getaddrinfo(host, 9, 0, socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as sock:
        sock.connect(place)  # chooses a route; a datagram socket sends nothing
        return str(sock.getsockname()[0])


def _interface_of(address: str) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    wanted = socket.inet_pton(family, address.partition("%")[0])
    for body in _dump(_RTM_GETADDR, struct.pack("BBBBi", family, 0, 0, 0, 0)):
        attributes = _attributes(body[8:])
        if wanted in (attributes.get(_IFA_LOCAL), attributes.get(_IFA_ADDRESS)):
            return int(struct.unpack_from("i", body, 4)[0])
    return 0


def _qdiscs_of(index: int) -> set[str]:
    tcmsg = "BBHiIII"
    found = set()
    for body in _dump(_RTM_GETQDISC, struct.pack(tcmsg, 0, 0, 0, 0, 0, 0, 0)):
        if struct.unpack_from(tcmsg, body)[3] == index:
            kind = _attributes(body[struct.calcsize(tcmsg) :]).get(_TCA_KIND, b"")
            found.add(kind.rstrip(b"\0").decode())
    return found


def _dump(kind: int, body: bytes) -> list[bytes]:
    """The bodies of the messages with which the kernel answers (netlink(7))."""
    header = "IHHII"
    found: list[bytes] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as sock:
        sock.settimeout(1.0)
        sock.send(struct.pack(header, 16 + len(body), kind, _NLM_F_REQUEST_DUMP, 1, 0) + body)
        while True:
            data = sock.recv(65536)
            while data:
                length, of, *_ = struct.unpack_from(header, data)
                if of in (_NLMSG_DONE, _NLMSG_ERROR) or length < 16:
                    return found
                found.append(data[16:length])
                data = data[(length + 3) & ~3 :]


def _attributes(data: bytes) -> dict[int, bytes]:
    found = {}
    while len(data) >= 4:
        length, kind = struct.unpack_from("HH", data)
        if length < 4:
            break
        found[kind] = data[4:length]
        data = data[(length + 3) & ~3 :]
    return found

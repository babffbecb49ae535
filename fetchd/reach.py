"""Which addresses fetchd connects to for a store that a tenant has named.

A tenant chooses the URI of its model, and a name resolves to whatever its owner likes.  So the address decides, and it
is judged after it was resolved and right before the connection is made to it::

    host ──getaddrinfo──▶ addresses ──Reach──▶ those that may be reached ──connect──▶ that very address

Without a word of the operator these are the public ones.  An address that carries another one inside (IPv4 in IPv6) is
as good as the one that it carries.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from thaw.settings import SettingError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_ENTRY: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([\d.]+))(/\d+)?(?::(\d+))?")
_CARRIES_V4: Final = (
    (ipaddress.IPv6Network("::ffff:0:0/96"), 0),  # mapped
    (ipaddress.IPv6Network("::/96"), 0),  # compatible, an old form
    (ipaddress.IPv6Network("::ffff:0:0:0/96"), 0),  # translated (SIIT)
    (ipaddress.IPv6Network("64:ff9b::/96"), 0),  # translated (NAT64)
    (ipaddress.IPv6Network("2002::/16"), 80),  # 6to4
)
"""IPv6 networks whose addresses carry an IPv4 address, and how many bits follow it."""
_NEVER_PUBLIC: Final = (
    ipaddress.IPv6Network("fec0::/10"),  # site-local, which Python counts as global
    ipaddress.IPv6Network("64:ff9b:1::/48"),  # local translation
    ipaddress.IPv6Network("2001::/23"),  # Teredo and other protocols: the address inside is not the one that is reached
    ipaddress.IPv6Network("3fff::/20"),  # documentation
    ipaddress.IPv6Network("5f00::/16"),  # segment routing
    ipaddress.IPv4Network("192.88.99.0/24"),  # relays of 6to4
)


@dataclass(frozen=True, slots=True)
class Place:
    """A network, or one port of it."""

    network: Network
    port: int | None = None

    def holds(self, address: Address, port: int) -> bool:
        return address.version == self.network.version and address in self.network and self.port in (None, port)


@dataclass(frozen=True, slots=True)
class Reach:
    """``refused`` wins over ``allowed``, which wins over what is public."""

    allowed: tuple[Place, ...] = ()
    refused: tuple[Place, ...] = ()

    def problem(self, address: str, port: int, *, is_own: bool) -> str:
        """Why fetchd does not connect there; empty if it does.  ``is_own``: the address is this machine's."""
        bare = ipaddress.ip_address(address.partition("%")[0])
        every = (bare, *_carried(bare))
        if any(place.holds(a, port) for place in self.refused for a in every):
            return f"{address} port {port} is in THAW_FETCHD_REFUSE"
        if any(place.holds(a, port) for place in self.allowed for a in every):
            return ""
        if is_own:
            return f"{address} is an address of this machine"
        if not all(map(_is_public, every)):
            return f"{address} is not a public address"
        return ""


def parse(variable: str, text: str) -> tuple[Place, ...]:
    """``10.1.0.0/16, 127.0.0.1:9000, [fd00::]/8, [::1]:80``.  Raises SettingError that names ``variable``."""
    return tuple(_place(variable, entry.strip()) for entry in text.split(",") if entry.strip())


def _place(variable: str, entry: str) -> Place:
    found = _ENTRY.fullmatch(entry)
    try:
        if found is None:
            raise ValueError("it is no address")
        six, four, length, port = found.groups()
        if port is not None and not 0 < int(port) < 65536:
            raise ValueError(f"{port} is no port")
        return Place(ipaddress.ip_network((six or four) + (length or "")), None if port is None else int(port))
    except ValueError as e:
        raise SettingError(
            f"{variable}: {entry!r} is not a network: {e}", hint="write 10.1.0.0/16, 127.0.0.1:9000 or [fd00::]/8"
        ) from None


def _carried(address: Address) -> Iterable[ipaddress.IPv4Address]:
    if isinstance(address, ipaddress.IPv6Address):
        for network, n_bits_behind in _CARRIES_V4:
            if address in network:
                yield ipaddress.IPv4Address(int(address) >> n_bits_behind & 0xFFFF_FFFF)


def _is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address) and any(_carried(address)):
        return True  # the address that it carries is judged
    if address.is_multicast or address.is_reserved or address.is_unspecified or not address.is_global:
        return False
    return not any(address.version == n.version and address in n for n in _NEVER_PUBLIC)

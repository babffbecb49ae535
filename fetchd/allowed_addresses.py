"""Which addresses fetchd connects to for a store that a tenant has named.

A tenant chooses the URI of its model, and a name resolves to any address that its owner chooses.  So the address
decides, and it is judged after it was resolved and right before the connection is made to it::

    host ──getaddrinfo──▶ addresses ──Reach──▶ those that may be reached ──connect──▶ that very address

By default, these are the public addresses.  An address that contains another one (IPv4 in IPv6) is judged by the
address that it contains.
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
_NOT_PUBLIC: Final = tuple(
    map(
        ipaddress.ip_network,
        (
            "0.0.0.0/8",  # this network; Linux takes 0.0.0.0 for this machine
            "10.0.0.0/8",  # private
            "100.64.0.0/10",  # shared by the customers of one carrier, and clouds' own services
            "127.0.0.0/8",  # loopback
            "168.63.129.16/32",  # Azure's agent of each machine, at an address that looks public
            "169.254.0.0/16",  # link-local, and clouds' metadata
            "172.16.0.0/12",  # private
            "192.0.0.0/24",  # protocols, and Oracle's metadata
            "192.0.2.0/24",  # documentation
            "192.31.196.0/24",  # AS112: the nearest server
            "192.52.193.0/24",  # AMT: the nearest relay
            "192.88.99.0/24",  # relays of 6to4
            "192.168.0.0/16",  # private
            "192.175.48.0/24",  # AS112
            "198.18.0.0/15",  # benchmarks
            "198.51.100.0/24",  # documentation
            "203.0.113.0/24",  # documentation
            "224.0.0.0/4",  # multicast
            "240.0.0.0/4",  # reserved, and broadcast
            "::/8",  # unspecified, loopback, and addresses that contain IPv4
            "64:ff9b::/96",  # NAT64
            "64:ff9b:1::/48",  # local translation
            "100::/64",  # discarded
            "100:0:0:1::/64",  # placeholders
            "2001::/23",  # Teredo, ORCHID and others: the address inside is not the one that is reached
            "2001:db8::/32",  # documentation
            "2002::/16",  # 6to4
            "2620:4f:8000::/48",  # AS112
            "3fff::/20",  # documentation
            "5f00::/16",  # segment routing
            "fc00::/7",  # private
            "fe80::/10",  # link-local
            "fec0::/10",  # site-local
            "ff00::/8",  # multicast
        ),
    )
)
"""IANA's registries of special-purpose addresses (iana-ipv4- and iana-ipv6-special-registry), whole, with multicast and
the services that clouds put at addresses of their own.  Python's own table differs from one version to the next, and
calls some of these global."""
_GLOBAL_UNICAST: Final = ipaddress.IPv6Network("2000::/3")
"""No other IPv6 addresses were given to anybody."""


@dataclass(frozen=True, slots=True)
class Place:
    """A network, or one port of it."""

    network: Network
    port: int | None = None

    @property
    def is_exact(self) -> bool:
        """True for a place that names one machine or one service."""
        return self.port is not None or self.network.num_addresses == 1

    def holds(self, address: Address, port: int) -> bool:
        return address.version == self.network.version and address in self.network and self.port in (None, port)


@dataclass(frozen=True, slots=True)
class Reach:
    """``refused`` has precedence over ``allowed``, and ``allowed`` over the default, the public addresses."""

    allowed: tuple[Place, ...] = ()
    refused: tuple[Place, ...] = ()

    def problem(self, address: str, port: int, *, is_own: bool) -> str:
        """Why fetchd does not connect there; empty if it does.  ``is_own``: the address is this machine's.  A wide
        network that is allowed does not mean this machine, which is in it by chance."""
        bare = ipaddress.ip_address(address.partition("%")[0])
        every = (bare, *_carried(bare))
        if any(place.holds(a, port) for place in self.refused for a in every):
            return f"{address} port {port} is in THAW_FETCHD_REFUSE"
        allowed = [place for place in self.allowed if any(place.holds(a, port) for a in every)]
        if is_own and not any(place.is_exact for place in allowed):
            return (
                f"{address} is an address of this machine, which THAW_FETCHD_ALLOW must name by itself or with a port"
            )
        if allowed:
            return ""
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
    if isinstance(address, ipaddress.IPv6Address):
        if any(_carried(address)):
            return True  # the address that it contains is judged
        if address not in _GLOBAL_UNICAST:
            return False
    return not any(address.version == n.version and address in n for n in _NOT_PUBLIC)

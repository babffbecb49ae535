"""Connects to the stores that tenants name: only to addresses within the host's :class:`Reach`."""

from __future__ import annotations

import socket
from functools import lru_cache
from typing import Any

from fetchd.allowed_addresses import Reach, parse
from fetchd.marks import connect_marked
from fetchd.settings import FetchdSettings


class Gate:
    def __init__(self, reach: Reach) -> None:
        self._reach = reach

    def connect(self, address: tuple[str, int], timeout: float | None = None, _source: Any = None) -> socket.socket:
        """Connect as socket.create_connection does.  Each connection is judged anew, so neither a redirect nor a retry
        leads past it, and for each the name is resolved once.  Raises OSError."""
        return connect_marked(address, timeout, refusal=self._refusal)

    def _refusal(self, address: str, port: int) -> str:
        return self._reach.problem(address, port, is_own=_is_own(address))


@lru_cache(maxsize=4)
def _reach(allowed: str, refused: str) -> Reach:
    return Reach(parse("THAW_FETCHD_ALLOW", allowed), parse("THAW_FETCHD_REFUSE", refused))


def gate_of(settings: FetchdSettings) -> Gate:
    """Raises SettingError."""
    return Gate(_reach(settings.allow, settings.refuse))


def _is_own(address: str) -> bool:
    """Whether packets to ``address`` stay on this machine: the kernel then takes it for their source, too."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((address, 9))  # chooses a route; a datagram socket sends nothing
            return str(sock.getsockname()[0]) == address
    except OSError:
        return False  # no route leads there

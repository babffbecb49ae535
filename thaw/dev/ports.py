"""Free ports on loopback."""

from __future__ import annotations

import secrets
import socket
from contextlib import ExitStack

from thaw.errors import PlatformError

_LOW, _HIGH = 10_000, 21_000
"""SeaweedFS also uses port + 10000.  Both ports stay below the range from which the kernel assigns client ports."""


def free_ports(count: int) -> list[int]:
    """Different free ports whose companion ports (port + 10000) are free, too.  Raises PlatformError."""
    begin = secrets.randbelow(_HIGH - _LOW)  # a caller that has set the seed of random gets another port all the same
    with ExitStack() as held:
        found: list[int] = []
        for port in (*range(_LOW + begin, _HIGH), *range(_LOW, _LOW + begin)):
            if _hold(held, port) and _hold(held, port + 10_000):
                found.append(port)
            if len(found) == count:
                return found
    raise PlatformError("no free ports on loopback", hint="what listens here?  ss -ltnp")


def is_free(port: int) -> bool:
    with ExitStack() as held:
        return _hold(held, port)


def _hold(held: ExitStack, port: int) -> bool:
    sock = held.enter_context(socket.socket())
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True

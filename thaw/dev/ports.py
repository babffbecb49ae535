"""Free ports on loopback.

A port is given away before its server listens on it, so each process claims what it gives away: it keeps a socket with
the port's name in Linux's abstract namespace, which ends with the process.  Others on this machine pass the port by.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections import deque
from contextlib import ExitStack
from typing import Final

from thaw.errors import PlatformError

_LOW, _HIGH = 10_000, 21_000
"""SeaweedFS also uses port + 10000.  Both ports stay below the range from which the kernel assigns client ports."""

_CLAIMS: Final = 256
"""The claims that a process keeps: its newest ones, whose servers may not listen yet."""

_claimed = deque[int]()  # descriptors
_lock = threading.Lock()


def free_ports(count: int) -> list[int]:
    """Different free ports whose companion ports (port + 10000) are free, too, and that no other process was given.
    Raises PlatformError."""
    begin = secrets.randbelow(_HIGH - _LOW)  # a caller that has set the seed of random gets another port all the same
    with ExitStack() as held:
        found: list[int] = []
        for port in (*range(_LOW + begin, _HIGH), *range(_LOW, _LOW + begin)):
            if _hold(held, port) and _hold(held, port + 10_000) and _claim(port) and _claim(port + 10_000):
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


def _claim(port: int) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock, _lock:
        try:
            sock.bind(f"\0thaw-port-{port}")
        except OSError:
            return False
        _claimed.append(sock.detach())
        if len(_claimed) > _CLAIMS:
            os.close(_claimed.popleft())
    return True

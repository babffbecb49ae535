"""How many files and sockets a process may have open."""

from __future__ import annotations

import resource


def raise_limit() -> None:
    """As far as we are allowed: the usual 1,024 is for programs that use select()."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

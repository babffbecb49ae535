"""How many files and sockets a process may have open."""

from __future__ import annotations

import resource


def raise_limit() -> None:
    """Raise the soft limit to the hard limit; the usual limit of 1,024 is meant for programs that use select()."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

"""A bound on the memory that a process may allocate while it reads untrusted files."""

from __future__ import annotations

import resource
from pathlib import Path


def bound_memory(more_bytes: int) -> None:
    """Limit for good how many more writable bytes this process can map.  Beyond the limit, an allocation fails as on a
    full host.  Bytes that are mapped but never written also count."""
    status = Path("/proc/self/status").read_text()
    mapped = next(1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData:"))
    limit = mapped + more_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

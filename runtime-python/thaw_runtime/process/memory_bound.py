"""A bound on what a process that looks at a stranger's files may allocate."""

from __future__ import annotations

import resource
from pathlib import Path


def bound_memory(more_bytes: int) -> None:
    """From now on this process can map at most so many writable bytes more, for good: beyond them, an allocation fails
    as on a full host.  Bytes that are mapped and never written to count, too."""
    status = Path("/proc/self/status").read_text()
    mapped = next(1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData:"))
    limit = mapped + more_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

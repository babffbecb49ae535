"""Drops files from the page cache, and counts the pages of a file that are in it.

The count comes from mincore, which reads nothing.  A read with RWF_NOWAIT cannot tell: it makes the kernel read ahead,
and where the disk answers while the read still looks, it finds a page that had been dropped.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)


def drop(paths: Iterable[Path]) -> None:
    """Write the files back and drop their pages.  The kernel keeps a page that is mapped or being read."""
    for path in paths:
        with path.open("rb") as f:
            os.fsync(f.fileno())  # a page that is dirty, or being written, cannot be dropped
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_pages(path: Path) -> tuple[int, int]:
    """Return how many pages of a file are in the page cache, and how many the file has."""
    n_bytes = path.stat().st_size
    n_pages = -(-n_bytes // mmap.PAGESIZE)
    if not n_pages:
        return 0, 0
    states = (ctypes.c_ubyte * n_pages)()
    with path.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        failed = _libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(n_bytes), states)
        error = ctypes.get_errno()
        del first  # a mapping that is referred to cannot be closed
    if failed:
        raise OSError(error, os.strerror(error), str(path))
    return sum(state & 1 for state in states), n_pages

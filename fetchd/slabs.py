"""The slab pool: host memory that exists, is populated and is mapped before the first byte arrives.

A fault costs more than the copy it serves, so the whole pool is faulted in at start by two threads and never given
back.  Slabs are memfds: however fetchd ends, the kernel frees them, and there is nothing to clean up.  fetchd maps each
slab writable once and then seals it: no process, not even root in a container, can map or open it writable again.  A
slab that held one model is zeroed before the next model's readers may map it.
"""

from __future__ import annotations

import fcntl
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from relay.protocol.shared_memory import Region
from thaw.errors import MemoryTooSmall, PlatformError
from thaw.logs import Log

_F_SEAL_FUTURE_WRITE: Final = 0x10  # linux/fcntl.h; fcntl knows the others
_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE
_MFD_HUGETLB: Final = 4


def create_sealable(name: str, n_bytes: int, *, huge: bool = False) -> int:
    """A memfd of mode 0400, so that only root could even try to reopen it for writing."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (_MFD_HUGETLB if huge else 0))
    os.ftruncate(fd, n_bytes)
    os.fchmod(fd, 0o400)
    return fd


def seal_and_reopen(fd: int) -> int:
    """Forbid every further writable mapping and write; closes ``fd`` and returns a read-only descriptor."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    os.close(fd)
    return read_only


class SlabPool:
    """Slabs by number.  Thread-safe."""

    def __init__(self, n_slabs: int, slab_bytes: int, log: Log | None = None) -> None:
        self.slab_bytes, self.n_slabs = slab_bytes, n_slabs
        self.on_returned: Callable[[], None] = lambda: None
        """Called after slabs came back, so that they are scrubbed in the background."""
        self._lock = threading.Lock()
        began = time.monotonic()
        self.huge = _free_huge_bytes() >= n_slabs * slab_bytes > 0
        self._region, descriptors = self._create()
        _populate(self._region, n_slabs, slab_bytes)
        self._fds = [seal_and_reopen(fd) for fd in descriptors]
        self._clean = list(range(n_slabs))
        self._dirty: list[int] = []
        seconds = round(time.monotonic() - began, 3)
        if log is not None:
            log.event("pool_ready", n_bytes=n_slabs * slab_bytes, pages="huge" if self.huge else "4k", seconds=seconds)

    @property
    def free_slabs(self) -> int:
        with self._lock:
            return len(self._clean) + len(self._dirty)

    def take(self, count: int) -> tuple[int, ...]:
        """Take ``count`` zeroed slabs.  Raises MemoryTooSmall; then nothing was taken."""
        with self._lock:
            if count > len(self._clean) + len(self._dirty):
                raise MemoryTooSmall(f"{count} slabs wanted, {len(self._clean) + len(self._dirty)} are free")
            taken = [self._clean.pop() for _ in range(min(count, len(self._clean)))]
            stale = [self._dirty.pop() for _ in range(count - len(taken))]
        for slab in stale:
            self._region.zero(slab * self.slab_bytes, self.slab_bytes)
        return tuple(sorted(taken + stale))

    def give_back(self, slabs: tuple[int, ...]) -> None:
        """Return slabs to the pool.  The caller knows that no container maps them any more."""
        with self._lock:
            self._dirty.extend(slabs)
        self.on_returned()

    def scrub_one(self) -> bool:
        """Zero one returned slab ahead of its next use.  False when there is none."""
        with self._lock:  # held meanwhile (about 10 ms), so that the slab counts as free all the time
            if not self._dirty:
                return False
            slab = self._dirty.pop()
            self._region.zero(slab * self.slab_bytes, self.slab_bytes)
            self._clean.append(slab)
        return True

    def view(self, slab: int) -> memoryview:
        """The writable bytes of one slab."""
        return self._region.view[slab * self.slab_bytes : (slab + 1) * self.slab_bytes]

    def read_only_fd(self, slab: int) -> int:
        return self._fds[slab]

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._region.close()

    def _create(self) -> tuple[Region, list[int]]:
        region = Region(self.n_slabs * self.slab_bytes)
        descriptors: list[int] = []
        try:
            for i in range(self.n_slabs):
                fd = create_sealable(f"thaw-slab-{i}", self.slab_bytes, huge=self.huge)
                descriptors.append(fd)
                region.map(i * self.slab_bytes, fd, self.slab_bytes, writable=True)
        except OSError as e:
            for fd in descriptors:
                os.close(fd)
            if self.huge:  # another process took the huge pages between the check and the mapping
                self.huge = False
                return self._create()
            raise PlatformError(f"the slab pool cannot be created: {e}", hint="lower THAW_FETCHD_POOL_MB") from e
        return region, descriptors


def _free_huge_bytes() -> int:
    text = Path("/proc/meminfo").read_text()
    pattern = r"^(HugePages_Free|HugePages_Rsvd|Hugepagesize):\s+(\d+)"
    found = {m[1]: int(m[2]) for m in re.finditer(pattern, text, re.MULTILINE)}
    free = found.get("HugePages_Free", 0) - found.get("HugePages_Rsvd", 0)
    return free * found.get("Hugepagesize", 0) * 1024


def _populate(region: Region, n_slabs: int, slab_bytes: int) -> None:
    """Fault the pool in with two threads; with more, the memory's bandwidth would limit the kernel's zeroing."""
    failures: list[OSError] = []

    def populate(first: int) -> None:
        try:
            for i in range(first, n_slabs, 2):
                region.populate(i * slab_bytes, slab_bytes)
        except OSError as e:
            failures.append(e)

    threads = [threading.Thread(target=populate, args=(first,)) for first in (0, 1)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if failures:
        raise PlatformError(f"the slab pool cannot be populated: {failures[0]}", hint="lower THAW_FETCHD_POOL_MB")

"""Shared memory and futexes by libc: MAP_FIXED, populate and FUTEX_WAIT, which the mmap module does not offer.

A :class:`Region` reserves address space first and maps descriptors over it afterwards, so that many slabs lie
contiguously.  The reservation is an ordinary ``mmap.mmap``: it cannot be unmapped while a memoryview of it exists.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from typing import Final

HUGE_PAGE_BYTES: Final = 2 * 1024 * 1024
"""A hugetlb mapping must start at a multiple of its page; every region does, so both kinds of slab fit."""

_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000  # mmap.MAP_NORESERVE is younger than Python 3.11
_MADV_HUGEPAGE: Final = 14
_MADV_POPULATE_WRITE: Final = 23
_FUTEX_WAIT: Final = 0  # without FUTEX_PRIVATE_FLAG: waiter and waker are different processes
_FUTEX_WAKE: Final = 1
_SYS_FUTEX: Final = {"x86_64": 202, "aarch64": 98}[platform.machine()]
_EVERYBODY: Final = 2**31 - 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.syscall.restype = ctypes.c_long


class _Timespec(ctypes.Structure):
    _fields_ = [("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long)]


def _fail() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


class Region:
    """``n_bytes`` of address space, aligned to a huge page; nothing in it is backed until :meth:`map`."""

    def __init__(self, n_bytes: int) -> None:
        reserve = n_bytes + HUGE_PAGE_BYTES
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._mmap = mmap.mmap(-1, reserve, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        first = ctypes.c_char.from_buffer(self._mmap)
        base = ctypes.addressof(first)
        del first  # an export would forbid close()
        skip = -base % HUGE_PAGE_BYTES
        self.address = base + skip
        self.view = memoryview(self._mmap)[skip : skip + n_bytes]

    def map(self, at: int, fd: int, n_bytes: int, *, writable: bool) -> None:
        """Lay ``n_bytes`` of ``fd`` over [at, at + n_bytes).  Raises OSError."""
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        wanted = self.address + at
        got = _libc.mmap(wanted, n_bytes, prot, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
        if got != wanted:
            raise _fail()

    def populate(self, at: int, n_bytes: int) -> None:
        """Fault [at, at + n_bytes) in, with huge pages where the kernel gives them.  It does not hold the GIL."""
        _libc.madvise(self.address + at, n_bytes, _MADV_HUGEPAGE)  # advice only; refused on some kernels
        if _libc.madvise(self.address + at, n_bytes, _MADV_POPULATE_WRITE) != 0:
            raise _fail()

    def zero(self, at: int, n_bytes: int) -> None:
        ctypes.memset(self.address + at, 0, n_bytes)

    def close(self) -> None:
        """Unmap the region.  While views of it exist it stays mapped, until the last of them is released."""
        self.view.release()
        try:
            self._mmap.close()
        except BufferError:
            pass  # exported views keep the mmap object, and with it the mapping, alive


def futex_wait(address: int, expected: int, timeout_s: float) -> None:
    """Sleep until woken, the word at ``address`` differs from ``expected``, or the time is over."""
    seconds = max(timeout_s, 0.0)
    spec = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    arguments = (ctypes.c_void_p(address), ctypes.c_int(_FUTEX_WAIT), ctypes.c_uint32(expected), ctypes.byref(spec))
    if _libc.syscall(_SYS_FUTEX, *arguments, None, 0) != 0:
        code = ctypes.get_errno()
        if code not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
            raise OSError(code, os.strerror(code))


def futex_wake(address: int) -> int:
    """Wake every waiter on ``address``; return their number."""
    arguments = (ctypes.c_void_p(address), ctypes.c_int(_FUTEX_WAKE), ctypes.c_int(_EVERYBODY))
    return int(_libc.syscall(_SYS_FUTEX, *arguments, None, None, 0))

"""One output stream of the child on its way to the container's log: bounded per run, and never in the child's way.

A pump always reads, so that user code which prints 100 MB is not blocked and does not fill a disk: beyond the limit
the text is dropped until the run's sentinel, and one line says so.  The proxy waits for the pump to pass a run's
sentinel before it answers the run, so whoever reads the log then finds all of it.
"""

from __future__ import annotations

import os
import threading
from typing import Final

from thaw_runtime.python_wire import SENTINEL

LIMIT_BYTES: Final = 10 * 1024 * 1024
"""OpenWhisk's largest log limit; the invoker applies the action's own."""

_MARK: Final = SENTINEL.encode() + b"\n"
_READ_BYTES: Final = 1 << 16
_TRUNCATED: Final = "Logs were truncated because the total bytes size exceeds the limit of {} bytes.\n"


class LineLimiter:
    """Pure: bytes in, (bytes to write, sentinels passed) out.  Text behind the limit is dropped until a sentinel."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit = limit_bytes
        self._used = 0
        self._dropping = False
        self._ended_line = True
        self._tail = b""  # what may be the beginning of a sentinel

    def feed(self, data: bytes) -> tuple[bytes, int]:
        data = self._tail + data
        self._tail = b""
        out: list[bytes] = []
        passed = 0
        while (at := data.find(_MARK)) >= 0:
            out.append(self._kept(data[:at]))
            out.append(_MARK if self._ended_line else b"\n" + _MARK)
            data = data[at + len(_MARK) :]
            self._used, self._dropping, self._ended_line = 0, False, True
            passed += 1
        held = self._held(data)
        self._tail = data[len(data) - held :] if held else b""
        out.append(self._kept(data[: len(data) - held]))
        return b"".join(out), passed

    def _kept(self, data: bytes) -> bytes:
        if self._dropping or not data:
            return b""
        kept = data[: self._limit - self._used]
        self._used += len(kept)
        self._ended_line = kept.endswith(b"\n")
        if len(kept) < len(data):
            self._dropping = self._ended_line = True
            return kept + b"\n" + _TRUNCATED.format(self._limit).encode()
        return kept

    @staticmethod
    def _held(data: bytes) -> int:
        """How many bytes at the end could be the start of a sentinel that is still arriving."""
        for n in range(min(len(_MARK) - 1, len(data)), 0, -1):
            if _MARK.startswith(data[-n:]):
                return n
        return 0


class Pump:
    """A thread that carries ``source`` to ``target`` through a limiter, until the end of the source."""

    def __init__(self, source: int, target: int, name: str) -> None:
        self._source, self._target = source, target
        self._changed = threading.Condition()
        self._passed = 0
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=f"pump-{name}", daemon=True)
        self._thread.start()

    def wait_passed(self, n_runs: int, deadline_s: float) -> bool:
        """Whether the sentinels of ``n_runs`` runs have been written; False at the deadline or the stream's end."""
        with self._changed:
            self._changed.wait_for(lambda: self._passed >= n_runs or self._ended, timeout=deadline_s)
            return self._passed >= n_runs

    def wait_ended(self, deadline_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ended, timeout=deadline_s)

    def _run(self) -> None:
        limiter = LineLimiter()
        while data := self._read():
            kept, passed = limiter.feed(data)
            write_all(self._target, kept)
            if passed:
                with self._changed:
                    self._passed += passed
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _read(self) -> bytes:
        try:
            return os.read(self._source, _READ_BYTES)
        except OSError:
            return b""


def write_all(fd: int, data: bytes) -> None:
    """A log that cannot be written (a full disk) must not stop the function."""
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:
        return

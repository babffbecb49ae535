"""Copy one output stream of the child to the container's log, with a limit per run, and without blocking the child.

The proxy reads the stream whenever it has data, so user code that prints 100 MB is not blocked and does not fill a
disk: beyond the limit the text is dropped until the run ends, and one line says so.  The proxy knows when a run ends.
All text that the child wrote before its answer is in the pipe by then: the proxy copies it and writes the sentinel
behind it.  So a reader that opens the log after the answer finds all of the text.
"""

from __future__ import annotations

import fcntl
import os
import struct
import termios
from typing import Final

from thaw_runtime.action.wire import SENTINEL

LIMIT_BYTES: Final = 10 * 1024 * 1024
"""OpenWhisk's largest log limit; the invoker applies the action's own limit."""

_SENTINEL: Final = SENTINEL.encode()
_MARK: Final = _SENTINEL + b"\n"
_PRINTED_MARK: Final = _SENTINEL + b" \n"
"""Replaces a mark that the function prints itself, or a caller through it: this line ends no run."""
_READ_BYTES: Final = 1 << 16
KEPT_BYTES: Final = 16 * 1024
"""The bytes of output that are kept until the init is over: the error of a failed init contains them, and in JSON each
byte may take six."""
_CUT: Final = b"[the beginning was left out]\n"
_TRUNCATED: Final = "Logs were truncated because the total bytes size exceeds the limit of {} bytes.\n"


class LineLimiter:
    """Decides which part of a run's output is written to the log.  It drops text behind the limit until the run ends.

    This class is pure: it does no I/O.
    """

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit = limit_bytes
        self._used = 0
        self._dropping = False
        self._ended_line = True
        self._tail = b""  # the last bytes that were written, in which a mark may begin

    def feed(self, data: bytes) -> bytes:
        if self._dropping or not data:
            return b""
        data, self._tail = self._without_marks(data)
        kept = data[: self._limit - self._used]
        self._used += len(kept)
        if len(kept) < len(data):
            self._dropping = self._ended_line = True
            return kept + b"\n" + _TRUNCATED.format(self._limit).encode()
        self._ended_line = kept.endswith(b"\n")
        return kept

    def end_run(self) -> bytes:
        """The bytes that end the run: the sentinel on its own line."""
        printed = b" " if self._tail.endswith(_SENTINEL) else b""
        mark = _MARK if self._ended_line else printed + b"\n" + _MARK
        self._used, self._dropping, self._ended_line, self._tail = 0, False, True, b""
        return mark

    def _without_marks(self, data: bytes) -> tuple[bytes, bytes]:
        """Return ``data`` without lines that end as a run does, and the last bytes after it.  A mark may have begun in
        the data before."""
        whole = (self._tail + data).replace(_MARK, _PRINTED_MARK)
        return whole[len(self._tail) :], whole[-len(_SENTINEL) :]


class Drain:
    """Copies ``source``, a pipe, to ``target`` through a limiter.  Not thread-safe."""

    def __init__(self, source: int, target: int) -> None:
        self.source, self.target = source, target
        self._limiter = LineLimiter()
        self._kept: bytes | None = b""

    @property
    def kept(self) -> str:
        """Return the end of the output so far, while it is kept."""
        kept = self._kept or b""
        return (kept if len(kept) <= KEPT_BYTES else _CUT + kept[-KEPT_BYTES:]).decode("utf-8", "replace")

    def keep_no_more(self) -> None:
        self._kept = None

    def some(self) -> bool:
        """Copy the data of one read, which blocks while the pipe is empty.  Return False if the stream has ended."""
        try:
            data = os.read(self.source, _READ_BYTES)
        except OSError:
            return False
        if self._kept is not None:
            self._kept = (self._kept + data)[-KEPT_BYTES - 1 :]  # one more says that there was more
        write_all(self.target, self._limiter.feed(data))
        return bool(data)

    def end_run(self) -> None:
        """Copy the data that is in the pipe now, then write the sentinel."""
        left = self._waiting()
        kept = []
        while left > 0 and (data := os.read(self.source, min(left, _READ_BYTES))):
            kept.append(self._limiter.feed(data))
            left -= len(data)
        write_all(self.target, b"".join(kept) + self._limiter.end_run())

    def _waiting(self) -> int:
        n_bytes: int = struct.unpack("i", fcntl.ioctl(self.source, termios.FIONREAD, b"\0\0\0\0"))[0]
        return n_bytes


def write_all(fd: int, data: bytes) -> None:
    """Write all of ``data``.  Ignore errors: a log that cannot be written (a full disk) must not stop the function."""
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:
        return

"""Connections that the readers of a fetch use in turns, and the rule for giving up a slow one.

The connections to a store are not equally fast: one of them may lose packets, or lead to a server that hangs.  The
chunk that it carries holds up the watermark, although the others read on.  So the reader of another connection, which
has just read a chunk or finds none to read, gives its connection to the reader of the slow one::

    connection A   [chunk 0 ...................✂                               the rest is asked for on B
    connection B   [chunk 1  ][chunk 3  ][chunk 5  ][rest of chunk 0 ]         the reader of B makes a new connection

No byte that has arrived is asked for again.  The bytes that the network still carries for A are lost.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from typing import Final

from fetchd.sources.base import Connection, Source, Target
from thaw.model import CHUNK_BYTES

_CHUNKS: Final = 1.5
"""A connection is slow if another one can read this many chunks before it has read one.  Connections that share a
link evenly differed by less (docs/decisions/0058)."""
_PATIENCE_S: Final = 0.5
"""On a fast link chunks take milliseconds, and a new connection or a busy processor costs more than a slow read."""
_LITTLE: Final = 0.25
"""When no more than this part of a chunk is left, the rest is there before another connection has asked for it."""


@dataclass(slots=True)
class Read:
    """A read from the store, which may be given another connection."""

    target: Target
    n_bytes: int
    began_s: float  # moved on by the time in which the pacer held the read back
    n_handed_over: int  # how often the chunk has been given another connection
    is_held_back: bool = False  # by the pacer, now

    def overdue_in_s(self, chunk_s: float, now_s: float) -> float:
        """Return the seconds until a connection that needs ``chunk_s`` for a chunk should continue this read: 0.0 if it
        should now, infinity if never.

        The patience doubles with every connection: the object itself may be slow to come.
        """
        patience_s = max(_PATIENCE_S, _CHUNKS * chunk_s) * 2.0**self.n_handed_over
        if self.is_held_back:
            return patience_s
        left_s = self.began_s + patience_s - now_s
        if left_s > 0:
            return left_s
        return 0.0 if self.target.left > _LITTLE * self.n_bytes else math.inf


class SharedConnection:
    """A connection that is made when it is needed.  The reader that holds ``turn`` uses it; any thread may interrupt
    it."""

    def __init__(self, source: Source) -> None:
        self.turn = threading.Lock()
        self.chunk_s = math.inf
        """The time that a chunk takes, from the last read; infinite for a connection that has read nothing yet."""
        self._source = source
        self._lock = threading.Lock()
        self._connection: Connection | None = None

    def get(self) -> Connection:
        with self._lock:
            if self._connection is None:
                self._connection = self._source.connect()
            return self._connection

    def has(self, connection: Connection) -> bool:
        """Return False if ``connection`` was given up."""
        return self._connection is connection

    def note_read(self, n_bytes: int, began_s: float) -> None:
        if n_bytes >= CHUNK_BYTES // 2:  # the answer to a short request says little about the rate
            self.chunk_s = (time.monotonic() - began_s) * CHUNK_BYTES / n_bytes

    def give_up(self) -> None:
        """Make the read on this connection fail now, and the next one use a new connection.  The thread whose read
        fails closes the old one."""
        with self._lock:
            if self._connection is not None:
                self._connection.interrupt()
            self._connection, self.chunk_s = None, math.inf

    def interrupt(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.interrupt()

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection, self.chunk_s = None, math.inf

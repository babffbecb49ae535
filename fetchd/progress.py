"""What one fetch has read so far: its counts, for its readers, its status and its trace."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from fetchd import metrics
from fetchd.chunks import Chunk
from thaw.tracing.trace import Phase, TraceEvent, event


@dataclass(slots=True)
class Statistics:
    fetched_bytes: int = 0  # from the store
    copied_bytes: int = 0  # from other segments
    retries: int = 0
    refetched: int = 0
    slow_connections: int = 0  # given up, because another one was much faster
    cpu_s: float = 0.0
    first_byte: TraceEvent | None = None
    last_reader: dict[str, object] = field(default_factory=dict)  # the account of the connection that read last


class Progress:
    """Thread-safe."""

    def __init__(self, source: str, chunks: Sequence[Chunk]) -> None:
        self.statistics = Statistics()
        self._lock = threading.Lock()
        self._fetched = metrics.BYTES.labels(source=source)
        self._copied = metrics.BYTES.labels(source="memory")
        self._first_left = sum(c.n_bytes for c in chunks if not c.later)
        self._later_left = sum(c.n_bytes for c in chunks if c.later)

    @property
    def pending_bytes(self) -> tuple[int, int]:
        """The numbers of bytes that have not arrived yet: those of the first part, and those of the later part."""
        return max(self._first_left, 0), max(self._later_left, 0)

    def count(self, chunk: Chunk, n_bytes: int, *, copied: bool = False) -> None:
        """Record that ``n_bytes`` of ``chunk`` are in the segment; a negative number takes damaged bytes back."""
        with self._lock:
            if chunk.later:
                self._later_left -= n_bytes
            else:
                self._first_left -= n_bytes
            if n_bytes < 0:
                return
            if self.statistics.first_byte is None:
                self.statistics.first_byte = event(Phase.FETCH_FIRST_BYTE)
            if copied:
                self.statistics.copied_bytes += n_bytes
            else:
                self.statistics.fetched_bytes += n_bytes
        (self._copied if copied else self._fetched).inc(n_bytes)

    def count_retry(self) -> None:
        with self._lock:
            self.statistics.retries += 1

    def count_refetch(self) -> None:
        with self._lock:
            self.statistics.refetched += 1

    def count_slow_connection(self) -> None:
        with self._lock:
            self.statistics.slow_connections += 1
        metrics.SLOW_CONNECTIONS.inc()

    def count_cpu(self, seconds: float) -> None:
        with self._lock:
            self.statistics.cpu_s += seconds

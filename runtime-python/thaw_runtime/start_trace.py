"""The trace events of one start, collected where the work happens and sent with its outcome."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from thaw.trace import Phase, TraceEvent, event

_SCHEDSTAT: Final = Path("/proc/thread-self/schedstat")  # ns on a core, ns waiting for one, time slices
_WORTH_SAYING_S: Final = 0.001


@dataclass(slots=True)
class PhaseNotes:
    """What a phase learns while it runs; goes on its end event."""

    n_bytes: int | None = None
    attrs: dict[str, object] = field(default_factory=dict)


class Busy:
    """What this thread's time has gone into since this was made."""

    def __init__(self) -> None:
        self._cpu_s, self._core_wait_s = time.thread_time(), _core_wait_s()

    def attrs(self) -> dict[str, float]:
        """CPU seconds, and seconds in which it was ready and another ran."""
        cpu_s, core_wait_s = time.thread_time() - self._cpu_s, _core_wait_s() - self._core_wait_s
        waited = {"core_wait_s": round(core_wait_s, 4)} if core_wait_s > _WORTH_SAYING_S else {}
        return {"cpu_s": round(cpu_s, 4)} | waited


class Asleep:
    """Seconds in which a thread neither computed nor was ready to: it waited for something else, which a phase names.

    What ``phase`` says of the same thread (CPU seconds, waiting for a core) is not in it, so the three may be added.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        began, busy_s = time.monotonic(), time.thread_time() + _core_wait_s()
        try:
            yield
        finally:
            busy_s = time.thread_time() + _core_wait_s() - busy_s
            self.seconds += max(0.0, time.monotonic() - began - busy_s)


class StartTrace:
    """Thread-safe: the text side and the engine write side by side."""

    def __init__(self, *, group_id: str = "", stage: int = 0, host: str = "", activation_id: str = "") -> None:
        self._labels = {"group_id": group_id, "host": host, "activation_id": activation_id}
        self._stage = stage
        self._events: list[TraceEvent] = []
        self._lock = threading.Lock()

    def mark(self, name: Phase, *, n_bytes: int | None = None, attrs: dict[str, object] | None = None) -> None:
        made = event(name, stage=self._stage, n_bytes=n_bytes, attrs=attrs, **self._labels)
        with self._lock:
            self._events.append(made)

    @contextmanager
    def phase(self, begin: Phase) -> Iterator[PhaseNotes]:
        """Begin now; the matching end when the block is left, by an error too.

        The end says what this thread's time went into: CPU seconds, and seconds it waited for a core.
        """
        notes = PhaseNotes()
        self.mark(begin)
        busy = Busy()
        try:
            yield notes
        finally:
            notes.attrs |= busy.attrs()
            self.mark(Phase(begin.value.replace(".begin", ".end")), n_bytes=notes.n_bytes, attrs=notes.attrs)

    def extend(self, events: tuple[TraceEvent, ...]) -> None:
        with self._lock:
            self._events.extend(events)

    def adopt(self, events: tuple[TraceEvent, ...]) -> None:
        """Events written before it was known what they belong to."""
        group_id, host = self._labels["group_id"], self._labels["host"]
        self.extend(tuple(replace(e, stage=self._stage, group_id=group_id, host=host) for e in events))

    @property
    def events(self) -> tuple[TraceEvent, ...]:
        with self._lock:
            return tuple(self._events)


def _core_wait_s() -> float:
    """How long this thread was ready to run and another ran; 0 where the kernel does not count it."""
    try:
        return int(_SCHEDSTAT.read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0

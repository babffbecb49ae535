"""The trace events of one start, collected where the work happens and sent with its outcome."""

from __future__ import annotations

import os
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
        self._began, self._cpu_s, self._core_wait_s = time.monotonic(), time.thread_time(), _core_wait_s()

    def attrs(self, asleep: str = "") -> dict[str, float]:
        """CPU seconds, and seconds in which it was ready and another ran.

        ``asleep`` names what the thread can only have slept for, if there is but one such thing.
        """
        cpu_s, core_wait_s = time.thread_time() - self._cpu_s, _core_wait_s() - self._core_wait_s
        asleep_s = time.monotonic() - self._began - cpu_s - core_wait_s
        found = {"core_wait_s": core_wait_s, **({asleep: asleep_s} if asleep else {})}
        return {"cpu_s": round(cpu_s, 4)} | {k: round(v, 4) for k, v in found.items() if v > _WORTH_SAYING_S}


class Asleep:
    """Seconds in which a thread neither computed nor was ready to: it waited for something else, which a phase names.

    What ``phase`` says of the same thread (CPU seconds, waiting for a core) is not in it, so the three may be added.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._account = _Account()

    @contextmanager
    def counted(self) -> Iterator[None]:
        began, busy_s = time.monotonic(), self._account.busy_s()
        try:
            yield
        finally:
            busy_s = self._account.busy_s() - busy_s
            self.seconds += max(0.0, time.monotonic() - began - busy_s)


class _Account:
    """The kernel's of the thread that makes this; kept open, for opening costs ten times what reading does."""

    def __init__(self) -> None:
        try:
            self._fd = os.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = -1

    def busy_s(self) -> float:
        """On a core, or ready to be."""
        return time.thread_time() + (_waited_s(os.pread(self._fd, 80, 0)) if self._fd >= 0 else 0.0)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


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
        return _waited_s(_SCHEDSTAT.read_bytes())
    except OSError:
        return 0.0


def _waited_s(schedstat: bytes) -> float:
    """0 for what is not three numbers: a kernel that does not count."""
    fields = schedstat.split()
    return int(fields[1]) / 1e9 if len(fields) == 3 else 0.0

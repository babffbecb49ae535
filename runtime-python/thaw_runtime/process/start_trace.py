"""The trace events of one start, collected by the process that does the work and sent with the start's outcome."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

from relay.thread_account import ThreadAccount
from thaw.tracing.trace import Phase, TraceEvent, event
from thaw_runtime.process.thread_accounts import Delays

_WORTH_SAYING_S: Final = 0.001


@dataclass(slots=True)
class PhaseNotes:
    """Values that a phase learns while it runs; they are written into its end event."""

    n_bytes: int | None = None
    attrs: dict[str, object] = field(default_factory=dict)


class Busy:
    """How this thread has spent its time since this object was made."""

    def __init__(self) -> None:
        self._account = ThreadAccount()
        self._spent = self._account.spent()

    def attrs(self) -> dict[str, float]:
        """CPU seconds, and seconds in which this thread was ready but another thread ran."""
        cpu_s, core_wait_s = (now - then for now, then in zip(self._account.spent(), self._spent, strict=True))
        found = {"cpu_s": round(cpu_s, 4)}
        return found | ({"core_wait_s": round(core_wait_s, 4)} if core_wait_s > _WORTH_SAYING_S else {})


class StartTrace:
    """The trace of one start.  It is thread-safe, because the text side and the engine write at the same time."""

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
        """Write the begin event now, and the matching end event when the block is left, also by an error.

        The end event says how this thread spent its time: CPU seconds, seconds in which it waited for a core or for a
        disk, and CPU seconds of the programs that it ran.
        """
        notes = PhaseNotes()
        self.mark(begin)
        busy, delays = Busy(), Delays.now()
        try:
            yield notes
        finally:
            notes.attrs |= busy.attrs() | Delays.now().since(delays)
            self.mark(Phase(begin.value.replace(".begin", ".end")), n_bytes=notes.n_bytes, attrs=notes.attrs)

    def began_at(self, mono_ns: int, spent: tuple[float, float]) -> None:
        """Correct the trace's only phase, which began earlier in another thread, at ``mono_ns`` of the monotonic clock.

        ``spent`` holds the seconds in which that thread computed, and in which it waited for a core, until this thread
        continued the phase.
        """
        with self._lock:
            begin, end = self._events
            shift_ns = begin.mono_ns - mono_ns
            added = {"cpu_s": spent[0], "core_wait_s": spent[1]}
            attrs = {name: round(seconds + _number(end, name), 4) for name, seconds in added.items()}
            begin = replace(begin, mono_ns=mono_ns, wall_ns=begin.wall_ns - shift_ns)
            self._events = [begin, replace(end, attrs={**end.attrs, **attrs})]

    def extend(self, events: tuple[TraceEvent, ...]) -> None:
        with self._lock:
            self._events.extend(events)

    def adopt(self, events: tuple[TraceEvent, ...]) -> None:
        """Add events that were written before their group, host and activation were known."""
        group_id, host, activation_id = (self._labels[name] for name in ("group_id", "host", "activation_id"))
        self.extend(
            tuple(
                replace(e, stage=self._stage, group_id=group_id, host=host, activation_id=activation_id) for e in events
            )
        )

    @property
    def events(self) -> tuple[TraceEvent, ...]:
        with self._lock:
            return tuple(self._events)


def _number(e: TraceEvent, name: str) -> float:
    value = e.attrs.get(name)
    return float(value) if isinstance(value, int | float) else 0.0

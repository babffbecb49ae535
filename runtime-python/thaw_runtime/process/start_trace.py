"""The trace events of one start, collected where the work happens and sent with its outcome."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

from relay.thread_account import ThreadAccount
from thaw.trace import Phase, TraceEvent, event
from thaw_runtime.process.thread_accounts import Delays

_WORTH_SAYING_S: Final = 0.001


@dataclass(slots=True)
class PhaseNotes:
    """What a phase learns while it runs; goes on its end event."""

    n_bytes: int | None = None
    attrs: dict[str, object] = field(default_factory=dict)


class Busy:
    """What this thread's time has gone into since this was made."""

    def __init__(self) -> None:
        self._account = ThreadAccount()
        self._spent = self._account.spent()

    def attrs(self) -> dict[str, float]:
        """CPU seconds, and seconds in which it was ready and another ran."""
        cpu_s, core_wait_s = (now - then for now, then in zip(self._account.spent(), self._spent, strict=True))
        found = {"cpu_s": round(cpu_s, 4)}
        return found | ({"core_wait_s": round(core_wait_s, 4)} if core_wait_s > _WORTH_SAYING_S else {})


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

        The end says what this thread's time went into: CPU seconds, and seconds it waited for a core, for a disk and
        for programs that it ran.
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
        """Its one phase began earlier, on the monotonic clock, in another thread.  That has ``spent`` so many seconds
        computing, and waiting for a core, until this one went on with it."""
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
        """Events written before it was known what they belong to."""
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

"""Assigns log lines to activations by OpenWhisk's sentinel contract, from a container's two log files.

The k-th sentinel of a stream ends the lines of the k-th run that ended.  With a concurrency of 1 that is exact; with
runs at the same time, lines belong to the activation whose run ended there.  A container's output is bounded per
activation, and so are the number and the bytes of the activations whose lines are kept.  The output of a function while
it loads belongs to its first run, as in OpenWhisk.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, NamedTuple

from invoker.drivers.base import Handle, LogChunk

SENTINEL: Final = "XXX_THE_END_OF_A_WHISK_ACTIVATION_XXX"
LINE_BYTES: Final = len("2026-01-01T00:00:00.000000Z stdout: \n")
"""The bytes of a line beside its text.  They count too, or short lines would make a record many times the limit."""

KEPT_ACTIVATIONS: Final = 200
KEPT_LIMITS: Final = 2
"""This many times the function's limit is kept of its output on each stream (at least FILE_LIMIT_BYTES)."""

FILE_LIMIT_BYTES: Final = 1 << 20
"""A log file that was read to its end and is larger than this is emptied."""

STREAMS: Final = ("stdout", "stderr")
LATE_S: Final = 2.0
"""How long the lines of a run that has ended may still be on their way, where a driver copies them."""

Read = Callable[[Handle, str, int], LogChunk]
Truncate = Callable[[Handle, str], None]
More = Callable[[Handle, tuple[int, int], float], bool]


class SentinelSplitter:
    """Pure: bytes of one stream in, the lines of each ended run out."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._part = b""
        self._lines: list[str] = []
        self._used = 0

    def feed(self, data: bytes) -> list[list[str]]:
        ended: list[list[str]] = []
        *lines, self._part = (self._part + data).split(b"\n")
        for line in lines:
            text = line.decode("utf-8", "replace")
            if text.endswith(SENTINEL):
                self._add(text.removesuffix(SENTINEL))
                ended.append(self._lines)
                self._lines, self._used = [], 0
            else:
                self._add(text)
        if len(self._part) > self._limit:
            self._part = self._part[-len(SENTINEL) :]  # a line without end: only a sentinel still matters
        return ended

    def _add(self, text: str) -> None:
        if not text or self._used > self._limit:
            return
        self._used += len(text) + LINE_BYTES
        if self._used > self._limit:
            text = f"Logs were truncated because the total bytes size exceeds the limit of {self._limit} bytes."
        self._lines.append(text)


class _Output(NamedTuple):
    """The output of one run on one stream.  It is one string: a string for each short line would cost many times as
    much memory."""

    stamp: str
    text: str

    def lines(self, stream: str) -> list[str]:
        return [f"{self.stamp} {stream}: {line}" for line in self.text.split("\n")] if self.text else []


class LogCollector:
    """The lines of one container's runs."""

    def __init__(
        self,
        handle: Handle,
        read: Read,
        truncate: Truncate,
        limit_bytes: int,
        more: More = lambda *_: False,
        *,
        of_image: bool = False,
    ) -> None:
        """``of_image``: the container's own image writes the marks, and not Thaw's proxy, which lets no function print
        one (thaw_runtime/action/streams.py)."""
        self._of_image = of_image
        self._handle, self._read, self._truncate, self._more = handle, read, truncate, more
        self._lock = threading.Condition(threading.Lock())  # notified when a run has ended
        self._running: set[str] = set()
        self._cursors = dict.fromkeys(STREAMS, 0)
        self._limit = limit_bytes
        self._most_bytes = max(KEPT_LIMITS * limit_bytes, FILE_LIMIT_BYTES)
        self._splitters = {name: SentinelSplitter(limit_bytes) for name in STREAMS}
        # bounded, because a function may print sentinels itself, or close a stream
        self._unclaimed: dict[str, deque[str]] = {name: deque(maxlen=KEPT_ACTIVATIONS) for name in STREAMS}
        self._waiting: dict[str, deque[str]] = {name: deque(maxlen=KEPT_ACTIVATIONS) for name in STREAMS}
        self._kept: OrderedDict[str, dict[str, _Output]] = OrderedDict()
        self._kept_bytes = 0

    def skip(self) -> None:
        """Skip the present output: it belongs to an earlier invoker's runs."""
        with self._lock:
            for name in STREAMS:
                self._drain(name, "")
                self._unclaimed[name].clear()
                self._splitters[name] = SentinelSplitter(self._limit)

    def run_began(self, activation_id: str) -> None:
        """A reader of the run's lines waits from now until the run has ended: a gateway that hung up may ask for them
        before this host notes the end.

        An image of somebody else's lets its function print marks.  What no run has claimed by now is dropped, or each
        later run would have the lines of the one before, which may be another tenant's."""
        with self._lock:
            if self._of_image and not self._running:
                for name in STREAMS:
                    self._drain(name, "")
                    if not self._waiting[name]:
                        self._unclaimed[name].clear()
            self._running.add(activation_id)

    def run_lost(self, activation_id: str) -> None:
        """The run ended without a sentinel."""
        with self._lock:
            self._running.discard(activation_id)
            self._lock.notify_all()

    def run_ended(self, activation_id: str) -> None:
        """Call this in the order in which runs end."""
        with self._lock:
            self._running.discard(activation_id)
            self._lock.notify_all()
            self._forget(activation_id)
            self._kept[activation_id] = {}
            if len(self._kept) > KEPT_ACTIVATIONS:
                self._forget(next(iter(self._kept)))
            for name in STREAMS:
                self._waiting[name].append(activation_id)

    def lines(self, activation_id: str, deadline: float | None = None) -> list[str]:
        """Lines ``2026-01-01T00:00:00.000Z stdout: text``, stdout first, that have arrived or arrive until ``deadline``
        of the monotonic clock (LATE_S from now if None)."""
        deadline = time.monotonic() + LATE_S if deadline is None else deadline
        with self._lock:
            self._lock.wait_for(lambda: activation_id not in self._running, max(0.0, deadline - time.monotonic()))
        while True:
            with self._lock:
                for name in STREAMS:
                    self._drain(name, activation_id)
                streams = dict(self._kept.get(activation_id, {}))
                cursors = (self._cursors["stdout"], self._cursors["stderr"])
                whole = len(streams) == len(STREAMS) or activation_id not in self._kept
            if whole or not self._more(self._handle, cursors, deadline - time.monotonic()):
                return [line for name in STREAMS if name in streams for line in streams[name].lines(name)]

    def _drain(self, name: str, wanted: str) -> None:
        while (chunk := self._read(self._handle, name, self._cursors[name])).data:
            self._cursors[name] = chunk.cursor
            self._unclaimed[name].extend("\n".join(lines) for lines in self._splitters[name].feed(chunk.data))
            self._assign(name, wanted)
        self._assign(name, wanted)
        if self._cursors[name] > FILE_LIMIT_BYTES:
            self._truncate(self._handle, name)
            self._cursors[name] = 0

    def _assign(self, name: str, wanted: str) -> None:
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f") + "Z"
        while self._unclaimed[name] and self._waiting[name]:
            activation_id, text = self._waiting[name].popleft(), self._unclaimed[name].popleft()
            streams = self._kept.get(activation_id)
            if streams is not None and name not in streams:
                streams[name] = _Output(stamp, text)
                self._kept_bytes += len(text)
        self._let_go(name, wanted)

    def _let_go(self, name: str, wanted: str) -> None:
        """Drop the oldest output beyond the limits, except that of the activation that is ``wanted`` now."""
        while sum(map(len, self._unclaimed[name])) > self._most_bytes:
            self._unclaimed[name].popleft()
        if self._kept_bytes > len(STREAMS) * self._most_bytes:
            for activation_id in [i for i, streams in self._kept.items() if streams and i != wanted]:
                self._forget(activation_id)
                if self._kept_bytes <= len(STREAMS) * self._most_bytes:
                    return

    def _forget(self, activation_id: str) -> None:
        """Drop an activation's output.  It is kept until then, because a state server that was restarted may have lost
        the lines, and then they are asked for again."""
        self._kept_bytes -= sum(len(output.text) for output in self._kept.pop(activation_id, {}).values())


A_TRACEBACK: Final = (200, 32_768)
"""Lines and bytes that hold the traceback of a failed start."""


def last_lines(handle: Handle, n_lines: int = 5, n_bytes: int = 4096, *, of_last_run: bool = False) -> str:
    """The end of a container's stderr.  ``of_last_run``: without the lines of runs that have ended."""
    try:
        with handle.stderr.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - n_bytes))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    text = text.rpartition(SENTINEL)[2] if of_last_run else text
    lines = [line for line in text.splitlines() if line.strip() and SENTINEL not in line]
    return "\n".join(lines[-n_lines:])

"""Reports how long a start's first answer took, on a thread of its own: no first token waits for the state server."""

from __future__ import annotations

import queue
from typing import Final

import redis

from gateway.serving.call import Call
from gateway.serving.outcome import start_mode
from relay.state import starts
from thaw.errors import PlatformError
from thaw.ids import ActionName
from thaw.logs import Log
from thaw.process.lasting import LastingThread
from thaw.standing import ColdStart
from thaw.tracing.trace import Phase

_MOST: Final = 256
"""The most reports that wait while the state server is away.  Further ones are dropped: a later start is reported in
their place."""


class ColdStarts:
    def __init__(self, client: redis.Redis, log: Log) -> None:
        self._client, self._log = client, log
        self._told: queue.Queue[tuple[ActionName, ColdStart] | None] = queue.Queue(_MOST)
        self._thread = LastingThread(self._run, "cold-starts")

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        try:
            self._told.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def note(self, call: Call) -> None:
        """``call`` waited for the start of its instance, and has just had its first token."""
        first = next(e for e in reversed(call.events) if e.name is Phase.FIRST_TOKEN)
        took_ms = max(0, round(first.mono_ns / 1e6 - call.received_s * 1e3))
        start = ColdStart(call.received_ms, took_ms, start_mode(call))
        try:
            self._told.put_nowait((call.action.served_by, start))
        except queue.Full:
            self._log.event("start_not_told", activation_id=call.activation_id, error="too many wait")

    def _run(self) -> None:
        while (told := self._told.get()) is not None:
            try:
                starts.cold_started(self._client, *told)
            except PlatformError as e:
                self._log.event("start_not_told", action=told[0], error=e.message)

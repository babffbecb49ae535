"""Writes records and traces behind the answers, so that no client waits for the state server.

A blocking call's record may be lost with the process (its client has the answer); a 202's is written by its runner
before its entry is acknowledged (async_runner.py).  Reads of this gateway see what is still in the queue.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import Any, Final

from gateway.calls import Call
from gateway.hangup import ClientGone
from gateway.link import InvokerPool
from gateway.outcome import activation_of
from gateway.runs import Outcome
from relay.records import Records
from thaw.activation import Activation
from thaw.errors import PlatformError, ThawError
from thaw.logs import Log
from thaw.trace import Phase

_WRITERS: Final = 2
_BACKLOG: Final = 20_000
"""Records held while the state server is away; those beyond it are dropped and said so."""
_RETRY_S: Final = 0.5
_KEPT_S: Final = 60.0
_LOGS_S: Final = 2.0


class Recorder:
    def __init__(self, records: Records, pool: InvokerPool, log: Log) -> None:
        self._records, self._pool, self._log = records, pool, log
        self._queue: queue.Queue[tuple[Call, Outcome, bytes | None] | None] = queue.Queue(_BACKLOG)
        self._unwritten = 0
        self._settled = threading.Condition()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, name="recorder", daemon=True) for _ in range(_WRITERS)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float) -> None:
        """Write what is queued, within the time given."""
        self.settle(timeout_s)
        self._stop.set()
        for _ in self._threads:
            self._queue.put(None)

    def submit(self, call: Call, outcome: Outcome, pending_entry: bytes | None = None) -> None:
        """Queue the record; it is written over a restart of the state server."""
        _complete(call, outcome)
        with self._settled:
            self._unwritten += 1
        try:
            self._queue.put_nowait((call, outcome, pending_entry))
        except queue.Full:
            self._done()
            self._log.event("record_dropped", activation_id=call.activation_id)

    def settle(self, timeout_s: float) -> None:
        """Wait until everything submitted is written, so that a client finds the record of the answer it has."""
        with self._settled:
            self._settled.wait_for(lambda: self._unwritten == 0, timeout_s)

    def write(self, call: Call, outcome: Outcome, pending_entry: bytes | None = None) -> Activation:
        """Trace, then record (whoever sees the record finds its trace).  Raises Unavailable, PlatformError."""
        record = activation_of(call, outcome, self._logs(call))
        self._records.add_trace(call.activation_id, call.events)
        self._records.end(record, pending_entry=pending_entry)
        return record

    def end_pending(self, call: Call, outcome: Outcome, pending_entry: bytes) -> None:
        """The record of a 202, written before this returns.  Raises Unavailable, PlatformError."""
        _complete(call, outcome)
        self.write(call, outcome, pending_entry)

    def _logs(self, call: Call) -> tuple[str, ...]:
        """The lines an ordinary function printed; an LLM container's are the host's own."""
        if call.action.is_llm or call.instance is None or call.dispatched_ms is None:
            return ()
        path = f"/instances/{call.instance.instance_id}/logs?activation_id={call.activation_id}"
        try:
            plain: Any = self._pool.get_json(call.instance.address, path, timeout_s=_LOGS_S)
            return tuple(map(str, plain.get("logs", ()))) if isinstance(plain, dict) else ()
        except (ThawError, ClientGone) as e:
            self._log.event("logs_lost", activation_id=call.activation_id, error=e.message)
            return ("The logs of this activation could not be collected.",)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            deadline_s = time.monotonic() + _KEPT_S
            try:
                self._write_until(*item, deadline_s)
            finally:
                self._done()

    def _write_until(self, call: Call, outcome: Outcome, entry: bytes | None, deadline_s: float) -> None:
        """Over a restart of the state server."""
        late = False
        while True:
            try:
                self.write(call, outcome, entry)
                if late:
                    self._log.event("recorded_late", activation_id=call.activation_id)
                return
            except PlatformError as e:
                late = True
                if self._stop.wait(_RETRY_S) or time.monotonic() > deadline_s:
                    self._log.event("record_lost", activation_id=call.activation_id, error=e.message)
                    return

    def _done(self) -> None:
        with self._settled:
            self._unwritten -= 1
            if self._unwritten == 0:
                self._settled.notify_all()


def _complete(call: Call, outcome: Outcome) -> None:
    if any(e.name is Phase.FINISHED for e in call.events):
        return
    if outcome.finished is not None:
        call.events.extend(outcome.finished.events)
    call.trace(Phase.FINISHED, {"status": outcome.status.text})

"""Blocking invocations of /api/v1: answered when they end, or as a 202 when the client has waited long enough.

The run has a thread of its own, so that it goes on when its request has been answered.  The 202 is as good as any: the
activation is made durable first, owned by this gateway; should it die, another one ends it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from gateway.calls import Call
from gateway.recorder import Recorder
from gateway.runs import Outcome
from relay.records import Pending, Records
from thaw.errors import PlatformError
from thaw.ids import GatewayId


@dataclass(slots=True, eq=False)
class _Run:
    call: Call
    lock: threading.Lock = field(default_factory=threading.Lock)
    handing_over: bool = False
    outcome: Outcome | None = None
    entry: bytes | None = None


class BlockingRuns:
    def __init__(
        self, execute: Callable[[Call], Outcome], recorder: Recorder, records: Records, gateway: GatewayId,
        threads: int,
    ) -> None:  # fmt: skip
        self._execute, self._recorder, self._records, self._gateway = execute, recorder, records, gateway
        self._pool = ThreadPoolExecutor(threads, "blocking")

    def run(self, call: Call, wait_s: float) -> Outcome | None:
        """The outcome, or None when it became a 202.  Raises Unavailable when it could not become one."""
        run = _Run(call)
        future = self._pool.submit(self._to_end, run)
        try:
            return future.result(wait_s)
        except TimeoutError:
            return self._hand_over(run)

    def stop(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _to_end(self, run: _Run) -> Outcome:
        outcome = self._execute(run.call)
        with run.lock:
            run.outcome = outcome
            mine = not run.handing_over or run.entry is not None
        if mine:
            self._record(run, outcome)
        return outcome

    def _hand_over(self, run: _Run) -> Outcome | None:
        with run.lock:
            if run.outcome is not None:
                return run.outcome
            run.handing_over = True
        entry = None
        try:
            entry = self._accept(run.call)
        finally:
            with run.lock:
                run.entry, outcome = entry, run.outcome
                run.handing_over = entry is not None
            if outcome is not None:  # it ended meanwhile and left the record to us
                self._record(run, outcome)
        return None

    def _accept(self, call: Call) -> bytes:
        if not call.action.idempotent:
            self._records.mark_started(call.activation_id, self._gateway)
        return self._records.accept(pending_of(call), self._gateway)

    def _record(self, run: _Run, outcome: Outcome) -> None:
        if run.entry is None:
            self._recorder.submit(run.call, outcome)
            return
        try:
            self._recorder.end_pending(run.call, outcome, run.entry)
        except PlatformError:
            self._recorder.submit(run.call, outcome, run.entry)


def pending_of(call: Call) -> Pending:
    return Pending(
        call.activation_id, call.subject.namespace, call.subject.subject, call.action.name, call.action.version,
        call.payload, call.received_ms, call.seed or 0, call.endpoint,
    )  # fmt: skip

"""Blocking invocations of /api/v1: answered when they end, or as a 202 when the client has waited long enough.

A request's thread runs its call as long as no step takes longer than the client waits.  A run with such a step (a cold
start, a slow function) goes on in a thread of its own, and is not disturbed when its request has been answered.  This
202 is as good as any: the activation is made durable first, owned by this gateway, and if this gateway dies, another
one ends it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field

from gateway.processor import another_thread, waiting
from gateway.serving.call import Call
from gateway.serving.execute import Steps, to_end
from gateway.serving.recorder import Recorder
from gateway.serving.routing.invoker_pool import Reply
from gateway.serving.routing.throttle import Place
from gateway.serving.runs import Outcome
from relay.state.records import Pending, Records
from relay.state.registry import Registry
from thaw.errors import PlatformError
from thaw.ids import GatewayId


@dataclass(slots=True, eq=False)
class _Run:
    call: Call
    steps: Steps
    lock: threading.Lock = field(default_factory=threading.Lock)
    handing_over: bool = False
    outcome: Outcome | None = None
    entry: bytes | None = None


class BlockingRuns:
    def __init__(
        self,
        steps: Callable[[Call], Steps],
        recorder: Recorder,
        records: Records,
        registry: Registry,
        gateway: GatewayId,
        threads: int,
    ) -> None:
        """``threads``: for all runs whose requests hold a thread, and all that have left theirs (throttle.py)."""
        self._steps, self._recorder, self._gateway = steps, recorder, gateway
        self._records, self._registry = records, registry
        self._pool = ThreadPoolExecutor(threads, "blocking")

    def run(self, call: Call, wait_s: float, counted: ExitStack, place: Place) -> Outcome | None:
        """Return the outcome, or None when the call became a 202.  Raises Unavailable when it could not become one.
        ``counted`` holds the caller's counts of the call; a run that goes on here takes them over and closes them at
        its end.  One of them is ``place``, which a run that outlasts its request gives back before."""
        run = _Run(call, self._steps(call))
        until_s = time.monotonic() + wait_s
        outcome = self._run_here(run, until_s)
        if outcome is not None:
            return outcome
        future = self._pool.submit(self._run_on, run, counted.pop_all(), another_thread() or nullcontext())
        try:
            with waiting():
                return future.result(max(0.0, until_s - time.monotonic()))
        except TimeoutError:
            try:
                return self._hand_over(run)
            finally:
                place.leave_thread()

    def stop(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run_here(self, run: _Run, until_s: float) -> Outcome | None:
        """Return the outcome, or None when the next step may take longer than the client waits."""
        while True:
            try:
                step = next(run.steps)
            except StopIteration as stop:
                outcome: Outcome = stop.value
                self._recorder.submit(run.call, outcome)
                return outcome
            if not isinstance(step, Reply) or not step.comes_within(until_s - time.monotonic()):
                return None

    def _run_on(self, run: _Run, counted: ExitStack, computing: AbstractContextManager[None]) -> Outcome:
        with computing:
            with counted:
                outcome = to_end(run.steps)
            return self._end(run, outcome)

    def _end(self, run: _Run, outcome: Outcome) -> Outcome:
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
            if outcome is not None:  # the run ended meanwhile and left the record to us
                self._record(run, outcome)
        return None

    def _accept(self, call: Call) -> bytes:
        self._registry.gateway_alive(self._gateway)  # a reader of the entry must find its owner alive
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
        call.activation_id,
        call.subject.namespace,
        call.subject.subject,
        call.action.name,
        call.action.version,
        call.payload,
        call.received_ms,
        call.seed or 0,
        call.endpoint,
        call.cause,
        call.binding,
        call.subject.digest,
        call.subject.until_ms,
        call.action.parameters if call.action.is_conductor else {},
    )

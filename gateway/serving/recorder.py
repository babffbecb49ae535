"""Writes records and traces after the answers, so that no client waits for the state server.

A blocking call's record may be lost with the process (its client has the answer); a 202's is written by its runner
before its entry is acknowledged (async_runner.py).  Reads at this gateway wait for the records still in the queue
(``settle``).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

from gateway.fair import FairQueue, may_have_more
from gateway.processor import waiting
from gateway.serving.call import Call
from gateway.serving.hangup import ClientGone
from gateway.serving.outcome import activation_of
from gateway.serving.routing.invoker_pool import InvokerPool
from gateway.serving.runs import Outcome
from relay.protocol.data_port_messages import LogsWanted, RunRef
from relay.state.records import Ended, Records
from relay.state.storage import expected_bytes
from thaw import wire
from thaw.activation import ActivationStatus
from thaw.errors import PlatformError, ThawError, WorkerLost
from thaw.ids import Namespace
from thaw.logs import Log
from thaw.process.lasting import LastingThread
from thaw.tracing.trace import Phase

_BATCH: Final = 512
"""The most records written together, under load; a single one waits for no others.  The number is so large that a host
whose logs are late with every batch (_LOGS_S) does not cause a backlog of all records."""
_BACKLOG: Final = 20_000
"""Records held while the state server is away; those beyond it are dropped, and the log says so.  One namespace has at
most seven times as many as are left to others.  The records of 202s are promised, and each was accepted by a state
server that answered: they are held beyond it, too."""
_RETRY_S: Final = 0.5
_KEPT_S: Final = 60.0
_LOGS_S: Final = 3.0
"""An invoker waits up to two seconds for the end of an output."""
_HOSTS_AT_ONCE: Final = 16
"""The number of hosts that one batch asks for logs at once."""
_NO_LOGS: Final = ("The logs of this activation could not be collected.",)


@dataclass(slots=True, eq=False)
class _Item:
    call: Call
    outcome: Outcome
    pending_entry: bytes | None = None
    n_expected: int = 0  # bytes that count as long as they wait

    @property
    def namespace(self) -> Namespace:
        return self.call.subject.namespace

    @property
    def n_bytes(self) -> int:
        return expected_bytes(self.outcome.n_bytes or self.call.answer_bytes)


@dataclass(slots=True)
class _Progress:
    """The counts of one namespace, since nothing of it waited."""

    n_put: int = 0
    n_done: int = 0


class Recorder:
    def __init__(
        self,
        records: Records,
        pool: InvokerPool,
        log: Log,
        weight_of: Callable[[Namespace], float] = lambda _: 1.0,
        expect: Callable[[Namespace, int], None] = lambda _namespace, _n_bytes: None,
    ) -> None:
        """``weight_of``: a namespace's share of the turns, of those whose records wait to be written.  ``expect`` is
        told how many more bytes wait, or fewer."""
        self._records, self._pool, self._log, self._expect = records, pool, log, expect
        self._queue = FairQueue[Namespace, _Item](weight_of)
        self._droppable: Counter[Namespace] = Counter()  # among those in the queue
        self._progress: dict[Namespace, _Progress] = {}  # namespaces with records in the queue or being written
        self._lock = threading.Lock()
        self._filled, self._settled = threading.Condition(self._lock), threading.Condition(self._lock)
        self._stop = threading.Event()
        self._asking = ThreadPoolExecutor(_HOSTS_AT_ONCE, "recorder-logs")
        self._thread = LastingThread(self._run, "recorder")

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Write the queued records, within the time given."""
        self.settle(timeout_s)
        self._stop.set()
        with self._filled:
            self._filled.notify()

    def submit(self, call: Call, outcome: Outcome, pending_entry: bytes | None = None) -> None:
        """Queue the record.  It is written even if the state server restarts meanwhile."""
        _complete(call, outcome)
        self._put(_Item(call, outcome, pending_entry))

    def settle(self, timeout_s: float, namespace: Namespace | None = None) -> bool:
        """Wait until the records that the namespace has submitted so far are written, so that a client finds the record
        of the answer it has; without a namespace, until nothing waits.  False means that the time was too short."""
        with waiting(), self._settled:
            if namespace is None:
                return self._settled.wait_for(lambda: not self._progress, timeout_s)
            progress = self._progress.get(namespace, _Progress())
            n_before = progress.n_put
            return self._settled.wait_for(lambda: progress.n_done >= n_before, timeout_s)

    def end_pending(self, call: Call, outcome: Outcome, pending_entry: bytes) -> None:
        """Write the record of a 202 before returning.  Raises Unavailable, PlatformError."""
        _complete(call, outcome)
        self._write([_Item(call, outcome, pending_entry)])

    def _put(self, item: _Item) -> None:
        namespace = item.namespace
        with self._lock:
            is_kept = item.pending_entry is not None or may_have_more(
                self._droppable[namespace], _BACKLOG - self._droppable.total()
            )
            if is_kept:
                self._progress.setdefault(namespace, _Progress()).n_put += 1
                self._droppable[namespace] += item.pending_entry is None
                item.n_expected = item.n_bytes
                self._expect(namespace, item.n_expected)
                self._queue.put(namespace, item)
                self._filled.notify()
        if not is_kept:
            self._log.event("record_dropped", activation_id=item.call.activation_id)

    def _write(self, items: Sequence[_Item]) -> None:
        logs = self._logs(items)
        ended = [
            Ended(activation_of(i.call, i.outcome, lines), i.call.events, i.pending_entry)
            for i, lines in zip(items, logs, strict=True)
        ]
        of = {item.call.activation_id: item for item in items}

        def told(one: Ended) -> None:
            self._no_longer_expected(of[one.record.activation_id])

        try:
            self._records.end_all(ended, told)
        except RecursionError:
            self._records.end_all([_writable(one) for one in ended], told)

    def _no_longer_expected(self, item: _Item) -> None:
        n_bytes, item.n_expected = item.n_expected, 0
        if n_bytes:
            self._expect(item.namespace, -n_bytes)

    def _logs(self, items: Sequence[_Item]) -> list[tuple[str, ...]]:
        """Return the lines that ordinary functions printed.  An LLM container's lines are the host's own, but for
        those of a start that failed, which come with its error, and the last ones of a container that ended."""
        lines = [_of_failed_start(item.outcome) for item in items]
        calls = [item.call for item in items]
        asked: dict[str, list[tuple[int, RunRef]]] = {}
        for i, call in enumerate(calls):
            has_lines = not call.action.is_llm or isinstance(items[i].outcome.error, WorkerLost)
            if has_lines and not _mixes_tenants(call) and call.instance is not None and call.dispatched_ms is not None:
                ref = RunRef(call.instance.instance_id, call.activation_id)
                asked.setdefault(call.instance.address, []).append((i, ref))
        # mostly there is one host, and this thread asks it; several are asked at once, so none waits for another
        ask = self._asking.map if len(asked) > 1 else map
        answers = ask(self._ask, asked, [[ref for _, ref in refs] for refs in asked.values()])
        for refs, found in zip(asked.values(), answers, strict=True):
            for (i, _), of_run in zip(refs, found, strict=True):
                lines[i] = _NO_LOGS if of_run is None else of_run
        return lines

    def _ask(self, address: str, refs: Sequence[RunRef]) -> Sequence[tuple[str, ...] | None]:
        try:
            found = self._pool.logs(address, LogsWanted(tuple(refs)), timeout_s=_LOGS_S).logs
            if len(found) == len(refs):
                return found
            error = f"{len(found)} answers for {len(refs)} runs"
        except (ThawError, ClientGone) as e:
            error = e.message
        self._log.event("logs_lost", address=address, runs=len(refs), error=error)
        return [None] * len(refs)

    def _run(self) -> None:
        while batch := self._next():
            try:
                self._write_until(batch, time.monotonic() + _KEPT_S)
            finally:
                self._done(batch)
        self._asking.shutdown(wait=False)

    def _next(self) -> list[_Item]:
        """Wait for records; return those that wait now, by the turns of their namespaces, and none at the end."""
        found: list[_Item] = []
        with self._filled:
            self._filled.wait_for(lambda: len(self._queue) or self._stop.is_set())
            while len(found) < _BATCH and (item := self._queue.take()) is not None:
                self._droppable[item.namespace] -= item.pending_entry is None
                if not self._droppable[item.namespace]:
                    del self._droppable[item.namespace]
                found.append(item)
        return found

    def _write_until(self, batch: Sequence[_Item], deadline_s: float) -> None:
        """Write a batch, with further tries over a restart of the state server."""
        ids = [item.call.activation_id for item in batch]
        late = False
        while True:
            try:
                self._write(batch)
                if late:
                    self._log.event("recorded_late", activation_ids=ids)
                return
            except PlatformError as e:
                late = True
                if self._stop.wait(_RETRY_S) or time.monotonic() > deadline_s:
                    self._give_up(batch, e)
                    return
            except Exception as e:  # noqa: BLE001  these records must not end the writing of all others
                self._log.event("record_lost", activation_ids=ids, error=repr(e))
                return

    def _give_up(self, batch: Sequence[_Item], error: PlatformError) -> None:
        """Drop the records, except those of 202s: they are promised, so they are queued again.  If this gateway stops,
        another one ends their entries."""
        lost = [i for i in batch if i.pending_entry is None or self._stop.is_set()]
        if lost:
            ids = [item.call.activation_id for item in lost]
            self._log.event("record_lost", activation_ids=ids, error=error.message)
        for item in batch:
            if item not in lost:
                self._put(_Item(item.call, item.outcome, item.pending_entry))  # _done() counts the one of before

    def _done(self, batch: Sequence[_Item]) -> None:
        for item in batch:
            self._no_longer_expected(item)
        with self._settled:
            for item in batch:
                progress = self._progress[item.namespace]
                progress.n_done += 1
                if progress.n_done == progress.n_put:
                    del self._progress[item.namespace]
            self._settled.notify_all()


def _mixes_tenants(call: Call) -> bool:
    """Lines of runs at the same time are told apart by nothing.  The caller of somebody else's function gets none then,
    because they may be another caller's."""
    return call.action.limits.concurrency > 1 and call.subject.namespace != call.action.namespace


def _of_failed_start(outcome: Outcome) -> tuple[str, ...]:
    error = outcome.error
    if error is None or not (error.printed or error.printed_out):
        return ()
    stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    streams = (("stdout", error.printed_out), ("stderr", error.printed))
    return tuple(f"{stamp} {stream}: {line}" for stream, printed in streams for line in printed.splitlines())


def _writable(ended: Ended) -> Ended:
    """Return the record as it is, or without a result that is nested too deep to be written."""
    try:
        wire.dumps(ended.record)
    except RecursionError:
        result = {"error": "The action returned a result that is nested too deep to be recorded."}
        return replace(ended, record=replace(ended.record, status=ActivationStatus.DEVELOPER_ERROR, result=result))
    return ended


def _complete(call: Call, outcome: Outcome) -> None:
    if any(e.name is Phase.FINISHED for e in call.events):
        return
    if outcome.finished is not None:
        call.events.extend(outcome.finished.events)
    call.trace(Phase.FINISHED, {"status": outcome.status.text})

"""Instance records on their way to the registry: one thread, the newest record of each instance, in order.

Serving never waits for the state server.  A change of state is sent at once; a flip between idle and busy may wait for
a moment (FLIP_REST_S).  An instance that is known as busy is announced as idle only after it was idle for that time, so
a train of short requests causes one announcement and not two for each.  While the state server is away the newest
records are kept; they are sent when it is back.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Final

from relay.state.registry import Registry
from thaw.errors import PlatformError
from thaw.ids import InstanceId
from thaw.instance import InstanceRecord, InstanceState
from thaw.logs import Log
from thaw.process.lasting import LastingThread

FLIP_REST_S: Final = 0.1
_RETRY_S: Final = 0.5


class Publisher:
    def __init__(self, registry: Registry, log: Log) -> None:
        self._registry, self._log = registry, log
        self._changed = threading.Condition()
        self._due: dict[InstanceId, tuple[float, InstanceRecord]] = {}
        self._sent: dict[InstanceId, InstanceRecord] = {}
        self._asked: set[InstanceId] = set()  # their next records are sent though they may say nothing new
        self._closing = False
        self._busy = False
        self._sleeps_until = 0.0  # 0: the thread is awake and checks by itself
        self._thread = LastingThread(self._run, "publisher")
        self._thread.start()

    def put(self, record: InstanceRecord, *, flip: bool = False) -> None:
        with self._changed:
            now = time.monotonic()
            earlier = self._due.pop(record.instance_id, None)
            is_asked = record.instance_id in self._asked
            if flip and not self._busy and not is_asked and _same(self._sent.get(record.instance_id), record):
                return  # back to the record that was sent last
            due = now + FLIP_REST_S if flip else now
            if earlier is not None and not (flip and self._rests(record)):
                due = min(due, earlier[0])
            self._due[record.instance_id] = (due, record)
            if due < self._sleeps_until:
                self._changed.notify_all()

    def _rests(self, record: InstanceRecord) -> bool:
        """Whether the instance has just become idle and is known as busy."""
        sent = self._sent.get(record.instance_id)
        return record.idle_since_wall_ms is not None and sent is not None and sent.idle_since_wall_ms is None

    def flush(self, deadline_s: float) -> bool:
        """Send all waiting records now; return whether this was done within ``deadline_s``."""
        with self._changed:
            self._due = {i: (0.0, r) for i, (_, r) in self._due.items()}
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._due and not self._busy, deadline_s)

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(5)

    def _run(self) -> None:
        while (due := self._next()) is not None:
            record, is_asked = due
            try:
                if is_asked or not _same(self._sent.get(record.instance_id), record):
                    self._registry.put_instance(record)
                    self._remember(record)
            except PlatformError as e:
                self._log.event("publish_failed", instance_id=record.instance_id, error=e.message)
                self._again(record, is_asked=is_asked)
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _next(self) -> tuple[InstanceRecord, bool] | None:
        """The record that is due, and whether somebody asks for it."""
        with self._changed:
            while not self._closing:
                now = time.monotonic()
                due = min(((at, i) for i, (at, _) in self._due.items()), default=None)
                if due is not None and due[0] <= now:
                    self._busy = True
                    is_asked = due[1] in self._asked
                    self._asked.discard(due[1])
                    return self._due.pop(due[1])[1], is_asked
                self._sleeps_until = float("inf") if due is None else due[0]
                self._changed.wait(None if due is None else due[0] - now)
                self._sleeps_until = 0.0
            return None

    def _remember(self, record: InstanceRecord) -> None:
        if record.state is InstanceState.GONE:
            self._sent.pop(record.instance_id, None)
        else:
            self._sent[record.instance_id] = record

    def _again(self, record: InstanceRecord, *, is_asked: bool) -> None:
        with self._changed:
            if is_asked:
                self._asked.add(record.instance_id)
            if record.instance_id not in self._due:
                self._due[record.instance_id] = (time.monotonic() + _RETRY_S, record)

    def say_again(self, record: InstanceRecord) -> None:
        """Send a record though it may have been sent before, or is being sent now: somebody asks for it."""
        with self._changed:
            self._asked.add(record.instance_id)
            self.put(record)

    def forget_sent(self) -> None:
        """The state server may have lost the records that were sent: send each of them again when it is put again."""
        with self._changed:
            self._sent.clear()


def _same(sent: InstanceRecord | None, record: InstanceRecord) -> bool:
    """Whether ``record`` says nothing new.  The number of runs is no news unless the instance drains; the begin of an
    idle time is, for keep-alive."""
    if sent is None or record.state is InstanceState.GONE:
        return False
    if record.state is InstanceState.DRAINING:
        return sent == record
    return replace(sent, inflight=0) == replace(record, inflight=0)

"""What runs, starts and waits, and when that changes: the answers of a held request."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import defaultdict
from typing import Final

from relay.state.registry import Registry
from thaw import wire
from thaw.ids import ActionName, GroupId, Namespace
from thaw.instance import InstanceRecord, InstanceState
from thaw.work import Waiting, Work, Worker

_SETTLE_S: Final = 0.2
"""A start is several changes, and a burst thousands: what changes within this time is one answer."""


class WorkBook:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._changed = threading.Condition()
        self._n_changes = 0
        self._stopping = False

    def changed(self) -> None:
        """Called for every instance that changes, and for every request that begins or ends to wait."""
        with self._changed:
            self._n_changes += 1
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def now(self, namespace: Namespace | None) -> Work:
        """The namespace's part, or with None everything.  Raises Unavailable."""
        within = "" if namespace is None else f"{namespace}/"
        records = [r for r in self._registry.instances() if r.action and r.action.startswith(within)]
        waiting: dict[ActionName, list[int]] = defaultdict(list)
        for demand in self._registry.demand():
            if demand.action.startswith(within):
                waiting[demand.action].append(demand.queued_wall_ms)
        due_ms = self._due_ms() if any(r.state is InstanceState.STARTING for r in records) else {}
        return Work(
            tuple(
                _worker(r, due_ms.get(r.group_id))
                for r in sorted(records, key=lambda r: (r.action, r.group_id, r.stage, r.instance_id))
            ),
            tuple(Waiting(action, len(times), min(times)) for action, times in sorted(waiting.items())),
        )

    def wait(self, namespace: Namespace | None, known: str | None, wait_s: float) -> tuple[str, Work]:
        """Return the work and its mark, as soon as the mark is another than ``known``, or after ``wait_s``.  Raises
        Unavailable."""
        until_s = time.monotonic() + wait_s
        while True:
            with self._changed:
                n_changes = self._n_changes
            work = self.now(namespace)
            mark = hashlib.sha256(wire.dumps(work)).hexdigest()[:16]
            if mark != known:
                return mark, work
            with self._changed:
                left_s = max(0.0, until_s - time.monotonic())
                self._changed.wait_for(lambda n=n_changes: self._stopping or self._n_changes != n, left_s)  # type: ignore[misc]
                if self._stopping or self._n_changes == n_changes:
                    return mark, work
                self._changed.wait_for(lambda: self._stopping, _SETTLE_S)

    def _due_ms(self) -> dict[GroupId, int]:
        return {
            plan.group_id: plan.created_wall_ns // 1_000_000 + round(1000 * plan.predicted_ttft_s)
            for plan in self._registry.plans()
            if plan.predicted_ttft_s is not None
        }


def _worker(record: InstanceRecord, due_ms: int | None) -> Worker:
    return Worker(
        record.action,
        record.action_version,
        record.host_id,
        record.device,
        record.state,
        record.slots,
        record.stage,
        record.n_stages,
        record.created_wall_ms,
        record.idle_since_wall_ms,
        due_ms if record.state is InstanceState.STARTING else None,
    )

"""Tells an operator the instances and requests on a host that is being emptied, and when they change."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from gateway.processor import waiting
from relay.state.registry import Registry
from thaw.errors import NotFound
from thaw.host import HostLeft
from thaw.ids import ActionName, HostId
from thaw.instance import InstanceRecord, InstanceState


class HostDrains:
    """``is_llm`` tells what kind an action is of, and raises NotFound for one that was deleted."""

    def __init__(self, registry: Registry, is_llm: Callable[[ActionName], bool]) -> None:
        self._registry, self._is_llm = registry, is_llm
        self._changed = threading.Condition()
        self._n_changes = 0

    def instance_changed(self, record: InstanceRecord) -> None:
        """Called with every report; only those of instances that drain or have gone are news to a drain."""
        if record.state in (InstanceState.DRAINING, InstanceState.GONE):
            with self._changed:
                self._n_changes += 1
                self._changed.notify_all()

    def left(self, host_id: HostId) -> HostLeft:
        """Raises NotFound for a host that never reported, and Unavailable."""
        report = next((r for r in self._registry.hosts() if r.host_id == host_id), None)
        if report is None:
            raise NotFound(f"There is no host {host_id}.", hint="thaw host list")
        records = list(self._registry.instances())
        here = [r for r in records if r.host_id == host_id]
        groups = {r.group_id for r in here}
        moving = running = 0
        for head in (r for r in records if r.takes_requests and (r.group_id in groups)):
            if self._moves(head):
                moving += head.inflight
            else:
                running += head.inflight
        return HostLeft(report.draining, moving, running, len(here))

    def wait(self, host_id: HostId, known: HostLeft | None, wait_s: float) -> HostLeft:
        """Return the rest as soon as it differs from ``known``, or after ``wait_s``.  Raises as left()."""
        until_s = time.monotonic() + wait_s
        while True:
            with self._changed:
                n_changes = self._n_changes
            found = self.left(host_id)
            if found != known:
                return found
            with waiting(), self._changed:
                left_s = until_s - time.monotonic()
                if not self._changed.wait_for(lambda n=n_changes: self._n_changes != n, max(0.0, left_s)):  # type: ignore[misc]
                    return found

    def _moves(self, record: InstanceRecord) -> bool:
        try:
            return self._is_llm(record.action)
        except NotFound:  # its action was deleted, so its requests end where they are
            return False

"""The progress that a client reads while its model starts: the phase, with the numbers of the hosts' reports.

::

    InstanceChanged(STARTING) ──▶ groups that start ──one look a second──▶ reports of their hosts ──▶ notices of tickets

Hosts report once a second, so there is one look a second, and only while a group starts for which a request waits.
Otherwise the thread sleeps.  The estimate is the scheduler's prediction for the group, or the time that the fetch needs
for the remaining bytes at its present rate if that is longer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from gateway.serving.routing.waiting_room import WaitingRoom
from relay.state.registry import Registry
from thaw.errors import PlatformError
from thaw.host import FetchReport
from thaw.ids import ActionName, GroupId, HostId
from thaw.instance import InstanceRecord, InstanceState
from thaw.process.lasting import LastingThread

LOOK_S: Final = 1.0
_BEGUN_S: Final = 2.0
"""A fetch that no report has shown after so long was not necessary: the bytes were in the host's memory."""


@dataclass(slots=True)
class Group:
    """A group whose workers start.  ``due_s`` is when its first token is predicted, on this process's clock."""

    action: ActionName
    since_s: float
    hosts: dict[int, HostId] = field(default_factory=dict)  # by stage
    has_fetched: bool = False
    is_planned: bool = False  # its plan was read
    due_s: float | None = None


def sentence(group: Group, fetches: Iterable[FetchReport], now_s: float) -> str | None:
    """Return the sentence about the group's start for a client; None while there is nothing to say."""
    parts = [f for f in fetches if f.n_bytes > 0]
    group.has_fetched = group.has_fetched or bool(parts)
    left, total = sum(f.n_bytes - f.done_bytes for f in parts), sum(f.n_bytes for f in parts)
    predicted_s = None if group.due_s is None else group.due_s - now_s
    if left > 0:
        slowest_s = max(
            ((f.n_bytes - f.done_bytes) / f.bytes_per_s if f.bytes_per_s > 0 else 0.0 for f in parts), default=0.0
        )
        return f"fetching {100 * (total - left) // total} %{_eta(max(predicted_s or 0.0, slowest_s))}"
    if group.has_fetched or now_s - group.since_s > _BEGUN_S:
        return f"loading{_eta(predicted_s or 0.0)}"
    return None


def _eta(seconds: float) -> str:
    """Nothing for a prediction that has not come true: nobody knows how much longer it takes."""
    return f" eta {seconds:.1f} s" if seconds > 0 else ""


class ColdProgress:
    def __init__(self, room: WaitingRoom, registry: Registry) -> None:
        self._room, self._registry = room, registry
        self._changed = threading.Condition()
        self._groups: dict[GroupId, Group] = {}
        self._said: Mapping[ActionName, str] = {}
        self._stopping = False
        self._thread = LastingThread(self._run, "cold-progress")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def instance_changed(self, record: InstanceRecord) -> None:
        """Note which groups start.  A group that has one worker that is ready, or gone, is no longer of interest."""
        with self._changed:
            if record.state is not InstanceState.STARTING:
                is_over = record.takes_requests or record.state is InstanceState.GONE
                if is_over and self._groups.pop(record.group_id, None) is not None:
                    self._say(self._said)
                return
            group = self._groups.setdefault(record.group_id, Group(record.action, time.monotonic()))
            group.hosts[record.stage] = record.host_id
            self._changed.notify_all()

    def reload(self, records: Iterable[InstanceRecord]) -> None:
        """Take over the registry's truth after a reconnection: the end of a start may have been missed."""
        with self._changed:
            self._groups.clear()
            self._say({})
        for record in records:
            self.instance_changed(record)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._groups or self._stopping)
                if self._changed.wait_for(lambda: self._stopping, LOOK_S):
                    return
                waited_for = {i: g for i, g in self._groups.items() if self._room.is_waited_for(g.action)}
            try:
                self._look(waited_for)
            except PlatformError:
                continue  # the state server is away: there is nothing new to say

    def _look(self, groups: Mapping[GroupId, Group]) -> None:
        """Tell clients that wait for a model about its start; if there are several starts, about the first one.  Raises
        Unavailable."""
        hosts = {host for group in groups.values() for host in group.hosts.values()}
        reports = {host: report for host in hosts if (report := self._registry.live_host(host)) is not None}
        told: dict[ActionName, str] = {}
        for group_id, group in groups.items():
            self._read_plan(group_id, group)
            fetches = [f for report in reports.values() for f in report.fetches if f.group_id == group_id]
            said = sentence(group, fetches, time.monotonic())
            if said is not None and group.action not in told:
                told[group.action] = said
        with self._changed:
            self._say(told)

    def _say(self, told: Mapping[ActionName, str]) -> None:
        """Called with the lock.  The sentences about a start that is over are of no use to a client that comes now."""
        starting = {group.action for group in self._groups.values()}
        self._said = {action: said for action, said in told.items() if action in starting}
        self._room.say(self._said)

    def _read_plan(self, group_id: GroupId, group: Group) -> None:
        if not group.is_planned and (plan := self._registry.plan(group_id)) is not None:
            group.is_planned = True
            group.due_s = None if plan.predicted_ttft_s is None else group.since_s + plan.predicted_ttft_s

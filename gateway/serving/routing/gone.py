"""Ends the waits for answers of instances that are gone.

::

    hangs ──10 s──▶ the scheduler calls the host lost ──GONE──▶ each answer may be silent for SILENCE_S ──▶ it is cut

An invoker that hangs closes no connection, and its kernel answers for it, so nothing else ends such a wait before the
action's time limit.  An invoker that has only lost the state server is called lost, too, but it goes on answering:
nothing is cut as long as something comes.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import Final, Protocol

from relay.state.registry import LEASE_MS
from thaw.ids import InstanceId
from thaw.instance import InstanceRecord, InstanceState

SILENCE_S: Final = 2.0
"""An invoker that reports the end of an instance also ends its answers, within less than this time."""
_UNKNOWN_S: Final = LEASE_MS / 1000
"""An instance that is not in the registry after a reconnection may be reported again: a server may have lost it."""
_KEPT: Final = 10_000
"""Instances whose end is remembered, for runs that were on their way to them."""


class Waited(Protocol):
    """An answer that some thread waits for."""

    def limit_silence(self, silence_s: float | None) -> None:
        """Each wait that begins from now on ends after ``silence_s``; None: at the deadline only."""

    def cut_if_waiting(self, since_s: float) -> None:
        """Cut the connection if somebody has waited for its next bytes since ``since_s`` (monotonic)."""


class GoneInstances:
    def __init__(self, silence_s: float = SILENCE_S, unknown_s: float = _UNKNOWN_S) -> None:
        self._silence_s, self._unknown_s = silence_s, unknown_s
        self._lock = threading.Lock()
        self._open: dict[InstanceId, set[Waited]] = {}
        self._gone: OrderedDict[InstanceId, float] = OrderedDict()  # how long they may be silent

    def enter(self, instance_id: InstanceId, reply: Waited) -> None:
        """``reply`` is to come from this instance.  leave() ends that."""
        with self._lock:
            self._open.setdefault(instance_id, set()).add(reply)
            if (silence_s := self._gone.get(instance_id)) is not None:
                reply.limit_silence(silence_s)

    def leave(self, instance_id: InstanceId, reply: Waited) -> None:
        with self._lock:
            replies = self._open.get(instance_id, set())
            replies.discard(reply)
            if not replies:
                self._open.pop(instance_id, None)

    def instance_changed(self, record: InstanceRecord) -> None:
        with self._lock:
            if record.state is InstanceState.GONE:
                self._is_gone(record.instance_id, self._silence_s)
            else:
                self._is_there((record.instance_id,))

    def reload(self, records: Collection[InstanceRecord]) -> None:
        """Take over the registry's truth after a (re)connection: the end of an instance may have been missed."""
        known = {record.instance_id for record in records}
        with self._lock:
            self._is_there(known)
            for instance_id in self._open.keys() - known - self._gone.keys():
                self._is_gone(instance_id, self._unknown_s)

    def _is_gone(self, instance_id: InstanceId, silence_s: float) -> None:
        self._gone[instance_id] = silence_s
        self._gone.move_to_end(instance_id)
        while len(self._gone) > _KEPT:
            self._gone.popitem(last=False)
        replies = self._open.get(instance_id, ())
        for reply in replies:
            reply.limit_silence(silence_s)
        if replies:
            timer = threading.Timer(silence_s, self._end_waits, [instance_id, time.monotonic()])
            timer.daemon = True
            timer.start()

    def _is_there(self, instance_ids: Iterable[InstanceId]) -> None:
        for instance_id in instance_ids:
            if self._gone.pop(instance_id, None) is not None:
                for reply in self._open.get(instance_id, ()):
                    reply.limit_silence(None)

    def _end_waits(self, instance_id: InstanceId, gone_s: float) -> None:
        """End the waits that had begun before the instance was gone.  Later ones have a limit of their own."""
        with self._lock:
            replies = list(self._open.get(instance_id, ())) if instance_id in self._gone else []
        for reply in replies:
            reply.cut_if_waiting(gone_s)

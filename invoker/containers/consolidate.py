"""The host's part while a stage of a pipeline becomes a worker.

::

    Consolidate ──▶ POST /consolidate ──200──▶ the record says one stage, and everybody hears it
                      │      └──an error─────▶ ConsolidationFailed; the pipeline answers as before
                      │ Conflict: an earlier invoker has asked
                      ▼
                    GET /consolidate ──▶ the same outcome

The engine switches alone, between two steps, and its container knows it before anybody else.  An invoker that was
restarted in the middle reads /health and waits for the outcome again.  After the deadline the scheduler hears that it
has taken too long; the container is listened to all the same, because the engine may switch later.

Stage 0 keeps the pipeline's group and requests.  A later stage that stays waits for the switch of stage 0 in there, and
is stage 0 of a group of its own afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

from invoker.containers.call import ContainerCall
from invoker.containers.fleet import Fleet
from invoker.containers.init import slots_in
from invoker.containers.instance import State
from invoker.containers.live import Live
from relay.protocol.messages import ConsolidateReply, ConsolidationFailed
from relay.state.records import Records
from thaw import wire
from thaw.action import Action
from thaw.clock import wall_ms
from thaw.errors import (
    Conflict,
    ErrorInfo,
    InstanceGone,
    PlatformError,
    ProtocolError,
    ThawError,
    Unavailable,
    WorkerLost,
    from_info,
)
from thaw.ids import GroupId, InstanceId, own_group
from thaw.instance import InstanceRecord
from thaw.logs import Log
from thaw.tracing.trace import TraceEvent

HEALTH_S: Final = 2.0
_SERVES: Final = (State.IDLE, State.BUSY, State.DRAINING)


class Consolidating:
    """``publish`` sends an event to the scheduler."""

    def __init__(
        self,
        fleet: Fleet,
        records: Records,
        publish: Callable[[ConsolidationFailed], None],
        deadline_s: float,
        log: Log,
    ) -> None:
        self._fleet, self._records, self._publish = fleet, records, publish
        self._deadline_s, self._log = deadline_s, log

    def begin(self, instance_id: InstanceId) -> None:
        """Begin it in the background.  Raises InstanceGone.  A container that cannot become a worker says so itself."""
        live = self._fleet.find(instance_id)
        if live is None or live.state not in _SERVES:
            raise InstanceGone(f"no instance {instance_id} serves on this host")
        if not live.in_group or not live.begins_to_consolidate():
            return self._fleet.announce_again(live)
        self._fleet.announce(live)
        self._follow_in_background(live, "POST")

    def resume(self, live: Live) -> None:
        """An earlier invoker has asked, and this one has just adopted the container."""
        self._follow_in_background(live, "GET")

    def has_switched(self, live: Live) -> bool:
        """True when the engine has become one worker, though the record may not say so yet."""
        if not live.record.is_consolidating or live.handle is None:
            return False
        health = health_of(live.handle.socket_path)
        return health is not None and health.get("stages") == 1

    def _follow_in_background(self, live: Live, method: str) -> None:
        threading.Thread(target=self._follow, args=(live, method), name="consolidate", daemon=True).start()

    def _follow(self, live: Live, method: str) -> None:
        while live.state in _SERVES:
            try:
                reply = self._ask(live, method)
            except TimeoutError:
                error = Unavailable(f"it did not become one worker within {self._deadline_s:g} s")
                self._tell(live, error.info())
            except ThawError as e:
                if method == "GET" or not isinstance(e, Conflict):
                    return self._failed(live, e)
            else:
                return self._became_one_worker(live, reply)
            method = "GET"  # it goes on in the container, even if another invoker asked for it

    def _ask(self, live: Live, method: str) -> ConsolidateReply:
        """Raises TimeoutError at the deadline, else the container's error or why there is none."""
        assert live.handle is not None  # noqa: S101  an instance that serves has one
        call = ContainerCall(live.handle.socket_path, self._deadline_s)
        try:
            status, plain = call.ask(method, "/consolidate", b"{}" if method == "POST" else b"")
        except TimeoutError:
            raise
        except OSError as e:
            raise WorkerLost("the container closed its connection while it became one worker") from e
        if status == 200:
            return wire.from_plain(ConsolidateReply, plain)
        self._write_trace(live, _events(plain))
        info = plain.get("info")
        raise from_info(wire.from_plain(ErrorInfo, info)) if info else ProtocolError(f"an answer of status {status}")

    def _became_one_worker(self, live: Live, reply: ConsolidateReply) -> None:
        assert live.function is not None  # noqa: S101  an instance that serves has one
        live.become(partial(as_worker, function=live.function))
        live.fetching = False  # its last byte has arrived
        self._fleet.announce(live)
        self._fleet.relabel(live)
        self._write_trace(live, reply.events)
        self._log.event(
            "consolidated",
            instance_id=live.record.instance_id,
            group_id=live.record.group_id,
            rounds=reply.rounds,
            n_bytes=reply.n_bytes,
            tail_bytes=reply.tail_bytes,
            wait_s=round(reply.wait_s, 3),
            stall_s=round(reply.stall_s, 6),
        )

    def _failed(self, live: Live, error: ThawError) -> None:
        """Say so, unless the instance has ended: its own end says more."""
        live.amend(is_consolidating=False)
        if live.state in _SERVES:
            self._fleet.announce(live)
            self._tell(live, error.info())

    def _tell(self, live: Live, error: ErrorInfo) -> None:
        record = live.record
        self._log.event(
            "consolidation_failed", instance_id=record.instance_id, group_id=record.group_id, error=error.message
        )
        try:
            self._publish(ConsolidationFailed(record.instance_id, record.host_id, record.group_id, error))
        except PlatformError as e:  # the scheduler's own deadline follows
            self._log.event("event_lost", instance_id=record.instance_id, error=e.message)

    def _write_trace(self, live: Live, events: tuple[TraceEvent, ...]) -> None:
        """Write them to the trace of the pipeline, which a later stage has left by now."""
        if not events:
            return
        group_id = GroupId(events[0].group_id)
        try:
            self._records.add_trace(live.record.action, group_id, list(events))
        except PlatformError as e:
            self._log.event("trace_lost", group_id=group_id, error=e.message)


def as_worker(record: InstanceRecord, function: Action) -> InstanceRecord:
    """The record of a stage that has become a worker.  A later one is idle from now on: it had no request before."""
    idle_ms = record.idle_since_wall_ms if record.stage == 0 or record.idle_since_wall_ms is None else wall_ms()
    return replace(
        record,
        group_id=own_group(record.group_id, record.stage),
        stage=0,
        n_stages=1,
        slots=slots_in(function, 0, 1),
        idle_since_wall_ms=idle_ms,
        is_consolidating=False,
    )


def health_of(path: str) -> dict[str, Any] | None:
    """Return the container's answer to /health; None when it does not answer."""
    try:
        return ContainerCall(path, HEALTH_S).ask("GET", "/health")[1]
    except (OSError, ProtocolError):
        return None


def _events(plain: dict[str, Any]) -> tuple[TraceEvent, ...]:
    try:
        return tuple(wire.from_plain(TraceEvent, e) for e in plain.get("events", ()))
    except (ProtocolError, TypeError):
        return ()

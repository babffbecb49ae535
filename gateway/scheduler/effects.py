"""Carries decisions out: plans, commands, events and traces in the state server.

A command goes out only after its plan is written, so that a successor finds every start that may have begun.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import redis

from gateway.scheduler.decisions import (
    CancelGroup,
    Decision,
    DropDemand,
    DropPlan,
    FailDemand,
    Flag,
    ForgetInstance,
    InspectModelOn,
    LearnFrom,
    ReleaseInstance,
    RevokeCredential,
    StartGroup,
)
from gateway.scheduler.events import StartRefused
from gateway.scheduler.group_credentials import GroupCredentials
from gateway.scheduler.history import EVERY_ACTION, History, Learned, Measured, measure, measure_run
from relay import bus, keys, redis_link
from relay.messages import Cancel, Command, InspectModel, Release, Start, StartFailed
from relay.records import Records
from relay.registry import Registry
from thaw import trace, wire
from thaw.errors import PlatformError, ProtocolError
from thaw.ids import ActivationId, CommandId, GroupId, HostId
from thaw.logs import Log
from thaw.plan import Plan, TransportKind
from thaw.trace import Phase


@dataclass(frozen=True, slots=True)
class Arrival:
    """When the loop took up the event that led to a decision: the begin of its ``planned`` phase."""

    mono_ns: int
    wall_ns: int

    @staticmethod
    def now() -> Arrival:
        return Arrival(time.monotonic_ns(), time.time_ns())


class Effects:
    def __init__(self, client: redis.Redis, epoch: int, log: Log, credentials: GroupCredentials | None = None) -> None:
        self._redis, self._epoch, self._log = client, epoch, log
        self._credentials = credentials or GroupCredentials(client, "")
        self._registry, self._records = Registry(client), Records(client)
        self._seen: dict[ActivationId, Arrival] = {}
        self._inspected: dict[str, Arrival] = {}

    def seen(self, activation_id: ActivationId, arrival: Arrival) -> None:
        """Its demand was taken up now; what it then waits for belongs to its ``planned`` phase."""
        self._seen.setdefault(activation_id, arrival)

    def gone(self, activation_id: ActivationId) -> None:
        self._seen.pop(activation_id, None)

    def apply(self, decision: Decision, arrival: Arrival) -> StartRefused | None:
        """Raises PlatformError when the state server does not take it.  What it returns is the policy's next event."""
        match decision:
            case StartGroup():
                return self._start(decision, arrival)
            case ReleaseInstance():
                self._log.event("release", instance_id=decision.instance_id, host_id=decision.host_id,
                                reason=decision.reason)  # fmt: skip
                body = Release(decision.instance_id, decision.only_idle)
                self._send(decision.host_id, decision.command_id, body)
            case CancelGroup():
                self._log.event("cancel", group_id=decision.group_id, host_id=decision.host_id)
                self._send(decision.host_id, decision.command_id, Cancel(decision.group_id))
            case InspectModelOn():
                self._inspected[decision.uri] = arrival
                self._send(decision.host_id, decision.command_id, InspectModel(decision.uri))
            case FailDemand():
                for activation_id in decision.activation_ids:
                    self.gone(activation_id)
                self._fail(decision)
            case ForgetInstance():
                self._registry.put_instance(decision.record)
            case DropDemand():
                self.gone(decision.activation_id)
                self._log.event("demand_dropped", activation_id=decision.activation_id, action=decision.action)
                self._registry.remove_demand(decision.activation_id, decision.action)
            case RevokeCredential():
                self._revoke(decision.group_id)
            case DropPlan():
                self._registry.drop_plan(decision.group_id)
            case Flag():
                self._log.event(decision.name, **decision.fields)
            case _:
                raise TypeError(f"not an effect: {decision!r}")
        return None

    def _start(self, decision: StartGroup, arrival: Arrival) -> StartRefused | None:
        plan = replace(decision.plan, created_wall_ns=time.time_ns())
        self._registry.put_plan(plan)
        if plan.transport.kind is not TransportKind.NONE:
            try:
                self._credentials.issue(plan.group_id)
            except PlatformError as e:
                self._log.event("credential_not_issued", group_id=plan.group_id, error=e.message)
                return StartRefused(plan.group_id, e.info())
        for stage in decision.stages:
            body = Start(plan, stage.stage, stage.instance_id, decision.activation_ids)
            self._send(stage.host_id, stage.command_id, body)
        demands = [self._seen.pop(a, arrival) for a in decision.activation_ids]
        first = min(demands, key=lambda a: a.mono_ns, default=arrival)
        begin = replace(
            trace.event(Phase.PLANNED_BEGIN, group_id=plan.group_id), mono_ns=first.mono_ns, wall_ns=first.wall_ns
        )
        waited = {} if first is arrival else {"waited_for": self._reason(plan)}
        end = trace.event(Phase.PLANNED_END, group_id=plan.group_id, attrs={**decision.attrs, **waited})
        self._records.add_trace(plan.group_id, [begin, end])
        self._log.event("start", group_id=plan.group_id, activation_ids=decision.activation_ids, **decision.attrs)
        return None

    def _revoke(self, group_id: GroupId) -> None:
        try:
            self._credentials.revoke(group_id)
        except PlatformError as e:
            self._log.event("credential_not_revoked", group_id=group_id, error=e.message)
            raise

    def _reason(self, plan: Plan) -> str:
        """Why a demand was not planned when it came: its model was being looked at, or no host had room."""
        inspected = self._inspected.pop(plan.model.uri, None) if plan.model is not None else None
        return "room on a host" if inspected is None else "a look at the model's index"

    def _send(self, host_id: HostId, command_id: CommandId, body: Any) -> None:
        bus.send_command(self._redis, host_id, Command(command_id, self._epoch, time.time_ns(), body))

    def _fail(self, decision: FailDemand) -> None:
        for activation_id in decision.activation_ids:
            self._log.event("start_failed", activation_id=activation_id, action=decision.action,
                            group_id=decision.group_id, code=decision.error.code,
                            error=decision.error.message)  # fmt: skip
        failed = StartFailed(decision.action, decision.activation_ids, decision.error, decision.group_id)
        bus.publish(self._redis, failed)

    # what was learned ----------------------------------------------------------------------------------------------

    def learn(self, history: History, start: LearnFrom) -> LearnFrom | None:
        """Mix a start's measured times in and keep the means.  Returns what is to be learned later: prefill and tokens
        stand in the traces of requests, which are written when those end."""
        try:
            found = [measure(self._records.trace(start.group_id))] if start.attempt == 0 else []
            run = self._measured_run(start)
        except ProtocolError as e:  # nothing to learn from what cannot be read
            self._log.event("trace_refused", group_id=start.group_id, error=e.message)
            return None
        for measured in [*found, *([run] if run is not None else [])]:
            history.update(start.action, start.device_kind, start.mode, measured)
        with redis_link.translated("keep what starts took"):
            for action in (start.action, EVERY_ACTION):
                learned = history.learned(action, start.device_kind, start.mode)
                self._redis.hset(keys.HISTORY, history.key(action, start.device_kind, start.mode), wire.dumps(learned))
        return None if run is not None or not start.served else replace(start, attempt=start.attempt + 1)

    def _measured_run(self, start: LearnFrom) -> Measured | None:
        """Of the first of its requests that has ended; a pipeline's prefill is not that of one whole device."""
        for activation_id in start.served if start.n_stages == 1 else ():
            record = self._records.activation(activation_id)
            if record is not None and record.usage:
                tokens = record.usage.get("completion_tokens", 0)
                return measure_run(self._records.trace(activation_id), tokens)
        return None


def load_history(client: redis.Redis, log: Log) -> History:
    with redis_link.translated("read what starts took"):
        rows: Any = client.hgetall(keys.HISTORY)
    learned: dict[str, Learned] = {}
    for key, data in rows.items():
        try:
            learned[redis_link.text(key)] = wire.loads(Learned, data)
        except ProtocolError as e:  # of another version: the defaults stand until a start is seen
            log.event("history_entry_refused", key=redis_link.text(key), error=e.message)
    return History(learned)

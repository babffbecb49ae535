"""Carries decisions out: plans, commands, events and traces in the state server.

A command goes out only after its plan is written, so that a successor finds every start that may have begun.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import redis

from gateway.scheduler.decisions import (
    CancelGroup,
    ConsolidateInstance,
    Decision,
    DropDemand,
    DropPlan,
    FailDemand,
    Flag,
    Forget,
    ForgetInstance,
    InspectModelOn,
    KeepStemCells,
    LearnFrom,
    PlanWorker,
    ReleaseInstance,
    RevokeCredential,
    RewritePlan,
    StartGroup,
    UndrainInstance,
)
from gateway.scheduler.events import StartRefused
from gateway.scheduler.io import metrics
from gateway.scheduler.io.group_admission import RelayWork, overdue
from gateway.scheduler.view.history import (
    EVERY_ACTION,
    History,
    Learned,
    Measured,
    first_token_s,
    foretold,
    measure,
    measure_run,
    was_continued,
    was_one_worker,
)
from gateway.scheduler.view.shortest_times import Best, Key, Least
from relay.protocol.messages import (
    Cancel,
    Command,
    Consolidate,
    DemandAdded,
    InspectModel,
    ModelInspected,
    Release,
    SetStemCells,
    Start,
    StartFailed,
    Undrain,
)
from relay.state import bounded_stream, bus, keys, redis_link, starts
from relay.state.clock import StateClock
from relay.state.records import Records
from relay.state.registry import Registry
from thaw import wire
from thaw.checkpoints import versions
from thaw.errors import ProtocolError
from thaw.ids import ActivationId, CommandId, GroupId, HostId
from thaw.logs import Log
from thaw.plan import Plan, TransportKind
from thaw.tracing import trace
from thaw.tracing.start_times import start_took
from thaw.tracing.trace import Phase, TraceEvent


@dataclass(frozen=True, slots=True)
class Arrival:
    """When the loop took up the event that led to a decision: the begin of its ``planned`` phase."""

    mono_ns: int
    wall_ns: int

    @staticmethod
    def now() -> Arrival:
        return Arrival(time.monotonic_ns(), time.time_ns())


class Effects:
    def __init__(self, client: redis.Redis, epoch: int, log: Log, relay: RelayWork, clock: StateClock) -> None:
        self._redis, self._epoch, self._log, self._relay = client, epoch, log, relay
        # planned, and not let into the relay server yet
        self._admitting: dict[GroupId, tuple[StartGroup, Arrival]] = {}
        self._registry, self._records = Registry(client), Records(client, clock)
        self._seen: dict[ActivationId, Arrival] = {}
        self._adapters: dict[ActivationId, str] = {}  # the adapters that demand wants; the policy need not know them
        self._looks_s: dict[str, float] = {}  # how long hosts looked at what demand waits for, by plain name

    def seen(self, activation_id: ActivationId, arrival: Arrival, adapter: str = "") -> None:
        """The request's demand was taken up now.  From now on its wait belongs to its ``planned`` phase."""
        self._seen.setdefault(activation_id, arrival)
        if adapter:
            self._adapters[activation_id] = adapter

    def reloaded(self, demand: Iterable[DemandAdded]) -> None:
        """This is all the demand that there is; messages about some of it may have been missed."""
        self._adapters = {d.activation_id: d.adapter for d in demand if d.adapter}

    def looked(self, event: ModelInspected) -> None:
        """A host has answered an inspection of a model."""
        if (name := versions.plain_name(event.uri)) in self._looks_s:
            self._looks_s[name] = event.took_s

    def gone(self, activation_id: ActivationId) -> None:
        self._seen.pop(activation_id, None)
        self._adapters.pop(activation_id, None)

    def apply(self, decision: Decision, arrival: Arrival) -> None:
        """Carry out a decision.  Raises PlatformError when the state server does not accept it."""
        match decision:
            case StartGroup():
                self._start(decision, arrival)
            case ReleaseInstance():
                self._log.event(
                    "release", instance_id=decision.instance_id, host_id=decision.host_id, reason=decision.reason
                )
                body = Release(decision.instance_id, decision.only_idle, decision.drained)
                self._send(decision.host_id, decision.command_id, body)
            case UndrainInstance():
                self._log.event("undrain", instance_id=decision.instance_id, host_id=decision.host_id)
                self._send(decision.host_id, decision.command_id, Undrain(decision.instance_id))
            case ConsolidateInstance():
                self._log.event("consolidate", group_id=decision.group_id, host_id=decision.host_id)
                asked = Consolidate(decision.instance_id, decision.group_id)
                self._send(decision.host_id, decision.command_id, asked)
            case RewritePlan():
                self._log.event("consolidated", group_id=decision.plan.group_id, action=decision.plan.action)
                self._rewrite(decision.plan)
            case PlanWorker():
                self._log.event("worker_kept", group_id=decision.plan.group_id, action=decision.plan.action)
                self._rewrite(decision.plan)
            case CancelGroup():
                self._log.event("cancel", group_id=decision.group_id, host_id=decision.host_id)
                self._send(decision.host_id, decision.command_id, Cancel(decision.group_id))
            case InspectModelOn():
                self._looks_s[versions.plain_name(decision.uri)] = 0.0
                self._send(
                    decision.host_id,
                    decision.command_id,
                    InspectModel(decision.uri, decision.known_uri, decision.known_version, decision.namespaces),
                )
            case KeepStemCells():
                self._log.event("stem_cells", host_id=decision.host_id, kind=decision.kind, count=decision.count)
                self._send(decision.host_id, decision.command_id, SetStemCells(decision.kind, decision.count))
            case FailDemand():
                for activation_id in decision.activation_ids:
                    self.gone(activation_id)
                self._fail(decision)
            case ForgetInstance():
                self._registry.put_instance(decision.record)
            case DropDemand():
                self.gone(decision.activation_id)
                self._log.event("demand_dropped", activation_id=decision.activation_id, action=decision.action)
                self._registry.drop_demand(decision.activation_id, decision.action, decision.gateway)
            case RevokeCredential():
                self._relay.revoke(decision.group_id)
            case DropPlan():
                self._admitting.pop(decision.group_id, None)
                self._registry.drop_plan(decision.group_id)
            case Forget():
                self._registry.drop_models(decision.model_uris)
                with redis_link.translated("forget what starts took"):
                    for name, fields in ((keys.HISTORY, decision.learned), (keys.BEST, decision.best)):
                        if fields:
                            self._redis.hdel(name, *fields)
            case Flag():
                self._log.event(decision.name, **decision.fields)
            case _:
                raise TypeError(f"not an effect: {decision!r}")

    # starts --------------------------------------------------------------------------------------------------------

    def _start(self, decision: StartGroup, arrival: Arrival) -> None:
        plan = replace(decision.plan, created_wall_ns=time.time_ns())
        decision = replace(decision, plan=plan)
        self._registry.put_plan(plan)
        if plan.transport.kind == TransportKind.NONE:
            self._command(decision, arrival)
        else:
            self._admitting[plan.group_id] = decision, arrival
            self._relay.issue(plan.group_id)

    def _rewrite(self, plan: Plan) -> None:
        """Replace a group's plan.  The view does not know when its own plans were written, so that is read first."""
        try:
            written = self._registry.plan(plan.group_id)
        except ProtocolError:
            written = None
        stamp = time.time_ns() if written is None else written.created_wall_ns
        self._registry.put_plan(replace(plan, created_wall_ns=stamp))

    def issued(self, group_id: GroupId) -> None:
        """The server lets a group in.  If the group has ended meanwhile, its revocation already follows this issue."""
        if (admitted := self._admitting.pop(group_id, None)) is not None:
            self._command(*admitted)

    def give_up(self, group_id: GroupId) -> StartRefused | None:
        """Give up a group that the server has not let in yet.  Return None if the server has let it in, or if no start
        waits for it."""
        self._relay.give_up(group_id)
        return None if self._admitting.pop(group_id, None) is None else overdue(group_id)

    def give_up_all(self) -> None:
        """Give up all of them.  The view is rebuilt, and it will find that these plans have begun nothing."""
        for group_id in list(self._admitting):
            self.give_up(group_id)

    def _command(self, decision: StartGroup, arrival: Arrival) -> None:
        plan = decision.plan
        wanted = (self._adapters.get(a, "") for a in decision.activation_ids)
        adapters = tuple(dict.fromkeys(filter(None, wanted)))
        for stage in decision.stages:
            body = Start(plan, stage.stage, stage.instance_id, decision.activation_ids, adapters)
            self._send(stage.host_id, stage.command_id, body)
        demands = [self._seen.pop(a, arrival) for a in decision.activation_ids]
        first = min(demands, key=lambda a: a.mono_ns, default=arrival)
        begin = replace(
            trace.event(Phase.PLANNED_BEGIN, group_id=plan.group_id), mono_ns=first.mono_ns, wall_ns=first.wall_ns
        )
        waited = {} if first is arrival else self._waited(plan, (arrival.mono_ns - first.mono_ns) / 1e9)
        attrs = {**decision.attrs, **_terms(plan)}
        end = trace.event(Phase.PLANNED_END, group_id=plan.group_id, attrs={**attrs, **waited})
        self._records.add_trace(plan.action, plan.group_id, [begin, end])
        self._log.event("start", group_id=plan.group_id, activation_ids=decision.activation_ids, **attrs)

    def _waited(self, plan: Plan, wait_s: float) -> dict[str, object]:
        """Return the wait of a demand that was not planned when it came: its model was being inspected, or no host had
        room.  The wait ended with the event that led to the plan.  A look explains as much of it as the host says that
        it looked: if the host was stopped before it began, or its answer came late, the rest stays unexplained."""
        model = plan.model
        look_s = None if model is None else self._looks_s.pop(versions.plain_name(model.uri), None)
        if look_s is None:
            return {"wait_s": round(wait_s, 4), "waits_for": "room on a host"}
        return {"wait_s": round(min(wait_s, look_s), 4), "waits_for": "a look at the model's index"}

    def _send(self, host_id: HostId, command_id: CommandId, body: Any) -> None:
        bus.send_command(self._redis, host_id, Command(command_id, self._epoch, time.time_ns(), body))

    def _fail(self, decision: FailDemand) -> None:
        for activation_id in decision.activation_ids:
            self._log.event(
                "request_failed",
                activation_id=activation_id,
                action=decision.action,
                group_id=decision.group_id,
                code=decision.error.code,
                error=decision.error.message,
            )
        failed = StartFailed(decision.action, decision.activation_ids, decision.error, decision.group_id)
        starts.start_failed(self._redis, failed)

    # learning from starts ------------------------------------------------------------------------------------------

    def learn(self, history: History, start: LearnFrom) -> LearnFrom | None:
        """Take in the times of a start and store those that are known by now.  Return the part that remains for later:
        prefill and tokens are in the traces of requests, which are written when the requests end."""
        best: dict[Key, Least] = {}
        try:
            begun = self._records.trace(start.group_id)
            if start.attempt == 0:
                history.update(start.action, start.device_kind, start.mode, measure(begun))
                best |= history.best.learn_start(start.action, start.device_kinds, start_took(begun))
            ended = self._first_ended(start)
            if ended is not None:
                best |= self._learn_run(history, start, begun, *ended)
        except ProtocolError as e:  # a trace that cannot be read teaches nothing
            self._log.event("trace_refused", group_id=start.group_id, error=e.message)
            return None
        with redis_link.translated("keep what starts took"):
            for action in (start.action, EVERY_ACTION):
                learned = history.learned(action, start.device_kind, start.mode)
                row = {history.key(action, start.device_kind, start.mode): wire.dumps(learned)}
                bounded_stream.replace_rows(self._redis, keys.HISTORY, row)
            if best:
                rows = {str(key): wire.dumps(least) for key, least in best.items()}
                bounded_stream.replace_rows(self._redis, keys.BEST, rows)
        return None if ended is not None or not start.served else replace(start, attempt=start.attempt + 1)

    def _first_ended(self, start: LearnFrom) -> tuple[Sequence[TraceEvent], int] | None:
        """Return the trace of one request that the start was made for and that has ended, and how many tokens it was
        given."""
        for activation_id in start.served:
            record = self._records.activation(activation_id)
            if record is not None and record.usage:
                return self._records.trace(activation_id), record.usage.get("completion_tokens", 0)
        return None

    def _learn_run(
        self, history: History, start: LearnFrom, begun: Sequence[TraceEvent], run: Sequence[TraceEvent], n_tokens: int
    ) -> dict[Key, Least]:
        if was_continued(run) or was_one_worker(begun, run, Phase.PREFILL_BEGIN):
            return {}
        took, best = start_took(run), dict[Key, Least]()
        seen = measure_run(run, n_tokens, start.n_stages, start.factor or 1.0)
        if was_one_worker(begun, run, Phase.RUN_END):
            seen = replace(seen, token_s=None)
        if start.factor is not None:
            history.update_pass(start.action, start.device_kind, start.mode, seen)
            if took.prefill_s is not None and took.prompt_tokens is not None:
                best = history.best.learn_prefill(
                    start.action, start.device_kind, start.n_stages, took.prompt_tokens, took.prefill_s
                )
        told, actual_s = foretold(begun), first_token_s(run)
        if told is not None and actual_s is not None:
            metrics.foretold(start.n_stages, *told, actual_s)
            ratio = Measured(ttft_ratio=actual_s / told[0])
            history.update(start.action, start.device_kind, start.mode, ratio)
            self._log.event(
                "ttft_foretold",
                group_id=start.group_id,
                action=start.action,
                stages=start.n_stages,
                full=start.n_full,
                predicted_s=told[0],
                bound_s=told[1],
                actual_s=round(actual_s, 4),
                prefill_s=seen.prefill_s,
                token_s=seen.token_s,
            )
        return best


def _terms(plan: Plan) -> dict[str, object]:
    """The prediction and the bound in terms, which the trace keeps when the plan goes with its group."""
    return {
        "predicted_terms": wire.to_plain(plan.predicted_terms),
        "bound_terms": wire.to_plain(plan.bound_terms),
    }


def load_history(client: redis.Redis, log: Log) -> History:
    with redis_link.translated("read what starts took"):
        rows: Any = client.hgetall(keys.HISTORY)
        best: Any = client.hgetall(keys.BEST)
    learned: dict[str, Learned] = {}
    for key, data in rows.items():
        try:
            learned[redis_link.text(key)] = wire.loads(Learned, data)
        except ProtocolError as e:  # another version wrote it: the defaults hold until a start is seen
            log.event("history_entry_refused", key=redis_link.text(key), error=e.message)
    return History(learned, Best(dict(_least(best, log))))


def _least(rows: Mapping[bytes, bytes], log: Log) -> Iterator[tuple[Key, Least]]:
    for text, data in rows.items():
        key = Key.parse(redis_link.text(text))
        try:
            least = wire.loads(Least, data)
        except ProtocolError as e:
            log.event("history_entry_refused", key=redis_link.text(text), error=e.message)
            continue
        if key is not None:
            yield key, least

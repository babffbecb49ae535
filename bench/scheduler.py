"""How long does one cold-start decision take at 1,000 hosts × 4 devices and 10,000 functions, on one core?

``decide()`` itself runs on a cluster that changes: requests come, groups start and fetch, instances serve, idle and
expire, and every host's heartbeat is read once per simulated second.  A decision is a call of ``decide()`` that starts
a group: admission on every link that it may use, Algorithm 1 with up to four stages, and the plan.  It is timed in CPU
seconds of this thread, because a shared machine's wall clock also measures other processes.  The percentiles of the
wall time are reported beside them.  ``decisions`` is a digest of all decisions: it is equal for two commits that decide
alike.

``usual``  six in ten devices are taken, and a third of the links fetches
``full``   requests ask for more memory than the devices have: every start has waited, and is decided together with the
           eviction for the next one

``own_links``, ``own_links_10k``: like ``usual``, but every link was measured and no two are equal; the second has
10,000 hosts.  The fastest links become busy first, so a decision also examines links that are fetching.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bench import _common
from bench.simulation.constants import GBIT, GPUS, KEEP_ALIVE_S, KV_RESERVE, MODELS, SLOTS
from gateway.scheduler.decisions import FailDemand, InspectModelOn, ReleaseInstance, StartGroup, Wake
from gateway.scheduler.events import ActionFacts, ActionSeen, HostsSeen, Timer
from gateway.scheduler.io.gc_pauses import Pauses
from gateway.scheduler.policy.decide import decide
from gateway.scheduler.settings import SchedulerSettings
from gateway.scheduler.view.cluster import ClusterView
from gateway.scheduler.view.history import History
from relay.protocol.messages import DemandAdded, DemandRemoved, InstanceChanged, ModelInspected
from thaw.action import KIND_LLM
from thaw.host import Device, HostReport
from thaw.ids import ActionName, ActivationId, GatewayId, HostId, InstanceId, Namespace
from thaw.instance import InstanceRecord, InstanceState, StartMode
from thaw.model import FileRange, ModelFacts, ModelParts

N_DEVICES, N_FUNCTIONS = 4, 10_000
SERVED_S = 10.0  # a request's time in its instance
LOOK_S = 0.005  # a host's look whether a model has changed
OBJECTIVES = {"llama2-7b": (7.5, 0.2), "llama2-13b": (12.0, 0.2)}  # P Table 2, chatbot


@dataclass(slots=True)
class Timed:
    """The CPU seconds and the wall seconds of each call."""

    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        if not self.cpu:
            return {"n": 0}
        return {
            "n": len(self.cpu),
            "mean_ms": _ms(statistics.fmean(self.cpu)),
            "p50_ms": _ms(_common.percentile(self.cpu, 50)),
            "p99_ms": _ms(_common.percentile(self.cpu, 99)),
            "worst_ms": _ms(max(self.cpu)),
            "wall_p99_ms": _ms(_common.percentile(self.wall, 99)),
        }


def _ms(seconds: float) -> float:
    return float(f"{1000 * seconds:.4g}")


class Cluster:
    """Hosts, gateways and a clock around ``decide()``.  Every call is timed, and its kind is what it decided."""

    def __init__(self, n_hosts: int, n_functions: int, seed: int, *, own_links: bool = False) -> None:
        numbers = itertools.count(1)
        settings = SchedulerSettings("redis://nowhere", relay_url="redis://relay:6379/0")
        self.view = ClusterView(1, settings, lambda: f"{next(numbers):032x}", History())
        self.rng = random.Random(seed)
        self.now, self.measuring, self.pauses = 1.0, False, Pauses()
        self.took: dict[str, Timed] = {k: Timed() for k in ("start", "wait", "other", "heartbeats")}
        self.n_groups_of: dict[int, int] = {}
        self.decisions = hashlib.sha256()
        self._order, self._calls = itertools.count(), list[tuple[float, int, Any]]()
        self._n_requests = itertools.count()
        self._specs = [("A10", 64 * GBIT) if i % 3 == 0 else ("V100", 16 * GBIT) for i in range(n_hosts)]
        if own_links:
            self._specs = [(kind, link * self.rng.uniform(0.5, 1.0)) for kind, link in self._specs]
        self._on: list[dict[str, InstanceRecord]] = [{} for _ in range(n_hosts)]
        self._records: dict[str, InstanceRecord] = {}
        self._heartbeat()
        names = list(OBJECTIVES)
        for i in range(n_functions):
            self._tell(ActionSeen(_facts(i, names[i % len(names)])))
            self.view.model(f"s3://m/{i}").take(model_facts(i, names[i % len(names)]), self.now)
        self.names = [ActionName(f"guest/f{i}") for i in range(n_functions)]
        self._rate = 1.0
        self._arrive()

    def run(self, seconds: float, rate: float) -> None:
        """Run for ``seconds``.  From now on requests come at ``rate`` per second."""
        self._rate, until = rate, self.now + seconds
        while self._calls[0][0] <= until:
            self.now, _, call = heapq.heappop(self._calls)
            call()

    def _arrive(self) -> None:
        self._after(self.rng.expovariate(self._rate), self._arrive)
        name, activation = self.rng.choice(self.names), ActivationId(f"{next(self._n_requests):032x}")
        self._tell(DemandAdded(activation, name, Namespace("guest"), GatewayId("g"), int(self.now * 1000)))

    def _tell(self, event: Any) -> None:
        wall, cpu = time.perf_counter(), time.thread_time()
        decided = decide(self.view, event, self.now)
        cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
        if self.measuring:
            timed = self.took[_kind(event, decided)]
            timed.cpu.append(cpu)
            timed.wall.append(wall)
        for decision in decided:
            self.decisions.update(repr(decision).encode())
            self._carry_out(decision)

    def _carry_out(self, decision: Any) -> None:
        match decision:
            case StartGroup():
                self._start(decision)
            case ReleaseInstance():
                self._after(0.01, lambda: self._gone(decision.instance_id))
            case Wake():
                timer = Timer(decision.kind, decision.key)
                self._after(decision.at_s - self.now, lambda: self._tell(timer))
            case InspectModelOn():  # no model changes
                look = ModelInspected(
                    decision.uri, decision.host_id, None, None, decision.known_version, decision.command_id
                )
                self._after(LOOK_S, lambda: self._tell(look))
            case FailDemand():
                raise AssertionError(f"every model fits: {decision}")

    def _start(self, decision: StartGroup) -> None:
        plan = decision.plan
        if self.measuring:
            self.n_groups_of[len(plan.stages)] = self.n_groups_of.get(len(plan.stages), 0) + 1
        for stage, at in zip(decision.stages, plan.stages, strict=True):
            record = InstanceRecord(
                stage.instance_id,
                at.host,
                plan.action,
                plan.action_version,
                plan.group_id,
                InstanceState.STARTING,
                "a:1",
                SLOTS if stage.stage == 0 else 0,
                at.reserve_bytes,
                at.device,
                StartMode.PREWARMED,
                keep_alive_s=KEEP_ALIVE_S,
                **_stage_fields(stage.stage, len(plan.stages)),
            )
            self._put(record)
        took = max(2.0, plan.predicted_ttft_s or 0.0)
        ids, served = [s.instance_id for s in decision.stages], decision.activation_ids
        self._after(took, lambda: self._ready(ids, served))

    def _ready(self, ids: Sequence[InstanceId], served: Sequence[ActivationId]) -> None:
        for instance_id in ids:
            if (record := self._records.get(instance_id)) is None:
                continue
            self._put(replace(record, state=InstanceState.READY, inflight=int(record.slots > 0)))
            self._tell(InstanceChanged(self._records[instance_id]))
        for activation in served:
            if (known := self.view.demand.get(activation)) is not None:
                self._tell(DemandRemoved(activation, known.demand.action))
        self._after(SERVED_S, lambda: self._idle(ids))

    def _idle(self, ids: Sequence[InstanceId]) -> None:
        for instance_id in ids:
            if (record := self._records.get(instance_id)) is not None:
                self._put(replace(record, inflight=0, idle_since_wall_ms=int(self.now * 1000)))
                self._tell(InstanceChanged(self._records[instance_id]))

    def _gone(self, instance_id: InstanceId) -> None:
        if (record := self._records.pop(instance_id, None)) is not None:
            del self._on[_number(record.host_id)][instance_id]
            self._tell(InstanceChanged(replace(record, state=InstanceState.GONE)))

    def _put(self, record: InstanceRecord) -> None:
        self._records[record.instance_id] = record
        self._on[_number(record.host_id)][record.instance_id] = record

    def _heartbeat(self) -> None:
        self._tell(HostsSeen(tuple(self._report(i) for i in range(len(self._specs)))))
        self.pauses.after_heartbeats()  # as the scheduler's loop does
        self._after(1.0, self._heartbeat)

    def _report(self, i: int) -> HostReport:
        kind, link = self._specs[i]
        memory, used = GPUS[kind].memory, dict[str, int]()
        for record in self._on[i].values():
            used[record.device] = used.get(record.device, 0) + record.reserve_bytes
        devices = tuple(Device(f"cuda:{d}", kind, memory, memory - used.get(f"cuda:{d}", 0)) for d in range(N_DEVICES))
        return HostReport(
            HostId(f"host-{i:04d}"),
            "boot",
            "a:1",
            devices,
            16,
            link,
            "none",
            "process",
            0,
            int(self.now * 1000),
            N_DEVICES,
            (KIND_LLM,),
            instances=tuple(InstanceId(k) for k in self._on[i]),
        )

    def _after(self, delay: float, call: Any) -> None:
        heapq.heappush(self._calls, (self.now + delay, next(self._order), call))

    @property
    def taken(self) -> float:
        return sum(d.n_workers > 0 for h in self.view.hosts.values() for d in h.devices.values()) / (
            len(self._specs) * N_DEVICES
        )

    @property
    def fetching(self) -> float:
        return sum(h.ledger.busy_until_s > self.now for h in self.view.hosts.values()) / len(self._specs)


def _kind(event: Any, decided: Sequence[Any]) -> str:
    if isinstance(event, HostsSeen):
        return "heartbeats"
    if any(isinstance(d, StartGroup) for d in decided):
        return "start"
    return "wait" if isinstance(event, DemandAdded) else "other"


def _number(host_id: HostId) -> int:
    return int(host_id.removeprefix("host-"))


def _stage_fields(stage: int, n_stages: int) -> dict[str, Any]:
    return {"stage": stage, "n_stages": n_stages}


def _facts(i: int, model: str) -> ActionFacts:
    ttft, tpot = OBJECTIVES[model]
    return ActionFacts(
        ActionName(f"guest/f{i}"),
        "0.0.1",
        KIND_LLM,
        MODELS[model].n_bytes + KV_RESERVE,
        SLOTS,
        100,
        KEEP_ALIVE_S,
        model_uri=f"s3://m/{i}",
        max_stages=4,
        slo_ttft_s=ttft,
        slo_tpot_s=tpot,
    )


def model_facts(i: int, name: str) -> ModelFacts:
    n_bytes = MODELS[name].n_bytes
    layer, rest = n_bytes // 34, n_bytes - 32 * (n_bytes // 34)
    file, at = "model.safetensors", itertools.accumulate([rest // 2] + [layer] * 32)
    starts = list(at)
    parts = ModelParts(
        (FileRange(file, 0, starts[0]),),
        tuple((FileRange(file, start, layer),) for start in starts[:32]),
        (FileRange(file, starts[32], n_bytes - starts[32]),),
    )
    return ModelFacts(
        f"s3://m/{i}", n_bytes, n_bytes, 32, (layer,) * 32, rest, "", "", False, {file: n_bytes}, parts=parts
    )


def main() -> int:
    options = _common.options(__doc__ or "")
    seconds = 20.0 if options.quick else 75.0
    rounds = [one_round(seed, seconds) for seed in range(options.n or (1 if options.quick else 5))]
    by_row = {name: [r[name] for r in rounds] for name in rounds[0]}
    goals = [
        *_goals("", by_row["usual"]),
        *_goals("full_", by_row["full"]),
        _p99("own_links_decision_p99_ms", by_row["own_links"], 2.0),
        _p99("own_links_10k_decision_p99_ms", by_row["own_links_10k"], 10.0),
    ]
    facts = {name: [row.facts for row in rows] for name, rows in by_row.items()}
    return _common.report(
        "scheduler", goals, rounds=len(rounds), hosts=1000, devices=N_DEVICES, functions=N_FUNCTIONS, **facts
    )


@dataclass(frozen=True, slots=True)
class Row:
    """One scenario in one round."""

    starts: list[float]  # CPU seconds of each decision that started a group
    facts: dict[str, Any]

    @property
    def p99_ms(self) -> float:
        return 1000 * _common.percentile(self.starts, 99)

    @property
    def per_s(self) -> float:
        return 1 / statistics.fmean(self.starts)


def one_round(seed: int, seconds: float) -> dict[str, Row]:
    """Measure all scenarios on new clusters, with requests of this round's seed."""
    alike = measured(Cluster(1000, N_FUNCTIONS, seed), [("usual", 28.0), ("full", 70.0)], 55.0, seconds)
    own = measured(Cluster(1000, N_FUNCTIONS, seed, own_links=True), [("own_links", 28.0)], 55.0, seconds)
    many = Cluster(10_000, N_FUNCTIONS, seed, own_links=True)
    return alike | own | measured(many, [("own_links_10k", 280.0)], 10.0, seconds / 10)


def measured(cluster: Cluster, rates: Sequence[tuple[str, float]], before_s: float, seconds: float) -> dict[str, Row]:
    """The time of events at each rate (requests per second), measured after ``before_s`` at that rate."""
    cluster.pauses.after_rebuild()
    found: dict[str, Row] = {}
    for name, rate in rates:
        cluster.measuring = False
        cluster.run(before_s, rate)
        cluster.measuring, cluster.took, cluster.n_groups_of = True, {k: Timed() for k in cluster.took}, {}
        cluster.run(seconds, rate)
        facts = {
            "starts_per_s": rate,
            "devices_taken": round(cluster.taken, 3),
            "links_busy": round(cluster.fetching, 3),
            "groups_by_stages": dict(sorted(cluster.n_groups_of.items())),
            "waiting": len(cluster.view.demand),
            "decisions": cluster.decisions.hexdigest()[:16],
            **{k: v.summary() for k, v in cluster.took.items()},
        }
        _common.say(f"  {name}: {facts}")
        found[name] = Row(cluster.took["start"].cpu, facts)
    return found


def _goals(prefix: str, rows: Sequence[Row]) -> list[_common.Goal]:
    per_s = [row.per_s for row in rows]
    return [
        _p99(f"{prefix}decision_p99_ms", rows, 2.0),
        _common.judge(f"{prefix}decisions_per_s", _common.median(per_s), ">=", 1000, floor=_floor(per_s)),
    ]


def _p99(name: str, rows: Sequence[Row], at_most_ms: float) -> _common.Goal:
    p99 = [row.p99_ms for row in rows]
    return _common.judge(name, _common.median(p99), "<=", at_most_ms, floor=_floor(p99))


def _floor(by_round: Sequence[float]) -> str:
    return f"CPU time of decide(), by round {min(by_round):.3g} to {max(by_round):.3g}"


if __name__ == "__main__":
    sys.exit(main())

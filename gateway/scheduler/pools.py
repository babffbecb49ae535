"""A host's memory for models: fetchd's pool, where every byte of a model lies before a device has it.

It is another memory than the device's, so it can be full where a device has room.  A host tells how much of its pool is
held by somebody; what nobody holds makes room by itself.  Bytes that a start has been decided for, and that no report
tells of yet, are in the link's ledger.

    never fits  → MemoryTooSmall, with what is needed and what the hosts have
    not now     → the link promises nothing there (placement looks elsewhere), idle instances that hold a model go,
                  and who waits, waits in line as for device memory
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from gateway.scheduler.events import ActionFacts
from gateway.scheduler.stages import Stages
from gateway.scheduler.view import ClusterView, InstanceView
from thaw import partition
from thaw.errors import MemoryTooSmall, ThawError
from thaw.ids import GroupId, HostId


def refusal(view: ClusterView, facts: ActionFacts, stages: Stages, most: int) -> ThawError | None:
    """Why no host can ever hold a part of this model that a start would fetch; ``most``: stages it may have."""
    n = facts.forced_stages or most
    least = stages.largest(n)[-1]
    largest = view.largest.pool()
    if largest is None or least <= largest:
        return None
    each = f" in each of {n} stages" if n > 1 else ""
    return MemoryTooSmall(
        f"{facts.name} needs {_mb(least)} of host memory for its model{each}; the largest pool of "
        f"{len(view.hosts)} host(s) has {_mb(largest)}",
        hint="raise THAW_FETCHD_POOL_MB",
    )


def evictions(view: ClusterView, facts: ActionFacts) -> list[InstanceView]:
    """Idle instances of other actions, longest idle first, whose models make room in a host's pool; [] when nothing
    helps, or a pool has room (it is something else that lacks)."""
    stages = view.model(facts.model_uri).stages if facts.is_llm else None
    if stages is None:
        return []
    need = stages.largest(1 if facts.forced_stages is None else facts.forced_stages)[-1]
    if any(h.pool_takes(need) for h in view.live_hosts()):
        return []
    options = [v for h in view.live_hosts() if (v := _victims(view, facts, h.host_id, need))]
    return min(options, key=lambda victims: victims[-1].idle_since_s or 0.0, default=[])


def _victims(view: ClusterView, facts: ActionFacts, host_id: HostId, need: float) -> list[InstanceView]:
    """On one host.  Stage 0 is named, wherever it is; a model that several instances hold goes with the last."""
    host, found = view.hosts[host_id], list[InstanceView]()
    here = [view.instances[i] for i in view.on_host.get(host_id, ())]
    gained = 0
    for head in sorted(_idle(view, facts, here), key=lambda v: (v.idle_since_s or 0.0, v.record.instance_id)):
        found.append(head)
        gone = {v.record.group_id for v in found}
        gained = sum(_held(view, v) for v in here if v.record.group_id in gone and not _is_shared(view, v, here, gone))
        if host.pool_takes(need - gained):
            return found
    return []


def _idle(view: ClusterView, facts: ActionFacts, here: Iterable[InstanceView]) -> list[InstanceView]:
    heads = {h.record.instance_id: h for v in here if (h := view.head(v.record)) is not None}
    return [h for h in heads.values() if h.idle_since_s is not None and view.may_go(h)
            and h.record.action != facts.name and view.action(h.record.action).is_spare]  # fmt: skip


def _held(view: ClusterView, instance: InstanceView) -> int:
    """Bytes of the pool that it holds; 0 where its plan is not known."""
    group = view.groups.get(instance.record.group_id)
    if group is None:
        return 0
    stage = group.plan.stages[instance.record.stage]
    return partition.size(stage.first_ranges) + partition.size(stage.later_ranges)


def _is_shared(view: ClusterView, one: InstanceView, here: Iterable[InstanceView], gone: Collection[GroupId]) -> bool:
    """Somebody who stays holds the same bytes: they would not come free."""
    mine = view.groups.get(one.record.group_id)
    for other in here:
        its = view.groups.get(other.record.group_id)
        if mine is None or its is None or other.record.group_id in gone or its.plan.model != mine.plan.model:
            continue
        if its.plan.stages[other.record.stage].first_ranges == mine.plan.stages[one.record.stage].first_ranges:
            return True
    return False


def _mb(n_bytes: float) -> str:
    return f"{-(-int(n_bytes) // (1024 * 1024))} MiB"

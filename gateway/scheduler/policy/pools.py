"""A host's memory for models: fetchd's pool, which holds every byte of a model before a device has it.

The pool is another memory than the device's, so it can be full where a device has room.  The scheduler counts in slabs,
as fetchd does (relay/protocol/pool.py).  It knows for every host what the pool holds and what the scheduler's own
starts take (pool_account.py).

    never fits  → MemoryTooSmall, with what is needed and what the hosts have
    not now     → the host takes no such part (placement chooses another host), idle instances that hold a model are
                  released, and the action waits in line as for device memory
    it fits     → ``reserve`` counts all stages of the group before any of them is told to start
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from gateway.scheduler.decisions import StageStart
from gateway.scheduler.events import ActionFacts
from gateway.scheduler.placement.pool_account import PoolAccount, claim_of
from gateway.scheduler.placement.stage_bytes import Stages
from gateway.scheduler.view.cluster import ClusterView
from gateway.scheduler.view.entries import InstanceView
from gateway.scheduler.view.hosts import HostView
from thaw.errors import MemoryTooSmall, ThawError
from thaw.ids import InstanceId
from thaw.plan import Plan, PlanModel, PlanStage


def refusal(view: ClusterView, facts: ActionFacts, stages: Stages, most: int) -> ThawError | None:
    """Return why no host can ever hold a part of this model that a start would fetch, or None.  ``most``: the number of
    stages that a start may have."""
    n = facts.forced_stages or most
    pools = view.largest.pools()
    if not pools or any(stages.slabs(n, slab_bytes) <= n_slabs for slab_bytes, n_slabs in pools):
        return None
    least = min(stages.slabs(n, slab_bytes) * slab_bytes for slab_bytes, _ in pools)
    each = f" in each of {n} stages" if n > 1 else ""
    return MemoryTooSmall(
        f"{facts.name} needs {mebibytes(least)} of host memory for its model{each}; the largest pool of "
        f"{len(view.hosts)} host(s) has {mebibytes(max(slab_bytes * n_slabs for slab_bytes, n_slabs in pools))}",
        hint="raise THAW_FETCHD_POOL_MB",
    )


def reserve(view: ClusterView, plan: Plan, starts: Sequence[StageStart]) -> Plan:
    """Count every stage's part in its host's pool from now on; placement has seen that all of them have room.

    The rest of the model, which a full stage fetches behind the traffic, is an extra: where the pool has no room for
    it, the returned plan goes without it.  A host therefore takes the slabs that were counted here and no more.
    """
    if plan.model is None:
        return plan
    for stage, start in zip(plan.stages, starts, strict=True):
        first = claim_of(plan.model, _without_rest(stage))
        view.hosts[stage.host].pool.claim(start.instance_id, first)
    stages = tuple(
        _with_rest(view.hosts[stage.host].pool, plan.model, stage, start)
        for stage, start in zip(plan.stages, starts, strict=True)
    )
    return plan if stages == plan.stages else replace(plan, stages=stages)


def claim_again(view: ClusterView, host: HostView) -> None:
    """Count the claims of instances that were known before their host was."""
    for instance_id in view.on_host.get(host.host_id, ()):
        record = view.instances[instance_id].record
        if (kept := view.kept.get(instance_id)) is not None and kept.plan.model is not None:
            host.pool.claim(instance_id, claim_of(kept.plan.model, kept.plan.stages[0]))
            continue
        group = view.groups.get(record.group_id)
        if group is not None and group.plan.model is not None and instance_id in group.instance_ids:
            host.pool.claim(instance_id, claim_of(group.plan.model, group.plan.stages[record.stage]))


def _with_rest(pool: PoolAccount, model: PlanModel, stage: PlanStage, start: StageStart) -> PlanStage:
    """Return the stage with the rest of the model if the pool has room for it, else without.  Its first part is counted
    already."""
    if not stage.later_ranges or pool.enlarge(start.instance_id, claim_of(model, stage)):
        return stage
    return _without_rest(stage)


def _without_rest(stage: PlanStage) -> PlanStage:
    return replace(stage, later_ranges=()) if stage.later_ranges else stage


def evictions(view: ClusterView, facts: ActionFacts) -> list[InstanceView]:
    """Return idle instances of other actions, longest idle first, whose models make room in a host's pool.  The list is
    empty when no eviction helps, or when the pools have room by now or soon: then something else is lacking."""
    stages = view.model(facts.model_uri).stages if facts.is_llm else None
    if stages is None:
        return []
    n = facts.forced_stages or 1
    if _have_room_soon(view, stages, n):
        return []
    options = [v for h in view.live_hosts() if (v := _victims(view, facts, h, stages.slabs(n, h.pool.slab_bytes)))]
    return min(options, key=lambda victims: victims[-1].idle_since_s or 0.0, default=[])


def _have_room_soon(view: ClusterView, stages: Stages, n_stages: int) -> bool:
    """True when the pools of all hosts together have room for a group, now or soon.  Every start that waits for device
    memory asks this; the first few hosts are mostly enough for the answer."""
    n_parts = 0
    for host in view.live_hosts():
        n_parts += _parts_soon(host, stages, n_stages)
        if n_parts >= n_stages:
            return True
    return False


def _parts_soon(host: HostView, stages: Stages, n_stages: int) -> int:
    """Return how many of the largest parts of a model in ``n_stages`` stages fit now; if none, how many fit when the
    instances that are leaving have left."""
    parts = host.pool_parts(stages, n_stages)
    if parts or host.pool.slab_bytes == 0:
        return parts
    return max(0, host.pool.free_without()) // stages.slabs(n_stages, host.pool.slab_bytes)


def has_room_soon(host: HostView, stages: Stages, n_stages: int) -> bool:
    """True when a part of the model in ``n_stages`` stages fits into the host's pool, now or when the instances that
    are leaving have left."""
    return _parts_soon(host, stages, n_stages) > 0


def _victims(view: ClusterView, facts: ActionFacts, host: HostView, need: int) -> list[InstanceView]:
    """Return the instances to evict on one host.  A group is named by its stage 0, wherever that is.  A model that
    several instances hold is freed with the last of them."""
    found, gone = list[InstanceView](), set[InstanceId]()
    here = [view.instances[i] for i in view.on_host.get(host.host_id, ())]
    for head in sorted(_idle(view, facts, here), key=lambda v: (v.idle_since_s or 0.0, v.record.instance_id)):
        found.append(head)
        gone |= {v.record.instance_id for v in here if v.record.group_id == head.record.group_id}
        if host.pool.free_without(gone) >= need:
            return found
    return []


def _idle(view: ClusterView, facts: ActionFacts, here: Iterable[InstanceView]) -> list[InstanceView]:
    heads = {h.record.instance_id: h for v in here if (h := view.head(v.record)) is not None}
    return [
        h
        for h in heads.values()
        if view.may_go(h) and h.record.action != facts.name and view.action(h.record.action).is_spare
    ]


def mebibytes(n_bytes: float) -> str:
    return f"{-(-int(n_bytes) // (1024 * 1024))} MiB"

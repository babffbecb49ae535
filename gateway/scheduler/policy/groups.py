"""Groups: the end of one with all its stages, the stages left behind, and the groups that a successor continues.

::

    decided ──▶ starting ──every stage READY──▶ whole ──first stage GONE──▶ ended
                   └──────a stage is GONE, or never came──────────────────▶ ended
                                                  └──stage 0 is one worker──▶ a group of one (consolidation.py); further
                                                     stages that stay become groups of one too (scale_up.py)
    orphan: a stage of an ended group.  It serves no request and counts as no supply; it holds its memory until its host
            says GONE, or no longer reports it
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from gateway.scheduler.decisions import (
    CancelGroup,
    Decision,
    DropPlan,
    ReleaseInstance,
    RevokeCredential,
    TimerKind,
    Wake,
)
from gateway.scheduler.placement.plans import fetch_key, later_key, slots
from gateway.scheduler.placement.pool_account import claim_of
from gateway.scheduler.view.cluster import ClusterView
from gateway.scheduler.view.entries import GroupView, InstanceView
from thaw import partition
from thaw.ids import CommandId, HostId, InstanceId
from thaw.instance import InstanceState
from thaw.plan import Plan

RELEASE_DEADLINE_S: Final = 60.0
"""A release first waits for the requests that run.  A release without an answer after this time counts as refused; a
cancel is sent again."""


def end(view: ClusterView, group: GroupView, now_s: float) -> list[Decision]:
    """End a group of which a stage has gone or never came: its other stages are of no use.  Requests that wait for this
    group then wait for another."""
    plan = group.plan
    view.drop_group(group)  # its remaining stages are released below, or have gone
    for stage in plan.stages:
        if (host := view.hosts.get(stage.host)) is not None:
            host.ledger.remove(fetch_key(plan.group_id, stage.stage), now_s)
            host.ledger.remove(later_key(plan.group_id, stage.stage), now_s)
    left = view.members(plan.group_id)
    decided = orphans(view, left, now_s) if group.is_starting or len(plan.stages) > 1 else []
    return [*decided, *forget_plan(plan, left)]


def forget_plan(plan: Plan, left: Sequence[InstanceView] = ()) -> list[Decision]:
    """Delete the plan last.  While it exists, a successor scheduler finds what remains to be undone.  A worker whose
    pipeline is not gone yet (``left``) still has its credential."""
    was_pipeline = len(plan.stages) > 1 or any(m.record.n_stages > 1 for m in left)
    revoked: list[Decision] = [RevokeCredential(plan.group_id)] if was_pipeline else []
    return [*revoked, DropPlan(plan.group_id)]


def orphans(view: ClusterView, members: Sequence[InstanceView], now_s: float) -> list[Decision]:
    """Cancel stages that no request can use.  They hold their memory until their hosts say that they are gone."""
    decided: list[Decision] = []
    by_host: dict[HostId, CommandId] = {}
    for member in members:
        record = member.record
        if record.host_id not in by_host:
            by_host[record.host_id] = CommandId(view.new_id())
            decided.append(CancelGroup(record.host_id, record.group_id, by_host[record.host_id]))
        view.set_releasing(member, by_host[record.host_id])
        decided.append(Wake(now_s + RELEASE_DEADLINE_S, TimerKind.RELEASE, record.instance_id))
    return decided


def dismiss(
    view: ClusterView, members: Sequence[InstanceView], now_s: float, *, only_idle: bool = False
) -> list[Decision]:
    """Release stages that are left behind.  The answer may be lost, so a timer follows."""
    decided: list[Decision] = []
    for member in members:
        command_id, record = CommandId(view.new_id()), member.record
        view.set_releasing(member, command_id)
        decided.append(ReleaseInstance(record.host_id, record.instance_id, command_id, only_idle, "consolidated"))
        decided.append(Wake(now_s + RELEASE_DEADLINE_S, TimerKind.RELEASE, record.instance_id))
    return decided


def last_left(view: ClusterView, group: GroupView) -> list[Decision]:
    """Called when a stage that was left behind has gone.  With the last one, nobody meets at the relay server."""
    return [] if view.left_behind(group) else [RevokeCredential(group.plan.group_id)]


def is_orphan(view: ClusterView, instance: InstanceView) -> bool:
    """True when the instance's group has ended or has left it behind.  A ready instance that is a group by itself may
    serve without a group: its plan was lost.  A stage that was set apart becomes one."""
    record = instance.record
    if record.instance_id in view.kept:
        return False
    if (group := view.groups.get(record.group_id)) is not None:
        return record.instance_id not in group.instance_ids
    return record.n_stages > 1 or record.state is InstanceState.STARTING


def adopt(view: ClusterView, plan: Plan, now_s: float) -> list[Decision]:
    """Continue a group that a former scheduler began.  Fetches in progress are booked with all their bytes and no
    deadline."""
    by_stage = {m.record.stage: m for m in view.members(plan.group_id)}
    members = [by_stage[stage.stage] for stage in plan.stages]
    starting = [m.record for m in members if m.state is InstanceState.STARTING]
    facts = view.action(plan.action).facts
    n_slots = slots(facts, len(members)) if facts is not None else members[0].record.slots
    instance_ids = tuple(m.record.instance_id for m in members)
    view.put_group(GroupView(plan, instance_ids, (), n_slots, set(), now_s, is_starting=bool(starting)))
    for member, stage in zip(members, plan.stages, strict=True):
        if plan.model is not None and (host := view.hosts.get(member.record.host_id)) is not None:
            claim = replace(claim_of(plan.model, stage), is_reported=member.state is not InstanceState.STARTING)
            host.pool.claim(member.record.instance_id, claim)
    for record in starting:
        n_bytes = partition.size(plan.stages[record.stage].first_ranges)
        if (host := view.hosts.get(record.host_id)) is not None and n_bytes:
            host.ledger.add(fetch_key(plan.group_id, record.stage), n_bytes, math.inf, now_s)
    return [Wake(now_s + view.settings.start_deadline_s, TimerKind.START, plan.group_id)] if starting else []


def abandon(view: ClusterView, plan: Plan, now_s: float) -> list[Decision]:
    """Give up a group of which a stage is missing, however far its commands have come: a new start is quicker than
    waiting."""
    members = view.members(plan.group_id)
    _count_abandoned(view, plan, members)
    known = {m.record.host_id for m in members}
    others = sorted({stage.host for stage in plan.stages} - known)
    cancels = [CancelGroup(h, plan.group_id, CommandId(view.new_id())) for h in others]
    return [*cancels, *orphans(view, members, now_s), *forget_plan(plan)]


def _count_abandoned(view: ClusterView, plan: Plan, members: Sequence[InstanceView]) -> None:
    """Count the group's parts in the pools of its hosts, which may fetch for it until they have heard of the cancel.  A
    stage that its host has confirmed counts until the host says that it has gone.  The instance of any other stage is
    not even known: the stage counts under a name made up here until the next report, which shows what the host then
    holds."""
    if plan.model is None:
        return
    by_stage = {m.record.stage: m.record.instance_id for m in members}
    for stage in plan.stages:
        if (host := view.hosts.get(stage.host)) is None:
            continue
        confirmed = by_stage.get(stage.stage)
        instance_id = confirmed or InstanceId(f"{plan.group_id}/{stage.stage}")
        host.pool.claim(instance_id, claim_of(plan.model, stage))
        if confirmed is None:
            host.pool.end_with_next_report(instance_id)

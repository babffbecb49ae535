"""The consequences of a failed start: its requests fail, or the action is started again, later or in one stage."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from gateway.scheduler.decisions import Decision, Flag, TimerKind, Wake
from gateway.scheduler.events import ActionFacts
from gateway.scheduler.policy import groups
from gateway.scheduler.policy.failing import fail
from gateway.scheduler.policy.starts import RETRY_BASE_S, RETRY_CAP_S, rescale, wake
from gateway.scheduler.view.cluster import ClusterView
from gateway.scheduler.view.entries import GroupView
from thaw.errors import (
    DeveloperError,
    ErrorInfo,
    InitFailed,
    ModelChanged,
    ModelCorrupt,
    ModelNotFound,
    ModelUnsupported,
    PoolFull,
    StoreUnavailable,
    WorkerLost,
    from_info,
)
from thaw.ids import ActivationId, GroupId
from thaw.plan import Plan

ENGINE_REFUSED: Final = frozenset(e.__name__ for e in (InitFailed, ModelUnsupported))
"""Errors of a start with which an engine says that it cannot run its part of the model."""

ABOUT_THE_MODEL: Final = frozenset(
    e.__name__ for e in (ModelChanged, ModelCorrupt, ModelNotFound, ModelUnsupported, StoreUnavailable)
)
"""A start that failed with one of these tells nothing about the bytes that the next start will find, so the model is
inspected again."""


def start_refused(view: ClusterView, group: GroupView, error: ErrorInfo, now_s: float) -> list[Decision]:
    if not group.is_starting:
        return []
    return [*start_failed(view, group, error, now_s), *rescale(view, group.plan.action, now_s)]


def start_failed(view: ClusterView, group: GroupView, error: ErrorInfo, now_s: float) -> list[Decision]:
    """Give back all that the start held; then either its requests fail or the action is retried after a pause."""
    plan = group.plan
    decided = groups.end(view, group, now_s)
    action = view.action(plan.action)
    if action.facts is not None and action.facts.is_llm and error.code in ABOUT_THE_MODEL:
        view.model(action.facts.model_uri).fresh = False
    action.failures += 1
    decided.append(
        Flag(
            "start_failed",
            {
                "group_id": plan.group_id,
                "action": plan.action,
                "code": error.code,
                "error": error.message,
                "in_a_row": action.failures,
            },
        )
    )
    action.gathers_until_s = 0.0
    if action.facts is not None and _failed_in_stages(action.facts, plan, error):
        action.facts = replace(action.facts, max_stages=1)  # until the action changes
        return decided
    if isinstance(from_info(error), DeveloperError):
        action.broken_version = plan.action_version
        return [*decided, *fail(view, plan.action, tuple(action.waiting), error, plan.group_id)]
    if error.code == PoolFull.__name__:  # the action waits as for device memory: the host's next report wakes it
        action.retry_at_s = now_s + RETRY_BASE_S
        return [*decided, *wake(action, plan.action, action.retry_at_s, now_s)]
    pause_s = min(RETRY_CAP_S, RETRY_BASE_S * 2 ** min(action.failures - 1, 16))
    action.retry_at_s = now_s + pause_s
    decided += fail(view, plan.action, _count_attempt(view, group), error, plan.group_id)
    return [*decided, *wake(action, plan.action, action.retry_at_s, now_s)]


def _failed_in_stages(facts: ActionFacts, plan: Plan, error: ErrorInfo) -> bool:
    """Return whether one worker may succeed where this pipeline did not: its engine refused it, and nobody asked for
    this number of stages."""
    chosen = len(plan.stages) > 1 and facts.forced_stages is None and facts.version == plan.action_version
    return chosen and facts.max_stages > 1 and error.code in ENGINE_REFUSED


def _count_attempt(view: ClusterView, group: GroupView) -> tuple[ActivationId, ...]:
    """Count one more failed start for each request that the group was to serve; return the requests that have had
    enough."""
    exhausted: list[ActivationId] = []
    for activation_id in sorted(group.activation_ids):
        if (demand := view.demand.get(activation_id)) is None:
            continue
        demand.attempts += 1
        if demand.attempts >= view.settings.max_attempts:
            exhausted.append(activation_id)
    return tuple(exhausted)


def start_overdue(view: ClusterView, group_id: GroupId, now_s: float) -> list[Decision]:
    """Handle a start's deadline: set it later if the start makes progress, else cancel the start and count it as
    failed."""
    if (group := view.groups.get(group_id)) is None or not group.is_starting:
        return []
    due_s = group.progress_s + view.settings.start_deadline_s
    if now_s < due_s:
        return [Wake(due_s, TimerKind.START, group_id)]
    error = WorkerLost(f"no progress for {view.settings.start_deadline_s:g} s").info()
    return [
        Flag("start_overdue", {"group_id": group_id, "action": group.plan.action}),
        *start_failed(view, group, error, now_s),
        *rescale(view, group.plan.action, now_s),
    ]

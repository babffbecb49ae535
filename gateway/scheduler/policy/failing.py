"""Requests that end with an error."""

from __future__ import annotations

from gateway.scheduler.decisions import Decision, FailDemand
from gateway.scheduler.view.cluster import ClusterView
from thaw.errors import ErrorInfo, ThawError, Throttled
from thaw.ids import ActionName, ActivationId, GroupId, Namespace
from thaw.quotas import who_raises


def fail_all(view: ClusterView, name: ActionName, error: ThawError) -> list[Decision]:
    return fail(view, name, tuple(view.action(name).waiting), error.info(), GroupId(""))


def fail(
    view: ClusterView, name: ActionName, activation_ids: tuple[ActivationId, ...], error: ErrorInfo, group_id: GroupId
) -> list[Decision]:
    """End these requests with ``error``.  The view forgets them at once, so that each is told only once."""
    for activation_id in activation_ids:
        view.drop_demand(activation_id)
    return [FailDemand(name, activation_ids, error, group_id)] if activation_ids else []


def too_many_starts(view: ClusterView, name: ActionName) -> Throttled:
    """The answer to a request that has waited in vain for one of its namespace's starts to end."""
    namespace = Namespace(name.partition("/")[0])
    return Throttled(
        "The request waited for a start for as long as it may: its namespace has as many in progress as allowed "
        f"({view.shares.most_starts(namespace)}). {who_raises('starts', namespace)}."
    )

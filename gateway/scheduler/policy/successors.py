"""One worker in the place of an idle group, once the whole model lies in a host's memory.

This is for groups that could not become one worker while they served (consolidation.py).

Several stages make a start fast, but serving afterwards is slow: a group holds a whole worker's memory and a part for
every further stage, and its low stages serve with a part of their device.  By the time the group is idle, stage 0 has
brought the rest of the weights into its host's memory.  An idle group is therefore replaced by one worker that loads
from there, fetches nothing, and is idle in its place::

    group of s stages, idle ──released──▶ stage 0 gone ──start of one stage from host memory──▶ idle, for keep_alive_s
                        └──refused: a request came──▶ serves it, and is asked again when it is idle

Like every start, this one takes the newest version of the model: a look precedes the release, and a group whose model
was pushed again serves until its keep-alive ends.

The worker is started only where there is room for it, in the host's memory for models beside stage 0's part: no
instance is evicted for it and no request waits for it.
"""

from __future__ import annotations

from typing import Final

from gateway.scheduler.decisions import Decision
from gateway.scheduler.policy import consolidation
from gateway.scheduler.policy.groups import RELEASE_DEADLINE_S
from gateway.scheduler.policy.looks import ensure_model
from gateway.scheduler.policy.place import place
from gateway.scheduler.policy.starts import start_group
from gateway.scheduler.view.cluster import ClusterView
from gateway.scheduler.view.entries import GroupView, InstanceView
from thaw.ids import HostId

LOOKED_S: Final = 0.5
"""A look at the model is answered within this time, or the group waits for another one."""


def is_due(view: ClusterView, head: InstanceView) -> bool:
    """True when an idle group of several stages may be replaced: its size was not forced, its model may still be run,
    and the whole model lies on its first host, which has room for it once more."""
    record, action = head.record, view.action(head.record.action)
    group = view.groups.get(record.group_id)
    return (
        view.parts.succession
        and group is not None
        and not consolidation.is_pursued(group)
        and action.facts is not None
        and action.facts.refused is None
        and action.facts.forced_stages is None
        and not action.waiting
        and action.n_serving > action.minimum
        and view.model(action.facts.model_uri).fresh
        and _has_model(view, action.facts.model_uri, record.host_id)
        and view.hosts[record.host_id].pool_takes(view.model(action.facts.model_uri).stages, 1)
    )


def look(view: ClusterView, head: InstanceView, now_s: float) -> list[Decision] | None:
    """Before a release for a successor, check that the model is still the newest, as before any start.  Return None if
    it was checked just now."""
    facts = view.action(head.record.action).facts
    if facts is None or view.model(facts.model_uri).is_current(now_s):
        return None
    return ensure_model(view, facts.model_uri, now_s)


def succeed(view: ClusterView, group: GroupView, now_s: float) -> list[Decision]:
    """Start the one worker after stage 0 has gone as it was asked to.  Requests that are waiting by now get a start of
    their own."""
    action = view.action(group.plan.action)
    facts = action.facts
    if not group.gives_way or facts is None or action.waiting or action.n_serving:
        return []
    model = view.model(facts.model_uri)
    if not model.is_current(now_s - RELEASE_DEADLINE_S):
        return []  # by now the facts from before the release may be out of date
    stages = model.stages
    choice = None if stages is None else place(view, facts, stages, 0.0, now_s)
    if choice is None or choice.n_stages > 1 or not _has_model(view, facts.model_uri, choice.seats[0].host_id):
        return []
    return start_group(view, facts, stages, choice, now_s)


def _has_model(view: ClusterView, uri: str, host_id: HostId) -> bool:
    host, model = view.hosts.get(host_id), view.model(uri).facts
    if host is None or model is None:
        return False
    return host.has_model(model.uri, model.weight_bytes, model.version)

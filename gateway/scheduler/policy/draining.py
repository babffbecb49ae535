"""Draining a host for an operator: no start is placed there (placement does not see it), and its groups are released.

A group that is ready finishes the requests that it has and takes no more, whether it is busy or not: otherwise new
requests would keep a busy instance there for ever.  A group that is starting may become ready and serves the requests
that wait for it; it is released at the next heartbeat after that.
"""

from __future__ import annotations

from gateway.scheduler.decisions import Decision
from gateway.scheduler.policy import scale_up
from gateway.scheduler.policy.starts import release, rescale
from gateway.scheduler.view.cluster import ClusterView
from gateway.scheduler.view.hosts import HostView
from thaw.ids import ActionName
from thaw.instance import InstanceState


def leave(view: ClusterView, host: HostView, now_s: float) -> list[Decision]:
    """Release every group that has a stage here and is ready as a whole; start its action's minimum elsewhere."""
    decided: list[Decision] = []
    actions: dict[ActionName, None] = {}
    for instance_id in sorted(view.on_host.get(host.host_id, ())):
        instance = view.instances.get(instance_id)
        if instance is not None and instance_id in view.kept:
            decided += scale_up.give_up(view, instance, now_s)
            continue
        head = None if instance is None else view.head(instance.record)
        if head is None or head.releasing is not None or head.state is not InstanceState.READY:
            continue
        group = view.groups.get(head.record.group_id)
        if group is not None and group.is_starting:
            continue
        decided += release(view, head, now_s, only_idle=False, reason="drained")
        actions[head.record.action] = None
    return decided + [d for name in actions for d in rescale(view, name, now_s)]

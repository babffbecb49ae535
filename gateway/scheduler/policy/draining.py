"""A host that an operator drains: nothing new goes there (placement does not see it), and what is there leaves.

What is ready finishes what it has and takes no more, busy or not: else a busy instance would be kept busy for ever.
What starts is left to start and to serve who waits for it; it is asked to leave at the next heartbeat after.
"""

from __future__ import annotations

from gateway.scheduler.decisions import Decision
from gateway.scheduler.policy.starts import release, rescale
from gateway.scheduler.view.cluster import ClusterView
from gateway.scheduler.view.hosts import HostView
from thaw.ids import ActionName
from thaw.instance import InstanceState


def leave(view: ClusterView, host: HostView, now_s: float) -> list[Decision]:
    """Release every group that has a stage here and is whole; its action's minimum is started elsewhere."""
    decided: list[Decision] = []
    actions: dict[ActionName, None] = {}
    for instance_id in sorted(view.on_host.get(host.host_id, ())):
        instance = view.instances.get(instance_id)
        head = None if instance is None else view.head(instance.record)
        if head is None or head.releasing is not None or head.state is not InstanceState.READY:
            continue
        group = view.groups.get(head.record.group_id)
        if group is not None and group.is_starting:
            continue
        decided += release(view, head, now_s, only_idle=False, reason="drained")
        actions[head.record.action] = None
    return decided + [d for name in actions for d in rescale(view, name, now_s)]

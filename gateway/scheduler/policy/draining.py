"""Draining a host for an operator: no start is placed there (placement does not see it), and its groups are released.

A group that is ready takes no more requests, whether it is busy or not: otherwise new requests would keep a busy
instance there for ever.  The requests that it has end there if they are a function's.  Those of an LLM are moved by
their gateways (serving/moving/migration.py), which ask for slots elsewhere as any request does.  A group that is
starting may become ready and serves the requests that wait for it; it is released at the next heartbeat after that.

A host that is taken back keeps instances that have not ended yet, as far as their actions still want them.
"""

from __future__ import annotations

from gateway.scheduler.decisions import Decision, UndrainInstance
from gateway.scheduler.policy import scale_up
from gateway.scheduler.policy.groups import is_orphan
from gateway.scheduler.policy.starts import n_kept, release, rescale
from gateway.scheduler.view.cluster import ClusterView
from gateway.scheduler.view.entries import InstanceView
from gateway.scheduler.view.hosts import HostView
from thaw.ids import ActionName, CommandId
from thaw.instance import InstanceState


def leave(view: ClusterView, host: HostView, now_s: float) -> list[Decision]:
    """Release every group that has a stage here and is ready as a whole; start its action's minimum elsewhere."""
    decided: list[Decision] = []
    actions: dict[ActionName, None] = {}
    kept = [i for i in sorted(view.on_host.get(host.host_id, ())) if i in view.kept and i in view.instances]
    for instance_id in kept:
        decided += scale_up.give_up(view, view.instances[instance_id], now_s)
    for head in _heads(view, host):
        if head.releasing is not None or head.state is not InstanceState.READY:
            continue
        group = view.groups.get(head.record.group_id)
        if group is not None and group.is_starting:
            continue
        decided += release(view, head, now_s, only_idle=False, reason="drained", drained=True)
        actions[head.record.action] = None
    return decided + [d for name in actions for d in rescale(view, name, now_s)]


def stay(view: ClusterView, host: HostView) -> list[Decision]:
    """Take back every group here that still drains because a host was emptied, and that its action may have now.  It is
    told again until its host says so, or that it has gone."""
    decided: list[Decision] = []
    for head in _heads(view, host):
        record = head.record
        if not _may_stay(view, head) or not _has_room(view, head):
            continue
        for member in view.stages_of(head):
            view.set_releasing(member, None)
        decided.append(UndrainInstance(record.host_id, record.instance_id, CommandId(view.new_id())))
    return decided


def _may_stay(view: ClusterView, head: InstanceView) -> bool:
    """True when the group drains only because of a host that is taken back now, and nothing else has ended it."""
    record = head.record
    if not record.drained or head.state is not InstanceState.DRAINING or _needs_drained_host(view, head):
        return False
    if record.group_id not in view.groups or is_orphan(view, head):
        return False
    facts = view.action(record.action).facts
    return facts is not None and facts.version == record.action_version


def _has_room(view: ClusterView, head: InstanceView) -> bool:
    """True when the action, which may have started others elsewhere meanwhile, keeps within its maximum."""
    action = view.action(head.record.action)
    if action.facts is None:
        return False
    drained = sorted(i for i in action.instances if _may_stay(view, view.instances[i]))
    n_more = action.facts.max_instances - action.n_serving - n_kept(view, action)
    return head.record.instance_id in drained[: max(0, n_more)]


def _heads(view: ClusterView, host: HostView) -> list[InstanceView]:
    """Return the first stage of each group that has a stage on the host.  One that was set apart is in none."""
    found: dict[str, InstanceView] = {}
    for instance_id in sorted(view.on_host.get(host.host_id, set()) - view.kept.keys()):
        instance = view.instances.get(instance_id)
        head = None if instance is None else view.head(instance.record)
        if head is not None:
            found[head.record.instance_id] = head
    return list(found.values())


def _needs_drained_host(view: ClusterView, head: InstanceView) -> bool:
    hosts = (view.hosts.get(member.record.host_id) for member in view.stages_of(head))
    return any(host is not None and host.draining for host in hosts)

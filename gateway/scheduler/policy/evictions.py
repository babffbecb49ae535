"""Which idle groups are released to make room for another action's workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gateway.scheduler.events import ActionFacts
from gateway.scheduler.view.cluster import ClusterView
from gateway.scheduler.view.entries import InstanceView
from gateway.scheduler.view.evictable_memory import Where


def evictions(view: ClusterView, facts: ActionFacts, needs: Sequence[int]) -> list[InstanceView]:
    """Return idle groups whose memory makes room for workers of ``needs`` bytes (largest first), longest idle first, or
    [] when no eviction helps.

    Memory that releases in progress will free counts: where it is enough, nothing more is evicted.
    """
    if len(needs) == 1 and view.idle.is_soon_free(needs[0], for_model=facts.is_llm):
        return []
    taken: dict[Where, int] = {}
    for need in needs:
        at = None if len(needs) == 1 else _free_for(view, facts, need, taken)
        if at is None:
            return [view.instances[i] for i in view.idle.longest_idle(need, taken, for_model=facts.is_llm)]
        taken[at] = taken.get(at, 0) + need
    return []


def _free_for(view: ClusterView, facts: ActionFacts, need: int, taken: Mapping[Where, int]) -> Where | None:
    """Return a device that has room, or will have room once the releases in progress have ended; else None."""
    for host in view.live_hosts():
        room = host.room(for_model=facts.is_llm)
        if room.most_free >= need:
            for d in room.devices:
                where = host.host_id, d.device.name
                if d.free - taken.get(where, 0) >= need:
                    return where
    going = view.idle.releasing(for_model=facts.is_llm)
    return next((where for where, n_bytes in going if n_bytes - taken.get(where, 0) >= need), None)

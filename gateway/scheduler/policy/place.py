"""Choose the number of stages, the hosts and the devices of an action's next group."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gateway.scheduler.events import ActionFacts
from gateway.scheduler.placement.plans import Choice, Seat, low_reserve
from gateway.scheduler.placement.reasons import considered
from gateway.scheduler.placement.schemes import (
    Request,
    Scheme,
    sizes,
)
from gateway.scheduler.placement.select import Weighing, best_of, fallback, in_order, select, spread, weigh
from gateway.scheduler.placement.stage_bytes import Stages
from gateway.scheduler.policy import pools
from gateway.scheduler.policy.offers import EXPLAINED_HOSTS, Offers, could_be_in_time, variant
from gateway.scheduler.policy.transports import has_transport
from gateway.scheduler.view.cluster import ClusterView
from thaw.ids import HostId, InstanceId
from thaw.plan import StageRole

RELEASE_WAIT_S = 60.0
"""A release has ended long before this time has passed.  A request that has waited this long takes the hosts that have
room now."""
SMALL_SIZES = 2
"""Among many hosts this many sizes, the smallest first, are tried one by one before all others together."""


@dataclass(frozen=True, slots=True)
class Awaited:
    """What a start waits for that would be late now."""

    heads: tuple[InstanceId, ...]  # idle groups that must be released; empty when the releases in progress are enough
    hosts: frozenset[HostId]  # where it would start then


def place(
    view: ClusterView, facts: ActionFacts, stages: Stages | None, t_w: float, now_s: float, n_workers: int = 1
) -> Choice | None:
    """Return the best place that has room now for a group that can leave ``n_workers`` workers behind, or None."""
    if stages is None:
        return _least_loaded(view, facts)
    if facts.forced_stages is None and view.index.most_free < facts.need_bytes:
        return None  # every group has a full worker, and the fallback is a full worker
    most = most_stages(view, facts, stages)
    request = _request(view, facts, stages, t_w)
    if facts.forced_stages is not None:
        offers = Offers(view, facts, stages, request, most, now_s)
        scheme = _forced(view, facts, offers, request, facts.forced_stages)
        if scheme is None or _waits_for_a_host(view, facts, stages, offers, scheme, t_w):
            return None
        return offers.explained(scheme, request, facts, {})
    many = len(view.hosts) > EXPLAINED_HOSTS
    found: tuple[Offers, Weighing] | None = None
    if many and could_be_in_time(view, facts, stages, request, most):
        found = _small(view, facts, stages, request, most, now_s, n_workers)
    elif many:
        found = _late(view, facts, stages, request, most, now_s)
    if found is None:
        offers = Offers(view, facts, stages, request, most, now_s, only_promises=many)
        found = offers, _chosen(view, facts, offers, request, most, n_workers)
    offers, weighing = found
    if (chosen := weighing.chosen) is None:
        return _in_parts(view, facts, stages, request, most, now_s)
    if many:  # to work out the others would be another ten examinations of the links
        weighing = replace(weighing, tried=tuple(t for t in weighing.tried if t[1] is not None))
    judged = considered(weighing, offers.servers, variant(view), offers.bandwidth)
    return offers.explained(chosen, request, facts, {"sizes": [c.plain() for c in judged]}, n_workers)


def in_time_without_idle(
    view: ClusterView, facts: ActionFacts, stages: Stages, t_w: float, now_s: float, n_workers: int
) -> Awaited | None:
    """Where a start would miss its objective for lack of memory on the right hosts, return what must be released for
    one that meets it, or None when no release helps."""
    if view.idle.is_empty or t_w >= facts.slo_ttft_s:
        return None
    request, most = _request(view, facts, stages, t_w), most_stages(view, facts, stages)
    if not could_be_in_time(view, facts, stages, request, most):
        return None
    offers = Offers(view, facts, stages, request, most, now_s, without_idle=True, only_promises=True)
    scheme = _chosen(view, facts, offers, request, most, n_workers, may_be_late=False).chosen
    if scheme is None:
        return None
    choice = offers.choice(scheme, request, facts, {})
    found: dict[InstanceId, None] = {}
    for seat in choice.seats:
        full = seat.role is StageRole.FULL
        need = facts.need_bytes if full else low_reserve(facts.need_bytes, choice.n_stages)
        found.update(dict.fromkeys(view.idle.lacking((seat.host_id, seat.device), need)))
    return Awaited(tuple(found), frozenset(seat.host_id for seat in choice.seats))


def _request(view: ClusterView, facts: ActionFacts, stages: Stages, t_w: float) -> Request:
    """Build the request of Algorithm 1.  It has no times of its own: every host is offered with those of its kind of
    device."""
    return Request(
        stages.facts.n_bytes,
        facts.need_bytes - stages.facts.n_bytes,
        facts.slo_ttft_s,
        facts.slo_tpot_s,
        max(0.0, t_w),
        overlap=view.parts.overlap,
        largest_parts=stages.largest(most_stages(view, facts, stages)),
    )


def most_stages(view: ClusterView, facts: ActionFacts, stages: Stages) -> int:
    """Return the largest number of stages that a group may have.  Unless a number is forced, it is 1 where the
    installation lacks the transport, because stages could not meet."""
    if facts.forced_stages is not None or not has_transport(view.settings, facts):
        return facts.forced_stages or 1
    return max(1, min(facts.max_stages, stages.most))


def _small(
    view: ClusterView, facts: ActionFacts, stages: Stages, request: Request, most: int, now_s: float, n_workers: int
) -> tuple[Offers, Weighing] | None:
    """Try the smallest sizes one by one.  A size that is in time with no worker that shares a device is the answer,
    because no other size is better.  For each size hosts are offered for it alone: its one deadline leaves few links
    that differ.  Return None when every size has to be worked out."""
    if (chosen := variant(view)) != "min_sharing":
        return None
    for size in in_order(sizes(request, n_workers, most, _min_full(facts, most, n_workers)), chosen)[:SMALL_SIZES]:
        offers = Offers(view, facts, stages, request, most, now_s, only_promises=True, size=size)
        scheme = best_of(size, offers.servers, chosen, offers.bandwidth)
        if scheme is not None:
            return (offers, Weighing(scheme, ((size, scheme),))) if scheme.sharing == 0 else None
    return None


def _late(
    view: ClusterView, facts: ActionFacts, stages: Stages, request: Request, most: int, now_s: float
) -> tuple[Offers, Weighing]:
    """The fallback alone, because no size can be in time."""
    offers = Offers(view, facts, stages, request, most, now_s, only_promises=True)
    return offers, Weighing(fallback(offers.servers, request, variant(view), offers.bandwidth), ())


def _min_full(facts: ActionFacts, most: int, n_workers: int) -> int:
    return min(most, max(n_workers, facts.keep or 1))


def _chosen(
    view: ClusterView,
    facts: ActionFacts,
    offers: Offers,
    request: Request,
    most: int,
    n_workers: int,
    *,
    may_be_late: bool = True,
) -> Weighing:
    """Run Algorithm 1.  Where no group can leave so many workers behind in time, take one that leaves fewer."""
    for wanted in range(n_workers, 0, -1):
        weighing = weigh(
            offers.servers,
            request,
            variant=variant(view),
            min_stages=wanted,
            max_stages=most,
            min_full=_min_full(facts, most, wanted),
            bandwidth=offers.bandwidth,
            thorough=len(view.hosts) <= EXPLAINED_HOSTS,
            may_be_late=may_be_late,
        )
        if weighing.chosen is not None and not weighing.chosen.fallback:
            break
    return weighing


def _forced(view: ClusterView, facts: ActionFacts, offers: Offers, request: Request, s: int) -> Scheme | None:
    """Return a placement of exactly ``s`` stages, in time if that is possible.  Where no device can hold the whole
    model, all stages are low."""
    largest = view.largest.device(for_model=True)
    w = 0 if largest is not None and facts.need_bytes > largest and s > 1 else min(s, facts.keep or 1)
    found = select(
        offers.servers,
        request,
        variant=variant(view),
        min_stages=s,
        max_stages=s,
        min_full=w,
        bandwidth=offers.bandwidth,
    )
    if found is not None and not found.fallback:
        return found
    return spread(offers.servers, request, s, w, bandwidth=offers.bandwidth)


def _waits_for_a_host(
    view: ClusterView, facts: ActionFacts, stages: Stages, offers: Offers, scheme: Scheme, t_w: float
) -> bool:
    """True when some stages would share a host while another host will soon have room for one: the start then waits for
    it."""
    used = {offers.host_id(p.server) for p in (*scheme.full, *scheme.low)}
    if len(used) == scheme.s or t_w >= RELEASE_WAIT_S:
        return False
    need = low_reserve(facts.need_bytes, scheme.s)
    return any(
        host.host_id not in used
        and pools.has_room_soon(host, stages, scheme.s)
        and any(d.free + d.releasing >= need for d in host.room(for_model=True).devices)
        for host in view.live_hosts()
    )


def _in_parts(
    view: ClusterView, facts: ActionFacts, stages: Stages, request: Request, most: int, now_s: float
) -> Choice | None:
    """Return the smallest group of several stages, for the case that no size is in time and the fallback (one whole
    worker) is impossible because no pool can hold the model."""
    if not view.hosts or any(h.pool_ever_takes(stages) for h in view.hosts.values()):
        return None
    offers = Offers(view, facts, stages, request, most, now_s)
    schemes = (spread(offers.servers, request, s, 1, bandwidth=offers.bandwidth) for s in range(2, most + 1))
    late = next((scheme for scheme in schemes if scheme is not None), None)
    return None if late is None else offers.explained(late, request, facts, {})


def _least_loaded(view: ClusterView, facts: ActionFacts) -> Choice | None:
    """Choose a place for a function without a model: fewest workers first, then most free memory."""
    best = min(
        (
            (h.n_workers, -h.room(for_model=False).most_free, h.host_id)
            for h in view.live_hosts()
            if h.room(for_model=False).most_free >= facts.need_bytes
        ),
        default=None,
    )
    if best is None:
        return None
    device = max(view.hosts[best[2]].room(for_model=False).devices, key=lambda d: d.free).device
    return Choice((Seat(best[2], device.name, device.kind),))

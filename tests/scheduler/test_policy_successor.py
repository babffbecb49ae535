"""What a successor decides, which rebuilds its view from the registry."""

from __future__ import annotations

from gateway.scheduler.decisions import CancelGroup, DropDemand, ForgetInstance, ReleaseInstance, StartGroup, Wake
from gateway.scheduler.events import GatewaysLost
from tests.scheduler.facts import READY, demand
from tests.scheduler.world import World, of, plan_of, rebuilt, record_of, world
from thaw.ids import GatewayId


def test_a_successor_adopts_what_is_ready_and_counts_its_idle_time_from_the_record() -> None:
    start = world().started()
    w = World()
    ready = record_of(start, READY, idle_since_wall_ms=0)
    w.timers += of(w.do(rebuilt(instances=(ready,))), Wake)
    assert of(w.later(49.0), ReleaseInstance) == []
    assert len(of(w.later(2.0), ReleaseInstance)) == 1


def test_a_successor_takes_an_unconfirmed_start_back_and_serves_its_request_anew() -> None:
    w = World()
    decided = w.do(rebuilt(plans=(plan_of("lost"),), demand=(demand("a9"),)))
    assert [c.group_id for c in of(decided, CancelGroup)] == ["lost"]
    assert [s.activation_ids for s in of(decided, StartGroup)] == [("a9",)]


def test_a_successor_waits_for_silent_hosts_before_it_calls_them_lost() -> None:
    start = world().started()
    ready = record_of(start, READY, idle_since_wall_ms=10_000)
    w = World()
    assert of(w.do(rebuilt(hosts=(), instances=(ready,))), ForgetInstance) == []
    w.now += 3
    assert of(w.see(), ForgetInstance) == []
    w.now += 4
    assert len(of(w.see(), ForgetInstance)) == 1


def test_a_successor_waits_for_silent_gateways_before_it_drops_what_they_hold() -> None:
    w = World()
    w.do(rebuilt(demand=(demand("a9", gateway="silent"),)))
    lost = GatewaysLost(frozenset({GatewayId("silent")}))
    w.now += 5
    assert w.do(lost) == []
    w.now += 2
    assert [d.activation_id for d in of(w.do(lost), DropDemand)] == ["a9"]

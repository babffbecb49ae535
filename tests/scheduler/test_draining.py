"""A host that an operator drains, in the policy and with real processes around the registry."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import redis

from gateway.scheduler.decisions import Decision, ReleaseInstance, StartGroup, UndrainInstance
from gateway.scheduler.events import ActionDeleted, ActionSeen
from relay.protocol.messages import InstanceChanged
from relay.state.registry import Registry
from tests.scheduler.facts import HELLO, READY, STARTING, chat, hello, report
from tests.scheduler.groups import group_world
from tests.scheduler.world import World, hosts_of, of, serving, starting, world
from thaw.errors import NotFound
from thaw.ids import HostId
from thaw.instance import InstanceState


def two_hosts(**fields: Any) -> Any:
    return world(report("h0"), report("h1"), facts=hello(**fields))


def drained(w: World, *, drain: bool = True) -> list[Decision]:
    ids = [tuple(sorted(w.view.on_host.get(HostId(h), ()))) for h in ("h0", "h1")]
    return w.see(report("h0", draining=drain, instances=ids[0]), report("h1", instances=ids[1]))


@pytest.mark.parametrize("idle", [True, False])
def test_what_is_ready_on_a_drained_host_finishes_and_takes_no_more(idle: bool) -> None:
    w, start = starting(two_hosts())
    assert start.plan.stages[0].host == "h0"
    w.ready(start, idle=idle)
    (release,) = of(drained(w), ReleaseInstance)
    assert (release.instance_id, release.only_idle, release.reason) == (start.stages[0].instance_id, False, "drained")
    assert release.drained, "what runs is to be moved"
    assert of(drained(w), ReleaseInstance) == []  # the release was decided once already


def test_a_start_on_a_drained_host_is_left_to_serve_who_waits_for_it() -> None:
    w, start = starting(two_hosts())
    assert of(drained(w), ReleaseInstance) == []
    w.ready(start)
    assert [r.instance_id for r in of(drained(w), ReleaseInstance)] == [start.stages[0].instance_id]


def test_a_group_whose_other_stages_still_start_is_left_to_start() -> None:
    w, _ = serving(two_hosts())
    (group,) = w.view.groups.values()
    group.is_starting = True  # its first stage is ready before the others are
    assert of(drained(w), ReleaseInstance) == []
    group.is_starting = False
    assert len(of(drained(w), ReleaseInstance)) == 1


def leaving(**fields: Any) -> tuple[World, StartGroup]:
    """Two hosts, of which one is drained, and the instance that drains there."""
    w, start = serving(two_hosts(**fields), idle=False)
    drained(w)
    draining(w, start)
    return w, start


def draining(w: Any, start: StartGroup, **fields: Any) -> None:
    record = w.view.instances[start.stages[0].instance_id].record
    fields = {"state": InstanceState.DRAINING, "drained": True, "inflight": 1, "idle_since_wall_ms": None, **fields}
    w.do(InstanceChanged(replace(record, **fields)))


def test_a_host_that_is_taken_back_keeps_what_still_drains_and_is_told_until_it_says_so() -> None:
    w, start = leaving()
    assert of(drained(w), UndrainInstance) == []
    for _ in range(2):
        (undrain,) = of(drained(w, drain=False), UndrainInstance)
        assert (undrain.host_id, undrain.instance_id) == ("h0", start.stages[0].instance_id)
    draining(w, start, state=READY, drained=False)
    assert of(drained(w, drain=False), UndrainInstance) == []
    assert w.view.action(HELLO).n_serving == 1
    assert len(of(drained(w), ReleaseInstance)) == 1  # and may be drained again


def test_an_instance_that_drains_for_another_reason_is_not_taken_back() -> None:
    w, start = serving(two_hosts(), idle=False)
    draining(w, start, drained=False)
    assert of(drained(w, drain=False), UndrainInstance) == []


def test_a_draining_instance_does_not_keep_its_actions_maximum_from_starting_elsewhere() -> None:
    w, _ = leaving(max_instances=1)
    assert hosts_of(w.ask()) == ["h1"]


@pytest.mark.parametrize("event", [ActionDeleted(HELLO), ActionSeen(replace(hello(), version="0.0.2"), changed=True)])
def test_what_no_new_request_could_use_is_not_taken_back(event: Any) -> None:
    w, _ = leaving()
    w.do(event)
    assert of(drained(w, drain=False), UndrainInstance) == []


def test_no_more_is_taken_back_than_the_actions_maximum() -> None:
    w, start = leaving(max_instances=1)
    elsewhere = w.serving(idle=False)
    assert of(drained(w, drain=False), UndrainInstance) == []
    w.gone(elsewhere)
    assert [u.instance_id for u in of(drained(w, drain=False), UndrainInstance)] == [start.stages[0].instance_id]


def test_of_several_that_were_drained_as_many_are_taken_back_as_the_maximum_allows() -> None:
    w = two_hosts(max_instances=2)
    starts = of([*w.ask(), *w.ask()], StartGroup)
    for start in starts:
        w.ready(start, idle=False)
    drained(w)
    for start in starts:
        draining(w, start)
    w.serving(idle=False)
    for _ in range(2):  # and the same one is told again
        (undrain,) = of(drained(w, drain=False), UndrainInstance)
        assert undrain.instance_id == min(start.stages[0].instance_id for start in starts)


def test_a_stage_that_is_left_of_a_group_is_not_taken_back_and_its_release_stands() -> None:
    w, start = serving(group_world(facts=chat(forced_stages=2, max_stages=2)), idle=False)
    hosts = [s.host for s in start.plan.stages]
    w.now += 100
    w.see_all(hosts[1], draining=True)
    draining(w, start)
    others = [r for h, r in w.reports.items() if h != hosts[1]]
    w.see(*others)  # it is switched off before the requests have left
    left = w.view.instances[start.stages[0].instance_id]
    assert left.releasing is not None
    assert of(w.see(*others), UndrainInstance) == []
    assert left.releasing is not None


def test_a_group_is_taken_back_when_no_host_of_its_stages_is_drained_any_more() -> None:
    w, start = serving(group_world(facts=chat(forced_stages=2, max_stages=2)), idle=False)
    hosts = [s.host for s in start.plan.stages]
    # a stage on the host counts: the requests move off the group
    (release,) = of(w.see_all(hosts[1], draining=True), ReleaseInstance)
    assert (release.host_id, release.instance_id) == (hosts[0], start.stages[0].instance_id)
    assert release.drained
    w.see_all(*hosts, draining=True)
    draining(w, start)
    assert of(w.see_all(hosts[1], draining=True), UndrainInstance) == []  # its last stage's host is still to be emptied
    (undrain,) = of(w.see_all(), UndrainInstance)
    assert (undrain.host_id, undrain.instance_id) == (hosts[0], start.stages[0].instance_id)


def test_nothing_new_starts_on_a_drained_host_until_it_is_taken_back() -> None:
    w = two_hosts()
    drained(w)
    assert hosts_of([*w.ask(), *w.ask()]) == ["h1", "h1"]
    drained(w, drain=False)
    assert hosts_of(w.ask()) == ["h0"]


def test_min_instances_are_started_elsewhere_when_their_host_is_drained() -> None:
    w = two_hosts(min_instances=1)
    (minimum,) = [v for v in w.view.of_action(HELLO) if v.state is STARTING]
    start = next(iter(w.view.groups.values()))
    w.view.put_instance(replace(minimum.record, state=READY), w.now)
    start.is_starting = False
    assert minimum.record.host_id == "h0"
    assert hosts_of(drained(w)) == ["h1"]


def test_who_is_drained_is_kept_in_the_registry_and_shown_in_every_report(valkey_url: str) -> None:
    with redis.Redis.from_url(valkey_url) as client:
        registry = Registry(client)
        registry.report_host(report("h0"))
        registry.drain_host(HostId("h0"), drain=True)
        registry.report_host(report("h0"))  # the host's own report does not end the draining
        assert [r.draining for r in Registry(client).live_hosts()] == [True]
        registry.drain_host(HostId("h0"), drain=False)
        assert [r.draining for r in registry.hosts()] == [False]
        with pytest.raises(NotFound, match="There is no host nowhere"):
            registry.drain_host(HostId("nowhere"), drain=True)

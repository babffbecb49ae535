"""Groups of several stages, with the scheduler process, a state server that is also the relay server, and hosts that
use the real streams.
"""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest

from relay.protocol.messages import Cancel, Consolidate, InstanceChanged, Start, StartFailed
from relay.state import credentials, redis_link
from tests.scheduler.conftest import facts_of_model
from thaw.ids import GroupId
from thaw.instance import InstanceState
from thaw.plan import TransportKind


def four_hosts(platform: Any, *, become_ready: bool = True) -> list[Any]:
    hosts = [platform.host(f"h{i}") for i in range(4)]
    for host in hosts:
        host.on_start = lambda start: None if become_ready else False
    return hosts


def starts(hosts: list[Any], action: str = "guest/chat") -> list[Start]:
    """The first start that each host got for the action, ordered by stage."""
    found = (h.commands.wait(Start, where=lambda s: s.plan.action == action)[0] for h in hosts)
    return sorted(found, key=lambda s: s.stage)


def test_a_forced_size_starts_a_stage_on_every_host_and_lets_the_group_into_the_relay(platform: Any) -> None:
    hosts = four_hosts(platform)
    platform.llm(stages=4, memory=1000)
    platform.scheduler()
    activation = platform.ask("guest/chat")
    found = starts(hosts)
    plan = found[0].plan
    assert [s.stage for s in found] == [0, 1, 2, 3]
    assert {s.plan.group_id for s in found} == {plan.group_id}
    assert all(s.activation_ids == (activation,) for s in found)
    assert sorted(s.host for s in plan.stages) == ["h0", "h1", "h2", "h3"]
    assert (plan.transport.kind, plan.transport.address) == (TransportKind.REDIS, platform.url)
    assert plan.transport.credential_ref == credentials.ref(plan.group_id)
    assert credentials.read(platform.client, plan.transport.credential_ref).username.endswith(plan.group_id)


def test_thirty_requests_at_once_are_started_as_two_groups_of_four(platform: Any) -> None:
    hosts = four_hosts(platform, become_ready=False)
    platform.llm(memory=1000)
    platform.action(memory=128)
    platform.registry.put_model(facts_of_model("file:///m"))  # otherwise the whole burst would wait for an inspection
    platform.scheduler()
    platform.ask()
    platform.events.wait(InstanceChanged)  # the scheduler leads now, so it reads the burst from the stream
    platform.burst(30, "guest/chat")
    found = [s for host in hosts for s in host.commands.wait(Start, 2, where=lambda s: s.plan.action == "guest/chat")]
    assert sorted(s.stage for s in found) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {len(s.plan.stages) for s in found} == {4}
    assert len({s.plan.group_id for s in found}) == 2
    assert len({a for s in found for a in s.activation_ids}) == 30


def others_end(hosts: list[Any], first: Any) -> None:
    """Every host but the first loses its stage, and no host is told to cancel the group."""
    for host in hosts:
        if host is not first:
            host.until_empty()
    assert [c for h in hosts for c in h.commands.of(Cancel)] == []


def becomes_one_worker(host: Any, asked: Consolidate) -> None:
    host.put(replace(host.instances[asked.instance_id], n_stages=1, inflight=1, idle_since_wall_ms=None))


def whole_group(platform: Any, hosts: list[Any]) -> tuple[Start, Consolidate, Any]:
    """A group that serves, the command that its stage 0 got, and the host of that."""
    platform.llm(stages=4, keep=1)
    activation = platform.ask("guest/chat")
    found = starts(hosts)
    platform.served(activation, "guest/chat")
    first = next(h for h in hosts if h.host_id == found[0].plan.stages[0].host)
    (asked,) = first.commands.wait(Consolidate)
    assert asked == Consolidate(found[0].instance_id, found[0].plan.group_id)
    return found[0], asked, first


def test_a_group_becomes_one_worker_and_leaves_no_other_stage_and_no_credential(platform: Any) -> None:
    hosts = four_hosts(platform)
    platform.scheduler()
    start, asked, first = whole_group(platform, hosts)
    becomes_one_worker(first, asked)
    others_end(hosts, first)
    platform.until_credentials(set())
    plan = platform.registry.plan(start.plan.group_id)
    assert [(s.host, s.layers) for s in plan.stages] == [(first.host_id, (0, 8))]
    assert plan.created_wall_ns == start.plan.created_wall_ns
    assert list(first.instances) == [asked.instance_id]
    first.put(replace(first.instances[asked.instance_id], inflight=0, idle_since_wall_ms=1))
    first.until_empty()


def test_a_successor_goes_on_with_a_group_whose_worker_switched_while_nobody_led(platform: Any) -> None:
    hosts = four_hosts(platform)
    leader = platform.scheduler()
    _, asked, first = whole_group(platform, hosts)
    leader.kill()
    leader.wait(30)
    becomes_one_worker(first, asked)
    platform.scheduler()
    others_end(hosts, first)
    platform.until_credentials(set())
    assert list(first.instances) == [asked.instance_id]


def test_a_lost_stage_ends_its_group_on_every_host_and_who_waits_gets_another(platform: Any) -> None:
    hosts = four_hosts(platform, become_ready=False)
    platform.llm(stages=4, memory=1000)
    platform.scheduler()
    activation = platform.ask("guest/chat")
    first = starts(hosts)
    lost = next(h for h in hosts if h.host_id == first[2].plan.stages[2].host)
    lost.lose_all()
    again = [h.commands.wait(Start, 2)[1] for h in hosts]
    for host in hosts:
        if host is not lost:
            assert host.commands.of(Cancel)[0].group_id == first[0].plan.group_id
    assert {s.plan.group_id for s in again} == {again[0].plan.group_id}
    assert again[0].plan.group_id != first[0].plan.group_id
    assert again[0].activation_ids == (activation,)
    assert platform.registry.plan(first[0].plan.group_id) is None
    assert platform.credentials() == {credentials.ref(again[0].plan.group_id)}


def test_a_group_of_which_a_stage_was_never_confirmed_is_taken_back_by_the_successor(platform: Any) -> None:
    hosts = four_hosts(platform, become_ready=False)
    hosts[3].is_deaf = True
    platform.llm(stages=4)
    scheduler = platform.scheduler()
    activation = platform.ask("guest/chat")
    first = starts(hosts)
    platform.events.wait(InstanceChanged, 3)
    scheduler.kill()
    scheduler.wait(30)
    left_behind = GroupId("f" * 32)
    # a scheduler that died before it wrote a plan would leave this credential
    credentials.issue(platform.client, platform.client, left_behind)
    hosts[3].is_deaf = False
    platform.scheduler()
    for host in hosts:
        (cancelled,) = host.commands.wait(Cancel)
        assert cancelled.group_id == first[0].plan.group_id
    again = [h.commands.wait(Start, 2)[1] for h in hosts]
    assert again[0].activation_ids == (activation,)
    assert platform.credentials() == {credentials.ref(again[0].plan.group_id)}
    users = {redis_link.text(u) for u in platform.client.acl_users()}
    assert f"thaw-group-{again[0].plan.group_id}" in users
    assert users.isdisjoint({f"thaw-group-{first[0].plan.group_id}", f"thaw-group-{left_behind}"})


@pytest.mark.full
def test_a_scheduler_that_was_stopped_while_it_led_gives_no_stage_of_a_group_to_a_host(platform: Any) -> None:
    hosts = four_hosts(platform)
    platform.llm(stages=4, memory=1000, max_batch=1)
    old = platform.scheduler()
    activation = platform.ask("guest/chat")
    starts(hosts)
    platform.served(activation, "guest/chat")
    old.send_signal(signal.SIGSTOP)
    platform.scheduler()
    for host in hosts:
        host.busy = True
    for _ in range(9):  # the group has only four slots
        platform.ask("guest/chat")
    second = [h.commands.wait(Start, 2)[1] for h in hosts]
    old.send_signal(signal.SIGCONT)
    platform.llm("guest/other", stages=4, memory=400)
    platform.ask("guest/other")
    for host in hosts:
        found = host.commands.wait(Start, 3)
        assert {s.plan.epoch for s in found[1:]} == {2}
        assert sorted(host.epochs) == host.epochs
    assert len({s.plan.group_id for s in second}) == 1


def test_a_relay_that_stays_away_fails_the_request_when_a_start_may_wait_no_longer(platform: Any) -> None:
    hosts = four_hosts(platform)
    platform.llm(stages=4)
    platform.scheduler(THAW_RELAY_URL="redis://127.0.0.1:1/0", THAW_START_DEADLINE_S="2", THAW_START_ATTEMPTS="1")
    platform.ask("guest/chat")
    (failed,) = platform.events.wait(StartFailed, timeout_s=30.0)
    assert failed.error.code == "Unavailable"
    assert failed.error.message == "the relay server stayed away for as long as a start may wait"
    assert [h.commands.of(Start) for h in hosts] == [[]] * 4
    platform.llm("guest/single", stages=1)
    platform.ask("guest/single")  # the scheduler still works
    platform.events.wait(InstanceChanged)


def test_a_relay_that_hangs_holds_up_its_groups_and_nobody_else(platform: Any, own_valkey: Any) -> None:
    hosts = four_hosts(platform)
    platform.llm(stages=4)
    platform.action()
    platform.scheduler(THAW_RELAY_URL=own_valkey.url, THAW_START_ATTEMPTS="1", THAW_START_DEADLINE_S="8")
    own_valkey.freeze()
    held_up = platform.ask("guest/chat")
    platform.until_planned()
    platform.ask()
    platform.events.wait(InstanceChanged, where=lambda e: e.instance.state is InstanceState.READY)
    assert platform.events.of(StartFailed) == []
    (failed,) = platform.events.wait(StartFailed)
    assert (failed.activation_ids, failed.error.code) == ((held_up,), "Unavailable")
    assert "relay" in failed.error.message
    assert [s for h in hosts for s in h.commands.of(Start) if s.plan.action == "guest/chat"] == []
    own_valkey.thaw()
    platform.ask("guest/chat")
    let_in = starts(hosts)[0].plan.group_id
    platform.until_credentials({credentials.ref(let_in)})  # the first group's credential was revoked

"""The scheduler process with a real state server, and with hosts that use the real streams."""

from __future__ import annotations

import math
import signal
import time
from dataclasses import replace
from typing import Any

import pytest

from gateway.scheduler.io.leading import Term
from gateway.scheduler.loop import Refresh, Scheduler
from gateway.scheduler.settings import SchedulerSettings
from relay.protocol.messages import (
    ActionChanged,
    InspectModel,
    InstanceChanged,
    ModelInspected,
    Release,
    Start,
    StartFailed,
)
from relay.state import bus
from thaw.config import ResourcesConfig, ScalingConfig, SloConfig
from thaw.errors import ErrorInfo
from thaw.instance import InstanceState
from thaw.logs import Log


def test_timers_that_are_due_come_in_the_next_turn_however_many_messages_there_are() -> None:
    unused: Any = None
    loop = Scheduler(SchedulerSettings("redis://127.0.0.1:1/0"), unused, Term(1, math.inf), Log("test"))
    for at_s in (0.0, 0.0, time.monotonic() + 600):
        loop._at(at_s, Refresh())
    for n in range(3_000):
        loop._queue.put(n)
    turns = loop._turns()
    first, second = next(turns), next(turns)
    assert first == [*range(1_000), Refresh(), Refresh()]
    assert second == [*range(1_000, 2_000)]


def test_demand_starts_an_instance_that_is_released_when_it_was_idle_for_its_keep_alive(platform: Any) -> None:
    host = platform.host()
    platform.action()
    scheduler = platform.scheduler()
    activation = platform.ask()
    (start,) = host.commands.wait(Start)
    assert start.activation_ids == (activation,)
    assert start.plan.stages[0].host == "h0"
    assert start.plan.stages[0].reserve_bytes == 256 * 1024 * 1024
    platform.served(activation)
    (release,) = host.commands.wait(Release)
    assert (release.instance_id, release.only_idle) == (start.instance_id, True)
    names = [e.name for e in platform.records.trace(start.plan.group_id)]
    assert set(names) == {"planned.begin", "planned.end", "clock"}
    scheduler.send_signal(signal.SIGTERM)
    assert scheduler.wait(30) == 0
    assert len(host.commands.of(Start)) == 1


def test_a_model_is_inspected_before_its_first_start_and_the_plan_names_every_file(platform: Any) -> None:
    host = platform.host()
    platform.llm()
    platform.scheduler()
    platform.ask("guest/chat")
    (start,) = host.commands.wait(Start)
    assert [c.uri for c in host.commands.of(InspectModel)] == ["file:///m"]
    stage = start.plan.stages[0]
    assert [(r.file, r.offset, r.n_bytes) for r in stage.first_ranges] == [
        ("config.json", 0, 10),
        ("w.safetensors", 0, 1_000),
    ]
    assert (stage.layers, stage.role, start.plan.model.sha256) == ((0, 8), "full", "aa")
    assert start.plan.bound_ttft_s is None  # so few bytes say nothing about the link, and no start has been seen
    assert {t.part for t in start.plan.bound_terms} > {"bytes", "container", "engine", "prefill"}
    assert platform.registry.plan(start.plan.group_id).group_id == start.plan.group_id


def test_the_instances_of_a_lost_host_are_gone_and_its_waiting_requests_start_elsewhere(platform: Any) -> None:
    lost = platform.host("h0")
    lost.on_start = lambda start: False
    platform.action()
    platform.scheduler(THAW_HOSTS_REFRESH_S="0.3")
    activation = platform.ask()
    (start,) = lost.commands.wait(Start)
    platform.events.wait(InstanceChanged)
    other = platform.host("h1")
    time_to_lose = platform.client.pttl("thaw:host-lease:h0")
    assert time_to_lose > 0
    lost.die()
    (again,) = other.commands.wait(Start, timeout_s=30.0)
    assert again.activation_ids == (activation,)
    platform.events.wait(InstanceChanged, 4)  # starting and gone on the first host, starting and ready on the other
    gone = [e.instance for e in platform.events.of(InstanceChanged) if e.instance.state is InstanceState.GONE]
    assert [(g.instance_id, g.error.code) for g in gone] == [(start.instance_id, "WorkerLost")]
    assert [i.instance_id for i in platform.registry.instances()] == [again.instance_id]


def test_a_scheduler_that_was_stopped_and_replaced_sends_nothing_more(platform: Any) -> None:
    host = platform.host()
    platform.action()
    old = platform.scheduler()
    first_asked = platform.ask()
    host.commands.wait(Start)
    platform.served(first_asked)
    old.send_signal(signal.SIGSTOP)
    platform.scheduler()
    host.busy = True
    for _ in range(3):
        platform.ask()
    host.commands.wait(Start, 2)
    old.send_signal(signal.SIGCONT)
    for _ in range(3):
        platform.ask()
    host.commands.wait(Start, 5)
    assert sorted(host.epochs) == host.epochs
    assert set(host.epochs) == {1, 2}


@pytest.mark.parametrize(
    "odd",
    [
        {"slo": SloConfig(ttft_ms=10**400)},
        {"scaling": ScalingConfig(min_instances=10**12, max_instances=10**12)},
        {"scaling": ScalingConfig(keep_alive_s=math.nan)},
        {"resources": ResourcesConfig(gpu_memory_mb=10**400)},
    ],
)
def test_a_record_with_impossible_numbers_keeps_no_other_action_from_its_start(
    platform: Any, odd: dict[str, Any]
) -> None:
    config = replace(platform.llm("guest/odd").config, **odd)
    action = replace(platform.records.action("guest", "guest/odd"), config=config)
    platform.records.put_action(action, last="0.0.1")
    host = platform.host()
    platform.action()
    scheduler = platform.scheduler()
    bus.publish(platform.client, ActionChanged(action.name))
    asked = [platform.ask("guest/odd"), platform.ask()]
    (start,) = host.commands.wait(Start)
    assert start.activation_ids == (asked[1],)
    assert [f.activation_ids for f in platform.events.wait(StartFailed)] == [(asked[0],)]
    assert scheduler.poll() is None


def test_a_developer_error_fails_every_waiting_request_at_once(platform: Any) -> None:
    host = platform.host()
    host.on_start = lambda start: ErrorInfo("ModelCorrupt", "w.safetensors is truncated")
    platform.llm()
    platform.scheduler()
    activation = platform.ask("guest/chat")
    (failed,) = platform.events.wait(StartFailed)
    assert (failed.activation_ids, failed.error.code) == ((activation,), "ModelCorrupt")
    assert len(host.commands.of(Start)) == 1


def test_who_waits_for_a_pool_begins_when_the_host_says_that_it_has_room(platform: Any) -> None:
    host = platform.host()
    host.slabs, host.n_taken = (4096, 8), 8
    host.report()
    taken_at_start: list[int] = []
    host.on_start = lambda start: taken_at_start.append(host.n_taken)
    platform.llm(max_stages=1)
    platform.scheduler(THAW_HOSTS_REFRESH_S="3600")  # so only the host's own message can tell the scheduler
    first = platform.ask("guest/chat")
    platform.events.wait(ModelInspected)
    host.n_taken = 0
    host.report(announce=True)
    host.commands.wait(Start)
    assert taken_at_start == [0]
    platform.served(first, "guest/chat")


def test_the_scheduler_goes_on_after_the_state_server_was_killed(own_valkey: Any, platform_on: Any) -> None:
    platform = platform_on(own_valkey.url)
    host = platform.host()
    platform.action()
    scheduler = platform.scheduler()
    first = platform.ask()
    (start,) = host.commands.wait(Start)
    platform.events.wait(InstanceChanged, 2)
    own_valkey.kill()
    own_valkey.start()
    host.busy = True
    platform.served(first)
    platform.ask()
    platform.ask()
    again = host.commands.wait(Start, 2, timeout_s=30.0)[1]
    assert again.instance_id != start.instance_id
    assert scheduler.poll() is None
    gone = [e.instance for e in platform.events.of(InstanceChanged) if e.instance.state is InstanceState.GONE]
    assert gone == []

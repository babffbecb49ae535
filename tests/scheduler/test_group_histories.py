"""Random histories of groups.  Stages and hosts are lost, commands are refused, and schedulers crash in the middle of a
decision.  No memory, link, credential or plan of a dead group remains after any of this.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.cluster import Cluster
from tests.scheduler.world import MIB, SMOLLM2, chat, hello
from thaw.ids import ActionName

DEEP = ActionName("guest/deep")
ACTIONS = (
    chat(forced_stages=3, max_stages=4, need_bytes=900 * MIB, max_instances=3, keep_alive_s=60.0),
    chat(name=DEEP, forced_stages=4, max_stages=4, need_bytes=600 * MIB, max_instances=2, slots=2),
    hello(need_bytes=500 * MIB, max_instances=2),
)
WHAT = [
    "ask",
    "ask",
    "obey",
    "obey",
    "obey",
    "ready",
    "ready",
    "busy",
    "die",
    "lose",
    "back",
    "restart",
    "refuse",
    "crash",
    "relay",
    "wait",
    "beat",
    "serve",
    "whole",
    "whole",
]
histories = st.lists(st.tuples(st.sampled_from(WHAT), st.integers(0, 40)), min_size=10, max_size=60)


def play(history: list[tuple[str, int]], look: Callable[[Cluster], None] | None = None) -> Cluster:
    """``look`` is called after every step."""
    c = Cluster(3, ACTIONS, SMOLLM2)
    for what, n in history:
        host = list(c.hosts.values())[n % 3]
        match what:
            case "ask":
                c.ask(ACTIONS[n % 3].name)
            case "obey":
                c.obey(host)
            case "ready" | "busy":
                c.ready(n, busy=what == "busy")
            case "die":
                c.die(n)
            case "lose":
                host.is_up = False
                c.heartbeat()
            case "back":
                host.is_up = True
                c.heartbeat()
            case "restart":
                c.restart(host)
            case "refuse":
                host.refuses = not host.refuses
            case "crash":
                c.crash_after = n % 6
            case "relay":
                c.relay_is_up = not c.relay_is_up
            case "wait":
                c.later(float(n))
            case "beat":
                c.heartbeat()
            case "whole":
                c.everybody_goes_on()
            case "serve":
                c.serve(ACTIONS[n % 3].name)
        (look or never_overcommitted)(c)
    return c


def never_overcommitted(c: Cluster) -> None:
    """The scheduler's decisions never overcommit a host.

    A host that came back may hold more than it should until it has carried out its commands.
    """
    assert c.w.view.kept.keys() <= c.w.view.instances.keys()
    for host in c.w.view.hosts.values():
        for device in host.devices.values():
            held = [c.w.view.instances[i].record for i in c.w.view.on_host.get(host.host_id, ())]
            assert device.reserved == sum(r.reserve_bytes for r in held)
            assert device.n_workers == len(held)
            assert 0 <= device.releasing <= device.reserved


def nothing_is_left(c: Cluster) -> None:
    assert {n: h.instances for n, h in c.hosts.items() if h.instances} == {}
    assert (c.plans, c.credentials, c.registry, c.demand) == ({}, set(), {}, {})
    view = c.w.view
    assert (view.groups, view.instances, view.in_group, view.demand, view.kept) == ({}, {}, {}, {}, {})
    for host in view.hosts.values():
        assert host.ledger.fetches() == {}
        assert host.pool._claims == {}
        assert [(d.reserved, d.releasing, d.n_workers) for d in host.devices.values()] == [(0, 0, 0)]


@settings(max_examples=200, deadline=None)
@given(history=histories)
def test_in_the_end_nothing_of_any_group_is_left_anywhere(history: list[tuple[str, int]]) -> None:
    c = play(history)
    c.settle()
    nothing_is_left(c)


@pytest.mark.full
@settings(max_examples=2_000, deadline=None)
@given(history=histories)
def test_in_the_end_nothing_is_left_after_two_thousand_histories(history: list[tuple[str, int]]) -> None:
    c = play(history)
    c.settle()
    nothing_is_left(c)


@settings(max_examples=60, deadline=None)
@given(history=histories)
def test_whoever_waits_is_served_by_a_whole_group_in_the_end(history: list[tuple[str, int]]) -> None:
    c = play(history)
    c.settle()
    for facts in ACTIONS:
        c.ask(facts.name)
        for host in c.hosts.values():
            while host.commands:
                c.obey(host)
        c.later(5.0)
        (group,) = [g for g in c.w.view.groups.values() if g.plan.action == facts.name]
        assert len(group.plan.stages) == (facts.forced_stages or 1)
        c.serve(facts.name)
        c.settle()

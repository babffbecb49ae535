"""Random histories of groups.  Stages and hosts are lost, commands are refused, and schedulers crash in the middle of a
decision.  No memory, link, credential or plan of a dead group remains after any of this.

In some histories pipelines become one worker or several.  Their stages switch, are lost and are released in any order,
and the scheduler hears of a switch late.  No worker is ended that had become one.
"""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings

from gateway.scheduler.decisions import CancelGroup, Decision, ReleaseInstance
from tests.scheduler.cluster import STEPS, Cluster, Host, Step, few_or_many, steps
from tests.scheduler.facts import MIB, OTHER, SMOLLM2, chat, hello

ACTIONS = (
    chat(forced_stages=3, max_stages=4, need_bytes=900 * MIB, max_instances=3, keep_alive_s=60.0),
    chat(name=OTHER, forced_stages=4, max_stages=4, need_bytes=600 * MIB, max_instances=2, slots=2),
    hello(need_bytes=500 * MIB, max_instances=2),
)
histories = steps(
    10,
    60,
    "ask ask obey obey obey ready ready busy die lose back restart refuse crash relay wait beat serve whole whole",
    40,
)
BECOMING_WORKERS = (
    chat(forced_stages=3, max_stages=4, keep=1, need_bytes=900 * MIB, max_instances=2, keep_alive_s=60.0),
    chat(name=OTHER, forced_stages=3, max_stages=4, keep=2, need_bytes=700 * MIB, max_instances=4, slots=2),
)
histories_with_switches = steps(
    10,
    60,
    "ask obey obey obey whole busy switch switch switch hear fail die lose back restart crash long_wait beat serve",
    40,
)


class Watched(Cluster):
    """Nothing that the scheduler decides may end a worker that has left its pipeline behind and answers requests."""

    def _apply(self, decision: Decision) -> None:
        match decision:
            case CancelGroup():
                group = self.w.view.groups.get(decision.group_id)
                assert group is None or len(group.plan.stages) > 1
            case ReleaseInstance() if not decision.only_idle:
                record = self.w.view.instances[decision.instance_id].record
                assert (decision.reason, record.takes_requests) == ("consolidated", False)
        super()._apply(decision)

    def obey(self, host: Host) -> None:
        """Every worker outlives every command but a release that finds it idle, or that lets it end after its requests.

        The latter may come to a stage that became a worker after a former scheduler, or its group's end, had left it
        behind.  These hosts end it at once; an invoker waits for its requests.
        """
        releases = [c for c, _ in list(host.commands)[:1] if isinstance(c, ReleaseInstance)]
        released = [c.instance_id for c in releases]
        drained = {c.instance_id for c in releases if not c.only_idle}
        before = {i for i, r in host.instances.items() if r.stage == 0 and r.n_stages == 1}
        busy = {i for i in before if host.instances[i].inflight}
        super().obey(host)
        assert before - set(released) <= host.instances.keys()
        assert busy - drained <= host.instances.keys()


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


def play(history: list[Step], look: Callable[[Cluster], None] = never_overcommitted) -> Cluster:
    """``look`` is called after every step."""
    return _play(Cluster(3, ACTIONS, SMOLLM2), history, look)


def play_with_switches(history: list[Step]) -> Cluster:
    """The history begins with pipelines that serve."""
    c = Watched(4, BECOMING_WORKERS, SMOLLM2)
    for action in BECOMING_WORKERS:
        c.ask(action.name)
    c.everybody_goes_on()
    return _play(c, history, never_overcommitted)


def _play(c: Cluster, history: list[Step], look: Callable[[Cluster], None]) -> Cluster:
    for what, n in history:
        STEPS[what](c, n)
        look(c)
    return c


def settled(c: Cluster) -> Cluster:
    """Let everything end.  Nothing of any group is left then."""
    c.settle()
    assert {n: h.instances for n, h in c.hosts.items() if h.instances} == {}
    assert (c.plans, c.credentials, c.registry, c.demand) == ({}, set(), {}, {})
    view = c.w.view
    assert (view.groups, view.instances, view.in_group, view.demand, view.kept) == ({}, {}, {}, {}, {})
    for host in view.hosts.values():
        assert host.ledger.fetches() == {}
        assert host.pool._claims == {}
        assert [(d.reserved, d.releasing, d.n_workers) for d in host.devices.values()] == [(0, 0, 0)]
    return c


@few_or_many(200, 2_000, history=histories)
def test_in_the_end_nothing_of_any_group_is_left_anywhere(history: list[Step]) -> None:
    settled(play(history))


@few_or_many(100, 3_000, history=histories_with_switches)
def test_in_the_end_nothing_is_left_and_no_worker_was_ended_with_its_pipeline(history: list[Step]) -> None:
    settled(play_with_switches(history))


@settings(max_examples=60)
@given(history=histories)
def test_whoever_waits_is_served_by_a_whole_group_in_the_end(history: list[Step]) -> None:
    c = settled(play(history))
    for facts in ACTIONS:
        c.ask(facts.name)
        c.everybody_obeys()
        c.later(5.0)
        (group,) = [g for g in c.w.view.groups.values() if g.plan.action == facts.name]
        assert len(group.plan.stages) == (facts.forced_stages or 1)
        c.serve(facts.name)
        c.settle()


@few_or_many(25, 500, history=histories_with_switches)
def test_a_pipeline_that_is_let_go_on_becomes_one_worker_in_the_end(history: list[Step]) -> None:
    c = settled(play_with_switches(history))
    for facts in BECOMING_WORKERS:
        c.ask(facts.name)
    c.everybody_goes_on()
    for n in range(4):  # busy, so that none is released for being idle
        c.ready(n, busy=True)
    c.later(400.0)  # as long as the pauses between all tries
    c.everybody_obeys()
    for n in range(8):  # stages 0, then those that stay
        c.switch(n)
    while c.unheard:
        c.hear()
    c.everybody_obeys()
    assert {len(g.plan.stages) for g in c.w.view.groups.values()} == {1}
    assert {r.n_stages for h in c.hosts.values() for r in h.instances.values()} == {1}
    assert c.credentials == set()
    for host in c.w.view.hosts.values():
        held = [c.w.view.instances[i].record for i in c.w.view.on_host.get(host.host_id, ())]
        assert all(r.takes_requests for r in held)

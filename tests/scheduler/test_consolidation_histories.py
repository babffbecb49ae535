"""Random histories of pipelines that become one worker or several.

Stages switch, are lost and are released in any order; the scheduler hears of a switch late, and crashes in the middle
of a decision.  In the end nothing of any group is left, and no worker was ended that had become one.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.scheduler.decisions import CancelGroup, Decision, ReleaseInstance
from tests.scheduler.cluster import Cluster, Host
from tests.scheduler.test_group_histories import never_overcommitted, nothing_is_left
from tests.scheduler.world import MIB, SMOLLM2, chat
from thaw.ids import ActionName

OTHER = ActionName("guest/other")
ACTIONS = (
    chat(forced_stages=3, max_stages=4, keep=1, need_bytes=900 * MIB, max_instances=2, keep_alive_s=60.0),
    chat(name=OTHER, forced_stages=3, max_stages=4, keep=2, need_bytes=700 * MIB, max_instances=4, slots=2),
)
WHAT = [
    "ask",
    "obey",
    "obey",
    "obey",
    "whole",
    "busy",
    "switch",
    "switch",
    "switch",
    "hear",
    "fail",
    "die",
    "lose",
    "back",
    "restart",
    "crash",
    "wait",
    "beat",
    "serve",
]
histories = st.lists(st.tuples(st.sampled_from(WHAT), st.integers(0, 40)), min_size=10, max_size=60)


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


def play(history: list[tuple[str, int]]) -> Watched:
    c = Watched(4, ACTIONS, SMOLLM2)
    for action in ACTIONS:  # pipelines that serve
        c.ask(action.name)
    c.everybody_goes_on()
    for what, n in history:
        host = list(c.hosts.values())[n % 4]
        match what:
            case "ask":
                c.ask(ACTIONS[n % 2].name)
            case "obey":
                c.obey(host)
            case "whole":
                c.everybody_goes_on()
            case "busy":
                c.ready(n, busy=True)
            case "switch":
                c.switch(n)
            case "hear":
                c.hear()
            case "fail":
                c.fail_to_switch(n)
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
            case "crash":
                c.crash_after = n % 6
            case "wait":
                c.later(float(n * 3))
            case "beat":
                c.heartbeat()
            case "serve":
                c.serve(ACTIONS[n % 2].name)
        never_overcommitted(c)
    return c


@settings(max_examples=100, deadline=None)
@given(history=histories)
def test_in_the_end_nothing_is_left_and_no_worker_was_ended_with_its_pipeline(history: list[tuple[str, int]]) -> None:
    c = play(history)
    c.settle()
    nothing_is_left(c)


@pytest.mark.full
@settings(max_examples=3_000, deadline=None)
@given(history=histories)
def test_in_the_end_nothing_is_left_after_three_thousand_histories(history: list[tuple[str, int]]) -> None:
    c = play(history)
    c.settle()
    nothing_is_left(c)


@settings(max_examples=25, deadline=None)
@given(history=histories)
def test_a_pipeline_that_is_let_go_on_becomes_one_worker_in_the_end(history: list[tuple[str, int]]) -> None:
    becomes_one_worker(history)


@pytest.mark.full
@settings(max_examples=500, deadline=None)
@given(history=histories)
def test_a_pipeline_becomes_one_worker_in_the_end_of_five_hundred_histories(history: list[tuple[str, int]]) -> None:
    becomes_one_worker(history)


def becomes_one_worker(history: list[tuple[str, int]]) -> None:
    c = play(history)
    c.settle()
    for facts in ACTIONS:
        c.ask(facts.name)
    c.everybody_goes_on()
    for n in range(4):  # busy, so that none is released for being idle
        c.ready(n, busy=True)
    c.later(400.0)  # as long as the pauses between all tries
    for host in c.hosts.values():
        while host.commands:
            c.obey(host)
    for n in range(8):  # stages 0, then those that stay
        c.switch(n)
    while c.unheard:
        c.hear()
    for host in c.hosts.values():
        while host.commands:
            c.obey(host)
    assert {len(g.plan.stages) for g in c.w.view.groups.values()} == {1}
    assert {r.n_stages for h in c.hosts.values() for r in h.instances.values()} == {1}
    assert c.credentials == set()
    for host in c.w.view.hosts.values():
        held = [c.w.view.instances[i].record for i in c.w.view.on_host.get(host.host_id, ())]
        assert all(r.takes_requests for r in held)

"""Actions that wait for an end of one of their namespace's starts, and beside them those that wait for memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.scheduler.decisions import InspectModelOn, ReleaseInstance, StartGroup
from gateway.scheduler.events import ActionSeen, QuotasSeen
from gateway.scheduler.policy import starts
from gateway.scheduler.policy.looks import LOOKS_AT_ONCE
from gateway.scheduler.policy.place import place
from gateway.scheduler.policy.starts import LATE_REST_S
from relay.protocol.messages import ModelInspected
from tests.scheduler.facts import CHAT, FACTS, HELLO, MIB, chat, hello, report
from tests.scheduler.world import World, llm_world, of, serving, starting
from thaw.errors import ErrorInfo
from thaw.ids import ActionName, Namespace
from thaw.quotas import OwnQuotas

GUEST, SMALL, STRANGER = Namespace("guest"), ActionName("guest/small"), ActionName("other/f")
N_ACTIONS = 2 * LOOKS_AT_ONCE + 8


def test_a_namespace_at_its_quota_of_starts_keeps_its_turn_for_memory_and_no_memory() -> None:
    w = World(report("h0", 256), report("h1", 128))
    w.do(QuotasSeen(GUEST, OwnQuotas(starts=1)), ActionSeen(hello(keep_alive_s=0.0)))
    w.do(ActionSeen(hello(name=SMALL, need_bytes=128 * MIB)), ActionSeen(hello(name=STRANGER)))
    first = w.serving(idle=False)
    waiting = ActionName("guest/waiting")
    w.do(ActionSeen(hello(name=waiting)))
    assert of(w.ask(waiting), StartGroup) == []
    assert w.view.keeper == (waiting, ("h0", "cpu"))
    (small,) = of(w.ask(SMALL), StartGroup)  # this is the one start that the namespace may have
    assert of(w.ask(STRANGER), StartGroup) == []
    (after,) = of(w.gone(first), StartGroup)
    assert after.plan.action == STRANGER
    assert [turn.name for turn in w.view.blocked] == [waiting]
    w.ready(after, idle=False)
    assert of(w.gone(after), StartGroup) == [], "its namespace still starts something"
    assert w.view.keeper is None
    assert [s.plan.action for s in of(w.ready(small), StartGroup)] == [waiting]


def test_memory_that_came_free_at_the_quota_is_used_when_the_quota_is_raised() -> None:
    w = World(report("h0", 256), report("h1", 128))
    w.do(QuotasSeen(GUEST, OwnQuotas(starts=1)), ActionSeen(hello(keep_alive_s=0.0)))
    w.do(ActionSeen(hello(name=SMALL, need_bytes=128 * MIB)))
    first = w.serving(idle=False)
    w.ask()
    assert len(of(w.ask(SMALL), StartGroup)) == 1
    assert of(w.gone(first), StartGroup) == []
    assert [s.plan.action for s in of(w.do(QuotasSeen(GUEST, OwnQuotas(starts=2))), StartGroup)] == [HELLO]


@pytest.fixture
def weighed(monkeypatch: pytest.MonkeyPatch) -> list[ActionName]:
    """The actions that are offered the hosts."""
    names: list[ActionName] = []
    monkeypatch.setattr(
        starts, "place", lambda view, facts, *rest: names.append(facts.name) or place(view, facts, *rest)
    )
    return names


def waiting_for_a_release(n_others: int) -> tuple[World, StartGroup, list[StartGroup]]:
    """A model waits for the release of an idle function.  Small functions run beside it."""
    w = llm_world(report("h0", 2048, network_bytes_per_s=1e9), report("h1", 1400, network_bytes_per_s=1e6))
    w.deploy(hello(need_bytes=2048 * MIB), hello(name=SMALL, need_bytes=64 * MIB, slots=1))
    first = w.serving(HELLO)
    others = [w.serving(SMALL, idle=False) for _ in range(n_others)]
    w.later(1.5)
    (release,) = of(w.ask(CHAT), ReleaseInstance)
    assert release.instance_id == first.stages[0].instance_id
    return w, first, others


def test_an_action_that_waits_for_a_release_is_not_weighed_at_every_other_end(weighed: list[ActionName]) -> None:
    w, first, others = waiting_for_a_release(5)
    weighed.clear()
    for other in others:
        w.gone(other)
    assert CHAT not in weighed
    (start,) = of(w.gone(first), StartGroup)
    assert (start.plan.action, start.plan.stages[0].host) == (CHAT, "h0"), "the release that it waited for"


def test_an_action_that_waits_for_a_release_is_weighed_again_after_a_rest(weighed: list[ActionName]) -> None:
    w, _, (other,) = waiting_for_a_release(1)
    weighed.clear()
    w.gone(other)
    assert weighed == []
    w.later(LATE_REST_S)
    assert weighed == [CHAT]


def many_models(w: World) -> list[ActionName]:
    """Actions with a model each, which was looked at some time ago."""
    names = [ActionName(f"guest/{i:02}") for i in range(N_ACTIONS)]
    for i, name in enumerate(names):
        w.deploy(chat(slots=1, keep_alive_s=0.0, name=name, model_uri=f"s3://{i:02}"))
        w.view.model(f"s3://{i:02}").take(replace(FACTS, uri=f"s3://{i:02}"), w.now)
    w.now += 10.0
    return names


def one_start_of_the_quota() -> tuple[World, StartGroup]:
    w = World(report("h0", 1 << 20))
    w.do(QuotasSeen(GUEST, OwnQuotas(starts=1)), ActionSeen(hello()))
    return starting(w)


def the_only_device() -> tuple[World, StartGroup]:
    w = World(report("h0", 1024))
    w.deploy(hello(need_bytes=1024 * MIB, keep_alive_s=0.0))
    return serving(w, idle=False)


@pytest.mark.parametrize("taken", [one_start_of_the_quota, the_only_device])
def test_a_place_that_comes_free_costs_a_few_looks_however_many_wait_and_goes_to_the_first(taken: object) -> None:
    w, start = taken()  # type: ignore[operator]
    names = many_models(w)
    for name in names:
        w.ask(name)
    w.answers_looks, w.now = False, w.now + 10.0  # what was known of the models is too old for a start
    looks = of(w.ready(start) if taken is one_start_of_the_quota else w.gone(start), InspectModelOn)
    assert [look.uri for look in looks] == [f"s3://{i:02}" for i in range(LOOKS_AT_ONCE)]
    for look in looks[:-1]:  # these models are not there any more
        error = ErrorInfo("ModelNotFound", "it was deleted")
        found = w.do(ModelInspected(look.uri, look.host_id, None, error, "", look.command_id))
        assert look.uri not in [d.uri for d in of(found, InspectModelOn)]
        looks += of(found, InspectModelOn)
    assert len(looks) == N_ACTIONS, "each answer lets the next ones look"
    started = []
    for look in looks[LOOKS_AT_ONCE - 1 :]:
        found = w.do(ModelInspected(look.uri, look.host_id, None, None, "aa", look.command_id))
        started += [s.plan.action for s in of(found, StartGroup)]
        assert of(found, InspectModelOn) == []
    assert started == [names[LOOKS_AT_ONCE - 1]]
    if taken is one_start_of_the_quota:
        (running,) = [g for g in w.view.groups.values() if g.is_starting]
        assert running.plan.action == names[LOOKS_AT_ONCE - 1]

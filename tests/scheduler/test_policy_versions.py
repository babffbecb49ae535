"""What decide() does as an action gets a new version or is deleted."""

from __future__ import annotations

from dataclasses import replace

from gateway.scheduler.decisions import FailDemand, Forget, ReleaseInstance, StartGroup
from gateway.scheduler.events import ActionDeleted
from gateway.scheduler.view.history import Measured
from tests.scheduler.facts import CHAT, FACTS, HELLO, OTHER, READY, chat, demand, hello
from tests.scheduler.world import World, llm_world, of, rebuilt, record_of, serving, world
from thaw.ids import ActionName
from thaw.instance import StartMode


def test_a_new_version_releases_idle_instances_of_the_old_one_and_starts_its_own() -> None:
    w, _ = serving(world())
    (release,) = of(w.deploy(hello(version="2"), changed=True), ReleaseInstance)
    assert release.reason == "outdated"
    new = w.started()
    assert new.plan.action_version == "2"


def test_a_deleted_action_releases_all_and_its_requests_are_not_found() -> None:
    w, first = serving(world())
    (second,) = of(w.ask() + w.later(1.1), StartGroup)
    decided = w.do(ActionDeleted(HELLO))
    assert [r.instance_id for r in of(decided, ReleaseInstance)] == [first.stages[0].instance_id]
    assert [f.error.code for f in of(decided, FailDemand)] == ["NotFound"]
    (release,) = of(w.ready(second), ReleaseInstance)
    assert release.instance_id == second.stages[0].instance_id


def test_nothing_of_a_deleted_action_stays_behind_its_last_instance() -> None:
    w, start = serving(world())
    w.do(ActionDeleted(HELLO))
    w.gone(start)
    assert HELLO not in w.view.actions
    w.do(ActionDeleted(ActionName("guest/never")))
    assert w.view.actions == {}


def test_what_was_learned_of_an_action_and_of_its_model_is_forgotten_when_it_is_deleted() -> None:
    w = llm_world()
    other = chat(name=OTHER)
    w.deploy(other)
    for name in (CHAT, other.name):
        w.view.history.update(name, "cpu", StartMode.COLD, Measured(t_cc=1.0))
    assert of(w.do(ActionDeleted(CHAT)), Forget) == [Forget((f"{CHAT}|cpu|cold",), ())]
    assert of(w.do(ActionDeleted(other.name)), Forget) == [Forget((f"{other.name}|cpu|cold",), (FACTS.uri,))]
    assert w.view.history.learned("*", "cpu", StartMode.COLD).times.t_cc == 1.0


def test_the_facts_of_a_model_that_an_action_no_longer_names_are_forgotten() -> None:
    w = llm_world()
    second = replace(chat(), model_uri="s3://m/second", version="2")
    assert of(w.deploy(second), Forget) == [Forget((), (FACTS.uri,))]
    assert w.view.models.keys() == {second.model_uri}
    assert of(w.deploy(replace(second, version="3")), Forget) == []


def test_a_successor_forgets_what_was_learned_of_actions_that_are_not_there() -> None:
    w = World()
    for name in (CHAT, HELLO):
        w.view.history.update(name, "cpu", StartMode.COLD, Measured(t_cc=1.0))
    decided = w.do(rebuilt(models=(FACTS,)))
    assert of(decided, Forget) == [Forget((f"{CHAT}|cpu|cold",), (FACTS.uri,))]


def test_after_a_restart_what_is_left_of_a_deleted_action_is_released_and_its_requests_are_not_found() -> None:
    start = world().started()
    ready = record_of(start, READY, inflight=1)
    asked = demand("a9", HELLO)
    decided = World().do(rebuilt(instances=(ready,), demand=(asked,), actions=()))
    assert [(r.instance_id, r.only_idle) for r in of(decided, ReleaseInstance)] == [(ready.instance_id, False)]
    assert [f.error.code for f in of(decided, FailDemand)] == ["NotFound"]

"""The version of a model that a start takes: there is a look before each start, shared by the starts of a second."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gateway.scheduler.decisions import FailDemand, InspectModelOn, StartGroup
from gateway.scheduler.events import ActionSeen, Rebuilt
from gateway.scheduler.policy.instances import POOL_LOOKS
from relay.protocol.messages import DemandRemoved, ModelInspected
from tests.scheduler.facts import CHAT, HELLO, MIB, OTHER, SMOLLM2, chat, function, hello, pool, report
from tests.scheduler.groups import group_world
from tests.scheduler.world import World, llm_world, of, world
from thaw.errors import ErrorInfo
from thaw.host import HostReport, Resident
from thaw.ids import ActionName, HostId
from thaw.model import ModelFacts

NAME, OLD, NEW = "s3://m/x", "a" * 64, "b" * 64
AWAY = ErrorInfo("StoreUnavailable", "Connection refused", "is the store up?")


def version(sha256: str, model: ModelFacts = SMOLLM2) -> ModelFacts:
    return replace(model, uri=f"{NAME}@{sha256[:16]}", name=NAME, sha256=sha256)


def watched(w: World) -> World:
    """The test answers every look itself."""
    w.answers_looks = False
    return w


def looked_at(*hosts: HostReport, **fields: Any) -> World:
    """A request waits for the first look at a known model in a long time."""
    w = watched(llm_world(*hosts, model=version(OLD), **fields))
    w.later(30.0)
    w.ask(CHAT)
    return w


def test_each_start_is_planned_with_the_version_that_the_look_before_it_found() -> None:
    w = watched(llm_world(model=version(OLD)))
    first = w.serving(CHAT)
    w.later(30.0)
    w.gone(first)
    asked = w.ask(CHAT)
    assert of(asked, StartGroup) == []
    (look,) = of(asked, InspectModelOn)
    assert (look.uri, look.known_uri, look.known_version) == (NAME, f"{NAME}@{OLD[:16]}", OLD)
    larger = replace(version(NEW), n_bytes=SMOLLM2.n_bytes * 2, files={"w.safetensors": SMOLLM2.n_bytes * 2})
    (second,) = of(w.looked(larger), StartGroup)
    models = [s.plan.model for s in (first, second)]
    assert [m and (m.uri, m.sha256, m.n_bytes) for m in models] == [
        (f"{NAME}@{OLD[:16]}", OLD, SMOLLM2.n_bytes),
        (f"{NAME}@{NEW[:16]}", NEW, SMOLLM2.n_bytes * 2),
    ]
    assert [r.file for r in second.plan.stages[0].first_ranges] == ["w.safetensors"]
    assert w.view.instances[second.stages[0].instance_id].record.model_version == NEW


def test_a_model_with_other_layers_is_divided_anew() -> None:
    w = watched(group_world(facts=chat(forced_stages=2)))
    w.later(5.0)
    w.ask(CHAT)
    parts = SMOLLM2.parts
    half = replace(parts, layers=parts.layers[:10])
    (start,) = of(w.looked(version(NEW, replace(SMOLLM2, n_layers=10, parts=half))), StartGroup)
    assert start.plan.stages[-1].layers[1] == 10


def test_the_starts_of_one_second_share_a_look_and_no_later_one_does() -> None:
    w = watched(llm_world(report(memory_mb=1024 * 8), model=version(OLD), facts=chat(slots=1)))
    w.later(1.0)
    assert of(w.ask(CHAT), InspectModelOn) == [], "the look of a second ago still counts"
    w.later(0.1)
    assert len(of(w.ask(CHAT), InspectModelOn)) == 1
    assert of(w.ask(CHAT), InspectModelOn) == [], "one look is enough for all who wait for it"
    assert of(w.looked(None, unchanged=OLD), StartGroup) != []
    w.deploy(chat(name=OTHER, slots=1))
    assert of(w.ask(OTHER), InspectModelOn) == []


@pytest.mark.parametrize(
    ("uri", "found", "n_looks"),
    [
        (f"s3://m/x@{OLD[:16]}", {"sha256": OLD}, 0),
        (f"hf://org/m@{OLD[:40]}", {"etag": f"{OLD[:40]}.{NEW[:32]}", "sha256": ""}, 1),  # it may be ours no longer
    ],
    ids=["a pin", "a commit of a hub"],
)
def test_a_pin_is_looked_at_once_and_a_commit_of_a_hub_before_each_start(
    uri: str, found: dict[str, str], n_looks: int
) -> None:
    w = watched(llm_world(facts=chat(model_uri=uri)))
    w.ask(CHAT)
    (start,) = of(w.do(ModelInspected(uri, HostId("h0"), replace(SMOLLM2, uri=uri, **found))), StartGroup)
    w.ready(start)
    w.later(30.0)
    w.gone(start)
    again = w.ask(CHAT)
    assert (len(of(again, InspectModelOn)), len(of(again, StartGroup))) == (n_looks, 1 - n_looks)


def test_a_model_that_was_too_large_is_looked_at_before_it_is_refused_again() -> None:
    slabs = 4  # slabs of 64 MiB
    large = replace(version(OLD), files={"w.safetensors": 1024 * MIB}, parts=None)
    w = watched(llm_world(report(pool=pool(slabs)), model=large, facts=chat(max_stages=1)))
    assert [f.error.code for f in of(w.ask(CHAT), FailDemand)] == ["MemoryTooSmall"]
    w.later(5.0)
    asked = w.ask(CHAT)
    assert of(asked, FailDemand) == []
    small = replace(version(NEW), files={"w.safetensors": 100 * MIB}, parts=None)
    assert len(of(w.looked(small), StartGroup)) == 1


def test_while_the_store_is_away_starts_go_on_with_the_version_seen_last() -> None:
    w = looked_at()
    (start,) = of(w.looked(None, AWAY), StartGroup)
    assert start.plan.model.sha256 == OLD


def test_a_host_that_does_not_answer_a_look_keeps_a_start_for_five_seconds() -> None:
    w = looked_at()
    assert of(w.later(4.9), StartGroup) == []
    assert len(of(w.later(0.2), StartGroup)) == 1


@pytest.mark.parametrize(
    ("facts", "error", "unchanged"), [(version(OLD), None, ""), (None, AWAY, ""), (None, None, OLD)]
)
def test_an_answer_to_an_earlier_question_is_no_answer_to_the_open_one(
    facts: ModelFacts | None, error: ErrorInfo | None, unchanged: str
) -> None:
    w = watched(llm_world(model=version(OLD), facts=chat(slots=1)))
    w.later(30.0)
    (slow,) = of(w.ask(CHAT), InspectModelOn)
    assert len(of(w.later(5.1), StartGroup)) == 1
    w.later(5.0)
    (look,) = of(w.ask(CHAT), InspectModelOn)
    late = ModelInspected(NAME, HostId("h0"), facts, error, unchanged, slow.command_id)
    assert w.do(late) == []
    start, *_ = of(w.do(ModelInspected(NAME, HostId("h0"), version(NEW), command_id=look.command_id)), StartGroup)
    assert w.do(late) == []
    assert (start.plan.model.sha256, w.view.model(NAME).facts) == (NEW, version(NEW))


def test_facts_are_as_old_as_the_question_and_who_waited_starts_with_them() -> None:
    w = looked_at(report(memory_mb=8192), facts=chat(slots=1))
    w.later(3.0)
    assert len(of(w.looked(None, unchanged=OLD), StartGroup)) == 1
    w.later(0.1)
    assert len(of(w.ask(CHAT), InspectModelOn)) == 1, "the store was looked at three seconds ago"


@pytest.mark.parametrize("answers", [True, False])
def test_a_look_that_is_open_when_its_facts_are_contradicted_is_not_waited_for_in_vain(answers: bool) -> None:
    w = looked_at(report("h0"), report("h1"))
    w.later(1.0)
    w.deploy(chat(version="2"), changed=True)
    assert of(w.later(3.9), InspectModelOn) == []
    (again,) = of(w.later(1.0), InspectModelOn)
    if answers:
        assert len(of(w.looked(version(NEW)), StartGroup)) == 1
    else:
        assert again.host_id == "h1", "another host than the one that did not answer"
        assert of(w.later(100.0), InspectModelOn) != []


def test_a_first_look_has_its_time_though_facts_came_meanwhile() -> None:
    w = watched(world(facts=chat()))
    w.ask(CHAT)
    w.later(10.0)
    w.view.model(NAME).take(version(OLD), w.now - 5.0)
    assert of(w.later(19.9), InspectModelOn) == []
    assert len(of(w.later(0.2), StartGroup)) == 1


def test_one_host_alone_does_not_fail_requests_for_a_model_that_is_known() -> None:
    w = watched(llm_world(report("h0"), report("h1"), model=version(OLD)))
    w.later(30.0)
    (look,) = of(w.ask(CHAT), InspectModelOn)
    refused = ErrorInfo("ModelNotFound", "the store refuses access (403)")
    decided = w.do(ModelInspected(NAME, look.host_id, None, refused))
    (other,) = of(decided, InspectModelOn)
    assert (of(decided, FailDemand), {look.host_id, other.host_id}) == ([], {"h0", "h1"})
    assert len(of(w.looked(None, unchanged=OLD), StartGroup)) == 1
    w.later(30.0)
    w.ask(CHAT)
    assert of(w.looked(None, refused), FailDemand) == []
    assert [f.error for f in of(w.looked(None, refused, host="h1"), FailDemand)] == [refused]


def test_a_host_that_has_the_model_is_asked_first() -> None:
    there = (Resident(f"{NAME}@{OLD[:16]}", SMOLLM2.n_bytes, OLD),)
    w = watched(llm_world(report("h0"), report("h1", resident=there), model=version(OLD)))
    w.later(30.0)
    assert [look.host_id for look in of(w.ask(CHAT), InspectModelOn)] == ["h1"]


def test_actions_behind_one_whose_model_is_looked_at_get_the_room_of_other_devices() -> None:
    whole = function("guest/whole", slots=1, need_bytes=4096 * MIB)
    w = watched(llm_world(report("h0"), report("h1"), model=version(OLD)))
    w.deploy(whole)
    starts = [*of(w.ask(whole.name), StartGroup), *of(w.ask(whole.name), StartGroup)]
    for start in starts:
        w.ready(start, idle=False)
        w.do(DemandRemoved(start.activation_ids[0], whole.name))
    line = [ActionName(f"guest/{i:02}") for i in range(POOL_LOOKS + 1)]
    w.do(*(ActionSeen(chat(name=name, slots=1)) for name in line), ActionSeen(hello(need_bytes=1024 * MIB)))
    for name in line:
        w.ask(name)
    w.later(0.01)
    w.ask()
    assert [t.name for t in w.view.blocked] == [*line, HELLO]
    w.now += 1.2
    first, second = (w.gone(start) for start in starts)
    assert (len(of(first, InspectModelOn)), of(first, StartGroup)) == (1, []), "its place is kept"
    assert [s.plan.action for s in of(second, StartGroup)] == [HELLO]
    assert next(s.plan.action for s in of(w.looked(None, unchanged=OLD), StartGroup)) == line[0]


def test_no_room_is_kept_for_an_action_whose_model_cannot_be_seen() -> None:
    w = watched(llm_world(report(memory_mb=1024), model=version(OLD)))
    first = w.serving(CHAT, idle=False)
    w.do(ActionSeen(chat(name=OTHER)), ActionSeen(hello(need_bytes=512 * MIB)))
    w.ask(OTHER)
    assert w.view.blocked.first == OTHER
    w.deploy(chat(name=OTHER, version="2"), changed=True)
    w.looked(None, AWAY)
    assert w.view.keeper is None
    w.gone(first)
    assert len(of(w.ask(HELLO), StartGroup)) == 1


def test_a_model_that_was_deleted_fails_the_next_start() -> None:
    w = looked_at()
    gone = ErrorInfo("ModelNotFound", "no such object")
    assert [f.error for f in of(w.looked(None, gone), FailDemand)] == [gone]


@pytest.mark.parametrize("other", [NEW, ""])
def test_an_answer_about_another_version_than_the_known_one_says_nothing(other: str) -> None:
    """Another scheduler had asked, and had other facts."""
    w = looked_at()
    assert of(w.looked(None, unchanged=other), StartGroup) == []
    assert len(of(w.looked(version(NEW)), StartGroup)) == 1


def test_facts_that_a_successor_reads_are_looked_at_before_its_first_start() -> None:
    w = watched(World(report()))
    w.do(Rebuilt(0, (report(),), (), (), (), (version(OLD),), (chat(),)))
    asked = w.ask(CHAT)
    assert ([d.known_version for d in of(asked, InspectModelOn)], of(asked, StartGroup)) == ([OLD], [])
    assert len(of(w.looked(None, unchanged=OLD), StartGroup)) == 1


def test_an_action_whose_turn_it_is_keeps_its_place_while_its_model_is_looked_at() -> None:
    w = watched(llm_world(report(memory_mb=1024), model=version(OLD)))
    first = w.serving(CHAT, idle=False)
    w.deploy(chat(name=OTHER))
    w.later(5.0)
    w.ask(OTHER)
    w.looked(None, unchanged=OLD)
    assert w.view.blocked.first == OTHER
    w.later(1.5)
    gone = w.gone(first)
    assert (of(gone, StartGroup), w.view.blocked.first) == ([], OTHER)
    assert w.view.keeper is not None
    (start,) = of(w.looked(None, unchanged=OLD), StartGroup)
    assert start.plan.action == OTHER

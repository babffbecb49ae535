"""One worker that loads from its host's memory replaces an idle group that could not become one while it served."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.scheduler.ablations import Parts
from gateway.scheduler.decisions import FailDemand, InspectModelOn, ReleaseInstance, StartGroup
from gateway.scheduler.events import ActionDeleted
from tests.scheduler.facts import CHAT, READY, SMOLLM2, chat
from tests.scheduler.groups import group_world
from tests.scheduler.world import World, of, serving
from thaw.errors import ErrorInfo, Forbidden
from thaw.host import Resident
from thaw.ids import HostId

FACTS = chat(slo_ttft_s=7.5, max_stages=4)


def served() -> tuple[World, StartGroup]:
    """A group that has answered its request and stays a pipeline.  It has several stages because the objective needed
    them."""
    w, start = serving(group_world(facts=FACTS))
    assert len(start.stages) > 1
    w.stays_a_pipeline(start)
    return w, start


def leaving() -> tuple[World, StartGroup, ReleaseInstance]:
    """The whole model is in memory, and the group is released for its successor."""
    w, start = served()
    whole_model_at(w, start.plan.stages[0].host)
    (released,) = of(w.later(3.0), ReleaseInstance)
    assert (released.reason, released.only_idle) == ("successor", True)
    return w, start, released


def whole_model_at(w: World, host_id: HostId) -> None:
    """Report that the rest of the weights has arrived at this host."""
    w.see_all(host_id, resident=(Resident("s3://m/x", SMOLLM2.n_bytes),))


def gone(w: World, start: StartGroup) -> list[StartGroup]:
    return of(w.gone(start), StartGroup)


def test_an_idle_group_whose_model_is_in_memory_is_followed_by_one_worker_there() -> None:
    w, start, _ = leaving()
    (successor,) = gone(w, start)
    assert [s.host for s in successor.plan.stages] == [start.plan.stages[0].host]
    assert successor.plan.model == start.plan.model is not None
    assert successor.activation_ids == ()
    w.ready(successor)
    assert [r.reason for r in of(w.later(70.0), ReleaseInstance)] == ["keep_alive"]
    assert gone(w, successor) == []


def test_as_long_as_the_rest_of_the_weights_has_not_come_the_group_stays() -> None:
    w, start = served()
    assert of(w.later(30.0), ReleaseInstance) == []
    whole_model_at(w, start.plan.stages[1].host)  # this is not the host of stage 0
    assert of(w.later(10.0), ReleaseInstance) == []
    assert [r.reason for r in of(w.later(30.0), ReleaseInstance)] == ["keep_alive"]
    assert gone(w, start) == []


@pytest.mark.parametrize("asked", [{"forced_stages": 2}, {"min_instances": 1}], ids=["forced", "minimum"])
def test_a_group_whose_size_was_asked_for_or_that_alone_keeps_the_minimum_stays(asked: dict[str, int]) -> None:
    w, start = served()
    w.deploy(replace(FACTS, **asked))
    whole_model_at(w, start.plan.stages[0].host)
    assert of(w.later(20.0), ReleaseInstance) == []


def test_a_policy_without_succession_keeps_the_group() -> None:
    w, start = served()
    w.view.parts = Parts(succession=False)
    whole_model_at(w, start.plan.stages[0].host)
    assert of(w.later(20.0), ReleaseInstance) == []


def test_a_group_that_was_busy_after_all_stays_and_is_asked_again() -> None:
    w, _, released = leaving()
    w.refused(released)
    assert [r.reason for r in of(w.later(3.0), ReleaseInstance)] == ["successor"]


def test_who_came_while_the_group_left_is_served_by_a_start_and_there_is_no_second_one() -> None:
    w, start, _ = leaving()
    assert len(of(w.ask(CHAT), StartGroup)) + len(gone(w, start)) == 1


def test_a_group_whose_action_is_deleted_while_it_leaves_has_no_successor() -> None:
    w, start, _ = leaving()
    w.do(ActionDeleted(CHAT))
    assert gone(w, start) == []


REFUSED = Forbidden("nobody may run it any more").info()


def test_a_group_whose_model_may_not_be_run_any_more_gives_way_to_nobody() -> None:
    w, start = served()
    w.deploy(replace(FACTS, refused=REFUSED))
    whole_model_at(w, start.plan.stages[0].host)
    assert [r.reason for r in of(w.later(70.0), ReleaseInstance)] == ["keep_alive"], "what runs goes on"
    assert gone(w, start) == []


def test_a_group_whose_model_is_taken_back_while_it_leaves_has_no_successor() -> None:
    w, start, _ = leaving()
    w.deploy(replace(FACTS, refused=REFUSED))
    assert gone(w, start) == []


def test_who_waits_for_a_worker_that_runs_is_not_failed_when_its_model_is_taken_back() -> None:
    w, start = served()
    w.said(start, READY, inflight=8)
    w.deploy(replace(FACTS, refused=REFUSED))
    decided = [*w.ask(CHAT), *w.later(5.0)]
    assert (of(decided, FailDemand), of(decided, StartGroup)) == ([], [])
    (failed,) = of(w.gone(start), FailDemand)
    assert failed.error == REFUSED
    assert of(w.ask(CHAT), FailDemand) != [], "nothing serves any more"


def watched() -> tuple[World, StartGroup]:
    """An idle group whose model lies in memory, a while after the last look at the store.  The test answers looks."""
    w, start = served()
    w.answers_looks = False
    w.later(5.0)
    whole_model_at(w, start.plan.stages[0].host)
    decided = w.later(1.1)
    assert (len(of(decided, InspectModelOn)), of(decided, ReleaseInstance)) == (1, []), "no release before the look"
    return w, start


def test_a_group_gives_way_after_a_look_that_found_the_model_unchanged() -> None:
    w, start = watched()
    w.looked(SMOLLM2)
    assert [r.reason for r in of(w.later(0.6), ReleaseInstance)] == ["successor"]
    w.now += 3.0  # the container takes its time to end
    assert len(gone(w, start)) == 1


def test_a_group_whose_model_was_pushed_again_serves_until_its_keep_alive_ends() -> None:
    w, start = watched()
    w.looked(replace(SMOLLM2, sha256="bb", uri="s3://m/x@b"))
    assert [r.reason for r in of(w.later(70.0), ReleaseInstance)] == ["keep_alive"]
    assert gone(w, start) == []


def test_a_model_that_is_in_doubt_since_the_release_has_no_successor() -> None:
    w, start, _ = leaving()
    w.view.model("s3://m/x").fresh = False
    assert gone(w, start) == []


def test_a_model_that_is_not_there_any_more_is_not_looked_at_for_a_successor_again_and_again() -> None:
    w, _ = watched()
    missing = ErrorInfo("ModelNotFound", "no such object")
    for host_id in ("h0", "h1"):  # one host alone is not believed
        w.looked(None, missing, host=host_id)
    decided = w.later(20.0)
    assert (of(decided, InspectModelOn), of(decided, ReleaseInstance)) == ([], [])

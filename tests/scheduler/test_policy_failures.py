"""What decide() does as a start or an inspection fails, ends late or cannot be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.scheduler.decisions import FailDemand, Flag, InspectModelOn, StartGroup
from relay.protocol.messages import InstanceChanged, ModelInspected
from tests.scheduler.facts import CHAT, FACTS, GONE, LOST, MIB, SMOLLM2, chat, forced, hello, report
from tests.scheduler.groups import group_world
from tests.scheduler.world import World, llm_world, of, starting, world
from thaw.errors import ErrorInfo
from thaw.ids import HostId


def test_a_developer_error_fails_all_that_wait_and_is_not_retried() -> None:
    w, start = starting(llm_world())
    w.ask(CHAT)
    decided = w.gone(start, error=ErrorInfo("InitFailed", "boom"))
    assert [f.activation_ids for f in of(decided, FailDemand)] == [("a0", "a1")]
    assert of(w.later(100.0), StartGroup) == []


@pytest.mark.parametrize("code", ["ModelCorrupt", "ModelNotFound", "ModelUnsupported"])
def test_after_a_start_that_failed_for_its_model_the_next_request_looks_at_the_model_again(code: str) -> None:
    w, start = starting(llm_world())
    assert of(w.gone(start, error=ErrorInfo(code, "damaged")), FailDemand)
    assert [i.uri for i in of(w.ask(CHAT), InspectModelOn)] == ["s3://m/x"]


def test_a_model_that_changed_under_a_start_is_looked_at_and_started_anew_for_the_same_request() -> None:
    w, start = starting(llm_world())
    assert of(w.gone(start, error=ErrorInfo("ModelChanged", "another version")), FailDemand) == []
    assert [i.uri for i in of(w.later(1.0), InspectModelOn)] == ["s3://m/x"]
    (again,) = of(w.do(ModelInspected("s3://m/x", HostId("h0"), replace(FACTS, sha256="bb"))), StartGroup)
    assert again.plan.model.sha256 == "bb"
    assert again.activation_ids == ("a0",)


def test_a_platform_error_is_retried_with_growing_pauses_three_times() -> None:
    w = world()
    starts, failed, at = of(w.ask(), StartGroup), list[FailDemand](), [w.now]
    while not failed:
        failed = of(w.said(starts[-1], GONE, error=LOST), FailDemand)
        while not failed and not (more := of(w.later(0.05), StartGroup)):
            assert w.now < 200
        if not failed:
            starts += more
            at.append(w.now)
    assert len(starts) == 3
    assert failed[0].activation_ids == ("a0",)
    assert at[1] - at[0] < at[2] - at[1]


def test_a_model_is_inspected_once_for_many_requests_and_again_after_an_update() -> None:
    w = world(facts=chat())
    assert len([i for _ in range(3) for i in of(w.ask(CHAT), InspectModelOn)]) == 1
    assert len(of(w.looked(FACTS), StartGroup)) == 1
    assert len(of(w.deploy(chat(version="2"), changed=True), InspectModelOn)) == 1


def test_a_model_that_does_not_exist_fails_the_requests_and_is_looked_up_again_for_the_next() -> None:
    w = world(facts=chat())
    w.ask(CHAT)
    error = ErrorInfo("ModelNotFound", "no such bucket")
    assert [f.error for f in of(w.looked(None, error), FailDemand)] == [error]
    assert len(of(w.ask(CHAT), InspectModelOn)) == 1


def test_an_inspection_that_nobody_answers_is_asked_again_until_the_request_has_no_time_left() -> None:
    w = world(facts=chat(timeout_s=100.0))
    w.ask(CHAT)
    decided = w.later(200.0)
    assert len(of(decided, InspectModelOn)) == 3
    assert [f.error.code for f in of(decided, FailDemand)] == ["StoreUnavailable"]


def test_a_worker_killed_while_it_starts_is_replaced_and_a_minimum_is_kept() -> None:
    """The minimum is kept without a request too.  Only a developer's error makes the scheduler give it up."""
    w = llm_world(facts=chat(min_instances=1))
    for n in range(1, 6):
        (group,) = w.view.groups.values()
        record = w.view.instances[group.instance_ids[0]].record
        error = ErrorInfo("WorkerLost", "the engine process was killed by SIGKILL while it started")
        decided = w.do(InstanceChanged(replace(record, state=GONE, error=error)))
        (flag,) = of(decided, Flag)
        assert flag.name == "start_failed"
        assert (flag.fields["code"], flag.fields["in_a_row"]) == ("WorkerLost", n)
        assert len(of(w.later(60.0), StartGroup)) == 1, "the minimum was given up"


def test_what_is_larger_than_every_device_is_refused_with_both_numbers() -> None:
    w = world(facts=hello(need_bytes=5000 * MIB))
    (failed,) = of(w.ask(), FailDemand)
    assert failed.error.code == "MemoryTooSmall"
    assert "5000 MiB" in failed.error.message
    assert "4096 MiB" in failed.error.message


def test_without_any_host_a_request_waits_for_one() -> None:
    w = World()
    w.deploy(hello())
    assert of(w.ask(), StartGroup) == []
    assert len(of(w.see(report()), StartGroup)) == 1


def pipeline() -> tuple[World, StartGroup]:
    """A pipeline that nobody forced starts for one request."""
    w, start = starting(group_world(facts=chat(max_stages=4, slo_ttft_s=8.0)))
    assert len(start.plan.stages) > 1
    return w, start


@pytest.mark.parametrize("code", ["ModelUnsupported", "InitFailed"])
def test_what_an_engine_cannot_run_in_stages_is_started_in_one_and_no_request_fails(code: str) -> None:
    w, start = pipeline()
    decided = w.gone(start, error=ErrorInfo(code, "PPMissingLayer has no attribute tie_weights"))
    assert of(decided, FailDemand) == []
    (again,) = of([*decided, *w.looked(SMOLLM2)], StartGroup)
    assert (len(again.plan.stages), again.activation_ids) == (1, start.activation_ids)


def test_a_killed_worker_says_nothing_about_stages() -> None:
    w, start = pipeline()
    (again,) = of([*w.gone(start, error=LOST), *w.later(60.0)], StartGroup)
    assert len(again.plan.stages) > 1


def test_a_model_that_one_worker_cannot_run_either_fails_its_requests() -> None:
    w, start = pipeline()
    error = ErrorInfo("ModelUnsupported", "no kernel")
    (again,) = of([*w.gone(start, error=error), *w.looked(SMOLLM2)], StartGroup)
    assert [f.error for f in of(w.gone(again, error=error), FailDemand)] == [error]


def test_stages_that_the_function_asks_for_are_not_replaced_by_one_worker() -> None:
    w, start = starting(group_world(facts=forced(2)))
    error = ErrorInfo("ModelUnsupported", "no kernel")
    assert [f.error for f in of(w.gone(start, error=error), FailDemand)] == [error]

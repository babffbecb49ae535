"""A plan has the bound and the prediction of its start as terms, from the scheduler's knowledge at that time."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.scheduler.decisions import Forget, StartGroup
from gateway.scheduler.events import ActionDeleted
from gateway.scheduler.view.history import Measured
from tests.scheduler.facts import CHAT, FACTS, MIB, SMOLLM2, chat, report
from tests.scheduler.groups import group_world
from tests.scheduler.test_bound import PHASES, took
from tests.scheduler.world import World, llm_world, of
from thaw.host import Resident
from thaw.instance import StartMode
from thaw.tracing.bound import Part, Source, Term, least_s

LINK = 25e6


def terms(start: StartGroup, part: Part) -> list[Term]:
    return [t for t in start.plan.bound_terms if t.part == part]


def one_host(**fields: Any) -> World:
    return llm_world(report("h0", network_bytes_per_s=LINK, **fields))


def learn(w: World, **seconds: float) -> None:
    w.view.history.best.learn_start(CHAT, ["cpu"], took({**PHASES, **seconds}, mode="cold"))


def test_a_first_start_has_a_bound_of_its_bytes_alone_and_a_prediction_of_more() -> None:
    start = one_host().started(CHAT)
    (bytes_,) = terms(start, Part.BYTES)
    assert (bytes_.source, bytes_.seconds) == (Source.DECLARED, pytest.approx(FACTS.n_bytes / LINK))
    assert start.plan.bound_ttft_s == bytes_.seconds
    assert {t.source for t in start.plan.bound_terms if t is not bytes_} == {Source.UNKNOWN}
    assert start.plan.predicted_ttft_s > start.plan.bound_ttft_s


def test_what_starts_typically_take_never_enters_the_bound() -> None:
    w = one_host()
    w.view.history.update(CHAT, "cpu", StartMode.COLD, Measured(t_cc=30.0, t_cu=30.0, t_l=30.0, t_p=30.0, t_tail=30.0))
    start = w.started(CHAT)
    assert start.plan.bound_ttft_s == pytest.approx(FACTS.n_bytes / LINK)
    assert start.plan.predicted_ttft_s == pytest.approx(90.0 + 30.0 + 30.0 + 0.005)


def test_the_best_of_earlier_starts_makes_the_bound_and_one_slow_start_does_not() -> None:
    w = one_host()
    learn(w, libraries=9.0)
    learn(w, libraries=20.0)
    start = w.started(CHAT)
    (libraries,) = terms(start, Part.LIBRARIES)
    assert (libraries.seconds, libraries.n_starts) == (9.0, 2)
    assert start.plan.bound_ttft_s == pytest.approx(sum(PHASES.values()) + 9.0, rel=0.01)


def test_a_prediction_is_never_before_the_bound_and_says_when_it_was_raised_to_it() -> None:
    w = one_host()
    learn(w, libraries=60.0)
    start = w.started(CHAT)
    assert start.plan.predicted_ttft_s == start.plan.bound_ttft_s
    (raised,) = [t for t in start.plan.predicted_terms if t.part == Part.BOUND]
    assert raised == Term(Part.BOUND, start.plan.bound_ttft_s, Source.BEST)


def test_the_prediction_names_the_waits_that_the_bound_does_not_know() -> None:
    w = group_world(facts=chat(forced_stages=1, slots=1, slo_ttft_s=60.0), n_hosts=1)
    _, second, *_ = of(w.burst(2), StartGroup)
    by_part = {t.part: t.seconds for t in second.plan.predicted_terms}
    assert by_part[Part.PROMISED] > 1.0
    assert by_part[Part.WAITED] == 0.0
    assert terms(second, Part.BYTES)[0].source == Source.SHARED, "it may share what the first one fetches"


def test_bytes_that_the_host_has_already_do_not_count_and_those_of_a_former_version_do() -> None:
    for version, lacking in (("aa", FACTS.n_bytes - 40 * MIB), ("former", FACTS.n_bytes)):
        start = one_host(resident=(Resident("s3://m/x", 40 * MIB, version),)).started()
        assert terms(start, Part.BYTES)[0].n_bytes == lacking


def test_a_link_that_nobody_declared_or_measured_is_not_known_whatever_is_supposed_of_it() -> None:
    start = one_host(declared_bytes_per_s=None).started(CHAT)
    assert (terms(start, Part.BYTES)[0].seconds, start.plan.bound_ttft_s) == (None, None)
    measured = one_host(declared_bytes_per_s=None, measured_bytes_per_s=50e6).started(CHAT)
    assert terms(measured, Part.BYTES)[0].source == Source.MEASURED


def test_each_stage_has_its_own_bytes_on_its_own_host() -> None:
    start = group_world(facts=chat(forced_stages=4)).started(CHAT)
    found = terms(start, Part.BYTES)
    assert [t.host for t in found] == [s.host for s in start.plan.stages]
    assert [t.n_bytes for t in found] == [sum(r.n_bytes for r in s.first_ranges) for s in start.plan.stages]
    assert start.plan.bound_ttft_s == least_s(found)


def test_a_part_of_a_model_in_memory_is_copied_and_crosses_no_link() -> None:
    there = Resident("s3://m/x", SMOLLM2.n_bytes, "aa")
    start = group_world(n_hosts=2, facts=chat(forced_stages=2), resident=(there,)).started()
    assert terms(start, Part.BYTES) == []
    assert [t.seconds for t in terms(start, Part.MEMORY)] == [None, None]


def test_the_best_of_a_deleted_function_is_forgotten() -> None:
    w = one_host()
    learn(w)
    (forget,) = of(w.do(ActionDeleted(CHAT)), Forget)
    assert {key.split("|")[0] for key in forget.best} == {"model", "kv", "engine"}

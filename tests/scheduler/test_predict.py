"""Worked example 1's formulas, one by one, and what a trace teaches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.scheduler.history import History, Measured, Pass, measure, measure_run
from gateway.scheduler.predict import (
    Times,
    bound,
    f_factor,
    f_general,
    fetch_time_left,
    kappa,
    kappa_sequential,
    tpot,
    ttft,
)
from thaw.instance import StartMode
from thaw.trace import Phase, TraceEvent

COLD, LLAMA2_7B = StartMode.COLD, 13_476_839_424
T = Times()
M, P = 12e9, 12e9


@pytest.mark.parametrize(
    ("s", "w", "expected"), [(1, 1, 12.505), (2, 0, 10.51), (2, 1, 9.76), (2, 2, 9.01), (3, 3, 9.848), (4, 4, 8.77)]
)
def test_worked_example_1_eq_1_without_overlap(s: int, w: int, expected: float) -> None:
    bandwidths = [2e9, 2e9, 1e9, 1e9][:s]
    kappas = [kappa_sequential(M / s, b, P, T) for b in bandwidths]
    assert ttft(0.0, kappas, f_factor(s, w), T) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize(("s", "w", "expected"), [(1, 1, 7.505), (2, 0, 7.010), (2, 1, 6.260)])
def test_worked_example_1_eq_5_with_overlap(s: int, w: int, expected: float) -> None:
    assert ttft(0.0, [kappa(M / s, 2e9, P, T)] * s, f_factor(s, w), T) == pytest.approx(expected)


def test_worked_example_1_eq_2_time_per_token() -> None:
    assert tpot(2, f_factor(2, 0), T) == pytest.approx(0.094)
    assert tpot(2, f_factor(2, 1), T) == pytest.approx(0.073)


@pytest.mark.parametrize(("s", "w"), [(s, w) for s in range(1, 9) for w in range(s + 1)])
def test_the_general_f_is_the_papers_when_low_workers_get_one_sth(s: int, w: int) -> None:
    assert f_general([1.0] * w + [1 / s] * (s - w)) == pytest.approx(f_factor(s, w))


def test_a_low_worker_alone_on_its_device_costs_nothing_when_shares_are_not_enforced() -> None:
    assert f_general([1.0, 1.0, 1.0]) == pytest.approx(1.0)


def test_the_bound_has_no_tail_and_the_prediction_has() -> None:
    slow = Times(t_tail=2.0)
    floor = bound(0.5, kappa(M, 2e9, P, slow), 1, 1.0, slow)
    assert ttft(0.5, [kappa(M, 2e9, P, slow)], 1.0, slow) - floor == pytest.approx(2.0)


def test_the_fetch_deadline_is_what_the_slo_leaves_after_waiting_prefill_hops_and_tail() -> None:
    assert fetch_time_left(7.5, 1.0, 2, 1.5, T) == pytest.approx(4.24)


def _event(name: Phase, at_s: float, n_bytes: int | None = None, boot: str = "b") -> TraceEvent:
    return TraceEvent(name, boot_id=boot, mono_ns=int(at_s * 1e9), n_bytes=n_bytes)


TRACE = [
    _event(Phase.FETCH_BEGIN, 0.0), _event(Phase.CONTAINER_BEGIN, 0.0), _event(Phase.CONTAINER_END, 0.5),
    _event(Phase.LIBRARIES_BEGIN, 0.6), _event(Phase.LIBRARIES_END, 2.6), _event(Phase.FETCH_END, 4.0, 8_000),
    _event(Phase.READY, 5.0),
]  # fmt: skip


def test_a_trace_gives_the_phases_the_rate_and_the_tail() -> None:
    measured = measure(TRACE)
    assert (measured.t_cc, measured.t_l, measured.t_c) == pytest.approx((0.5, 2.0, 2.5))
    assert (measured.bandwidth, measured.t_tail) == pytest.approx((2_000.0, 1.0))
    assert measured.t_cu is None


def test_a_start_that_fetched_nothing_teaches_no_tail() -> None:
    resident = [replace(e, attrs={"resident": True}) if e.name is Phase.FETCH_END else e for e in TRACE]
    assert measure(resident).t_tail is None
    assert measure(resident).bandwidth is None, "nothing moved, so there is no rate to learn"
    assert measure([*TRACE, _event(Phase.CONTEXT_END, 4.8)]).t_tail == pytest.approx(0.2)


def test_the_tail_of_a_group_is_that_of_its_slowest_stage() -> None:
    other = [replace(e, stage=1, mono_ns=e.mono_ns + (e.name is Phase.READY) * 700_000_000) for e in TRACE]
    assert measure([*TRACE, *other]).t_tail == pytest.approx(1.7)
    assert measure([*TRACE, *other]).bandwidth == pytest.approx(2_000.0)  # stage 0's


def test_events_of_two_boots_are_never_subtracted() -> None:
    moved = [_event(Phase.CONTAINER_BEGIN, 9.0, boot="old"), _event(Phase.CONTAINER_END, 1.0, boot="new")]
    assert measure(moved).t_cc is None


def test_the_first_measurement_replaces_the_default_and_later_ones_are_mixed_in_by_a_fifth() -> None:
    history = History()
    history.update("guest/chat", "cpu", COLD, measure(TRACE))
    slower = [_event(Phase.CONTAINER_BEGIN, 0.0), _event(Phase.CONTAINER_END, 1.5)]
    learned = history.update("guest/chat", "cpu", COLD, measure(slower))
    assert learned.times.t_cc == pytest.approx(0.8 * 0.5 + 0.2 * 1.5)
    assert learned.bandwidth == pytest.approx(2_000.0)
    assert history.times("guest/chat", "cpu", COLD, LLAMA2_7B).t_p == Times().t_p


def test_what_does_not_depend_on_the_function_is_known_of_one_that_never_started() -> None:
    history = History()
    learned = history.update("guest/chat", "cpu", COLD, replace(measure(TRACE), t_p=9.0, t_d=0.9)).times
    other = history.times("guest/other", "cpu", COLD, LLAMA2_7B)
    assert (other.t_cc, other.t_l, other.t_tail) == (learned.t_cc, learned.t_l, learned.t_tail)
    assert (other.t_p, other.t_d) == (Times().t_p, Times().t_d)
    assert history.times("guest/other", "H200", COLD, LLAMA2_7B) == Times()


def test_a_start_from_a_stem_cell_waits_for_no_imports_and_is_learned_apart() -> None:
    history = History()
    prewarmed = history.times("guest/chat", "cpu", StartMode.PREWARMED, LLAMA2_7B)
    assert (prewarmed.t_l, prewarmed.t_cc) == (0.0, 0.2)
    history.update("guest/chat", "cpu", COLD, measure(TRACE))
    after = history.times("guest/chat", "cpu", StartMode.PREWARMED, LLAMA2_7B)
    assert after == replace(prewarmed, t_tail=history.times("guest/chat", "cpu", COLD, LLAMA2_7B).t_tail)


def test_a_request_teaches_prefill_and_the_time_of_a_token() -> None:
    run = [_event(Phase.PREFILL_BEGIN, 1.0), _event(Phase.PREFILL_END, 1.5), _event(Phase.RUN_END, 3.5)]
    assert measure_run(run, 5) == Pass(1, 1, pytest.approx(0.5), pytest.approx(0.5))
    assert measure_run(run, 1).token_s is None
    assert measure_run(run[:1], 5) == Pass(1, 1)
    learned = History().update_pass("guest/chat", "cpu", COLD, measure_run(run, 5))
    assert (learned.times.t_p, learned.times.t_d, learned.alone) == (0.5, 0.5, ("t_d", "t_p"))


def truth(s: int, w: int, t_p: float = 0.9, t_d: float = 0.03, t_n: float = 0.012) -> Pass:
    """What a group of this shape really shows."""
    factor = f_factor(s, w)
    return Pass(s, w, t_p * factor + t_n * s, t_d * factor + t_n * s)


def test_a_group_teaches_the_hop_when_the_token_of_one_stage_is_known() -> None:
    history = History()
    history.update_pass("guest/chat", "cpu", COLD, truth(1, 1, t_n=0.0))
    history.update_pass("guest/chat", "cpu", StartMode.PREWARMED, truth(4, 1))  # what one mode knows the other does too
    times = history.times("guest/chat", "cpu", StartMode.PREWARMED, LLAMA2_7B)
    assert (times.t_p, times.t_d, times.t_n) == pytest.approx((0.9, 0.03, 0.012))
    assert tpot(2, f_factor(2, 1), times) == pytest.approx(0.03 * 1.5 + 0.012 * 2)


@pytest.mark.parametrize(("s", "w"), [(2, 0), (2, 2), (3, 1), (4, 1), (8, 1)])
def test_groups_alone_teach_prefill_and_token_with_the_hop_as_it_is_known(s: int, w: int) -> None:
    history = History()
    history.update("guest/other", "cpu", COLD, Measured(t_n=0.012))  # of any action
    learned = history.update_pass("guest/chat", "cpu", COLD, truth(s, w))
    assert (learned.times.t_p, learned.times.t_d) == pytest.approx((0.9, 0.03))
    assert learned.alone == ()
    assert tpot(s, f_factor(s, w), history.times("guest/chat", "cpu", COLD, LLAMA2_7B)) == pytest.approx(
        truth(s, w).token_s
    )


def test_a_hop_that_is_believed_too_long_leaves_half_of_a_pass_to_the_stages() -> None:
    history = History()
    history.update("guest/other", "cpu", COLD, Measured(t_n=1.0))
    learned = history.update_pass("guest/chat", "cpu", COLD, Pass(4, 4, 0.4, 0.04))
    assert (learned.times.t_p, learned.times.t_d) == pytest.approx((0.2, 0.02))


def test_a_group_that_is_faster_than_one_stage_has_no_hop_and_never_a_negative_one() -> None:
    history = History()
    history.update_pass("guest/chat", "cpu", COLD, truth(1, 1, t_n=0.0))
    assert history.update_pass("guest/chat", "cpu", COLD, Pass(2, 1, 0.5, 0.01)).times.t_n == 0.0


def test_how_good_predictions_were_is_kept_and_corrects_nothing() -> None:
    history = History()
    before = history.times("guest/chat", "cpu", COLD, LLAMA2_7B)
    history.update("guest/chat", "cpu", COLD, Measured(ttft_ratio=2.0))
    learned = history.update("guest/chat", "cpu", COLD, Measured(ttft_ratio=1.0))
    assert learned.ttft_ratio == pytest.approx(1.8)
    assert history.times("guest/chat", "cpu", COLD, LLAMA2_7B) == before


def test_what_is_not_known_of_a_small_model_is_guessed_from_its_bytes() -> None:
    small = History().times("guest/chat", "cpu", COLD, LLAMA2_7B // 100)
    assert small.t_p == pytest.approx(T.t_p / 100)
    assert small.t_cc == T.t_cc

"""The formulas of worked example 1, one by one, and the times that the history learns from a trace."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from gateway.scheduler.placement.predict import (
    NO_RUNTIME,
    Times,
    f_factor,
    f_general,
    fetch_time_left,
    kappa_sequential,
    limited_rate,
    tpot,
    ttft,
    worker_start,
)
from gateway.scheduler.view.history import History, Learned, Measured, Pass, measure, measure_run
from thaw.instance import StartMode
from thaw.tracing.trace import Phase, TraceEvent

COLD, LLAMA2_7B = StartMode.COLD, 13_476_839_424
T = Times()
M, P = 12e9, 12e9


def kappa(part: float, bandwidth: float, pcie: float, times: Times) -> float:
    """The inner term of Eq. 5, without a queue and without waiting for a stem cell."""
    return worker_start(part, bandwidth, pcie, times).ready_s


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


def test_without_a_runtime_a_start_takes_what_serverlessllm_says_the_queue_and_the_slowest_tier() -> None:
    for rate in (1e9, 40e9):  # the fetch is slower than the copy, or faster
        start = worker_start(12e9, rate, 20e9, NO_RUNTIME, queue_s=3.0)
        assert start.ready_s == pytest.approx(3.0 + 12e9 / min(rate, 20e9))


def test_a_part_that_lies_in_host_memory_waits_for_the_runtime_and_the_copy_alone() -> None:
    assert worker_start(M, math.inf, P, T).ready_s == pytest.approx(1.5 + 0.5 + 2.0)
    assert worker_start(4 * M, math.inf, P, T).ready_s == pytest.approx(1.5 + 0.5 + 4.0)


def test_what_waits_for_its_stem_cell_begins_everything_but_the_fetch_later() -> None:
    now, later = (worker_start(M, 2e9, P, T, cell_wait_s=wait_s) for wait_s in (0.0, 5.0))
    assert (later.runtime_s - now.runtime_s, later.copied_s - now.copied_s) == pytest.approx((5.0, 5.0))
    assert later.fetched_s == now.fetched_s


def test_the_fetch_deadline_is_what_the_slo_leaves_after_waiting_prefill_hops_and_tail() -> None:
    assert fetch_time_left(7.5, 1.0, 2, 1.5, T) == pytest.approx(4.24)
    assert fetch_time_left(7.5, 1.0, 2, 1.5, replace(T, t_tail=0.5)) == pytest.approx(3.74)


def _event(name: Phase, at_s: float, n_bytes: int | None = None, boot: str = "b") -> TraceEvent:
    return TraceEvent(name, boot_id=boot, mono_ns=int(at_s * 1e9), n_bytes=n_bytes)


TRACE = [
    _event(Phase.FETCH_BEGIN, 0.0),
    _event(Phase.CONTAINER_BEGIN, 0.0),
    _event(Phase.CONTAINER_END, 0.5),
    _event(Phase.LIBRARIES_BEGIN, 0.6),
    _event(Phase.LIBRARIES_END, 2.6),
    _event(Phase.FETCH_END, 4.0, 8_000),
    _event(Phase.READY, 5.0),
]


def test_a_trace_gives_the_phases_and_the_tail() -> None:
    measured = measure(TRACE)
    assert (measured.t_cc, measured.t_l, measured.t_c) == pytest.approx((0.5, 2.0, 2.5))
    assert measured.t_tail == pytest.approx(1.0)
    assert (measured.t_cu, measured.copy, measured.memory) == (None, None, None)


def test_an_import_that_begins_while_its_container_is_made_is_counted_once() -> None:
    early = [_event(Phase.LIBRARIES_BEGIN, 0.2) if e.name is Phase.LIBRARIES_BEGIN else e for e in TRACE]
    measured = measure(early)
    assert (measured.t_cc, measured.t_l, measured.t_c) == pytest.approx((0.5, 2.1, 2.6))


LOADING = [
    _event(Phase.CONTEXT_BEGIN, 0.5),
    _event(Phase.CONTEXT_END, 1.0),
    _event(Phase.LOAD_BEGIN, 1.0),
    replace(_event(Phase.LOAD_END, 4.5, 8_000), attrs={"wait_s": 2.0, "waits_for": "fetch", "rehearsal_s": 0.5}),
]


def test_a_trace_of_which_only_the_containers_end_is_there_gives_a_tail_from_then_on() -> None:
    events = [_event(Phase.CONTAINER_BEGIN, 0.0), _event(Phase.CONTAINER_END, 0.5), _event(Phase.READY, 0.75)]
    assert measure(events).t_tail == pytest.approx(0.25)


def test_a_trace_gives_the_rate_of_the_copy_to_the_device_without_the_waiting_for_bytes() -> None:
    assert measure([*TRACE, *LOADING]).copy == pytest.approx(8_000.0)  # 3.5 s less 2 s of waiting, 0.5 s of rehearsal


def test_a_copy_that_ends_after_the_last_byte_is_no_part_of_the_tail() -> None:
    """Eq. 5 counts the copy already: a prediction must not contain a slow copy twice."""
    slow = [*LOADING[:3], _event(Phase.LOAD_END, 4.9, 8_000)]
    measured = measure([*TRACE, *slow])
    assert measured.t_tail == pytest.approx(5.0 - (1.0 + 3.9))


def test_a_fetch_whose_bytes_another_segment_had_gives_the_rate_within_the_hosts_memory() -> None:
    for copied, rate in ((8_000, 2_000.0), (4_000, None)):
        events = [replace(e, attrs={"copied_bytes": copied}) if e.name is Phase.FETCH_END else e for e in TRACE]
        assert measure(events).memory == (None if rate is None else pytest.approx(rate))


def test_rates_are_those_of_the_action_else_of_any_action_else_of_the_kind_of_device() -> None:
    history = History()
    assert (history.rates("guest/chat", "cpu").copy, history.rates("guest/chat", "A10").copy) == (20e9, 12e9)
    history.update("guest/other", "A10", COLD, Measured(copy=9e9, memory=3e9))
    assert (history.rates("guest/chat", "A10").copy, history.rates("guest/chat", "A10").memory) == (9e9, 3e9)
    history.update("guest/chat", "A10", StartMode.PREWARMED, Measured(copy=5e9))
    assert history.rates("guest/chat", "A10").copy == 5e9
    assert history.rates("guest/chat", "cpu").copy == 20e9


def test_a_start_that_fetched_nothing_teaches_no_tail() -> None:
    resident = [replace(e, attrs={"resident": True}) if e.name is Phase.FETCH_END else e for e in TRACE]
    assert measure(resident).t_tail is None
    assert measure(resident).memory is None, "nothing moved, so there is no rate to learn"
    assert measure([*TRACE, _event(Phase.CONTEXT_END, 4.8)]).t_tail == pytest.approx(0.2)


def test_the_tail_of_a_group_is_that_of_its_slowest_stage() -> None:
    other = [replace(e, stage=1, mono_ns=e.mono_ns + (e.name is Phase.READY) * 700_000_000) for e in TRACE]
    assert measure([*TRACE, *other]).t_tail == pytest.approx(1.7)


def test_events_of_two_boots_are_never_subtracted() -> None:
    moved = [_event(Phase.CONTAINER_BEGIN, 9.0, boot="old"), _event(Phase.CONTAINER_END, 1.0, boot="new")]
    assert measure(moved).t_cc is None


def test_waiting_for_a_stem_cell_is_no_part_of_the_container() -> None:
    waited = [
        replace(e, attrs={"mode": "prewarmed", "stem_cell_wait_s": 0.4}) if e.name is Phase.CONTAINER_END else e
        for e in TRACE
    ]
    measured = measure(waited)
    assert measured.t_cc == pytest.approx(0.1)


def test_pulling_an_image_is_no_part_of_the_container_because_the_next_start_has_it() -> None:
    pulled = [
        replace(e, attrs={"mode": "cold", "image_pull_s": 0.4}) if e.name is Phase.CONTAINER_END else e for e in TRACE
    ]
    assert measure(pulled).t_cc == pytest.approx(0.1)


def test_one_early_start_that_waited_for_the_first_stem_cell_makes_no_other_start_look_later() -> None:
    history = History()
    before = history.times("guest/other", "cpu", StartMode.PREWARMED, LLAMA2_7B)
    early = [
        _event(Phase.CONTAINER_BEGIN, 0.0),
        replace(_event(Phase.CONTAINER_END, 3.7), attrs={"mode": "prewarmed", "stem_cell_wait_s": 3.5}),
    ]
    history.update("guest/chat", "cpu", StartMode.PREWARMED, measure(early))
    after = history.times("guest/other", "cpu", StartMode.PREWARMED, LLAMA2_7B)
    assert after.t_cc == pytest.approx(before.t_cc)


def test_what_a_claimed_cell_still_had_to_import_is_learned_neither_as_libraries_nor_as_context() -> None:
    """The start claimed the stem cell while it imported.  This time is a wait for the cell; the next may be ready."""
    importing = [
        _event(Phase.CONTAINER_BEGIN, 9.0),
        replace(_event(Phase.CONTAINER_END, 9.1), attrs={"mode": "prewarmed"}),
        _event(Phase.CONTEXT_BEGIN, 9.1),
        _event(Phase.CONTEXT_END, 9.2),
        _event(Phase.LIBRARIES_BEGIN, 1.0),
        _event(Phase.LIBRARIES_END, 12.0),
        _event(Phase.CONTEXT_BEGIN, 12.0),
        _event(Phase.CONTEXT_END, 12.3),
        _event(Phase.READY, 12.8),
    ]
    measured = measure(importing)
    assert (measured.t_l, measured.t_cu, measured.t_tail) == (None, pytest.approx(0.4), pytest.approx(0.5))


def test_the_first_measurement_replaces_the_default_and_the_median_of_them_counts() -> None:
    history = History()
    history.update("guest/chat", "cpu", COLD, measure(TRACE))
    for took_s in (1.5, 1.7):
        slower = [_event(Phase.CONTAINER_BEGIN, 0.0), _event(Phase.CONTAINER_END, took_s)]
        learned = history.update("guest/chat", "cpu", COLD, measure(slower))
    assert learned.times.t_cc == pytest.approx(1.5)
    assert history.times("guest/chat", "cpu", COLD, LLAMA2_7B).t_p == Times().t_p


LEARNED = ("t_c", "t_cc", "t_cu", "t_l", "t_p", "t_d", "t_n", "t_tail")


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("slow_at", range(1, 8))
def test_one_start_with_a_phase_of_20_s_hardly_changes_what_is_expected_of_the_next(name: str, slow_at: int) -> None:
    """When a fifth of each start was mixed in, the next start was expected 4 s later."""
    history = History()
    for n in range(8):
        took_s = 20.0 if n == slow_at else 0.20 + 0.01 * (n % 3)
        learned = history.update("guest/chat", "cpu", COLD, Measured(**{name: took_s}))
        assert 0.20 <= getattr(learned.times, name) <= 0.22
        other = history.times("guest/other", "cpu", COLD, LLAMA2_7B)
        assert name in ("t_p", "t_d") or 0.20 <= getattr(other, name) <= 0.22


def test_a_first_start_that_was_slow_is_forgotten_with_the_second() -> None:
    history = History()
    for took_s in (20.0, 0.2):
        learned = history.update("guest/chat", "cpu", COLD, Measured(t_cc=took_s))
    assert learned.times.t_cc == 0.2


def test_one_copy_that_was_slow_does_not_make_the_device_look_slow() -> None:
    history = History()
    for rate in (8e9, 0.1e9, 8.1e9, 7.9e9, 0.1e9):
        history.update("guest/chat", "cpu", COLD, Measured(copy=rate))
        assert history.rates("guest/chat", "cpu").copy >= 7.9e9


@pytest.mark.parametrize(("before_s", "after_s"), [(0.2, 20.0), (20.0, 0.2), (1.0, 1.3)])
def test_a_lasting_change_is_followed_within_ten_starts(before_s: float, after_s: float) -> None:
    history = History()
    for took_s in [before_s] * 30 + [after_s] * 10:
        learned = history.update("guest/chat", "cpu", COLD, Measured(t_tail=took_s))
    assert learned.times.t_tail == pytest.approx(after_s)


def test_the_mean_that_an_older_scheduler_kept_counts_as_one_start() -> None:
    kept = Learned(replace(T, t_cc=3.0), known=("t_cc",))
    history = History({History.key("guest/chat", "cpu", COLD): kept})
    history.update("guest/chat", "cpu", COLD, Measured(t_cc=1.0))
    learned = history.update("guest/chat", "cpu", COLD, Measured(t_cc=2.0))
    assert learned.times.t_cc == 2.0


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
    assert measure_run(run, 5) == Pass(1, 1.0, pytest.approx(0.5), pytest.approx(0.5))
    assert measure_run(run, 1).token_s is None
    assert measure_run(run[:1], 5) == Pass(1, 1.0)
    learned = History().update_pass("guest/chat", "cpu", COLD, measure_run(run, 5))
    assert (learned.times.t_p, learned.times.t_d, learned.alone) == (0.5, 0.5, ("t_d", "t_p"))


def truth(s: int, w: int, t_p: float = 0.9, t_d: float = 0.03, t_n: float = 0.012) -> Pass:
    """The pass that a group of this shape really shows."""
    factor = f_factor(s, w)
    return Pass(s, factor, t_p * factor + t_n * s, t_d * factor + t_n * s)


def test_a_group_teaches_the_hop_when_the_token_of_one_stage_is_known() -> None:
    history = History()
    history.update_pass("guest/chat", "cpu", COLD, truth(1, 1, t_n=0.0))
    history.update_pass("guest/chat", "cpu", StartMode.PREWARMED, truth(4, 1))  # both modes share this knowledge
    times = history.times("guest/chat", "cpu", StartMode.PREWARMED, LLAMA2_7B)
    assert (times.t_p, times.t_d, times.t_n) == pytest.approx((0.9, 0.03, 0.012))
    assert tpot(2, f_factor(2, 1), times) == pytest.approx(0.03 * 1.5 + 0.012 * 2)


@pytest.mark.parametrize(("s", "w"), [(2, 0), (2, 2), (3, 1), (4, 1), (8, 1)])
def test_groups_alone_teach_prefill_and_token_with_the_hop_as_it_is_known(s: int, w: int) -> None:
    history = History()
    history.update("guest/other", "cpu", COLD, Measured(t_n=0.012))  # any action's hop counts
    learned = history.update_pass("guest/chat", "cpu", COLD, truth(s, w))
    assert (learned.times.t_p, learned.times.t_d) == pytest.approx((0.9, 0.03))
    assert learned.alone == ()
    assert tpot(s, f_factor(s, w), history.times("guest/chat", "cpu", COLD, LLAMA2_7B)) == pytest.approx(
        truth(s, w).token_s
    )


def test_a_hop_that_is_believed_too_long_leaves_half_of_a_pass_to_the_stages() -> None:
    history = History()
    history.update("guest/other", "cpu", COLD, Measured(t_n=1.0))
    learned = history.update_pass("guest/chat", "cpu", COLD, Pass(4, 1.0, 0.4, 0.04))
    assert (learned.times.t_p, learned.times.t_d) == pytest.approx((0.2, 0.02))


def test_a_group_that_is_faster_than_one_stage_has_no_hop_and_never_a_negative_one() -> None:
    history = History()
    history.update_pass("guest/chat", "cpu", COLD, truth(1, 1, t_n=0.0))
    assert history.update_pass("guest/chat", "cpu", COLD, Pass(2, 1.5, 0.5, 0.01)).times.t_n == 0.0


def test_how_good_predictions_were_is_kept_and_corrects_nothing() -> None:
    history = History()
    before = history.times("guest/chat", "cpu", COLD, LLAMA2_7B)
    history.update("guest/chat", "cpu", COLD, Measured(ttft_ratio=2.0))
    learned = history.update("guest/chat", "cpu", COLD, Measured(ttft_ratio=1.0))
    assert learned.ttft_ratio == pytest.approx(1.0)  # the better of the two counts
    assert history.times("guest/chat", "cpu", COLD, LLAMA2_7B) == before


def test_what_is_not_known_of_a_small_model_is_guessed_from_its_bytes() -> None:
    small = History().times("guest/chat", "cpu", COLD, LLAMA2_7B // 100)
    assert small.t_p == pytest.approx(T.t_p / 100)
    assert small.t_cc == T.t_cc


@pytest.mark.parametrize(
    ("bandwidth", "most", "expected"),
    [
        (10.0, math.inf, 10.0),
        (10.0, 20.0, 10.0),
        (10.0, 4.0, 4.0),  # an idle link
        (5.0, 4.0, 100 / (10 + 25)),  # 100 bytes are served before it, which takes 10 s
        (0.0, 4.0, 0.0),
        (math.inf, 4.0, math.inf),  # nothing is fetched
    ],
)
def test_a_limited_fetch_waits_as_long_as_another_and_then_reads_at_its_limit(
    bandwidth: float, most: float, expected: float
) -> None:
    assert limited_rate(100, bandwidth, 10.0, most) == pytest.approx(expected)

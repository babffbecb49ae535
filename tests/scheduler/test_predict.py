"""The formulas of worked example 1, one by one, and the times that the history learns from a trace."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

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
from tests.scheduler.starts import event, phase
from thaw.instance import StartMode
from thaw.tracing.trace import Phase, TraceEvent

COLD, PREWARMED, LLAMA2_7B = StartMode.COLD, StartMode.PREWARMED, 13_476_839_424
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


READY = event(Phase.READY, 5.0)


def trace(**attrs: dict[str, Any]) -> list[TraceEvent]:
    """A start.  ``attrs`` are the evidence of its phases."""
    return [
        *phase("container", 0.0, 0.5, **attrs.get("container", {})),
        *phase("libraries", 0.6, 2.6),
        *phase("fetch", 0.0, 4.0, 8_000, **attrs.get("fetch", {})),
        READY,
    ]


def container(took_s: float, **attrs: Any) -> list[TraceEvent]:
    return phase("container", 0.0, took_s, **attrs)


LOADING = [*trace(), *phase("context", 0.5, 1.0)]
MEASURED: dict[str, tuple[list[TraceEvent], dict[str, float | None]]] = {
    "the phases and the tail": (
        trace(),
        {"t_cc": 0.5, "t_l": 2.0, "t_c": 2.5, "t_tail": 1.0, "t_cu": None, "copy": None, "memory": None},
    ),
    "an import that begins while its container is made is counted once": (
        [replace(e, mono_ns=200_000_000) if e.name is Phase.LIBRARIES_BEGIN else e for e in trace()],
        {"t_cc": 0.5, "t_l": 2.1, "t_c": 2.6},
    ),
    "if only the container's end is there the tail is from then on": (
        [*container(0.5), event(Phase.READY, 0.75)],
        {"t_tail": 0.25},
    ),
    "the copy to the device has its rate without the waiting for bytes and without the rehearsal": (
        [*LOADING, *phase("load", 1.0, 4.5, 8_000, wait_s=2.0, waits_for="fetch", rehearsal_s=0.5)],
        {"copy": 8_000.0},
    ),
    # Eq. 5 counts the copy already: a prediction must not contain a slow copy twice
    "a copy that ends after the last byte is no part of the tail": (
        [*LOADING, *phase("load", 1.0, 4.9, 8_000)],
        {"t_tail": 5.0 - (1.0 + 3.9)},
    ),
    "a fetch whose bytes another segment had gives the rate within the host's memory": (
        trace(fetch={"copied_bytes": 8_000}),
        {"memory": 2_000.0},
    ),
    "a fetch of which another segment had a part gives none": (trace(fetch={"copied_bytes": 4_000}), {"memory": None}),
    "a start that fetched nothing teaches no tail and no rate": (
        trace(fetch={"resident": True}),
        {"t_tail": None, "memory": None},
    ),
    "a context that ends late shortens the tail": ([*trace(), event(Phase.CONTEXT_END, 4.8)], {"t_tail": 0.2}),
    "the tail of a group is that of its slowest stage": (
        [*trace(), *(replace(e, stage=1, mono_ns=e.mono_ns + (e is READY) * 700_000_000) for e in trace())],
        {"t_tail": 1.7},
    ),
    "events of two boots are never subtracted": (
        [event(Phase.CONTAINER_BEGIN, 9.0, boot="old"), event(Phase.CONTAINER_END, 1.0, boot="new")],
        {"t_cc": None},
    ),
    "waiting for a stem cell is no part of the container": (
        trace(container={"mode": "prewarmed", "stem_cell_wait_s": 0.4}),
        {"t_cc": 0.1},
    ),
    "pulling an image is no part of the container because the next start has it": (
        trace(container={"mode": "cold", "image_pull_s": 0.4}),
        {"t_cc": 0.1},
    ),
    # the start claimed the stem cell while it imported: this is a wait for the cell, and the next one may be ready
    "what a claimed cell still had to import is neither libraries nor context": (
        [
            *phase("container", 9.0, 9.1, mode="prewarmed"),
            *(*phase("context", 9.1, 9.2), *phase("libraries", 1.0, 12.0), *phase("context", 12.0, 12.3)),
            event(Phase.READY, 12.8),
        ],
        {"t_l": None, "t_cu": 0.4, "t_tail": 0.5},
    ),
}


@pytest.mark.parametrize(("events", "expected"), MEASURED.values(), ids=MEASURED)
def test_a_trace_teaches_what_its_phases_took(events: list[TraceEvent], expected: dict[str, float | None]) -> None:
    measured = measure(events)
    assert {name: getattr(measured, name) for name in expected} == pytest.approx(expected)


def test_rates_are_those_of_the_action_else_of_any_action_else_of_the_kind_of_device() -> None:
    history = History()
    assert (history.rates("guest/chat", "cpu").copy, history.rates("guest/chat", "A10").copy) == (20e9, 12e9)
    history.update("guest/other", "A10", COLD, Measured(copy=9e9, memory=3e9))
    assert (history.rates("guest/chat", "A10").copy, history.rates("guest/chat", "A10").memory) == (9e9, 3e9)
    history.update("guest/chat", "A10", PREWARMED, Measured(copy=5e9))
    assert history.rates("guest/chat", "A10").copy == 5e9
    assert history.rates("guest/chat", "cpu").copy == 20e9


def test_one_early_start_that_waited_for_the_first_stem_cell_makes_no_other_start_look_later() -> None:
    history = History()
    before = history.times("guest/other", "cpu", PREWARMED, LLAMA2_7B)
    early = container(3.7, mode="prewarmed", stem_cell_wait_s=3.5)
    history.update("guest/chat", "cpu", PREWARMED, measure(early))
    assert history.times("guest/other", "cpu", PREWARMED, LLAMA2_7B).t_cc == pytest.approx(before.t_cc)


def test_the_first_measurement_replaces_the_default_and_the_median_of_them_counts() -> None:
    history = History()
    history.update("guest/chat", "cpu", COLD, measure(trace()))
    for took_s in (1.5, 1.7):
        learned = history.update("guest/chat", "cpu", COLD, measure(container(took_s)))
    assert learned.times.t_cc == pytest.approx(1.5)
    assert history.times("guest/chat", "cpu", COLD, LLAMA2_7B).t_p == Times().t_p


@pytest.mark.parametrize("name", ["t_c", "t_cc", "t_cu", "t_l", "t_p", "t_d", "t_n", "t_tail"])
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


def test_one_copy_that_was_slow_does_not_make_the_device_look_slow() -> None:
    history = History()
    for rate in (8e9, 0.1e9, 8.1e9, 7.9e9, 0.1e9):
        history.update("guest/chat", "cpu", COLD, Measured(copy=rate))
        assert history.rates("guest/chat", "cpu").copy >= 7.9e9


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ([20.0, 0.2], 0.2),
        ([0.2] * 30 + [20.0] * 10, 20.0),
        ([20.0] * 30 + [0.2] * 10, 0.2),
        ([1.0] * 30 + [1.3] * 10, 1.3),
    ],
    ids=["a slow first start is forgotten with the second", "it becomes slow", "it becomes fast", "a little slower"],
)
def test_a_lasting_change_is_followed_within_ten_starts(measured: list[float], expected: float) -> None:
    history = History()
    for took_s in measured:
        learned = history.update("guest/chat", "cpu", COLD, Measured(t_tail=took_s))
    assert learned.times.t_tail == pytest.approx(expected)


def test_the_mean_that_an_older_scheduler_kept_counts_as_one_start() -> None:
    kept = Learned(replace(T, t_cc=3.0), known=("t_cc",))
    history = History({History.key("guest/chat", "cpu", COLD): kept})
    history.update("guest/chat", "cpu", COLD, Measured(t_cc=1.0))
    learned = history.update("guest/chat", "cpu", COLD, Measured(t_cc=2.0))
    assert learned.times.t_cc == 2.0


def test_what_does_not_depend_on_the_function_is_known_of_one_that_never_started() -> None:
    history = History()
    learned = history.update("guest/chat", "cpu", COLD, replace(measure(trace()), t_p=9.0, t_d=0.9)).times
    other = history.times("guest/other", "cpu", COLD, LLAMA2_7B)
    assert (other.t_cc, other.t_l, other.t_tail) == (learned.t_cc, learned.t_l, learned.t_tail)
    assert (other.t_p, other.t_d) == (Times().t_p, Times().t_d)
    assert history.times("guest/other", "H200", COLD, LLAMA2_7B) == Times()


def test_a_start_from_a_stem_cell_waits_for_no_imports_and_is_learned_apart() -> None:
    history = History()
    prewarmed = history.times("guest/chat", "cpu", PREWARMED, LLAMA2_7B)
    assert (prewarmed.t_l, prewarmed.t_cc) == (0.0, 0.2)
    history.update("guest/chat", "cpu", COLD, measure(trace()))
    after = history.times("guest/chat", "cpu", PREWARMED, LLAMA2_7B)
    assert after == replace(prewarmed, t_tail=history.times("guest/chat", "cpu", COLD, LLAMA2_7B).t_tail)


def test_a_request_teaches_prefill_and_the_time_of_a_token() -> None:
    run = [*phase("prefill", 1.0, 1.5), event(Phase.RUN_END, 3.5)]
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
    history.update_pass("guest/chat", "cpu", PREWARMED, truth(4, 1))  # both modes share this knowledge
    times = history.times("guest/chat", "cpu", PREWARMED, LLAMA2_7B)
    assert (times.t_p, times.t_d, times.t_n) == pytest.approx((0.9, 0.03, 0.012))
    assert tpot(2, f_factor(2, 1), times) == pytest.approx(0.03 * 1.5 + 0.012 * 2)


@pytest.mark.parametrize(("s", "w"), [(2, 0), (2, 2), (3, 1), (4, 1), (8, 1)])
def test_groups_alone_teach_prefill_and_token_with_the_hop_as_it_is_known(s: int, w: int) -> None:
    history = History()
    history.update("guest/other", "cpu", COLD, Measured(t_n=0.012))  # any action's hop counts
    learned = history.update_pass("guest/chat", "cpu", COLD, truth(s, w))
    assert (learned.times.t_p, learned.times.t_d) == pytest.approx((0.9, 0.03))
    assert learned.alone == ()
    times = history.times("guest/chat", "cpu", COLD, LLAMA2_7B)
    assert tpot(s, f_factor(s, w), times) == pytest.approx(truth(s, w).token_s)


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

"""The computations of bench/replay.py, tested without a platform."""

from __future__ import annotations

import math

import pytest

from bench import replay
from bench.simulation import constants
from bench.simulation.workload import Request, Workload
from thaw.tracing.trace import Phase, TraceEvent

PLATFORM = replay.Measured(n_bytes=270_000_000, link=25e6, t_cu=0.1, tail=0.4, warm_ttft=0.1, t_d=0.05)


def test_a_trace_of_a_seed_is_always_the_same_and_in_order() -> None:
    first, second = (replay.make_trace(20, 60.0, 4, seed=3) for _ in range(2))
    assert first == second
    times = [r.arrival_s for r in first.requests]
    assert times == sorted(times)
    assert times[-1] <= 60.0
    assert {r.app for r in first.requests} == {"chatbot", "summarization"}


def test_a_trace_from_elsewhere_is_stretched_and_its_functions_folded() -> None:
    theirs = [Request(i, 10.0 + i, 100 + i, "code", "llama2-7b", 1000, 10) for i in range(9)]
    made = replay.scaled(Workload("theirs", tuple(theirs)), 5, 40.0, 4).requests
    assert [r.arrival_s for r in made] == [0.0, 10.0, 20.0, 30.0, 40.0]
    assert [r.function for r in made] == [0, 1, 2, 3, 0]


def row(index: int, simulated: float, real: float, predicted: float | None = None) -> replay.Row:
    return replay.Row(index, 0.0, "f0 chatbot", 1, predicted, simulated, real)


def values(goals: list[replay.Goal]) -> list[float | None]:
    return [g.value for g in goals]


def test_a_request_is_compared_with_itself_and_not_with_another_of_its_rank() -> None:
    swapped = [row(0, simulated=1.0, real=2.0), row(1, simulated=2.0, real=1.0)]
    assert values(replay.judged(swapped, paced=False, rounds=5)) == [0.5, 1.0]
    assert replay.errors([(1.0, 1.0), (12.0, 10.0)]) == pytest.approx([0.0, 0.2])


def test_the_scheduler_is_judged_by_its_own_predictions_alone() -> None:
    found = [row(0, simulated=7.0, real=10.0, predicted=9.0), row(1, simulated=1.0, real=1.0)]
    assert values(replay.prediction(found, rounds=5)) == pytest.approx([0.1, 0.1])
    assert values(replay.prediction(found[1:], rounds=5)) == [None, None]


def test_what_the_scheduler_foretold_counts_from_the_arrival_of_each_request() -> None:
    def event(name: Phase, at_s: float, **attrs: object) -> TraceEvent:
        return TraceEvent(name, boot_id="one", mono_ns=int(at_s * 1e9), wall_ns=0, attrs=attrs)

    planned = event(Phase.PLANNED_END, 10.0, predicted_ttft_s=8.0)
    assert replay.foretold_s([event(Phase.RECEIVED, 9.5), planned]) == pytest.approx(8.5)
    assert replay.foretold_s([event(Phase.RECEIVED, 13.0), planned]) == pytest.approx(5.0)
    assert replay.foretold_s([event(Phase.RECEIVED, 18.5), planned]) is None, "it came after the first token"
    assert replay.foretold_s([event(Phase.RECEIVED, 9.5)]) is None


def test_on_the_measured_hosts_a_lone_cold_start_takes_what_was_measured_and_a_warm_one_too() -> None:
    calm = Workload("two", tuple(replay._request(i, at, 1) for i, at in enumerate((0.0, 20.0))))
    cold, warm = replay.simulated(calm, PLATFORM, 1).values()
    assert cold == pytest.approx(PLATFORM.n_bytes / PLATFORM.link + PLATFORM.tail + PLATFORM.warm_ttft, abs=0.05)
    assert warm == pytest.approx(PLATFORM.warm_ttft, abs=0.05)


def test_a_tight_objective_divides_the_model_among_the_hosts() -> None:
    calm = Workload("one", (replay._request(0, 0.0, 0),))
    whole = PLATFORM.n_bytes / PLATFORM.link
    assert replay.simulated(calm, PLATFORM, 4)[0] < 0.7 * whole < replay.simulated(calm, PLATFORM, 1)[0]


def test_the_measured_constants_are_gone_afterwards() -> None:
    before = {name: dict(getattr(constants, name)) for name in ("GPUS", "MODELS", "TESTBEDS")}
    with replay.measured_world(PLATFORM) as name:
        assert name in constants.MODELS
    assert {name: dict(getattr(constants, name)) for name in before} == before


def test_a_request_that_failed_leaves_the_goals_unmeasured() -> None:
    good, failed = row(0, simulated=2.0, real=2.0), row(1, simulated=2.0, real=math.nan)
    assert all(g.ok for g in replay.judged([good], paced=False, rounds=5))
    assert not any(g.ok for g in replay.judged([good], paced=True, rounds=5))
    assert values(replay.judged([good, failed], paced=False, rounds=5)) == [None, None]
    assert "f0 chatbot" in replay.table([good, failed])

"""What bench/replay.py computes, without a platform."""

from __future__ import annotations

import math

import pytest

from bench import replay
from bench.simulation import constants
from bench.simulation.workload import Request, Workload

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


def test_errors_are_of_the_median_and_of_the_ninetieth_percentile() -> None:
    real = [1.0] * 5 + [10.0] * 5
    assert replay.errors(real, real) == {"p50": 0.0, "p90": 0.0}
    off = replay.errors([0.9] * 5 + [12.0] * 5, real)
    assert off["p90"] == pytest.approx(0.2)


def test_on_the_measured_hosts_a_lone_cold_start_takes_what_was_measured_and_a_warm_one_too() -> None:
    calm = Workload("two", tuple(replay._request(i, at, 1) for i, at in enumerate((0.0, 20.0))))
    cold, warm = replay.simulated(calm, PLATFORM, 1)
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
    row = replay.Row(0.0, "f0 chatbot", 1, None, 2.0, 2.0)
    assert all(g.ok for g in replay.judged([row], paced=False, n_failed=0))
    assert not any(g.ok for g in replay.judged([row], paced=True, n_failed=0))
    assert [g.value for g in replay.judged([row], paced=False, n_failed=1)] == [None, None]
    assert math.isfinite(replay.errors([1.0], [1.0])["p50"])
    assert "f0 chatbot" in replay.table([row])

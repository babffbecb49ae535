"""One cold start computed by hand (Eq. 5 and the tail), and the same by simulation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.simulation.constants import GPUS, MODELS
from bench.simulation.experiments import burst
from bench.simulation.run import simulate
from bench.simulation.specs import SYSTEMS, Objectives

ANY = Objectives(scale=1e6)
M, A10 = MODELS["llama2-7b"], GPUS["A10"]
LINK = 2e9  # 16 Gbit/s
PREFILL = 1.5 * 512 / 1024 + 0.02
HOP = 0.001 + 8e3 * 512 / LINK


def ttft(system: str, **changes: object) -> float:
    spec = replace(SYSTEMS[system], **changes)  # type: ignore[arg-type]
    return simulate(burst("llama2-7b", (0.0,), 512, 2), spec, "i-a10", ANY).requests[0].ttft


def test_one_overlapped_worker_takes_what_eq_5_says() -> None:
    fetch = 13_476_839_424 / LINK  # 6.738 s, slower than the runtime's 4.7 s
    assert ttft("paraserve-single") == pytest.approx(fetch + 1.7 + PREFILL + HOP)


def test_four_stages_take_what_eq_5_says_with_f() -> None:
    runtime = 1.0 + 0.8 + 2.9  # the fetch of a quarter, 1.685 s, and its tail hide behind it
    factor = 4 - 1 + 1 / 4
    assert ttft("paraserve", min_stages=4) == pytest.approx(runtime + PREFILL * factor + 4 * HOP)


def test_serverless_vllm_takes_the_sum_of_its_phases() -> None:
    phases = 1.0 + 2.9 + 0.8 + M.n_bytes / LINK + M.n_bytes / 3.3e9 + 1.1
    assert ttft("vllm") == pytest.approx(phases + PREFILL)


def test_a_hit_in_host_memory_skips_the_fetch() -> None:
    requests = simulate(burst("llama2-7b", (0.0, 500.0), 512, 2), SYSTEMS["serverlessllm-cache"], "i-a10", ANY).requests
    assert [r.ttft for r in requests] == pytest.approx(
        [6.4 + M.n_bytes / LINK + M.n_bytes / 6.5e9 + PREFILL, 6.4 + M.n_bytes / 6.5e9 + PREFILL]
    )


def test_the_production_policy_starts_from_a_stem_cell() -> None:
    fetch = 13_476_839_424 / LINK
    assert 0.2 + A10.t_cu < fetch
    assert ttft("thaw") == pytest.approx(fetch + 1.7 + PREFILL + HOP)


def test_two_fetches_on_one_link_take_turns_by_deadline_or_share_it() -> None:
    from bench.simulation.engine import Engine
    from bench.simulation.network import Link

    for discipline, ends in (("edf", [3.0, 5.0]), ("equal", [4.0, 5.0])):
        engine, found = Engine(), list[float]()
        link = Link(engine, 1.0, discipline)  # type: ignore[arg-type]
        link.start(3.0, 4.0, lambda e=engine, f=found: f.append(e.now))  # type: ignore[misc]
        engine.at(0.0, link.start, 2.0, 9.0, lambda e=engine, f=found: f.append(e.now))
        engine.run()
        assert sorted(found) == pytest.approx(ends if discipline == "edf" else [4.0, 5.0])


def test_a_batch_decodes_at_the_speed_of_its_size() -> None:
    outcome = simulate(burst("llama2-7b", (0.0,) * 8, 512, 101), SYSTEMS["vllm"], "i-a10", ANY)
    groups = {round(r.tpot, 6) for r in outcome.requests}
    assert groups == {pytest.approx(0.042)} or max(groups) <= 0.042

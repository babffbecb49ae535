"""One cold start, computed by hand (Eq. 5 and the tail) and by simulation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from bench.simulation.constants import GPUS, MODELS
from bench.simulation.engine import Engine
from bench.simulation.experiments import burst
from bench.simulation.network import Link
from bench.simulation.run import simulate
from bench.simulation.serving import Endpoint
from bench.simulation.specs import SYSTEMS, Objectives
from bench.simulation.workload import Request
from gateway.scheduler.placement.link_ledger import Discipline

ANY = Objectives(scale=1e6)
M, A10 = MODELS["llama2-7b"], GPUS["A10"]
LINK = 2e9  # 16 Gbit/s
PREFILL = 1.5 * 512 / 1024 + 0.02
HOP = 0.001 + 8e3 * 512 / LINK


def ttft(system: str, **changes: object) -> float:
    spec = replace(SYSTEMS[system], **changes)  # type: ignore[arg-type]
    return simulate(burst("llama2-7b", (0.0,), 512, 2), spec, "i-a10", ANY).requests[0].ttft


def test_one_overlapped_worker_takes_what_eq_5_says() -> None:
    fetch = 13_476_839_424 / LINK  # 6.738 s, longer than the runtime's 4.7 s
    assert ttft("paraserve-single") == pytest.approx(fetch + 1.7 + PREFILL + HOP)


def test_four_stages_take_what_eq_5_says_with_f() -> None:
    runtime = 1.0 + 0.8 + 2.9  # it hides the fetch of a quarter, which takes 1.685 s, and the tail
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
    assert 0.2 + A10.t_cu < fetch  # the fork has a device context long before the last byte
    assert ttft("thaw") == pytest.approx(fetch + 1.7 + PREFILL + HOP)


def test_the_production_policy_divides_a_model_that_would_come_late_whole_and_finds_it_resident_next_time() -> None:
    work = burst("llama2-7b", (0.0, 500.0), 512, 2)
    first, second = simulate(work, SYSTEMS["thaw"], "i-a10", Objectives(scale=0.8)).requests
    whole = 13_476_839_424 / LINK + 1.7 + PREFILL
    assert first.ttft < whole - 13_476_839_424 / LINK / 3  # it had two stages at least
    assert second.ttft == pytest.approx(0.2 + A10.t_cu + 1.7 - 1.0 + PREFILL + HOP, abs=1.0)  # it fetched nothing


@pytest.mark.parametrize(
    ("discipline", "ends"),
    [
        ("edf", {"first": 3.0, "second": 5.0}),  # they are served one after the other
        ("equal", {"second": 4.0, "first": 5.0}),  # each has 2 bytes by 4 s, then the first one has the link alone
    ],
)
def test_two_fetches_on_one_link_take_turns_by_deadline_or_share_it(
    discipline: Discipline, ends: dict[str, float]
) -> None:
    engine, found = Engine(), dict[str, float]()
    link = Link(engine, 1.0, discipline)

    def ended(name: str) -> None:
        found[name] = engine.now

    link.start(3.0, 4.0, partial(ended, "first"))
    link.start(2.0, 9.0, partial(ended, "second"))
    engine.run()
    assert found == pytest.approx(ends)


def test_a_full_batch_decodes_at_t_d() -> None:
    requests = [Request(i, 0.0, 0, "chatbot", "llama2-7b", 512, 101) for i in range(8)]
    engine, ended = Engine(), list[float]()
    endpoint = Endpoint(engine, M, 8, done=lambda _: ended.append(engine.now))
    for request in requests:
        endpoint.submit(request)
    engine.run()
    assert endpoint.inflight == 0
    assert ended == pytest.approx([PREFILL + 100 * 0.042] * 8, rel=1e-3)
    assert [r.tpot for r in requests] == pytest.approx([0.042] * 8, rel=1e-3)

"""One cold start, computed by hand (Eq. 5 and the tail) and by simulation, and what it waited for."""

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
from bench.simulation.waits import Blocked, Cause, Span, Waits, longest, until_submitted
from bench.simulation.workload import Request
from gateway.scheduler.placement.link_ledger import Discipline

ANY = Objectives(scale=1e6)
M, A10 = MODELS["llama2-7b"], GPUS["A10"]
LINK = 2e9  # 16 Gbit/s
FETCH = 13_476_839_424 / LINK  # 6.738 s, longer than the runtime's 4.7 s
PREFILL = 1.5 * 512 / 1024 + 0.02
HOP = 0.001 + 8e3 * 512 / LINK


def ttft(system: str, **changes: object) -> float:
    spec = replace(SYSTEMS[system], **changes)  # type: ignore[arg-type]
    return simulate(burst("llama2-7b", (0.0,), 512, 2), spec, "i-a10", ANY).requests[0].ttft


def test_four_stages_take_what_eq_5_says_with_f() -> None:
    runtime = 1.0 + 0.8 + 2.9  # it hides the fetch of a quarter, which takes 1.685 s, and the tail
    factor = 4 - 1 + 1 / 4
    assert ttft("paraserve", min_stages=4) == pytest.approx(runtime + PREFILL * factor + 4 * HOP)


def test_serverless_vllm_takes_the_sum_of_its_phases() -> None:
    phases = 1.0 + 2.9 + 0.8 + FETCH + M.n_bytes / 3.3e9 + 1.1
    assert ttft("vllm") == pytest.approx(phases + PREFILL)


def test_a_hit_in_host_memory_skips_the_fetch() -> None:
    requests = simulate(burst("llama2-7b", (0.0, 500.0), 512, 2), SYSTEMS["serverlessllm-cache"], "i-a10", ANY).requests
    assert [r.ttft for r in requests] == pytest.approx(
        [6.4 + FETCH + M.n_bytes / 6.5e9 + PREFILL, 6.4 + M.n_bytes / 6.5e9 + PREFILL]
    )


def test_the_production_policy_starts_from_a_stem_cell() -> None:
    assert 0.2 + A10.t_cu < FETCH  # the fork has a device context long before the last byte
    assert ttft("thaw") == pytest.approx(FETCH + 1.7 + PREFILL + HOP)


def test_the_production_policy_divides_a_model_that_would_come_late_whole_and_finds_it_resident_next_time() -> None:
    work = burst("llama2-7b", (0.0, 500.0), 512, 2)
    first, second = simulate(work, SYSTEMS["thaw"], "i-a10", Objectives(scale=0.8)).requests
    whole = FETCH + 1.7 + PREFILL
    assert first.ttft < whole - FETCH / 3  # it had two stages at least
    assert second.ttft == pytest.approx(0.2 + A10.t_cu + 1.7 - 1.0 + PREFILL + HOP, abs=1.0)  # it fetched nothing


@pytest.mark.parametrize(
    ("discipline", "ends", "others_took"),
    [
        ("edf", [3.0, 5.0], [0.0, 3.0]),  # they are served one after the other
        ("equal", [5.0, 4.0], [2.0, 2.0]),  # each has 2 bytes by 4 s, then the first one has the link alone
    ],
)
def test_two_fetches_on_one_link_take_turns_by_deadline_or_share_it_and_each_is_told_what_the_other_took(
    discipline: Discipline, ends: list[float], others_took: list[float]
) -> None:
    engine, found = Engine(), [0.0, 0.0]
    link = Link(engine, 1.0, discipline)

    def ended(k: int) -> None:
        found[k] = engine.now

    fetches = [link.start(3.0, 4.0, partial(ended, 0)), link.start(2.0, 9.0, partial(ended, 1))]
    engine.run()
    assert found == pytest.approx(ends)
    assert [fetch.shared_s for fetch in fetches] == pytest.approx(others_took)


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


# why it took so long --------------------------------------------------------------------------------------------------


def waits(system: str, n_requests: int, testbed: str) -> list[Waits]:
    """The waits of ``n_requests`` for one function, which all arrive at once."""
    work = burst("llama2-7b", (0.0,) * n_requests, 512, 64)
    return [r.waits for r in simulate(work, SYSTEMS[system], testbed, ANY).requests]


def test_a_start_is_explained_by_the_chain_of_phases_that_ended_last() -> None:
    (fetching,) = waits("paraserve-single", 1, "i-a10")  # the fetch takes longer than the runtime
    assert fetching == pytest.approx({Cause.FETCH: FETCH, Cause.LOAD: 1.7, Cause.PREFILL: PREFILL, Cause.GROUP: HOP})
    one_after_another = waits("vllm", 1, "i-a10")[0]
    assert one_after_another[Cause.RUNTIME] == pytest.approx(1.0 + 2.9 + 0.8)
    assert one_after_another[Cause.FETCH] == pytest.approx(FETCH)


def test_two_fetches_over_one_link_wait_for_one_another_as_long_as_for_their_own_bytes() -> None:
    for one in waits("vllm", 8, "i-v100"):  # queue and window ask for two workers, on two devices of one server
        assert one[Cause.SHARED_LINK] == pytest.approx(one[Cause.FETCH]) == pytest.approx(FETCH)


def test_who_finds_no_device_with_room_waits_for_memory_and_nobody_else_does() -> None:
    found = waits("vllm", 40, "i-a10")  # five workers are full, and there are four devices
    assert [Cause.MEMORY in one for one in found] == [False] * 32 + [True] * 8
    assert not any(Cause.SLOT in one for one in found)


def test_who_comes_while_a_start_is_under_way_waits_for_the_rest_of_it() -> None:
    chain = [Span(Cause.RUNTIME, 0.0, 4.0), Span(Cause.FETCH, 4.0, 9.0)]
    assert until_submitted(3.0, chain, 9.0, Blocked(), 11.0) == {Cause.RUNTIME: 1.0, Cause.FETCH: 5.0, Cause.SLOT: 2.0}
    assert until_submitted(10.0, chain, 9.0, Blocked(), 12.0) == {Cause.SLOT: 2.0}


def test_only_the_time_in_which_memory_was_lacking_counts_as_that() -> None:
    blocked = Blocked()
    for begin_s, end_s in ((1.0, 2.0), (2.0, 4.0), (6.0, 7.0)):
        blocked.begin(begin_s)
        blocked.begin(begin_s + 0.5)  # it is blocked already
        blocked.end(end_s)
    blocked.begin(9.0)
    assert until_submitted(3.0, [Span(Cause.LOAD, 8.0, 9.0)], 9.0, blocked, 9.5) == {
        Cause.MEMORY: 1.0 + 1.0 + 0.5,
        Cause.SLOT: 3.0,
        Cause.LOAD: 1.0,
    }
    blocked.end(10.0)
    blocked.forget()
    assert blocked.seconds(0.0, 10.0) == 0.0


def test_a_request_without_a_first_token_has_failed() -> None:
    assert longest({}) is Cause.FAILED
    assert longest({Cause.FETCH: 2.0, Cause.SLOT: 3.0}) is Cause.SLOT

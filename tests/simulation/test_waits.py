"""The causes of the time to first token, in cases that can be computed by hand."""

from __future__ import annotations

import pytest

from bench.simulation.engine import Engine
from bench.simulation.experiments import burst
from bench.simulation.network import Link
from bench.simulation.run import simulate
from bench.simulation.specs import SYSTEMS, Objectives
from bench.simulation.waits import Blocked, Cause, Span, Waits, longest, until_submitted
from gateway.scheduler.placement.link_ledger import Discipline

ANY = Objectives(scale=1e6)
LINK = 2e9  # 16 Gbit/s
FETCH_S = 13_476_839_424 / LINK
PREFILL_S = 1.5 * 512 / 1024 + 0.02


def waits(system: str, n_requests: int, testbed: str) -> list[Waits]:
    """The waits of ``n_requests`` for one function, which all arrive at once."""
    work = burst("llama2-7b", (0.0,) * n_requests, 512, 64)
    return [r.waits for r in simulate(work, SYSTEMS[system], testbed, ANY).requests]


def test_a_start_is_explained_by_the_chain_of_phases_that_ended_last() -> None:
    (fetching,) = waits("paraserve-single", 1, "i-a10")  # the fetch takes longer than the runtime
    assert fetching == pytest.approx(
        {Cause.FETCH: FETCH_S, Cause.LOAD: 1.7, Cause.PREFILL: PREFILL_S, Cause.GROUP: 0.001 + 8e3 * 512 / LINK}
    )
    one_after_another = waits("vllm", 1, "i-a10")[0]
    assert one_after_another[Cause.RUNTIME] == pytest.approx(1.0 + 2.9 + 0.8)
    assert one_after_another[Cause.FETCH] == pytest.approx(FETCH_S)


def test_two_fetches_over_one_link_wait_for_one_another_as_long_as_for_their_own_bytes() -> None:
    for one in waits("vllm", 8, "i-v100"):  # queue and window ask for two workers, on two devices of one server
        assert one[Cause.SHARED_LINK] == pytest.approx(one[Cause.FETCH]) == pytest.approx(FETCH_S)


@pytest.mark.parametrize(
    ("discipline", "shared"),
    [("edf", {"first": 0.0, "second": 3.0}), ("equal", {"first": 2.0, "second": 2.0})],
)
def test_a_link_tells_each_fetch_what_others_took_of_it(discipline: Discipline, shared: dict[str, float]) -> None:
    engine = Engine()
    link = Link(engine, 1.0, discipline)
    fetches = {"first": link.start(3.0, 4.0, lambda: None), "second": link.start(2.0, 9.0, lambda: None)}
    engine.run()
    assert {name: fetch.shared_s for name, fetch in fetches.items()} == pytest.approx(shared)


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

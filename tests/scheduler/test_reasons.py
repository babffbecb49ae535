"""The reasons why a size was not chosen, one after another."""

from __future__ import annotations

import math

import pytest

from gateway.scheduler.placement.predict import Tier, Times
from gateway.scheduler.placement.reasons import Reason, considered, estimates
from gateway.scheduler.placement.schemes import Bandwidth, Gpu, Request, Server, Variant
from gateway.scheduler.placement.select import select, weigh

TIMES = Times(t_c=4, t_cc=1.5, t_cu=0.5, t_l=2, t_p=1.5, t_d=0.042, t_n=0.005)


def server(i: int, b: float = 2e9, n_workers: int = 0, free: float = 22e9) -> Server:
    return Server(i, b, 12e9, (Gpu(int(free), n_workers),))


def reasons(
    servers: list[Server],
    *,
    slo_ttft: float = 7.5,
    slo_tpot: float = 0.2,
    variant: Variant = "min_sharing",
    bandwidth: Bandwidth = lambda s, n, t: s.bandwidth,
) -> list[tuple[int, int, Reason]]:
    request = Request(12e9, slo_ttft=slo_ttft, slo_tpot=slo_tpot, times=TIMES)
    weighing = weigh(servers, request, variant=variant, min_stages=1, max_stages=4, min_full=1, bandwidth=bandwidth)
    return [(c.s, c.w, c.reason) for c in considered(weighing, servers, variant, bandwidth)]


def test_late_slow_and_without_room_are_told_apart_from_what_holds_more() -> None:
    three = [server(i) for i in range(3)]
    assert reasons(three, slo_ttft=7.4, slo_tpot=0.084) == [
        (1, 1, Reason.TTFT),
        (2, 1, Reason.CHOSEN),
        (3, 3, Reason.MEMORY),
        (4, 1, Reason.NO_ROOM),
    ]
    assert reasons(three[:2], slo_ttft=60.0, slo_tpot=0.04) == [
        (1, 1, Reason.CHOSEN),
        (2, 2, Reason.TPOT),
        (3, 1, Reason.NO_ROOM),
        (4, 1, Reason.NO_ROOM),
    ]


def test_what_shares_more_devices_lost_for_that() -> None:
    found = reasons([server(0), server(1, n_workers=1)], slo_ttft=60.0)
    assert found[:2] == [(1, 1, Reason.CHOSEN), (2, 1, Reason.SHARING)]


def test_the_paper_stops_at_the_first_size_and_says_nothing_of_the_others() -> None:
    assert reasons([server(0), server(1)], slo_ttft=60.0, variant="paper") == [(1, 1, Reason.CHOSEN)]


def test_a_size_that_would_break_a_promise_is_not_called_late() -> None:
    def none_with_a_deadline(at: Server, n_bytes: float, within_s: float) -> float:
        return at.bandwidth if math.isinf(within_s) else 0.0

    found = reasons([server(0), server(1)], slo_ttft=7.55, bandwidth=none_with_a_deadline)
    assert found[:2] == [(1, 1, Reason.CHOSEN), (2, 2, Reason.PROMISED)]  # the first is chosen as a fallback


def test_each_server_is_estimated_the_chosen_first_then_by_when_its_part_would_be_there() -> None:
    servers = [server(0, 0.5e9), server(1, 1e9), server(2), server(3, free=1e9), server(4)._replace(cell_wait_s=9.0)]
    request = Request(12e9, slo_ttft=7.6, times=TIMES)
    chosen = select(servers[:3], request, max_stages=1)
    assert chosen.full_ids == (2,)
    rates = {0: 0.5e9, 1: 0.6e9, 2: 2e9, 3: 2e9, 4: math.inf}
    tiers = {4: Tier.RESIDENT}
    how = (lambda s, n, t: rates[s.id], lambda s, n: tiers.get(s.id, Tier.REMOTE))
    found = estimates(chosen, servers, request, "min_sharing", *how)
    assert [server_id for server_id, _ in found] == [2, 4, 1, 0, 3]
    by_server = {server_id: each.plain() for server_id, each in found}
    seconds = {"ready_s": 6.0, "runtime_s": 4.0, "fetched_s": 6.0, "copied_s": 3.0}
    assert by_server[2] == {"from": "remote", "role": "full", **seconds}
    assert by_server[1]["queue_s"] == 8.0
    assert by_server[1]["fetched_s"] == 20.0
    seconds = {"ready_s": 13.0, "runtime_s": 13.0, "copied_s": 12.0, "cell_wait_s": 9.0}
    assert by_server[4] == {"from": "resident", **seconds}
    assert by_server[3] == {"from": "remote", "why": "no room"}


@pytest.mark.parametrize("slo_ttft", [1.0, 7.5, 60.0])
def test_exactly_one_size_was_chosen(slo_ttft: float) -> None:
    found = reasons([server(i, b) for i, b in enumerate((2e9, 1e9, 2e9, 1.5e9))], slo_ttft=slo_ttft)
    assert [r for _, _, r in found].count(Reason.CHOSEN) == 1

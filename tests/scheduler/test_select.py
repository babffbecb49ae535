"""Worked examples 1, 2 and 6, and the search compared with trying every subset."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.scheduler.placement.link_ledger import LinkLedger
from gateway.scheduler.placement.predict import Times, f_factor, pass_s, tpot
from gateway.scheduler.placement.schemes import (
    Gpu,
    Request,
    Scheme,
    Server,
    Size,
    Variant,
    candidates,
    sizes,
    static_bandwidth,
)
from gateway.scheduler.placement.search import least_sharing
from gateway.scheduler.placement.select import greedy, select, spread, weigh
from tests.scheduler.test_predict import kappa

G, FREE = 1e9, int(22e9)


def idle(i: int, b: float) -> Server:
    return Server(i, b * G, 12 * G, (Gpu(FREE),))


FOUR = [idle(i, b) for i, b in enumerate([2, 2, 1, 1])]


def chosen(scheme: Scheme | None) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    assert scheme is not None
    return scheme.s, scheme.w, scheme.full_ids, scheme.low_ids


def by_the_paper(slo_ttft: float, slo_tpot: float, *, overlap: bool = True, min_full: int = 0) -> Scheme | None:
    request = Request(12 * G, slo_ttft=slo_ttft, slo_tpot=slo_tpot, overlap=overlap)
    return select(FOUR, request, variant="paper", min_full=min_full)


def test_worked_example_1_eq_1_misses_7_5_s_everywhere_and_falls_back() -> None:
    scheme = by_the_paper(7.5, 0.2, overlap=False)
    assert chosen(scheme) == (1, 1, (0,), ())
    assert (scheme.ttft, scheme.fallback, scheme.fetch_within_s) == (pytest.approx(12.505), True, math.inf)


def test_worked_example_1_eq_1_with_9_5_s_takes_two_full_workers() -> None:
    scheme = by_the_paper(9.5, 0.2, overlap=False)
    assert (chosen(scheme), scheme.ttft) == ((2, 2, (0, 1), ()), pytest.approx(9.010))


def test_worked_example_1_eq_5_takes_two_low_workers() -> None:
    scheme = by_the_paper(7.5, 0.2)
    assert chosen(scheme) == (2, 0, (), (0, 1))
    assert (scheme.ttft, scheme.tpot) == (pytest.approx(7.010), pytest.approx(0.094))


def test_worked_example_1_eq_5_with_84_ms_a_token_needs_one_full_worker() -> None:
    scheme = by_the_paper(7.5, 0.084)
    assert chosen(scheme) == (2, 1, (0,), (1,))
    assert (scheme.ttft, scheme.tpot) == (pytest.approx(6.260), pytest.approx(0.073))


EXAMPLE_2 = [Server(0, 2 * G, 12 * G, (Gpu(int(10e9), 1),)), idle(1, 2), idle(2, 1.6)]


@pytest.mark.parametrize(
    ("variant", "expected", "ttft", "sharing", "memory"),
    [
        ("paper", (2, 1, (1,), (0,)), 6.26, 1, 24e9),
        ("slides", (2, 2, (1, 2), ()), 6.51, 0, 32e9),
        ("min_sharing", (2, 1, (1,), (2,)), 7.26, 0, 24e9),
    ],
)
def test_worked_example_2_three_objectives_choose_three_schemes(
    variant: Variant, expected: tuple[object, ...], ttft: float, sharing: int, memory: float
) -> None:
    scheme = select(EXAMPLE_2, Request(16 * G, slo_ttft=7.5, slo_tpot=0.084), variant=variant)
    assert chosen(scheme) == expected
    assert (scheme.ttft, scheme.sharing, scheme.memory) == (pytest.approx(ttft), sharing, pytest.approx(memory))


def _ledger(pending: float, left_s: float) -> LinkLedger:
    ledger = LinkLedger(2 * G, "equal")
    if pending:
        ledger.add("old", pending, left_s, 0.0)
    return ledger


def test_worked_example_6_admission_feeds_selection() -> None:
    ledgers = [_ledger(3 * G, 5.0), _ledger(3 * G, 2.5), _ledger(0, 0), _ledger(0, 0)]
    offered = [ledger.node_bandwidth(0.0) for ledger in ledgers]
    assert offered == [1 * G, 0.0, 2 * G, 2 * G]
    request = Request(12 * G, slo_ttft=7.5, slo_tpot=0.2, t_w=1.0)
    servers = [idle(i, b / G) for i, b in enumerate(offered)]
    without = select(servers[:3], request, variant="paper")
    assert chosen(without) == (1, 1, (2,), ())
    assert without.fallback
    both = select(servers, request, variant="paper")
    assert chosen(both) == (2, 1, (2,), (3,))
    assert (both.ttft, both.fetch_within_s) == (pytest.approx(7.26), pytest.approx(4.24))
    assert all(ledgers[i].add("new", 6 * G, both.fetch_within_s, 0.0) for i in (2, 3))


def test_when_no_server_fits_the_answer_is_wait() -> None:
    assert select([Server(0, G, G, (Gpu(1),))], Request(2 * G)) is None
    assert select([Server(0, 0.0, G, (Gpu(FREE),))], Request(2 * G)) is None
    assert select([], Request(2 * G)) is None


def test_production_never_takes_a_group_without_a_full_worker() -> None:
    assert chosen(by_the_paper(7.5, 0.2, min_full=1)) == (2, 1, (0,), (1,))


def test_a_ledger_that_admits_nothing_in_time_leaves_the_fallback_at_its_leftover_rate() -> None:
    request = Request(12 * G, slo_ttft=7.5)
    scheme = select(FOUR[:1], request, max_stages=1, bandwidth=lambda s, n, within: 1 * G if within > 1e6 else 0.0)
    assert (scheme.fallback, scheme.ttft) == (True, pytest.approx(12 + 1.505))


Plain = list[tuple[float, list[tuple[int, int]]]]


def servers_of(links: list[float], free: list[int], least: int, most: int) -> st.SearchStrategy[Plain]:
    """Servers with a link and one or two devices, each of which hosts a worker or none."""
    devices = st.lists(st.tuples(st.sampled_from(free), st.integers(0, 1)), min_size=1, max_size=2)
    return st.lists(st.tuples(st.sampled_from(links), devices), min_size=least, max_size=most)


servers_st = servers_of([0.0, 0.5, 1.0, 1.5, 2.0], [3, 6, 12, 24], 1, 5)


def build(plain: Plain) -> list[Server]:
    return [Server(i, b * G, 12 * G, tuple(Gpu(int(f * G), w) for f, w in gpus)) for i, (b, gpus) in enumerate(plain)]


def plainly(scheme: Scheme) -> tuple[object, ...]:
    ttft = round(scheme.ttft, 9)
    return scheme.sharing, scheme.memory, scheme.s, scheme.w, ttft, scheme.full_ids, scheme.low_ids


def every_placement(n_servers: int, s: int, w: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    ids = range(n_servers)
    return [
        (full, low)
        for full in itertools.combinations(ids, w)
        for low in itertools.combinations([i for i in ids if i not in full], s - w)
    ]


def shares(server: Server, need: float) -> int | None:
    """1 if the chosen device hosts a worker already, else 0, or None if no device fits."""
    fitting = [g for g in server.gpus if g.free >= need]
    return min(int(g.n_workers > 0) for g in fitting) if fitting else None


def brute_force(servers: list[Server], request: Request, every: Sequence[Size]) -> tuple[object, ...] | None:
    found = []
    for size in every:
        s, w = size.s, size.w
        for full, low in every_placement(len(servers), s, w):
            shared = [shares(servers[i], request.need_full) for i in full]
            shared += [shares(servers[i], request.need_low(s)) for i in low]
            if None in shared or any(servers[i].bandwidth == 0 for i in full + low):
                continue
            worst = max(kappa(request.n_bytes / s, servers[i].bandwidth, 12 * G, request.times) for i in full + low)
            ttft = request.t_w + worst + pass_s(s, f_factor(s, w), request.times)
            if ttft > request.slo_ttft + 1e-9 or tpot(s, f_factor(s, w), request.times) > request.slo_tpot + 1e-9:
                continue
            memory = w * request.need_full + (s - w) * request.need_low(s)
            found.append((sum(x or 0 for x in shared), memory, s, w, round(ttft, 9), full, low))
    return min(found) if found else None


@settings(max_examples=150)
@given(
    plain=servers_st,
    slo=st.sampled_from([5.0, 7.5, 9.0, 15.0]),
    per_token=st.sampled_from([0.07, 0.1, 0.2]),
    min_full=st.integers(0, 2),
)
def test_min_sharing_equals_trying_every_subset(plain: Plain, slo: float, per_token: float, min_full: int) -> None:
    servers, request = build(plain), Request(12 * G, slo_ttft=slo, slo_tpot=per_token)
    best = brute_force(servers, request, sizes(request, 1, 4, min_full))
    scheme = select(servers, request, variant="min_sharing", min_full=min_full)
    if best is None:
        assert scheme is None or scheme.fallback
    else:
        assert not scheme.fallback
        assert plainly(scheme) == best


@settings(max_examples=100)
@given(plain=servers_of([1.0, 2.0], [3, 12], 4, 6), slo=st.sampled_from([9.0, 15.0]))
def test_of_every_size_the_placement_of_least_sharing_is_found(plain: Plain, slo: float) -> None:
    """This also checks sizes that do not win: the number of workers that share is minimised in the same way."""
    servers, request = build(plain), Request(12 * G, slo_ttft=slo)
    for size in sizes(request, 3, 4, 0):
        scheme = least_sharing(size, candidates(servers, size, "min_sharing", static_bandwidth))
        best = brute_force(servers, request, [size])
        assert best == (scheme and plainly(scheme))


@pytest.mark.parametrize("variant", ["paper", "slides", "min_sharing"])
@given(plain=servers_st, slo=st.sampled_from([5.0, 7.5, 9.0, 15.0]), min_full=st.integers(0, 1))
def test_a_thorough_look_chooses_the_same_and_says_what_it_tried(
    variant: Variant, plain: Plain, slo: float, min_full: int
) -> None:
    servers, request = build(plain), Request(12 * G, slo_ttft=slo, slo_tpot=0.1)
    asked = {"variant": variant, "min_stages": 1, "max_stages": 4, "min_full": min_full, "bandwidth": static_bandwidth}
    whole = weigh(servers, request, **asked)  # type: ignore[arg-type]
    quick = weigh(servers, request, **asked, thorough=False)  # type: ignore[arg-type]
    assert whole.chosen == quick.chosen == select(servers, request, variant=variant, min_full=min_full)
    if variant != "paper":
        assert [size for size, _ in whole.tried] == sizes(request, 1, 4, min_full)
    assert all(size.meets_tpot for size, _ in quick.tried)
    if whole.chosen is not None and not whole.chosen.fallback:
        assert whole.chosen in [scheme for _, scheme in quick.tried]


def test_sizes_that_cannot_share_less_are_not_tried() -> None:
    """All four servers are idle, so the first scheme shares no device."""
    asked = {"variant": "min_sharing", "min_stages": 1, "max_stages": 4, "min_full": 1, "bandwidth": static_bandwidth}
    quick = weigh(FOUR, Request(12 * G, slo_ttft=7.5), **asked, thorough=False)  # type: ignore[arg-type]
    assert [scheme for _, scheme in quick.tried if scheme is not None] == [quick.chosen]
    assert len(quick.tried) < len(weigh(FOUR, Request(12 * G, slo_ttft=7.5), **asked).tried)  # type: ignore[arg-type]


def test_an_objective_that_is_met_exactly_counts_as_met() -> None:
    exactly = by_the_paper(7.5, 0.2)
    for more, kept in ((0.0, True), (-1e-6, False)):
        for slo_ttft, slo_tpot in ((exactly.ttft + more, 0.2), (7.5, exactly.tpot + more)):
            request = Request(12 * G, slo_ttft=slo_ttft, slo_tpot=slo_tpot)
            scheme = select(FOUR, request, variant="paper", min_stages=2, max_stages=2)
            assert (chosen(scheme) == chosen(exactly)) is kept


def test_a_stage_fetches_the_largest_part_where_that_is_known_and_an_even_one_where_not() -> None:
    request = Request(12 * G, largest_parts=(12 * G, 7 * G))
    assert [request.part(s) for s in (1, 2, 3, 4)] == [12 * G, 7 * G, 4 * G, 3 * G]


def test_every_size_but_one_low_worker_alone_is_looked_at() -> None:
    every = [(size.s, size.w) for size in sizes(Request(G), 1, 3, 0)]
    assert every == [(1, 1), (2, 0), (2, 1), (2, 2), (3, 0), (3, 1), (3, 2), (3, 3)]
    assert [(size.s, size.w) for size in sizes(Request(G), 2, 3, 2)] == [(2, 2), (3, 2), (3, 3)]


def test_of_servers_that_are_ready_at_the_same_time_the_one_with_the_faster_links_comes_first() -> None:
    servers = [Server(i, b * G, p * G, (Gpu(FREE),)) for i, (b, p) in enumerate([(2, 12), (2, 24), (4, 12)])]
    (size,) = sizes(Request(G), 1, 1, 1)
    found = candidates(servers, size, "paper", static_bandwidth)
    assert len({c.kappa for c in found}) == 1
    assert [c.server.id for c in found] == [2, 1, 0]


def test_what_devices_answered_before_is_what_they_answer() -> None:
    gpus = (Gpu(int(22e9), 1), Gpu(int(15e9)), Gpu(int(5e9), 1))
    once, again = Server(0, G, G, gpus), Server(0, G, G, gpus, fits={})
    for variant in ("paper", "min_sharing", "paper", "min_sharing"):
        for need in (20e9, 14e9, 4e9, 30e9, 14e9):
            assert again.fit(need, variant) == once.fit(need, variant)


def test_a_forced_size_is_spread_over_as_many_servers_as_there_are() -> None:
    asked: list[tuple[int, float, float]] = []

    def bandwidth(server: Server, n_bytes: float, within_s: float) -> float:
        asked.append((server.id, n_bytes, within_s))
        return server.bandwidth

    scheme = spread([idle(0, 2), idle(1, 1)], Request(12 * G), 4, 1, bandwidth=bandwidth)
    assert chosen(scheme) == (4, 1, (0,), (1, 0, 1))
    assert [p.shares for p in (*scheme.full, *scheme.low)] == [False, False, True, True]
    slowest_s = 2 * 3 * G / G  # two parts are fetched over the slower link
    assert scheme.ttft == pytest.approx(slowest_s + pass_s(4, f_factor(4, 1), Times()))
    assert (scheme.fallback, scheme.fetch_within_s, scheme.memory) == (True, math.inf, 21e9)
    parts_at_once = {(0, 1), (0, 2), (0, 3), (1, 1), (1, 2)}
    assert set(asked) == {(i, n * 3 * G, math.inf) for i, n in parts_at_once}


def test_a_forced_size_takes_each_worker_to_the_fullest_device_that_has_room_for_it() -> None:
    two = Server(0, 2 * G, 12 * G, (Gpu(int(22e9), 1), Gpu(int(4e9))))
    scheme = spread([two], Request(12 * G), 4, 1)
    assert [(p.gpu, p.shares) for p in (*scheme.full, *scheme.low)] == [(0, True), (1, False), (0, True), (0, True)]
    assert spread([two], Request(12 * G), 4, 2) is None, "12 + 12 and twice 3 of 22 and 4 thousand million bytes"
    tight = [Server(i, 2 * G, 12 * G, (Gpu(int(13e9)),)) for i in range(2)]
    uneven = spread(tight, Request(12 * G), 4, 1)
    assert chosen(uneven) == (4, 1, (0,), (1, 1, 1)), "the other one has no room beside its full worker"
    assert spread(tight, Request(12 * G), 4, 1, bandwidth=lambda server, n_bytes, within_s: 0.0) is None


@settings(max_examples=100)
@given(plain=servers_st, s=st.integers(1, 4), w=st.integers(0, 4))
def test_the_greedy_placement_has_the_least_worst_kappa_of_all_subsets(plain: Plain, s: int, w: int) -> None:
    servers, request = build(plain), Request(12 * G)
    for size in sizes(request, s, s, 0):
        if size.w != min(w, s):
            continue
        times = Times()
        worst = [
            max(kappa(12 * G / s, servers[i].bandwidth, 12 * G, times) for i in full + low)
            for full, low in every_placement(len(servers), size.s, size.w)
            if all(servers[i].bandwidth for i in full + low)
            and all(shares(servers[i], request.need_full) is not None for i in full)
            and all(shares(servers[i], request.need_low(s)) is not None for i in low)
        ]
        scheme = greedy(size, candidates(servers, size, "paper", static_bandwidth))
        assert (scheme is None) == (not worst)
        if scheme is not None:
            assert scheme.ttft == pytest.approx(min(worst) + pass_s(s, size.factor, times))


@given(plain=servers_st)
def test_the_order_in_which_servers_are_given_does_not_matter(
    plain: Plain,
) -> None:
    servers, request = build(plain), Request(12 * G, slo_ttft=9.0)
    shuffled = sorted(servers, key=lambda s: hash((s.id * 7919) % 13))
    for variant in ("paper", "slides", "min_sharing"):
        assert select(servers, request, variant=variant) == select(shuffled, request, variant=variant)

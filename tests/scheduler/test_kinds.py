"""Hosts with several kinds of device in one cluster: every worker counts with the times and the share of its device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.scheduler.decisions import LearnFrom, ReleaseInstance, StartGroup, TimerKind, Wake
from gateway.scheduler.events import ActionSeen, HostSeen
from gateway.scheduler.placement.predict import Times
from gateway.scheduler.placement.schemes import Gpu, Request, Server, Size, sizes, static_bandwidth
from gateway.scheduler.placement.select import best_of, select
from gateway.scheduler.policy.starts import RECHECK_S
from gateway.scheduler.view.history import Measured
from tests.scheduler.facts import CHAT, MIB, OTHER, SMOLLM2, chat, report
from tests.scheduler.groups import group_world
from tests.scheduler.test_predict import kappa
from tests.scheduler.test_select import every_placement, plainly
from tests.scheduler.world import World, llm_world, of, starting
from thaw.action import KIND_LLM
from thaw.host import Device, HostReport
from thaw.instance import StartMode

G = 1e9
FAST, SLOW = Times(t_p=0.4, t_d=0.01, t_n=0.002), Times(t_p=3.1, t_d=0.08, t_n=0.004, t_tail=0.3)


def host(name: str, kind: str, **fields: Any) -> HostReport:
    devices = (Device("cuda:0", kind, 4096 * MIB, 4096 * MIB),)
    return report(name, **{"devices": devices, "network_bytes_per_s": 1e9, "stem_kinds": (KIND_LLM,), **fields})


def teach(w: World, prefills: dict[str, float]) -> None:
    for kind, t_p in prefills.items():
        times = Measured(t_cc=0.1, t_cu=0.1, t_p=t_p, t_d=0.01, t_tail=0.0)
        w.view.history.update(CHAT, kind, StartMode.PREWARMED, times)


def test_one_slow_host_does_not_make_the_fast_ones_look_too_slow() -> None:
    """The slow host's kind is first in the alphabet.  The other hosts answer in 0.7 s."""
    w = llm_world(host("h0", "A-slow"), host("h1", "B-fast"), host("h2", "B-fast"), facts=chat(slo_ttft_s=1.5))
    teach(w, {"A-slow": 3.1, "B-fast": 0.4})
    start = w.started(CHAT)
    assert start.attrs["fallback"] is False
    assert start.plan.stages[0].host in ("h1", "h2")
    assert start.plan.predicted_ttft_s < 1.5


def test_a_slow_host_is_foretold_with_its_own_times_though_a_fast_kind_comes_first() -> None:
    w = llm_world(host("h0", "A-fast", draining=True), host("h1", "B-slow"), facts=chat(slo_ttft_s=60.0))
    alone = llm_world(host("h1", "B-slow"), facts=chat(slo_ttft_s=60.0))
    for each in (w, alone):
        teach(each, {"A-fast": 0.4, "B-slow": 3.1})
    (start,), (same,) = of(w.ask(CHAT), StartGroup), of(alone.ask(CHAT), StartGroup)
    assert start.plan.predicted_ttft_s == pytest.approx(same.plan.predicted_ttft_s)
    assert start.plan.predicted_ttft_s > 3.1


def test_an_idle_instance_goes_when_only_its_host_would_be_in_time_and_no_timer_is_waited_for() -> None:
    w = llm_world(host("h1", "B-fast"), facts=chat(name=OTHER, need_bytes=4096 * MIB))
    first = w.serving(OTHER)
    w.do(ActionSeen(chat(slo_ttft_s=1.5)), HostSeen(host("h0", "A-slow")))
    teach(w, {"A-slow": 3.1, "B-fast": 0.4})
    decided = w.ask(CHAT)
    assert of(decided, StartGroup) == []
    assert [(r.instance_id, r.reason) for r in of(decided, ReleaseInstance)] == [
        (first.stages[0].instance_id, "memory")
    ]
    assert [wake.at_s for wake in of(decided, Wake) if wake.kind is TimerKind.RESCALE] == [w.now + RECHECK_S]
    (start,) = of(w.gone(first), StartGroup)
    assert (start.plan.stages[0].host, start.attrs["fallback"]) == ("h1", False)


def test_who_would_be_late_in_any_case_starts_where_there_is_room() -> None:
    """The instance on the fast host is busy by now, so it cannot be evicted and its host has no room."""
    w = llm_world(host("h1", "B-fast"), facts=chat(name=OTHER, need_bytes=4096 * MIB))
    w.serving(OTHER, idle=False)
    w.do(ActionSeen(chat(slo_ttft_s=1.5)), HostSeen(host("h0", "A-slow")))
    teach(w, {"A-slow": 3.1, "B-fast": 0.4})
    start = w.started(CHAT)
    assert (start.plan.stages[0].host, start.attrs["fallback"]) == ("h0", True)


def server(i: int, times: Times, b: float = 2.0, *, free: int = 22, n_workers: int = 0, share: bool = True) -> Server:
    return Server(i, b * G, 12 * G, (Gpu(int(free * G), n_workers),), times, is_enforced=share)


def test_a_group_over_two_kinds_takes_the_sum_of_what_each_worker_takes() -> None:
    two = [server(0, FAST), server(1, SLOW)]
    scheme = select(two, Request(12 * G, slo_ttft=math.inf), min_stages=2, max_stages=2, min_full=2)
    worst = max(kappa(6 * G, 2 * G, 12 * G, times) for times in (FAST, SLOW))
    assert scheme.ttft == pytest.approx(worst + (0.4 + 3.1) / 2 + 0.002 + 0.004 + 0.3)
    assert scheme.tpot == pytest.approx((0.01 + 0.08) / 2 + 0.002 + 0.004)


def test_its_fetches_are_due_so_that_the_pass_over_both_kinds_still_fits() -> None:
    two = [server(0, FAST), server(1, SLOW)]
    scheme = select(two, Request(12 * G, slo_ttft=9.0), min_stages=2, max_stages=2, min_full=2)
    assert scheme.fetch_within_s == pytest.approx(9.0 - (0.4 + 3.1) / 2 - 0.006 - 0.3)


@pytest.mark.parametrize(("enforced", "factor"), [(True, 1 / 2 + 1), (False, 1.0)])
def test_a_low_worker_alone_on_a_device_that_nobody_divides_computes_as_fast_as_a_full_one(
    enforced: bool, factor: float
) -> None:
    two = [server(i, FAST, share=enforced) for i in range(2)]
    scheme = select(two, Request(12 * G), min_stages=2, max_stages=2, min_full=1)
    assert scheme.w == 1
    assert scheme.tpot == pytest.approx(0.01 * factor + 2 * 0.002)


@pytest.mark.parametrize(("share", "factor"), [("none", 1.0), ("enforced", 4 - 1 + 1 / 4)])
def test_a_group_teaches_by_the_shares_that_its_hosts_really_give(share: str, factor: float) -> None:
    """With the enforced F on hosts that enforce nothing, a t_p of 1.0 would be learned as 0.31."""
    w, start = starting(group_world(facts=chat(forced_stages=4, max_stages=4), share=share))
    (learn,) = of(w.ready(start), LearnFrom)
    assert (learn.n_stages, learn.n_full) == (4, 1)
    assert learn.factor == pytest.approx(factor)


def test_a_group_over_two_kinds_of_device_teaches_neither_of_them_its_pass() -> None:
    reports = [host(f"h{i}", kind, network_bytes_per_s=25e6) for i, kind in enumerate(("A10", "V100"))]
    w = llm_world(*reports, facts=chat(forced_stages=2, max_stages=4), model=SMOLLM2, relay_url="redis://relay:1")
    start = w.started(CHAT)
    (learn,) = of(w.ready(start), LearnFrom)
    assert learn.factor is None


servers_st = st.lists(
    st.tuples(
        st.sampled_from([FAST, SLOW, replace(FAST, t_p=1.0, t_tail=0.6)]),
        st.sampled_from([0.5, 1.0, 2.0]),
        st.sampled_from([3, 6, 12, 24]),
        st.integers(0, 1),
        st.booleans(),
    ),
    min_size=1,
    max_size=5,
)
Plain = list[tuple[Times, float, int, int, bool]]


def outcome(servers: list[Server], request: Request, full: tuple[int, ...], low: tuple[int, ...]) -> Any:
    """(sharing, memory, s, w, TTFT, ids) of one placement, or None if it has no room or misses an objective."""
    s, chosen = len(full) + len(low), [servers[i] for i in (*full, *low)]
    needs = [request.need_full] * len(full) + [request.need_low(s)] * len(low)
    if any(server.gpus[0].free < need for server, need in zip(chosen, needs, strict=True)):
        return None
    ttft, tpot = max(kappa(12 * G / s, v.bandwidth, 12 * G, v.times or Times()) for v in chosen), 0.0
    ttft += max(v.times.t_tail for v in chosen if v.times)
    for k, v in enumerate(chosen):
        is_held = k >= len(full) and (v.is_enforced or v.gpus[0].n_workers > 0)
        part = 1.0 if is_held else 1 / s
        assert v.times is not None
        ttft += v.times.t_p * part + v.times.t_n
        tpot += v.times.t_d * part + v.times.t_n
    if ttft > request.slo_ttft + 1e-9 or tpot > request.slo_tpot + 1e-9:
        return None
    return sum(v.gpus[0].n_workers for v in chosen), sum(needs), s, len(full), round(ttft, 9), full, low


def of_every_subset(servers: list[Server], request: Request, every: Sequence[Size]) -> Any:
    placements = (p for size in every for p in every_placement(len(servers), size.s, size.w))
    outcomes = (outcome(servers, request, full, low) for full, low in placements)
    return min((o for o in outcomes if o is not None), default=None)


@settings(max_examples=150, deadline=None)
@given(
    plain=servers_st,
    slo=st.sampled_from([5.0, 7.5, 10.0, 15.0]),
    per_token=st.sampled_from([0.03, 0.06, 0.2]),
    min_full=st.integers(0, 2),
)
def test_over_hosts_of_any_kinds_and_shares_the_answer_is_that_of_trying_every_subset(
    plain: Plain, slo: float, per_token: float, min_full: int
) -> None:
    servers = [server(i, times, b, free=f, n_workers=n, share=held) for i, (times, b, f, n, held) in enumerate(plain)]
    request = Request(12 * G, slo_ttft=slo, slo_tpot=per_token)
    best = of_every_subset(servers, request, sizes(request, 1, 4, min_full))
    scheme = select(servers, request, min_full=min_full)
    if best is None:
        assert scheme is None or scheme.fallback
    else:
        assert plainly(scheme) == best


@settings(max_examples=150, deadline=None)
@given(plain=servers_st, slo=st.sampled_from([7.5, 10.0, 15.0]))
@example([(FAST, 2.0, 24, 0, False), (FAST, 2.0, 24, 0, True), (FAST, 2.0, 24, 0, True)], 7.5)  # two full on any two
@example([(SLOW, 1.0, 12, 0, False)] * 3 + [(SLOW, 1.0, 12, 0, True)], 15.0)  # thirds add up to less in one order
def test_over_hosts_of_any_kinds_and_shares_the_best_placement_of_every_size_is_found(plain: Plain, slo: float) -> None:
    """This also checks sizes that do not win.  Among equally good placements, the one with the lowest ids is found,
    even if their mixes of speeds differ."""
    servers = [server(i, times, b, free=f, n_workers=n, share=held) for i, (times, b, f, n, held) in enumerate(plain)]
    request = Request(12 * G, slo_ttft=slo)
    for size in sizes(request, 1, 4, 0):
        scheme = best_of(size, servers, "min_sharing", static_bandwidth)
        assert (scheme and plainly(scheme)) == of_every_subset(servers, request, [size])

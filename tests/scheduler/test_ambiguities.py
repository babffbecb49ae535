"""The resolutions R1 to R23 of the places where the papers are silent, ambiguous or misprinted, as the code keeps them.

R22 concerns live migration.  Its rules are in gateway/serving/moving/move_rules.py and have tests of their own.  Tests
of the modules hold R3 and R7 (test_select.py, test_groups.py), R11, R13, R14 (test_ledger.py, test_select.py),
R15, R23 (test_group_lives.py), R16 and R17 (test_scaling.py).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from gateway.scheduler.decisions import StartGroup
from gateway.scheduler.placement.link_ledger import LinkLedger
from gateway.scheduler.placement.predict import Tier, Times
from gateway.scheduler.placement.schemes import Gpu, Request, Server, candidates, sizes
from gateway.scheduler.placement.select import select
from gateway.scheduler.placement.serverlessllm import LoadServer, ResumeCost, Run, startup
from gateway.scheduler.view.history import History, Measured
from gateway.serving.moving import move_rules
from tests.scheduler.facts import CHAT, MIB, chat
from tests.scheduler.groups import group_world
from tests.scheduler.world import of
from thaw.ids import HostId
from thaw.instance import StartMode

TIMES = Times(t_c=4, t_cc=1.5, t_cu=0.5, t_l=2, t_p=1.5, t_d=0.042, t_n=0.005)
M, P = 12e9, 12e9


def server(i: int, b: float = 2e9, free: int = int(22e9), n_workers: int = 0, pcie: float = P) -> Server:
    return Server(i, b, pcie, (Gpu(free, n_workers),))


def request(**fields: Any) -> Request:
    return replace(Request(M, slo_ttft=7.5, slo_tpot=0.2, times=TIMES), **fields)


def test_r1_the_papers_gigabytes_are_gibibytes() -> None:
    llama2_7b = 6_738_415_616 * 2 + 8_192  # its parameters in half precision, and rotary frequencies
    assert llama2_7b == pytest.approx(12.55 * 2**30, rel=1e-3)
    assert History().times("f", "k", StartMode.COLD, llama2_7b).t_p == pytest.approx(Times().t_p, rel=1e-3)


def test_r2_the_workers_of_a_group_are_on_distinct_servers() -> None:
    scheme = select([server(0), server(1)], request(slo_tpot=math.inf), min_stages=3, max_stages=4)
    assert scheme.fallback  # three stages need three servers


def test_r4_both_sorts_are_increasing_the_fastest_come_first() -> None:
    size = next(s for s in sizes(request(), 2, 2, 0) if s.w == 1)
    found = candidates([server(0, 1.7e9), server(1, 2e9), server(2, 1.8e9)], size, "paper", lambda s, n, t: s.bandwidth)
    assert [c.server.id for c in found] == [1, 2, 0]


def test_r5_with_overlap_the_key_is_kappa_and_not_the_sum_of_the_inverses() -> None:
    slow_copy, slow_link = server(0, 2e9, pcie=3e9), server(1, 1.9e9, pcie=50e9)
    assert 1 / 2e9 + 1 / 3e9 > 1 / 1.9e9 + 1 / 50e9  # with the printed key, server 1 would be first
    size = next(s for s in sizes(request(slo_ttft=60.0), 1, 1, 0))
    found = candidates([slow_link, slow_copy], size, "paper", lambda s, n, t: s.bandwidth)
    assert [c.server.id for c in found] == [0, 1]
    assert found[0].kappa < found[1].kappa


@pytest.mark.parametrize(("variant", "gpu"), [("paper", 0), ("slides", 1), ("min_sharing", 1)])
def test_r6_the_paper_fits_best_and_the_others_take_an_idle_device_first(variant: Any, gpu: int) -> None:
    both = Server(0, 2e9, P, (Gpu(int(13e9), 1), Gpu(int(22e9), 0)))
    scheme = select([both], request(slo_ttft=60.0), variant=variant)
    assert [p.gpu for p in (*scheme.full, *scheme.low)] == [gpu]


def test_r8_slides_looks_at_every_size_before_it_answers() -> None:
    first_shared = [Server(0, 2e9, P, (Gpu(int(22e9), 1),)), *(server(i) for i in (1, 2))]
    wanted = request(slo_ttft=7.5, slo_tpot=0.084)
    paper = select(first_shared, wanted, variant="paper")
    slides = select(first_shared, wanted, variant="slides")
    assert (paper.s, paper.w, paper.sharing) == (2, 1, 1)
    assert slides.sharing <= paper.sharing


def test_r9_sharing_counts_workers_whose_device_hosts_another() -> None:
    scheme = select([server(0, n_workers=3), server(1, n_workers=1)], request(slo_tpot=0.2), min_stages=2)
    assert scheme.sharing == 2  # the workers that share count, not the workers with which they share


def test_r10_no_new_fetch_breaks_a_promise_and_what_fits_nowhere_waits() -> None:
    w = group_world(n_hosts=1, facts=chat(max_stages=1, slo_ttft_s=11.5, slots=1, need_bytes=1500 * MIB))
    first, second = of(w.ask(CHAT), StartGroup)
    assert first.plan.stages[0].fetch_deadline_ms is not None
    assert second.plan.stages[0].fetch_deadline_ms is None  # it gets the bandwidth that the first one leaves
    fetches = w.view.hosts[HostId("h0")].ledger.fetches()
    assert [f.promised for f in fetches.values()] == [True, False]
    assert of(w.ask(CHAT), StartGroup) == []  # there is memory for two starts only


def test_r12_the_estimator_is_fluid_a_fetch_that_ends_leaves_its_share_at_once() -> None:
    ledger = LinkLedger(2e9, "equal")
    ledger.add("short", 1e9, 60.0, 0.0)
    ledger.add("long", 4e9, 60.0, 0.0)
    ledger.advance(2.0)  # the short one ended at 1.0, but the ledger was not told
    assert ledger.pending("long") == pytest.approx(1e9)  # the printed estimator says 2e9


def test_r18_a_remote_load_waits_for_both_of_its_queues() -> None:
    loading = LoadServer(0, 1, dram=20e9, ssd=5e9, net=1e9, q_ssd=3.0, q_net=2.0)
    assert loading.load_s("m", 1e9) == 4.0


def test_r19_what_is_expected_is_the_median_of_the_last_nine_measurements() -> None:
    history = History()
    for took_s in (9.0, 9.0, *(float(n) for n in range(1, 10))):
        learned = history.update("f", "k", StartMode.COLD, Measured(t_cc=took_s))
    assert learned.times.t_cc == 5.0


def test_r20_and_r21_migrations_run_one_after_another_and_the_load_begins_behind_them() -> None:
    cost = ResumeCost(a=0.0, b=2.0, token_s=1.0)
    runs = tuple(Run(f"r{i}", "x", 1, 1e9, 0.0, 0.0, cost) for i in range(2))
    busy = LoadServer(0, 0, 20e9, 5e9, 1e9, tiers={"m": Tier.RESIDENT}, runs=runs)
    free = LoadServer(1, 2, 20e9, 5e9, 1e9, idle_models=("x", "x"))
    choice = startup([busy, free], busy, "m", 20e9, n_gpus=2)
    assert [m.cost_s for m in choice.moves] == [2.0, 2.0]
    assert choice.startup_s == 2.0 + 2.0 + 1.0  # the sum of the moves, then the load


def test_the_reserve_is_memory_beside_the_weights() -> None:
    assert request(reserve=5e9).need_full == 17e9
    assert request(reserve=5e9).need_low(4) == math.ceil(17e9 / 4)
    assert select([server(0, free=int(16e9))], request(reserve=5e9)) is None


def test_r22_of_the_two_source_failures_that_are_printed_the_second_is_the_destinations() -> None:
    failed = move_rules.step(move_rules.State.RESUMING, move_rules.Event.DEST_FAILED)
    assert failed.commands == (move_rules.Command.DROP_AT_DEST,)  # the source goes on
    lost = move_rules.step(move_rules.State.RESUMING, move_rules.Event.SOURCE_FAILED)
    assert lost.commands == (move_rules.Command.CONTINUE_AT_DEST,)

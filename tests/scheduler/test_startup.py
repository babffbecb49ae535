"""Worked example 5, and the migration search against trying everything."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.scheduler.startup import LoadServer, ResumeCost, Run, Tier, cheapest_moves, choose, move_cost_s, startup

COST = ResumeCost(0.25e-3, 0.020, 0.030)
N = 13.3e9


def servers(q_ssd: float) -> list[LoadServer]:
    x = Run("x", "X", 1, N, 600, 9.0, COST)
    links = {"dram": 20e9, "ssd": 5e9, "net": 1.25e9}
    return [
        LoadServer(0, 0, **links, tiers={"B": Tier.DRAM}, runs=(x,)),
        LoadServer(1, 1, **links, q_ssd=q_ssd, tiers={"B": Tier.SSD}),
        LoadServer(2, 1, **links, q_net=3.0),
        LoadServer(3, 1, **links, tiers={"X": Tier.SSD}),
    ]


def test_worked_example_5_the_server_with_the_model_in_memory_wins_although_a_run_must_move_first() -> None:
    offers = servers(1.2)
    each = [startup(offers, s, "B", N, 1) for s in offers]
    assert [c.startup_s for c in each if c] == pytest.approx([3.570, 3.860, 13.640, 10.640])
    chosen = choose(offers, "B", N, 1)
    assert chosen is not None
    assert (chosen.server, [(m.run, m.to) for m in chosen.moves]) == (0, [("x", 3)])
    assert chosen.moves[0].cost_s == pytest.approx(2.660 + 0.245)


def test_worked_example_5_without_a_queue_the_free_server_wins() -> None:
    chosen = choose(servers(0.0), "B", N, 1)
    assert chosen is not None
    assert (chosen.server, chosen.moves) == (1, ())
    assert chosen.startup_s == pytest.approx(2.660)


def test_an_assigned_load_holds_every_queue_it_crosses() -> None:
    remote = LoadServer(0, 1, 20e9, 5e9, 1e9).assign("m", 2e9)
    assert (remote.q_net, remote.q_ssd) == (2.0, 2.0)
    ssd = LoadServer(0, 1, 20e9, 5e9, 1e9, tiers={"m": Tier.SSD}).assign("m", 5e9)
    assert (ssd.q_net, ssd.q_ssd) == (0.0, 1.0)


def test_a_destination_with_an_idle_instance_costs_only_the_resume() -> None:
    run = Run("x", "X", 1, N, 600, 9.0, COST)
    assert move_cost_s(run, LoadServer(1, 1, 1, 1, 1, idle_models=frozenset({"X"}))) == pytest.approx(0.245)


def test_runs_do_not_move_from_a_server_that_others_are_moving_to() -> None:
    offers = servers(0.0)
    blocked = LoadServer(0, 0, 1, 1, 1, runs=offers[0].runs, migrating_in=True)
    assert cheapest_moves([blocked, *offers[1:]], blocked, 1) is None


@given(
    runs=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 50)), max_size=4),
    room=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), min_size=1, max_size=3),
    missing=st.integers(1, 6),
)
def test_the_migration_search_equals_trying_everything(
    runs: list[tuple[int, int]], room: list[tuple[int, int]], missing: int
) -> None:
    cost = ResumeCost(0.0, 0.5, 1.0)
    moving = tuple(Run(f"r{i}", f"m{i}", g, float(n), 0, 0, cost) for i, (g, n) in enumerate(runs))
    source = LoadServer(0, 0, 1, 1, 1, runs=moving)
    others = [LoadServer(i + 1, free, float(b), float(b), float(b)) for i, (free, b) in enumerate(room)]
    found = cheapest_moves([source, *others], source, missing)
    best = math.inf
    for where in itertools.product(range(-1, len(others)), repeat=len(moving)):
        pairs = [(r, others[w]) for r, w in zip(moving, where, strict=True) if w >= 0]
        used = [sum(r.n_gpus for r, o in pairs if o is other) for other in others]
        if sum(r.n_gpus for r, _ in pairs) >= missing and all(u <= o.n_free for u, o in zip(used, others, strict=True)):
            best = min(best, sum(move_cost_s(r, o) for r, o in pairs))
    assert (math.inf if found is None else sum(m.cost_s for m in found)) == pytest.approx(best)

"""Worked example 5, and the migration search compared with trying everything."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.scheduler.placement.predict import Tier
from gateway.scheduler.placement.serverlessllm import LoadServer, ResumeCost, Run, cheapest_moves, choose, startup

COST = ResumeCost(0.25e-3, 0.020, 0.030)
N = 13.3e9


def servers(q_ssd: float) -> list[LoadServer]:
    x = Run("x", "X", 1, N, 600, 9.0, COST)
    links = {"dram": 20e9, "ssd": 5e9, "net": 1.25e9}
    return [
        LoadServer(0, 0, **links, tiers={"B": Tier.RESIDENT}, runs=(x,)),
        LoadServer(1, 1, **links, q_ssd=q_ssd, tiers={"B": Tier.SSD}),
        LoadServer(2, 1, **links, q_net=3.0),
        LoadServer(3, 1, **links, tiers={"X": Tier.SSD}),
    ]


def test_worked_example_5_the_server_with_the_model_in_memory_wins_although_a_run_must_move_first() -> None:
    offers = servers(1.2)
    each = [startup(offers, s, "B", N, 1) for s in offers]
    assert [c.startup_s for c in each if c] == pytest.approx([3.570, 3.860, 13.640, 10.640])
    chosen = choose(offers, "B", N, 1)
    assert (chosen.server, [(m.run, m.to) for m in chosen.moves]) == (0, [("x", 3)])
    assert chosen.moves[0].cost_s == pytest.approx(2.660 + 0.245)


def test_worked_example_5_without_a_queue_the_free_server_wins() -> None:
    chosen = choose(servers(0.0), "B", N, 1)
    assert (chosen.server, chosen.moves) == (1, ())
    assert chosen.startup_s == pytest.approx(2.660)


@pytest.mark.parametrize("n_gpus", [1, 2])
def test_a_destination_with_an_idle_instance_costs_only_the_resume_and_needs_no_free_device(n_gpus: int) -> None:
    """The idle instance holds its devices already."""
    run = Run("x", "X", n_gpus, N, 600, 9.0, COST)
    busy = LoadServer(0, 0, 1, 1, 1, runs=(run,))
    found = cheapest_moves([busy, LoadServer(1, 2 - n_gpus, 1, 1, 1, idle_models=("X",))], busy, n_gpus)
    assert [(m.to, m.cost_s) for m in found] == [(1, pytest.approx(0.245))]


def test_two_runs_cannot_both_move_to_one_idle_instance() -> None:
    runs = tuple(Run(f"x{i}", "X", 1, 2e9, 600, 9.0, COST) for i in range(2))
    busy = LoadServer(0, 0, 1e9, 1e9, 1e9, runs=runs)
    idle = LoadServer(1, 1, 1e9, 1e9, 1e9, idle_models=("X",))
    found = cheapest_moves([busy, idle], busy, 2)
    assert [m.cost_s for m in found] == pytest.approx([0.245, 2.0 + 0.245])
    assert cheapest_moves([busy, replace(idle, n_free=0)], busy, 2) is None


def test_runs_do_not_move_from_a_server_that_others_are_moving_to() -> None:
    offers = servers(0.0)
    blocked = LoadServer(0, 0, 1, 1, 1, runs=offers[0].runs, migrating_in=True)
    assert cheapest_moves([blocked, *offers[1:]], blocked, 1) is None


@given(
    runs=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 50)), max_size=4),
    room=st.lists(
        st.tuples(st.integers(0, 4), st.integers(1, 9), st.lists(st.sampled_from("AB"), max_size=2)),
        min_size=1,
        max_size=3,
    ),
    missing=st.integers(1, 6),
)
def test_the_migration_search_equals_trying_everything(
    runs: list[tuple[int, int]], room: list[tuple[int, int, list[str]]], missing: int
) -> None:
    """Each run stays, moves into an idle instance of its model, or is loaded where devices are free."""
    cost = ResumeCost(0.0, 0.5, 1.0)
    moving = tuple(Run(f"r{i}", "AB"[i % 2], g, float(n), 0, 0, cost) for i, (g, n) in enumerate(runs))
    source = LoadServer(0, 0, 1, 1, 1, runs=moving)
    others = [
        LoadServer(i + 1, free, float(b), float(b), float(b), idle_models=tuple(idle))
        for i, (free, b, idle) in enumerate(room)
    ]
    found = cheapest_moves([source, *others], source, missing)
    best, ways = math.inf, [None, *itertools.product(others, (True, False))]
    for chosen in itertools.product(ways, repeat=len(moving)):
        moves = [(run, *way) for run, way in zip(moving, chosen, strict=True) if way is not None]
        loaded = {o.id: sum(r.n_gpus for r, to, idle in moves if to is o and not idle) for o in others}
        taken = Counter((to.id, r.model) for r, to, idle in moves if idle)
        if (
            sum(r.n_gpus for r, *_ in moves) >= missing
            and all(loaded[o.id] <= o.n_free for o in others)
            and all(n <= others[to - 1].idle_models.count(model) for (to, model), n in taken.items())
        ):
            best = min(best, sum(0.5 if idle else to.load_s(r.model, r.n_bytes) + 0.5 for r, to, idle in moves))
    assert (math.inf if found is None else sum(m.cost_s for m in found)) == pytest.approx(best)

"""Properties of every run: equal inputs give equal logs, no request is lost, and no memory is promised twice."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from bench.simulation import cluster, naming, run
from bench.simulation.cluster import Device, OverCommitted
from bench.simulation.constants import TESTBEDS
from bench.simulation.engine import Engine
from bench.simulation.experiments import brownfield, scale_down
from bench.simulation.heedless import HeedlessLedger
from bench.simulation.network import Link
from bench.simulation.production import Production
from bench.simulation.run import Outcome, simulate
from bench.simulation.specs import ABLATIONS, SYSTEMS, Mechanism, Objectives
from bench.simulation.workload import Workload, generate
from gateway.scheduler.decisions import DropDemand
from gateway.scheduler.placement.link_ledger import DISCIPLINES, Discipline, LinkLedger
from thaw.ids import GatewayId

ALL = sorted(SYSTEMS)


@pytest.fixture(scope="module")
def hour() -> Workload:
    return generate(8, 0.2, 3)


@pytest.fixture(scope="module")
def of_minutes() -> Callable[[str], Outcome]:
    """The outcome of five busy minutes with Thaw, or with Thaw without a part."""
    minutes = generate(8, 0.6, 0, seconds=300)
    return cache(lambda system: simulate(minutes, ABLATIONS[system]))


@pytest.fixture(scope="module")
def of_busy_hour() -> Callable[[str], tuple[Outcome, int]]:
    """The outcome of a busy hour with a system, and the number of times that memory was held.

    Each time, every device is checked independently of the code that takes the memory.  Each system is simulated once.
    """
    true_hold = cluster.SimServer.hold

    @cache
    def made(system: str) -> tuple[Outcome, int]:
        seen = 0

        def hold(self: cluster.SimServer, device: int, n_bytes: int, now: float) -> None:
            nonlocal seen
            true_hold(self, device, n_bytes, now)
            assert all(0 <= d.used <= self.kind.memory for d in self.devices)
            seen += 1

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cluster.SimServer, "hold", hold)
            return simulate(generate(2, 0.4, 0), (SYSTEMS | ABLATIONS)[system]), seen

    return made


@pytest.mark.parametrize(
    "system", [s if s in ("thaw", "paraserve") else pytest.param(s, marks=pytest.mark.full) for s in ALL]
)
def test_the_same_seed_gives_the_same_log(system: str, hour: Workload) -> None:
    assert generate(8, 0.2, 3).requests == hour.requests
    one, again, other = (generate(8, 0.2, seed, seconds=900) for seed in (3, 3, 4))
    logs = {simulate(w, SYSTEMS[system]).log_hash for w in (one, again)}
    assert len(logs) == 1
    assert simulate(other, SYSTEMS[system]).log_hash not in logs


@pytest.mark.parametrize("system", ALL)
def test_every_request_ends_exactly_once_and_in_order_and_its_waits_add_up_to_its_time_to_first_token(
    system: str, of_busy_hour: Callable[[str], tuple[Outcome, int]]
) -> None:
    outcome = of_busy_hour(system)[0]
    assert len(outcome.requests) == len(generate(2, 0.4, 0).requests)
    for r in outcome.requests:
        assert r.n_ends == 1
        assert not r.failed
        assert r.arrival_s < r.first_token_s <= r.end_s
        assert sum(r.waits.values()) == pytest.approx(r.ttft)


def test_a_request_that_never_ends_is_noticed(hour: Workload) -> None:
    requests = hour.fresh()
    for r in requests[1:]:
        r.end(1.0)
    with pytest.raises(run.Lost, match="1 request"):
        run._check(requests)


@pytest.mark.parametrize("system", ALL)
def test_a_busy_hour_never_over_commits_a_device(
    system: str, of_busy_hour: Callable[[str], tuple[Outcome, int]]
) -> None:
    assert of_busy_hour(system)[1] > 100


COUNTED = {
    getattr(Mechanism, name) for name in ["OVERLAP", "STEM_CELLS", "GROUPS", "CONSOLIDATION", "RETAINED", "EVICTION"]
}
"""A run counts each use of these mechanisms.  Succession is counted too, but it is for groups that cannot become one
worker while they serve, and every simulated group can."""


@pytest.mark.parametrize("system", ALL)
def test_a_system_uses_what_its_specification_says_that_it_has_and_nothing_else(
    system: str, of_busy_hour: Callable[[str], tuple[Outcome, int]]
) -> None:
    used = {mechanism for mechanism, n in of_busy_hour(system)[0].used.items() if n}
    assert used & COUNTED == SYSTEMS[system].mechanisms & COUNTED
    assert used <= SYSTEMS[system].mechanisms


@pytest.mark.parametrize("name", sorted(ABLATIONS.keys() - SYSTEMS.keys()))
def test_without_one_part_another_history_happens_and_the_part_is_not_used(
    name: str, of_minutes: Callable[[str], Outcome]
) -> None:
    spec, outcome = ABLATIONS[name], of_minutes(name)
    assert outcome.log_hash != of_minutes(name.partition(":")[0]).log_hash
    assert {mechanism for mechanism, n in outcome.used.items() if n} <= spec.mechanisms
    if spec.forced_stages is not None:
        assert outcome.used[Mechanism.GROUPS] == (outcome.n_starts if spec.forced_stages > 1 else 0)


@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_without_admission_a_fetch_is_foretold_that_breaks_a_promise(discipline: Discipline) -> None:
    for kind in (LinkLedger, HeedlessLedger):
        ledger = kind(1e9, discipline)
        assert ledger.bandwidth(1e9, 1.5, 0.0) == 1e9  # the link is idle
        assert ledger.add("one", 1e9, 1.5, 0.0)
        assert ledger.add("another", 1e9, 1.4, 0.0) == (kind is HeedlessLedger)
        assert (ledger.bandwidth(1e9, 1.3, 0.0) > 0) == (kind is HeedlessLedger)
        assert 0 < ledger.bandwidth(1e9, float("inf"), 0.0) < 1e9  # the promised fetches come first


def test_holding_more_than_is_free_is_refused() -> None:
    server = cluster.build(TESTBEDS["i-a10"], Engine(), "edf", cache=False)[0]
    server.hold(0, 20 * 10**9, 0.0)
    with pytest.raises(OverCommitted):
        server.hold(0, 3 * 10**9, 0.0)
    assert server.devices[0].free == 2 * 10**9
    assert Device(5).free == 5


@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_the_link_and_the_schedulers_ledger_tell_the_same_story(discipline: Discipline) -> None:
    """These are two independent fluid models.  The scheduler's estimate is what happens, and promises are kept."""
    engine, ledger = Engine(), LinkLedger(2e9, discipline)
    link = Link(engine, 2e9, discipline)
    late: list[str] = []

    def begin(name: str, n_bytes: float, within_s: float) -> None:
        deadline = engine.now + within_s
        if ledger.add(name, n_bytes, deadline, engine.now):
            link.start(n_bytes, deadline, lambda: late.append(name) if engine.now > deadline + 1e-6 else None)

    def compare() -> None:
        ledger.advance(engine.now)
        believed = sorted(f.pending for f in ledger.fetches().values())
        assert believed == pytest.approx([p for p in sorted(link.pending()) if p > 10], abs=10)

    for i in range(60):
        engine.at(i * 0.7, begin, f"f{i}", 1e9 + (i * 7919 % 13) * 3e8, 2.0 + i * 31 % 11)
        if i % 10 == 0:
            engine.at(i * 0.7, begin, f"background{i}", 2e9, float("inf"))
    for i in range(200):
        engine.at(i * 0.31 + 0.05, compare)
    engine.run()
    assert late == []


def test_consolidation_shortens_a_long_answer() -> None:
    assert scale_down().value > 1.5
    assert brownfield().value > 1.5


def test_a_looser_objective_is_not_worse_for_a_system_that_ignores_it(hour: Workload) -> None:
    one, two = (simulate(hour, SYSTEMS["vllm"], "ii", Objectives(s)).log_hash for s in (1.0, 2.0))
    assert one == two


def test_a_request_that_waits_past_its_time_limit_has_failed(hour: Workload) -> None:
    """The gateway has answered the request by then, and the scheduler drops its demand."""
    engine, spec = Engine(), SYSTEMS["thaw"]
    hosts = cluster.build(TESTBEDS["ii"], engine, spec.discipline, cache=spec.cache)
    system = Production(engine, hosts, spec, Objectives())
    request = hour.fresh()[0]
    system.arrive(request)
    waiting = system.functions[request.function]
    system._carry_out(DropDemand(naming.name(waiting), naming.activation(request), GatewayId("gateway")))
    assert (request.n_ends, system.n_ended, list(waiting.queue)) == (1, 1, [])


def test_a_group_that_serves_as_a_group_is_succeeded_by_one_worker_when_it_is_idle(
    of_busy_hour: Callable[[str], tuple[Outcome, int]],
) -> None:
    assert of_busy_hour("thaw: only idle")[0].used[Mechanism.SUCCESSION] > 0

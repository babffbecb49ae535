"""A group that ``decide()`` starts on the simulated hosts becomes one worker, or several, while it answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.simulation import cluster, production
from bench.simulation.constants import MODELS, SWITCH_STEPS, TESTBEDS, token_s
from bench.simulation.engine import Engine
from bench.simulation.experiments import burst
from bench.simulation.run import simulate
from bench.simulation.specs import SYSTEMS, Objectives
from gateway.scheduler.decisions import ConsolidateInstance
from gateway.scheduler.events import Event
from relay.protocol.messages import CommandRefused, InstanceChanged
from thaw.ids import CommandId, GroupId, HostId, InstanceId

NORMAL = Objectives()  # one worker would be late
THAW = SYSTEMS["thaw"]


def small_cluster() -> tuple[Engine, production.Production]:
    engine = Engine()
    hosts = cluster.build(TESTBEDS["i-v100"], engine, THAW.discipline, cache=THAW.cache)
    return engine, production.Production(engine, hosts, THAW, NORMAL)


def test_a_group_becomes_one_worker_while_it_answers_and_the_others_give_their_memory_back() -> None:
    group, worker = (
        simulate(burst("llama2-7b", (0.0,), 512, 1000), spec, "i-v100", NORMAL)
        for spec in (replace(THAW, consolidate=False), THAW)
    )
    assert len(group.consolidations) == 0
    (switch,) = worker.consolidations
    assert worker.requests[0].first_token_s < switch.at_s < worker.requests[0].end_s
    assert worker.requests[0].end_s < group.requests[0].end_s
    assert worker.held_byte_s < group.held_byte_s


def test_the_switch_costs_a_few_steps_of_the_group() -> None:
    """A step of the group takes F times that of a worker (Eq. 2: three low-memory stages, 3 + 1/4), and its hops."""
    (switch,) = simulate(burst("llama2-7b", (0.0,), 512, 1000), THAW, "i-v100", NORMAL).consolidations
    step_s = token_s(MODELS["llama2-7b"], 1)
    assert SWITCH_STEPS * step_s <= switch.stall_s <= SWITCH_STEPS * (4 * step_s + 0.004)


def test_a_function_that_keeps_two_workers_has_two_after_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = production.action
    monkeypatch.setattr(production, "action", lambda *given: replace(facts(*given), keep=2))
    engine, system = small_cluster()
    became, tell = dict[InstanceId, GroupId](), system.tell
    stages = set[InstanceId]()

    def told(event: Event) -> None:
        if isinstance(event, InstanceChanged) and event.instance.n_stages > 1:
            stages.add(event.instance.instance_id)
        elif isinstance(event, InstanceChanged) and event.instance.instance_id in stages:
            became[event.instance.instance_id] = event.instance.group_id
        tell(event)

    monkeypatch.setattr(system, "tell", told)
    requests = burst("llama2-7b", (0.0,) * 24, 512, 1000).fresh()
    for request in requests:
        engine.at(request.arrival_s, system.arrive, request)
    engine.run(alive=lambda: system.n_ended < len(requests))
    assert len(became) == len(set(became.values())) == 2 * len(system.consolidations) > 0


def test_a_host_refuses_for_a_stage_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Event] = []
    _, system = small_cluster()
    monkeypatch.setattr(system, "tell", told.append)
    system._carry_out(ConsolidateInstance(HostId("host-0000"), InstanceId("i"), GroupId("g"), CommandId("c")))
    (refused,) = told
    assert isinstance(refused, CommandRefused)
    assert refused.command_id == "c"

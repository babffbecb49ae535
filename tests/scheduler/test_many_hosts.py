"""Among many hosts a request that no start can serve in time gets its late start without an examination of the sizes."""

from __future__ import annotations

import random
from dataclasses import replace
from unittest.mock import patch

import pytest

from gateway.scheduler.decisions import StartGroup
from gateway.scheduler.events import ActionFacts
from gateway.scheduler.placement.stage_bytes import Stages
from gateway.scheduler.policy import place as placing
from gateway.scheduler.policy.offers import EXPLAINED_HOSTS
from relay.protocol.messages import DemandRemoved
from tests.scheduler.facts import CHAT, MIB, OTHER, SMOLLM2, chat, report
from tests.scheduler.world import World, llm_world, of
from thaw.host import Device, Resident

TIGHT = chat(name=OTHER, slo_ttft_s=7.5, slo_tpot_s=0.2, max_stages=4)
BYTES_PER_S = SMOLLM2.n_bytes / 4  # on such a link the model comes in four seconds


def many(seed: int, n_requests: int = 30, *, holds: bool = False) -> tuple[World, ActionFacts, Stages]:
    """Hosts with links that all differ and a device each, after some requests: links fetch, and some hosts have an idle
    instance.  ``holds``: one host has the model in its memory."""
    rng = random.Random(seed)
    there = (Resident("s3://m/x", SMOLLM2.n_bytes, SMOLLM2.sha256),)
    device = Device("cuda:0", "A10", 1536 * MIB, 1536 * MIB)
    hosts = [
        report(
            f"h{i}",
            network_bytes_per_s=BYTES_PER_S * rng.uniform(0.3, 3.0),
            devices=(device,),
            resident=there if holds and i == 7 else (),
            stem_kinds=("llm:vllm",) if rng.random() < 0.5 else (),
        )
        for i in range(EXPLAINED_HOSTS + 8)
    ]
    w = llm_world(*hosts, facts=chat(slo_ttft_s=7.5, slots=1), model=SMOLLM2, relay_url="redis://relay:6379/0")
    w.deploy(TIGHT)
    for _ in range(n_requests):
        w.later(0.1)
        for start in of(w.ask(CHAT), StartGroup):
            if rng.random() < 0.5:
                w.ready(start)
    for waiting in list(w.view.demand.values()):
        w.do(DemandRemoved(waiting.demand.activation_id, CHAT))
    stages = w.view.model("s3://m/x").stages
    return w, TIGHT, stages


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("slo_ttft_s", [3.0, 7.5])
def test_the_late_start_is_the_one_that_an_examination_of_all_sizes_gives(seed: int, slo_ttft_s: float) -> None:
    w, facts, stages = many(seed)
    facts = replace(facts, slo_ttft_s=slo_ttft_s)
    examined = list[bool]()
    for waited_s in (n / 5 for n in range(40)):
        with patch.object(placing, "_late", wraps=placing._late) as late:
            found = placing.place(w.view, facts, stages, waited_s, w.now)
            released = placing.in_time_without_idle(w.view, facts, stages, waited_s, w.now, 1)
        with patch.object(placing, "could_be_in_time", lambda *_: True):
            assert found == placing.place(w.view, facts, stages, waited_s, w.now)
            assert released == placing.in_time_without_idle(w.view, facts, stages, waited_s, w.now, 1)
        assert found.fallback or not late.called
        examined.append(not late.called)
    assert sorted(examined, reverse=True) == examined  # the longer it has waited, the less can be in time
    assert set(examined) == {True, False}


def test_a_start_that_fetches_nothing_is_found_however_slow_the_links_are() -> None:
    w, facts, stages = many(0, 0, holds=True)
    found = placing.place(w.view, replace(facts, slo_ttft_s=4.2, fetch_bytes_per_s=MIB), stages, 0.0, w.now)
    assert (found.fallback, [seat.host_id for seat in found.seats]) == (False, ["h7"])

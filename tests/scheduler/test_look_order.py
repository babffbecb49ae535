"""The host that is asked to inspect a model: the index names the one that a walk over all hosts finds."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.scheduler.view.cluster import ClusterView
from gateway.scheduler.view.hosts import HostView
from tests.scheduler.facts import FACTS, MIB, report
from tests.scheduler.world import World
from thaw.host import Resident
from thaw.ids import HostId, InstanceId
from thaw.model import ModelFacts

HUB = replace(FACTS, uri="hf://org/name@" + "a" * 40, sha256="", etag="revision.content")
MODELS = [None, FACTS, replace(FACTS, sha256="bb"), HUB]
RESIDENT = [
    Resident("s3://m/x", FACTS.weight_bytes, FACTS.version),
    Resident("s3://m/x", FACTS.weight_bytes, "other"),
    Resident("s3://m/x", 5, FACTS.version),
    Resident("s3://m/x", FACTS.n_bytes),
    Resident(HUB.uri.replace("a", "b"), HUB.n_bytes, HUB.version),
]


def walked(view: ClusterView, facts: ModelFacts | None, failed_on: HostId | None) -> HostView | None:
    def fitness(host: HostView) -> tuple[bool, bool, int, HostId]:
        has_it = facts is not None and host.has_model(facts.uri, facts.weight_bytes, facts.version)
        return host.host_id == failed_on, not has_it, host.n_workers, host.host_id

    return min(view.live_hosts(), key=fitness, default=None)


@settings(deadline=None)
@given(st.integers(0, 2**32))
def test_the_index_names_the_host_that_a_walk_over_all_of_them_finds(seed: int) -> None:
    draw = random.Random(seed)
    w, held = World(), dict[str, list[InstanceId]]()
    for step in range(draw.randint(1, 30)):
        name = f"h{draw.randrange(5)}"
        host = w.view.hosts.get(HostId(name))
        match draw.randrange(5):
            case 0 | 1:
                has = tuple(draw.sample(RESIDENT, draw.randrange(3)))
                devices = {} if draw.random() < 0.8 else {"devices": ()}
                w.view.put_host(
                    report(name, seen_wall_ms=step, resident=has, draining=draw.random() < 0.2, **devices), w.now
                )
            case 2 if host is not None:
                host.hold("cpu", MIB)
                held.setdefault(name, []).append(InstanceId(f"i{step}"))
            case 3 if host is not None and held.get(name):
                host.let_go(held[name].pop(), "cpu", MIB)
            case 4 if host is not None and draw.random() < 0.3:
                w.view.drop_host(HostId(name))
                held.pop(name, None)
        for facts in MODELS:
            for failed_on in (None, HostId("h0"), HostId("h1"), HostId("nowhere")):
                assert w.view.look_order.best(facts, failed_on) is walked(w.view, facts, failed_on)

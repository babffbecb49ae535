"""Groups of several stages, and pipelines that become one worker."""

from __future__ import annotations

from typing import Any

from gateway.scheduler.decisions import Decision, StartGroup
from gateway.scheduler.events import ActionFacts
from tests.scheduler.facts import READY, SMOLLM2, forced, report
from tests.scheduler.world import World, llm_world, rebuilt, starting
from thaw.ids import HostId
from thaw.instance import InstanceRecord
from thaw.model import ModelFacts


def group_world(n_hosts: int = 4, facts: ActionFacts | None = None, model: ModelFacts = SMOLLM2, **host: Any) -> World:
    """Hosts on links of 200 Mbit/s, and a relay."""
    hosts = [report(f"h{i}", **{"network_bytes_per_s": 25e6, **host}) for i in range(n_hosts)]
    return llm_world(*hosts, facts=facts, model=model, relay_url="redis://user:secret@relay:6379/0")


FOLDING = forced(4, keep=1)
"""The function of a model whose pipelines of four stages leave one worker."""


def whole(
    facts: ActionFacts = FOLDING, n_hosts: int = 4, *, idle: bool = False, **host: Any
) -> tuple[World, StartGroup, list[Decision]]:
    """A group that has just become whole, and the decisions of that moment."""
    w, start = starting(group_world(n_hosts, facts, **host))
    return w, start, w.ready(start, idle=idle)


def switched(w: World, start: StartGroup, **fields: Any) -> list[Decision]:
    """Let the scheduler hear that stage 0 has become one worker."""
    return w.said(start, READY, 0, **{"n_stages": 1, "slots": 8, "inflight": 1, **fields})


def one_worker(facts: ActionFacts = FOLDING, n_hosts: int = 4, **fields: Any) -> tuple[World, StartGroup]:
    """A group that has just become one worker."""
    w, start, _ = whole(facts, n_hosts)
    switched(w, start, **fields)
    return w, start


def held(w: World) -> dict[HostId, int]:
    """The bytes that instances have on each host that has any."""
    return {h.host_id: h.devices["cpu"].reserved for h in w.view.hosts.values() if h.devices["cpu"].reserved}


def nothing_is_left(w: World) -> None:
    assert (w.view.groups, w.view.instances) == ({}, {})
    for host in w.view.hosts.values():
        assert host.ledger.fetches() == {}
        assert [(d.reserved, d.n_workers, d.releasing) for d in host.devices.values()] == [(0, 0, 0)]


def taken_over(start: StartGroup, *records: InstanceRecord, **fields: Any) -> tuple[World, list[Decision]]:
    """Another scheduler, and its decisions when it finds a group's plan and these records."""
    w = World(ids="s", relay_url="redis://relay:6379/0")
    found = {
        "hosts": tuple(report(f"h{i}") for i in range(4)),
        "instances": records,
        "plans": (start.plan,),
        "models": (SMOLLM2,),
        "actions": (FOLDING,),
        "credentials": (start.plan.group_id,),
        **fields,
    }
    return w, w.do(rebuilt(**found))

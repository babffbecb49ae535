"""Properties of decide() over random histories."""

from __future__ import annotations

from hypothesis import example, given, settings

from gateway.scheduler.decisions import Decision, StartGroup
from gateway.scheduler.events import ActionSeen, HostsSeen
from tests.scheduler.cluster import Step, steps
from tests.scheduler.facts import LOST, MIB, READY, STARTING, hello, report
from tests.scheduler.world import World, of
from thaw.host import HostReport
from thaw.ids import ActionName, HostId, InstanceId

histories = steps(0, 60, "ask ask ask ready gone idle report wait lose join", 5)
SIZES = [100, 300, 700]


def _play(plan: list[Step]) -> tuple[World, list[Decision]]:
    """Play a random history on two hosts, with three actions of different sizes."""
    names = [ActionName(f"guest/f{i}") for i in range(3)]
    w = World(report("h0", 1000), report("h1", 700))
    for name, mb in zip(names, SIZES, strict=True):
        w.do(ActionSeen(hello(name=name, need_bytes=mb * MIB)))
    live, started, decided = {"h0", "h1"}, list[StartGroup](), list[Decision]()
    for what, n in plan:
        now: list[Decision] = []
        known = [s for s in started if s.stages[0].instance_id in w.view.instances]
        if what == "ask":
            now = w.ask(names[n % 3])
        elif what in ("ready", "idle", "gone") and known:
            now = _tell(w, known[n % len(known)], what)
        elif what == "wait":
            now = w.later(n * 15.0)
        elif what in ("lose", "join", "report"):
            live = live - {f"h{n % 2}"} if what == "lose" else live | {f"h{n % 2}"} if what == "join" else live
            now = w.do(HostsSeen(tuple(_report_now(w, h) for h in sorted(live))))
        decided += now
        started += of(now, StartGroup)
        _never_overcommitted(w)
    return w, decided


def _tell(w: World, start: StartGroup, what: str) -> list[Decision]:
    if what == "ready":
        return w.ready(start)
    if what == "idle":
        return w.said(start, READY, idle_since_wall_ms=int(w.now * 1000))
    return w.gone(start, error=LOST)


def _report_now(w: World, host: str) -> HostReport:
    ids = tuple(sorted(w.view.on_host.get(HostId(host), set())))
    used = sum(w.view.instances[i].record.reserve_bytes for i in ids) // MIB
    return report(host, {"h0": 1000, "h1": 700}[host], used, instances=tuple(InstanceId(i) for i in ids))


def _never_overcommitted(w: World) -> None:
    for host in w.view.hosts.values():
        for device in host.devices.values():
            held = [w.view.instances[i].record for i in w.view.on_host.get(host.host_id, ())]
            assert device.reserved == sum(r.reserve_bytes for r in held)
            assert device.n_workers == len(held)
            assert device.reserved <= device.device.memory_bytes
            assert 0 <= device.releasing <= device.reserved


@settings(max_examples=150, deadline=None)
@given(plan=histories)
def test_no_device_is_ever_overcommitted(plan: list[Step]) -> None:
    _play(plan)


@settings(max_examples=50, deadline=None)
@given(plan=histories)
def test_the_same_events_give_the_same_decisions(plan: list[Step]) -> None:
    assert _play(plan)[1] == _play(plan)[1]


@settings(max_examples=100, deadline=None)
@given(plan=histories)
@example(plan=[("ask", 0), ("ready", 0), ("wait", 1), ("ask", 0), ("gone", 1), ("ask", 0), ("ready", 0)])
def test_whoever_waits_in_the_end_is_served_when_room_and_hosts_are_there(plan: list[Step]) -> None:
    w, _ = _play(plan)
    w.see(_report_now(w, "h0"), _report_now(w, "h1"), report("h2", 10_000), report("h3", 10_000))
    w.later(40.0)
    for name, action in w.view.actions.items():
        # a worker that is ready and idle takes a request without a decision of the scheduler
        slots = [i for i in w.view.of_action(name) if i.state in (STARTING, READY)]
        assert len(action.waiting) <= len(slots) or len(w.view.action(name).instances) >= 8

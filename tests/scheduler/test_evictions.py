"""Which instances to evict: the indexed answer compared with a literal rule that inspects all instances and hosts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import pytest
from hypothesis import given, settings

from gateway.scheduler.events import ActionFacts
from gateway.scheduler.policy.evictions import evictions
from gateway.scheduler.view import evictable_memory
from gateway.scheduler.view.cluster import SERVING, ClusterView
from gateway.scheduler.view.entries import InstanceView
from gateway.scheduler.view.evictable_memory import Where
from gateway.scheduler.view.hosts import DeviceView
from relay.protocol.messages import DemandRemoved, InstanceChanged
from tests.scheduler.cluster import steps
from tests.scheduler.facts import GONE, MIB, OTHER, READY, chat, demand, function, hello, report
from tests.scheduler.test_group_histories import ACTIONS, histories, play
from tests.scheduler.world import World
from thaw.host import Device, HostReport
from thaw.ids import ActionName, ActivationId, CommandId, GroupId, HostId, InstanceId
from thaw.instance import InstanceRecord, InstanceState, StartMode

# the rule ------------------------------------------------------------------------------------------------------------


def plain(view: ClusterView, facts: ActionFacts, needs: Sequence[int]) -> list[InstanceView]:
    idle_ones = [v for v in view.instances.values() if v.record.takes_requests and view.may_go(v) and spare(view, v)]
    idle_ones.sort(key=lambda v: (v.idle_since_s or 0.0, v.record.instance_id))
    going = {(v.record.host_id, v.record.device) for v in view.instances.values() if v.releasing is not None}
    taken: dict[Where, int] = {}
    for need in needs:
        at = free_for(view, facts, need, taken, going)
        if at is None:
            return longest_idle(view, facts, need, taken, idle_ones)
        taken[at] = taken.get(at, 0) + need
    return []


def spare(view: ClusterView, v: InstanceView) -> bool:
    owner = view.action(v.record.action)
    least = 0 if owner.facts is None else owner.facts.min_instances
    version = owner.facts.version if owner.facts else None
    serving = [o for o in map(view.instances.get, owner.instances) if o and o.state in SERVING and o.releasing is None]
    current = [o for o in serving if o.record.takes_requests and version in (None, o.record.action_version)]
    return not owner.waiting and len(current) > least


def free_for(
    view: ClusterView, facts: ActionFacts, need: int, taken: Mapping[Where, int], going: Collection[Where]
) -> Where | None:
    for host in view.live_hosts():
        for d in host.room(for_model=facts.is_llm).devices:
            if d.free - taken.get((host.host_id, d.device.name), 0) >= need:
                return host.host_id, d.device.name
    for where in sorted(going):
        device = device_of(view, facts, where)
        if device is not None and device.free + device.releasing - taken.get(where, 0) >= need:
            return where
    return None


def longest_idle(
    view: ClusterView, facts: ActionFacts, need: int, taken: Mapping[Where, int], idle_ones: Sequence[InstanceView]
) -> list[InstanceView]:
    victims: dict[Where, dict[InstanceId, InstanceView]] = {}
    gained: dict[Where, int] = {}
    for head in idle_ones:
        for member in view.members(head.record.group_id):
            where = member.record.host_id, member.record.device
            if (device := device_of(view, facts, where)) is None:
                continue
            gained[where] = gained.get(where, 0) + member.record.reserve_bytes
            victims.setdefault(where, {})[head.record.instance_id] = head
            if device.free + device.releasing - taken.get(where, 0) + gained[where] >= need:
                return list(victims[where].values())
    return []


def device_of(view: ClusterView, facts: ActionFacts, where: Where) -> DeviceView | None:
    host = view.hosts.get(where[0])
    if host is None or host.draining:
        return None
    return next((d for d in host.room(for_model=facts.is_llm).devices if d.device.name == where[1]), None)


def ids(victims: Sequence[InstanceView]) -> list[str]:
    return [v.record.instance_id for v in victims]


NEEDS = [(mb * MIB,) for mb in (1, 300, 900, 1400, 2000, 2400, 9000)] + [(900 * MIB,) * 2, (1400 * MIB, 700 * MIB)]
ASKING = (chat(name=ActionName("guest/new")), hello(name=OTHER), *ACTIONS)


def agrees(view: ClusterView) -> None:
    for facts in ASKING:
        for needs in NEEDS:
            assert ids(evictions(view, facts, needs)) == ids(plain(view, facts, needs))
    for host in view.live_hosts():
        devices = host.room(for_model=True).devices
        could = [(view.idle.could_have((host.host_id, d.device.name)), d.n_workers) for d in devices]
        assert list(view.idle.emptied(host).gpus) == could


# histories -----------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(history=histories)
def test_in_every_history_of_groups_the_same_ones_are_evicted(history: list[tuple[str, int]]) -> None:
    play(history, lambda c: agrees(c.w.view))


crowd_steps = steps(
    5, 60, "put put put put idle idle busy gone wait serve facts delete report drain lose release refuse sleep", 11, 7
)
KINDS = (("A10",), ("A10", "cpu"), ("cpu",), ("A10", "V100"))


def host_report(i: int, seen: int, *, draining: bool = False) -> HostReport:
    devices = tuple(Device(f"{kind}:{d}", kind, 2500 * MIB, 2500 * MIB) for d, kind in enumerate(KINDS[i % 4]))
    return HostReport(HostId(f"h{i}"), "b", "a:1", devices, 8, 1e9, "none", "process", 0, seen, draining=draining)


class Crowd:
    """Instances of six actions, two of them with a minimum, on four hosts.  Their reports need not make sense."""

    def __init__(self) -> None:
        self.w = World()
        self.draining: set[int] = set()
        self.lost: set[int] = set()
        for a in range(6):
            self.see(a, "1")
        self.beat()

    def see(self, a: int, version: str) -> None:
        self.w.deploy(function(f"guest/f{a}", version=version, min_instances=a // 4))

    def beat(self) -> None:
        seen, there = int(self.w.now * 1000), [i for i in range(4) if i not in self.lost]
        self.w.see(*(host_report(i, seen, draining=i in self.draining) for i in there))

    def put(self, i: int, n: int, state: InstanceState, *, busy: bool = False) -> None:
        """Put group number ``i`` of twelve.  Every third group has two stages, on neighbouring hosts."""
        n_stages = 2 if i % 3 == 0 else 1
        for stage in range(n_stages):
            host = (i + stage) % 4
            kinds = KINDS[host]
            record = InstanceRecord(
                InstanceId(f"i{i}.{stage}"),
                HostId(f"h{host}"),
                ActionName(f"guest/f{i % 6}"),
                str(1 + n % 2),
                GroupId(f"g{i}"),
                state,
                "a:1",
                2 if stage == 0 else 0,
                (400 + 300 * (i % 3)) * MIB,
                f"{kinds[n % len(kinds)]}:{n % len(kinds)}",
                StartMode.COLD,
                inflight=int(busy),
                idle_since_wall_ms=None if busy else int(self.w.now * 1000),
                stage=stage,
                n_stages=n_stages,
            )
            self.w.do(InstanceChanged(record))

    def step(self, what: str, i: int, n: int) -> None:
        name, instance = ActionName(f"guest/f{i % 6}"), self.w.view.instances.get(InstanceId(f"i{i}.0"))
        match what:
            case "put" | "idle" | "busy":
                self.put(i, n, READY, busy=what == "busy")
            case "gone":
                self.put(i, n, GONE)
            case "wait":
                self.w.do(demand(f"a{i}", name))
            case "serve":
                self.w.do(DemandRemoved(ActivationId(f"a{i}"), name))
            case "facts":
                self.see(i % 6, str(1 + n % 2))
            case "delete":
                self.w.view.delete_action(name)
            case "report" | "drain" | "lose":
                self.draining ^= {n % 4} if what == "drain" else set()
                self.lost ^= {n % 4} if what == "lose" else set()
                self.beat()
            case "release" | "refuse" if instance is not None:
                self.w.view.set_releasing(instance, CommandId(self.w.view.new_id()) if what == "release" else None)
            case "sleep":
                self.w.later(float(n))


@pytest.mark.parametrize("few", [0, 64])
@settings(max_examples=120, deadline=None)
@given(history=crowd_steps)
def test_whatever_is_said_of_instances_the_same_ones_are_evicted(few: int, history: list[tuple[str, int, int]]) -> None:
    c = Crowd()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evictable_memory, "FEW_DEVICES", few)
        for step in history:
            c.step(*step)
            agrees(c.w.view)


def test_in_order_of_idleness_until_a_device_has_room_and_only_what_is_on_it() -> None:
    c = Crowd()
    c.lost = {1, 3}
    c.beat()
    for i in (2, 8, 14):  # each takes 1000 of the 2244 MB that the minimum of others leaves: on h2, on h0, on h2
        c.put(i, 0, READY)
        c.w.now += 1
    assert ids(evictions(c.w.view, chat(), (1200 * MIB,))) == []  # this much is free
    assert ids(evictions(c.w.view, chat(), (2000 * MIB,))) == ["i8.0"]
    c.put(8, 0, READY, busy=True)
    assert ids(evictions(c.w.view, chat(), (2000 * MIB,))) == ["i2.0", "i14.0"]
    assert ids(evictions(c.w.view, chat(), (2300 * MIB,))) == []  # more than a device has


def test_room_that_one_worker_of_a_group_takes_is_not_there_for_the_next() -> None:
    """There are two idle instances of 256 MiB and 512 MiB are free.

    Workers that fit exactly evict no instance, and one byte more evicts the first instance.
    """
    w = World(report("h0", 1024))
    names = [ActionName("guest/a"), ActionName("guest/b")]
    for name in names:
        w.deploy(hello(name=name))
        w.serving(name)
        w.now += 1.0
    facts, oldest = chat(), w.view.instances[next(iter(w.view.action(names[0]).instances))]
    for needs in ([256 * MIB, 256 * MIB], [512 * MIB, 0]):
        assert evictions(w.view, facts, needs) == [], needs
    for needs in ([256 * MIB, 256 * MIB + 1], [512 * MIB, 256 * MIB], [512 * MIB, 1]):
        assert ids(evictions(w.view, facts, needs)) == [oldest.record.instance_id], needs


@pytest.mark.parametrize(
    ("needs_mb", "n_going", "expected"),
    [
        ((1024,), 1, ""),
        ((1024, 1024), 0, "a"),
        ((1024, 1024), 1, "b"),
        ((1024, 1024), 2, ""),
        ((1024, 512, 512), 2, ""),
        ((1024, 600, 600), 2, "c"),
        ((1024,) * 3, 2, "c"),
        ((512, 512), 1, ""),
        ((2048,), 1, ""),
        ((600, 600), 1, "b"),
        ((600, 600, 600), 2, "c"),
        ((1024, 1), 1, "b"),
        ((512, 511, 2), 1, "b"),
    ],
)
def test_what_is_going_makes_room_for_as_many_workers_of_a_group_as_it_has_memory_for(
    needs_mb: tuple[int, ...], n_going: int, expected: str
) -> None:
    """There are three hosts, each filled by an idle instance.  The first ``n_going`` instances are being released."""
    w = World(*(report(f"h{i}", 1024) for i in range(3)))
    heads: dict[InstanceId, str] = {}
    for name in "abc":
        w.deploy(function(f"guest/{name}", need_bytes=1024 * MIB))
        start = w.started(ActionName(f"guest/{name}"))
        heads[start.stages[0].instance_id] = name
        w.ready(start)
        w.now += 1.0
    for instance_id in list(heads)[:n_going]:
        w.view.set_releasing(w.view.instances[instance_id], CommandId("c"))
    needs = [mb * MIB for mb in needs_mb]
    assert "".join(heads[v.record.instance_id] for v in evictions(w.view, hello(), needs)) == expected

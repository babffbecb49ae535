"""Random histories of starts, ends and late messages on hosts that keep their models in fetchd's own segments: a host
never refuses, for lack of memory, a start that the scheduler decided.

The hosts are honest.  For a start, each takes from a real slab pool what the plan says, by the rule of fetchd's table
of fetches (an equal segment is shared unless its fetch has failed or was given up).  Their messages arrive late:
messages about instances wait in one stream, and the scheduler reads the report that was written last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from fetchd.segments import Segment, SegmentKey, SegmentStore
from fetchd.slabs import SlabPool
from gateway.scheduler.decisions import CancelGroup, Decision, ReleaseInstance, StageStart, StartGroup
from gateway.scheduler.events import ActionSeen, HostsSeen
from relay.protocol.messages import DemandRemoved, InstanceChanged, ModelInspected
from tests.scheduler.cluster import Step, few_or_many, one, steps
from tests.scheduler.facts import GONE, READY, STARTING, chat, divisible, report
from tests.scheduler.world import World, record_of
from thaw.errors import ErrorInfo, PoolFull
from thaw.host import HeldSegment, HostReport, PoolReport
from thaw.ids import ActionName, GroupId, HostId, InstanceId
from thaw.instance import InstanceRecord
from thaw.logs import Log
from thaw.plan import Plan

KIB = 1024
FAILED = ErrorInfo("StoreUnavailable", "the store broke off")


@dataclass
class Stage:
    """One instance on its host, from its command until its last slab is released."""

    start: StartGroup
    decided: StageStart
    record: InstanceRecord
    segment: Segment | None = None
    has_asked: bool = False
    has_ended: bool = False  # True: GONE was reported, but its slabs are not released yet

    @property
    def holder(self) -> str:
        return str(self.record.instance_id)

    @property
    def may_serve(self) -> bool:
        is_here = self.segment is not None and self.segment.complete
        return is_here and self.record.state is STARTING and not self.has_ended


@dataclass
class Host:
    host_id: HostId
    store: SegmentStore
    pool: SlabPool
    commands: deque[tuple[StartGroup, StageStart] | GroupId | InstanceId] = field(default_factory=deque)
    stages: dict[InstanceId, Stage] = field(default_factory=dict)
    running: dict[str, Segment] = field(default_factory=dict)  # segments that are still fetched, or being given up
    segments: dict[str, Segment] = field(default_factory=dict)
    written: HostReport | None = None


class Cluster:
    """``words`` are the hosts' messages about instances that the scheduler has not read yet."""

    def __init__(
        self,
        stores: Iterable[tuple[SegmentStore, SlabPool]],
        models: Iterable[tuple[int, int]],
        sizes: Iterable[int | None],
    ) -> None:
        self.clock_ms = 1_000
        self.hosts = [Host(HostId(f"h{i}"), store, pool) for i, (store, pool) in enumerate(stores)]
        for host in self.hosts:
            self.write(host)
        self.w = World(*self.reports(), relay_url="redis://relay:1")
        self.words: deque[InstanceRecord] = deque()
        self.actions: list[ActionName] = []
        for i, ((layer, entry), n_stages) in enumerate(zip(models, sizes, strict=True)):
            facts = replace(divisible(layer=layer * KIB, entry=entry * KIB, n_layers=6), uri=f"s3://m/{i}")
            name = ActionName(f"guest/a{i}")
            self.actions.append(name)
            shape = {"max_stages": 4, "forced_stages": n_stages, "slots": 1, "need_bytes": 1024 * KIB}
            self.tell(ActionSeen(chat(name=name, model_uri=facts.uri, keep_alive_s=1.0, slo_ttft_s=60.0, **shape)))
            self.tell(ModelInspected(facts.uri, HostId("h0"), facts))

    # the scheduler's side ------------------------------------------------------------------------------------------

    def tell(self, event: object) -> None:
        self.carry_out(self.w.do(event))

    def carry_out(self, decided: Iterable[Decision]) -> None:
        for decision in decided:
            match decision:
                case StartGroup():
                    for stage in decision.stages:
                        self.host(stage.host_id).commands.append((decision, stage))
                case CancelGroup():
                    self.host(decision.host_id).commands.append(decision.group_id)
                case ReleaseInstance():
                    self.host(decision.host_id).commands.append(decision.instance_id)

    def read_word(self) -> None:
        if self.words:
            record = self.words.popleft()
            if record.state is READY:
                group = self.w.view.groups.get(record.group_id)
                for activation_id in () if group is None else tuple(group.activation_ids):
                    self.tell(DemandRemoved(activation_id, record.action))
            self.tell(InstanceChanged(record))

    def read_reports(self) -> None:
        self.tell(HostsSeen(self.reports()))

    def reports(self) -> tuple[HostReport, ...]:
        return tuple(h.written for h in self.hosts if h.written is not None)

    # the hosts' side -----------------------------------------------------------------------------------------------

    def host(self, host_id: HostId) -> Host:
        return next(h for h in self.hosts if h.host_id == host_id)

    def tick(self) -> int:
        self.clock_ms += 1
        return self.clock_ms

    def write(self, host: Host) -> None:
        seen_ms = self.tick()
        users = tuple(sorted(host.stages))
        held = tuple(
            HeldSegment(s.key, s.n_slabs, s.complete, tuple(i for i in users if i in s.holders))
            for s in host.store.statuses()
            if s.holders
        )
        pool = PoolReport(host.pool.slab_bytes, host.pool.n_slabs, seen_ms, held, users)
        link = {"network_bytes_per_s": 25e6}
        host.written = report(host.host_id, 1 << 20, seen_wall_ms=seen_ms, pool=pool, instances=users, **link)

    def obey(self, host: Host) -> None:
        command = host.commands.popleft()
        if isinstance(command, tuple):
            start, stage = command
            record = record_of(start, STARTING, stage.stage, created_wall_ms=self.tick())
            host.stages[stage.instance_id] = Stage(start, stage, record)
            self.words.append(record)
        else:
            for mine in [s for s in host.stages.values() if command in (s.record.group_id, s.record.instance_id)]:
                self.end(mine)

    def ask(self, host: Host, mine: Stage) -> None:
        """Ask fetchd for the stage's bytes.  If the pool has no room for them, the scheduler's promise was broken."""
        plan = mine.start.plan
        at = plan.stages[mine.decided.stage]
        assert plan.model is not None
        key = SegmentKey(plan.model.uri, plan.model.sha256, at.first_ranges, at.later_ranges)
        mine.has_asked = True
        mine.segment = host.store.find(key, mine.holder)
        if mine.segment is None:
            try:
                mine.segment = host.store.create(key, mine.holder)
            except PoolFull as e:
                raise AssertionError(self.broken(host, plan, e)) from e
            host.store.hold(mine.segment.segment_id, "running")
            host.running[mine.segment.segment_id] = mine.segment

    def broken(self, host: Host, plan: Plan, error: PoolFull) -> str:
        held = [(s.n_slabs, s.complete, s.holders) for s in host.store.statuses()]
        return f"{host.host_id} refused {plan.action} in {len(plan.stages)} stages: {error.message}; it has {held}"

    def complete(self, host: Host, n: int, *, fails: bool) -> None:
        """Complete some fetch, or let it fail: then the stages that wait for it are told."""
        segment = host.running.pop(sorted(host.running)[n % len(host.running)])
        if not segment.given_up and not fails:
            segment.finish()
        else:
            segment.fail(FAILED)
            for mine in list(host.stages.values()):
                if mine.segment is segment:
                    self.end(mine)
        host.store.drop(segment, "running")

    def end(self, mine: Stage) -> None:
        """Report the stage as GONE.  This happens before anything of it is released."""
        if not mine.has_ended:
            mine.has_ended = True
            self.words.append(replace(mine.record, state=GONE, error=FAILED))

    def bury(self, host: Host, mine: Stage) -> None:
        del host.stages[mine.record.instance_id]
        if mine.segment is None:
            return
        others = [s for s in host.stages.values() if s.segment is mine.segment]
        if not mine.segment.complete and not others:
            mine.segment.given_up = True
        host.store.drop(mine.segment, mine.holder)

    def ready(self, mine: Stage) -> None:
        mine.record = replace(mine.record, state=READY, idle_since_wall_ms=self.tick())
        self.words.append(mine.record)


histories = steps(
    60,
    200,
    "ask ask obey obey obey obey fetch fetch fetch fetch complete complete complete fail ready ready ready end bury"
    " bury write write write read read word word word word later",
    40,
)
# the KiB of a slab, and the number of slabs of a host
pools = st.lists(st.tuples(st.sampled_from([16, 64]), st.integers(3, 12)), min_size=1, max_size=4)
# the KiB of a layer and of the embedding
model_sizes = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 60)), min_size=2, max_size=3)
n_stages = st.lists(st.sampled_from([None, 1, 2, 4]), min_size=3, max_size=3)


def play(c: Cluster, history: list[Step]) -> None:
    """Play a history.  The number of each step chooses one of the hosts or stages to which the step applies."""
    for what, n in history:
        stages = [(h, s) for h in c.hosts for s in h.stages.values()]
        match what:
            case "ask":
                c.carry_out(c.w.ask(c.actions[n % len(c.actions)]))
            case "obey":
                for host in one([h for h in c.hosts if h.commands], n):
                    c.obey(host)
            case "fetch":  # also for a stage that has ended: its request to fetchd may have been on its way
                for host, mine in one([(h, s) for h, s in stages if not s.has_asked], n):
                    c.ask(host, mine)
            case "complete" | "fail":
                for host in one([h for h in c.hosts if h.running], n):
                    c.complete(host, n, fails=what == "fail")
            case "ready":
                for _, mine in one([(h, s) for h, s in stages if s.may_serve], n):
                    c.ready(mine)
            case "end":
                for _, mine in one([(h, s) for h, s in stages if not s.has_ended], n):
                    c.end(mine)
            case "bury":
                for host, mine in one([(h, s) for h, s in stages if s.has_ended], n):
                    c.bury(host, mine)
            case "write":
                c.write(c.hosts[n % len(c.hosts)])
            case "read":
                c.read_reports()
            case "word":
                c.read_word()
            case "later":
                c.carry_out(c.w.later(float(n % 5)))


@contextmanager
def real_pools(sizes: Iterable[tuple[int, int]]) -> Iterator[list[tuple[SegmentStore, SlabPool]]]:
    with ExitStack() as stack:
        made = []
        for slab_kib, count in sizes:
            pool = SlabPool(count, slab_kib * KIB, Log("test"))
            stack.callback(pool.close)
            store = SegmentStore(pool, retain=True)
            stack.callback(store.close)
            made.append((store, pool))
        yield made


@few_or_many(100, 2_000, sizes=pools, models=model_sizes, stages=n_stages, history=histories)
def test_an_honest_host_never_refuses_for_memory_what_the_scheduler_decided(
    sizes: list[tuple[int, int]], models: list[tuple[int, int]], stages: list[int | None], history: list[Step]
) -> None:
    with real_pools(sizes) as stores:
        play(Cluster(stores, models, stages[: len(models)]), history)

"""Stages of a pipeline that become workers: the command, its outcome, and an invoker that is killed in between."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import pytest

from relay.protocol.messages import Consolidate, ConsolidationFailed, InstanceChanged
from tests.invoker.llm_host import LlmHost, abandon, fake_engine
from tests.invoker.platform import opened, until
from thaw import wire
from thaw.ids import GroupId, InstanceId, own_group
from thaw.instance import InstanceRecord, InstanceState
from thaw.tracing.trace import Phase, event

__all__ = ["fake_engine"]

pytestmark = pytest.mark.usefixtures("fake_engine")

REPORT = {"rounds": 3, "n_bytes": 4096, "tail_bytes": 64, "wait_s": 0.5, "stall_s": 0.002}
NO_ROOM = {"code": "ModelUnsupported", "message": "no room for the KV cache", "hint": ""}
PHASES = (Phase.CONSOLIDATE_BEGIN, Phase.CONSOLIDATE_END)


class FoldingHost(LlmHost):
    def consolidate(self, record: InstanceRecord) -> str:
        return self.send(Consolidate(record.instance_id, record.group_id))

    def telling(self, record: InstanceRecord) -> TextIO:
        """What the container says of its /consolidate.  Opening the FIFO waits until the container is in it."""
        return opened(self.pipe(record.instance_id, "consolidate"))

    def tell(self, record: InstanceRecord, **reply: object) -> None:
        events = [wire.to_plain(event(name, group_id=record.group_id)) for name in PHASES]
        with self.telling(record) as fifo:
            fifo.write(json.dumps({**reply, "events": events}) + "\n")

    @contextmanager
    def switched(self, record: InstanceRecord) -> Iterator[TextIO]:
        """The engine has become one worker, and its container has not replied yet."""
        live = self.live(record.instance_id)
        with self.telling(record) as fifo:
            fifo.write("switched\n")
            until(lambda: self.agent._consolidating.has_switched(live))
            yield fifo

    def announced(self, record: InstanceRecord, times: int = 1, **fields: Any) -> InstanceRecord:
        def matches(m: Any) -> bool:
            return isinstance(m, InstanceChanged) and all(
                getattr(m.instance, name) == value
                for name, value in {"instance_id": record.instance_id, **fields}.items()
            )

        def often_enough(m: Any) -> bool:
            return matches(m) and sum(map(matches, self.events.seen)) >= times

        found: InstanceRecord = self.events.wait(often_enough, f"{fields}").instance
        return found

    def becomes_one_worker(self, record: InstanceRecord) -> InstanceRecord:
        """A later stage gets a group of its own."""
        group_id = own_group(record.group_id, record.stage) if record.stage else record.group_id
        return self.announced(record, n_stages=1, is_consolidating=False, group_id=group_id, stage=0)

    def cannot(self, record: InstanceRecord) -> ConsolidationFailed:
        found: ConsolidationFailed = self.events.wait(
            lambda m: isinstance(m, ConsolidationFailed) and m.instance_id == record.instance_id, "failure"
        )
        return found

    def labelled(self, record: InstanceRecord) -> InstanceRecord:
        """The record that the next invoker would find."""
        records = [wire.loads(InstanceRecord, o.labels["record"]) for o in self.agent.driver.list_owned()]
        return next(r for r in records if r.instance_id == record.instance_id)

    def has_traced(self, record: InstanceRecord) -> bool:
        return set(PHASES) <= {e.name for e in self.records.trace(record.group_id)}


@pytest.fixture
def host(valkey_url: str, run_dir: Path) -> Iterator[FoldingHost]:
    with FoldingHost(valkey_url, run_dir) as host:
        yield host


@pytest.fixture
def old(valkey_url: str, run_dir: Path) -> FoldingHost:
    """An invoker that the test abandons."""
    host = FoldingHost(valkey_url, run_dir)
    host.start()
    return host


def successor(old: FoldingHost) -> FoldingHost:
    return FoldingHost(old.url, old.run_dir, old.fetchd)


def test_a_stage_0_that_becomes_one_worker_is_announced_as_one_with_the_slots_of_one(host: FoldingHost) -> None:
    first, second = host.ready_group()
    assert (first.n_stages, first.slots, first.is_consolidating) == (2, 6, False)
    host.consolidate(first)
    assert host.announced(first, is_consolidating=True).n_stages == 2
    host.tell(first, **REPORT)
    one = host.becomes_one_worker(first)
    assert (one.state, one.slots, one.reserve_bytes) == (InstanceState.READY, 3, first.reserve_bytes)
    until(lambda: host.has_traced(first))
    host.cancel(first.group_id)  # ends the stages that are left, and not the worker
    host.gone(second.instance_id)
    assert not host.live(first.instance_id).in_group
    host.release(first.instance_id)
    assert host.gone(first.instance_id).error is None


def test_a_later_stage_becomes_a_worker_of_a_group_of_its_own_and_takes_requests(host: FoldingHost) -> None:
    first, second = host.ready_group()
    host.consolidate(second)
    waiting = host.announced(second, is_consolidating=True)
    assert (waiting.stage, waiting.n_stages, waiting.group_id) == (1, 2, second.group_id)
    host.tell(second, **REPORT)
    one = host.becomes_one_worker(second)
    assert (one.state, one.slots, one.reserve_bytes) == (InstanceState.READY, 3, second.reserve_bytes)
    assert one.idle_since_wall_ms > second.idle_since_wall_ms
    until(lambda: host.has_traced(second))
    run = host.agent.fleet.begin_run(second.instance_id)
    assert run.live.record.takes_requests
    host.agent.fleet.end_run(run)
    host.cancel(second.group_id)  # ends the other stage, and not this worker
    host.gone(first.instance_id)
    host.release(second.instance_id)
    assert host.gone(second.instance_id).error is None


@pytest.mark.parametrize("stage", [0, 1])
def test_a_container_that_cannot_is_a_stage_still_and_may_be_asked_again(host: FoldingHost, stage: int) -> None:
    mine = host.ready_group()[stage]
    host.consolidate(mine)
    host.tell(mine, status=502, error="x", info=NO_ROOM)
    said = host.cannot(mine)
    assert (said.group_id, said.error.code, said.error.message) == (mine.group_id, NO_ROOM["code"], NO_ROOM["message"])
    now = host.live(mine.instance_id).record
    assert (now.stage, now.n_stages, now.slots) == (stage, 2, mine.slots)
    assert (now.group_id, now.is_consolidating) == (mine.group_id, False)
    assert host.has_traced(mine)
    host.consolidate(mine)
    host.tell(mine, **REPORT)
    host.becomes_one_worker(mine)


def test_a_repeated_command_begins_nothing_anew_and_says_again_what_became_of_it(host: FoldingHost) -> None:
    first, _ = host.ready_group()
    host.consolidate(first)
    host.announced(first, is_consolidating=True)
    host.consolidate(first)
    host.announced(first, times=2, is_consolidating=True)
    host.tell(first, **REPORT)
    host.becomes_one_worker(first)
    host.consolidate(first)
    host.announced(first, times=2, n_stages=1)
    assert not [m for m in host.events.seen if isinstance(m, ConsolidationFailed)]


def test_an_instance_that_is_not_here_is_refused(host: FoldingHost) -> None:
    unknown = host.send(Consolidate(InstanceId("none"), GroupId("g")))
    assert host.events.refused(unknown).error.code == "InstanceGone"


def test_a_cancel_that_comes_between_the_switch_and_its_announcement_ends_only_the_other_stages(
    host: FoldingHost,
) -> None:
    first, second = host.ready_group()
    host.consolidate(first)
    with host.switched(first) as fifo:
        host.cancel(first.group_id)
        host.gone(second.instance_id)
        fifo.write(json.dumps(REPORT) + "\n")
    assert host.becomes_one_worker(first).state is InstanceState.READY


def test_a_cancel_before_the_switch_ends_the_whole_group(host: FoldingHost) -> None:
    stages = host.ready_group()
    host.consolidate(stages[0])
    host.announced(stages[0], is_consolidating=True)
    host.cancel(stages[0].group_id)
    for record in stages:
        host.gone(record.instance_id)
    until(lambda: host.agent.fleet.all() == [])


def test_after_the_deadline_the_scheduler_hears_of_it_and_a_later_switch_counts_all_the_same(
    valkey_url: str, run_dir: Path
) -> None:
    with FoldingHost(valkey_url, run_dir, consolidate_timeout_s=0.3) as host:
        first, _ = host.ready_group()
        host.consolidate(first)
        assert host.cannot(first).error.code == "Unavailable"
        host.tell(first, **REPORT)
        host.becomes_one_worker(first)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("when", ["before the successor came", "after it came", "before the last invoker was killed"])
def test_the_successor_of_an_invoker_that_was_killed_finds_what_became_of_a_stage(
    old: FoldingHost, stage: int, when: str
) -> None:
    stages = old.ready_group()
    mine, other = stages[stage], stages[1 - stage]
    old.consolidate(mine)
    old.announced(mine, is_consolidating=True)
    if when == "before the last invoker was killed":
        old.tell(mine, **REPORT)
        old.becomes_one_worker(mine)
        until(lambda: old.labelled(mine).n_stages == 1)
    abandon(old)
    if when == "before the successor came":
        old.tell(mine, **REPORT)
    with successor(old) as new:
        if when == "after it came":
            waiting = new.announced(mine, is_consolidating=True)
            assert (waiting.n_stages, waiting.group_id) == (2, mine.group_id)
            new.tell(mine, **REPORT)
        one = new.becomes_one_worker(mine)
        assert (one.slots, one.state) == (3, InstanceState.READY)
        until(lambda: new.has_traced(mine))
        until(lambda: (new.labelled(mine).n_stages, new.labelled(mine).group_id) == (1, one.group_id))
        new.cancel(mine.group_id)
        new.gone(other.instance_id)
        assert new.live(mine.instance_id)
        new.release(mine.instance_id, only_idle=False)
        new.gone(mine.instance_id)


def test_an_invoker_that_takes_over_announces_what_its_container_is_before_the_report_of_it_comes(
    old: FoldingHost,
) -> None:
    first, _ = old.ready_group()
    old.consolidate(first)
    with old.switched(first) as fifo:
        abandon(old)
        with successor(old) as new:
            assert new.announced(first, is_consolidating=True).n_stages == 1
            fifo.write(json.dumps(REPORT) + "\n")
            fifo.close()
            assert new.becomes_one_worker(first).slots == 3

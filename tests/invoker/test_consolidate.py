"""Stages of a pipeline that become workers: the command, its outcome, and an invoker that is killed in between."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from invoker.drivers.programs import PROGRAMS
from relay.protocol.messages import Consolidate, ConsolidationFailed, InstanceChanged
from tests.invoker import fake_llm
from tests.invoker.fake_fetchd import FakeFetchd
from tests.invoker.platform import Host, opened, until
from tests.invoker.test_groups import GroupHost, abandon, two_stages
from thaw import wire
from thaw.action import KIND_LLM
from thaw.ids import GroupId, InstanceId, own_group
from thaw.instance import InstanceRecord, InstanceState
from thaw.tracing.trace import Phase, event

REPORT = {"rounds": 3, "n_bytes": 4096, "tail_bytes": 64, "wait_s": 0.5, "stall_s": 0.002}
NO_ROOM = {"code": "ModelUnsupported", "message": "no room for the KV cache", "hint": ""}


class FoldingHost(GroupHost):
    def consolidate(self, record: InstanceRecord) -> str:
        return self.send(Consolidate(record.instance_id, record.group_id))

    def tell(self, record: InstanceRecord, *said: object) -> None:
        """Let the container go on with /consolidate.  Opening the FIFO waits until the container is in it."""
        with opened(self.run_dir / f"door-{record.instance_id[-6:]}.consolidate") as fifo:
            fifo.writelines((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in said)

    def becomes_one_worker(self, record: InstanceRecord) -> InstanceRecord:
        return self.announced(record, n_stages=1, is_consolidating=False)

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

    def failed(self, record: InstanceRecord) -> ConsolidationFailed:
        found: ConsolidationFailed = self.events.wait(
            lambda m: isinstance(m, ConsolidationFailed) and m.instance_id == record.instance_id, "failure"
        )
        return found


def made(url: str, run_dir: Path, **settings: Any) -> FoldingHost:
    host = FoldingHost(url, run_dir, **settings)
    host.fetchd = host.agent.fleet.fetch = FakeFetchd(run_dir)
    return host


@pytest.fixture(autouse=True)
def _fake_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROGRAMS, KIND_LLM, (fake_llm.__file__,))


@pytest.fixture
def host(valkey_url: str, run_dir: Path) -> Iterator[FoldingHost]:
    with made(valkey_url, run_dir) as host:
        yield host


def replied(**fields: object) -> dict[str, object]:
    return {**REPORT, **fields}


def events_of(record: InstanceRecord) -> list[Any]:
    names = (Phase.CONSOLIDATE_BEGIN, Phase.CONSOLIDATE_END)
    return [wire.to_plain(event(name, group_id=record.group_id)) for name in names]


def labelled(host: Host, instance_id: InstanceId) -> InstanceRecord:
    """Return the record that the next invoker would find."""
    records = [wire.loads(InstanceRecord, o.labels["record"]) for o in host.agent.driver.list_owned()]
    return next(r for r in records if r.instance_id == instance_id)


def traced(host: Host, group_id: GroupId) -> bool:
    return {Phase.CONSOLIDATE_BEGIN, Phase.CONSOLIDATE_END} <= {e.name for e in host.records.trace(group_id)}


def test_a_stage_0_that_becomes_one_worker_is_announced_as_one_with_the_slots_of_one(host: FoldingHost) -> None:
    first, second = host.ready_group(two_stages())
    assert (first.n_stages, first.slots, first.is_consolidating) == (2, 6, False)
    host.consolidate(first)
    assert host.announced(first, is_consolidating=True).n_stages == 2
    host.tell(first, replied(events=events_of(first)))
    one = host.becomes_one_worker(first)
    assert (one.state, one.slots, one.stage, one.reserve_bytes) == (InstanceState.READY, 3, 0, first.reserve_bytes)
    until(lambda: traced(host, first.group_id))
    host.cancel(first.group_id)  # ends the stages that are left, and not the worker
    host.events.instance(second.instance_id, InstanceState.GONE)
    live = host.agent.fleet.find(first.instance_id)
    assert live is not None
    assert not live.in_group
    host.release(first.instance_id)
    assert host.events.instance(first.instance_id, InstanceState.GONE).error is None


def test_a_container_that_cannot_is_a_pipeline_still_and_may_be_asked_again(host: FoldingHost) -> None:
    first, _ = host.ready_group(two_stages())
    host.consolidate(first)
    host.tell(first, {"status": 502, "error": "x", "info": NO_ROOM, "events": events_of(first)})
    failed = host.failed(first)
    assert (failed.group_id, failed.error.code, failed.error.message) == (
        first.group_id,
        "ModelUnsupported",
        "no room for the KV cache",
    )
    live = host.agent.fleet.find(first.instance_id)
    assert live is not None
    assert (live.record.n_stages, live.record.slots, live.record.is_consolidating) == (2, 6, False)
    assert traced(host, first.group_id)
    host.consolidate(first)
    host.tell(first, replied())
    host.becomes_one_worker(first)


def test_a_repeated_command_begins_nothing_anew_and_says_again_what_became_of_it(host: FoldingHost) -> None:
    first, _ = host.ready_group(two_stages())
    host.consolidate(first)
    host.announced(first, is_consolidating=True)
    host.consolidate(first)
    host.announced(first, times=2, is_consolidating=True)
    host.tell(first, replied())
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
    first, second = host.ready_group(two_stages())
    host.consolidate(first)
    host.announced(first, is_consolidating=True)
    live = host.agent.fleet.find(first.instance_id)
    assert live is not None
    with (host.run_dir / f"door-{first.instance_id[-6:]}.consolidate").open("w", buffering=1) as fifo:
        fifo.write("switched\n")
        until(lambda: host.agent._consolidating.has_switched(live))
        host.cancel(first.group_id)
        host.events.instance(second.instance_id, InstanceState.GONE)
        fifo.write(json.dumps(replied()) + "\n")
    assert host.becomes_one_worker(first).state is InstanceState.READY


def test_a_cancel_before_the_switch_ends_the_whole_group(host: FoldingHost) -> None:
    first, second = host.ready_group(two_stages())
    host.consolidate(first)
    host.announced(first, is_consolidating=True)
    host.cancel(first.group_id)
    for record in (first, second):
        host.events.instance(record.instance_id, InstanceState.GONE)
    until(lambda: host.agent.fleet.all() == [])


def test_after_the_deadline_the_scheduler_hears_of_it_and_a_later_switch_counts_all_the_same(
    valkey_url: str, run_dir: Path
) -> None:
    with made(valkey_url, run_dir, consolidate_timeout_s=0.3) as host:
        first, _ = host.ready_group(two_stages())
        host.consolidate(first)
        assert host.failed(first).error.code == "Unavailable"
        host.tell(first, replied())
        host.becomes_one_worker(first)


@pytest.mark.parametrize("when", ["before the successor came", "after it came"])
def test_the_successor_of_an_invoker_that_was_killed_in_the_middle_finds_what_became_of_it(
    valkey_url: str, run_dir: Path, when: str
) -> None:
    old = made(valkey_url, run_dir)
    old.start()
    first, second = old.ready_group(two_stages())
    old.consolidate(first)
    old.announced(first, is_consolidating=True)
    abandon(old)
    if when == "before the successor came":
        old.tell(first, "switched", replied(events=events_of(first)))
    new = FoldingHost(valkey_url, run_dir)
    new.fetchd = new.agent.fleet.fetch = old.fetchd
    with new:
        if when == "after it came":
            assert new.announced(first, is_consolidating=True).n_stages == 2
            new.tell(first, replied(events=events_of(first)))
        one = new.becomes_one_worker(first)
        assert (one.slots, one.state) == (3, InstanceState.READY)
        until(lambda: traced(new, first.group_id))
        until(lambda: labelled(new, first.instance_id).n_stages == 1)
        new.cancel(first.group_id)
        new.events.instance(second.instance_id, InstanceState.GONE)
        assert new.agent.fleet.find(first.instance_id) is not None
        new.release(first.instance_id, only_idle=False)
        new.events.instance(first.instance_id, InstanceState.GONE)


def test_an_invoker_that_takes_over_announces_what_its_container_is_before_the_report_of_it_comes(
    valkey_url: str, run_dir: Path
) -> None:
    old = made(valkey_url, run_dir)
    old.start()
    first, _ = old.ready_group(two_stages())
    old.consolidate(first)
    live = old.agent.fleet.find(first.instance_id)
    assert live is not None
    assert live.handle is not None
    with (run_dir / f"door-{first.instance_id[-6:]}.consolidate").open("w", buffering=1) as fifo:
        fifo.write("switched\n")
        until(lambda: old.agent._consolidating.has_switched(live))
        abandon(old)
        new = FoldingHost(valkey_url, run_dir)
        new.fetchd = new.agent.fleet.fetch = old.fetchd
        with new:
            assert new.announced(first, is_consolidating=True).n_stages == 1
            fifo.write(json.dumps(replied()) + "\n")
            fifo.close()
            assert new.becomes_one_worker(first).slots == 3


# a later stage that stays ------------------------------------------------------------------------------------------


def becomes_second_worker(host: FoldingHost, second: InstanceRecord) -> InstanceRecord:
    own = own_group(second.group_id, 1)
    return host.announced(second, n_stages=1, is_consolidating=False, group_id=own, stage=0)


def test_a_later_stage_becomes_a_worker_of_a_group_of_its_own_and_takes_requests(host: FoldingHost) -> None:
    first, second = host.ready_group(two_stages())
    host.consolidate(second)
    waiting = host.announced(second, is_consolidating=True)
    assert (waiting.stage, waiting.n_stages, waiting.group_id) == (1, 2, second.group_id)
    host.tell(second, replied(events=events_of(second)))
    one = becomes_second_worker(host, second)
    assert (one.state, one.slots, one.reserve_bytes) == (InstanceState.READY, 3, second.reserve_bytes)
    assert one.idle_since_wall_ms is not None
    assert second.idle_since_wall_ms is not None
    assert one.idle_since_wall_ms > second.idle_since_wall_ms
    until(lambda: traced(host, second.group_id))
    run = host.agent.fleet.begin_run(second.instance_id)
    assert run.live.record.takes_requests
    host.agent.fleet.end_run(run)
    host.cancel(second.group_id)  # ends the other stage, and not this worker
    host.events.instance(first.instance_id, InstanceState.GONE)
    host.release(second.instance_id)
    assert host.events.instance(second.instance_id, InstanceState.GONE).error is None


def test_a_later_stage_that_cannot_is_a_stage_still(host: FoldingHost) -> None:
    _, second = host.ready_group(two_stages())
    host.consolidate(second)
    host.tell(second, {"status": 502, "error": "x", "info": NO_ROOM, "events": []})
    assert host.failed(second).group_id == second.group_id
    live = host.agent.fleet.find(second.instance_id)
    assert live is not None
    record = live.record
    assert (record.stage, record.n_stages, record.group_id, record.is_consolidating) == (1, 2, second.group_id, False)


@pytest.mark.parametrize("when", ["before the successor came", "after it came", "before the last invoker was killed"])
def test_a_successor_finds_a_later_stage_as_what_it_is(valkey_url: str, run_dir: Path, when: str) -> None:
    old = made(valkey_url, run_dir)
    old.start()
    _, second = old.ready_group(two_stages())
    old.consolidate(second)
    old.announced(second, is_consolidating=True)
    if when == "before the last invoker was killed":
        old.tell(second, "switched", replied(events=events_of(second)))
        becomes_second_worker(old, second)
        until(lambda: labelled(old, second.instance_id).n_stages == 1)
    abandon(old)
    if when == "before the successor came":
        old.tell(second, "switched", replied(events=events_of(second)))
    new = FoldingHost(valkey_url, run_dir)
    new.fetchd = new.agent.fleet.fetch = old.fetchd
    with new:
        if when == "after it came":
            assert new.announced(second, is_consolidating=True).group_id == second.group_id
            new.tell(second, replied(events=events_of(second)))
        one = becomes_second_worker(new, second)
        assert (one.slots, one.state) == (3, InstanceState.READY)
        until(lambda: traced(new, second.group_id))
        until(lambda: labelled(new, second.instance_id).group_id == one.group_id)
        new.release(second.instance_id, only_idle=False)
        new.events.instance(second.instance_id, InstanceState.GONE)
        new.cancel(second.group_id)
        until(lambda: new.agent.fleet.all() == [])

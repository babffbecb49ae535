"""Stages of a pipeline group on a host: their orders, the stage that takes requests, and the end of a whole group."""

from __future__ import annotations

import http.client
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from invoker.containers.init import group_link, llm_init, slots_in
from invoker.settings import InvokerSettings
from relay.protocol.messages import GroupCredential, GroupLink, StageShape, Start
from relay.state import keys
from tests.invoker.fake_fetchd import FakeFetchd
from tests.invoker.llm_host import CHAT, HALVES, SECRET, SIDECAR, LlmHost, abandon, fake_engine, host, two_stages
from tests.invoker.platform import HOST, until
from thaw.errors import StaleEpoch
from thaw.ids import GroupId, InstanceId, random_hex_id
from thaw.instance import InstanceState
from thaw.plan import StageRole, TransportKind

__all__ = ["fake_engine", "host"]

SETTINGS = InvokerSettings("redis://x", HOST, "/run/thaw", "fetchd.s")


def test_each_stage_is_told_its_role_its_link_and_the_shape_of_all() -> None:
    plan = two_stages()
    asked: list[str] = []

    def credential(reference: str) -> GroupCredential:
        asked.append(reference)
        return SECRET

    link = group_link(plan.transport, credential, "10.0.0.7")
    inits = [llm_init(plan, stage, CHAT, SETTINGS, link) for stage in plan.stages]
    assert asked == [f"thaw:group-credential:{plan.group_id}"]
    assert [(i.stage, i.n_stages, i.layers, i.role) for i in inits] == [
        (0, 2, (0, 3), StageRole.FULL),
        (1, 2, (3, 5), StageRole.LOW),
    ]
    assert {i.link for i in inits} == {GroupLink(TransportKind.REDIS, "redis://relay:1/0", SECRET, "10.0.0.7")}
    # a full stage's reserve must have room for the rest of the weights too; a sidecar is on no device
    assert inits[0].stages == (StageShape((0, 3), 800 << 20, 1000, StageRole.FULL), StageShape((3, 5), 400 << 20, 400))
    assert inits[0].stages == inits[1].stages


def test_a_single_stage_has_neither_link_nor_shapes() -> None:
    plan = LlmHost.llm_plan()
    init = llm_init(plan, plan.stages[0], CHAT, SETTINGS, group_link(plan.transport, lambda _: SECRET, ""))
    assert (init.link, init.stages, init.role) == (None, (), StageRole.FULL)
    assert plan.model is not None
    assert init.model_version == plan.model.version


def test_a_group_takes_a_batch_a_stage_and_takes_it_at_its_first() -> None:
    assert [slots_in(CHAT, stage, 4) for stage in range(4)] == [12, 0, 0, 0]
    assert slots_in(CHAT, 0, 1) == 3


def test_a_ready_group_takes_requests_at_its_first_stage_only(host: LlmHost) -> None:
    first, second = host.ready_group()
    assert (first.stage, first.n_stages, first.slots) == (0, 2, 6)
    assert (second.stage, second.n_stages, second.slots, second.takes_requests) == (1, 2, 0, False)
    assert second.group_id == first.group_id
    status, body = host.run(second.instance_id, {})
    assert (status, body["info"]["code"]) == (410, "InstanceGone")


def test_fetchd_is_asked_for_the_first_part_and_told_of_the_rest(host: LlmHost) -> None:
    host.ready_group()
    asked = {r.stage: (r.ranges, r.later_ranges, r.background) for r in host.fetchd.requests}
    assert asked == {0: ((SIDECAR, HALVES[0]), (HALVES[1],), False), 1: ((SIDECAR, HALVES[1]), (), False)}


def test_a_stage_that_ends_while_its_rest_is_fetched_gives_the_fetch_up(host: LlmHost) -> None:
    first, second = host.ready_group()
    host.release(second.instance_id)
    host.gone(second.instance_id)
    assert "cancel" not in host.fetchd.calls
    host.release(first.instance_id)
    host.gone(first.instance_id)
    until(lambda: "cancel" in host.fetchd.calls)


def test_a_cancelled_group_ends_ready_or_not(host: LlmHost) -> None:
    plan = two_stages()
    starting, ready = host.start_group(plan)
    host.fetchd.ended.set()
    host.tell_init(ready, {"ok": True})
    host.events.instance(ready, InstanceState.READY)
    host.cancel(plan.group_id)
    assert host.failed(starting).message == "its pipeline group was given up"
    assert host.gone(ready).error is None  # no request waits for an answer of a ready follower
    until(lambda: host.agent.fleet.all() == [])
    assert "cancel" in host.fetchd.calls
    assert host.agent.fleet.ledger.holders() == {}


def test_a_cancelled_group_cuts_its_answers_so_that_they_go_on_elsewhere(host: LlmHost) -> None:
    plan = two_stages()
    first, second = host.ready_group(plan)
    connection, response = host.open_run(first.instance_id)
    with host.feed(first.instance_id) as feed:
        feed.write("one\n")
        response.read(4)
        host.cancel(plan.group_id)
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            response.read()
    connection.close()
    assert host.failed(first.instance_id).code == "WorkerLost"
    host.gone(second.instance_id)


def test_a_worker_that_serves_by_itself_outlives_a_cancel_of_its_start(host: LlmHost) -> None:
    record = host.ready_llm()
    host.cancel(record.group_id)
    until(lambda: "cancel" in host.fetchd.calls)
    assert host.agent.fleet.find(record.instance_id) is not None
    host.release(record.instance_id)
    host.gone(record.instance_id)


def test_a_stage_whose_group_has_ended_meanwhile_fails_its_start(host: LlmHost) -> None:
    plan = two_stages()
    host.deploy_llm()
    instance_id = InstanceId(random_hex_id())
    host.send(Start(plan, 1, instance_id))
    assert host.failed(instance_id).code == "WorkerLost"


def test_idle_stages_of_a_group_make_no_room_for_others(host: LlmHost) -> None:
    first, _ = host.ready_group()
    assert host.live(first.instance_id)
    assert host.agent._commands._deps.placing._view().idle == ()


def test_a_restarted_invoker_adopts_every_stage(valkey_url: str, run_dir: Path, fake_engine: None) -> None:
    old = LlmHost(valkey_url, run_dir)
    old.start()
    plan = two_stages()
    stages = old.ready_group(plan)
    pids = [old.pid(r.instance_id) for r in stages]
    abandon(old)
    with LlmHost(valkey_url, run_dir, old.fetchd) as new:
        adopted = [new.events.instance(r.instance_id, InstanceState.READY) for r in stages]
        assert [(a.stage, a.n_stages, a.slots) for a in adopted] == [(0, 2, 6), (1, 2, 0)]
        assert [new.pid(r.instance_id) for r in stages] == pids
        new.cancel(plan.group_id)
        for record in stages:
            new.gone(record.instance_id)
        until(lambda: not old.fetchd.open)
    assert [Path(f"/proc/{pid}").exists() for pid in pids] == [False, False]


def test_a_restarted_invoker_cancels_the_fetches_of_starts_that_ended_with_the_last_one(
    valkey_url: str, run_dir: Path, fake_engine: None
) -> None:
    """fetchd lives on.  Fetches of others than invokers go on."""
    old = LlmHost(valkey_url, run_dir)
    old.start()
    fetchd, plan = old.fetchd, two_stages()
    ids = old.start_group(plan)
    (of_group,) = fetchd.fetching.values()
    names = "adapter-a", "preflight-b", "a model port's"
    fetchd.fetching |= {GroupId(name): replace(of_group, group_id=GroupId(name)) for name in names}
    abandon(old)
    fetchd.fetching[plan.group_id] = of_group  # the old invoker's threads live on in this test, and may have cancelled
    with LlmHost(valkey_url, run_dir, fetchd) as new:
        for instance_id in ids:
            assert new.failed(instance_id).code == "WorkerLost"
        assert set(fetchd.fetching) == {"a model port's"}


def test_a_restarted_invoker_leaves_the_fetches_of_what_it_adopts(
    valkey_url: str, run_dir: Path, fake_engine: None
) -> None:
    old = LlmHost(valkey_url, run_dir)
    old.start()
    record = old.ready_llm()
    (of_group,) = old.fetchd.requests
    abandon(old)
    old.fetchd.fetching[record.group_id] = of_group  # the rest of the model, say
    with LlmHost(valkey_url, run_dir, old.fetchd) as new:
        new.events.instance(record.instance_id, InstanceState.READY)
        assert record.group_id in old.fetchd.fetching
        new.release(record.instance_id)
        new.gone(record.instance_id)


class StrictFetchd(FakeFetchd):
    """Refuses commands of an older epoch than it has seen, as the real fetchd does."""

    seen_epoch = 5

    def cancel(self, group_id: GroupId, epoch: int, *, deadline_s: float = 0) -> None:
        if epoch < self.seen_epoch:
            raise StaleEpoch(f"epoch {epoch} is over; {self.seen_epoch} has been seen")
        super().cancel(group_id, epoch)


@pytest.mark.parametrize("known_epoch", [5, 4])  # the state server's; a fetchd with a newer one closes its sockets
def test_a_stage_that_ends_before_a_restarted_invoker_hears_a_command_leaves_nothing_in_fetchd(
    valkey_url: str, run_dir: Path, fake_engine: None, known_epoch: int
) -> None:
    fetchd = StrictFetchd(run_dir)
    old = LlmHost(valkey_url, run_dir, fetchd)
    old.epoch = known_epoch
    old.client.set(keys.SCHEDULER_EPOCH, known_epoch)
    old.start()
    stages = old.ready_group()
    pids = [old.pid(record.instance_id) for record in stages]
    abandon(old)
    with LlmHost(valkey_url, run_dir, fetchd) as new:
        for pid, record in zip(pids, stages, strict=True):
            os.kill(pid, signal.SIGKILL)
            new.wait_buried(record.instance_id)
        assert fetchd.open == set()
        assert ("cancel" in fetchd.calls) is (known_epoch == fetchd.seen_epoch)

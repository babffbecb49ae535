"""Stages of a pipeline group on a host: their orders, the stage that takes requests, and the end of a whole group."""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from invoker.containers.init import group_link, llm_init, slots_in
from invoker.drivers.programs import PROGRAMS
from relay.protocol.messages import GroupCredential, GroupLink, StageShape, Start
from relay.state import credentials, keys
from tests.invoker import fake_llm
from tests.invoker.fake_fetchd import FakeFetchd
from tests.invoker.platform import HOST, WAIT_S, Host, until
from tests.invoker.test_llm_start import URI, LlmHost
from thaw import wire
from thaw.action import KIND_LLM
from thaw.errors import StaleEpoch, WorkerLost
from thaw.ids import ActivationId, GroupId, InstanceId, Namespace, random_hex_id
from thaw.instance import InstanceRecord, InstanceState
from thaw.model import FileRange
from thaw.plan import Plan, PlanModel, PlanStage, PlanTransport, StageRole, TransportKind

SECRET = GroupCredential("thaw-group-x", "s3cret")
SIDECAR = FileRange("config.json", 0, 700)
HALVES = (FileRange("model.safetensors", 0, 600), FileRange("model.safetensors", 600, 400))


def two_stages(*, role: StageRole = StageRole.FULL, epoch: int = 1) -> Plan:
    """A plan with both stages on this host.  Stage 0 keeps the whole model, stage 1 its half."""
    first = PlanStage(0, HOST, "cpu", role, (0, 3), (SIDECAR, HALVES[0]), (HALVES[1],), 800 << 20, 1.0)
    second = PlanStage(1, HOST, "cpu", StageRole.LOW, (3, 5), (SIDECAR, HALVES[1]), (), 400 << 20, 0.5)
    group_id = GroupId(random_hex_id())
    base = Host.plan(None, "guest/chat", model=PlanModel(URI, "00", "", 1700), epoch=epoch)  # type: ignore[arg-type]
    transport = PlanTransport(TransportKind.REDIS, "redis://relay:1/0", credentials.ref(group_id))
    return dataclasses.replace(base, group_id=group_id, stages=(first, second), transport=transport)


class GroupHost(LlmHost):
    def start_group(self, plan: Plan) -> tuple[InstanceId, InstanceId]:
        """Start both stages.  Return when their containers are in /init."""
        self.deploy_llm()
        self.client.set(plan.transport.credential_ref, wire.dumps(SECRET))
        ids = (InstanceId(random_hex_id()), InstanceId(random_hex_id()))
        for stage, instance_id in enumerate(ids):
            self.send(Start(plan, stage, instance_id, (ActivationId(random_hex_id()),)))
        for instance_id in ids:
            self.in_init(instance_id)
        return ids

    def ready_group(self, plan: Plan) -> tuple[InstanceRecord, InstanceRecord]:
        ids = self.start_group(plan)
        self.fetchd.ended.set()
        for instance_id in ids:
            self.tell_init(instance_id, {"ok": True})
        first, second = (self.events.instance(i, InstanceState.READY) for i in ids)
        return first, second

    def open_run(self, instance_id: str) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = self.connection()
        headers = {**self.headers(), "Accept": "application/x-thaw-stream"}
        body = json.dumps({"value": {}, "activation_id": random_hex_id()})
        connection.request("POST", f"/instances/{instance_id}/run", body, headers)
        return connection, connection.getresponse()


@pytest.fixture
def host(valkey_url: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GroupHost]:
    monkeypatch.setitem(PROGRAMS, KIND_LLM, (fake_llm.__file__,))
    made = GroupHost(valkey_url, run_dir, stage_address="10.0.0.7")
    made.fetchd = made.agent.fleet.fetch = FakeFetchd(run_dir)
    made.start()
    yield made
    made.stop()
    assert made.fetchd.open == set(), "a descriptor socket is left open"
    assert made.processes() == []


def test_each_stage_is_told_its_role_its_link_and_the_shape_of_all(host: GroupHost) -> None:
    host.deploy_llm()
    plan = two_stages()
    function = host.records.action(Namespace("guest"), plan.action)
    asked: list[str] = []

    def credential(reference: str) -> GroupCredential:
        asked.append(reference)
        return SECRET

    link = group_link(plan.transport, credential, "10.0.0.7")
    inits = [llm_init(plan, stage, function, host.settings, link) for stage in plan.stages]
    assert asked == [f"thaw:group-credential:{plan.group_id}"]
    assert [(i.stage, i.n_stages, i.layers, i.role) for i in inits] == [
        (0, 2, (0, 3), StageRole.FULL),
        (1, 2, (3, 5), StageRole.LOW),
    ]
    assert {i.link for i in inits} == {GroupLink(TransportKind.REDIS, "redis://relay:1/0", SECRET, "10.0.0.7")}
    # a full stage's reserve must have room for the rest of the weights too; a sidecar is on no device
    assert inits[0].stages == (StageShape((0, 3), 800 << 20, 1000, StageRole.FULL), StageShape((3, 5), 400 << 20, 400))
    assert inits[0].stages == inits[1].stages


def test_a_single_stage_has_neither_link_nor_shapes(host: GroupHost) -> None:
    host.deploy_llm()
    plan = host.llm_plan()
    function = host.records.action(Namespace("guest"), plan.action)
    init = llm_init(plan, plan.stages[0], function, host.settings, group_link(plan.transport, lambda _: SECRET, ""))
    assert (init.link, init.stages, init.role) == (None, (), StageRole.FULL)
    assert plan.model is not None
    assert init.model_version == plan.model.version


def test_a_group_takes_a_batch_a_stage_and_takes_it_at_its_first(host: GroupHost) -> None:
    host.deploy_llm()
    function = host.records.action(Namespace("guest"), host.llm_plan().action)
    assert [slots_in(function, stage, 4) for stage in range(4)] == [12, 0, 0, 0]
    assert slots_in(function, 0, 1) == 3


def test_a_ready_group_takes_requests_at_its_first_stage_only(host: GroupHost) -> None:
    first, second = host.ready_group(two_stages())
    assert (first.stage, first.n_stages, first.slots) == (0, 2, 6)
    assert (second.stage, second.n_stages, second.slots, second.takes_requests) == (1, 2, 0, False)
    assert second.group_id == first.group_id
    status, body = host.run(second.instance_id, {})
    assert (status, body["info"]["code"]) == (410, "InstanceGone")


def test_fetchd_is_asked_for_the_first_part_and_told_of_the_rest(host: GroupHost) -> None:
    host.ready_group(two_stages())
    asked = {r.stage: (r.ranges, r.later_ranges, r.background) for r in host.fetchd.requests}
    assert asked == {0: ((SIDECAR, HALVES[0]), (HALVES[1],), False), 1: ((SIDECAR, HALVES[1]), (), False)}


def test_a_stage_that_ends_while_its_rest_is_fetched_gives_the_fetch_up(host: GroupHost) -> None:
    first, second = host.ready_group(two_stages())
    host.release(second.instance_id)
    host.events.instance(second.instance_id, InstanceState.GONE)
    assert "cancel" not in host.fetchd.calls
    host.release(first.instance_id)
    host.events.instance(first.instance_id, InstanceState.GONE)
    until(lambda: "cancel" in host.fetchd.calls)


def test_a_cancelled_group_ends_ready_or_not(host: GroupHost) -> None:
    plan = two_stages()
    starting, ready = host.start_group(plan)
    host.fetchd.ended.set()
    host.tell_init(ready, {"ok": True})
    host.events.instance(ready, InstanceState.READY)
    host.cancel(plan.group_id)
    gone = [host.events.instance(i, InstanceState.GONE) for i in (starting, ready)]
    assert gone[0].error is not None
    assert gone[0].error.message == "its pipeline group was given up"
    assert gone[1].error is None  # no request waits for an answer of a ready follower
    until(lambda: host.agent.fleet.all() == [])
    assert "cancel" in host.fetchd.calls
    assert host.agent.fleet.ledger.holders() == {}


def test_a_cancelled_group_cuts_its_answers_so_that_they_go_on_elsewhere(host: GroupHost) -> None:
    plan = two_stages()
    first, second = host.ready_group(plan)
    connection, response = host.open_run(first.instance_id)
    with (host.run_dir / f"door-{first.instance_id[-6:]}.feed").open("w", buffering=1) as feed:
        feed.write("one\n")
        response.read(4)
        host.cancel(plan.group_id)
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            response.read()
    connection.close()
    gone = host.events.instance(first.instance_id, InstanceState.GONE)
    assert gone.error is not None
    assert gone.error.code == "WorkerLost"
    host.events.instance(second.instance_id, InstanceState.GONE)


def test_a_worker_that_serves_by_itself_outlives_a_cancel_of_its_start(host: GroupHost) -> None:
    record = host.ready_llm()
    host.cancel(record.group_id)
    until(lambda: "cancel" in host.fetchd.calls)
    assert host.agent.fleet.find(record.instance_id) is not None
    host.release(record.instance_id)
    host.events.instance(record.instance_id, InstanceState.GONE)


def test_a_stage_whose_group_has_ended_meanwhile_fails_its_start(host: GroupHost) -> None:
    plan = two_stages()
    host.deploy_llm()
    instance_id = InstanceId(random_hex_id())
    host.send(Start(plan, 1, instance_id))
    gone = host.events.instance(instance_id, InstanceState.GONE)
    assert gone.error is not None
    assert gone.error.code == WorkerLost.__name__


def test_idle_stages_of_a_group_make_no_room_for_others(host: GroupHost) -> None:
    first, _ = host.ready_group(two_stages())
    idle = host.agent.fleet.find(first.instance_id)
    assert idle is not None
    view = host.agent._commands._deps.placing._view()
    assert view.idle == ()


def test_a_restarted_invoker_adopts_every_stage(
    valkey_url: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PROGRAMS, KIND_LLM, (fake_llm.__file__,))
    old = GroupHost(valkey_url, run_dir)
    fetchd = old.fetchd = old.agent.fleet.fetch = FakeFetchd(run_dir)
    old.start()
    plan = two_stages()
    stages = old.ready_group(plan)
    pids = [old.pid(r.instance_id) for r in stages]
    abandon(old)
    new = GroupHost(valkey_url, run_dir)
    new.fetchd = new.agent.fleet.fetch = fetchd
    with new:
        adopted = [new.events.instance(r.instance_id, InstanceState.READY) for r in stages]
        assert [(a.stage, a.n_stages, a.slots) for a in adopted] == [(0, 2, 6), (1, 2, 0)]
        assert [new.pid(r.instance_id) for r in stages] == pids
        new.cancel(plan.group_id)
        for record in stages:
            new.events.instance(record.instance_id, InstanceState.GONE)
        until(lambda: not fetchd.open)
    assert [Path(f"/proc/{pid}").exists() for pid in pids] == [False, False]


class StrictFetchd(FakeFetchd):
    """Refuses commands of an older epoch than it has seen, as the real fetchd does."""

    seen_epoch = 5

    def cancel(self, group_id: GroupId, epoch: int, *, deadline_s: float = 0) -> None:
        if epoch < self.seen_epoch:
            raise StaleEpoch(f"epoch {epoch} is over; {self.seen_epoch} has been seen")
        super().cancel(group_id, epoch)


@pytest.mark.parametrize("known_epoch", [5, 4])  # the state server's; a fetchd with a newer one closes its sockets
def test_a_stage_that_ends_before_a_restarted_invoker_hears_a_command_leaves_nothing_in_fetchd(
    valkey_url: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch, known_epoch: int
) -> None:
    monkeypatch.setitem(PROGRAMS, KIND_LLM, (fake_llm.__file__,))
    old = GroupHost(valkey_url, run_dir)
    old.epoch = known_epoch
    old.client.set(keys.SCHEDULER_EPOCH, known_epoch)
    fetchd = old.fetchd = old.agent.fleet.fetch = StrictFetchd(run_dir)
    old.start()
    first, second = old.ready_group(two_stages())
    pids = [old.pid(r.instance_id) for r in (first, second)]
    abandon(old)
    new = GroupHost(valkey_url, run_dir)
    new.fetchd = new.agent.fleet.fetch = fetchd
    with new:
        for pid, record in zip(pids, (first, second), strict=True):
            os.kill(pid, signal.SIGKILL)
            live = new.agent.fleet.find(record.instance_id)
            assert live is None or live.gone.wait(WAIT_S)
        assert fetchd.open == set()
        assert ("cancel" in fetchd.calls) is (known_epoch == fetchd.seen_epoch)


def abandon(host: Host) -> None:
    """Stop the invoker as if it were killed: it ends no container and sends no message."""
    host.agent._reader.stop()
    host.agent._publisher.flush(WAIT_S)
    host.agent._publisher.close()
    host.agent.port.stop()
    host.agent.reporter._stop.set()
    host.agent.driver.close()
    host.agent._redis.close()
    host.close()

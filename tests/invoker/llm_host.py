"""A host of models: its containers run fake_llm.py, and its fetchd is a fake."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import pytest

from invoker.drivers.programs import PROGRAMS
from relay.protocol.messages import GroupCredential, Start
from relay.state import credentials
from tests.invoker import fake_llm
from tests.invoker.fake_fetchd import FakeFetchd
from tests.invoker.platform import HOST, WAIT_S, Host, opened, until
from thaw import wire
from thaw.action import KIND_LLM, Action, Exec, Limits
from thaw.config import parse_llm_config
from thaw.errors import ErrorInfo
from thaw.ids import ActionName, ActivationId, GroupId, InstanceId, Namespace, random_hex_id
from thaw.instance import InstanceRecord, InstanceState
from thaw.model import FileRange
from thaw.plan import Plan, PlanModel, PlanStage, PlanTransport, StageRole, TransportKind

URI = "file:///m"
SECRET = GroupCredential("thaw-group-x", "s3cret")
SIDECAR = FileRange("config.json", 0, 700)
HALVES = (FileRange("model.safetensors", 0, 600), FileRange("model.safetensors", 600, 400))
CONFIG = parse_llm_config({"kind": KIND_LLM, "model": {"uri": URI}, "scaling": {"max_batch": 3}})
LIMITS = Limits(60_000, 256, 10, 3)
CHAT = Action(ActionName("guest/chat"), Namespace("guest"), "0.0.1", Exec(KIND_LLM), LIMITS, config=CONFIG)


class LlmHost(Host):
    def __init__(self, url: str, run_dir: Path, fetchd: FakeFetchd | None = None, **settings: Any) -> None:
        super().__init__(url, run_dir, **settings)
        self.fetchd = self.agent.fleet.fetch = self.agent.cells._fetch = fetchd or FakeFetchd(run_dir)

    # one worker ----------------------------------------------------------------------------------------------------

    def deploy_llm(self) -> None:
        self.records.put_action(CHAT, last=self.records.last_version(CHAT.name))

    @staticmethod
    def llm_plan() -> Plan:
        return Host.plan(CHAT.name, model=PlanModel(URI, "00", "", 10), reserve_bytes=1 << 30)

    def launch_llm(self) -> str:
        """Start an instance.  Return when its descriptor socket is there, which its container is given."""
        self.deploy_llm()
        instance_id = self.launch(self.llm_plan())
        self.in_init(instance_id)
        return instance_id

    def in_init(self, instance_id: str) -> None:
        self.events.instance(instance_id, InstanceState.STARTING)
        until(self.pipe(instance_id, "init").exists)

    def ready_llm(self) -> InstanceRecord:
        instance_id = self.launch_llm()
        self.fetchd.ended.set()
        self.tell_init(instance_id, {"ok": True})
        return self.events.instance(instance_id, InstanceState.READY)

    # the container -------------------------------------------------------------------------------------------------

    def pipe(self, instance_id: str, name: str) -> Path:
        return self.run_dir / f"door-{instance_id[-6:]}.{name}"

    def tell_init(self, instance_id: str, reply: object) -> None:
        """Send the container's reply to /init.  Opening the FIFO waits until the container is in its /init."""
        with opened(self.pipe(instance_id, "init")) as fifo:
            fifo.write(json.dumps(reply))

    def fails_in_init(self, **reply: object) -> ErrorInfo:
        """Start an instance whose container replies so to /init.  Return the error that the start ends with."""
        instance_id = self.launch_llm()
        self.tell_init(instance_id, reply)
        return self.failed(instance_id)

    def feed(self, instance_id: str) -> TextIO:
        """The tokens of the container's run, one a line."""
        return opened(self.pipe(instance_id, "feed"))

    def open_run(self, instance_id: str) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = self.connection()
        headers = {**self.headers(), "Accept": "application/x-thaw-stream"}
        body = json.dumps({"value": {}, "activation_id": random_hex_id()})
        connection.request("POST", f"/instances/{instance_id}/run", body, headers)
        return connection, connection.getresponse()

    # a pipeline ----------------------------------------------------------------------------------------------------

    def start_group(self, plan: Plan) -> tuple[InstanceId, InstanceId]:
        """Start both stages.  Return when their descriptor sockets are there."""
        self.deploy_llm()
        self.client.set(plan.transport.credential_ref, wire.dumps(SECRET))
        ids = (InstanceId(random_hex_id()), InstanceId(random_hex_id()))
        for stage, instance_id in enumerate(ids):
            self.send(Start(plan, stage, instance_id, (ActivationId(random_hex_id()),)))
        for instance_id in ids:
            self.in_init(instance_id)
        return ids

    def ready_group(self, plan: Plan | None = None) -> tuple[InstanceRecord, InstanceRecord]:
        ids = self.start_group(plan or two_stages())
        self.fetchd.ended.set()
        for instance_id in ids:
            self.tell_init(instance_id, {"ok": True})
        first, second = (self.events.instance(i, InstanceState.READY) for i in ids)
        return first, second


def two_stages() -> Plan:
    """A plan with both stages on one host.  Stage 0 keeps the whole model, stage 1 its half."""
    first = PlanStage(0, HOST, "cpu", StageRole.FULL, (0, 3), (SIDECAR, HALVES[0]), (HALVES[1],), 800 << 20, 1.0)
    second = PlanStage(1, HOST, "cpu", StageRole.LOW, (3, 5), (SIDECAR, HALVES[1]), (), 400 << 20, 0.5)
    group_id = GroupId(random_hex_id())
    base = Host.plan(CHAT.name, model=PlanModel(URI, "00", "", 1700))
    transport = PlanTransport(TransportKind.REDIS, "redis://relay:1/0", credentials.ref(group_id))
    return replace(base, group_id=group_id, stages=(first, second), transport=transport)


def abandon(host: Host) -> None:
    """Stop the invoker as if it were killed: it ends no container, sends no message and writes no file."""
    host.agent.driver._owned.write = lambda handle, labels: None  # its threads live on, beside its successor's
    host.agent._reader.stop()
    host.agent._publisher.flush(WAIT_S)
    host.agent._publisher.close()
    host.agent.port.stop()
    host.agent.reporter._stop.set()
    host.agent.driver.close()
    host.agent._redis.close()
    host.close()


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROGRAMS, KIND_LLM, (fake_llm.__file__,))


@pytest.fixture
def host(valkey_url: str, run_dir: Path, fake_engine: None) -> Iterator[LlmHost]:
    with LlmHost(valkey_url, run_dir, stage_address="10.0.0.7") as made:
        yield made
    assert made.fetchd.open == set(), "a descriptor socket is left open"

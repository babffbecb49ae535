"""A host that uses the real streams and starts nothing, and the scheduler as a real process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relay.protocol.messages import (
    Cancel,
    Command,
    CommandRefused,
    HostChanged,
    InspectModel,
    ModelInspected,
    Release,
    SetStemCells,
    Start,
)
from relay.state import bus, credentials, keys, redis_link
from relay.state.records import Records
from relay.state.registry import Registry
from tests.scheduler.facts import demand, report
from thaw import wire
from thaw.action import KIND_LLM, KIND_PYTHON, Action, Exec, Limits
from thaw.clock import wall_ms
from thaw.config import LlmConfig, ModelConfig, ResourcesConfig, ScalingConfig
from thaw.errors import ErrorInfo, PlatformError
from thaw.host import Device, HeldSegment, PoolReport, StemTarget
from thaw.ids import ActionName, ActivationId, CommandId, GatewayId, GroupId, HostId, Namespace, random_hex_id
from thaw.instance import InstanceRecord, InstanceState, StartMode
from thaw.logs import Log
from thaw.model import FileRange, ModelFacts, ModelParts

MIB = 1024 * 1024
ROOT = Path(__file__).resolve().parents[2]


def facts_of_model(uri: str, n_layers: int = 8) -> ModelFacts:
    """A model with layers of 100 bytes between 150 bytes of embeddings and a head of 50 bytes."""
    layers = tuple((FileRange("w.safetensors", 150 + 100 * i, 100),) for i in range(n_layers))
    end = 150 + 100 * n_layers
    parts = ModelParts((FileRange("w.safetensors", 0, 150),), layers, (FileRange("w.safetensors", end, 50),))
    files = {"config.json": 10, "w.safetensors": end + 50}
    return ModelFacts(uri, end + 60, end + 50, n_layers, (100,) * n_layers, 200, "aa", "", True, files, parts=parts)


class Recorder:
    """Messages in order.  A test can wait for a message without polling."""

    def __init__(self) -> None:
        self._all: list[Any] = []
        self._changed = threading.Condition()

    def add(self, message: Any) -> None:
        with self._changed:
            self._all.append(message)
            self._changed.notify_all()

    def of(self, kind: type[Any] | tuple[type[Any], ...]) -> list[Any]:
        with self._changed:
            return [m for m in self._all if isinstance(m, kind)]

    def wait(
        self,
        kind: type[Any] | tuple[type[Any], ...],
        n: int = 1,
        timeout_s: float = 30.0,
        where: Callable[[Any], bool] = lambda message: True,
    ) -> list[Any]:
        """Wait for the first ``n`` messages of this kind (or of these kinds) and return them."""

        def found() -> list[Any]:
            return [m for m in self._all if isinstance(m, kind) and where(m)]

        with self._changed:
            enough = self._changed.wait_for(lambda: len(found()) >= n, timeout_s)
            assert enough, f"waited for {n} {kind}, saw {self._all}"
            return found()[:n]


class FakeInvoker:
    """A host whose instances are only records.

    ``on_start`` returns None for an instance that becomes READY, False for one that never does, or an error.
    """

    def __init__(self, url: str, host_id: str, memory: int = 4096 * MIB) -> None:
        self.host_id, self.memory = HostId(host_id), memory
        self._client = redis_link.connect(url)
        self.registry = Registry(self._client)
        self.commands = Recorder()
        self.epochs: list[int] = []
        self._seen: set[str] = set()
        self.instances: dict[str, InstanceRecord] = {}
        self._changed = threading.Condition()
        self.on_start: Callable[[Start], ErrorInfo | bool | None] = lambda start: None
        self.on_inspect: Callable[[str], ModelFacts | ErrorInfo] = facts_of_model
        self.busy = False
        self.slabs: tuple[int, int] | None = None  # its pool: the bytes of a slab, and the number of slabs
        self.n_taken = 0  # the slabs that segments of others take
        self.stem_targets: tuple[StemTarget, ...] = ()
        self.is_deaf = False  # True: it takes starts and does not report them
        self._ended = threading.Event()
        self._reader = bus.CommandReader(url, self.host_id, self._command, lambda: None, Log("fake-invoker"))
        self._heart = threading.Thread(target=self._beat, daemon=True)

    def start(self) -> FakeInvoker:
        self.report()
        bus.publish(self._client, HostChanged(self.host_id, True))
        self._reader.start()
        self._heart.start()
        return self

    def die(self) -> None:
        """End heartbeats and answers.  Its lease is deleted, so that a test need not wait 10 s for its end."""
        self._ended.set()
        self._reader.stop()
        self._heart.join(30)
        self._client.delete(f"thaw:host-lease:{self.host_id}")

    def close(self) -> None:
        self._ended.set()
        self._reader.stop()
        self._client.close()

    def report(self, *, announce: bool = False) -> None:
        held = (HeldSegment("other", self.n_taken, True),) if self.n_taken else ()
        used = sum(r.reserve_bytes for r in self.instances.values())
        said = report(
            self.host_id,
            devices=(Device("cpu", "cpu", self.memory, self.memory - used),),
            network_bytes_per_s=1e8,
            declared_bytes_per_s=None,
            seen_wall_ms=wall_ms(),
            instances=tuple(r.instance_id for r in self.instances.values()),
            stem_targets=self.stem_targets,
            pool=self.slabs and PoolReport(*self.slabs, wall_ms(), held),
        )
        self.registry.report_host(said, announce=announce)

    def _beat(self) -> None:
        while not self._ended.wait(1.0):
            with contextlib.suppress(PlatformError):  # a test may have killed the state server
                self.report()

    def _command(self, command: Command) -> None:
        if command.command_id in self._seen:
            return  # a command that was not acknowledged before the state server died comes again
        self._seen.add(command.command_id)
        self.epochs.append(command.epoch)
        self._obey(command)
        self.commands.add(command.body)  # do this last, so that a test that waits for the command sees its effects

    def _obey(self, command: Command) -> None:
        body = command.body
        if isinstance(body, InspectModel):
            self._inspect(body.uri, command.command_id)
        elif isinstance(body, Start):
            if not self.is_deaf:
                self._start(body)
        elif isinstance(body, Release):
            self._release(command, body)
        elif isinstance(body, SetStemCells):
            self.stem_targets = tuple(
                replace(t, count=body.count) if t.kind == body.kind else t for t in self.stem_targets
            )
            self.report()
        elif isinstance(body, Cancel):
            for record in [r for r in self.instances.values() if r.group_id == body.group_id]:
                self._gone(record)

    def _inspect(self, uri: str, command_id: CommandId) -> None:
        found = self.on_inspect(uri)
        known = isinstance(found, ModelFacts)
        facts, error = (found, None) if known else (None, found)
        bus.publish(self._client, ModelInspected(uri, self.host_id, facts, error, command_id=command_id))

    def _start(self, body: Start) -> None:
        stage = body.plan.stages[body.stage]
        record = InstanceRecord(
            body.instance_id,
            self.host_id,
            body.plan.action,
            body.plan.action_version,
            body.plan.group_id,
            InstanceState.STARTING,
            "127.0.0.1:1",
            0 if body.stage else 2,
            stage.reserve_bytes,
            stage.device,
            StartMode.COLD,
            created_wall_ms=wall_ms(),
            keep_alive_s=1.0,
            stage=body.stage,
            n_stages=len(body.plan.stages),
        )
        self.put(record)
        outcome = self.on_start(body)
        if outcome is None:
            self.put(replace(record, state=InstanceState.READY, idle_since_wall_ms=wall_ms()))
        elif isinstance(outcome, ErrorInfo):
            self._gone(record, outcome)

    def _release(self, command: Command, body: Release) -> None:
        record = self.instances.get(body.instance_id)
        if record is None:
            return
        if self.busy and body.only_idle:
            error = ErrorInfo("InstanceBusy", "a request is in flight")
            bus.publish(self._client, CommandRefused(command.command_id, self.host_id, record.group_id, error))
        else:
            self._gone(record)

    def put(self, record: InstanceRecord) -> None:
        with self._changed:
            self.instances[record.instance_id] = record
        self.registry.put_instance(record)

    def lose_all(self) -> None:
        """Report that all containers were killed from outside."""
        for record in list(self.instances.values()):
            self._gone(record, ErrorInfo("WorkerLost", "killed"))

    def until_empty(self, timeout_s: float = 30.0) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: not self.instances, timeout_s), self.instances

    def _gone(self, record: InstanceRecord, error: ErrorInfo | None = None) -> None:
        with self._changed:
            self.instances.pop(record.instance_id, None)
            self._changed.notify_all()
        self.registry.put_instance(replace(record, state=InstanceState.GONE, error=error))


class Platform:
    """A state server with a scheduler process (or several) and hosts.  The test sends the messages of a gateway."""

    def __init__(self, url: str, logs: Path) -> None:
        self.url, self._logs = url, logs
        self.client = redis_link.connect(url)
        self.registry, self.records = Registry(self.client), Records(self.client)
        self.events = Recorder()
        self._up = threading.Event()
        self._reader = bus.EventReader(url, self.events.add, self._up.set, Log("test"))
        self._reader.start()
        assert self._up.wait(30)
        self.hosts: list[FakeInvoker] = []
        self.schedulers: list[subprocess.Popen[bytes]] = []

    def scheduler(self, **env: str) -> subprocess.Popen[bytes]:
        path = os.pathsep.join([str(ROOT), str(ROOT / "runtime-python")])
        settings = {"THAW_STATE_URL": self.url, "THAW_RELAY_URL": self.url, "THAW_MODELS": "file://,s3://"}
        settings |= {"THAW_HOSTS_REFRESH_S": "0.5", "PYTHONPATH": path, **env}
        with (self._logs / f"scheduler-{len(self.schedulers)}.log").open("wb") as log:
            command = [sys.executable, "-m", "gateway.scheduler.loop"]
            self.schedulers.append(subprocess.Popen(command, stderr=log, env=os.environ | settings))
        return self.schedulers[-1]

    def host(self, host_id: str = "h0", memory: int = 4096 * MIB) -> FakeInvoker:
        invoker = FakeInvoker(self.url, host_id, memory).start()
        self.hosts.append(invoker)
        return invoker

    def action(self, name: str = "guest/hello", memory: int = 256, version: str = "0.0.1", **fields: Any) -> Action:
        limits = Limits(memory=memory)
        return self._put(
            Action(ActionName(name), Namespace("guest"), version, Exec(KIND_PYTHON, "x"), limits, **fields)
        )

    def llm(self, name: str = "guest/chat", memory: int = 1024, transport: str = "auto", **scaling: Any) -> Action:
        config = LlmConfig(
            KIND_LLM,
            ModelConfig("file:///m"),
            resources=ResourcesConfig(gpu_memory_mb=memory),
            scaling=ScalingConfig(**scaling),
            transport=transport,
        )
        return self._put(Action(ActionName(name), Namespace("guest"), "0.0.1", Exec(KIND_LLM), Limits(), config=config))

    def _put(self, action: Action) -> Action:
        self.records.put_action(action, last=self.records.last_version(action.name))
        return action

    def ask(self, action: str = "guest/hello", gateway: str = "g0", waited_ms: int = 0) -> ActivationId:
        self.registry.gateway_alive(GatewayId(gateway))
        asked = demand(random_hex_id(), ActionName(action), gateway, waited_ms=waited_ms)
        self.registry.add_demand(replace(asked, queued_wall_ms=wall_ms() - waited_ms))
        return asked.activation_id

    def burst(self, n: int, action: str, gateway: str = "g0") -> None:
        """Add requests that a reader of the event stream reads together."""
        self.registry.gateway_alive(GatewayId(gateway))
        pipe = self.client.pipeline(transaction=True)
        for _ in range(n):
            asked = demand(random_hex_id(), ActionName(action), gateway, queued_wall_ms=wall_ms())
            pipe.hset(keys.DEMAND, asked.activation_id, wire.dumps(asked))
            pipe.xadd(keys.EVENTS, {"f": bus.pack(asked)})
        pipe.execute()

    def credentials(self) -> set[str]:
        with redis_link.translated("list credentials"):
            return {redis_link.text(k) for k in self.client.scan_iter("thaw:group-credential:*")}

    def until_planned(self, timeout_s: float = 30.0) -> None:
        """Wait for a plan.  It is the first trace of a start, and no message announces it."""
        self._until(lambda: bool(self.registry.plans()), timeout_s)

    def until_credentials(self, wanted: set[str], timeout_s: float = 30.0) -> None:
        self._until(lambda: self.credentials() == wanted, timeout_s)

    def _until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline_s, tick = time.monotonic() + timeout_s, threading.Event()
        while not condition():
            assert time.monotonic() < deadline_s, "it did not happen in time"
            tick.wait(0.02)

    def served(self, activation: ActivationId, action: str = "guest/hello", gateway: str = "g0") -> None:
        self.registry.drop_demand(activation, ActionName(action), GatewayId(gateway))

    def close(self) -> None:
        for process in self.schedulers:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait(10)
        for host in self.hosts:
            host.close()
        self._reader.stop()
        with contextlib.suppress(PlatformError):  # a test may have killed the state server
            for key in self.credentials():  # the server is used by later tests too
                credentials.revoke(self.client, self.client, GroupId(key.rpartition(":")[2]))
        self.client.close()


@pytest.fixture
def platform_on(tmp_path: Path) -> Iterator[Callable[[str], Platform]]:
    """Makes platforms on state servers that the test supplies."""
    made: list[Platform] = []

    def make(url: str) -> Platform:
        made.append(Platform(url, tmp_path))
        return made[-1]

    yield make
    for running in made:
        running.close()


@pytest.fixture
def platform(valkey_url: str, tmp_path: Path) -> Iterator[Platform]:
    running = Platform(valkey_url, tmp_path)
    yield running
    running.close()

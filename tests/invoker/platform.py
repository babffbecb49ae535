"""The scheduler's and the gateway's side of an invoker, for tests: commands, waits for records, runs."""

from __future__ import annotations

import errno
import http.client
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TextIO

import redis

from invoker.containers.live import Live
from invoker.main import Agent
from invoker.settings import InvokerSettings
from relay.protocol.messages import (
    ACTIVATION_HEADER,
    Cancel,
    Command,
    CommandBody,
    CommandRefused,
    InstanceChanged,
    Release,
    Start,
    Undrain,
)
from relay.state import bus, redis_link
from relay.state.bus import EventReader
from relay.state.records import Records
from relay.state.registry import Registry
from thaw.action import KIND_PYTHON, Action, Exec, Limits
from thaw.errors import ErrorInfo
from thaw.ids import ActionName, ActivationId, CommandId, GroupId, HostId, InstanceId, Namespace, PlanId, random_hex_id
from thaw.instance import InstanceRecord, InstanceState
from thaw.logs import Log
from thaw.plan import PLAN_VERSION, Plan, PlanModel, PlanStage, StageRole

HOST = HostId("host-t")
WAIT_S = 20.0


def until(ready: Callable[[], bool]) -> None:
    """Wait for a condition that no message announces: check it several times."""
    deadline = time.monotonic() + WAIT_S
    while not ready():
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)


def opened(fifo: Path) -> TextIO:
    """Open a named pipe for writing as soon as it is there and its reader has opened it.  Each line is sent at once."""
    fds: list[int] = []

    def has_reader() -> bool:
        try:
            fds.append(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
        except OSError as e:
            if e.errno not in (errno.ENXIO, errno.ENOENT):
                raise
        return bool(fds)

    until(has_reader)
    os.set_blocking(fds[0], True)
    return os.fdopen(fds[0], "w", buffering=1)


class Events:
    """All published events.  Tests wait for the ones that they expect."""

    def __init__(self, url: str) -> None:
        self.seen: list[Any] = []
        self._changed = threading.Condition()
        up = threading.Event()
        self._reader = EventReader(url, self._take, up.set, Log("test"))
        self._reader.start()
        assert up.wait(WAIT_S)

    def _take(self, message: Any) -> None:
        with self._changed:
            self.seen.append(message)
            self._changed.notify_all()

    def wait(self, matches: Any, what: str = "event") -> Any:
        with self._changed:
            found = self._changed.wait_for(lambda: next((m for m in self.seen if matches(m)), None), WAIT_S)
        assert found is not None, f"no {what}; seen: {self.seen}"
        return found

    def instance(self, instance_id: str, state: InstanceState) -> InstanceRecord:
        def matches(m: Any) -> bool:
            return (
                isinstance(m, InstanceChanged)
                and m.instance.instance_id == instance_id
                and m.instance.state in (state, InstanceState.GONE)
            )

        record: InstanceRecord = self.wait(matches, f"{instance_id} {state}").instance
        assert record.state is state, f"{instance_id} is {record.state}: {record.error}"
        return record

    def refused(self, command_id: str) -> CommandRefused:
        found: CommandRefused = self.wait(
            lambda m: isinstance(m, CommandRefused) and m.command_id == command_id, "refusal"
        )
        return found

    def close(self) -> None:
        self._reader.stop()
        self._reader.join(WAIT_S)


class Host:
    def __init__(self, url: str, run_dir: Path, **settings: Any) -> None:
        self.url, self.run_dir = url, run_dir
        self.client: redis.Redis = redis_link.connect(url)
        self.registry, self.records = Registry(self.client), Records(self.client)
        defaults: dict[str, Any] = {
            "state_url": url,
            "host_id": HOST,
            "run_dir": str(run_dir),
            "memory_mb": 2048,
            "stem_cells": "off",
            "fetchd_socket": str(run_dir / "fetchd.s"),
            "drain_s": 2.0,
        }
        self.settings = InvokerSettings(**{**defaults, **settings})
        self.events = Events(url)
        self.agent = Agent(self.settings)
        self.epoch = 1

    def start(self) -> None:
        self.agent.start()

    def stop(self) -> None:
        self.agent.stop()
        self.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        assert self.processes() == [], "the invoker left processes behind"

    def close(self) -> None:
        self.events.close()
        self.client.close()

    def processes(self) -> list[str]:
        """The command lines of the processes that were started in this host's run directory."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and str(self.run_dir).encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_text())
            except OSError:
                continue
        return found

    # the scheduler's side ------------------------------------------------------------------------------------------

    def send(self, body: CommandBody, *, epoch: int | None = None, command_id: str = "") -> str:
        sent = CommandId(command_id or random_hex_id())
        bus.send_command(self.client, HOST, Command(sent, self.epoch if epoch is None else epoch, time.time_ns(), body))
        return sent

    def deploy(
        self,
        code: str,
        *,
        name: str = "guest/hello",
        timeout: int = 10_000,
        concurrency: int = 1,
        binary: bool = False,
        main: str = "",
        memory: int = 128,
        version: str = "0.0.1",
    ) -> Action:
        action = Action(
            ActionName(name),
            Namespace("guest"),
            version,
            Exec(KIND_PYTHON, code, binary, main),
            Limits(timeout, memory, 10, concurrency),
        )
        self.records.put_action(action, last=self.records.last_version(action.name))
        return action

    @staticmethod
    def plan(
        action: str = "guest/hello",
        *,
        model: PlanModel | None = None,
        share: float = 1.0,
        reserve_bytes: int = 0,
        epoch: int = 1,
        version: str = "0.0.1",
    ) -> Plan:
        stage = PlanStage(0, HOST, "cpu", StageRole.FULL, (0, 0), (), (), reserve_bytes, share)
        return Plan(
            PLAN_VERSION,
            PlanId(random_hex_id()),
            GroupId(random_hex_id()),
            epoch,
            ActionName(action),
            version,
            (stage,),
            model,
        )

    def launch(self, plan: Plan | None = None, *, instance_id: str = "") -> str:
        chosen = InstanceId(instance_id or random_hex_id())
        self.send(Start(plan or self.plan(), 0, chosen, (ActivationId(random_hex_id()),)))
        return chosen

    def ready(self, plan: Plan | None = None) -> InstanceRecord:
        return self.events.instance(self.launch(plan), InstanceState.READY)

    def serving(self, code: str, **limits: Any) -> InstanceRecord:
        """Deploy a function, and start an instance of it."""
        self.deploy(code, **limits)
        return self.ready()

    def gone(self, instance_id: str) -> InstanceRecord:
        """Wait for the end of an instance."""
        return self.events.instance(instance_id, InstanceState.GONE)

    def failed(self, instance_id: str) -> ErrorInfo:
        """Wait for the end of an instance, and return its error."""
        error = self.gone(instance_id).error
        assert error is not None, f"{instance_id} has ended without an error"
        return error

    def live(self, instance_id: str) -> Live:
        found = self.agent.fleet.find(InstanceId(instance_id))
        assert found is not None, f"{instance_id} is not on this host"
        return found

    def wait_buried(self, instance_id: str) -> None:
        """Wait until nothing is left of an instance.  Its end is announced before."""
        live = self.agent.fleet.find(InstanceId(instance_id))
        assert live is None or live.gone.wait(WAIT_S)

    def release(self, instance_id: str, *, only_idle: bool = True, drained: bool = False) -> str:
        return self.send(Release(InstanceId(instance_id), only_idle, drained))

    def release_after_runs(self, instance_id: str) -> str:
        """Release an instance once its runs have ended: an answer comes a moment before its slot is free."""
        assert self.live(instance_id).idle.wait(WAIT_S)
        return self.release(instance_id)

    def undrain(self, instance_id: str) -> str:
        return self.send(Undrain(InstanceId(instance_id)))

    def cancel(self, group_id: str) -> str:
        return self.send(Cancel(GroupId(group_id)))

    # the gateway's side --------------------------------------------------------------------------------------------

    def connection(self) -> http.client.HTTPConnection:
        host, _, port = self.agent.address.rpartition(":")
        return http.client.HTTPConnection(host, int(port), timeout=WAIT_S)

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.registry.host_token('x')}"}

    def ask(
        self, method: str, path: str, body: str | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Send one request to the data port, with the platform's token if no ``headers`` are given."""
        connection = self.connection()
        try:
            connection.request(method, path, body, self.headers() if headers is None else headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def run(self, instance_id: str, value: Any, *, activation_id: str = "") -> tuple[int, Any]:
        """Run a function.  Its slot is free when this returns."""
        headers = {**self.headers(), ACTIVATION_HEADER: activation_id or random_hex_id()}
        body = json.dumps({"value": value, "activation_id": random_hex_id()})  # for the function alone
        status, answer = self.ask("POST", f"/instances/{instance_id}/run", body, headers)
        return status, json.loads(answer)

    def logs(self, instance_id: str, activation_id: str) -> list[str] | None:
        wanted = json.dumps({"runs": [{"instance_id": instance_id, "activation_id": activation_id}]})
        lines: list[str] | None = json.loads(self.ask("POST", "/logs", wanted)[1])["logs"][0]
        return lines

    def texts(self, instance_id: str, activation_id: str) -> list[str]:
        """The lines of a run without their times."""
        return [line.partition("Z ")[2] for line in self.logs(instance_id, activation_id) or ()]

    def pid(self, instance_id: str) -> int:
        handle = self.live(instance_id).handle
        assert handle is not None
        return handle.pid

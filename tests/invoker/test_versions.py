"""A model that is pushed again, on two hosts: real fetchds, invokers and scheduler, and a real S3 server."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import requests

from gateway.scheduler.view.model import TRUST_S
from invoker.drivers.programs import PROGRAMS
from invoker.main import Agent
from invoker.settings import InvokerSettings
from relay.protocol.messages import InstanceChanged
from tests.fetchd.harness import Fetchd, write_model
from tests.invoker import weights_llm
from tests.invoker.platform import WAIT_S
from tests.kserve.harness import STORE_KEYS
from tests.scheduler.conftest import Platform
from tests.seaweed import seaweed
from thaw.action import KIND_LLM, Action, Exec, Limits
from thaw.checkpoints import versions
from thaw.cli.model_stores import checkpoints
from thaw.cli.model_stores.stores import open_store
from thaw.config import parse_llm_config
from thaw.ids import ActionName, Namespace, random_hex_id
from thaw.instance import InstanceRecord, InstanceState
from thaw.model import ModelIndex

N_HOSTS = 2
URI = "s3://models/x"
HOST_MB = 1024


class Fleet:
    """Two hosts, each of which has room for one worker, and an action for each of them."""

    def __init__(self, platform: Platform, directories: ExitStack, tmp_path: Path, **store: str) -> None:
        self.platform, self._tmp = platform, tmp_path
        self.fetchds = [directories.enter_context(Fetchd(tmp_path, **store)) for _ in range(N_HOSTS)]
        self.agents = [self._agent(i, fetchd) for i, fetchd in enumerate(self.fetchds)]
        platform.scheduler(THAW_SCALING_WINDOW_S="0.001")  # no start is made for requests that are only forecast
        for i in range(N_HOSTS):
            self.deploy(f"guest/chat{i}")

    def _agent(self, i: int, fetchd: Fetchd) -> Agent:
        run_dir = Path(fetchd.short.name) / "r"
        run_dir.mkdir()
        fixed = {"memory_mb": HOST_MB, "stem_cells": "off", "drain_s": 2.0, "cpu_share": "off"}
        agent = Agent(InvokerSettings(self.platform.url, f"h{i}", str(run_dir), fetchd.socket, **fixed))
        agent.start()
        return agent

    def deploy(self, name: str, uri: str = URI) -> None:
        resources = {"gpu_memory_mb": HOST_MB, "host_memory_mb": 256}
        scaling = {"max_instances": 1, "max_stages": 1}
        plain = {"kind": KIND_LLM, "model": {"uri": uri}, "resources": resources, "scaling": scaling}
        config, limits = parse_llm_config(plain), Limits(60_000)
        action = Action(ActionName(name), Namespace("guest"), "0.0.1", Exec(KIND_LLM), limits, config=config)
        self.platform.records.put_action(action, last=self.platform.records.last_version(action.name))

    def start(self, name: str) -> InstanceRecord:
        """Wait for the instance that a request of this action starts."""
        known = {m.instance.instance_id for m in self.platform.events.of(InstanceChanged)}
        activation = self.platform.ask(name)

        def is_new(message: InstanceChanged) -> bool:
            record = message.instance
            is_over = record.state in (InstanceState.READY, InstanceState.GONE)
            return record.action == name and record.instance_id not in known and is_over

        (found,) = self.platform.events.wait(InstanceChanged, where=is_new)
        assert found.instance.state is InstanceState.READY, found.instance.error
        self.platform.served(activation, name)
        record: InstanceRecord = found.instance
        return record

    def weights(self, record: InstanceRecord) -> str:
        """The checksum of the weights that the instance holds."""
        url = f"http://{record.address}/instances/{record.instance_id}/run"
        headers = {"Authorization": f"Bearer {self.platform.registry.host_token('x')}"}
        body = {"value": {}, "activation_id": random_hex_id()}
        answer: dict[str, str] = requests.post(url, json=body, headers=headers, timeout=WAIT_S).json()
        return answer["weights"]

    def end(self, record: InstanceRecord) -> None:
        self.agents[int(record.host_id[1:])].fleet.release(record.instance_id, only_idle=False, drain_s=0.0)
        self.platform.events.wait(
            InstanceChanged,
            where=lambda m: m.instance.instance_id == record.instance_id and m.instance.state is InstanceState.GONE,
        )

    def push(self, seed: int, **shape: int) -> tuple[ModelIndex, str]:
        """Push other weights to the same name.  Return the pushed version, and the checksum of its weights."""
        model = write_model(self._tmp / f"m{seed}", seed=seed, **shape)
        index = checkpoints.push(model, open_store(URI), lambda _: None)
        return index, hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()

    def stop(self) -> None:
        for agent in self.agents:
            agent.stop()


@pytest.fixture
def fleet(valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setitem(PROGRAMS, KIND_LLM, ("-m", weights_llm.__name__))
    (tmp_path / "weed").mkdir()
    with ExitStack() as stack:
        endpoint = stack.enter_context(seaweed(tmp_path / "weed", "models"))
        store = {"THAW_S3_ENDPOINT": endpoint, **STORE_KEYS}
        for name, value in store.items():
            monkeypatch.setenv(name, value)
        platform = Platform(valkey_url, tmp_path)
        stack.callback(platform.close)
        made = Fleet(platform, stack, tmp_path, **store, THAW_FETCHD_READ_TIMEOUT_S="10")
        stack.callback(made.stop)
        yield made


def test_a_model_pushed_again_is_served_by_the_next_start_on_each_host(fleet: Fleet) -> None:
    names = [f"guest/chat{i}" for i in range(N_HOSTS)]
    pushed, old = fleet.push(1)
    first = [fleet.start(name) for name in names]
    assert {r.host_id for r in first} == {f"h{i}" for i in range(N_HOSTS)}
    assert {fleet.weights(r) for r in first} == {old}
    assert {r.model_version for r in first} == {pushed.sha256}
    again, new = fleet.push(2, n_layers=5)
    threading.Event().wait(TRUST_S)  # a start so soon after a look may take what that look has found
    assert {fleet.weights(r) for r in first} == {old}, "what runs goes on"
    for record in first:
        fleet.end(record)
    second = [fleet.start(name) for name in names]
    assert {r.host_id for r in second} == {f"h{i}" for i in range(N_HOSTS)}
    assert {r.host_id: fleet.weights(r) for r in second} == {r.host_id: new for r in second}
    assert {r.model_version for r in second} == {again.sha256}
    fleet.end(second[0])
    fleet.deploy("guest/pinned", versions.pin(URI, pushed.sha256))
    third = fleet.start("guest/pinned")
    assert (fleet.weights(third), third.model_version) == (old, pushed.sha256)

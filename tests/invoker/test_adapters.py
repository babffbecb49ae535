"""Adapters on their way through a real data port into a real container, from a real fetchd."""

from __future__ import annotations

import http.client
import json
import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from invoker.containers.adapter_slots import Held
from invoker.containers.adapters import FETCHED_AHEAD, INSPECTIONS, Adapters
from invoker.containers.fleet import Fleet
from invoker.containers.live import Live, Run
from invoker.containers.preflight import Preflights
from invoker.drivers.base import Handle
from invoker.packages.layers import Layers
from invoker.ports.data_port import DataPort
from relay.clients.fetch import FetchClient
from relay.protocol.adapter_messages import ADAPTER_HEADER, CONFIG_BYTES_HEADER, LEFT_HEADER, REPLACES_HEADER
from tests.fetchd.harness import Fetchd
from tests.relay.samples import INSTANCE
from tests.thaw_runtime.adapters import write_adapter
from tests.thaw_runtime.conftest import TOY, Container, llm_init, run_body
from tests.thaw_runtime.fake_descriptor_socket import FakeDescriptorSocket
from tests.thaw_runtime.models import write_tiny_model
from thaw.action import KIND_LLM, Action, Exec, Limits
from thaw.config import ScalingConfig
from thaw.errors import AdapterMissing, Throttled
from thaw.ids import ActionName, Namespace
from thaw.logs import Log
from thaw.model import ModelFacts

BODY = {"prompt": [1, 2, 3], "max_tokens": 3}
POOL = ActionName("guest/.pool")


class Gate(FetchClient):
    """fetchd's client, whose inspections wait while ``opened`` is not set."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.opened = threading.Event()
        self.opened.set()
        self.asked: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.refusals = 0

    def inspect_adapter(
        self, uri: str, namespace: str, base: str = "", max_rank: int = 0, *, deadline_s: float = 60.0
    ) -> ModelFacts:
        self.asked.put(uri)
        assert self.opened.wait(20)
        if self.refusals:
            self.refusals -= 1
            raise Throttled("too many inspections")
        return super().inspect_adapter(uri, namespace, base, max_rank, deadline_s=deadline_s)


class Instance:
    """One container with places for two adapters, behind a data port."""

    def __init__(self, container: Container, fetch: Gate, models: Path) -> None:
        self.container, self.fetch, self.models = container, fetch, models
        init = llm_init()
        engine = replace(init.config.engine, max_lora_rank=8)
        config = replace(init.config, engine=engine, scaling=ScalingConfig(max_batch=2))
        status, reply = container.ask("POST", "/init", {"value": replace(init, config=config)})
        assert status == 200, reply
        self.live = Live(replace(INSTANCE, action=POOL), KIND_LLM)
        self.live.function = Action(POOL, Namespace("guest"), "0.0.1", Exec(KIND_LLM), Limits(60_000), config=config)
        self.live.handle = Handle("c", "process", Path(container.socket).parent, socket=container.socket)
        takes_all = {"begin_run": lambda _: Run(self.live), "free_slot": lambda _: None, "end_run": lambda _: None}
        fleet = cast(Fleet, SimpleNamespace(epoch=1, log=Log("invoker"), **takes_all))
        self.adapters = Adapters(fleet, fetch, fleet.log)
        others = cast(Preflights, None), cast(Layers, None)
        self.port = DataPort("127.0.0.1:0", fleet, *others, self.adapters, lambda: "t", lambda: "t")
        self.port.start()

    def send(self, adapter: str, **headers: str) -> http.client.HTTPConnection:
        host, _, port = self.port.address.rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=30)
        named = {"Authorization": "Bearer t", ADAPTER_HEADER: f"file://{self.models}/{adapter}", **headers}
        connection.request("POST", "/instances/i/run", json.dumps(run_body(BODY, "completions")), named)
        return connection

    def run(self, adapter: str, **headers: str) -> tuple[int, str]:
        """The status and the code of the error, if there is one."""
        with closing(self.send(adapter, **headers)) as connection:
            return answer_of(connection)

    def loaded(self) -> list[str]:
        """The adapters that the container has."""
        names = self.container.ask("GET", "/adapters")[1]["names"]
        return [name.rpartition("/")[2].partition("#")[0] for name in names]

    def name(self, adapter: str) -> str:
        names = self.container.ask("GET", "/adapters")[1]["names"]
        return next(n for n in names if f"/{adapter}#" in n)

    def replace_behind_the_invokers_back(self, adapter: str, replaces: str) -> None:
        headers = {ADAPTER_HEADER: adapter, REPLACES_HEADER: self.name(replaces), CONFIG_BYTES_HEADER: "2"}
        self.container.http.request("POST", "/adapter", b"{}weights", headers)
        reply = self.container.http.getresponse()
        assert (reply.status, reply.read()) == (200, b'{"ok":true}')


def answer_of(connection: http.client.HTTPConnection) -> tuple[int, str]:
    reply = connection.getresponse()
    said = reply.read()
    return reply.status, "" if reply.status == 200 else json.loads(said)["info"]["code"]


@pytest.fixture
def container(run_dir: Path, tmp_path: Path) -> Iterator[Container]:
    descriptor_socket = FakeDescriptorSocket(write_tiny_model(tmp_path / "model"), run_dir / "door")
    made = Container(TOY, run_dir, descriptor_socket)
    made.wait_listening()
    yield made
    made.close()
    descriptor_socket.close()


@pytest.fixture
def instance(container: Container, tmp_path: Path) -> Iterator[Instance]:
    for seed, name in enumerate(("a", "b", "c")):
        write_adapter(tmp_path / "models" / name, seed)
    with Fetchd(tmp_path) as fetchd:
        made = Instance(container, Gate(fetchd.socket), tmp_path / "models")
        yield made
        made.port.stop()
        made.live.drop_connections()


def test_an_adapter_that_the_container_has_lost_is_loaded_again(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller may send the run again as soon as it has the answer, so the loss is noted before."""
    lost = instance.adapters.lost

    def slow_lost(live: Live, held: Held) -> None:
        time.sleep(0.2)
        lost(live, held)

    monkeypatch.setattr(instance.adapters, "lost", slow_lost)
    for adapter in ("a", "b"):
        assert instance.run(adapter)[0] == 200
    instance.replace_behind_the_invokers_back("stranger#1", "a")
    assert instance.run("a") == (AdapterMissing.http_status, "AdapterMissing")
    assert instance.run("a")[0] == 200
    assert instance.run("b")[0] == 200
    assert set(instance.loaded()) == {"a", "b"}


def test_a_client_that_hangs_up_while_its_adapter_is_on_its_way_leaves_at_once(instance: Instance) -> None:
    instance.fetch.opened.clear()
    connection = instance.send("a")
    instance.fetch.asked.get(timeout=20)
    connection.sock.shutdown(socket.SHUT_WR)
    assert connection.sock.recv(1) == b""
    connection.close()
    instance.fetch.opened.set()
    assert instance.run("a")[0] == 200  # the load went on, or is made again


def test_a_run_waits_for_its_adapter_no_longer_than_it_has(instance: Instance) -> None:
    instance.fetch.opened.clear()
    assert instance.run("a", **{LEFT_HEADER: "50"}) == (502, "TimeLimitExceeded")
    instance.fetch.opened.set()


def test_a_run_whose_container_ends_while_its_adapter_is_on_its_way_is_routed_again(instance: Instance) -> None:
    instance.fetch.opened.clear()
    connection = instance.send("a")
    instance.fetch.asked.get(timeout=20)
    instance.live.note_exit()
    assert answer_of(connection) == (410, "InstanceGone")
    connection.close()
    instance.fetch.opened.set()


def test_what_a_load_fails_with_is_the_runs_error(instance: Instance) -> None:
    assert instance.run("nobody") == (502, "ModelNotFound")


def test_inspections_wait_for_their_turn_and_a_refusal_means_route_again(instance: Instance) -> None:
    instance.fetch.opened.clear()
    connections = [instance.send(f"no-{i}") for i in range(2)]
    uris = [f"file://{instance.models}/ahead-{i}" for i in range(2 * FETCHED_AHEAD)]
    instance.adapters.fetch_ahead(uris, "guest")
    for _ in range(INSPECTIONS):
        instance.fetch.asked.get(timeout=20)
    with pytest.raises(queue.Empty):
        instance.fetch.asked.get(timeout=0.2)
    instance.fetch.opened.set()
    for _ in range(len(uris) + len(connections) - INSPECTIONS):
        instance.fetch.asked.get(timeout=20)
    for connection in connections:
        assert connection.getresponse().status == 502
        connection.close()
    instance.fetch.refusals = 1
    assert instance.run("a") == (429, "InstanceBusy")

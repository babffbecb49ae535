"""A warming beside requests: it takes no turn of theirs, and reports its result, or why it has none."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.serving.hangup import ClientGone, Hangup
from gateway.serving.held.until_news import Held
from gateway.serving.routing.versions import Versions
from gateway.serving.routing.waiting_room import Ticket, WaitingRoom
from gateway.serving.scaling import warming
from gateway.serving.scaling.warming import Warmed, Warming
from tests.gateway.calls import HELLO, instance_of
from thaw.errors import ThawError, Unavailable
from thaw.ids import ActivationId, HostId, Namespace
from thaw.instance import InstanceRecord, InstanceState

READY = instance_of(version="0.0.2")
STARTING = replace(READY, state=InstanceState.STARTING)


class Registry:
    def __init__(self) -> None:
        self.records: list[InstanceRecord] = []
        self.hosts: list[str] = ["h0"]
        self.inspected: object = None

    def instances(self) -> list[InstanceRecord]:
        return self.records

    def plans(self) -> list[Any]:
        return []

    def live_hosts(self) -> list[str]:
        return self.hosts

    def model(self, _uri: str) -> object:
        return self.inspected


class Demand:
    """Tells when a warming waits."""

    def __init__(self) -> None:
        self.added = threading.Event()

    def add(self, _call: object) -> None:
        self.added.set()

    def withdraw(self, _call: object) -> None:
        pass


class World:
    def __init__(self) -> None:
        self.room, self.registry, self.demand, self.held = WaitingRoom(), Registry(), Demand(), Held(8)
        self.hangup = Hangup()
        self.deployed: Any = SimpleNamespace(served_by=HELLO, adapter="")
        versions = Versions(lambda _: self.deployed)
        self.warming = Warming(self.room, self.demand, self.registry, self.held, versions)  # type: ignore[arg-type]
        self.pool = ThreadPoolExecutor(1)

    def warm(self, wait_s: float = 0.0, config: object = None) -> Warmed:
        names = {"name": HELLO, "served_by": HELLO, "served_version": "0.0.2"}
        call: Any = SimpleNamespace(
            activation_id=ActivationId("f" * 32),
            action=SimpleNamespace(**names, is_llm=config is not None, config=config, adapter=""),
            received_s=time.monotonic(),
            subject=SimpleNamespace(namespace=Namespace("guest")),
            wanted_adapter="",
            announced_s=None,
            hangup=self.hangup,
        )
        return self.warming.warm(call, wait_s)

    def begin(self, wait_s: float = 30.0) -> Future[Warmed]:
        """Return when the warming waits."""
        asked = self.pool.submit(self.warm, wait_s)
        assert self.demand.added.wait(20)
        return asked

    def changed(self, record: InstanceRecord) -> None:
        self.registry.records = [record]
        self.room.instance_changed(record)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(warming, "_BEGINS_S", 0.05)
    monkeypatch.setattr(warming, "_MODEL_BEGINS_S", 0.05)
    return World()


def ticket(n: int, version: str = "0.0.2") -> Ticket:
    return Ticket(ActivationId(f"{n:032x}"), HELLO, version)


def test_a_request_behind_a_warming_asks_an_instance_again_that_refused_and_gets_its_slot(world: World) -> None:
    older = replace(READY, action_version="0.0.1")
    world.room.instance_changed(older)
    first = ticket(1, "0.0.1")
    world.room.enter(first)
    world.room.refused(first.route, gone=False)
    asked = world.begin()  # it waits for a later version, before the request comes
    request = ticket(2, "0.0.1")
    world.room.enter(request)
    assert world.room.must_ask(request), "the warming does not stand before it"
    world.room.retry(HELLO)
    assert request.route is not None
    world.changed(READY)
    assert asked.result(20).state == "ready"


def test_an_instance_that_is_ready_and_busy_is_warm(world: World) -> None:
    world.room.instance_changed(READY)
    world.room.enter(ticket(1))
    assert world.warm() == Warmed("ready", 0.0, (HostId("h0"),), busy=True)


def test_a_warming_ends_when_an_instance_is_ready_though_requests_get_all_its_slots(world: World) -> None:
    asked = world.begin()
    request = ticket(1)
    world.room.enter(request)
    world.changed(READY)
    assert request.route is not None
    assert asked.result(20) == Warmed("ready", 0.0, (HostId("h0"),), busy=True)


@pytest.mark.parametrize("older", [STARTING, READY])
def test_an_instance_of_an_older_version_is_no_start_of_this_one(world: World, older: InstanceRecord) -> None:
    world.changed(replace(older, action_version="0.0.1"))
    with pytest.raises(Unavailable, match="instances of an older version have not ended yet"):
        world.warm()


def test_a_start_that_ends_again_is_no_start(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.changed(STARTING)
    assert world.warm() == Warmed("starting", None, (HostId("h0"),))
    monkeypatch.setattr(warming, "_BEGINS_S", 0.5)
    looks = iter([[STARTING]])  # and it has gone at the next one, whatever wakes the warming
    monkeypatch.setattr(world.registry, "instances", lambda: next(looks, []))
    asked = world.begin(0.5)
    world.room.instance_changed(replace(STARTING, state=InstanceState.GONE))
    with pytest.raises(Unavailable, match="no host has room for it"):
        asked.result(20)


def test_whoever_cannot_be_warmed_is_told_why(world: World) -> None:
    model: Any = SimpleNamespace(model=SimpleNamespace(uri="s3://models/new"))
    with pytest.raises(Unavailable, match="its model is still being looked at"):
        world.warm(config=model)
    world.registry.inspected = object()
    with pytest.raises(Unavailable, match="no host has room for it"):
        world.warm(config=model)
    world.registry.hosts = []
    with pytest.raises(Unavailable, match="no host is up"):
        world.warm()


@pytest.mark.parametrize(("end", "error"), [("hangup", ClientGone), ("drain", Unavailable)])
def test_a_warming_sees_its_client_hang_up_and_its_gateway_end(
    world: World, end: str, error: type[ThawError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warming, "_BEGINS_S", 60.0)
    asked = world.begin()
    if end == "hangup":
        world.hangup.set()
    else:
        world.held.end_all()
    with pytest.raises(error):
        asked.result(20)

"""The disk of a platform's state fills under load and is freed again.

No accepted request is lost, and no process remains that only looks alive.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import requests

from tests.e2e.machine import Machine
from tests.full_disk import Disk, full_disk

HELLO = "/api/v1/namespaces/_/actions/hello"
WAIT_S = 90.0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with full_disk(tmp_path / "disk", n_mb=32) as made:
        yield made


@pytest.fixture
def machine(disk: Disk, tmp_path: Path) -> Iterator[Machine]:
    """Two hosts without models.  State, logs and pid files are on the small disk."""
    made = Machine(disk.path, dict(os.environ))
    made.up(
        "--hosts",
        "2",
        "--store",
        str(tmp_path / "store"),
        "--stem-cells",
        "off",
        "--pool-mb",
        "64",
        "--memory-mb",
        "1024",
    )
    yield made
    made.down()
    assert made.leftovers() == []


@dataclass
class Load:
    """Sends twenty requests for a 202 per second and records their outcomes.  It also asks /health."""

    machine: Machine
    accepted: list[str] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    health: list[int] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Load:
        self._threads = [threading.Thread(target=self._ask), threading.Thread(target=self._look)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        with requests.Session() as session:
            session.auth = self.machine.auth()
            while not self._stop.wait(0.05):
                reply = session.post(self.machine.url + HELLO, json={"name": "Ada"}, timeout=60)
                if reply.status_code == 202:
                    self.accepted.append(reply.json()["activationId"])
                else:
                    self.refused.append(reply.status_code)

    def _look(self) -> None:
        while not self._stop.wait(0.1):
            self.health.append(requests.get(f"{self.machine.url}/health", timeout=60).status_code)


def until(true: Callable[[], bool], what: str) -> None:
    """Wait for a condition that no message announces: check it several times."""
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline, what
        threading.Event().wait(0.1)


def succeeded(machine: Machine, activation_id: str) -> bool:
    record = machine.request("GET", f"/api/v1/namespaces/_/activations/{activation_id}")
    return record.status_code == 200 and bool(record.json()["response"]["success"])


def test_every_202_accepted_around_a_full_disk_runs_and_health_tells_the_truth(machine: Machine, disk: Disk) -> None:
    machine.thaw("action", "create", "hello", "examples/hello/hello.py")
    pid = machine.pid_of("state")
    with Load(machine) as load:
        until(lambda: len(load.accepted) > 20, "nothing was accepted")
        disk.fill()
        until(lambda: len(load.refused) > 2, "no 202 was refused on a full disk")
        # a state server that removes half a record has room for one more heartbeat, but not for long
        until(lambda: len(load.health) > 10 and set(load.health[-10:]) == {503}, "/health said that all is well")
        n_before = len(load.accepted)
        disk.free()
        until(lambda: len(load.accepted) > n_before + 20, "nothing was accepted any more")
        until(lambda: load.health[-5:] == [200] * 5, "/health did not see that all is well")
    assert set(load.refused) == {503}
    for activation_id in load.accepted:
        until(lambda: succeeded(machine, activation_id), f"{activation_id} was accepted and not run")  # noqa: B023
    hosts = machine.request("GET", "/api/v1/thaw/hosts").json()["hosts"]
    assert sorted((h["host_id"], h["live"]) for h in hosts) == [("host-0", True), ("host-1", True)]
    assert machine.thaw("dev", "status").returncode == 0
    assert machine.pid_of("state") != pid, "the state server does not go on without writing"
    log = (machine.state_dir / "supervisor.log").read_text().splitlines()  # it is on that disk, so lines may be lost
    counts = [event["count"] for event in map(json.loads, log) if event["component"] == "state"]
    assert counts == sorted(set(counts))

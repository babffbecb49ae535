"""Requests of every kind run while processes are killed at random: nothing is lost, and nothing is left behind."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import pytest
import requests

from tests.e2e.machine import Machine
from tests.e2e.pipelines import wait_for
from thaw.dev.known_answers import FRANCE

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]
COMPONENTS = ("gateway", "scheduler", "host-0/invoker", "host-0/fetchd", "state")


@dataclass
class Traffic:
    """The clients' observations.  They are written while the lock is held."""

    machine: Machine
    stop: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    outcomes: Counter[str] = field(default_factory=Counter)
    accepted: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def run(self, seed: int) -> None:
        choice = random.Random(seed)
        while not self.stop.is_set():
            kind = choice.choice(("chat", "hello", "202"))
            try:
                self._note(kind, getattr(self, f"_{'accept' if kind == '202' else kind}")())
            except requests.RequestException:
                self._note(kind, "no gateway")
                self.stop.wait(0.5)

    def _chat(self) -> str:
        response = self.machine.chat("chat", FRANCE.prompt, temperature=0, max_tokens=8, timeout=120)
        if response.status_code == 200 and FRANCE.text not in response.text:
            self.wrong.append(response.text)
        return self._status(response)

    def _hello(self) -> str:
        path = "/api/v1/namespaces/_/actions/hello?blocking=true&result=true"
        response = self.machine.request("POST", path, json={"name": "Ada"})
        if response.status_code == 200 and response.json() != {"greeting": "Hello, Ada!"}:
            self.wrong.append(response.text)
        return self._status(response)

    def _accept(self) -> str:
        response = self.machine.request("POST", "/api/v1/namespaces/_/actions/hello", json={"name": "Ida"})
        if response.status_code == 202:
            with self.lock:
                self.accepted.append(response.json()["activationId"])
        return self._status(response)

    def _status(self, response: requests.Response) -> str:
        if response.status_code >= 400 and not response.json().get("error") and "response" not in response.json():
            self.wrong.append(f"{response.status_code} without a reason: {response.text[:200]}")
        return str(response.status_code)

    def _note(self, kind: str, outcome: str) -> None:
        with self.lock:
            self.outcomes[f"{kind} {outcome}"] += 1


def has_ended(machine: Machine, activation_id: str) -> bool:
    return machine.request("GET", f"/api/v1/namespaces/_/activations/{activation_id}").status_code == 200


@pytest.mark.parametrize(
    ("seed", "seconds", "every_s"), [(20261121, 20, 8), pytest.param(7, 180, 10, marks=pytest.mark.full)]
)
def test_a_platform_under_kills_loses_no_202_and_gives_no_wrong_answer(
    besieged: Machine, seed: int, seconds: float, every_s: float
) -> None:
    machine = besieged
    assert machine.chat("chat", "Hello", max_tokens=2).status_code == 200
    traffic, choice = Traffic(machine), random.Random(seed)
    clients = [threading.Thread(target=traffic.run, args=(seed + n,)) for n in range(4)]
    for client in clients:
        client.start()
    killed = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        killed.append(choice.choice(COMPONENTS))
        machine.kill(killed[-1])
        time.sleep(every_s)  # this is the interval between kills and waits for nothing
    traffic.stop.set()
    for client in clients:
        client.join(180)
        assert not client.is_alive(), "a client hangs"
    print(f"seed {seed}: killed {killed}; {dict(traffic.outcomes)}")
    assert traffic.wrong == []
    assert traffic.outcomes["hello 200"] > 0
    for activation_id in traffic.accepted:
        wait_for(lambda: has_ended(machine, activation_id), f"{activation_id} was accepted and has no record")  # noqa: B023
    listed = [
        a["activationId"] for a in machine.request("GET", "/api/v1/namespaces/_/activations?limit=0&docs=true").json()
    ]
    assert max(Counter(listed).values()) == 1

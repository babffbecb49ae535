"""Pipelines become one worker or two and hosts are drained under random requests while processes are killed.

Nothing is lost, no answer has a wrong token, each activation has one record, and everything is given back.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.e2e.fleet import PROMPTS, Fleet
from tests.e2e.machine import events
from tests.e2e.pipelines import Pipelines, wait_gone

pytestmark = [pytest.mark.vllm, pytest.mark.full, pytest.mark.timeout(2400)]
SECONDS = float(os.environ.get("THAW_SOAK_S", "600"))
ACTIONS = {
    "three": {"stages": 3, "keep": 1, "keep_alive_s": 6},
    "two": {"stages": 2, "keep": 1, "keep_alive_s": 3},
    "stays": {"stages": 2, "keep_alive_s": 5},
    "grows": {"stages": 2, "keep": 2, "max_batch": 4, "max_instances": 2, "keep_alive_s": 6},
}
HAPPENED = {
    "became one worker": "was one worker on",
    "became a worker beside it": "was a worker of its own on",
    "moved": "the answer went on on",
}
"""What ``explain`` says of the answers of a soak in which each of these has happened."""
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.9, "seed": 5, "presence_penalty": 0.5},
)
MOST_TOKENS = 96
N_CLIENTS = 3
EVERY_S = 7.0
"""The time between two faults."""
FAULTS = ("stage", "stage", "stopped stage", "drain", "drain", "scheduler", "invoker", "fetchd", "relay")


Tokens = dict[tuple[str, int], list[str]]
"""The tokens of a single worker's answer, by prompt and number of the sampling."""


@dataclass
class Client:
    """Asks again and again, and compares each answer with the one of a single worker."""

    fleet: Fleet
    whole: Tokens
    stop: threading.Event
    seed: int
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def run(self) -> None:
        choice = random.Random(self.seed)
        while not self.stop.wait(choice.choice((0, 0, 0.5, 3, 8))):
            action, prompt = choice.choice(list(ACTIONS)), choice.choice(PROMPTS)
            sampling, n_tokens = choice.randrange(len(SAMPLINGS)), choice.randint(1, MOST_TOKENS)
            try:
                self.outcomes[f"{action} {self._ask(action, prompt, sampling, n_tokens)}"] += 1
            except requests.RequestException as e:
                self.wrong.append(f"{action}: {e!r}")  # no gateway is killed

    def _ask(self, action: str, prompt: str, sampling: int, n_tokens: int) -> str:
        response = self.fleet.chat(action, prompt, timeout=300, **body(sampling, n_tokens))
        self.asked.append(response.headers["X-Openwhisk-Activation-Id"])
        if response.status_code != 200:
            return f"{response.status_code} {response.json()['error']}"
        found, failed = read(response)
        if failed:
            return f"failed: {failed}"
        if tokens(found) != self.whole[prompt, sampling][:n_tokens]:
            self.wrong.append(f"{self.asked[-1]} of {action}, {n_tokens} tokens: {tokens(found)}")
        return "right"


def read(response: requests.Response) -> tuple[list[dict[str, Any]], str]:
    """Return the events of a stream, and the message of the error that ended it."""
    lines = [line.removeprefix(b"data: ") for line in response.iter_lines() if line.startswith(b"data: ")]
    if lines[-1] == b"[DONE]":
        return [json.loads(line) for line in lines[:-1]], ""
    return [], str(json.loads(lines[-1])["error"]["message"])


def body(sampling: int, n_tokens: int) -> dict[str, Any]:
    return SAMPLINGS[sampling] | {"max_tokens": n_tokens, "stream": True, "ignore_eos": True, "logprobs": True}


def tokens(found: list[dict[str, Any]]) -> list[str]:
    choices = [choice for event in found for choice in event["choices"] if choice["logprobs"] is not None]
    return [each["token"] for choice in choices for each in choice["logprobs"]["content"]]


def reference(fleet: Fleet) -> Tokens:
    fleet.deploy("single", scaling={"max_stages": 1}, slo={"ttft_ms": 60_000})
    found = {
        (prompt, k): tokens(events(fleet.chat("single", prompt, **body(k, MOST_TOKENS))))
        for prompt in PROMPTS
        for k in range(len(SAMPLINGS))
    }
    assert {len(each) for each in found.values()} == {MOST_TOKENS}
    fleet.remove("single")
    return found


class Faults:
    """Causes faults of the platform.  Every drained host and every stopped process goes on before the next fault."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self._fleet, self._choice = fleet, random.Random(seed)
        self.done: Counter[str] = Counter()

    def next(self) -> None:
        kind = self._choice.choice(FAULTS)
        host = f"host-{self._choice.randrange(4)}"
        if kind in ("stage", "stopped stage"):
            stages = [s for action in ACTIONS for s in self._fleet.pipelines.containers(action)]
            if not stages:
                return
            victim = self._choice.choice(stages)
            if kind == "stage":
                victim.kill()
            else:
                self._stopped(victim.pid)
        elif kind == "drain":
            self._fleet.thaw("host", "drain", host)
            time.sleep(EVERY_S)  # the length of the fault
            self._fleet.thaw("host", "undrain", host)
        else:
            self._fleet.kill(f"{host}/{kind}" if kind in ("invoker", "fetchd") else kind)
        self.done[kind] += 1

    def _stopped(self, pid: int) -> None:
        try:
            os.killpg(os.getsid(pid), signal.SIGSTOP)
            time.sleep(2)  # the length of the fault
            os.killpg(os.getsid(pid), signal.SIGCONT)
        except ProcessLookupError:
            pass  # it has ended


def test_under_switches_drains_and_kills_every_answer_is_right_and_recorded_once(tmp_path: Path) -> None:
    seed = int(os.environ.get("THAW_SOAK_SEED", random.randrange(2**32)))
    print(f"THAW_SOAK_SEED={seed} THAW_SOAK_S={SECONDS:g}")
    fleet = Fleet(tmp_path, dict(os.environ))
    fleet.directory = tmp_path
    try:
        fleet.up("--hosts", "4", "--link", "200mbit", "--memory-mb", "8192", "--pool-mb", "768")
        fleet.thaw("model", "demo")
        fleet.pipelines = Pipelines(fleet)
        fleet.pipelines.wait_stem_cells(4)
        whole = reference(fleet)
        for action, scaling in ACTIONS.items():
            fleet.deploy(action, scaling=scaling)
        clients = soak(fleet, whole, seed)
        wrong = [each for client in clients for each in client.wrong]
        outcomes = sum((client.outcomes for client in clients), Counter[str]())
        print(f"outcomes: {dict(outcomes)}")
        assert wrong == []
        assert sum(n for what, n in outcomes.items() if what.endswith("right")) >= 0.9 * outcomes.total()
        asked = [each for client in clients for each in client.asked]
        check_records(fleet, asked)
        check_happened(fleet, asked)
        check_returned(fleet)
        fleet.pipelines.close()
    finally:
        fleet.down()
    assert fleet.leftovers() == []


def soak(fleet: Fleet, whole: Tokens, seed: int) -> list[Client]:
    stop, faults = threading.Event(), Faults(fleet, seed)
    clients = [Client(fleet, whole, stop, seed + 1 + n) for n in range(N_CLIENTS)]
    threads = [threading.Thread(target=client.run) for client in clients]
    for thread in threads:
        thread.start()
    until = time.monotonic() + SECONDS
    try:
        while time.monotonic() < until:
            time.sleep(EVERY_S)  # this is the interval between faults and waits for nothing
            faults.next()
    finally:
        stop.set()
        for thread in threads:
            thread.join(360)
        print(f"faults: {dict(faults.done)}")
    assert not any(thread.is_alive() for thread in threads), "a client hangs"
    return clients


def check_records(fleet: Fleet, asked: list[str]) -> None:
    for activation_id in asked:
        fleet.thaw("activation", "get", activation_id, "--wait", "60")
    listed = fleet.request("GET", "/api/v1/namespaces/_/activations?limit=0").json()
    n_records = Counter(each["activationId"] for each in listed)
    assert {activation_id: n_records[activation_id] for activation_id in asked} == dict.fromkeys(asked, 1)


def check_happened(fleet: Fleet, asked: list[str]) -> None:
    explained = [fleet.thaw("activation", "explain", activation_id).stdout for activation_id in asked]
    found = {what: sum(said in each for each in explained) for what, said in HAPPENED.items()}
    print(f"answers whose pipeline or host changed: {found}")
    assert all(found.values()), found


def check_returned(fleet: Fleet) -> None:
    """Delete the actions.  Then nothing of a group is left in the state server, the relay server, or on a host."""
    for action in ACTIONS:
        fleet.thaw("action", "delete", action)
    for action in ACTIONS:
        wait_gone(lambda action=action: [str(c) for c in fleet.pipelines.containers(action)])  # type: ignore[misc]
    wait_gone(fleet.pipelines.remainders)

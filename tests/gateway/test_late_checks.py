"""A model that was deployed unchecked says so in its record, and is checked as soon as a host can."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import redis

from relay.state import keys
from relay.state.rewriting import rewrite_action
from tests.gateway.conftest import HERE, LLM_CONFIG, GatewayProcess, Start, notes, pairs
from tests.gateway.fake_invoker import FakeInvoker
from tests.gateway.test_preflight import FOUND, asked, error, put
from tests.gateway.waits import until
from tests.scheduler.world import report
from thaw.action import REFUSED, UNCHECKED, Action
from thaw.errors import ModelUnsupported
from thaw.ids import ActionName, Namespace

__all__ = ["asked"]

BUSY = {**FOUND, "engine": "", "notes": [], "unchecked": "no cell now"}
GUEST, CHAT = Namespace("guest"), ActionName("guest/chat")


def noted(gateway: GatewayProcess) -> dict[str, Any]:
    return notes(gateway.read("actions/chat"))


def listed(gateway: GatewayProcess) -> dict[str, Any]:
    (found,) = gateway.read("actions")
    return notes(found)


@pytest.fixture
def unchecked(gateway: GatewayProcess, asked: FakeInvoker) -> FakeInvoker:
    """The host of a model that nobody could check when it was deployed."""
    asked.preflight = lambda: (200, BUSY)
    assert notes(put(gateway).json())[UNCHECKED] == "no cell now"
    return asked


def test_the_note_goes_when_the_engine_has_looked(gateway: GatewayProcess, unchecked: FakeInvoker) -> None:
    assert (noted(gateway)[UNCHECKED], listed(gateway)[UNCHECKED]) == ("no cell now", "no cell now")
    unchecked.preflight = lambda: (200, {**FOUND, "embeds": True})
    until(lambda: UNCHECKED not in noted(gateway))
    gateway.wait_for_event("deployed_model_checked")
    n_asked = len(unchecked.preflights)
    assert gateway.read("actions/chat")["version"] == "0.0.1"
    refused = gateway.chat()
    assert (refused.status_code, "embedding" in refused.text) == (400, True), "what the look found out is known"
    assert len(unchecked.preflights) == n_asked


def test_a_refusal_that_comes_late_stands_in_the_record(gateway: GatewayProcess, unchecked: FakeInvoker) -> None:
    unchecked.preflight = lambda: error(ModelUnsupported("no architecture Foo"))
    until(lambda: REFUSED in noted(gateway))
    said = "would not start: no architecture Foo"
    assert (noted(gateway)[REFUSED], listed(gateway)[REFUSED], UNCHECKED in noted(gateway)) == (said, said, False)
    assert gateway.wait_for_event("deployed_model_would_not_start")["error"] == "no architecture Foo"
    unchecked.preflight = lambda: (200, FOUND)
    assert REFUSED not in notes(put(gateway, "?overwrite=true").json()), "another version is another question"


def test_what_was_deployed_by_force_says_that_it_would_not_start(gateway: GatewayProcess, asked: FakeInvoker) -> None:
    asked.preflight = lambda: error(ModelUnsupported("no"))
    assert notes(put(gateway, "?force=true").json())[REFUSED] == "would not start: no"


def test_another_gateway_checks_what_one_that_died_has_deployed(
    gateway: GatewayProcess, unchecked: FakeInvoker, start_gateway: Start, valkey_url: str
) -> None:
    with redis.Redis.from_url(valkey_url) as client:

        def is_between_looks() -> bool:
            """A claim lasts a minute, and the pause after the first look two seconds."""
            due = client.zscore(keys.UNCHECKED, CHAT)
            return len(unchecked.preflights) > 1 and float(str(due)) / 1e6 - time.time() < 30

        until(is_between_looks)
        gateway.kill()
    unchecked.preflight = lambda: (200, FOUND)
    other = start_gateway()
    until(lambda: UNCHECKED not in noted(other))


def test_a_model_of_a_platform_without_hosts_is_checked_when_one_has_come(gateway: GatewayProcess) -> None:
    assert notes(put(gateway).json())[UNCHECKED] == "the platform has no host"
    gateway.invoker.preflight = lambda: (200, FOUND)
    gateway.invoker.registry.report_host(replace(report("h0"), address=gateway.invoker.address), lease_s=600)
    gateway.wait_for_event("deployed_model_checked")


def test_the_answer_for_one_version_is_not_written_into_the_next(
    gateway: GatewayProcess, asked: FakeInvoker, valkey_url: str
) -> None:
    looks, go_on = threading.Event(), threading.Event()

    def late_refusal() -> tuple[int, Any]:
        if len(asked.preflights) == 1:
            return 200, BUSY
        if looks.is_set():
            return 200, FOUND
        looks.set()
        go_on.wait(30)
        return error(ModelUnsupported("the old one"))

    asked.preflight = late_refusal
    put(gateway)
    assert looks.wait(30)
    assert UNCHECKED not in notes(put(gateway, "?overwrite=true").json())
    go_on.set()
    with redis.Redis.from_url(valkey_url) as client:
        until(lambda: client.zcard(keys.UNCHECKED) == 0)
    assert REFUSED not in noted(gateway)


def test_a_late_check_is_no_change_that_an_update_would_undo(
    gateway: GatewayProcess, unchecked: FakeInvoker, valkey_url: str
) -> None:
    def told(action: Action) -> Action:
        return replace(action, unchecked="", refusal="no")

    def while_it_is_updated(change: Callable[[Action], Action]) -> int:
        def rewrites() -> tuple[int, Any]:
            with redis.Redis.from_url(valkey_url) as client:
                rewrite_action(client, GUEST, CHAT, change)
            return 200, BUSY

        unchecked.preflight = rewrites
        changed = {**LLM_CONFIG, "engine": {"max_model_len": 64}}
        return put(gateway, "?overwrite=true", config=changed).status_code

    assert while_it_is_updated(told) == 200
    assert while_it_is_updated(lambda action: replace(action, keep_alive_s=action.keep_alive_s + 1)) == 409


def test_clients_do_not_write_what_a_check_says(gateway: GatewayProcess, unchecked: FakeInvoker) -> None:
    own = pairs(**{UNCHECKED: "mine", REFUSED: "mine", "a": 1})
    changed = notes(put(gateway, "?overwrite=true", annotations=own).json())
    assert (changed[UNCHECKED], changed["a"], REFUSED in changed) == ("no cell now", 1, False)
    assert gateway.call("DELETE", f"{HERE}/actions/chat").status_code == 200

"""Each component, run as an operator runs it, ends and says why when one of its threads is made to fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.conftest import free_port
from thaw.process.lasting import EXIT_THREAD_DIED

ROOT = Path(__file__).parents[2]
FAILS = """
import {module} as component
from thaw.process import lasting

def fails(*_):
    raise KeyError("a defect")

def break_method(cls, name):
    assert callable(getattr(cls, name))
    setattr(cls, name, fails)

lasting.GRACE_S = 0.0
{patch}
component.main()
"""
ONCE = """
import functools, os, gateway.core
beat = gateway.core.Gateway._beat

def fails_once(self):
    try:
        os.mkdir({marker!r})
    except FileExistsError:
        return beat(self)
    fails()

gateway.core.Gateway._beat = fails_once

def end_when_told(status):
    open({told!r}).close()
    os._exit(status)

lasting.guard = functools.partial(lasting.guard, end=end_when_told)
"""


class Component:
    def __init__(self, module: str, patch: str, env: dict[str, str]) -> None:
        code = FAILS.format(module=module, patch=patch)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/runtime-python", **env},
            stderr=subprocess.PIPE,
            text=True,
        )
        self._overdue = threading.Timer(300, self.process.kill)  # this ends a wait for the process's next line
        self._overdue.start()

    def event(self, name: str) -> dict[str, Any]:
        assert self.process.stderr is not None
        seen = []
        for line in self.process.stderr:
            seen.append(line)
            if line.startswith("{") and (event := json.loads(line))["event"] == name:
                return dict(event)
        raise AssertionError(f"no {name}: {''.join(seen)}")

    def end(self) -> int:
        """Return the exit status.  If the process does not end by itself, end it."""
        try:
            return self.process.wait(60)
        finally:
            self._overdue.cancel()
            self.process.kill()
            self.process.wait(60)
            assert self.process.stderr is not None
            self.process.stderr.close()


@pytest.mark.parametrize(
    ("module", "patch", "thread"),
    [
        ("gateway.scheduler.loop", "break_method(component.Leadership, '_run')", "lease"),
        ("gateway.scheduler.loop", "break_method(component.Scheduler, '_take')", "scheduler"),
        ("gateway.scheduler.loop", "break_method(component.EventReader, '_read_all')", "event-reader"),
        ("invoker.main", "break_method(component.Reporter, '_beat')", "heartbeat"),
        ("invoker.main", "break_method(component.Publisher, '_next')", "publisher"),
        ("invoker.main", "break_method(component.CommandReader, '_read_all')", "command-reader"),
        ("fetchd.main", "import fetchd.janitor; break_method(fetchd.janitor.Heart, '_run')", "heart"),
        ("fetchd.main", "import fetchd.server; break_method(fetchd.server.UnixServer, '_accept')", "accept"),
    ],
)
def test_a_component_ends_with_a_thread_that_must_last_and_names_it(
    valkey_url: str, tmp_path: Path, module: str, patch: str, thread: str
) -> None:
    run_dir = tmp_path / "r"
    env = {
        "THAW_STATE_URL": valkey_url,
        "THAW_HOST_ID": "h",
        "THAW_RUN_DIR": str(run_dir),
        "THAW_STEM_CELLS": "off",
        "THAW_FETCHD_SOCKET": str(run_dir / "f"),
        "THAW_FETCHD_DOORS": str(run_dir / "d"),
        "THAW_FETCHD_POOL_MB": "64",
        "THAW_INVOKER_BIND": "127.0.0.1:0",
    }
    component = Component(module, patch, env)
    try:
        event = component.event("thread_died")
    finally:
        status = component.end()
    assert (event["thread"], event["error"]) == (thread, "KeyError: 'a defect'")
    assert status == EXIT_THREAD_DIED


def test_a_gateway_whose_heartbeat_dies_says_so_refuses_and_is_replaced(valkey_url: str, tmp_path: Path) -> None:
    port = free_port()
    env = {"THAW_STATE_URL": valkey_url, "THAW_GATEWAY_BIND": f"127.0.0.1:{port}"}
    told = tmp_path / "told"  # with this pipe the process waits until the test has seen its report on itself
    os.mkfifo(told)
    component = Component("gateway.main", ONCE.format(marker=str(tmp_path / "failed"), told=str(told)), env)
    url = f"http://127.0.0.1:{port}"
    try:
        component.event("thread_died")
        health, refused = requests.get(f"{url}/health", timeout=30), requests.get(f"{url}/api/v1", timeout=30)
        told.open("w").close()
        component.event("gateway_started")
        again = answer_of(lambda: requests.get(f"{url}/health", timeout=10))
    finally:
        component.process.terminate()
        component.end()
    assert (health.status_code, health.json()["status"]) == (503, "failing")
    assert health.json()["problems"] == ["the thread heartbeat has died: KeyError: 'a defect'"]
    assert (refused.status_code, refused.json()["error"]) == (503, "This gateway is about to be started again.")
    assert (again.status_code, again.json()["status"]) == (200, "ok")
    assert again.json()["gateway"] != health.json()["gateway"]


def answer_of(ask: Callable[[], requests.Response]) -> requests.Response:
    """Ask until the former worker, which may still answer that it fails, has been replaced.

    Connections that it had accepted end with it.
    """
    until, pause = time.monotonic() + 20, threading.Event()
    while True:
        try:
            if (response := ask()).status_code != 503 or time.monotonic() > until:
                return response
        except requests.ConnectionError:
            assert time.monotonic() < until
        pause.wait(0.05)

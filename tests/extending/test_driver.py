"""The driver of docs/extending.md: it keeps the promises of every driver, and the invoker runs a function in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from invoker.drivers.base import Driver, DriverContext
from invoker.drivers.registry import make_driver
from invoker.settings import InvokerSettings
from tests.conformance.test_driver import (  # noqa: F401  pytest collects them
    driver,
    exits,
    run_dir,
    spec,
    test_a_killed_container_is_reported_once_with_its_signal,
    test_a_started_container_answers_on_its_socket,
    test_another_driver_finds_what_is_owned_and_adopts_it,
    test_connect_keeps_its_deadline,
    test_pause_and_unpause_hold_the_process,
    test_stop_and_remove_end_the_whole_tree_and_stop_is_idempotent,
    up,
)
from tests.invoker.platform import Host
from thaw.ids import InstanceId
from thaw.logs import Log

__all__ = ["driver", "exits", "run_dir"]


@pytest.fixture
def make(installed: Path, run_dir: Path) -> Callable[[], Driver]:
    settings = InvokerSettings("redis://x", "h", str(run_dir), "f", driver="confined", cpu_share="off")
    return lambda: make_driver(DriverContext(settings, run_dir, Log("test")))


def confined(pid: int) -> bool:
    return "NoNewPrivs:\t1" in Path(f"/proc/{pid}/status").read_text().splitlines()


def test_its_containers_can_gain_no_privilege(driver: Driver) -> None:
    assert confined(up(driver, spec()).pid)


def test_an_invoker_runs_a_function_in_it(installed: Path, run_dir: Path, valkey_url: str) -> None:
    with Host(valkey_url, run_dir, driver="confined") as host:
        record = host.serving("def main(args):\n    return {'hi': args['name']}\n")
        assert host.run(record.instance_id, {"name": "there"}) == (200, {"hi": "there"})
        assert confined(host.pid(InstanceId(record.instance_id)))

"""Processes that are killed, and commands and containers that are repeated, cancelled, outdated or foreign."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest

from invoker import heartbeat
from invoker.containers.live import Live
from invoker.drivers.base import Exit
from invoker.drivers.cpu_shares import CgroupShares
from invoker.drivers.process import zygote
from invoker.drivers.process.driver import ProcessDriver
from relay.protocol.messages import Cancel, HostChanged, InspectModel, InstanceChanged, SetStemCells, Start
from tests.invoker import fake_zygote
from tests.invoker.fake_fetchd import FakeFetchd
from tests.invoker.platform import HOST, WAIT_S, Host, until
from thaw.action import KIND_LLM, KIND_PYTHON
from thaw.ids import GroupId, InstanceId, random_hex_id
from thaw.instance import InstanceState, StartMode

HELLO = "def main(args):\n    return {'ok': True}\n"
KILLS_PROXY = "import os\ndef main(args):\n    os.kill(os.getppid(), 9)\n    while True:\n        pass\n"
PID = "import os\ndef main(args):\n    return {'pid': os.getpid()}\n"
WAITS = "def main(args):\n    return {'read': open(args['fifo']).readline()}\n"


class Run:
    """A run that is in progress until the test lets it end."""

    def __init__(self, host: Host, instance_id: InstanceId, fifo: Path) -> None:
        os.mkfifo(fifo)
        self._fifo = os.open(fifo, os.O_RDWR)  # neither end waits for the other
        self.answers: list[tuple[int, object]] = []
        run = partial(host.run, instance_id, {"fifo": str(fifo)})
        self._thread = threading.Thread(target=lambda: self.answers.append(run()))
        self._thread.start()
        host.events.wait(lambda m: isinstance(m, InstanceChanged) and m.instance.inflight == 1)

    def end(self) -> None:
        os.write(self._fifo, b"\n")
        self._thread.join(WAIT_S)
        os.close(self._fifo)


def test_an_older_scheduler_is_refused(host: Host) -> None:
    host.deploy(HELLO)
    host.epoch = 7
    host.ready()
    refused = host.events.refused(host.send(Cancel(GroupId("0" * 32)), epoch=6))
    assert refused.error.code == "StaleEpoch"
    assert refused.error.message == "command of epoch 6; this host follows 7"


def test_a_command_that_comes_twice_is_carried_out_once(host: Host) -> None:
    host.deploy(HELLO)
    start = Start(host.plan(), 0, InstanceId(random_hex_id()))
    host.send(start, command_id="c1")
    record = host.events.instance(start.instance_id, InstanceState.READY)
    pid = host.pid(record.instance_id)
    host.send(start, command_id="c1")
    host.send(start, command_id="c2")
    host.agent.fleet.fetch = FakeFetchd(host.run_dir)
    host.send(InspectModel("s3://models/tiny"), command_id="after")  # the invoker reads commands in order
    host.events.wait(lambda m: type(m).__name__ == "ModelInspected")
    assert host.pid(record.instance_id) == pid
    assert len(host.agent.fleet.all()) == 1


def test_a_killed_container_is_a_lost_worker_and_its_memory_comes_back(host: Host) -> None:
    record = host.serving(HELLO)
    os.kill(host.pid(record.instance_id), signal.SIGKILL)
    assert host.failed(record.instance_id).code == "WorkerLost"
    assert host.registry.instance(record.instance_id) is None
    host.wait_buried(record.instance_id)
    assert host.agent.fleet.ledger.holders() == {}


def test_a_container_killed_in_a_run_is_a_lost_worker_and_the_caller_hears_how_it_ended(host: Host) -> None:
    record = host.serving(KILLS_PROXY)
    status, body = host.run(record.instance_id, {})
    assert (status, body["info"]["code"]) == (500, "WorkerLost")
    assert body["error"] == "the container ended (status -9)"
    assert host.failed(record.instance_id).code == "WorkerLost"


def test_a_container_killed_for_its_memory_in_a_run_is_the_action_s_error(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may kill the proxy instead of the function.  Only driver docker knows why, so this test says it."""
    after_exit = host.agent.fleet._after_exit

    def out_of_memory(live: Live, end: Exit) -> None:
        after_exit(live, replace(end, reason="out of memory: its limit is 128 MiB", out_of_memory=True))

    monkeypatch.setattr(host.agent.fleet, "_after_exit", out_of_memory)
    status, body = host.run(host.serving(KILLS_PROXY).instance_id, {})
    assert (status, body["info"]["code"]) == (502, "MemoryTooSmall")
    assert body["error"] == "The action used more memory than its limit of 128 MiB (limits.memory)."


def test_more_runs_than_slots_are_refused_before_they_run(host: Host, tmp_path: Path) -> None:
    record = host.serving(WAITS, timeout=60_000)
    first = Run(host, record.instance_id, tmp_path / "fifo")
    status, body = host.run(record.instance_id, {})
    assert (status, body["info"]["code"]) == (429, "InstanceBusy")
    refused = host.events.refused(host.release(record.instance_id))
    assert refused.error.code == "InstanceBusy"
    first.end()


def test_an_unknown_instance_is_gone(host: Host) -> None:
    status, body = host.run("nobody", {})
    assert (status, body["info"]["code"]) == (410, "InstanceGone")


def test_a_drain_lets_the_run_finish(host: Host, tmp_path: Path) -> None:
    record = host.serving(WAITS, timeout=60_000)
    run = Run(host, record.instance_id, tmp_path / "fifo")
    host.release(record.instance_id, only_idle=False)
    host.events.instance(record.instance_id, InstanceState.DRAINING)
    assert host.run(record.instance_id, {})[0] == 410
    run.end()
    assert run.answers == [(200, {"read": "\n"})]
    assert host.gone(record.instance_id).error is None


def test_a_drain_that_is_taken_back_lets_the_instance_serve_on(host: Host, tmp_path: Path) -> None:
    record = host.serving(WAITS, timeout=60_000)
    run = Run(host, record.instance_id, tmp_path / "fifo")
    host.release(record.instance_id, only_idle=False, drained=True)
    draining = host.events.instance(record.instance_id, InstanceState.DRAINING)
    assert (draining.drained, draining.inflight) == (True, 1)
    host.events.seen.clear()
    host.undrain(record.instance_id)
    stays = host.events.instance(record.instance_id, InstanceState.READY)
    assert (stays.drained, stays.inflight) == (False, 1)
    run.end()
    assert run.answers == [(200, {"read": "\n"})]
    assert host.run(record.instance_id, {"fifo": "/dev/null"}) == (200, {"read": ""})


def test_a_cancelled_start_leaves_nothing(host: Host) -> None:
    host.deploy("import time\ntime.sleep(60)\n" + HELLO)
    plan = host.plan()
    instance_id = host.launch(plan)
    host.events.instance(instance_id, InstanceState.STARTING)
    host.cancel(plan.group_id)
    host.gone(instance_id)


def test_the_data_port_refuses_strangers_before_anything_else(host: Host) -> None:
    strangers = [{}, *({"Authorization": one} for one in ("Bearer wrong", "Basic eA==", "Bearer "))]
    doors = [("POST", "/instances/x/run"), ("POST", "/logs"), ("GET", "/metrics"), ("GET", "/")]
    for headers, (method, path) in product(strangers, doors):
        status, answer = host.ask(method, path, headers=headers)
        assert (status, json.loads(answer)["info"]["code"]) == (401, "Unauthorized"), (headers, path)


def test_a_scrapers_token_opens_metrics_and_no_run(valkey_url: str, run_dir: Path) -> None:
    doors = (("GET", "/metrics"), ("POST", "/instances/x/run"), ("POST", "/metrics"), ("POST", "/logs"))
    scraper = {"Authorization": "Bearer scraper"}
    with Host(valkey_url, run_dir, metrics_token="scraper") as scraped:
        statuses = [scraped.ask(method, path, headers=scraper)[0] for method, path in doors]
    assert statuses == [200, 401, 401, 401]


def test_one_connection_carries_many_runs(host: Host) -> None:
    record = host.serving(HELLO)
    connection, local = host.connection(), set()
    for _ in range(5):
        connection.request("POST", f"/instances/{record.instance_id}/run", b'{"value":{}}', host.headers())
        assert json.loads(connection.getresponse().read()) == {"ok": True}
        local.add(connection.sock.getsockname())
    assert len(local) == 1
    connection.close()


def test_a_compute_share_is_a_quota_that_can_be_read_back(host: Host) -> None:
    assert isinstance(host.agent.driver, ProcessDriver)
    shares = host.agent.driver._shares
    if not isinstance(shares, CgroupShares):
        assert host.agent.reporter.report().share == "none"
        return
    host.deploy(HELLO)
    record = host.ready(host.plan(share=0.25))
    directory = shares.path(record.instance_id)
    quota = int((directory / "cpu.cfs_quota_us").read_text())
    assert quota == int(0.25 * host.settings.n_cores * 100_000)
    assert str(host.pid(record.instance_id)) in (directory / "cgroup.procs").read_text().split()
    host.release(record.instance_id)
    host.gone(record.instance_id)
    host.wait_buried(record.instance_id)
    assert not directory.exists()


def targets(host: Host) -> dict[str, int]:
    return {t.kind: t.count for t in host.agent.reporter.report().stem_targets}


def test_a_host_keeps_as_many_stem_cells_as_it_is_told_and_says_so(
    valkey_url: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zygote, "PROGRAM", [fake_zygote.__file__])
    with Host(valkey_url, run_dir, stem_cells="on") as host:
        host.deploy(HELLO)
        cells = host.agent.cells
        until(lambda: len(cells.view()) == 2)  # one of each kind, until a command says otherwise
        assert targets(host) == {KIND_PYTHON: 1, KIND_LLM: 1}
        host.send(SetStemCells(KIND_PYTHON, 3))
        host.send(SetStemCells(KIND_LLM, 0))
        until(lambda: [c.kind for c in cells.view()] == [KIND_PYTHON] * 3)
        assert targets(host) == {KIND_PYTHON: 3, KIND_LLM: 0}
        assert not any("fake_zygote" in line for line in host.processes())
        host.send(SetStemCells(KIND_PYTHON, 3))  # the same command again changes nothing
        before = {c.cell_id for c in cells.view()}
        record = host.ready()
        assert record.start_mode is StartMode.PREWARMED
        assert host.run(record.instance_id, {}) == (200, {"ok": True})
        until(lambda: len(cells.view()) == 3)  # the claimed cell is replaced while its instance lives
        assert len(before & {c.cell_id for c in cells.view()}) == 2


def test_a_host_announces_a_stem_cell_as_soon_as_it_is_ready(
    valkey_url: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that is planned before the next heartbeat relies on this report."""
    monkeypatch.setattr(zygote, "PROGRAM", [fake_zygote.__file__])
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 3600.0)
    with Host(valkey_url, run_dir, stem_cells="on") as host:
        until(lambda: set(host.registry.hosts()[0].stem_kinds) == {KIND_PYTHON, KIND_LLM})
        host.events.wait(lambda m: m == HostChanged(HOST, True), "announcement")


def test_a_host_whose_operator_keeps_no_stem_cells_names_none_and_takes_no_orders(
    valkey_url: str, run_dir: Path
) -> None:
    with Host(valkey_url, run_dir) as host:
        host.send(SetStemCells(KIND_PYTHON, 2))
        host.deploy(HELLO)
        host.ready()  # this command comes after it in the stream
        assert targets(host) == {}
        assert host.agent.cells.view() == ()


def invoker(host: Host) -> subprocess.Popen[bytes]:
    settings = host.settings
    env = {
        **os.environ,
        "THAW_STATE_URL": settings.state_url,
        "THAW_HOST_ID": settings.host_id,
        "THAW_RUN_DIR": settings.run_dir,
        "THAW_FETCHD_SOCKET": settings.fetchd_socket,
        "THAW_STEM_CELLS": "off",
        "THAW_MEMORY_MB": "2048",
    }
    with (host.run_dir / "invoker.log").open("ab") as log:
        return subprocess.Popen([sys.executable, "-m", "invoker.main"], env=env, stderr=log)


@pytest.fixture
def apart(valkey_url: str, run_dir: Path) -> Iterator[Host]:
    """A host that only sends commands and reads events.  Its invoker is a process of its own."""
    host = Host(valkey_url, run_dir)
    host.agent.port.server_close()
    yield host
    host.agent._publisher.close()
    host.agent.driver.close()
    host.agent._redis.close()
    host.close()


@pytest.mark.parametrize("serving", [True, False])
def test_a_killed_invoker_finds_its_containers_again(apart: Host, serving: bool) -> None:
    def run_at(address: str) -> object:
        apart.agent.address = address
        return apart.run(instance_id, {})

    first = invoker(apart)
    apart.deploy(PID if serving else "import time\ntime.sleep(60)\n")
    instance_id = apart.launch()
    record = apart.events.instance(instance_id, InstanceState.READY if serving else InstanceState.STARTING)
    before = run_at(record.address) if serving else None
    first.kill()
    first.wait()
    apart.events.seen.clear()
    second = invoker(apart)
    if serving:
        assert run_at(apart.events.instance(instance_id, InstanceState.READY).address) == before
    else:
        assert apart.failed(instance_id).code == "WorkerLost"
    second.terminate()
    assert second.wait(WAIT_S) == 0
    assert apart.registry.instances() == []
    assert apart.registry.hosts() == []
    assert apart.processes() == []


def test_an_invoker_takes_all_descriptors_that_it_may(apart: Host) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[1]), before[1]))
    try:
        process = invoker(apart)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    try:
        until(lambda: bool(apart.registry.live_hosts()))
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        process.terminate()
    assert process.wait(WAIT_S) == 0


def test_a_run_directory_that_cannot_be_made_is_named(valkey_url: str) -> None:
    places = {"THAW_RUN_DIR": "/proc/none", "THAW_FETCHD_SOCKET": "/none"}
    env = {**os.environ, "THAW_STATE_URL": valkey_url, "THAW_HOST_ID": "h", **places}
    ended = subprocess.run([sys.executable, "-m", "invoker.main"], env=env, capture_output=True, timeout=60)
    assert ended.returncode == 1
    assert ended.stderr.startswith(b"thaw-invoker: cannot make /proc/none: ")
    assert b"THAW_RUN_DIR" in ended.stderr


def test_the_heartbeat_says_what_the_host_is(host: Host) -> None:
    (report,) = host.registry.live_hosts()
    assert report.host_id == "host-t"
    assert report.address == host.agent.address
    assert report.devices[0].memory_bytes == 2048 << 20
    assert report.driver == "process"
    with socket.create_connection(tuple(report.address.rsplit(":", 1))):  # type: ignore[arg-type]
        pass

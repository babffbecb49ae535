"""A container that the host ends on purpose is never reported as lost, whichever of the two is seen first."""

from __future__ import annotations

import json
import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from invoker.containers.fleet import Fleet
from invoker.containers.live import Live
from invoker.drivers.base import Exit, Spec
from invoker.drivers.cpu_shares import NoShares
from invoker.drivers.process.driver import ProcessDriver
from invoker.ports import data_port
from relay.protocol.messages import InstanceChanged
from tests.invoker.platform import WAIT_S, Host, until
from thaw.action import KIND_PYTHON
from thaw.ids import random_hex_id
from thaw.instance import InstanceState
from thaw.logs import Log

SLOW = "import time\ndef main(args):\n    time.sleep(60)\n"
TELLS_ITS_CHILDS_END = """
import os, pathlib, signal, socket, time
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
child = os.fork()
if child == 0:
    signal.sigwait({signal.SIGUSR1})
    os._exit(int(signal.SIGTERM in signal.sigpending()))
with socket.socket(socket.AF_UNIX) as listening:
    listening.bind(os.environ["THAW_SOCKET"])
    listening.listen()
    signal.sigwait({signal.SIGTERM})
    os.kill(child, signal.SIGUSR1)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
"""The status of this container is 1 if SIGTERM was sent to its child, too."""


def busy(host: Host, timeout_ms: int) -> tuple[Live, socket.socket]:
    """A function whose run is in progress, and its caller's connection."""
    host.deploy(SLOW, timeout=timeout_ms)
    record = host.ready()
    live = host.agent.fleet.find(record.instance_id)
    assert live is not None
    connection = host.connection()
    body = json.dumps({"value": {}, "activation_id": random_hex_id()})
    connection.request("POST", f"/instances/{record.instance_id}/run", body, host.headers())
    host.events.wait(lambda m: isinstance(m, InstanceChanged) and m.instance.inflight == 1)
    assert isinstance(connection.sock, socket.socket)
    return live, connection.sock


def slow_threads(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each thread that the data port starts run only after the end of the container was seen."""

    class Slow(threading.Thread):
        def run(self) -> None:
            assert live.exited.wait(WAIT_S)
            super().run()

    monkeypatch.setattr(data_port, "threading", SimpleNamespace(Thread=Slow))


def test_a_caller_that_hangs_up_is_the_reason_if_the_containers_end_is_seen_first(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, caller = busy(host, 60_000)
    slow_threads(live, monkeypatch)
    caller.close()
    gone = host.events.instance(live.record.instance_id, InstanceState.GONE)
    assert gone.error is None


def test_the_time_limit_is_the_reason_if_the_containers_end_is_seen_first(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, caller = busy(host, 1_000)
    slow_threads(live, monkeypatch)
    gone = host.events.instance(live.record.instance_id, InstanceState.GONE)
    caller.close()
    assert gone.error is not None
    assert gone.error.message == "The action exceeded its time limits of 1000 milliseconds."


def test_a_start_that_is_cancelled_is_not_a_loss_if_its_container_ends_at_once(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.deploy("import time\ntime.sleep(60)\n" + "def main(args):\n    return {}\n")
    plan = host.plan()
    instance_id = host.launch(plan)
    host.events.instance(instance_id, InstanceState.STARTING)
    live = host.agent.fleet.find(instance_id)
    assert live is not None
    until(lambda: live.handle is not None)
    ended = Exit(str(live.handle and live.handle.container_id), -9)
    blame = live.blame

    def late(error: Any) -> None:
        """Another thread sees the container's end just before the reason is noted."""
        other = threading.Thread(target=Fleet._after_exit, args=(host.agent.fleet, live, ended), daemon=True)
        live.blame = blame  # type: ignore[method-assign]
        other.start()
        other.join(0.2)  # it has to wait for the lock, or the instance has gone without a reason by now
        blame(error)

    live.init_over.set()
    live.blame = late  # type: ignore[method-assign]
    host.cancel(plan.group_id)
    gone = host.events.instance(instance_id, InstanceState.GONE)
    assert gone.error is not None
    assert gone.error.message == "the start was cancelled"


def test_stopping_a_container_signals_its_first_process_alone(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process would take the end of its child for a loss, and tell the callers so."""
    monkeypatch.setattr(ProcessDriver, "command", lambda self, kind: [sys.executable, "-c", TELLS_ITS_CHILDS_END])
    driver = ProcessDriver(run_dir, NoShares(), 1, Log("test"))
    ends: list[Exit] = []
    driver.on_exit(ends.append)
    spec = Spec("container", KIND_PYTHON)
    handle = driver.connect(driver.start(driver.create(spec), spec), deadline_s=WAIT_S)
    driver.stop(handle, deadline_s=WAIT_S)
    until(lambda: bool(ends))
    driver.remove(handle)
    driver.close()
    assert ends == [Exit("container", 0)]

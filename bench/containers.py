"""How long does a Python function take to answer from nothing, from a stem cell and from a pause, with each driver, and
compared with ``docker run`` of the same image by hand?

Each start ends with the same requests on the container's socket (/init, /run).  The starts take turns, so that a busy
moment affects all of them, and medians are compared.  Containers on a bridge network are measured too, where the
container engine has such a network; Thaw's containers have no network (docs/isolation.md).  The benchmark needs a
container engine (DOCKER_HOST) that has the image.  ``--llm IMAGE`` asks another question instead: does the creation of
an LLM's container hide behind its fetch (bench/_container_starts.py), over a link of ``--mbit``, or without a limit if
that is 0?
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench import _container_starts
from bench._common import interleave, judge, median, options, report, say
from invoker.drivers.base import Driver, Handle, Spec
from invoker.drivers.confined import Limits
from invoker.drivers.cpu_shares import NoShares
from invoker.drivers.docker.client import Engine
from invoker.drivers.docker.driver import DockerDriver
from invoker.drivers.docker.images import Images
from invoker.drivers.process.driver import ProcessDriver
from invoker.drivers.socket_wait import wait_socket
from relay.clients.http_unix import UnixConnection
from thaw.action import KIND_PYTHON
from thaw.errors import PlatformError
from thaw.logs import Log

_WAIT_S = 60.0
_GOALS = {"docker_cold_vs_run": 1.1, "docker_prewarmed_vs_cold": 0.25, "docker_paused_ms": 100.0}
_CODE = {"name": "f", "main": "main", "code": "def main(args): return {'n': args['n'] + 1}", "binary": False}


def _ask(socket_path: str, path: str, value: object) -> None:
    connection = UnixConnection(socket_path, _WAIT_S)
    try:
        connection.request("POST", path, json.dumps({"value": value}).encode())
        response = connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise PlatformError(f"{path}: {body.decode()}")
    finally:
        connection.close()


def _answer(socket_path: str, *, init: bool = True) -> None:
    if init:
        _ask(socket_path, "/init", _CODE)
    _ask(socket_path, "/run", {"n": 1})


class Ways:
    """The ways to start a container.  Each method returns the milliseconds that its start took."""

    def __init__(self, driver: Driver) -> None:
        self._driver, self._n = driver, 0

    def _up(self) -> Handle:
        self._n += 1
        spec = Spec(f"bench-{os.getpid()}-{self._n}", KIND_PYTHON)
        handle = self._driver.start(self._driver.create(spec), spec)
        self._driver.connect(handle, deadline_s=_WAIT_S)
        return handle

    def _end(self, handle: Handle) -> None:
        self._driver.stop(handle, deadline_s=0.0)
        self._driver.remove(handle)

    def cold(self) -> float:
        began = time.monotonic()
        handle = self._up()
        _answer(handle.socket_path)
        taken = 1000 * (time.monotonic() - began)
        self._end(handle)
        return taken

    def prewarmed(self) -> float:
        handle = self._up()
        began = time.monotonic()
        self._driver.limit(handle, 1.0, 256 << 20)
        _answer(handle.socket_path)
        taken = 1000 * (time.monotonic() - began)
        self._end(handle)
        return taken

    def paused(self) -> float:
        handle = self._up()
        _answer(handle.socket_path)
        self._driver.pause(handle)
        began = time.monotonic()
        self._driver.unpause(handle)
        _answer(handle.socket_path, init=False)
        taken = 1000 * (time.monotonic() - began)
        self._end(handle)
        return taken


def _by_hand(image: str, network: str) -> float:
    """Start a container as a person would: with docker run, and the socket in a mounted directory."""
    with tempfile.TemporaryDirectory(prefix="thaw-", dir="/tmp") as directory:
        Path(directory).chmod(0o777)
        command = [
            "docker",
            "run",
            "--rm",
            "--network",
            network,
            "-v",
            f"{directory}:/run/thaw/io",
            "-e",
            "THAW_SOCKET=/run/thaw/io/s",
            image,
        ]
        began = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        never = os.eventfd(0, os.EFD_CLOEXEC)
        try:
            wait_socket(f"{directory}/s", process.pid, _WAIT_S, never).close()
            _answer(f"{directory}/s")
            return 1000 * (time.monotonic() - began)
        finally:
            os.close(never)
            process.terminate()  # docker run passes the signal on to the container
            process.wait(_WAIT_S)


@contextlib.contextmanager
def _drivers(image: str) -> Iterator[dict[str, Driver]]:
    with tempfile.TemporaryDirectory(prefix="thaw-", dir="/tmp") as directory:
        log = Log("bench")
        docker = DockerDriver(
            Engine(_engine_url()), Path(directory, "d"), "bench", Images({KIND_PYTHON: image}, 0.0), Limits(2), log
        )
        drivers: dict[str, Driver] = {
            "docker": docker,
            "process": ProcessDriver(Path(directory, "p"), NoShares(), 2, log),
        }
        try:
            yield drivers
        finally:
            for driver in drivers.values():
                driver.end(driver.list_owned())
                driver.close()


def _has_bridge() -> bool:
    done = subprocess.run(["docker", "network", "inspect", "bridge"], capture_output=True)
    return done.returncode == 0


def measure(image: str, rounds: int) -> dict[str, list[float]]:
    with _drivers(image) as drivers:
        ways: dict[str, Callable[[], float]] = {}
        for name, driver in drivers.items():
            of = Ways(driver)
            ways |= {f"{name}_cold": of.cold, f"{name}_prewarmed": of.prewarmed, f"{name}_paused": of.paused}
        ways["docker_run_none"] = lambda: _by_hand(image, "none")
        if _has_bridge():
            ways["docker_run_bridge"] = lambda: _by_hand(image, "bridge")
        return interleave(ways, rounds)


def functions(image: str, rounds: int) -> int:
    samples = measure(image, rounds)
    ms = {name: round(median(values), 1) for name, values in samples.items()}
    for name, value in sorted(ms.items()):
        say(f"{name:20} {value:8.1f} ms to the first answer (median of {len(samples[name])})")
    values = {
        "docker_cold_vs_run": ms["docker_cold"] / ms["docker_run_none"],
        "docker_prewarmed_vs_cold": ms["docker_prewarmed"] / ms["docker_cold"],
        "docker_paused_ms": ms["docker_paused"],
    }
    floors = {
        "docker_cold_vs_run": "the engine's create, start and inspect, one after the other",
        "docker_prewarmed_vs_cold": "the engine's update of the limits",
        "docker_paused_ms": "the engine's unpause",
    }
    goals = [judge(name, values[name], "<=", goal, floor=floors[name]) for name, goal in _GOALS.items()]
    return report("containers", goals, rounds=rounds, ms=ms, samples=samples)


def without_an_engine(reason: str, rounds: int) -> int:
    return report("containers", [judge(n, None, "<=", g, floor=reason) for n, g in _GOALS.items()], rounds=rounds)


def llm(image: str, rounds: int, rate_mbit: int) -> int:
    work = Path(tempfile.mkdtemp(prefix="bench-", dir="/dev/shm"))
    try:
        found, link = _container_starts.measure(rounds, image, rate_mbit, work)
        return report("containers", _container_starts.goals(found, link), rounds=rounds, link=link.describe())
    finally:
        shutil.rmtree(work, ignore_errors=True)


def main() -> int:
    python = os.environ.get("THAW_IMAGE_PYTHON", "thaw/python:0.1.0")
    args = options(
        __doc__ or "",
        image=(python, "of the function"),
        llm=("", "image of an llm function"),
        mbit=(200, "of the link, with --llm; 0: no limit"),
    )
    rounds = args.n or ((1 if args.llm else 3) if args.quick else (5 if args.llm else 15))
    try:
        Engine(_engine_url()).check()
    except PlatformError as e:
        return without_an_engine(str(e), rounds)
    return llm(args.llm, rounds, args.mbit) if args.llm else functions(args.image, rounds)


def _engine_url() -> str:
    return os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")


if __name__ == "__main__":
    sys.exit(main())

"""The requests to a container engine and the meaning of its answers, with a fake engine."""

from __future__ import annotations

import itertools
import json
import queue
import socketserver
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from invoker.drivers.base import Exit, Handle, Owned, Spec
from invoker.drivers.confined import Limits
from invoker.drivers.docker import images as docker_images
from invoker.drivers.docker.client import Engine, EngineEvent, Seen
from invoker.drivers.docker.driver import DockerDriver
from invoker.drivers.docker.images import Images
from invoker.drivers.docker.ports import CONTAINER
from tests.invoker.platform import WAIT_S
from thaw.action import KIND_PYTHON
from thaw.errors import NotFound, PlatformError
from thaw.logs import Log
from thaw.settings import SettingError

MIB = 1 << 20


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


@pytest.mark.parametrize(
    ("image", "repository", "tag"),
    [
        ("myfuncs", "myfuncs", "latest"),
        ("thaw/python:0.1.0", "thaw/python", "0.1.0"),
        ("registry:5000/x", "registry:5000/x", "latest"),
        ("registry:5000/x:2", "registry:5000/x", "2"),
        ("x@sha256:" + "0" * 64, "x", "sha256:" + "0" * 64),
    ],
)
def test_an_image_is_pulled_by_its_name_and_its_tag(run_dir: Path, image: str, repository: str, tag: str) -> None:
    asked: queue.SimpleQueue[str] = queue.SimpleQueue()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked.put(self.path)
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b'f\r\n{"status":"ok"}\r\n0\r\n\r\n')

        def address_string(self) -> str:
            return "unix"

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with Server(str(run_dir / "d"), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        engine = Engine(f"unix://{run_dir / 'd'}")
        try:
            engine.pull(image, WAIT_S)
        finally:
            engine.close()
            server.shutdown()
    query = parse_qs(urlsplit(asked.get(timeout=WAIT_S)).query)
    assert (query["fromImage"], query["tag"]) == ([repository], [tag])


@pytest.mark.parametrize(
    ("options", "maps_users"),
    [
        (["name=seccomp,profile=default", "name=cgroupns"], False),
        (None, False),
        (["name=seccomp,profile=builtin", "name=userns"], True),
        (["name=rootless", "name=cgroupns"], True),
    ],
)
def test_an_engine_that_cannot_give_the_uids_is_refused_by_the_settings_name(
    run_dir: Path, options: list[str] | None, maps_users: bool
) -> None:
    answers = {"/version": {"ApiVersion": "1.45"}, "/v1.41/info": {"SecurityOptions": options}}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(answers[self.path]).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def address_string(self) -> str:
            return "unix"

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with Server(str(run_dir / "d"), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        engine = Engine(f"unix://{run_dir / 'd'}")
        try:
            assert engine.maps_users() == maps_users
            if maps_users:
                with pytest.raises(SettingError, match="THAW_CONTAINER_UIDS=2000000000-2000065535") as caught:
                    DockerDriver(engine, run_dir, "h", Images({}), Limits(1), Log("test"))
                assert "such as 1000-65533" in caught.value.hint
        finally:
            engine.close()
            server.shutdown()


class OutOfMemory:
    """An engine with one container, which has just been killed because it was out of memory."""

    socket_path = "/none/engine"

    def __init__(self) -> None:
        self._ended = threading.Event()

    def check(self) -> None:
        pass

    def maps_users(self) -> bool:
        return False

    def inspect(self, name: str) -> Seen:
        return Seen(
            name, {}, running=False, paused=False, pid=0, exit_code=137, out_of_memory=True, memory_bytes=640 * MIB
        )

    def events(self, label: str, since_ns: int) -> Iterator[EngineEvent]:
        self._ended.wait()
        raise PlatformError("ended")
        yield

    def end_events(self) -> None:
        self._ended.set()

    def close(self) -> None:
        pass


def test_an_adopted_container_that_ran_out_of_memory_names_its_own_limit(run_dir: Path) -> None:
    driver = DockerDriver(OutOfMemory(), run_dir, "h", Images({}), Limits(1), Log("test"))  # type: ignore[arg-type]
    ends: queue.SimpleQueue[Exit] = queue.SimpleQueue()
    driver.on_exit(ends.put)
    driver.adopt(Owned(Handle("c", KIND_PYTHON, run_dir / "c" / "c"), {}, alive=True))
    assert ends.get(timeout=WAIT_S) == Exit("c", -9, "out of memory: its limit is 640 MiB", out_of_memory=True)
    driver.close()


class LateCause(OutOfMemory):
    """An engine that reports the end of its container before the cause."""

    def __init__(self) -> None:
        super().__init__()
        self.adopted = threading.Event()

    def inspect(self, name: str) -> Seen:
        return Seen(
            name, {}, running=True, paused=False, pid=1, exit_code=0, out_of_memory=False, memory_bytes=640 * MIB
        )

    def events(self, label: str, since_ns: int) -> Iterator[EngineEvent]:
        self.adopted.wait(WAIT_S)
        yield EngineEvent("die", {CONTAINER: "c", "exitCode": "137"}, 1)
        yield EngineEvent("oom", {CONTAINER: "c"}, 2)
        yield from super().events(label, since_ns)


def test_a_cause_that_the_engine_reports_after_the_end_is_told_all_the_same(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("invoker.drivers.docker.driver._CAUSE_S", WAIT_S)
    engine = LateCause()
    driver = DockerDriver(engine, run_dir, "h", Images({}), Limits(1), Log("test"))  # type: ignore[arg-type]
    ends: queue.SimpleQueue[Exit] = queue.SimpleQueue()
    driver.on_exit(ends.put)
    driver.adopt(Owned(Handle("c", KIND_PYTHON, run_dir / "c" / "c"), {}, alive=True))
    engine.adopted.set()
    assert ends.get(timeout=WAIT_S) == Exit("c", -9, "out of memory: its limit is 640 MiB", out_of_memory=True)
    driver.close()


class WithoutImage(OutOfMemory):
    """An engine that has an image only once it was pulled."""

    def __init__(self) -> None:
        super().__init__()
        self.pulled: list[str] = []

    def label_values(self, label: str) -> list[str]:
        return []

    def create(self, name: str, config: Any) -> None:
        if config["Image"] not in self.pulled:
            raise NotFound(f"no such image: {config['Image']}")

    def pull(self, image: str, deadline_s: float) -> None:
        self.pulled.append(image)

    def start(self, name: str) -> None:
        pass

    def remove(self, name: str) -> None:
        pass


def test_a_container_whose_image_was_pulled_says_how_long_that_took(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = WithoutImage()
    images = Images({KIND_PYTHON: "acme/python:1"}, pull_s=WAIT_S)
    driver = DockerDriver(engine, run_dir, "h", images, Limits(1), Log("test"))  # type: ignore[arg-type]
    ends: queue.SimpleQueue[Exit] = queue.SimpleQueue()
    driver.on_exit(ends.put)
    clock = itertools.count(100.0, 7.5)
    of_the_images = SimpleNamespace(monotonic=lambda: next(clock))  # others have the process's own
    monkeypatch.setattr(docker_images, "time", of_the_images)
    first, following = Spec("first", KIND_PYTHON), Spec("next", KIND_PYTHON)
    assert driver.start(driver.create(first), first).image_pull_s == 7.5
    assert driver.start(driver.create(following), following).image_pull_s == 0.0
    assert {ends.get(timeout=WAIT_S).container_id for _ in range(2)} == {"first", "next"}
    assert engine.pulled == ["acme/python:1"]
    driver.close()

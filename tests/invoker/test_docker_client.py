"""The requests to a container engine and the meaning of its answers, with a fake engine."""

from __future__ import annotations

import itertools
import json
import queue
import socketserver
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
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
    """An engine that gives the answers of the test, and notes what it is asked."""

    daemon_threads = True

    def __init__(self, path: Path, answers: dict[str, object]) -> None:
        super().__init__(str(path), Asked)
        self.answers, self.asked = answers, queue.SimpleQueue[str]()


class Asked(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.put(self.path)
        body = json.dumps(self.server.answers[urlsplit(self.path).path]).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def address_string(self) -> str:
        return "unix"

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def answering(path: Path, answers: dict[str, object]) -> Iterator[tuple[Engine, Server]]:
    with Server(path, answers) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        with closing(Engine(f"unix://{path}")) as engine:
            yield engine, server
        server.shutdown()


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
    with answering(run_dir / "d", {"/v1.41/images/create": {"status": "ok"}}) as (engine, server):
        engine.pull(image, WAIT_S)
    query = parse_qs(urlsplit(server.asked.get(timeout=WAIT_S)).query)
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
    with answering(run_dir / "d", answers) as (engine, _):
        assert engine.maps_users() == maps_users
        if maps_users:
            with pytest.raises(SettingError, match="THAW_CONTAINER_UIDS=2000000000-2000065535") as caught:
                DockerDriver(engine, run_dir, "h", Images({}), Limits(1), Log("test"))
            assert "such as 1000-65533" in caught.value.hint


class OutOfMemory:
    """An engine with one container, which has just been killed because it was out of memory."""

    socket_path = "/none/engine"
    seen = Seen("c", {}, running=False, paused=False, pid=0, exit_code=137, out_of_memory=True, memory_bytes=640 * MIB)

    def __init__(self) -> None:
        self.adopted, self._ended = threading.Event(), threading.Event()

    def check(self) -> None:
        pass

    def maps_users(self) -> bool:
        return False

    def inspect(self, name: str) -> Seen:
        return replace(self.seen, name=name)

    def events(self, label: str, since_ns: int) -> Iterator[EngineEvent]:
        self._ended.wait()
        raise PlatformError("ended")
        yield

    def end_events(self) -> None:
        self._ended.set()

    def close(self) -> None:
        pass


class LateCause(OutOfMemory):
    """An engine that reports the end of its container before the cause."""

    seen = replace(OutOfMemory.seen, running=True, pid=1, exit_code=0, out_of_memory=False)

    def events(self, label: str, since_ns: int) -> Iterator[EngineEvent]:
        self.adopted.wait(WAIT_S)
        yield EngineEvent("die", {CONTAINER: "c", "exitCode": "137"}, 1)
        yield EngineEvent("oom", {CONTAINER: "c"}, 2)
        yield from super().events(label, since_ns)


@contextmanager
def driving(
    engine: OutOfMemory, run_dir: Path, images: Images
) -> Iterator[tuple[DockerDriver, queue.SimpleQueue[Exit]]]:
    """A driver of the engine, and the ends that it reports."""
    with closing(DockerDriver(engine, run_dir, "h", images, Limits(1), Log("test"))) as driver:  # type: ignore[arg-type]
        ends: queue.SimpleQueue[Exit] = queue.SimpleQueue()
        driver.on_exit(ends.put)
        yield driver, ends


@pytest.mark.parametrize("kind", [OutOfMemory, LateCause], ids=["before the driver came", "told after the end"])
def test_an_adopted_container_that_ran_out_of_memory_names_its_own_limit(
    kind: type[OutOfMemory], run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("invoker.drivers.docker.driver._CAUSE_S", WAIT_S)
    engine = kind()
    with driving(engine, run_dir, Images({})) as (driver, ends):
        driver.adopt(Owned(Handle("c", KIND_PYTHON, run_dir / "c" / "c"), {}, alive=True))
        engine.adopted.set()
        assert ends.get(timeout=WAIT_S) == Exit("c", -9, "out of memory: its limit is 640 MiB", out_of_memory=True)


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
    clock = itertools.count(100.0, 7.5)
    of_the_images = SimpleNamespace(monotonic=lambda: next(clock))  # others have the process's own
    monkeypatch.setattr(docker_images, "time", of_the_images)
    first, following = Spec("first", KIND_PYTHON), Spec("next", KIND_PYTHON)
    with driving(engine, run_dir, Images({KIND_PYTHON: "acme/python:1"}, pull_s=WAIT_S)) as (driver, ends):
        assert driver.start(driver.create(first), first).image_pull_s == 7.5
        assert driver.start(driver.create(following), following).image_pull_s == 0.0
        assert {ends.get(timeout=WAIT_S).container_id for _ in range(2)} == {"first", "next"}
    assert engine.pulled == ["acme/python:1"]

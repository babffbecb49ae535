"""An image whose program is an HTTP server: its answers reach clients as they are made, through every real part."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.docker.engine import DockerEngine
from tests.docker.test_own_images import build
from tests.e2e.machine import Machine

pytestmark = pytest.mark.timeout(300)

SERVER = """
import http.server, json, os, select, threading, uuid
go = os.eventfd(0, os.EFD_SEMAPHORE)   # another request lets the next event be sent
left = threading.Semaphore(0)
boot = uuid.uuid4().hex
class Program(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.path == "/events":
            self.events()
        elif self.path == "/long":
            self.whole(bytes(range(256)) * 20_000)
        elif self.path == "/go":
            os.eventfd_write(go, 1)
            self.whole(b"gone on")
        elif self.path == "/left":
            self.whole(json.dumps(left.acquire(timeout=20)).encode())
        elif self.path == "/boot":
            self.whole(boot.encode())
        elif self.path == "/die":
            os._exit(9)

    def whole(self, data):
        self.send_response(200)
        self.send_header("Content-Type", "text/plain" if len(data) < 100 else "image/png")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def events(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for n in range(1_000_000):
            ready, _, _ = select.select([go, self.connection], [], [])
            if self.connection in ready:
                left.release()
                return
            os.eventfd_read(go)
            event = b"data: %d\\n\\n" % n
            self.wfile.write(b"%x\\r\\n%b\\r\\n" % (len(event), event))

    def log_message(self, *args): pass

http.server.ThreadingHTTPServer(("", int(os.environ["PORT"])), Program).serve_forever()
"""


@pytest.fixture(scope="module")
def machine(docker_engine: DockerEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    directory: Path = tmp_path_factory.mktemp("streams")
    made = Machine(directory, {**os.environ, "DOCKER_HOST": docker_engine.url})
    made.env["THAW_IMAGE_PYTHON"] = docker_engine.build("python")
    (directory / "store").mkdir()
    made.up("--driver", "docker", "--stem-cells", "off", "--store", str(directory / "store"))
    image = build(docker_engine, "thaw-test-own/streams:1", SERVER)
    for name, limit in (("server", "60000"), ("brief", "3000")):
        options = ("-a", "http-server", "true", "-c", "8", "-t", limit)
        made.thaw("action", "create", name, "--docker", image, *options)
    yield made
    made.down()
    assert made.leftovers() == []


Get = Callable[..., requests.Response]


@pytest.fixture
def get(machine: Machine) -> Get:
    """Ask a server as a stranger."""

    def ask(path: str, name: str = "server", **options: Any) -> requests.Response:
        return requests.get(f"{machine.url}/api/v1/web/guest/default/{name}{path}", timeout=60, **options)

    return ask


def record_of(machine: Machine, reply: requests.Response) -> dict[str, Any]:
    activation_id = reply.headers["X-Openwhisk-Activation-Id"]
    path = f"/api/v1/namespaces/_/activations/{activation_id}?wait_s=20"
    return dict(machine.request("GET", path).json())


def test_an_event_reaches_its_client_before_the_next_is_made_and_a_client_that_leaves_ends_its_request(
    machine: Machine, get: Get
) -> None:
    boot = get("/boot").text
    with get("/events", stream=True, headers={"Accept": "text/event-stream"}) as stream:
        assert (stream.status_code, stream.headers["Content-Type"]) == (200, "text/event-stream")
        events = stream.iter_content(None)
        for n in range(3):
            assert get("/go").text == "gone on"
            assert next(events) == b"data: %d\n\n" % n
    assert get("/left").text == "true"
    assert get("/boot").text == boot, "the container goes on"
    result = record_of(machine, stream)["response"]["result"]
    assert result["error"].startswith("The client closed the connection")


def test_an_answer_may_be_longer_than_a_result_and_a_short_one_is_in_its_record(machine: Machine, get: Get) -> None:
    reply = get("/long")
    assert reply.headers["Content-Length"] == "5120000"
    assert hashlib.sha256(reply.content).digest() == hashlib.sha256(bytes(range(256)) * 20_000).digest()
    result = record_of(machine, reply)["response"]["result"]
    assert (result["statusCode"], result["bodyBytes"]) == (200, 5_120_000)
    assert result["headers"]["content-type"] == "image/png"
    assert "body" not in result
    short = get("/boot")
    assert short.headers["Content-Type"] == "text/plain; charset=UTF-8"
    assert record_of(machine, short)["response"]["result"]["body"] == short.text


def test_the_time_limit_ends_a_stream_and_not_its_server(machine: Machine, get: Get) -> None:
    boot = get("/boot", "brief").text
    get("/go", "brief")
    with get("/events", "brief", stream=True) as stream, pytest.raises(requests.exceptions.ChunkedEncodingError):
        assert b"".join(stream.iter_content(None))
    assert get("/left", "brief").text == "true"
    assert get("/boot", "brief").text == boot
    record = record_of(machine, stream)
    assert record["response"]["result"]["error"] == "The action exceeded its time limits of 3000 milliseconds."
    assert {"key": "timeout", "value": True} in record["annotations"]


def test_a_container_that_dies_in_the_middle_of_a_stream_ends_it_without_an_end(machine: Machine, get: Get) -> None:
    with get("/events", stream=True) as stream:
        get("/go")
        events = stream.iter_content(None)
        assert next(events).startswith(b"data: ")
        assert get("/die").status_code in (400, 500)
        with pytest.raises(requests.exceptions.ChunkedEncodingError):
            next(events)
    record = record_of(machine, stream)
    assert record["response"]["success"] is False
    assert get("/boot").status_code == 200, "another container serves"
    assert json.dumps(record["response"]["result"]).count("broke") == 1

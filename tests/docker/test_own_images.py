"""Images of users: they run their own program, are reached through a container beside them, and are as confined."""

from __future__ import annotations

import base64
import io
import json
import queue
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from invoker.drivers.activation_logs import last_lines
from invoker.drivers.base import Exit, Handle, Spec
from invoker.drivers.docker.driver import DockerDriver
from tests.docker.engine import DockerEngine
from tests.docker.inside import PROBES, WAIT_S, ask, post
from thaw.action import KIND_PYTHON
from thaw.errors import InitFailed, WorkerLost

PROGRAM = (
    PROBES
    + """
import http.server, sys
class Program(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = {"ok": True} if self.path == "/init" else self.found(body["value"])
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def found(self, args):
        status = open("/proc/self/status").read()
        sentinel = "XXX_THE_END_OF_A_WHISK_ACTIVATION_XXX"
        print("ran", args.get("n"), flush=True)
        for stream in (sys.stdout, sys.stderr):
            print(sentinel, file=stream, flush=True)
        def write(path):
            def call():
                open(path, "w").write("x")
                return "written"
            return attempt(call)
        return {
            "args": args,
            "uid": os.getuid(),
            "capabilities": [l for l in status.splitlines() if l.startswith(("CapEff", "Seccomp:", "NoNewPrivs"))],
            "tcp": tcp("192.0.2.1", 80),
            "root": write("/x"), "tmp": write("/tmp/x"), "volume": write("/data/x"),
            "mounts": sorted(l.split()[1] for l in open("/proc/mounts") if "/run/thaw" in l),
            "home": os.environ["HOME"],
        }

    def log_message(self, *args): pass

http.server.ThreadingHTTPServer(("", 8080), Program).serve_forever()
"""
)


def build(engine: DockerEngine, name: str, program: str, *more: str) -> str:
    lines = [f"FROM {engine.build('python')}", "USER root", "COPY program.py /program.py", *more]
    lines += ["LABEL thaw.owner=nobody thaw.port-of=nobody", 'ENTRYPOINT ["python", "/program.py"]']
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as archive:
        for file, text in (("Dockerfile", "\n".join(lines)), ("program.py", program)):
            entry = tarfile.TarInfo(file)
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    context.seek(0)
    engine.client.images.build(fileobj=context, custom_context=True, tag=name, rm=True)
    return name


@pytest.fixture(scope="module")
def driver(docker_engine: DockerEngine) -> Iterator[DockerDriver]:
    with tempfile.TemporaryDirectory(prefix="thaw-", dir="/tmp") as directory:
        made = docker_engine.driver(Path(directory))
        yield made
        made.end(made.list_owned())
        assert not [name for name in docker_engine.containers() if made.owner in name]
        made.close()


def started(driver: DockerDriver, image: str, container_id: str) -> Handle:
    spec = Spec(container_id, KIND_PYTHON, memory_bytes=256 << 20, image=driver.pin(image, deadline_s=WAIT_S))
    return driver.connect(driver.start(driver.create(spec), spec), deadline_s=WAIT_S)


def test_a_users_image_is_reached_and_as_confined_as_a_function(
    docker_engine: DockerEngine, driver: DockerDriver
) -> None:
    image = build(docker_engine, "thaw-test-own/kept:1", PROGRAM, "VOLUME /data")
    handle = started(driver, image, "own")
    assert post(handle, "/init", {"code": "", "main": "main"}) == (200, {"ok": True})
    found = ask(handle, n=7)
    assert found["args"] == {"n": 7}
    assert found["uid"] >= 2_000_000_000
    assert [line.split()[1] for line in found["capabilities"]] == ["0" * 16, "1", "2"]
    assert found["tcp"] == "OSError Network is unreachable"
    assert found["root"] == "OSError Read-only file system"
    assert found["tmp"] == found["volume"] == "reached written"
    assert (found["mounts"], found["home"]) == ([], "/tmp")
    name = next(n for n in docker_engine.containers() if n.endswith("-own"))
    both = [docker_engine.client.containers.get(n).attrs for n in (name, f"{name}-port")]
    assert [m["Type"] for m in both[0]["Mounts"] if m["Type"] != "tmpfs"] == []
    for attrs in both:
        host = attrs["HostConfig"]
        assert host["ReadonlyRootfs"]
        assert host["CapDrop"] == ["ALL"]
        assert "no-new-privileges:true" in host["SecurityOpt"]
    assert both[0]["Config"]["User"] != both[1]["Config"]["User"]
    assert (
        both[1]["HostConfig"]["NetworkMode"] == f"container:{both[0]['Id']}"
        or name in both[1]["HostConfig"]["NetworkMode"]
    )
    assert driver.more_logs(handle, (0, 0), WAIT_S)
    assert b"ran 7\n" in driver.logs(handle, "stdout", 0).data
    assert [owned.handle.container_id for owned in driver.list_owned()] == ["own"]
    driver.remove(handle)
    assert not [n for n in docker_engine.containers() if n.startswith(name)]


def test_an_image_that_is_an_http_server_gets_the_request_as_it_is(
    docker_engine: DockerEngine, driver: DockerDriver
) -> None:
    handle = started(driver, build(docker_engine, "thaw-test-own/kept:1", PROGRAM, "VOLUME /data"), "server")
    assert post(handle, "/init", {"http": True}) == (200, {"ok": True})
    body = base64.b64encode(b'{"value": {"n": 8}}').decode()
    headers = {"content-type": "application/json"}
    answer = ask(handle, __ow_method="post", __ow_path="/any/path", __ow_headers=headers, __ow_body=body)
    assert answer["statusCode"] == 200
    assert json.loads(answer["body"])["args"] == {"n": 8}
    driver.remove(handle)


def test_an_image_whose_program_ends_at_once_says_how(docker_engine: DockerEngine, driver: DockerDriver) -> None:
    image = build(docker_engine, "thaw-test-own/ends:1", "import sys; print('cannot', file=sys.stderr); sys.exit(3)")
    ends = queue.Queue[Exit]()
    driver.on_exit(ends.put)
    spec = Spec("ends", KIND_PYTHON, image=driver.pin(image, deadline_s=WAIT_S))
    handle = driver.create(spec)
    with pytest.raises(WorkerLost):
        driver.connect(driver.start(handle, spec), deadline_s=WAIT_S)
    while (ended := ends.get(timeout=WAIT_S)).container_id != "ends":
        pass  # a container of an earlier test
    assert ended.status == 3
    assert last_lines(handle) == "cannot"
    driver.remove(handle)


def test_an_image_that_cannot_be_pulled_is_named(driver: DockerDriver) -> None:
    with pytest.raises(InitFailed, match="The image docker.io/nobody/nothing:1"):
        driver.pin("docker.io/nobody/nothing:1", deadline_s=WAIT_S)


def test_a_pin_survives_a_tag_that_moves(docker_engine: DockerEngine, driver: DockerDriver) -> None:
    first = driver.pin(build(docker_engine, "thaw-test-own/moved:1", PROGRAM), deadline_s=WAIT_S)
    second = driver.pin(build(docker_engine, "thaw-test-own/moved:1", PROGRAM + "\n"), deadline_s=WAIT_S)
    assert first != second
    assert first.startswith("docker.io/thaw-test-own/moved@sha256:")
    handle = started(driver, first, "moved")
    assert json.loads(json.dumps(post(handle, "/init", {"code": ""})))[0] == 200
    driver.remove(handle)

"""Images of a registry that asks for a credential: refused without it, run with it, refused again once it is changed."""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from invoker.drivers.base import Handle, Spec
from invoker.drivers.confined import Limits
from invoker.drivers.docker.client import Engine
from invoker.drivers.docker.driver import DockerDriver
from invoker.drivers.docker.images import Images
from tests.docker.engine import DockerEngine
from tests.docker.inside import WAIT_S, post
from tests.docker.private_registry import USER, PrivateRegistry, log_in
from tests.e2e.machine import Machine
from thaw.action import KIND_PYTHON
from thaw.errors import InitFailed, PlatformError
from thaw.logs import Log

pytestmark = pytest.mark.timeout(300)

ANSWER = """#!/bin/busybox sh
read -r method path version || exit 0
while read -r line && [ "$line" != "$(printf '\\r')" ]; do :; done
echo ran >&3
for stream in 2 3; do echo XXX_THE_END_OF_A_WHISK_ACTIVATION_XXX >&$stream; done
printf 'HTTP/1.1 200 OK\\r\\nConnection: close\\r\\nContent-Length: 12\\r\\n\\r\\n{"ok": true}'
"""
SERVE = 'ENTRYPOINT ["/bin/busybox", "sh", "-c", "exec 3>&1; exec /bin/busybox nc -ll -p 8080 -e /bin/answer"]'


def build(engine: DockerEngine, name: str, more: str = "") -> str:
    """An image of 2 MB that speaks OpenWhisk's contract."""
    busybox = shutil.which("busybox")
    assert busybox is not None
    files = {
        "Dockerfile": f"FROM scratch\nCOPY busybox answer /bin/\n{more}\n{SERVE}\n".encode(),
        "busybox": Path(busybox).read_bytes(),
        "answer": ANSWER.encode(),
    }
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as archive:
        for file, content in files.items():
            entry = tarfile.TarInfo(file)
            entry.size, entry.mode = len(content), 0o755
            archive.addfile(entry, io.BytesIO(content))
    context.seek(0)
    engine.client.images.build(fileobj=context, custom_context=True, tag=name, rm=True)
    return name


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateRegistry]:
    made = PrivateRegistry(tmp_path_factory.mktemp("registry"))
    with made.running():
        yield made


@pytest.fixture
def credentials(
    docker_engine: DockerEngine, registry: PrivateRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A host's folder for credentials, empty.  The test's images are gone from the engine afterwards."""
    registry.set_password("first")
    (tmp_path / "credentials").mkdir()
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "credentials"))
    yield tmp_path / "credentials"
    for image in registry.images_on(docker_engine):
        docker_engine.client.images.remove(image.id, force=True)


@pytest.fixture
def machine(
    docker_engine: DockerEngine, registry: PrivateRegistry, credentials: Path, tmp_path: Path
) -> Iterator[Machine]:
    made = Machine(tmp_path, {**os.environ, "DOCKER_HOST": docker_engine.url})
    made.env |= {"THAW_IMAGES": registry.address, "THAW_IMAGE_PYTHON": docker_engine.build("python")}
    (tmp_path / "store").mkdir()
    made.up("--driver", "docker", "--stem-cells", "off", "--store", str(tmp_path / "store"))
    yield made
    made.down()
    assert made.leftovers() == []


def test_a_private_image_is_refused_without_its_credential_and_run_with_it(
    docker_engine: DockerEngine, registry: PrivateRegistry, machine: Machine, credentials: Path
) -> None:
    tag = registry.push(docker_engine, build(docker_engine, "thaw-test-private/kept:1"), "team/kept")

    def refused() -> str:
        done = machine.thaw("action", "update", "boxed", "--docker", tag, check=False)
        assert done.returncode == 144
        return done.stderr

    said = refused()
    assert f"The image {tag} cannot be pulled: its registry asks for a credential, and this host has none" in said
    assert "DOCKER_CONFIG" in said

    log_in(credentials, registry.address, "first")
    machine.thaw("action", "update", "boxed", "--docker", tag)
    kept = json.loads(machine.thaw("action", "get", "boxed").stdout)["exec"]["image"]
    assert kept.startswith(f"{registry.address}/team/kept@sha256:")
    result = machine.thaw("action", "invoke", "boxed", "--result")
    assert json.loads(result.stdout) == {"ok": True}

    registry.set_password("second")
    said = refused()
    assert f"The image {tag} cannot be pulled: its registry takes no credential of this host" in said
    assert "first" not in said
    result = machine.thaw("action", "invoke", "boxed", "--result")  # what is deployed goes on
    assert json.loads(result.stdout) == {"ok": True}


class Host:
    """Drivers, one after the other, of a host that may keep so many images beside those in use."""

    def __init__(self, engine: DockerEngine, run_dir: Path, registry: PrivateRegistry) -> None:
        self._engine, self._run_dir, self._registry = engine, run_dir, registry
        self._python = engine.build("python")

    @contextmanager
    def driver(self, most_bytes: int) -> Iterator[DockerDriver]:
        images = Images({KIND_PYTHON: self._python}, WAIT_S, most_bytes)
        made = DockerDriver(Engine(self._engine.url), self._run_dir, "host-t", images, Limits(2), Log("test"))
        try:
            yield made
        finally:
            made.end(made.list_owned())
            made.close()

    def push(self, name: str) -> str:
        """Each has another environment, and therefore another id."""
        image = build(self._engine, f"thaw-test-private/{name}:1", f"ENV NAME={name}")
        return self._registry.push(self._engine, image, name)

    def pass_time(self) -> None:
        """Let the last use of each image be a minute and a half earlier."""
        for note in (self._run_dir / "images").iterdir():
            used_ns = note.stat().st_mtime_ns - 90 * 10**9
            os.utime(note, ns=(used_ns, used_ns))

    def kept(self) -> set[str]:
        """The images of the registry that the engine has, by the last part of their names."""
        digests = [digest for image in self._registry.images_on(self._engine) for digest in image.attrs["RepoDigests"]]
        return {digest.partition("/")[2].partition("@")[0] for digest in digests}


@pytest.fixture
def host(docker_engine: DockerEngine, run_dir: Path, registry: PrivateRegistry, credentials: Path) -> Host:
    log_in(credentials, registry.address, "first")
    return Host(docker_engine, run_dir, registry)


def up(driver: DockerDriver, image: str, container_id: str) -> Handle:
    spec = Spec(container_id, KIND_PYTHON, memory_bytes=256 << 20, image=image)
    return driver.connect(driver.start(driver.create(spec), spec), deadline_s=WAIT_S)


def test_images_make_room_when_no_container_has_them_and_a_start_pulls_them_again(
    docker_engine: DockerEngine, registry: PrivateRegistry, credentials: Path, host: Host
) -> None:
    a, b, c, theirs, tagged = map(host.push, ("a", "b", "c", "theirs", "tagged"))
    operator = {"username": USER, "password": "first"}
    docker_engine.client.images.pull(theirs, auth_config=operator)
    with host.driver(most_bytes=0) as driver:
        driver.pin(theirs, deadline_s=WAIT_S)
        driver.pin(tagged, deadline_s=WAIT_S)
        docker_engine.client.images.get(tagged).tag("thaw-test-private/tagged:kept")
        pinned = driver.pin(a, deadline_s=WAIT_S)
        handle = up(driver, pinned, "a")
        driver.pin(b, deadline_s=WAIT_S)
        host.pass_time()
        driver.pin(c, deadline_s=WAIT_S)
        assert host.kept() == {"a", "c", "theirs", "tagged"}  # a has a container, and c may get one
        driver.remove(handle)
    host.pass_time()
    with host.driver(most_bytes=0) as driver:  # it knows what the driver before it has pulled
        driver.pin(b, deadline_s=WAIT_S)
        assert host.kept() == {"b", "theirs", "tagged"}
        handle = up(driver, pinned, "a")
        assert handle.image_pull_s > 0
        assert post(handle, "/init", {"code": ""}) == (200, {"ok": True})
        driver.remove(handle)
        host.pass_time()
        driver.pin(c, deadline_s=WAIT_S)
        registry.set_password("second")
        with pytest.raises(InitFailed, match="its registry takes no credential of this host"):
            up(driver, pinned, "a")


def test_the_image_whose_last_start_is_longest_ago_makes_room_first(host: Host) -> None:
    names = tuple(map(host.push, ("a", "b", "c")))
    room = 5 * Path(str(shutil.which("busybox"))).stat().st_size // 2  # for two of them
    with host.driver(most_bytes=room) as driver:
        a = driver.pin(names[0], deadline_s=WAIT_S)
        driver.pin(names[1], deadline_s=WAIT_S)
        host.pass_time()
        driver.remove(up(driver, a, "a"))
        host.pass_time()
        driver.pin(names[2], deadline_s=WAIT_S)
        assert host.kept() == {"a", "c"}


def test_a_pull_that_outlives_its_deadline_is_heard_of_when_the_image_is_there(
    docker_engine: DockerEngine, host: Host
) -> None:
    image, arrived, engine = host.push("a"), threading.Event(), Engine(docker_engine.url)
    with pytest.raises(PlatformError, match="took longer than 0 s"):
        engine.pull(image, 0.0, arrived.set)
    assert arrived.wait(WAIT_S)
    assert engine.image(image).tags == (image,)
    engine.close()

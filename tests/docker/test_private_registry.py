"""Images of a registry that asks for a credential: refused without it, run with it, refused again once it is changed."""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docker.engine import DockerEngine
from tests.docker.private_registry import PrivateRegistry, log_in
from tests.e2e.machine import Machine

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

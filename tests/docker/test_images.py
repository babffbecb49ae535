"""The promises of the images' Dockerfiles, and builds and runs of the small images that keep them."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.docker.engine import BASE, ROOT, DockerEngine
from thaw_runtime.action.function_imports import PACKAGES

IMAGES = sorted(path.parent.name for path in (ROOT / "deploy/images").glob("*/Dockerfile"))
DOCKERFILES = sorted((ROOT / "deploy/images").glob("*/*Dockerfile"))
AS_ROOT = {"invoker", "fetchd"}
"""The invoker has the engine's socket, and fetchd makes sockets in the invoker's directory.  Both run only Thaw's own
code.  Their Dockerfiles give the reasons.
"""
SERVICES = {"gateway", "invoker", "fetchd"}


def instructions(path: Path, word: str) -> list[str]:
    joined = path.read_text().replace("\\\n", " ")
    return [line.removeprefix(word).strip() for line in joined.splitlines() if line.startswith(word + " ")]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_a_dependency_layer_is_keyed_by_its_lock_alone(dockerfile: Path) -> None:
    """No file of Thaw except locks is copied before the packages are installed."""
    lines = dockerfile.read_text().splitlines()
    installs = next((n for n, line in enumerate(lines) if "--require-hashes" in line), None)
    copied = [line.split()[1:-1] for line in lines[: installs or 0] if line.startswith("COPY")]
    assert all(name.endswith(".lock") for names in copied for name in names)


def test_all_stand_on_one_base_that_is_pinned() -> None:
    """The base is pinned to a release.  A digest can be given instead (docs/docker.md)."""
    bases = {i for path in DOCKERFILES for i in instructions(path, "ARG") if i.startswith("PYTHON_IMAGE=")}
    assert len(bases) == 1
    assert re.fullmatch(r"PYTHON_IMAGE=python:3\.11\.\d+-slim-\w+", bases.pop())


@pytest.mark.parametrize("name", IMAGES)
def test_it_runs_as_nobody_unless_it_may_not(name: str) -> None:
    users = instructions(ROOT / "deploy/images" / name / "Dockerfile", "USER")
    assert users == ([] if name in AS_ROOT else ["65534:65534"])


@pytest.mark.parametrize("name", IMAGES)
def test_a_service_checks_its_health(name: str) -> None:
    """A function's container has a socket instead, and the invoker asks it."""
    checks = instructions(ROOT / "deploy/images" / name / "Dockerfile", "HEALTHCHECK")
    assert len(checks) == (name in SERVICES)


@pytest.mark.parametrize("name", IMAGES)
def test_a_scanner_finds_what_is_in_it(name: str) -> None:
    """The scanner finds the image's name and licence as labels, and its packages with their metadata and their lock."""
    dockerfile = ROOT / "deploy/images" / name / "Dockerfile"
    labels = " ".join(instructions(dockerfile, "LABEL"))
    assert f'org.opencontainers.image.title="thaw/{name}"' in labels
    assert 'org.opencontainers.image.licenses="Apache-2.0"' in labels
    removed = [i for i in instructions(dockerfile, "RUN") if re.search(r"dist-info|/build", i) and "rm " in i]
    assert removed == []


def test_a_functions_image_adds_nothing_to_python_but_where_packages_go() -> None:
    """A function may import the same packages without containers: docs/functions.md."""
    dockerfile = ROOT / "deploy/images/python/Dockerfile"
    assert instructions(dockerfile, "COPY") == ["runtime-python/thaw_runtime /app/thaw_runtime"]
    assert [step for step in instructions(dockerfile, "RUN") if "install" in step] == []
    settings = dict(word.split("=", 1) for line in instructions(dockerfile, "ENV") for word in line.split())
    assert settings[PACKAGES] == settings["PIP_TARGET"]  # packages that pip installs in a derived image are found


@pytest.mark.parametrize("name", ["gateway", "invoker", "fetchd", "python"])
def test_a_built_one_holds_its_component_alone_compiled_and_its_metadata(
    docker_engine: DockerEngine, name: str
) -> None:
    look = """
import importlib.metadata as m, json, os, pathlib
app = pathlib.Path('/app')
sources = {str(p.relative_to(app)) for p in app.rglob('*.py')}
compiled = {str(p.parent.parent.relative_to(app) / (p.name.partition('.')[0] + '.py')) for p in app.rglob('*.pyc')}
print(json.dumps({'uid': os.getuid(), 'parts': sorted(p.name for p in app.iterdir()), 'uncompiled': sorted(sources - compiled),
                  'packages': sorted(d.metadata['Name'].lower() for d in m.distributions())}))
"""
    client = docker_engine.client
    image = docker_engine.build(name)
    found = json.loads(
        client.containers.run(image, ["python", "-c", look], remove=True, network_mode="none", read_only=True)
    )
    own = {"python": ["thaw_runtime"]}.get(name, sorted([name, "relay", "thaw"]))
    assert found["parts"] == own
    assert found["uncompiled"] == []
    assert found["uid"] == (0 if name in AS_ROOT else 65534)
    lock = ROOT / f"deps/{name}.lock"
    locked = {m[1].lower() for m in re.finditer(r"^([\w.-]+)==", lock.read_text(), re.M)} if lock.exists() else set()
    assert locked <= {p.replace("_", "-") for p in found["packages"]}
    assert {p for p in found["packages"] if p in ("torch", "vllm", "flask", "docker", "boto3")} == locked & {
        "torch",
        "vllm",
        "flask",
        "docker",
        "boto3",
    }


def test_where_no_registry_answers_it_is_said_what_to_do(docker_engine: DockerEngine) -> None:
    env = {**docker_engine.env, "PYTHON_IMAGE": "nowhere.invalid/python:3"}
    done = subprocess.run([ROOT / "scripts/images.sh", "python"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no image nowhere.invalid/python:3 and cannot pull it" in done.stderr
    assert "hint: without a registry: make stand-ins" in done.stderr


def test_the_stand_ins_are_all_that_the_compose_file_takes_from_others() -> None:
    page = (ROOT / "docs/docker.md").read_text()
    assert "make stand-ins" in page
    compose = (ROOT / "docker-compose.yml").read_text() + (ROOT / "deploy/tls/docker-compose.tls.yml").read_text()
    foreign = {image for image in re.findall(r"image: (\S+)", compose) if not image.startswith("$")}
    script = (ROOT / "scripts/stand_ins.py").read_text()
    assert all(f'"{image}"' in script for image in foreign)


def test_a_models_container_has_the_native_library(docker_engine: DockerEngine) -> None:
    """Here the image is built on the base alone, and not on its dependencies' image.  The build tests the library."""
    docker_engine.build("python")  # the base is there
    tag = "thaw-test/native:0"
    build = ["docker", "build", "--network", "host", "-f", "deploy/images/vllm-cpu/Dockerfile", "-t", tag]
    done = subprocess.run(
        [*build, "--build-arg", f"DEPS_IMAGE={BASE}", "."],
        cwd=ROOT,
        env=docker_engine.env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    look = "from thaw_runtime.weights import native_library; print(native_library.find().path)"
    found = docker_engine.client.containers.run(tag, ["python", "-c", look], remove=True, network_mode="none")
    assert found == b"/app/thaw_runtime/libthaw_params.so\n"

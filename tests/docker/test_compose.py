"""The compose file as it is written is valid for old and new versions of compose, without a secret or an open port."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docker import standins
from tests.docker.engine import ROOT

FILE = ROOT / "docker-compose.yml"
COMPOSE_1_29 = (
    "docker-compose==1.29.2",
    "docker==5.0.3",
    "dockerpty==0.4.1",
    "docopt==0.6.2",
    "jsonschema==3.2.0",
    "six==1.17.0",
    "python-dotenv==0.21.1",
    "texttable==1.7.0",
    "websocket-client==0.59.0",
    "distro==1.9.0",
    "PyYAML==6.0.2",
    "requests==2.31.0",
    "urllib3==1.26.20",
    "attrs==25.3.0",
    "pyrsistent==0.20.0",
    "setuptools==79.0.1",
    "idna==3.10",
    "charset-normalizer==3.4.2",
    "certifi==2025.6.15",
)
ONLY_NEW = {"gpus", "develop", "additional_contexts", "dockerfile_inline", "required", "start_interval", "include"}


def compose_file() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(FILE.read_text())
    return loaded


def keys_of(value: Any) -> set[str]:
    if isinstance(value, Mapping):
        return set(map(str, value)).union(*(keys_of(v) for v in value.values()))
    if isinstance(value, list):
        return set().union(*(keys_of(v) for v in value))
    return set()


def test_nothing_in_it_is_newer_than_docker_compose_1_29() -> None:
    loaded = compose_file()
    assert {k for k in loaded if not k.startswith("x-")} == {"services", "networks", "volumes"}
    assert keys_of(loaded) & ONLY_NEW == set()
    assert all(len(name) >= 2 for part in ("services", "networks", "volumes") for name in loaded[part])


def test_no_secret_has_a_default_and_no_port_is_open_to_other_machines() -> None:
    text = FILE.read_text()
    for name in re.findall(r"\$\{(THAW_\w*(?:PASSWORD|KEY|SECRET))([^}]*)\}", text):
        assert name[1] == "" or name[1].startswith(":?"), name
    ports = [p for service in compose_file()["services"].values() for p in service.get("ports", [])]
    assert [p for p in ports if not p.startswith("127.0.0.1:")] == [
        "${THAW_ADDRESS:-127.0.0.1}:${THAW_PORT:-3233}:3233"
    ]


def test_what_says_whom_a_host_may_reach_is_passed_from_the_env_file_to_every_fetchd() -> None:
    """One that were not passed would be set in .env and do nothing, as a refusal that is believed in."""
    limits = {"THAW_FETCHD_ALLOW", "THAW_FETCHD_REFUSE", "THAW_FETCHD_CREDENTIALS", "THAW_FETCHD_FILE_ROOTS"}
    fetchds = [s["environment"] for name, s in compose_file()["services"].items() if name.endswith("-fetchd")]
    assert len(fetchds) == 2
    for environment in fetchds:
        assert {name: environment.get(name) for name in limits} == {name: f"${{{name}:-}}" for name in limits}


@pytest.mark.parametrize("name", sorted(compose_file()["services"]))
def test_a_service_has_bounds_a_read_only_root_and_no_capability(name: str) -> None:
    service = compose_file()["services"][name]
    assert {"mem_limit", "cpus"} <= set(service)
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert service["security_opt"] == ["no-new-privileges:true"]
    # the sockets of an invoker's containers belong to the containers' user
    assert service.get("cap_add", []) == (["DAC_OVERRIDE"] if name.endswith("-invoker") else [])


def test_the_scheduler_is_asked_whether_it_lives_and_listens_where_it_can_be_scraped() -> None:
    scheduler = compose_file()["services"]["scheduler"]
    assert scheduler["environment"]["THAW_SCHEDULER_BIND"] == "0.0.0.0:9100"
    assert "9100" in str(scheduler["healthcheck"]["test"])


# scripts/compose-env.sh ----------------------------------------------------------------------------------------------


def compose_env(directory: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("THAW_")}
    env = {**kept, "THAW_ENV_FILE": str(directory / "env"), "DOCKER_SOCKET": "/run/docker.sock", **settings}
    return subprocess.run([ROOT / "scripts/compose-env.sh"], env=env, capture_output=True, text=True, check=False)


def made(directory: Path, **settings: str) -> dict[str, str]:
    done = compose_env(directory, **settings)
    assert done.returncode == 0, done.stderr
    lines = (directory / "env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if not line.startswith("#"))


def test_an_address_in_the_port_is_refused_with_what_to_set_instead(tmp_path: Path) -> None:
    done = compose_env(tmp_path, THAW_PORT="127.0.0.1:3233")
    assert done.returncode == 1
    assert "THAW_PORT=127.0.0.1:3233 is no port" in done.stderr
    assert "THAW_ADDRESS is the address" in done.stderr
    assert not (tmp_path / "env").exists()


@pytest.mark.parametrize(
    ("settings", "host"),
    [
        ({}, "http://127.0.0.1:3233"),
        ({"THAW_PORT": "3300-3301"}, "http://127.0.0.1:3300"),
        ({"THAW_ADDRESS": "0.0.0.0"}, "http://127.0.0.1:3233"),
        ({"THAW_ADDRESS": "10.0.0.7"}, "http://10.0.0.7:3233"),
    ],
    ids=str,
)
def test_the_thaw_command_is_told_where_the_gateway_is(tmp_path: Path, settings: dict[str, str], host: str) -> None:
    made(tmp_path, **settings)
    assert (tmp_path / "env.wskprops").read_text().splitlines()[0] == f"APIHOST={host}"


def test_images_follow_prefix_and_version_and_compose_takes_those_that_are_set(tmp_path: Path) -> None:
    settings = made(tmp_path, THAW_IMAGE_PREFIX="mine", THAW_VERSION="7", THAW_IMAGE_LLM="other/llm:1")
    assert (settings["THAW_IMAGE_PYTHON"], settings["THAW_IMAGE_LLM"]) == ("mine/python:7", "other/llm:1")
    for service in (s for name, s in compose_file()["services"].items() if name.endswith("-invoker")):
        assert service["environment"]["THAW_IMAGE_PYTHON"] == "${THAW_IMAGE_PYTHON:-thaw/python:0.1.0}"


@pytest.mark.parametrize("end", ["\n", ""], ids=["whole last line", "last line without its end"])
def test_an_env_file_of_an_earlier_version_gets_what_it_lacks_and_keeps_what_it_has(tmp_path: Path, end: str) -> None:
    first = made(tmp_path, THAW_FETCHD_POOL_MB="2048")
    assert first["THAW_FETCHD_LIMIT_MB"] == "2560"
    lines = (tmp_path / "env").read_text().splitlines()
    earlier = [line for line in lines if not line.startswith(("THAW_ADDRESS", "THAW_IMAGE_PYTHON", "THAW_DATA_CPUS"))]
    (tmp_path / "env").write_text("\n".join(earlier) + end)
    assert made(tmp_path) == first


def test_an_env_file_whose_line_of_the_pool_was_deleted_has_composes_default(tmp_path: Path) -> None:
    made(tmp_path)
    text = (tmp_path / "env").read_text().replace("THAW_FETCHD_POOL_MB=1024\n", "")
    (tmp_path / "env").write_text(text)
    assert made(tmp_path)["THAW_FETCHD_LIMIT_MB"] == "1536"


def test_more_models_than_their_service_may_hold_are_refused(tmp_path: Path) -> None:
    made(tmp_path)
    text = (tmp_path / "env").read_text().replace("THAW_FETCHD_POOL_MB=1024", "THAW_FETCHD_POOL_MB=4096")
    (tmp_path / "env").write_text(text)
    done = compose_env(tmp_path)
    assert done.returncode == 1
    assert "THAW_FETCHD_LIMIT_MB=1536 is no more than the 4096 MB of models" in done.stderr


# programs that read it -----------------------------------------------------------------------------------------------


def test_its_images_are_those_that_make_images_builds_and_two_pinned_servers() -> None:
    images = {service["image"] for service in compose_file()["services"].values()}
    ours = {
        match[1] for image in images if (match := re.fullmatch(r"\$\{THAW_IMAGE_PREFIX:-thaw\}/([\w-]+):.*", image))
    }
    assert images - {i for i in images if "THAW_IMAGE_PREFIX" in i} == {standins.VALKEY, standins.SEAWEEDFS}
    assert ours <= {path.name for path in (ROOT / "deploy/images").iterdir()}


def services_that(program: Path, directory: Path) -> set[str]:
    """The services that ``program`` reads in the compose file and in the file for TLS."""
    env = {**os.environ, "THAW_ENV_FILE": str(directory / "env")}
    subprocess.run([ROOT / "scripts/compose-env.sh"], env=env, check=True, capture_output=True)
    files = ["-f", str(FILE), "-f", str(ROOT / "deploy/tls/docker-compose.tls.yml")]
    done = subprocess.run(
        [str(program), "--env-file", str(directory / "env"), *files, "config"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "WARN" not in done.stderr, done.stderr
    return set(yaml.safe_load(done.stdout)["services"])


def test_compose_v5_reads_it(tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("docker-compose")
    assert services_that(program, tmp_path) == {*compose_file()["services"], "gateway-tls"}


@pytest.mark.full
def test_docker_compose_1_29_reads_it(tmp_path: Path) -> None:
    """The real docker-compose 1.29 runs in an environment of its own, because it needs older packages than Thaw.

    PyYAML is the exception: the version that it asks for does not build any more, and it uses nothing that has changed
    since then.
    """
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    install = [str(venv / "bin/pip"), "install", "-q", "--no-deps", *COMPOSE_1_29]
    subprocess.run(install, check=True, timeout=300, capture_output=True)
    assert services_that(venv / "bin/docker-compose", tmp_path) == {*compose_file()["services"], "gateway-tls"}

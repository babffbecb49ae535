"""A stack of the compose file on the tests' engine: its commands, its API, its containers, and its leftovers."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import docker.errors
import requests
from docker.models.containers import Container

from relay.clients.fetch import FetchClient
from tests.conftest import free_port
from tests.docker.engine import ROOT, DockerEngine
from thaw.action import KIND_LLM
from thaw.dev.containers import owner

UP_S = 300
SAID_S = 120.0
HOSTS = ("host-1", "host-2")
BIN = Path(sys.executable).parent


class Stack:
    """``settings`` are written into its .env, which is in ``directory``."""

    def __init__(self, engine: DockerEngine, directory: Path, **settings: str) -> None:
        self.name = f"thawtest{os.getpid()}"
        self.engine = engine
        self._others = {v.id for v in engine.client.volumes.list()}
        self._file = directory / "env"
        self.port = free_port()
        chosen = {"THAW_STEM_CELLS": "off", "THAW_FETCHD_POOL_MB": "128", "THAW_MEMORY_MB": "1024", **settings}
        env = {
            **engine.env,
            **chosen,
            "THAW_ENV_FILE": str(self._file),
            "THAW_PORT": str(self.port),
            "THAW_STORE_PORT": str(free_port()),
            "DOCKER_SOCKET": engine.url.removeprefix("unix://"),
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "COMPOSE_PROJECT_NAME": self.name,
            "COMPOSE_ENV_FILES": str(self._file),
            "DOCKER_CONFIG": _with_compose(directory),
        }
        made = subprocess.run([ROOT / "scripts/compose-env.sh"], env=env, capture_output=True, text=True, check=True)
        self.env = {**env, **dict(re.findall(r"(?:export )?(\w+)=(\S+)", made.stdout))}
        properties = dict(line.split("=", 1) for line in Path(self.env["WSK_CONFIG_FILE"]).read_text().splitlines())
        uuid, _, key = properties["AUTH"].partition(":")
        self.auth = (uuid, key)
        self.run_dirs: list[Path] = []  # the run directories of its hosts on this machine, with their sockets
        self.owners: list[str] = []  # the labels of the hosts' function containers

    # commands ------------------------------------------------------------------------------------------------------

    def compose(self, *arguments: str) -> str:
        return self.shell(f"docker compose {' '.join(arguments)} 2>&1")

    def up(self) -> None:
        self.compose("up", "-d")
        self.wait_invokers({})
        volumes = [self.engine.client.volumes.get(f"{self.name}_{host}") for host in HOSTS]
        self.run_dirs = [Path(volume.attrs["Mountpoint"]) for volume in volumes]
        self.owners = [owner(host, run_dir) for host, run_dir in zip(HOSTS, self.run_dirs, strict=True)]

    def thaw(self, *arguments: str) -> str:
        return self.shell(shlex.join(["thaw", *arguments]))

    def shell(self, code: str, directory: Path = ROOT, **env: str) -> str:
        """Run the commands of a page as a reader would, in a shell in which compose uses this project."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", code],
            env={**self.env, **env},
            cwd=directory,
            timeout=UP_S,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"status {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}{self.logs()}"
        return done.stdout

    def logs(self) -> str:
        command = ["docker", "compose", "logs", "--no-color", "--tail", "8"]
        return subprocess.run(command, env=self.env, cwd=ROOT, capture_output=True, text=True).stdout[-6000:]

    def settings(self) -> dict[str, str]:
        """The variables of its .env."""
        return dict(line.split("=", 1) for line in self._file.read_text().splitlines() if "=" in line)

    # the API -------------------------------------------------------------------------------------------------------

    def request(self, method: str, path: str, **options: Any) -> requests.Response:
        """``path`` is relative to the namespace, or an absolute path, or a whole address."""
        url = path if path.startswith(("/", "http:")) else f"/api/v1/namespaces/_/{path}"
        url = f"http://127.0.0.1:{self.port}{url}" if url.startswith("/") else url
        return requests.request(method, url, **{"timeout": UP_S, "auth": self.auth, **options})

    def behind_the_port(self) -> str:
        """The gateway's address for other containers.  It does not depend on the engine's own processes."""
        networks = self.service("gateway").attrs["NetworkSettings"]["Networks"]
        return f"http://{networks[f'{self.name}_control']['IPAddress']}:3233"

    def deploy(self, name: str, code: str) -> None:
        body = {"exec": {"kind": "python:3.11", "code": code}}
        reply = self.request("PUT", f"actions/{name}?overwrite=true", json=body)
        assert reply.status_code == 200, reply.text

    def invoke(self, name: str, **arguments: Any) -> requests.Response:
        return self.request("POST", f"actions/{name}?blocking=true", json=arguments)

    def accepted(self, name: str, **arguments: Any) -> str:
        reply = self.request("POST", f"actions/{name}", json=arguments)
        assert reply.status_code == 202, reply.text
        return str(reply.json()["activationId"])

    def record(self, activation_id: str) -> dict[str, Any]:
        """The only record in which an accepted activation ends."""
        reply = self.until_there(f"activations/{activation_id}")
        listed = self.request("GET", "activations?limit=0&docs=true").json()
        assert [r["activationId"] for r in listed].count(activation_id) == 1
        found: dict[str, Any] = reply.json()
        return found

    def wait_back(self) -> None:
        """Wait until the gateway answers (again)."""
        self.until_there("/health")

    def invokers(self) -> dict[str, int]:
        """The start times of the invokers that report, by host."""
        reports = self.until_there("/api/v1/thaw/hosts").json()["hosts"]
        return {r["host_id"]: r["started_wall_ms"] for r in reports if r["live"]}

    def wait_invokers(self, former: Mapping[str, int]) -> None:
        """Wait until every host has an invoker that is none of the ``former`` ones."""
        deadline = time.monotonic() + UP_S
        pause = threading.Event()
        while set(now := self.invokers()) != set(HOSTS) or set(now.items()) & set(former.items()):
            assert time.monotonic() < deadline, self.logs()
            pause.wait(0.2)

    def until_there(self, path: str) -> requests.Response:
        """Ask until there is an answer with status 200, because no message announces it to a client."""
        deadline = time.monotonic() + UP_S
        pause = threading.Event()
        while True:
            try:
                reply = self.request("GET", path)
            except requests.RequestException as e:
                seen = str(e)  # the gateway or the engine is restarting
            else:
                if reply.status_code == 200:
                    return reply
                seen = reply.text
            assert time.monotonic() < deadline, seen + self.logs()
            pause.wait(0.2)

    # containers ----------------------------------------------------------------------------------------------------

    def service(self, name: str) -> Container:
        return self.engine.client.containers.get(f"{self.name}-{name}-1")

    def functions(self) -> list[Container]:
        """The function containers of its two hosts."""
        found = self.engine.client.containers.list(all=True, filters={"label": "thaw.owner"}, ignore_removed=True)
        return [c for c in found if c.labels["thaw.owner"] in self.owners]

    def instances(self) -> list[Container]:
        """The containers that serve an action.

        The engine's labels of a stem cell do not change when it is claimed, but its host records what it became.
        """
        found = []
        for run_dir, name in zip(self.run_dirs, self.owners, strict=True):
            for file in run_dir.glob("c/*/owner.json"):
                owned = json.loads(file.read_text())
                if owned["labels"].get("role") == "instance":
                    found.append(self.engine.client.containers.get(f"thaw-{name}-{owned['container_id']}"))
        return found

    def wait_ready_cells(self, action: str) -> None:
        """Wait until no container serves ``action`` and each host has a stem cell that has imported the model engine."""
        self._wait(lambda: not self.serving(action) and len(list(filter(_is_warm, self._cells()))) == len(HOSTS))

    def wait_serving(self, action: str, n: int) -> None:
        """Wait until ``n`` containers serve the action."""
        self._wait(lambda: len(self.serving(action)) == n)

    def serving(self, action: str) -> list[Container]:
        """The containers that serve the action, without those that are being removed."""
        return list(self._containers(lambda labels: f'/{action}"' in labels.get("record", "")))

    def _cells(self) -> list[Container]:
        waiting = self._containers(lambda labels: labels["role"] == "stem-cell")
        return [c for c in waiting if c.labels["thaw.kind"] == KIND_LLM]

    def _containers(self, wanted: Callable[[Mapping[str, str]], bool]) -> Iterator[Container]:
        """The containers whose labels, as their hosts record them, are ``wanted``."""
        for run_dir, name in zip(self.run_dirs, self.owners, strict=True):
            for file in run_dir.glob("c/*/owner.json"):
                with suppress(FileNotFoundError, docker.errors.NotFound):
                    owned = json.loads(file.read_text())
                    if wanted(owned["labels"]):
                        yield self.engine.client.containers.get(f"thaw-{name}-{owned['container_id']}")

    def _wait(self, seen: Callable[[], bool]) -> None:
        """Wait for a condition that no message announces."""
        deadline = time.monotonic() + UP_S
        pause = threading.Event()
        while not seen():
            assert time.monotonic() < deadline, self.logs()
            pause.wait(0.2)

    def strays(self) -> list[str]:
        """Return what its hosts hold without need: containers that no host reports, and descriptor sockets and segments
        without a container.

        Check until there are none, because a host that restarts first inspects what it finds.
        """
        deadline = time.monotonic() + UP_S
        pause = threading.Event()
        while (found := self._strays()) and time.monotonic() < deadline:
            pause.wait(0.2)
        return found

    def _strays(self) -> list[str]:
        reply = self.request("GET", "/api/v1/thaw/hosts").json()["hosts"]
        reports = {report["host_id"]: report for report in reply}
        seen = {f"{c.labels['thaw.owner']}/{c.labels['thaw.container']}": c.status for c in self.functions()}
        found = [name for name, status in seen.items() if status not in ("running", "paused")]
        for host, run_dir, name in zip(HOSTS, self.run_dirs, self.owners, strict=True):
            owned = [json.loads(file.read_text()) for file in run_dir.glob("c/*/owner.json")]
            ids = {str(o["container_id"]) for o in owned}
            found += [n for n in seen if n.startswith(f"{name}/") and n.partition("/")[2] not in ids]
            found += [f"{name}/{n} (is no more)" for n in ids if f"{name}/{n}" not in seen]
            serving = {json.loads(o["labels"]["record"])["instance_id"] for o in owned if "record" in o["labels"]}
            found += sorted(serving ^ set(reports[host]["instances"]))
            fetchd = FetchClient(str(run_dir / "fetchd.sock"))
            descriptor_sockets = {f"door:{i}" for i in fetchd.descriptor_sockets()}
            holders = {h for segment in fetchd.status().segments for h in segment.holders if h.startswith("door:")}
            found += sorted((descriptor_sockets | holders) - {f"door:{i}" for i in ids})
        return found

    def host_of(self, function: Container) -> str:
        return HOSTS[self.owners.index(function.labels["thaw.owner"])]

    @contextmanager
    def next_function(self) -> Iterator[Awaited]:
        """Yield an object that waits until the container that is started within the block has printed a word."""
        since = str(int(time.time()))
        command = [
            "docker",
            "events",
            "--since",
            since,
            "--filter",
            "event=start",
            "--filter",
            "label=thaw.owner",
            "--format",
            "{{.ID}}",
        ]
        known = {str(c.id) for c in self.functions()}
        with _following(command, self.engine.env) as started:
            yield Awaited(self, started, known)

    def left(self) -> list[str]:
        """Everything of the stack that the engine still has.

        This is containers (and with them processes and their segments, which have no name), networks, volumes and the
        sockets in the volumes.
        """
        client = self.engine.client
        parts = [*client.containers.list(all=True), *client.networks.list()]
        named = [str(p.name) for p in [*self.functions(), *(p for p in parts if self.name in str(p.name))]]
        volumes = [str(v.id) for v in client.volumes.list() if v.id not in self._others]  # also volumes without a name
        return [*named, *volumes, *(str(path) for path in self.run_dirs if path.exists())]


class Awaited:
    def __init__(self, stack: Stack, started: Iterator[str], known: set[str]) -> None:
        self._stack, self._started, self._known = stack, started, known

    def says(self, word: str) -> Container:
        """Wait until the function has printed ``word``, and return its container.

        This blocks on the engine's output; the test's own time limit ends it.
        """
        engine = self._stack.engine
        started = (engine.client.containers.get(line.strip()) for line in self._started)
        function = next(c for c in started if c.id not in self._known and c.labels["thaw.owner"] in self._stack.owners)
        with _following(["docker", "logs", "--follow", str(function.id)], engine.env) as lines:
            assert any(word in line for line in lines)
        return function


@contextmanager
def _following(command: list[str], env: Mapping[str, str]) -> Iterator[Iterator[str]]:
    """Yield the lines of a command that keeps writing.  (The SDK's streams leave their sockets open.)"""
    with subprocess.Popen(
        command, env=dict(env), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as running:
        assert running.stdout is not None
        deadline = threading.Timer(SAID_S, running.kill)  # this ends the lines
        deadline.start()
        try:
            yield running.stdout
        finally:
            deadline.cancel()
            running.kill()


def _with_compose(directory: Path) -> str:
    """Make a configuration of the docker command in which ``docker compose`` is the program installed in .venv."""
    plugins = directory / "docker" / "cli-plugins"
    plugins.mkdir(parents=True)
    (plugins / "docker-compose").symlink_to(BIN / "docker-compose")
    return str(plugins.parent)


def _is_warm(cell: Container) -> bool:
    with suppress(docker.errors.NotFound):
        return b'"event": "ready"' in cell.logs()
    return False


def kill(container: Container) -> None:
    """Kill -9 the container's first process from outside, as an out-of-memory killer would."""
    container.reload()
    pid = container.attrs["State"]["Pid"]
    assert pid > 0, f"{container.name} does not run"
    os.kill(pid, 9)

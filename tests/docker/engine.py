"""A real container engine for tests: the one that DOCKER_HOST names, else one of this checkout's own
(scripts/engine.sh).

Where there is no engine, the tests fail; none is skipped.  Images are built once per session by the product's own
Dockerfiles.  Where no registry can be reached, their base is a stand-in for python:3.11.14-slim-bookworm.  Images that
later tests of this session need are built while earlier tests run, because those mostly wait.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import docker
import pytest

from invoker.drivers.confined import Limits
from invoker.drivers.docker.client import Engine
from invoker.drivers.docker.driver import DockerDriver
from invoker.drivers.docker.images import Images
from invoker.drivers.docker.uids import DEFAULT_RANGE, UidRange
from thaw.action import KIND_LLM, KIND_PYTHON
from thaw.logs import Log

ROOT = Path(__file__).parents[2]
PREFIX = "thaw-test"
BASE = "python:3.11.14-slim-bookworm"
AHEAD = {"test_images.py": ("gateway", "invoker", "fetchd"), "test_stack.py": ("gateway", "invoker", "fetchd")}
"""The images that are built as soon as there is an engine, for the tests of these files."""


class DockerEngine:
    """``url`` can be given to programs.  The tests themselves use ``client``."""

    def __init__(self, url: str, *, ours: bool) -> None:
        self.url, self.ours = url, ours
        self.script_env = {**os.environ, "THAW_ENGINE_DIR": str(Path(url.removeprefix("unix://")).parent)}
        self.env = {**os.environ, "DOCKER_HOST": url, "THAW_IMAGE_PREFIX": PREFIX, "DOCKER_BUILDKIT": "0"}
        self.connect()
        self._builder = ThreadPoolExecutor(1, "images")  # it builds one image at a time, and tests have the other core
        self._builds: dict[str, Future[None]] = {}
        self._building = threading.Lock()

    def connect(self) -> None:
        self.client = docker.DockerClient(base_url=self.url)

    def build(self, name: str) -> str:
        """Build one of the product's images if necessary, and return its tag."""
        self.build_ahead(name)
        self._builds[name].result()
        return f"{PREFIX}/{name}:0.1.0"

    def build_ahead(self, *names: str) -> None:
        for name in names:
            if name not in self._builds:
                self._builds[name] = self._builder.submit(self._build, name)

    @contextmanager
    def unused(self) -> Iterator[None]:
        """Build the image that every test needs, and build nothing else during the block."""
        self.build("python")
        with self._building:
            yield

    def driver(
        self, run_dir: Path, host_id: str = "host-t", uids: UidRange = DEFAULT_RANGE, **limits: Any
    ) -> DockerDriver:
        images = Images({KIND_PYTHON: self.build("python"), KIND_LLM: f"{PREFIX}/python:0.1.0"}, pull_s=0)
        return DockerDriver(Engine(self.url), run_dir, host_id, images, Limits(2, **limits), Log("test"), uids=uids)

    def script(self, command: str, **settings: str) -> str:
        """Run ``scripts/engine.sh``: crash the engine, stop it, or start it again.  Return the output."""
        done = subprocess.run(
            [ROOT / "scripts/engine.sh", command],
            check=True,
            env={**self.script_env, **settings},
            stdout=subprocess.PIPE,
            text=True,
        )
        return done.stdout

    def has(self, image: str) -> None:
        """Note that the image was loaded, so that it is not built."""
        done: Future[None] = Future()
        done.set_result(None)
        self._builds[image.rpartition("/")[2].partition(":")[0]] = done

    def containers(self, prefix: str = "thaw-") -> list[str]:
        return [c.name for c in self.client.containers.list(all=True) if str(c.name).startswith(prefix)]

    def forget_sockets(self) -> None:
        """Collect sockets that the SDK left open, without a warning.

        The SDK does not close a socket that could not connect, or whose engine was killed.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            self.client.close()
            del self.client
            gc.collect()

    def close(self) -> None:
        self._builder.shutdown(cancel_futures=True)
        self.forget_sockets()
        if self.ours:
            self.script("down")

    def _build(self, name: str) -> None:
        with self._building:
            self._run([sys.executable, str(ROOT / "scripts/base_image.py"), BASE])
            self._run([str(ROOT / "scripts/images.sh"), name])

    def _run(self, command: list[str]) -> None:
        done = subprocess.run(command, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            pytest.fail(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}")


_shared: list[DockerEngine] = []


@pytest.fixture(scope="session")
def docker_engine(request: pytest.FixtureRequest) -> DockerEngine:
    """The engine of the session.  There is only one, however many modules import this fixture."""
    if not _shared:
        given = os.environ.get("DOCKER_HOST")
        if given:
            url = given
        else:
            done = subprocess.run([str(ROOT / "scripts/engine.sh"), "fresh"], stdout=subprocess.PIPE, text=True)
            if done.returncode != 0:
                pytest.fail("these tests need a container engine, and none could be started; see above")
            url = done.stdout.strip()
        engine = DockerEngine(url, ours=not given)
        files = {item.path.name for item in request.session.items}
        engine.build_ahead("python", *(name for file in sorted(files & set(AHEAD)) for name in AHEAD[file]))
        _shared.append(engine)
        request.config.add_cleanup(engine.close)
    return _shared[0]

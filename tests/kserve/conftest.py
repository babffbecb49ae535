"""Hosts with a model port: one for many tests, and one of a test's own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ValkeyServer
from tests.fetchd.harness import Fetchd
from tests.kserve.harness import STORE_KEYS, ModelPortProcess, key_of, model_port, of_store, set_epoch, write_checkpoint
from tests.seaweed import seaweed
from thaw.cli.model_stores import checkpoints
from thaw.cli.model_stores.stores import open_store
from thaw.model import ModelIndex

NAME = "team/two-shards"
Host = tuple[Fetchd, ModelPortProcess]


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with seaweed(tmp_path_factory.mktemp("weed"), "models") as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def store(s3: str) -> Iterator[str]:
    """The endpoint; this process may write to it."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {**STORE_KEYS, "THAW_S3_ENDPOINT": s3}.items():
            patched.setenv(name, value)
        yield s3


@pytest.fixture(scope="session")
def checkpoint_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def pushed(store: str, checkpoint_dir: Path) -> ModelIndex:
    return checkpoints.push(checkpoint_dir, open_store(f"s3://models/{NAME}"), lambda _: None)


@pytest.fixture(scope="session")
def shared_host(s3: str, _shared_valkey: ValkeyServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    settings = of_store(s3)
    with (
        Fetchd(tmp_path_factory.mktemp("fetchd"), **settings) as fetchd,
        model_port(fetchd, _shared_valkey.url) as running,
    ):
        yield fetchd, running


@pytest.fixture
def port(shared_host: Host, valkey_url: str) -> ModelPortProcess:
    """The model port of a host that many tests use.  Its fetchd may have the model already."""
    set_epoch(valkey_url)  # a scheduler has been here
    return shared_host[1]


@pytest.fixture
def fetchd(s3: str, tmp_path: Path) -> Iterator[Fetchd]:
    """The fetchd of a host of this test's own."""
    with Fetchd(tmp_path, **of_store(s3)) as running:
        yield running


@pytest.fixture
def own_port(fetchd: Fetchd, valkey_url: str) -> Iterator[ModelPortProcess]:
    set_epoch(valkey_url)
    with model_port(fetchd, valkey_url) as running:
        yield running


@pytest.fixture
def key(valkey_url: str) -> str:
    return key_of(valkey_url, "team-a")


@pytest.fixture(scope="session")
def files(checkpoint_dir: Path) -> dict[str, bytes]:
    """What a reader gets: the files of the model, without the shards' own index, which is compared as JSON."""
    return {p.name: p.read_bytes() for p in checkpoint_dir.iterdir() if p.name != "model.safetensors.index.json"}


def shards_of(directory: Path) -> object:
    return json.loads((directory / "model.safetensors.index.json").read_text())

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fetchd.harness import Fetchd
from tests.kserve.harness import STORE_KEYS, ModelPortProcess, key_of, model_port, set_epoch, write_checkpoint
from tests.seaweed import seaweed
from thaw.cli.model_stores import checkpoints
from thaw.cli.model_stores.stores import open_store
from thaw.model import ModelIndex

NAME = "team/two-shards"


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with seaweed(tmp_path_factory.mktemp("weed"), "models") as endpoint:
        yield endpoint


@pytest.fixture
def store(s3: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The endpoint; this process may write to it."""
    for name, value in {**STORE_KEYS, "THAW_S3_ENDPOINT": s3}.items():
        monkeypatch.setenv(name, value)
    return s3


@pytest.fixture(scope="session")
def checkpoint_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture
def pushed(store: str, checkpoint_dir: Path) -> ModelIndex:
    return checkpoints.push(checkpoint_dir, open_store(f"s3://models/{NAME}"), lambda _: None)


@pytest.fixture
def fetchd(s3: str, tmp_path: Path) -> Iterator[Fetchd]:
    with Fetchd(tmp_path, THAW_S3_ENDPOINT=s3, THAW_FETCHD_READ_TIMEOUT_S=10, **STORE_KEYS) as running:
        yield running


@pytest.fixture
def port(fetchd: Fetchd, valkey_url: str) -> Iterator[ModelPortProcess]:
    set_epoch(valkey_url, 3)  # a scheduler has been here
    with model_port(fetchd, valkey_url) as running:
        yield running


@pytest.fixture
def key(valkey_url: str) -> str:
    return key_of(valkey_url, "team-a")


@pytest.fixture
def files(checkpoint_dir: Path) -> dict[str, bytes]:
    """What a reader gets: the files of the model, without the shards' own index, which is compared as JSON."""
    return {p.name: p.read_bytes() for p in checkpoint_dir.iterdir() if p.name != "model.safetensors.index.json"}


def shards_of(directory: Path) -> object:
    return json.loads((directory / "model.safetensors.index.json").read_text())

"""Pushes to a name that is damaged, or that somebody else pushes to at the same time."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.fetchd.harness import write_model
from thaw.checkpoints import versions
from thaw.cli.model_stores import checkpoints, guards
from thaw.cli.model_stores.stores import Store, open_store
from thaw.errors import Conflict
from thaw.model import INDEX_NAME, ModelIndex


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store((tmp_path / "x").as_uri())


def push(tmp_path: Path, store: Store, seed: int) -> ModelIndex:
    model = write_model(tmp_path / f"m{seed}", seed=seed, layer_bytes=1000)
    return checkpoints.push(model, store, lambda _: None)


def place(tmp_path: Path, index: ModelIndex) -> Path:
    return Path(str(tmp_path / "x") + "@" + versions.short(index.sha256))


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"version": 9, "sha256": ""}'])
def test_a_push_repairs_a_name_whose_pointer_cannot_be_read(tmp_path: Path, store: Store, damage: bytes) -> None:
    push(tmp_path, store, 1)
    (tmp_path / "x" / versions.POINTER_NAME).write_bytes(damage)
    index = push(tmp_path, store, 2)
    assert checkpoints.newest(store).uri == versions.pin(store.uri, index.sha256)


@pytest.mark.parametrize("damage", [b"", b"{", json.dumps({"version": 0}).encode()])
def test_a_push_goes_past_a_version_whose_index_cannot_be_read(tmp_path: Path, store: Store, damage: bytes) -> None:
    first = push(tmp_path, store, 1)
    (place(tmp_path, first) / INDEX_NAME).write_bytes(damage)
    index = push(tmp_path, store, 2)
    assert checkpoints.newest(store).uri == versions.pin(store.uri, index.sha256)


def test_a_push_that_somebody_else_has_overtaken_does_not_take_the_name_back(tmp_path: Path, store: Store) -> None:
    push(tmp_path, store, 1)
    slow = write_model(tmp_path / "slow", seed=2, layer_bytes=1000)
    before = checkpoints.pointer(store)
    hashed = checkpoints.hash_files(slow, lambda _: None)
    fast = push(tmp_path, store, 3)
    with pytest.raises(Conflict, match="somebody else has pushed") as told:
        checkpoints.upload(hashed, store, lambda _: None, before)
    version = versions.pin(store.uri, hashed.index.sha256)
    assert version in told.value.hint
    assert [n for n in open_store(version).objects() if guards.is_stamp(n)] == [], "nobody writes it any more"
    assert checkpoints.newest(store).uri == versions.pin(store.uri, fast.sha256)
    again = checkpoints.upload(hashed, store, lambda _: None)
    assert (again.sent_bytes, checkpoints.newest(store).uri) == (0, versions.pin(store.uri, hashed.index.sha256))


def test_two_pushes_of_the_same_files_do_not_disturb_each_other(tmp_path: Path, store: Store) -> None:
    model = write_model(tmp_path / "m1", seed=1, layer_bytes=1000)
    hashed = checkpoints.hash_files(model, lambda _: None)
    before = checkpoints.pointer(store)
    push(tmp_path, store, 1)
    checkpoints.upload(hashed, store, lambda _: None, before)
    assert checkpoints.newest(store).uri == versions.pin(store.uri, hashed.index.sha256)


def test_the_bytes_are_on_the_disk_before_the_pointer_names_them(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    fsync = os.fsync

    def noting(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    index = push(tmp_path, store, 1)
    version = place(tmp_path, index)
    written = [p.name.removeprefix(".").rpartition(".")[0] for p in synced if p.parent == version]
    assert {n for n in written if not guards.is_stamp(n)} == {p.name for p in version.iterdir()}
    assert synced.count(version) == len(written)
    assert synced[-1] == tmp_path / "x", "the pointer's own name comes last"

"""The catalogue remembers facts about models, for a limited time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fetchd import catalog
from fetchd.sources.http import HttpSource
from tests.fetchd.harness import Store, write_model
from thaw.model import ModelFacts

LARGE, SMALL = ("large1", "large2"), ("small1", "small2")
ORDER = (SMALL[0], *LARGE, SMALL[1])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    for name in ORDER:
        write_model(tmp_path / name, n_layers=8 if name in LARGE else 1, layer_bytes=10)
    with Store(tmp_path) as running:
        yield running


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> catalog.Catalog:
    monkeypatch.setattr(catalog, "_MOST_TENSORS", 14)  # one of the large ones with 9, and two small ones with 2
    return catalog.Catalog(lambda uri: HttpSource(uri, 20), 1, threading.Event())


def look(known: catalog.Catalog, store: Store) -> list[ModelFacts]:
    return [known.inspect(f"{store.uri}/{name}") for name in ORDER]


def headers_read(store: Store) -> int:
    n = sum(method == "GET" and name == "model.safetensors" for method, name, _ in store.requests)
    store.requests.clear()
    return n


def test_looks_at_large_models_in_turn_read_none_of_them_again(known: catalog.Catalog, store: Store) -> None:
    facts = look(known, store)
    assert headers_read(store) == len(ORDER)
    for _ in range(2):
        assert look(known, store) == facts
    assert headers_read(store) == 0


def test_a_large_model_without_room_takes_none_from_those_that_are_older(known: catalog.Catalog, store: Store) -> None:
    versions = {f.uri.rpartition("/")[2]: f.version for f in look(known, store)}
    headers_read(store)
    for name in (SMALL[0], LARGE[1], SMALL[1]):
        known.planned(f"{store.uri}/{name}", versions[name])
    assert headers_read(store) == 0
    entry = known.planned(f"{store.uri}/{LARGE[0]}", versions[LARGE[0]])
    assert len(entry.index.tensors) == 9
    assert headers_read(store) == 1


def test_what_a_first_fetch_learned_outlives_the_tensors_and_a_failed_check(
    known: catalog.Catalog, store: Store
) -> None:
    uri = f"{store.uri}/{LARGE[0]}"
    version = known.inspect(uri).version
    learned = known.planned(uri, version).learned
    learned["model.safetensors", 0, 10] = "digest"
    look(known, store)
    assert known.planned(uri, version).learned is learned
    known.check_unchanged(uri, version)
    assert known.planned(uri, version).learned is learned


def test_plans_of_very_many_ranges_are_forgotten(
    known: catalog.Catalog, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = look(known, store)
    most = max(f.parts.n_ranges for f in facts if f.parts)
    monkeypatch.setattr(catalog, "_MOST_RANGES", most)
    headers_read(store)
    known.inspect(f"{store.uri}/{LARGE[0]}")
    known.planned(f"{store.uri}/{LARGE[0]}", facts[1].version)  # is read, and makes room
    assert headers_read(store) == 1
    assert look(known, store) == facts
    assert headers_read(store) > 0

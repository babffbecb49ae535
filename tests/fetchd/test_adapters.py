"""What the catalogue says of adapters: two files that fit a base model, with and without an index."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fetchd.catalog import Catalog
from fetchd.sources.http import HttpSource
from tests.fetchd.harness import Store, write_index, write_model
from tests.thaw_runtime.adapters import LINEAR, write_adapter, write_base
from thaw.checkpoint import ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME
from thaw.errors import ModelCorrupt, ModelNotFound, ModelUnsupported


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    write_base(tmp_path / "base")
    write_adapter(tmp_path / "bare", 1)
    write_index(write_adapter(tmp_path / "pushed", 1))
    write_adapter(tmp_path / "other", 1, base={**LINEAR, "mlp.up_proj": (96, 64)})
    with Store(tmp_path) as running:
        yield running


@pytest.fixture
def catalog(store: Store) -> Catalog:
    return Catalog(lambda uri: HttpSource(uri, 20), 1, threading.Event())


@pytest.mark.parametrize("name", ["bare", "pushed"])
def test_an_adapter_is_its_two_files(catalog: Catalog, store: Store, name: str) -> None:
    facts = catalog.inspect_adapter(f"{store.uri}/{name}", f"{store.uri}/base", 16)
    assert list(facts.files) == [ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME]
    assert facts.verified == (name == "pushed")
    assert len(catalog.planned(facts.uri, facts.version).index.tensors) == 2 * 2 * len(LINEAR)


def test_files_beside_an_adapter_are_no_part_of_it(catalog: Catalog, store: Store, tmp_path: Path) -> None:
    (tmp_path / "bare" / "tokenizer.json").write_text("{}")
    assert len(catalog.inspect_adapter(f"{store.uri}/bare", "", 0).files) == 2


def test_an_adapter_of_another_base_is_refused(catalog: Catalog, store: Store) -> None:
    with pytest.raises(ModelUnsupported, match="is no adapter of .*/base: its model.layers.0.mlp.up_proj is 96 x 64"):
        catalog.inspect_adapter(f"{store.uri}/other", f"{store.uri}/base", 16)


def test_a_rank_beyond_the_functions_own_is_refused(catalog: Catalog, store: Store) -> None:
    with pytest.raises(ModelUnsupported, match="has rank 4, and the function takes adapters of rank 2 at most"):
        catalog.inspect_adapter(f"{store.uri}/bare", f"{store.uri}/base", 2)


@pytest.mark.parametrize("name", ["bare", "pushed"])
def test_an_adapter_is_no_model_and_a_model_no_adapter(catalog: Catalog, store: Store, name: str) -> None:
    with pytest.raises(ModelUnsupported, match="holds an adapter and not a model") as caught:
        catalog.inspect(f"{store.uri}/{name}")
    assert "model.base" in caught.value.hint
    with pytest.raises(ModelUnsupported, match="holds a model and not an adapter"):
        catalog.inspect_adapter(f"{store.uri}/base", "", 0)


def test_a_config_without_weights_is_no_adapter(catalog: Catalog, store: Store, tmp_path: Path) -> None:
    (tmp_path / "bare" / ADAPTER_WEIGHTS_NAME).unlink()
    with pytest.raises(ModelNotFound, match=ADAPTER_WEIGHTS_NAME):
        catalog.inspect_adapter(f"{store.uri}/bare", "", 0)


def test_damaged_weights_are_refused(catalog: Catalog, store: Store, tmp_path: Path) -> None:
    (tmp_path / "bare" / ADAPTER_WEIGHTS_NAME).write_bytes(b"\xff" * 100)
    with pytest.raises(ModelCorrupt, match=ADAPTER_WEIGHTS_NAME):
        catalog.inspect_adapter(f"{store.uri}/bare", "", 0)


def test_an_adapter_beside_a_model_is_no_part_of_the_model(catalog: Catalog, store: Store, tmp_path: Path) -> None:
    write_model(tmp_path / "both", n_layers=1, layer_bytes=10)
    for file in (tmp_path / "bare").iterdir():
        (tmp_path / "both" / file.name).write_bytes(file.read_bytes())
    assert ADAPTER_CONFIG_NAME not in catalog.inspect(f"{store.uri}/both").files

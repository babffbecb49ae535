"""The catalogue describes adapters: two files that fit a base model, with and without an index."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from fetchd.catalog import Catalog
from fetchd.control import Control
from fetchd.sources.http import HttpSource
from relay.clients.channel import Channel
from relay.protocol.messages import Inspect, Inspected, Refused, from_plain, to_plain
from tests.fetchd.harness import Store, write_index, write_model
from tests.thaw_runtime.adapters import LINEAR, write_adapter, write_base
from thaw.checkpoints.checkpoint import ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME
from thaw.errors import ModelCorrupt, ModelNotFound, ModelUnsupported
from thaw.logs import Log
from thaw.model import ModelFacts


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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_dora": True}, "its config sets use_dora"),
        ({"modules_to_save": ["lm_head"]}, "its config sets modules_to_save"),
        ({"init_lora_weights": "pissa"}, "has init_lora_weights 'pissa'"),
        ({"bias": "all"}, "has bias 'all'"),
        ({"lora_alpha": None}, "has no lora_alpha"),
    ],
)
def test_what_the_engine_would_refuse_is_refused_by_its_config(
    catalog: Catalog, store: Store, tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    path = tmp_path / "bare" / ADAPTER_CONFIG_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelUnsupported, match=words):
        catalog.inspect_adapter(f"{store.uri}/bare", f"{store.uri}/base", 16)


def test_the_starting_values_of_a_plain_adapter_do_not_matter(catalog: Catalog, store: Store, tmp_path: Path) -> None:
    path = tmp_path / "bare" / ADAPTER_CONFIG_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | {"init_lora_weights": "gaussian", "bias": "none"}))
    assert catalog.inspect_adapter(f"{store.uri}/bare", f"{store.uri}/base", 16).files


class Both:
    """A catalogue that answers when two questions have come."""

    def __init__(self) -> None:
        self.come = threading.Barrier(2)

    def inspect_adapter(self, uri: str, base: str, max_rank: int) -> ModelFacts:
        self.come.wait(30)
        if max_rank < 4:
            raise ModelUnsupported("it has rank 4")
        return ModelFacts(uri, 10, 8, 1, (4,), 4, "00", "", True, {})


def test_the_answer_for_one_rank_is_none_for_another() -> None:
    unused: Any = None
    control = Control(unused, unused, cast(Catalog, Both()), unused, unused, unused, Log("fetchd"))
    answers: list[object] = []
    with ExitStack() as stack:
        channels: list[Channel] = []
        conversations: list[threading.Thread] = []
        for rank in (2, 16):
            ours, theirs = map(stack.enter_context, socket.socketpair())
            conversations.append(threading.Thread(target=control.serve, args=(Channel(theirs),), daemon=True))
            conversations[-1].start()
            channels.append(Channel(ours))
            channels[-1].send(to_plain(Inspect("s3://m/a", ("guest",), True, "s3://m/base", rank)))
        for channel in channels:
            channel.set_timeout(20)
            answers.append(from_plain(channel.receive()[0]))
            channel.close()
        for conversation in conversations:
            conversation.join(20)  # a conversation ends when its peer has closed, and reads its socket until then
            assert not conversation.is_alive()
    assert [type(answer) for answer in answers] == [Refused, Inspected], answers


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

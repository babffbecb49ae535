"""The catalogue: what it remembers and for how long, adapters, and one inspection of a model at a time."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from fetchd import catalog
from fetchd.catalog import Catalog
from fetchd.control import Control
from fetchd.inspections import Inspections
from fetchd.places import Places
from fetchd.sources.base import Source
from fetchd.sources.file import FileSource
from fetchd.sources.http import HttpSource
from relay.clients.channel import Channel
from relay.protocol.messages import Inspect, Inspected, Refused, from_plain, to_plain
from tests.fetchd.harness import WEIGHTS, Store, wait_until, write_index, write_model
from tests.thaw_runtime.adapters import LINEAR, write_adapter, write_base
from thaw.checkpoints.checkpoint import ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME
from thaw.errors import ModelCorrupt, ModelNotFound, ModelUnsupported, StoreUnavailable, Throttled
from thaw.logs import Log
from thaw.model import ModelFacts
from thaw.model_uri import ModelUri

LARGE, SMALL = ("large1", "large2"), ("small1", "small2")
ORDER = (SMALL[0], *LARGE, SMALL[1])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path) as running:
        yield running


@pytest.fixture
def known(store: Store) -> Catalog:
    return Catalog(lambda uri: HttpSource(uri, 20), 1, threading.Event())


@pytest.fixture
def four(store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Four models, of which the catalogue has room for the tensors of one large one with 9 and two small ones with 2."""
    monkeypatch.setattr(catalog, "_MOST_TENSORS", 14)
    for name in ORDER:
        write_model(store.root / name, n_layers=8 if name in LARGE else 1, layer_bytes=10)
    return store


@pytest.fixture
def adapters(store: Store) -> Store:
    """Adapters of the model ``base``, and one of another model."""
    write_base(store.root / "base")
    write_adapter(store.root / "bare", 1)
    write_index(write_adapter(store.root / "pushed", 1))
    write_adapter(store.root / "other", 1, base={**LINEAR, "mlp.up_proj": (96, 64)})
    return store


# what it remembers ------------------------------------------------------------------------------------------------------


def look(known: Catalog, store: Store) -> list[ModelFacts]:
    return [known.inspect(f"{store.uri}/{name}") for name in ORDER]


def headers_read(store: Store) -> int:
    n = sum(method == "GET" and name == WEIGHTS for method, name, _ in store.requests)
    store.requests.clear()
    return n


def test_looks_at_large_models_in_turn_read_none_of_them_again(known: Catalog, four: Store) -> None:
    facts = look(known, four)
    assert headers_read(four) == len(ORDER)
    for _ in range(2):
        assert look(known, four) == facts
    assert headers_read(four) == 0


def test_a_large_model_without_room_takes_none_from_those_that_are_older(known: Catalog, four: Store) -> None:
    versions = {f.uri.rpartition("/")[2]: f.version for f in look(known, four)}
    headers_read(four)
    for name in (SMALL[0], LARGE[1], SMALL[1]):
        known.planned(f"{four.uri}/{name}", versions[name])
    assert headers_read(four) == 0
    entry = known.planned(f"{four.uri}/{LARGE[0]}", versions[LARGE[0]])
    assert len(entry.index.tensors) == 9
    assert headers_read(four) == 1


def test_what_a_first_fetch_learned_outlives_the_tensors_and_a_failed_check(known: Catalog, four: Store) -> None:
    uri = f"{four.uri}/{LARGE[0]}"
    version = known.inspect(uri).version
    learned = known.planned(uri, version).learned
    learned["model.safetensors", 0, 10] = "digest"
    look(known, four)
    assert known.planned(uri, version).learned is learned
    known.check_unchanged(uri, version)
    assert known.planned(uri, version).learned is learned


def test_plans_of_very_many_ranges_are_forgotten(known: Catalog, four: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = look(known, four)
    most = max(f.parts.n_ranges for f in facts if f.parts)
    monkeypatch.setattr(catalog, "_MOST_RANGES", most)
    headers_read(four)
    known.inspect(f"{four.uri}/{LARGE[0]}")
    known.planned(f"{four.uri}/{LARGE[0]}", facts[1].version)  # is read, and makes room
    assert headers_read(four) == 1
    assert look(known, four) == facts
    assert headers_read(four) > 0


def test_the_catalogue_remembers_the_models_used_last_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "_MOST_MODELS", 2)
    opened: list[str] = []

    def open_file(uri: str) -> Source:
        opened.append(uri.rpartition("/")[2])
        return FileSource(Path(ModelUri.parse(uri).directory))

    known = Catalog(open_file, 1, threading.Event())
    for name in "abc":
        write_model(tmp_path / name, layer_bytes=10)
    for name in ("a", "b", "a", "none", "a", "c", "a", "b"):
        if name == "none":
            with pytest.raises(ModelNotFound):
                known.inspect((tmp_path / name).as_uri())
        else:
            known.inspect((tmp_path / name).as_uri())
    assert opened == ["a", "b", "none", "c", "b"]
    assert len(known._places) == 2


# adapters ---------------------------------------------------------------------------------------------------------------


def look_at_adapter(known: Catalog, adapters: Store, name: str = "bare", max_rank: int = 16) -> ModelFacts:
    return known.inspect_adapter(f"{adapters.uri}/{name}", f"{adapters.uri}/base", max_rank)


@pytest.mark.parametrize("name", ["bare", "pushed"])
def test_an_adapter_is_its_two_files_whatever_is_beside_them(known: Catalog, adapters: Store, name: str) -> None:
    (adapters.root / name / "tokenizer.json").write_text("{}")
    facts = look_at_adapter(known, adapters, name)
    assert list(facts.files) == [ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME]
    assert facts.verified == (name == "pushed")
    assert len(known.planned(facts.uri, facts.version).index.tensors) == 2 * 2 * len(LINEAR)


def test_an_adapter_of_another_base_is_refused(known: Catalog, adapters: Store) -> None:
    with pytest.raises(ModelUnsupported, match="is no adapter of .*/base: its model.layers.0.mlp.up_proj is 96 x 64"):
        known.inspect_adapter(f"{adapters.uri}/other", f"{adapters.uri}/base", 16)


def test_a_rank_beyond_the_functions_own_is_refused(known: Catalog, adapters: Store) -> None:
    with pytest.raises(ModelUnsupported, match="has rank 4, and the function takes adapters of rank 2 at most"):
        known.inspect_adapter(f"{adapters.uri}/bare", f"{adapters.uri}/base", 2)


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
    known: Catalog, adapters: Store, changes: dict[str, object], words: str
) -> None:
    path = adapters.root / "bare" / ADAPTER_CONFIG_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelUnsupported, match=words):
        look_at_adapter(known, adapters)


def test_the_starting_values_of_a_plain_adapter_do_not_matter(known: Catalog, adapters: Store) -> None:
    path = adapters.root / "bare" / ADAPTER_CONFIG_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | {"init_lora_weights": "gaussian", "bias": "none"}))
    assert look_at_adapter(known, adapters).files


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
    with ThreadPoolExecutor(2) as conversations, ExitStack() as stack:
        channels: list[Channel] = []
        for rank in (2, 16):
            ours, theirs = map(stack.enter_context, socket.socketpair())
            conversations.submit(control.serve, Channel(theirs))
            channels.append(Channel(ours))
            channels[-1].send(to_plain(Inspect("s3://m/a", ("guest",), True, "s3://m/base", rank)))
        for channel in channels:
            channel.set_timeout(20)
            answers.append(from_plain(channel.receive()[0]))
            channel.close()  # a conversation ends when its peer has closed
    assert [type(answer) for answer in answers] == [Refused, Inspected], answers


@pytest.mark.parametrize("name", ["bare", "pushed"])
def test_an_adapter_is_no_model_and_a_model_no_adapter(known: Catalog, adapters: Store, name: str) -> None:
    with pytest.raises(ModelUnsupported, match="holds an adapter and not a model") as caught:
        known.inspect(f"{adapters.uri}/{name}")
    assert "model.base" in caught.value.hint
    with pytest.raises(ModelUnsupported, match="holds a model and not an adapter"):
        known.inspect_adapter(f"{adapters.uri}/base", "", 0)


def test_a_config_without_weights_or_with_damaged_ones_is_no_adapter(known: Catalog, adapters: Store) -> None:
    weights = adapters.root / "bare" / ADAPTER_WEIGHTS_NAME
    weights.write_bytes(b"\xff" * 100)
    with pytest.raises(ModelCorrupt, match=ADAPTER_WEIGHTS_NAME):
        look_at_adapter(known, adapters)
    weights.unlink()
    with pytest.raises(ModelNotFound, match=ADAPTER_WEIGHTS_NAME):
        look_at_adapter(known, adapters)


def test_an_adapter_beside_a_model_is_no_part_of_the_model(known: Catalog, adapters: Store) -> None:
    write_model(adapters.root / "both", n_layers=1, layer_bytes=10)
    for file in (adapters.root / "bare").iterdir():
        (adapters.root / "both" / file.name).write_bytes(file.read_bytes())
    assert ADAPTER_CONFIG_NAME not in known.inspect(f"{adapters.uri}/both").files


# inspections ------------------------------------------------------------------------------------------------------------


URI = "http://store/m"


class Looks:
    """Inspections that end when the test says so, each with the number of its beginning."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.inspections = Inspections(Places(1, 1, "inspections"))
        self._pool = pool
        self.go = threading.Semaphore(0)
        self.began = 0
        self.error: Exception | None = None

    def ask(self) -> Future[ModelFacts]:
        return self._pool.submit(self.inspections.run, URI, ("a",), self._inspect)

    def waiting(self, n: int) -> bool:
        running = self.inspections._running.get(URI)
        return running is not None and running.n_waiting == n

    def _inspect(self) -> ModelFacts:
        self.began += 1
        number = self.began
        assert self.go.acquire(timeout=20)
        if self.error is not None:
            raise self.error
        return ModelFacts(URI, 1, 1, 1, (1,), 0, f"version {number}", "", True, {})


def test_who_asks_meanwhile_gets_an_answer_that_began_after_the_question() -> None:
    with ThreadPoolExecutor(4) as pool:
        looks = Looks(pool)
        first = looks.ask()
        wait_until(partial(looks.waiting, 0))
        others = [looks.ask() for _ in range(3)]
        wait_until(partial(looks.waiting, 3))
        looks.go.release()
        assert first.result(20).version == "version 1"
        wait_until(partial(looks.waiting, 2))
        assert looks.began == 2
        looks.go.release()
        assert [other.result(20).version for other in others] == ["version 2"] * 3


def test_who_asks_meanwhile_gets_the_error_without_an_attempt_of_its_own() -> None:
    with ThreadPoolExecutor(2) as pool:
        looks = Looks(pool)
        looks.error = StoreUnavailable("silent")
        first = looks.ask()
        wait_until(partial(looks.waiting, 0))
        other = looks.ask()
        wait_until(partial(looks.waiting, 1))
        with pytest.raises(Throttled):
            looks.inspections.run("http://store/other", ("a",), looks._inspect)
        looks.go.release()
        for asked in (first, other):
            with pytest.raises(StoreUnavailable, match="silent"):
                asked.result(20)
        assert looks.began == 1

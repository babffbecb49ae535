"""Two containers of one host need partly the same bytes, and each byte leaves the store only once."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fetchd.harness import Fetchd, Request, Store, write_index, write_model
from thaw import partition
from thaw.ids import GroupId, InstanceId
from thaw.model import FileRange, ModelFacts

WEIGHTS = "model.safetensors"
N_LAYERS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_model(tmp_path_factory.mktemp("m"), n_layers=N_LAYERS, layer_bytes=3_300_001)
    write_index(made)
    return made


@pytest.fixture
def store(model: Path, tmp_path: Path) -> Iterator[Store]:
    shutil.copytree(model, tmp_path / "s" / "m")
    with Store(tmp_path / "s") as running:
        yield running


@pytest.fixture
def fetchd(tmp_path: Path) -> Iterator[Fetchd]:
    with Fetchd(tmp_path, THAW_FETCHD_POOL_MB=128) as running:
        yield running


@pytest.fixture
def facts(fetchd: Fetchd, store: Store) -> ModelFacts:
    return fetchd.client.inspect(f"{store.uri}/m")


def layers(facts: ModelFacts, a: int, b: int) -> tuple[FileRange, ...]:
    assert facts.parts is not None
    return partition.ranges(facts.parts, (a, b))


def check(fetchd: Fetchd, segment_id: str, store: Store, instance: str) -> None:
    """Check that every range has the store's bytes."""
    descriptors, reader = fetchd.open(segment_id, instance)
    reader.wait(reader.n_bytes, 20)
    data = (store.root / "m" / WEIGHTS).read_bytes()
    for p in reader.offer.layout:
        if p.file == WEIGHTS:
            assert bytes(reader.view(p.segment_offset, p.n_bytes)) == data[p.offset : p.offset + p.n_bytes]
    reader.close()
    descriptors.close()
    fetchd.client.close_descriptor_socket(InstanceId(instance))


def union_bytes(*many: tuple[FileRange, ...]) -> int:
    total = reached = 0
    for begin, end in sorted((r.offset, r.offset + r.n_bytes) for ranges in many for r in ranges):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def test_what_another_segment_holds_is_copied_and_only_the_rest_is_fetched(
    fetchd: Fetchd, store: Store, facts: ModelFacts
) -> None:
    before = store.sent_bytes
    one, two = layers(facts, 2, 5), layers(facts, 4, N_LAYERS)
    fetchd.start(facts, "one", one)
    fetchd.client.wait(GroupId("one"), 0, deadline_s=30)
    started = fetchd.start(facts, "two", two)
    done = fetchd.client.wait(GroupId("two"), 0, deadline_s=30)
    assert store.sent_bytes - before == union_bytes(one, two)
    assert done.fetched_bytes == union_bytes(one, two) - union_bytes(one)
    assert done.events[-1].attrs["copied_bytes"] == sum(r.n_bytes for r in two) - done.fetched_bytes
    check(fetchd, started.segment_id, store, "two")


def test_a_part_of_a_resident_model_takes_no_byte_from_the_store(
    fetchd: Fetchd, store: Store, facts: ModelFacts
) -> None:
    fetchd.start(facts, "whole")
    fetchd.client.wait(GroupId("whole"), 0, deadline_s=30)
    before = len(store.requests)
    started = fetchd.start(facts, "part", layers(facts, 3, 6))
    assert fetchd.client.wait(GroupId("part"), 0, deadline_s=30).fetched_bytes == 0
    assert len(store.requests) == before
    check(fetchd, started.segment_id, store, "part")


def test_overlapping_fetches_at_the_same_time_fetch_each_byte_once(
    fetchd: Fetchd, store: Store, facts: ModelFacts
) -> None:
    both, gate = threading.Barrier(2), threading.Event()

    def hold(request: Request) -> bool:
        if request.method == "GET":
            gate.wait(30)  # no byte arrives before all fetches have been requested
        return False

    store.fault = hold
    before = store.sent_bytes
    wanted = [layers(facts, 0, 5), layers(facts, 2, N_LAYERS), layers(facts, 1, 7)]
    started: list[str] = []

    def start(number: int) -> None:
        both.wait(30)
        started.append(fetchd.start(facts, f"g{number}", wanted[number]).segment_id)

    threads = [threading.Thread(target=start, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    started.append(fetchd.start(facts, "g2", wanted[2], later_ranges=layers(facts, 0, 1)).segment_id)
    gate.set()
    for number in range(3):
        fetchd.client.wait(GroupId(f"g{number}"), 0, deadline_s=20)
    for number, segment_id in enumerate(started):
        check(fetchd, segment_id, store, f"i{number}")
    assert store.sent_bytes - before == union_bytes(*wanted)


def test_when_the_fetch_that_others_wait_for_fails_its_bytes_come_from_the_store(
    fetchd: Fetchd, store: Store, facts: ModelFacts
) -> None:
    held, gate = threading.Event(), threading.Event()

    def hold(request: Request) -> bool:
        if request.method == "GET" and not gate.is_set():
            held.set()
            gate.wait(30)
        return False

    store.fault = hold
    fetchd.start(facts, "one", layers(facts, 0, 6))
    assert held.wait(30)
    started = fetchd.start(facts, "two", layers(facts, 2, N_LAYERS))
    fetchd.client.cancel(GroupId("one"), 1)
    gate.set()
    fetchd.client.wait(GroupId("two"), 0, deadline_s=30)
    check(fetchd, started.segment_id, store, "two")


def test_who_waits_for_a_slow_fetchs_bytes_lends_it_haste(fetchd: Fetchd, store: Store, facts: ModelFacts) -> None:
    """At its own pace, the first fetch would need minutes for the chunks that it has begun."""
    before = store.sent_bytes
    fetchd.start(facts, "slow", layers(facts, 0, N_LAYERS), pace_bytes_per_s=100_000, background=True)
    fetchd.start(facts, "urgent", layers(facts, 1, N_LAYERS), deadline_ms=5_000)
    fetchd.client.wait(GroupId("urgent"), 0, deadline_s=20)
    fetchd.start(facts, "slow", layers(facts, 0, N_LAYERS))
    fetchd.client.wait(GroupId("slow"), 0, deadline_s=30)
    assert store.sent_bytes - before == sum(r.n_bytes for r in layers(facts, 0, N_LAYERS))

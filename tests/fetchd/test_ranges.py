"""Stages: any ranges of a checkpoint are checked to the last byte, the first part comes before the rest, and what two
containers of one host need leaves the store only once.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from relay.protocol.pool import content_key, n_slabs
from tests.fetchd.harness import (
    CONFIG,
    Fetchd,
    Request,
    Store,
    file_bytes,
    flip,
    holding,
    safetensors_bytes,
    wait_until,
    write_index,
    write_model,
)
from thaw import partition
from thaw.errors import BadRequest, MemoryTooSmall, ModelCorrupt, ModelUnsupported, PlatformError, PoolFull
from thaw.model import CHUNK_BYTES, INDEX_NAME, FileRange, ModelFacts

N_LAYERS = 6
LAYER_BYTES = 3_300_001  # two and a half layers make a chunk, so nearly every stage ends within a chunk
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def tensor_bytes(name: str, n_bytes: int) -> bytes:
    seed = name.encode() + b"|"
    return (seed * (n_bytes // len(seed) + 1))[:n_bytes]


def contents() -> list[dict[str, bytes]]:
    """The tensors of two shards.  The embedding is longer than a chunk."""
    layers = [f"model.layers.{i}.{part}" for i in range(N_LAYERS) for part in ("mlp.w", "norm.w")]
    sizes = {n: LAYER_BYTES if n.endswith("mlp.w") else 100 for n in layers}
    outer = {"model.embed_tokens.weight": CHUNK_BYTES + 12_345, "model.norm.weight": 64, "lm_head.weight": 1_000_003}
    names = ["model.embed_tokens.weight", *layers, "model.norm.weight", "lm_head.weight"]
    every = {n: tensor_bytes(n, {**sizes, **outer}[n]) for n in names}
    half = 1 + N_LAYERS
    return [{n: every[n] for n in names[:half]}, {n: every[n] for n in names[half:]}]


@pytest.fixture(scope="module")
def checkpoint_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sharded")
    shards = contents()
    for name, tensors in zip(SHARDS, shards, strict=True):
        (directory / name).write_bytes(safetensors_bytes(tensors))
    weight_map = {n: f for f, tensors in zip(SHARDS, shards, strict=True) for n in tensors}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": N_LAYERS}))
    return write_index(directory)


@pytest.fixture(scope="module")
def fetchd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fetchd]:
    with Fetchd(tmp_path_factory.mktemp("fetchd"), THAW_FETCHD_RETAIN="false") as running:
        yield running


@pytest.fixture
def store(checkpoint_dir: Path, tmp_path: Path) -> Iterator[Store]:
    shutil.copytree(checkpoint_dir, tmp_path / "s" / "m")
    with Store(tmp_path / "s") as running:
        yield running


def expected(names: Callable[[str], bool]) -> dict[str, bytes]:
    return {n: data for shard in contents() for n, data in shard.items() if names(n)}


def stage(facts: ModelFacts, a: int, b: int) -> tuple[FileRange, ...]:
    assert facts.parts is not None
    return partition.ranges(facts.parts, (a, b))


def take(fetchd: Fetchd, segment_id: str, instance: str) -> dict[str, bytes]:
    """Every offered tensor by its name, in order."""
    with fetchd.reading(segment_id, instance) as reader:
        reader.wait(reader.n_bytes, 20)
        return {t.name: bytes(reader.view(reader.locate(t.file, t.offset), t.n_bytes)) for t in reader.offer.tensors}


@pytest.mark.parametrize("n_stages", [2, 3, 6])
def test_the_stages_of_a_sharded_model_hold_exactly_their_tensors_and_no_byte_more_is_fetched(
    fetchd: Fetchd, store: Store, n_stages: int
) -> None:
    facts = fetchd.client.inspect(f"{store.uri}/m")
    assert facts.parts is not None
    seen: list[str] = []
    for number, (a, b) in enumerate(partition.split(facts.parts, n_stages)):
        ranges, before, group = stage(facts, a, b), store.sent_bytes, f"s{n_stages}-{number}"
        found = take(fetchd, fetchd.start(facts, group, ranges, stage=number).segment_id, group)
        assert store.sent_bytes - before == partition.size(ranges)
        assert found == expected(set(found).__contains__)
        seen += found
        fetchd.cancel(group)
    assert seen == list(expected(lambda name: True)), "the stages together are the model, in load order"


@pytest.mark.parametrize("name", ["model.layers.2.mlp.w", "model.layers.2.norm.w", "model.layers.3.norm.w"])
@pytest.mark.parametrize("at", [0, -1])
def test_one_flipped_byte_at_the_edge_of_a_stage_is_corruption(
    fetchd: Fetchd, checkpoint_dir: Path, tmp_path: Path, name: str, at: int
) -> None:
    model = shutil.copytree(checkpoint_dir, tmp_path / "m")
    damage(model, name, at)
    facts = fetchd.client.inspect(model.as_uri())
    with pytest.raises(ModelCorrupt, match=rf"(tensor {name}|chunk \d) failed its checksum twice"):
        fetchd.fetch(facts, f"flip-{name}-{at}", stage(facts, 2, 4))


def damage(model: Path, name: str, at: int) -> None:
    file, data = next((model / f, t[name]) for f, t in zip(SHARDS, contents(), strict=True) if name in t)
    flip(file, file.read_bytes().index(data) + at % len(data))


def test_the_edges_of_an_unverified_model_are_learned_at_its_first_fetch(fetchd: Fetchd, store: Store) -> None:
    (store.root / "m" / INDEX_NAME).unlink()
    facts = fetchd.client.inspect(f"{store.uri}/m")
    assert not facts.verified
    fetchd.fetch(facts, "learn", stage(facts, 2, 4))
    fetchd.cancel("learn")
    damage(store.root / "m", "model.layers.2.mlp.w", 0)  # length and etag stay the same
    with fetchd.failing(ModelCorrupt, "tensor model.layers.2.mlp.w failed its checksum twice"):
        fetchd.fetch(facts, "learnt", stage(facts, 2, 3))


def test_an_index_of_the_first_format_is_refused_with_the_way_to_a_new_one(fetchd: Fetchd, tmp_path: Path) -> None:
    model = write_model(tmp_path / "m")
    file = {"name": "config.json", "n_bytes": 1, "sidecar": True, "sha256": "0" * 64, "chunks_xxh3": ["0" * 16]}
    tensor = {"name": "t", "file": "f", "offset": 1, "n_bytes": 1, "dtype": "U8", "shape": [1], "xxh3": []}
    first = {"version": 1, "files": [file], "tensors": [tensor], "sha256": "0" * 64, "verified": True}
    (model / INDEX_NAME).write_text(json.dumps(first))
    with pytest.raises(ModelUnsupported, match="has version 1; this side reads 2") as told:
        fetchd.client.inspect(model.as_uri())
    assert told.value.hint == "push the model again with this release"


# ── the first part, then the rest ─────────────────────────────────────────────────────────────────────────────────


class Gate:
    """A store that answers requests for the later ranges only after the gate was opened."""

    def __init__(self, store: Store, ranges: tuple[FileRange, ...]) -> None:
        self.opened = threading.Event()
        self.held = 0
        self._ranges = ranges
        store.fault = self

    def __call__(self, request: Request) -> bool:
        if any(r.file == request.name and r.offset <= request.first < r.offset + r.n_bytes for r in self._ranges):
            self.held += 1
            self.opened.wait(20)
        return False


def first_and_later(facts: ModelFacts) -> tuple[tuple[FileRange, ...], tuple[FileRange, ...]]:
    """The ranges of a stage in the middle, so that its later part lies before and after its first part."""
    return stage(facts, 2, 4), partition.join([*stage(facts, 0, 2), *stage(facts, 4, N_LAYERS)])


def test_the_wait_is_over_after_the_first_part_and_the_rest_follows_in_the_same_segment(
    fetchd: Fetchd, store: Store
) -> None:
    facts = fetchd.client.inspect(f"{store.uri}/m")
    first, later = first_and_later(facts)
    gate = Gate(store, later)
    started = fetchd.start(facts, "g", first, later_ranges=later)
    done = fetchd.wait()
    assert done.fetched_bytes == done.events[-1].n_bytes == partition.size(first)
    with fetchd.reading(started.segment_id) as reader:
        assert reader.wait(reader.first_bytes, 1) < reader.n_bytes == done.n_bytes
        (status,) = fetchd.client.status().fetches
        assert (status.n_bytes, status.done_bytes, status.pending_bytes) == (done.fetched_bytes, done.fetched_bytes, 0)
        assert status.later_bytes == partition.size(later)
        gate.opened.set()
        reader.wait(reader.n_bytes, 30)
        in_file_order = list(expected(lambda name: True))
        names = [*in_file_order[5:9], *in_file_order[:5], *in_file_order[9:]]
        assert [t.name for t in reader.offer.tensors] == names
        for t in reader.offer.tensors:
            assert bytes(reader.view(reader.locate(t.file, t.offset), t.n_bytes)) == expected(t.name.__eq__)[t.name]
    wait_until(lambda: not fetchd.client.status().fetches)
    fetchd.cancel()


def test_a_cancel_of_the_group_ends_the_later_part_too(fetchd: Fetchd, store: Store) -> None:
    facts = fetchd.client.inspect(f"{store.uri}/m")
    first, later = first_and_later(facts)
    free = fetchd.free_bytes()
    gate = Gate(store, later)
    started = fetchd.start(facts, "g", first, later_ranges=later)
    fetchd.wait()
    with fetchd.reading(started.segment_id) as reader:
        fetchd.cancel()
        with pytest.raises(PlatformError, match="cancelled"):
            reader.wait(reader.n_bytes, 30)
        assert reader.wait(reader.first_bytes, 1) >= reader.first_bytes, "what had arrived stays good"
        gate.opened.set()
    wait_until(lambda: fetchd.free_bytes() == free and not fetchd.client.status().segments)


def test_a_later_part_that_the_pool_has_no_room_for_is_left_out_and_said_so(tmp_path: Path, store: Store) -> None:
    with Fetchd(tmp_path, THAW_FETCHD_POOL_MB=16) as fetchd:
        facts = fetchd.client.inspect(f"{store.uri}/m")
        first, later = first_and_later(facts)
        left_out = partition.size(later)
        gate = Gate(store, first)
        started = fetchd.start(facts, "g", first, later_ranges=later)
        assert started.left_out_bytes == left_out
        (status,) = fetchd.client.status().fetches
        assert (status.later_bytes, status.left_out_bytes) == (0, left_out)
        gate.opened.set()
        done = fetchd.wait()
        assert done.n_bytes == started.n_bytes < sum(facts.files.values())
        assert done.events[-1].attrs["left_out_bytes"] == left_out
        again = fetchd.start(facts, "g2", first, later_ranges=later)  # there is still no room, so it shares the segment
        assert (again.segment_id, again.resident, again.left_out_bytes) == (started.segment_id, True, left_out)
        wait_until(lambda: any(e.get("left_out_bytes") == left_out for e in fetchd.events))


def test_a_first_part_that_does_not_fit_now_is_told_apart_from_one_that_never_does(
    tmp_path: Path, store: Store
) -> None:
    with Fetchd(tmp_path, THAW_FETCHD_POOL_MB=16, THAW_FETCHD_RETAIN="false") as fetchd:
        facts = fetchd.client.inspect(f"{store.uri}/m")
        first = stage(facts, 1, 4)
        fetchd.fetch(facts, ranges=first)
        status = fetchd.client.status()
        assert [s.n_slabs * status.slab_bytes for s in status.segments if s.holders] == [12 * 2**20]
        assert [(s.key, s.n_slabs, s.complete) for s in status.segments] == [
            (content_key(facts.uri, facts.version, first, ()), n_slabs(first, status.slab_bytes), True)
        ]
        version = fetchd.client.await_pool_change(-1, timeout_s=30)
        with pytest.raises(PoolFull, match="4194304 of 16777216 bytes are not in use"):
            fetchd.start(facts, "rest", stage(facts, 4, N_LAYERS), later_ranges=first)
        with pytest.raises(MemoryTooSmall):
            fetchd.start(facts, "all")
        fetchd.cancel()
        assert fetchd.client.await_pool_change(version, timeout_s=30) != version
        assert [s for s in fetchd.client.status().segments if s.holders] == []
        assert fetchd.start(facts, "rest", stage(facts, 4, N_LAYERS), later_ranges=first).left_out_bytes > 0
        fetchd.wait("rest")


def later_bytes(fetchd: Fetchd, group: str) -> int:
    return sum(f.later_bytes for f in fetchd.client.status().fetches if f.group_id == group)


def test_the_later_part_yields_to_every_other_fetch(tmp_path: Path, store: Store) -> None:
    with Fetchd(tmp_path, THAW_FETCHD_LINK_BYTES_PER_S=4_000_000) as fetchd:
        facts = fetchd.client.inspect(f"{store.uri}/m")
        layer = stage(facts, 2, 3)
        fetchd.fetch(facts, "one", layer, later_ranges=stage(facts, 3, N_LAYERS))
        two = stage(facts, 1, 2)
        fetchd.start(facts, "two", two)
        before = later_bytes(fetchd, "one")
        fetchd.wait("two")
        assert before - later_bytes(fetchd, "one") < 0.5 * partition.size(two), "it had its full share"


def test_a_later_part_that_is_corrupt_leaves_the_first_one_good_and_can_be_asked_for_again(
    fetchd: Fetchd, store: Store
) -> None:
    facts = fetchd.client.inspect(f"{store.uri}/m")
    first, later = first_and_later(facts)
    good = (store.root / "m" / SHARDS[1]).read_bytes()
    damage(store.root / "m", "model.layers.5.mlp.w", 7)
    gate = Gate(store, later)  # otherwise the damage may be found before the first part is complete
    started = fetchd.start(facts, "g", first, later_ranges=later)
    fetchd.wait()
    gate.opened.set()
    with fetchd.reading(started.segment_id) as reader:
        with pytest.raises(ModelCorrupt):
            reader.wait(reader.n_bytes, 30)
        reader.wait(reader.first_bytes, 1)
        with fetchd.reading(started.segment_id, "late") as second:  # it comes after the later part has failed
            second.wait(second.first_bytes, 1)
    (store.root / "m" / SHARDS[1]).write_bytes(good)
    wait_until(lambda: not fetchd.client.status().fetches)
    again = fetchd.start(facts, "g", first, later_ranges=later)
    assert again.segment_id != started.segment_id
    assert len(take(fetchd, again.segment_id, "again")) == len(expected(lambda name: True))
    fetchd.cancel()


def test_a_fetch_of_no_weight_is_refused(fetchd: Fetchd, store: Store) -> None:
    facts = fetchd.client.inspect(f"{store.uri}/m")
    for weight in (0.0, -1.0, float("inf")):
        with pytest.raises(BadRequest, match="no place on the link"):
            fetchd.start(facts, "weightless", stage(facts, 0, 1), weight=weight)
    fetchd.start(facts, "light", stage(facts, 0, 1), weight=0.5)
    with pytest.raises(BadRequest, match="no place on the link"):
        fetchd.start(facts, "light", stage(facts, 0, 1), weight=0.0)
    fetchd.cancel("light")


# ── several segments with the same bytes ──────────────────────────────────────────────────────────────────────────


@pytest.fixture
def own_fetchd(tmp_path: Path) -> Iterator[Fetchd]:
    with Fetchd(tmp_path) as running:
        yield running


@pytest.fixture
def facts(own_fetchd: Fetchd, store: Store) -> ModelFacts:
    return own_fetchd.client.inspect(f"{store.uri}/m")


def check(fetchd: Fetchd, segment_id: str, instance: str) -> None:
    found = take(fetchd, segment_id, instance)
    assert found == expected(set(found).__contains__)


def test_what_another_segment_holds_is_copied_and_only_the_rest_is_fetched(
    own_fetchd: Fetchd, store: Store, facts: ModelFacts
) -> None:
    before = store.sent_bytes
    one, two, both = stage(facts, 1, 4), stage(facts, 3, N_LAYERS), stage(facts, 1, N_LAYERS)
    own_fetchd.fetch(facts, "one", one)
    started = own_fetchd.start(facts, "two", two)
    done = own_fetchd.wait("two")
    assert store.sent_bytes - before == partition.size(both)
    assert done.fetched_bytes == partition.size(both) - partition.size(one)
    assert done.events[-1].attrs["copied_bytes"] == partition.size(two) - done.fetched_bytes
    check(own_fetchd, started.segment_id, "two")


def test_a_part_of_a_resident_model_takes_no_byte_from_the_store(
    own_fetchd: Fetchd, store: Store, facts: ModelFacts
) -> None:
    own_fetchd.fetch(facts, "whole")
    before = len(store.requests)
    started = own_fetchd.start(facts, "part", stage(facts, 2, 5))
    assert own_fetchd.wait("part").fetched_bytes == 0
    assert len(store.requests) == before
    check(own_fetchd, started.segment_id, "part")


def test_overlapping_fetches_at_the_same_time_fetch_each_byte_once(
    own_fetchd: Fetchd, store: Store, facts: ModelFacts
) -> None:
    both, gate, before = threading.Barrier(2), threading.Event(), store.sent_bytes
    store.fault = holding(gate)  # no byte arrives before all fetches have been requested
    wanted = [stage(facts, 0, 4), stage(facts, 2, N_LAYERS), stage(facts, 1, 5)]

    def start(number: int) -> str:
        both.wait(30)
        return own_fetchd.start(facts, f"g{number}", wanted[number]).segment_id

    with ThreadPoolExecutor(2) as threads:
        started = list(threads.map(start, range(2)))
    started.append(own_fetchd.start(facts, "g2", wanted[2], later_ranges=stage(facts, 0, 1)).segment_id)
    gate.set()
    for number, segment_id in enumerate(started):
        own_fetchd.wait(f"g{number}")
        check(own_fetchd, segment_id, f"i{number}")
    assert store.sent_bytes - before == partition.size(stage(facts, 0, N_LAYERS))


def test_when_the_fetch_that_others_wait_for_fails_its_bytes_come_from_the_store(
    own_fetchd: Fetchd, store: Store, facts: ModelFacts
) -> None:
    held, gate = threading.Event(), threading.Event()
    store.fault = holding(gate, held)
    own_fetchd.start(facts, "one", stage(facts, 0, 5))
    assert held.wait(30)
    started = own_fetchd.start(facts, "two", stage(facts, 1, N_LAYERS))
    own_fetchd.cancel("one")
    gate.set()
    own_fetchd.wait("two")
    check(own_fetchd, started.segment_id, "two")


def test_who_waits_for_a_slow_fetchs_bytes_lends_it_haste(own_fetchd: Fetchd, store: Store, facts: ModelFacts) -> None:
    """At its own pace, the first fetch would need minutes for the chunks that it has begun."""
    before, every = store.sent_bytes, stage(facts, 0, N_LAYERS)
    own_fetchd.start(facts, "slow", every, pace_bytes_per_s=100_000, background=True)
    own_fetchd.fetch(facts, "urgent", stage(facts, 1, N_LAYERS), deadline_ms=5_000)
    own_fetchd.fetch(facts, "slow", every)
    assert store.sent_bytes - before == partition.size(every)


def test_a_full_pool_stops_no_look_at_the_small_files_of_another_model(tmp_path: Path) -> None:
    large = write_model(tmp_path / "large", n_layers=3, layer_bytes=4_000_000)
    other = write_model(tmp_path / "other", seed=2, layer_bytes=1000)
    with Fetchd(tmp_path, THAW_FETCHD_POOL_MB=16) as fetchd:
        kept = fetchd.client.inspect(large.as_uri())
        fetchd.fetch(kept, "g")
        facts = fetchd.client.inspect(other.as_uri())
        small = (FileRange("config.json", 0, facts.files["config.json"]),)
        started = fetchd.start(facts, "look", small, spare=True)
        fetchd.wait("look")
        with fetchd.reading(started.segment_id, group="look") as reader:
            assert file_bytes(reader, facts, "config.json") == (other / "config.json").read_bytes()
        fetchd.cancel("look")
        assert kept.uri in {status.uri for status in fetchd.client.status().segments}

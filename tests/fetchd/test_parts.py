"""fetchd's parts, tested without a process: the pool's accounts, the watermark's order, the arithmetic of pacing."""

from __future__ import annotations

import math
import os
import random
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest

from fetchd.backoff import backoff_s
from fetchd.chunk_reader import Origin
from fetchd.chunks import Check, Chunk, plan_chunks
from fetchd.fetch import Fetch, Machinery, Member, Wishes
from fetchd.pacing import QUANTUM_BYTES, NetworkLink, Pacer
from fetchd.read_once import Board, Gap
from fetchd.segments import MOST_SPARE, MOST_SPARE_BYTES, Arrived, SegmentKey, SegmentStore
from fetchd.slabs import SlabPool
from fetchd.sources.file import FileSource
from fetchd.transfer import Transfer
from relay.protocol.messages import FetchStart, PlacedRange
from relay.protocol.segment import PageReader, lay_out
from tests.fetchd.harness import wait_until
from thaw.errors import ErrorInfo, MemoryTooSmall, ModelCorrupt, PoolFull, StoreUnavailable
from thaw.ids import GroupId
from thaw.logs import Log
from thaw.model import CHUNK_BYTES, FileRange, ModelFile, ModelIndex, TensorInfo
from thaw.plan import PlanModel
from thaw.tracing.trace import Phase, event

SLAB = 2 * 2**20
N_SLABS = 8


def key(version: str = "v", n_slabs: int = 1) -> SegmentKey:
    return SegmentKey("u", version, (FileRange("f", 0, n_slabs * SLAB),))


@pytest.fixture
def pool() -> Iterator[SlabPool]:
    made = SlabPool(N_SLABS, SLAB, Log("test"))
    yield made
    made.close()


def test_the_pool_loses_no_slab_whatever_order_segments_come_and_go_in(pool: SlabPool) -> None:
    generator = random.Random(7)
    store = SegmentStore(pool, retain=True)
    held = []
    for step in range(300):
        if held and generator.random() < 0.5:
            segment, holder = held.pop(generator.randrange(len(held)))
            if generator.random() < 0.5:
                segment.finish()
            store.drop(segment, holder)
        else:
            wanted = key(n_slabs=generator.randrange(1, 3), version=str(generator.randrange(6)))
            holder = f"h{step}"
            try:
                held.append((store.find(wanted, holder) or store.create(wanted, holder), holder))
            except PoolFull:
                continue
        live = {s.segment_id: -(-s.n_bytes // SLAB) for s in store.statuses()}
        assert sum(live.values()) + pool.free_slabs == N_SLABS
        assert {s.segment_id for s, _ in held} <= live.keys()
        in_use = [slab for segment in store._by_id.values() for slab in segment.slabs]
        assert len(in_use) == len(set(in_use))
        while generator.random() < 0.3 and pool.scrub_one():
            pass


def test_nobody_joins_what_was_given_up_unless_it_became_whole(pool: SlabPool) -> None:
    store = SegmentStore(pool, retain=True)
    segment = store.create(key(), "one")
    assert store.find(key(), "two") is segment
    segment.given_up = True
    assert store.find(key(), "three") is None
    assert "three" not in segment.holders
    segment.finish()
    assert store.find(key(), "three") is segment


def test_room_is_made_by_what_was_released_first(pool: SlabPool) -> None:
    store = SegmentStore(pool, retain=True)
    made = {name: store.create(key(name, 2), "h") for name in "abcd"}
    for segment in made.values():
        segment.finish()
    for name in "cadb":  # this is not the order in which they were made
        store.drop(made[name], "h")
    assert store.find(key("a", 2), "h") is made["a"]
    store.drop(made["a"], "h")  # it was used again, so it is the most recently used one
    store.create(key("new", 3), "h")
    left = [name for name in "abcd" if store.find(key(name, 2), "looking") is not None]
    assert left == ["a", "b"], "two segments of two slabs made room for three slabs: c and d, released first"


@pytest.mark.parametrize("held", [True, False])
def test_a_look_at_a_model_needs_no_room_in_a_full_pool_and_leaves_nothing(pool: SlabPool, held: bool) -> None:
    store = SegmentStore(pool, retain=True)
    while pool.free_slabs:
        segment = store.create(key(f"kept {pool.free_slabs}"), "h")
        segment.finish()
        if not held:
            store.drop(segment, "h")
    for _ in range(MOST_SPARE + 1):
        segment = store.create(key("looked-at"), "look", spare=True)
        segment.views(0, 5)[0][:] = b"small"
        assert segment.pool.view(0)[:5] == b"small"
        assert len(os.pread(segment.read_only_fds()[1], 5, 0)) == 5
        segment.finish()
        store.drop(segment, "look")
        assert store.find(key("looked-at"), "look") is None
    assert (len(store.statuses()), pool.free_slabs) == (N_SLABS, 0)


def test_so_many_looks_at_once_have_memory_and_none_of_them_much(pool: SlabPool) -> None:
    store = SegmentStore(pool, retain=True)
    made = [store.create(key("looked-at"), "look", spare=True) for _ in range(MOST_SPARE)]
    with pytest.raises(PoolFull, match="4 models are being looked at"):
        store.create(key("looked-at"), "look", spare=True)
    store.drop(made[0], "look")
    store.create(key("looked-at"), "look", spare=True)
    with pytest.raises(MemoryTooSmall):
        store.create(SegmentKey("u", "v", (FileRange("w", 0, MOST_SPARE_BYTES + 1),)), "look", spare=True)
    store.close()


def test_the_first_reason_why_a_segment_failed_is_the_one_that_is_told(pool: SlabPool) -> None:
    store = SegmentStore(pool, retain=False)
    segment = store.create(key(), "h")
    segment.fail(ErrorInfo("ModelCorrupt", "w.safetensors failed its checksum twice"))
    segment.fail(ErrorInfo("PlatformError", "the fetch was cancelled"))
    assert segment.error == ErrorInfo("ModelCorrupt", "w.safetensors failed its checksum twice")
    with closing(PageReader(segment.control_fd)) as reader:
        assert reader.error().info() == segment.error


def test_the_first_error_of_a_transfer_is_the_one_that_it_ends_with(pool: SlabPool, tmp_path: Path) -> None:
    """Several readers of one store fail one after another.  The later errors are consequences of the first."""
    store = SegmentStore(pool, retain=False)
    segment = store.create(key(), "h")
    chunks = plan_chunks(segment.layout, index_of(SLAB))
    origin = Origin(FileSource(tmp_path), {}, {}, Board(store), connections=2, retries=1)
    transfer = Transfer(origin, segment, chunks, Pacer(NetworkLink(None)), lambda: None)
    transfer._fail(ModelCorrupt("the first"))
    transfer._fail(StoreUnavailable("the second"))
    with pytest.raises(ModelCorrupt, match="the first"):
        transfer.run()


def test_a_store_is_asked_again_after_twice_as_long_up_to_five_seconds_and_not_by_all_hosts_at_once() -> None:
    for failures, longest_s in ((1, 0.1), (2, 0.2), (3, 0.4), (6, 3.2), (7, 5.0), (50, 5.0)):
        waits_s = [backoff_s(failures) for _ in range(300)]
        assert longest_s / 2 <= min(waits_s) < 0.6 * longest_s
        assert 0.9 * longest_s < max(waits_s) <= longest_s


@pytest.mark.parametrize("n_held", [SLAB, SLAB - 1])
def test_a_connection_is_given_back_before_a_chunk_is_copied_that_needs_no_store(pool: SlabPool, n_held: int) -> None:
    """A copy takes as long as a digest; the other reader of the connection should not wait for either."""
    store = SegmentStore(pool, retain=False)
    source, target = store.create(key(), "a"), store.create(key(), "b")
    source.views(0, SLAB)[0][:] = b"x" * SLAB
    source.note_arrived("f", 0, Arrived(0, n_held, 0))
    copied_before: list[int] = []
    gaps = Board(store).copy(
        target,
        Chunk("f", 0, SLAB, 0, ()),
        needs_no_store=lambda: copied_before.append(bytes(target.views(0, SLAB)[0]).count(b"x")),
    )
    assert bytes(target.views(0, SLAB)[0]).count(b"x") == n_held
    assert (gaps, copied_before) == (([], [0]) if n_held == SLAB else ([Gap(n_held, 1)], []))


def fetch_of(pool: SlabPool, *wishes: Wishes) -> Fetch:
    """A fetch with one stage for each of these wishes."""
    segment = SegmentStore(pool, retain=False).create(key(), "h")
    nothing = cast(Any, None)
    fetch = Fetch(segment, Machinery(nothing, NetworkLink(None), nothing, nothing, nothing, nothing))
    model = PlanModel("u", "v", "", SLAB)
    for stage, wish in enumerate(wishes):
        request = FetchStart(GroupId("g"), stage, 1, model, segment.key.ranges)
        fetch.members.append(Member(request, fetch, event(Phase.FETCH_BEGIN), False, wish))
    fetch.apply_wishes()
    return fetch


def test_who_joins_a_slow_fetch_is_not_slowed_by_it(pool: SlabPool) -> None:
    slow, fast = Wishes(100_000, math.inf, True, 1.0), Wishes(1_000_000, 50.0, False, 4.0)
    for joined in ((slow, fast), (fast, slow)):
        fetch = fetch_of(pool, *joined)
        assert fetch.pacer.quantum(QUANTUM_BYTES) == 50_000, "a twentieth of a second of the faster pace"
        share = fetch.pacer.share
        assert (share.deadline, share.background, share.weight, share.paced) == (50.0, False, 4.0, True)
    unpaced = fetch_of(pool, slow, Wishes(None, 70.0, False, 1.0)).pacer
    assert unpaced.quantum(QUANTUM_BYTES) == QUANTUM_BYTES, "one that has no pace is bounded by nobody's"
    assert not unpaced.share.paced
    alone = fetch_of(pool, slow).pacer
    assert (alone.quantum(QUANTUM_BYTES), alone.share.background) == (5_000, True)


def test_a_segment_that_is_only_copied_from_counts_as_free_and_goes_when_the_copy_has_ended(pool: SlabPool) -> None:
    store, order = SegmentStore(pool, retain=True), list[str]()
    old = store.create(key("v", N_SLABS), "one")
    old.note_arrived("f", 0, Arrived(0, SLAB, 0))
    old.finish()
    store.drop(old, "one")
    pinned = store.pin(old.key, "f", 0)
    assert (pinned, [s.holders for s in store.statuses()]) == ([old], [()])

    def create() -> None:
        store.create(key("w", N_SLABS), "two")
        order.append("created")

    thread = threading.Thread(target=create)
    thread.start()
    wait_until(lambda: store.statuses() == ())  # the segment cannot be found any more, and the thread waits for it
    order.append("copied")
    store.unpin(pinned)
    thread.join(10)
    assert order == ["copied", "created"]


def test_whoever_waits_for_room_is_told_when_a_segment_is_whole_or_let_go(pool: SlabPool) -> None:
    store = SegmentStore(pool, retain=True)
    segment = store.create(key(), "one")
    store.hold(segment.segment_id, "two")
    before = store.await_change(-1, 30)
    store.drop(segment, "two")
    assert store.await_change(before, 0) == before  # "one" still holds the segment
    told: list[int] = []
    waiting = threading.Thread(target=lambda: told.append(store.await_change(before, 30)))
    waiting.start()
    store.drop(segment, "one")
    waiting.join(30)
    assert len(told) == 1
    assert told != [before]


def test_a_slab_that_was_written_is_zero_when_it_is_taken_again(pool: SlabPool) -> None:
    slabs = pool.take(N_SLABS)
    for slab in slabs:
        pool.view(slab)[:] = b"\xff" * SLAB
    pool.give_back(slabs)
    assert pool.scrub_one()
    for slab in pool.take(N_SLABS):
        assert not any(pool.view(slab))


def test_a_take_that_cannot_be_met_takes_nothing(pool: SlabPool) -> None:
    with pytest.raises(MemoryTooSmall):
        pool.take(N_SLABS + 1)
    assert pool.free_slabs == N_SLABS


def index_of(n_bytes: int, tensors: tuple[TensorInfo, ...] = ()) -> ModelIndex:
    digests = tuple(f"{i:016x}" for i in range(-(-n_bytes // CHUNK_BYTES)))
    return ModelIndex(1, (ModelFile("f", n_bytes, False, digests),), tensors, "r", "", True)


def tensor(name: str, offset: int, n_bytes: int, *edges: str) -> TensorInfo:
    return TensorInfo(name, "f", offset, n_bytes, "U8", (n_bytes,), edges)


def test_ranges_are_cut_at_the_files_chunks_and_whole_chunks_have_their_own_checksum() -> None:
    index = index_of(3 * CHUNK_BYTES + 5)
    layout = lay_out([FileRange("f", 10, 2 * CHUNK_BYTES), FileRange("f", 3 * CHUNK_BYTES, 5)])
    chunks = plan_chunks(layout, index, n_first=1)
    assert [(c.offset, c.n_bytes, c.number, c.later) for c in chunks] == [
        (10, CHUNK_BYTES - 10, 0, False),
        (CHUNK_BYTES, CHUNK_BYTES, 1, False),
        (2 * CHUNK_BYTES, 10, 2, False),
        (3 * CHUNK_BYTES, 5, 3, True),
    ]
    first, last = (
        Check("chunk 1", CHUNK_BYTES, CHUNK_BYTES, f"{1:016x}"),
        Check("chunk 3", 3 * CHUNK_BYTES, 5, f"{3:016x}"),
    )
    assert [c.checks for c in chunks] == [(), (first,), (), (last,)]
    assert [c.segment_offset for c in chunks] == [0, CHUNK_BYTES - 10, 2 * CHUNK_BYTES - 10, 2 * CHUNK_BYTES]


def test_chunks_of_a_file_without_checksums_are_checked_against_what_is_learned() -> None:
    index = ModelIndex(1, (ModelFile("f", 10, False, ()),), (tensor("t", 0, 6), tensor("u", 6, 4)), "", "e", False)
    (whole,) = plan_chunks(lay_out([FileRange("f", 0, 10)]), index)
    assert whole.checks == (Check("chunk 0", 0, 10, ""),)
    (part,) = plan_chunks(lay_out([FileRange("f", 0, 6)]), index)
    assert part.checks == (Check("tensor t", 0, 6, ""),), "the next tensor begins where the part ends"


def test_a_part_of_a_chunk_is_checked_by_the_edges_of_the_tensors_in_it() -> None:
    border = CHUNK_BYTES
    tensors = (
        tensor("before", 0, 50, "b0"),
        tensor("small", 50, 50, "s0"),
        tensor("none", 100, 0),
        tensor("long", 100, 2 * border, "l0", "l1"),
        tensor("after", 2 * border + 100, 7, "a0"),
    )
    chunks = plan_chunks(lay_out([FileRange("f", 50, 2 * border + 50)]), index_of(2 * border + 107, tensors))
    assert [[(c.what, c.offset, c.n_bytes, c.blake3) for c in chunk.checks] for chunk in chunks] == [
        [("tensor small", 50, 50, "s0"), ("tensor long", 100, border - 100, "l0")],
        [("chunk 1", border, border, f"{1:016x}")],
        [("tensor long", 2 * border, 100, "l1")],
    ]
    covered = sum(c.n_bytes for chunk in chunks for c in chunk.checks)
    assert covered == sum(chunk.n_bytes for chunk in chunks), "a byte between two tensors' borders is not checked"


def test_bytes_that_the_model_does_not_have_are_not_planned() -> None:
    for file, offset, n_bytes in (("g", 0, 1), ("f", 0, 6), ("f", 6, 0)):
        with pytest.raises(ModelCorrupt, match=rf"{file}: \[{offset}, \+{n_bytes}\) was planned"):
            plan_chunks((PlacedRange(file, offset, n_bytes, 0),), index_of(5))

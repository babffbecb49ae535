"""fetchd's parts without a process: the pool's accounts, the watermark's order, pacing's arithmetic."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import pytest

from fetchd.chunks import plan_chunks
from fetchd.pacing import QUANTUM_BYTES, Pacer, TokenBucket
from fetchd.segments import SegmentStore
from fetchd.slabs import SlabPool
from relay.messages import PlacedRange
from relay.segment import lay_out
from thaw.errors import MemoryTooSmall, ModelCorrupt
from thaw.logs import Log
from thaw.model import CHUNK_BYTES, FileRange, ModelFile, ModelIndex

SLAB = 2 * 2**20
N_SLABS = 8


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
            key = ("u", str(generator.randrange(6)), (FileRange("f", 0, generator.randrange(1, 3) * SLAB),))
            holder = f"h{step}"
            try:
                held.append((store.find(key, holder) or store.create(key, holder), holder))
            except MemoryTooSmall:
                continue
        live = {s.segment_id: -(-s.n_bytes // SLAB) for s in store.statuses()}
        assert sum(live.values()) + pool.free_slabs == N_SLABS
        assert {s.segment_id for s, _ in held} <= live.keys()
        in_use = [slab for segment in store._by_id.values() for slab in segment.slabs]
        assert len(in_use) == len(set(in_use))
        while generator.random() < 0.3 and pool.scrub_one():
            pass


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


def index_of(n_bytes: int) -> ModelIndex:
    digests = tuple(f"{i:016x}" for i in range(-(-n_bytes // CHUNK_BYTES)))
    return ModelIndex(1, (ModelFile("f", n_bytes, False, "s" * 64, digests),), (), "r", "", True)


def test_ranges_are_cut_at_the_files_chunks_and_only_whole_chunks_are_checked() -> None:
    index = index_of(3 * CHUNK_BYTES + 5)
    layout = lay_out([FileRange("f", 10, 2 * CHUNK_BYTES), FileRange("f", 3 * CHUNK_BYTES, 5)])
    chunks = plan_chunks(layout, index)
    assert [(c.offset, c.n_bytes, c.number) for c in chunks] == [
        (10, CHUNK_BYTES - 10, None), (CHUNK_BYTES, CHUNK_BYTES, 1), (2 * CHUNK_BYTES, 10, None),
        (3 * CHUNK_BYTES, 5, 3),
    ]  # fmt: skip
    assert [c.xxh3 for c in chunks] == ["", f"{1:016x}", "", f"{3:016x}"]
    assert [c.segment_offset for c in chunks] == [0, CHUNK_BYTES - 10, 2 * CHUNK_BYTES - 10, 2 * CHUNK_BYTES]


def test_bytes_that_the_model_does_not_have_are_not_planned() -> None:
    for file, offset, n_bytes in (("g", 0, 1), ("f", 0, 6), ("f", 6, 0)):
        with pytest.raises(ModelCorrupt, match="was planned"):
            plan_chunks((PlacedRange(file, offset, n_bytes, 0),), index_of(5))


def never() -> bool:
    return False


def take_for(bucket: TokenBucket, seconds: float, taken: list[int], *, background: bool = False) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        n_bytes = bucket.quantum() or 1
        bucket.take(n_bytes, lambda: time.monotonic() > end, background=background)
        if time.monotonic() < end:
            taken.append(n_bytes)


def test_a_bucket_gives_its_rate_whoever_asks_and_no_burst_after_a_pause() -> None:
    rate = 50_000_000
    bucket = TokenBucket(rate)
    taken: list[int] = []
    threads = [threading.Thread(target=take_for, args=(bucket, 1.0, taken)) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert rate * 0.8 <= sum(taken) <= rate + 3 * QUANTUM_BYTES


def test_background_reads_yield_the_link_to_a_start() -> None:
    bucket = TokenBucket(20_000_000)
    urgent: list[int] = []
    patient: list[int] = []
    threads = [threading.Thread(target=take_for, args=(bucket, 1.0, urgent)) for _ in range(2)]
    threads.append(threading.Thread(target=take_for, args=(bucket, 1.0, patient), kwargs={"background": True}))
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sum(patient) < 0.2 * sum(urgent)


def test_a_new_rate_and_a_cancel_wake_a_sleeper() -> None:
    pacer = Pacer(TokenBucket(None), 1.0)
    cancelled = threading.Event()
    sleeper = threading.Thread(target=pacer.take, args=(4096, cancelled.is_set))
    sleeper.start()
    pacer.set_pace(None)
    sleeper.join(2)
    assert not sleeper.is_alive()
    pacer.set_pace(1.0)
    sleeper = threading.Thread(target=pacer.take, args=(4096, cancelled.is_set))
    sleeper.start()
    cancelled.set()
    pacer.wake()
    sleeper.join(2)
    assert not sleeper.is_alive()


def test_a_quantum_is_never_more_than_asked_and_small_at_low_rates() -> None:
    assert Pacer(TokenBucket(None), None).quantum(10**6) == 10**6
    assert Pacer(TokenBucket(10**9), None).quantum(10**6) == QUANTUM_BYTES
    assert Pacer(TokenBucket(10**9), 200_000).quantum(10**6) == 10_000
    assert Pacer(TokenBucket(10**9), 1).quantum(100) == 100

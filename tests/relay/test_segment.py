"""Segment v1: the vectors, the writer together with the reader, and a reader that gets false values."""

from __future__ import annotations

import json
import mmap
import os
import re
import struct
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from relay.protocol.messages import PlacedRange, SegmentOffer
from relay.protocol.pool import ALIGNMENT, n_slabs, segment_length
from relay.protocol.segment import (
    DEAD_AFTER_S,
    PAGE_BYTES,
    ControlPage,
    PageReader,
    SegmentReader,
    lay_out,
    segment_bytes,
)
from relay.protocol.shared_memory import Region, futex_wait, futex_wake
from tests.fetchd.harness import wait_until
from thaw.errors import (
    ErrorInfo,
    MemoryTooSmall,
    ModelCorrupt,
    ModelNotFound,
    ModelUnsupported,
    PlatformError,
    ProtocolError,
    StoreUnavailable,
    ThawError,
)
from thaw.model import FileRange

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "segment.json").read_text())
SLAB_BYTES = 2 * 1024 * 1024


@dataclass
class Made:
    """A segment as fetchd would make it, but without fetchd."""

    page: ControlPage
    page_bytes: mmap.mmap
    fds: list[int]
    offer: SegmentOffer

    def reader(self) -> SegmentReader:
        return SegmentReader(self.offer, [os.dup(fd) for fd in self.fds])


def make(n_bytes: int, n_slabs: int = 1) -> Made:
    fds = []
    for i in range(n_slabs + 1):
        fds.append(os.memfd_create(f"t{i}"))
        os.ftruncate(fds[-1], SLAB_BYTES if i else PAGE_BYTES)
    page_bytes = mmap.mmap(fds[0], PAGE_BYTES)
    layout = (PlacedRange("model.safetensors", 0, n_bytes, 0),)
    offer = SegmentOffer("s", n_bytes, SLAB_BYTES, n_slabs, layout, ())
    segment = Made(ControlPage(page_bytes, n_bytes), page_bytes, fds, offer)
    for fd in fds:
        weakref.finalize(segment, os.close, fd)
    return segment


@pytest.fixture
def made() -> Made:
    return make(3 * 1024 * 1024, n_slabs=2)


@pytest.mark.parametrize("vector", VECTORS["pages"], ids=lambda v: v["name"])
def test_the_writer_writes_the_vectors_bytes(vector: dict[str, Any]) -> None:
    segment = make(vector["n_bytes"], n_slabs=1)
    for step in vector["steps"]:
        if step["do"] == "advance":
            segment.page.advance(step["end"])
        elif step["do"] == "complete":
            segment.page.complete()
        else:
            segment.page.fail(ErrorInfo(step["code"], step["message"], step["hint"]))
    written = bytearray(segment.page_bytes[: len(vector["hex"]) // 2])
    written[32:40] = bytes(8)  # the heartbeat depends on the clock
    assert written.hex() == vector["hex"]
    assert not any(segment.page_bytes[len(written) :])


@pytest.mark.parametrize("vector", [*VECTORS["pages"], *VECTORS["read_only_pages"]], ids=lambda v: v["name"])
def test_the_reader_reads_the_vectors_bytes(vector: dict[str, Any]) -> None:
    segment = make(vector["n_bytes"])
    segment.page_bytes[: len(vector["hex"]) // 2] = bytes.fromhex(vector["hex"])
    reader = PageReader(segment.fds[0])
    found = {"n_bytes": reader.n_bytes, "end": reader.end, "seq": reader.seq, "state": reader.state.name}
    assert found == {name: vector[name] for name in found}
    if "error" in vector:
        error = reader.error()
        assert [error.code, error.message, error.hint] == vector["error"]
    reader.close()


@pytest.mark.parametrize("vector", VECTORS["bad_pages"], ids=lambda v: v["name"])
def test_the_reader_refuses_the_bad_vectors(vector: dict[str, Any]) -> None:
    segment = make(vector["n_bytes"])

    def write(plain: str) -> None:
        segment.page_bytes[: len(plain) // 2] = bytes.fromhex(plain)
        struct.pack_into("<Q", segment.page_bytes, 32, time.monotonic_ns())

    *before, last = vector["hexes"]
    write([*before, last][0])
    with pytest.raises(ProtocolError, match=re.escape(vector["error"])):
        reader = segment.reader()
        for plain in [*before, last]:
            write(plain)
            reader.wait(0, 0.0)


@pytest.mark.parametrize("vector", VECTORS["layouts"])
def test_ranges_are_laid_out_as_the_vectors_say(vector: dict[str, Any]) -> None:
    placed = lay_out([FileRange(*r) for r in vector["ranges"]])
    assert [p.segment_offset for p in placed] == vector["segment_offsets"]
    assert segment_bytes(placed) == vector["n_bytes"]
    assert segment_length([FileRange(*r) for r in vector["ranges"]]) == vector["n_bytes"]
    assert all(p.segment_offset % ALIGNMENT == 0 for p in placed)


def test_a_segment_takes_whole_slabs_and_its_ranges_whole_pages() -> None:
    page, slab = ALIGNMENT, 4 * ALIGNMENT
    cases = [((), 0), ((1,), 1), ((slab,), 1), ((slab + 1,), 2), ((1, 1, 1, page), 1), ((1, 1, 1, page + 1), 2)]
    for ranges, expected in cases:
        assert n_slabs([FileRange("f", 0, n) for n in ranges], slab) == expected, ranges


def test_a_view_crosses_slabs_and_is_read_only(made: Made) -> None:
    border = SLAB_BYTES - 3
    os.pwrite(made.fds[1], b"abc", border)
    os.pwrite(made.fds[2], b"def", 0)
    reader = made.reader()
    view = reader.view(border, 6)
    assert bytes(view) == b"abcdef"
    assert view.readonly
    reader.close()
    assert bytes(view) == b"abcdef", "a view keeps its memory mapped after close"


def test_a_view_outside_the_segment_is_refused(made: Made) -> None:
    reader = made.reader()
    for offset, n_bytes in ((-1, 1), (0, reader.n_bytes + 1), (reader.n_bytes, 1), (0, -1)):
        with pytest.raises(ValueError, match="outside the segment"):
            reader.view(offset, n_bytes)
    with pytest.raises(ValueError, match="waiting for byte"):
        reader.wait(reader.n_bytes + 1, 1)
    reader.close()


def test_a_waiter_is_woken_by_the_chunk_and_not_by_the_clock(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relay.protocol.segment.MAX_WAIT_S", 4.0)
    reader = made.reader()
    latencies: list[float] = []

    def follow(end: int) -> float:
        assert reader.wait(end, 20) >= end
        return time.monotonic()

    with ThreadPoolExecutor(1) as follower:
        for end in range(1000, 21_000, 1000):
            woken = follower.submit(follow, end)
            wait_until(woken.running)
            began = time.monotonic()
            made.page.advance(end)
            latencies.append(woken.result(20) - began)
    assert sorted(latencies)[10] < 1, "these were not woken, but looked again"
    reader.close()


def test_a_waiter_in_another_process_is_woken(made: Made) -> None:
    pid = os.fork()
    if pid == 0:
        reader = made.reader()
        os._exit(0 if reader.wait(10, 10) == 4096 else 1)
    made.page.advance(4096)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize(
    "cls", [ModelNotFound, ModelCorrupt, ModelUnsupported, MemoryTooSmall, StoreUnavailable, PlatformError]
)
def test_a_failed_fetch_is_raised_as_its_own_error_but_what_arrived_stays_good(
    made: Made, cls: type[ThawError]
) -> None:
    reader = made.reader()
    made.page.advance(100)
    made.page.fail(ErrorInfo(cls.__name__, "what happened", "what to do"))
    assert reader.wait(100, 1) == 100
    with pytest.raises(cls, match="what happened") as caught:
        reader.wait(101, 1)
    assert (type(caught.value), caught.value.hint) == (cls, "what to do")
    reader.close()


def test_an_error_text_longer_than_the_page_is_cut_between_characters(made: Made) -> None:
    made.page.fail(ErrorInfo("ModelCorrupt", "é" * 5000, "ü" * 5000))
    reader = made.reader()
    with pytest.raises(ModelCorrupt) as caught:
        reader.wait(1, 1)
    assert (caught.value.message, caught.value.hint) == ("é" * 750, "ü" * 750)
    reader.close()


def test_a_silent_heartbeat_and_a_passed_deadline_are_told_apart(made: Made) -> None:
    reader = made.reader()
    with pytest.raises(PlatformError, match=r"0 of the 5 bytes wanted had arrived after 0.05 s"):
        reader.wait(5, 0.05)
    struct.pack_into("<Q", made.page_bytes, 32, time.monotonic_ns() - int((DEAD_AFTER_S + 0.1) * 1e9))
    with pytest.raises(PlatformError, match="no heartbeat"):
        reader.wait(5, 30)
    reader.close()


def test_too_few_descriptors_are_refused_and_closed(made: Made) -> None:
    fds = [os.dup(fd) for fd in made.fds[:-1]]
    with pytest.raises(ProtocolError, match="came with 2 descriptors"):
        SegmentReader(made.offer, fds)
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_a_changed_word_and_a_passed_time_end_a_futex_wait() -> None:
    region = Region(4096)
    began = time.monotonic()
    futex_wait(region.address, 1, 60)  # the word is 0, so it differs from 1 already
    assert time.monotonic() - began < 30
    futex_wait(region.address, 0, 0.01)
    assert futex_wake(region.address) == 0
    region.close()

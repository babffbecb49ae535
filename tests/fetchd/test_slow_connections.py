"""A connection that is much slower than the others holds up nothing: the reader of its chunk is given another one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fetchd.shared_connection import Read
from fetchd.sources.base import Target
from tests.fetchd.harness import WEIGHTS, Fetchd, Instead, Request, Store, every, file_bytes, write_index, write_model
from thaw.model import CHUNK_BYTES, FileRange, ModelFacts

N_CHUNKS = 8
HANG_S = 60.0


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tmp_path_factory.mktemp("s") / "m"
    return write_index(write_model(model, n_layers=N_CHUNKS, layer_bytes=CHUNK_BYTES - 1000)).parent


@pytest.fixture
def store(root: Path) -> Iterator[Store]:
    with Store(root) as running:
        yield running


@pytest.fixture
def fetchd(tmp_path: Path) -> Iterator[Fetchd]:
    """A fetchd that would wait for a silent store for longer than a test does."""
    with Fetchd(tmp_path, THAW_FETCHD_RETAIN="false", THAW_FETCHD_READ_TIMEOUT_S=HANG_S) as running:
        yield running


def wants_chunk(number: int) -> Callable[[Request], bool]:
    return lambda r: (r.method, r.name, r.first) == ("GET", WEIGHTS, number * CHUNK_BYTES)


def hanging(store: Store, number: int) -> Instead:
    """The first request for this chunk of the weights gets a few bytes and then nothing."""

    def hang(request: Request) -> None:
        request.cut(1000)
        store.stopped.wait(HANG_S)

    return Instead(wants_chunk(number), hang, times=1)


def chunks(facts: ModelFacts, begin: int, end: int) -> tuple[FileRange, ...]:
    """The weights' chunks from number ``begin`` until ``end``."""
    at = begin * CHUNK_BYTES
    return (FileRange(WEIGHTS, at, min(end * CHUNK_BYTES, facts.files[WEIGHTS]) - at),)


@pytest.mark.parametrize("number", [0, 3, N_CHUNKS - 1])
def test_a_connection_that_hangs_is_given_up_while_others_read_or_have_nothing_left_to_read(
    fetchd: Fetchd, store: Store, number: int
) -> None:
    facts = fetchd.client.inspect(f"{store.uri}/m")
    store.fault = hanging(store, number)
    started = fetchd.start(facts)
    with fetchd.reading(started.segment_id) as reader:
        done = fetchd.wait()
        attrs = done.events[-1].attrs
        assert attrs["slow_connections"] in range(1, N_CHUNKS)  # on a busy machine others may be slow, too
        assert attrs["retries"] == 0
        assert done.fetched_bytes == sum(facts.files.values()), "bytes that had arrived were asked for again"
        reader.wait(reader.n_bytes, 1)
        assert file_bytes(reader, facts, WEIGHTS) == (store.root / "m" / WEIGHTS).read_bytes()


def test_a_connection_that_hangs_in_the_first_part_is_given_up_though_the_others_must_wait_for_that_part(
    fetchd: Fetchd, store: Store
) -> None:
    facts = fetchd.client.inspect(f"{store.uri}/m")
    store.fault = hanging(store, 3)
    done = fetchd.fetch(facts, "g", chunks(facts, 0, 4), later_ranges=chunks(facts, 4, N_CHUNKS))
    assert done.fetched_bytes == 4 * CHUNK_BYTES


def test_the_last_reader_of_the_first_part_finds_its_turn_after_a_pause_that_the_store_asked_for(
    tmp_path: Path, store: Store
) -> None:
    """The other reader of the only connection must not keep the turn while it waits for the later part."""
    with Fetchd(tmp_path, THAW_FETCHD_CONNECTIONS=1) as fetchd:
        facts = fetchd.client.inspect(f"{store.uri}/m")

        def busy(request: Request) -> None:
            head = request.head("429 Too Many Requests", length=0)
            request.sock.sendall(head.replace(b"\r\n\r\n", b"\r\nRetry-After: 1\r\n\r\n"))

        store.fault = Instead(every, busy, times=1)
        done = fetchd.fetch(facts, "g", chunks(facts, 0, 1), later_ranges=chunks(facts, 1, 3))
        assert done.fetched_bytes == CHUNK_BYTES


def test_an_object_that_is_slow_on_every_connection_is_left_more_and_more_time(fetchd: Fetchd, store: Store) -> None:
    facts = fetchd.client.inspect(f"{store.uri}/m")
    is_first, asked = wants_chunk(0), []

    def slow(request: Request) -> bool:
        if is_first(request):
            asked.append(request.number)
            store.stopped.wait(1.2)  # before the first byte: 0.5 s and 1 s are too short, 2 s are enough
        return False

    store.fault = slow
    assert fetchd.fetch(facts).fetched_bytes == sum(facts.files.values())
    assert len(asked) >= 2


# the rule ----------------------------------------------------------------------------------------------------------


def a_read(*, done: int = 0, n_handed_over: int = 0) -> Read:
    read = Read(Target([memoryview(bytearray(800))]), 800, 100.0, n_handed_over)
    read.target.advance(done)
    return read


@pytest.mark.parametrize(
    ("chunk_s", "now_s", "seconds"),
    [
        (1.0, 100.0, 1.5),  # it may take as long as one and a half chunks take there
        (1.0, 101.0, 0.5),
        (1.0, 102.0, 0.0),
        (0.001, 100.0, 0.5),
        (math.inf, 900.0, math.inf),  # a connection that has read nothing proves nothing
    ],
)
def test_a_read_is_overdue_when_the_other_connection_could_have_read_one_and_a_half_chunks(
    chunk_s: float, now_s: float, seconds: float
) -> None:
    assert a_read().overdue_in_s(chunk_s, now_s) == seconds


def test_the_patience_doubles_with_each_connection() -> None:
    assert [a_read(n_handed_over=n).overdue_in_s(1.0, 100.0) for n in range(4)] == [1.5, 3.0, 6.0, 12.0]


def test_a_read_that_is_nearly_done_is_left_to_its_connection() -> None:
    assert a_read(done=599).overdue_in_s(1.0, 110.0) == 0.0
    assert a_read(done=600).overdue_in_s(1.0, 110.0) == math.inf


def test_a_read_that_the_pacer_holds_back_is_not_overdue() -> None:
    read = a_read()
    read.is_held_back = True
    assert read.overdue_in_s(1.0, 900.0) == 1.5

"""A store that fails in every way in which stores fail, over real sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fetchd.backoff import pause_s
from fetchd.sources.base import Busy
from tests.fetchd.harness import (
    WEIGHTS,
    Fetchd,
    Instead,
    Request,
    Store,
    every,
    file_bytes,
    flip,
    of_weights,
    wait_until,
    write_index,
    write_model,
)
from thaw.errors import ModelCorrupt, ModelNotFound, ModelUnsupported, PlatformError, StoreUnavailable
from thaw.model import CHUNK_BYTES, FileRange, ModelFacts


@pytest.fixture
def fetchd(tmp_path: Path) -> Iterator[Fetchd]:
    with Fetchd(tmp_path, THAW_FETCHD_RETAIN="false") as running:
        yield running


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    write_index(write_model(tmp_path / "s" / "m", layer_bytes=8_000_000))
    with Store(tmp_path / "s") as running:
        yield running


def inspect(fetchd: Fetchd, store: Store) -> ModelFacts:
    return fetchd.client.inspect(f"{store.uri}/m")


def evidence(fetchd: Fetchd, facts: ModelFacts) -> dict[str, object]:
    return dict(fetchd.fetch(facts).events[-1].attrs)


def test_a_model_arrives_over_http_on_few_connections_and_every_byte_once(fetchd: Fetchd, store: Store) -> None:
    facts = inspect(fetchd, store)
    store.requests.clear()
    with fetchd.reading(fetchd.start(facts).segment_id) as reader:
        reader.wait(reader.n_bytes, 30)
        for name in facts.files:
            assert file_bytes(reader, facts, name) == (store.root / "m" / name).read_bytes()
    chunks = [("GET", WEIGHTS, i * CHUNK_BYTES) for i in range(3)]
    assert sorted(store.requests) == [("GET", "config.json", 0), *chunks, ("GET", "tokenizer.json", 0)]
    done = fetchd.wait()
    assert done.fetched_bytes == sum(facts.files.values())
    assert done.events[-1].attrs["source"] == "http"


def test_a_connection_cut_inside_a_chunk_resumes_from_the_byte_reached(fetchd: Fetchd, store: Store) -> None:
    facts = inspect(fetchd, store)
    store.fault = cut = Instead(of_weights, lambda r: r.cut(3_000_000), times=1)
    attrs = evidence(fetchd, facts)
    assert attrs["retries"] == 1
    assert attrs["fetched_bytes"] == sum(facts.files.values()), "bytes that had arrived were asked for again"
    assert ("GET", WEIGHTS, cut.met[0].first + 3_000_000) in store.requests


def test_a_store_that_answers_503_for_a_while_is_asked_again(fetchd: Fetchd, store: Store) -> None:
    facts = inspect(fetchd, store)
    store.fault = Instead(of_weights, lambda r: r.refuse("503 Slow Down"), times=2)
    assert evidence(fetchd, facts)["retries"] == 2


def test_a_store_that_stays_down_is_given_up_as_unavailable(tmp_path: Path, store: Store) -> None:
    with Fetchd(tmp_path, THAW_FETCHD_RETRIES=2) as fetchd:
        facts = inspect(fetchd, store)
        store.fault = Instead(every, lambda r: r.refuse("500 Oh"))
        with fetchd.reading(fetchd.start(facts).segment_id) as reader:
            with pytest.raises(StoreUnavailable) as told:
                reader.wait(reader.n_bytes, 30)
            assert fetchd.reason(told.value)["error"].endswith("the store answered 500 (gave up after 2 attempts)")
            with pytest.raises(StoreUnavailable):
                fetchd.wait()


def test_a_store_that_trickles_is_given_up_as_unavailable(tmp_path: Path, store: Store) -> None:
    """Each attempt gets a few bytes and breaks off.

    This does not count as progress, because fetchd would otherwise ask such a store for ever.
    """
    with Fetchd(tmp_path, THAW_FETCHD_RETRIES=3) as fetchd:
        facts = inspect(fetchd, store)
        store.fault = Instead(of_weights, lambda r: r.cut(1000))
        with fetchd.failing(StoreUnavailable, "gave up after 3 attempts"):
            fetchd.fetch(facts)


def test_a_store_that_breaks_off_again_and_again_is_not_given_up_while_it_brings_enough(
    tmp_path: Path, store: Store
) -> None:
    with Fetchd(tmp_path, THAW_FETCHD_RETRIES=2) as fetchd:
        facts = inspect(fetchd, store)
        store.fault = Instead(lambda r: of_weights(r) and len(r.body) > 2_000_000, lambda r: r.cut(2_000_000))
        attrs = evidence(fetchd, facts)
        assert attrs["fetched_bytes"] == sum(facts.files.values())
        assert attrs["retries"] >= 6


def test_a_store_that_refuses_connections_is_unavailable(tmp_path: Path) -> None:
    with (
        Fetchd(tmp_path, THAW_FETCHD_RETRIES=2) as fetchd,
        fetchd.failing(StoreUnavailable, "ConnectionRefused"),
    ):
        fetchd.client.inspect("http://127.0.0.1:1/m")


def test_a_store_that_falls_silent_hits_the_read_deadline_and_is_asked_again(tmp_path: Path, store: Store) -> None:
    def hang(request: Request) -> None:
        request.cut(100)
        store.stopped.wait(60)

    with Fetchd(tmp_path, THAW_FETCHD_READ_TIMEOUT_S=2, THAW_FETCHD_CONNECTIONS=1) as fetchd:
        facts = inspect(fetchd, store)
        store.fault = Instead(of_weights, hang, times=1)
        began = time.monotonic()
        assert evidence(fetchd, facts)["retries"] >= 1
        assert 2.0 <= time.monotonic() - began < 30, "the store ended it, not the deadline of two seconds"


def damaged(request: Request) -> None:
    request.sock.sendall(request.head() + b"\xff" + request.body[1:])


def test_one_damaged_chunk_is_fetched_again_and_two_are_corruption(fetchd: Fetchd, store: Store) -> None:
    facts = inspect(fetchd, store)
    store.fault = Instead(lambda r: of_weights(r) and r.first == 0, damaged, times=1)
    assert evidence(fetchd, facts)["refetched_chunks"] == 1
    fetchd.cancel()
    store.fault = Instead(lambda r: of_weights(r) and r.first == 0, damaged, times=2)
    started = fetchd.start(facts)
    with fetchd.reading(started.segment_id) as reader:
        with fetchd.failing(ModelCorrupt, "model.safetensors: chunk 0 failed its checksum twice"):
            reader.wait(reader.n_bytes, 30)
        assert reader.end <= reader.locate(WEIGHTS, 0)
    with pytest.raises(ModelCorrupt):
        fetchd.wait()
    wait_until(lambda: all(s.segment_id != started.segment_id for s in fetchd.client.status().segments))


def test_a_damaged_chunk_that_is_wanted_twice_is_fetched_again_although_the_other_reader_waits_for_it(
    tmp_path: Path,
) -> None:
    """Two readers share the only connection.  The one that has the turn waits for the chunk that the other one found
    damaged, and which is fetched again on another connection."""
    write_index(write_model(tmp_path / "m", layer_bytes=2_500_000))  # one chunk, of which the digest takes some time
    fault = Instead(of_weights, damaged, times=1)
    with Store(tmp_path) as store, Fetchd(tmp_path, THAW_FETCHD_CONNECTIONS=1) as fetchd:
        facts = inspect(fetchd, store)
        store.fault = fault
        done = fetchd.fetch(facts, ranges=(FileRange(WEIGHTS, 0, facts.files[WEIGHTS]),) * 2)
        assert done.events[-1].attrs["refetched_chunks"] == 1


def test_an_object_replaced_during_the_fetch_is_never_mixed(fetchd: Fetchd, store: Store) -> None:
    facts = inspect(fetchd, store)
    store.fault = Instead(
        lambda r: r.name == WEIGHTS and r.first > 0, lambda r: r.sock.sendall(r.head(etag="e2") + r.body)
    )
    with fetchd.failing(ModelCorrupt, "changed"):
        fetchd.fetch(facts)


def test_a_shorter_object_than_promised_is_corruption(fetchd: Fetchd, store: Store) -> None:
    facts = inspect(fetchd, store)
    data = (store.root / "m" / WEIGHTS).read_bytes()
    (store.root / "m" / WEIGHTS).write_bytes(data[: len(data) // 2])
    with fetchd.failing(ModelCorrupt, "asked for"):
        fetchd.fetch(facts)


def test_a_server_without_ranges_is_named_as_the_problem(fetchd: Fetchd, store: Store) -> None:
    def begin(request: Request) -> None:
        request.first, request.last = 0, len(request.data) - 1
        request.sock.sendall(request.head("200 OK"))

    facts = inspect(fetchd, store)
    store.fault = Instead(every, begin)
    with fetchd.failing(ModelUnsupported, "does not serve ranges"):
        fetchd.fetch(facts)


def test_a_missing_model_is_not_found_and_a_forbidden_one_says_credentials(fetchd: Fetchd, store: Store) -> None:
    with fetchd.failing(ModelNotFound, "holds no model"):
        fetchd.client.inspect(f"{store.uri}/nowhere")
    facts = inspect(fetchd, store)
    store.fault = Instead(every, lambda r: r.refuse("403 Forbidden"))
    with fetchd.failing(ModelNotFound, "refuses access", hint="credentials"):
        fetchd.fetch(facts)


def test_what_an_unverified_model_was_at_its_first_fetch_it_must_be_at_the_second(fetchd: Fetchd, store: Store) -> None:
    (store.root / "m" / "thaw-index.json").unlink()
    facts = inspect(fetchd, store)
    assert not facts.verified
    fetchd.fetch(facts)
    fetchd.cancel()
    flip(store.root / "m" / WEIGHTS, -1)  # the etag stays the same, too
    with fetchd.failing(ModelCorrupt, "failed its checksum twice"):
        fetchd.fetch(facts)


def test_two_groups_that_want_the_same_bytes_share_one_fetch_and_one_may_leave(fetchd: Fetchd, store: Store) -> None:
    facts = inspect(fetchd, store)
    before = store.sent_bytes
    one, two = (fetchd.start(facts, group, pace_bytes_per_s=8_000_000) for group in ("one", "two"))
    assert one.segment_id == two.segment_id
    fetchd.cancel("one")
    assert fetchd.fetch(facts, "two").n_bytes == two.n_bytes
    assert store.sent_bytes - before == sum(facts.files.values())


def test_a_cancelled_fetch_stops_at_once_and_leaves_nothing(fetchd: Fetchd, store: Store) -> None:
    facts = inspect(fetchd, store)
    whole = fetchd.free_bytes()
    failures: list[PlatformError] = []
    with fetchd.reading(fetchd.start(facts, pace_bytes_per_s=100_000).segment_id) as reader:

        def wait_in_vain() -> None:
            try:
                reader.wait(reader.n_bytes, 60)
            except PlatformError as e:
                failures.append(e)

        waiting = threading.Thread(target=wait_in_vain)
        waiting.start()
        fetchd.cancel()
        waiting.join(30)  # the bytes would take minutes
        assert "cancelled" in str(failures[0])
    wait_until(lambda: fetchd.free_bytes() == whole)


def test_who_comes_after_a_cancel_fetches_anew_and_the_cancelled_one_asks_no_more(tmp_path: Path, store: Store) -> None:
    asked, again = threading.Event(), threading.Event()

    def silent(request: Request) -> bool:
        if request.name != WEIGHTS or request.first < CHUNK_BYTES:  # the silent connection has been kept alive before
            return False
        if asked.is_set():
            again.set()
        asked.set()
        return store.stopped.wait(30)

    with Fetchd(tmp_path, THAW_FETCHD_CONNECTIONS=1, THAW_FETCHD_READ_TIMEOUT_S=30) as fetchd:
        facts = inspect(fetchd, store)
        store.fault = silent
        one = fetchd.start(facts, "one")
        assert asked.wait(30)
        fetchd.cancel("one")
        wait_until(lambda: again.is_set() or any(e["event"] == "fetch_end" for e in fetchd.events))
        assert not again.is_set()
        store.fault = lambda request: False
        two = fetchd.start(facts, "two")
        assert two.segment_id != one.segment_id
        assert fetchd.wait("two").n_bytes == two.n_bytes


def test_a_store_is_asked_again_only_after_the_pause_that_it_asks_for() -> None:
    assert pause_s(1, Busy("busy", 7.0)) >= 7.0
    assert pause_s(1, StoreUnavailable("away")) < 1.0


@pytest.mark.parametrize("after", ["100000", "Fri, 31 Dec 2100 23:59:59 GMT"])
def test_a_store_that_wants_a_longer_pause_than_a_start_may_take_is_given_up(
    fetchd: Fetchd, store: Store, after: str
) -> None:
    facts = inspect(fetchd, store)
    head = f"HTTP/1.1 429 Too Many Requests\r\nRetry-After: {after}\r\nContent-Length: 0\r\n\r\n".encode()
    store.fault = Instead(every, lambda r: r.sock.sendall(head))
    with pytest.raises(StoreUnavailable) as told:
        fetchd.fetch(facts)
    assert fetchd.reason(told.value)["error"].endswith("the store answered 429 (gave up after 1 attempts)")

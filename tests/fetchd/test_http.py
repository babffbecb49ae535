"""A store that fails in every way in which stores fail, over real sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fetchd.backoff import pause_s
from fetchd.sources.base import Busy
from tests.fetchd.harness import Fetchd, Request, Store, file_bytes, wait_until, write_index, write_model
from thaw.errors import ModelCorrupt, ModelNotFound, ModelUnsupported, PlatformError, StoreUnavailable
from thaw.ids import GroupId, InstanceId
from thaw.model import CHUNK_BYTES, FileRange, ModelFacts

G = GroupId("g")
WEIGHTS = "model.safetensors"


@pytest.fixture
def fetchd(tmp_path: Path) -> Iterator[Fetchd]:
    with Fetchd(tmp_path, THAW_FETCHD_RETAIN="false") as running:
        yield running


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    model = write_model(tmp_path / "s" / "m", layer_bytes=8_000_000)
    write_index(model)
    with Store(tmp_path / "s") as running:
        yield running


def inspect(fetchd: Fetchd, store: Store) -> ModelFacts:
    return fetchd.client.inspect(f"{store.uri}/m")


def fetch(fetchd: Fetchd, facts: ModelFacts) -> dict[str, object]:
    fetchd.start(facts)
    return dict(fetchd.client.wait(G, 0, deadline_s=20).events[-1].attrs)


def test_a_model_arrives_over_http_on_few_connections_and_every_byte_once(fetchd: Fetchd, store: Store) -> None:
    facts = inspect(fetchd, store)
    store.requests.clear()
    started = fetchd.start(facts)
    descriptors, reader = fetchd.open(started.segment_id)
    reader.wait(reader.n_bytes, 30)
    for name in facts.files:
        assert file_bytes(reader, facts, name) == (store.root / "m" / name).read_bytes()
    chunks = [("GET", WEIGHTS, i * CHUNK_BYTES) for i in range(3)]
    assert sorted(store.requests) == [("GET", "config.json", 0), *chunks, ("GET", "tokenizer.json", 0)]
    done = fetchd.client.wait(G, 0, deadline_s=20)
    assert done.fetched_bytes == sum(facts.files.values())
    assert done.events[-1].attrs["source"] == "http"
    reader.close()
    descriptors.close()


def test_a_connection_cut_inside_a_chunk_resumes_from_the_byte_reached(fetchd: Fetchd, store: Store) -> None:
    facts = inspect(fetchd, store)
    cut: list[int] = []

    def fault(request: Request) -> bool:
        if request.name == WEIGHTS and request.method == "GET" and not cut:
            cut.append(request.first + 3_000_000)
            request.sock.sendall(request.head() + request.body[:3_000_000])
            return True
        return False

    store.fault = fault
    attrs = fetch(fetchd, facts)
    assert attrs["retries"] == 1
    assert attrs["fetched_bytes"] == sum(facts.files.values()), "bytes that had arrived were asked for again"
    assert ("GET", WEIGHTS, cut[0]) in store.requests


def test_a_store_that_answers_503_for_a_while_is_asked_again(fetchd: Fetchd, store: Store) -> None:
    facts = inspect(fetchd, store)
    busy: list[int] = []

    def fault(request: Request) -> bool:
        if request.name == WEIGHTS and len(busy) < 2:
            busy.append(request.first)
            request.sock.sendall(request.head("503 Slow Down", length=0))
            return True
        return False

    store.fault = fault
    assert fetch(fetchd, facts)["retries"] == 2


def test_a_store_that_stays_down_is_given_up_as_unavailable(tmp_path: Path, store: Store) -> None:
    with Fetchd(tmp_path, THAW_FETCHD_RETRIES=2) as fetchd:
        facts = inspect(fetchd, store)
        store.fault = lambda r: r.sock.sendall(r.head("500 Oh", length=0)) is None
        started = fetchd.start(facts)
        descriptors, reader = fetchd.open(started.segment_id)
        with pytest.raises(StoreUnavailable) as told:
            reader.wait(reader.n_bytes, 30)
        assert fetchd.reason(told.value)["error"].endswith("the store answered 500 (gave up after 2 attempts)")
        with pytest.raises(StoreUnavailable):
            fetchd.client.wait(G, 0, deadline_s=30)
        reader.close()
        descriptors.close()


def test_a_store_that_trickles_is_given_up_as_unavailable(tmp_path: Path, store: Store) -> None:
    """Each attempt gets a few bytes and breaks off.

    This does not count as progress, because fetchd would otherwise ask such a store for ever.
    """

    def fault(request: Request) -> bool:
        if request.name == WEIGHTS and request.method == "GET":
            request.sock.sendall(request.head() + request.body[:1000])
            return True
        return False

    with Fetchd(tmp_path, THAW_FETCHD_RETRIES=3) as fetchd:
        facts = inspect(fetchd, store)
        store.fault = fault
        with pytest.raises(StoreUnavailable) as told:
            fetch(fetchd, facts)
        assert "gave up after 3 attempts" in fetchd.reason(told.value)["error"]


def test_a_store_that_breaks_off_again_and_again_is_not_given_up_while_it_brings_enough(
    tmp_path: Path, store: Store
) -> None:
    def fault(request: Request) -> bool:
        if request.name == WEIGHTS and request.method == "GET" and len(request.body) > 2_000_000:
            request.sock.sendall(request.head() + request.body[:2_000_000])
            return True
        return False

    with Fetchd(tmp_path, THAW_FETCHD_RETRIES=2) as fetchd:
        facts = inspect(fetchd, store)
        store.fault = fault
        attrs = fetch(fetchd, facts)
        assert attrs["fetched_bytes"] == sum(facts.files.values())
        assert attrs["retries"] >= 6


def test_a_store_that_refuses_connections_is_unavailable(tmp_path: Path) -> None:
    with Fetchd(tmp_path, THAW_FETCHD_RETRIES=2) as fetchd:
        with pytest.raises(StoreUnavailable) as told:
            fetchd.client.inspect("http://127.0.0.1:1/m")
        assert "ConnectionRefused" in fetchd.reason(told.value)["error"]


def test_a_store_that_falls_silent_hits_the_read_deadline_and_is_asked_again(tmp_path: Path, store: Store) -> None:
    hung: list[int] = []

    def fault(request: Request) -> bool:
        if request.name == WEIGHTS and not hung:
            hung.append(1)
            request.sock.sendall(request.head() + request.body[:100])
            store.stopped.wait(60)
            return True
        return False

    with Fetchd(tmp_path, THAW_FETCHD_READ_TIMEOUT_S=2, THAW_FETCHD_CONNECTIONS=1) as fetchd:
        facts = inspect(fetchd, store)
        store.fault = fault
        began = time.monotonic()
        attrs = fetch(fetchd, facts)
        assert attrs["retries"] >= 1
        assert 2.0 <= time.monotonic() - began < 30, "the store ended it, not the deadline of two seconds"


def test_one_damaged_chunk_is_fetched_again_and_two_are_corruption(fetchd: Fetchd, store: Store) -> None:
    facts = inspect(fetchd, store)
    damaged: list[int] = []
    limit = 1

    def fault(request: Request) -> bool:
        if request.name == WEIGHTS and request.first == 0 and len(damaged) < limit:
            damaged.append(1)
            request.sock.sendall(request.head() + b"\xff" + request.body[1:])
            return True
        return False

    store.fault = fault
    attrs = fetch(fetchd, facts)
    assert attrs["refetched_chunks"] == 1
    limit = 3
    fetchd.client.cancel(G, 1)
    started = fetchd.start(facts)
    descriptors, reader = fetchd.open(started.segment_id)
    with pytest.raises(ModelCorrupt) as told:
        reader.wait(reader.n_bytes, 30)
    assert "chunk 0 failed its checksum twice" in fetchd.reason(told.value)["error"]
    assert reader.end <= reader.locate(WEIGHTS, 0)
    reader.close()
    descriptors.close()


def test_a_damaged_chunk_that_is_wanted_twice_is_fetched_again_although_the_other_reader_waits_for_it(
    tmp_path: Path,
) -> None:
    """Two readers share the only connection.  The one that has the turn waits for the chunk that the other one found
    damaged, and which is fetched again on another connection."""
    model = write_model(tmp_path / "m", layer_bytes=2_500_000)  # one chunk, of which the digest takes some time
    write_index(model)
    damaged: list[int] = []

    def fault(request: Request) -> bool:
        if request.name == WEIGHTS and request.method == "GET" and not damaged:
            damaged.append(request.first)
            request.sock.sendall(request.head() + b"\xff" + request.body[1:])
            return True
        return False

    with Store(tmp_path, fault) as store, Fetchd(tmp_path, THAW_FETCHD_CONNECTIONS=1) as fetchd:
        facts = fetchd.client.inspect(f"{store.uri}/m")
        n_bytes = facts.files[WEIGHTS]
        fetchd.start(facts, "twice", (FileRange(WEIGHTS, 0, n_bytes), FileRange(WEIGHTS, 0, n_bytes)))
        done = fetchd.client.wait(GroupId("twice"), 0, deadline_s=20)
        assert done.events[-1].attrs["refetched_chunks"] == 1


def test_an_object_replaced_during_the_fetch_is_never_mixed(fetchd: Fetchd, store: Store) -> None:
    facts = inspect(fetchd, store)

    def fault(request: Request) -> bool:
        if request.name == WEIGHTS and request.first > 0:
            request.sock.sendall(request.head(etag="e2") + request.body)
            return True
        return False

    store.fault = fault
    fetchd.start(facts)
    with pytest.raises(ModelCorrupt) as told:
        fetchd.client.wait(G, 0, deadline_s=30)
    assert "changed" in fetchd.reason(told.value)["error"]


def test_a_shorter_object_than_promised_is_corruption(fetchd: Fetchd, store: Store) -> None:
    facts = inspect(fetchd, store)
    data = (store.root / "m" / WEIGHTS).read_bytes()
    (store.root / "m" / WEIGHTS).write_bytes(data[: len(data) // 2])
    fetchd.start(facts)
    with pytest.raises(ModelCorrupt) as told:
        fetchd.client.wait(G, 0, deadline_s=30)
    assert "asked for" in fetchd.reason(told.value)["error"]


def test_a_server_without_ranges_is_named_as_the_problem(fetchd: Fetchd, store: Store) -> None:
    facts = inspect(fetchd, store)

    def fault(request: Request) -> bool:
        request.first, request.last = 0, len(request.data) - 1
        request.sock.sendall(request.head("200 OK"))
        return True

    store.fault = fault
    fetchd.start(facts)
    with pytest.raises(ModelUnsupported) as told:
        fetchd.client.wait(G, 0, deadline_s=30)
    assert "does not serve ranges" in fetchd.reason(told.value)["error"]


def test_a_missing_model_is_not_found_and_a_forbidden_one_says_credentials(fetchd: Fetchd, store: Store) -> None:
    with pytest.raises(ModelNotFound) as told:
        fetchd.client.inspect(f"{store.uri}/nowhere")
    assert "holds no model" in fetchd.reason(told.value)["error"]
    facts = inspect(fetchd, store)
    store.fault = lambda r: r.sock.sendall(r.head("403 Forbidden", length=0)) is None
    fetchd.start(facts)
    with pytest.raises(ModelNotFound) as told:
        fetchd.client.wait(G, 0, deadline_s=30)
    reason = fetchd.reason(told.value)
    assert "refuses access" in reason["error"]
    assert "credentials" in reason["hint"]


def test_what_an_unverified_model_was_at_its_first_fetch_it_must_be_at_the_second(fetchd: Fetchd, store: Store) -> None:
    (store.root / "m" / "thaw-index.json").unlink()
    facts = inspect(fetchd, store)
    assert not facts.verified
    fetch(fetchd, facts)
    fetchd.client.cancel(G, 1)
    data = bytearray((store.root / "m" / WEIGHTS).read_bytes())
    data[-1] ^= 1  # length and etag stay the same
    (store.root / "m" / WEIGHTS).write_bytes(data)
    fetchd.start(facts)
    with pytest.raises(ModelCorrupt) as told:
        fetchd.client.wait(G, 0, deadline_s=30)
    assert "failed its checksum twice" in fetchd.reason(told.value)["error"]


def test_two_groups_that_want_the_same_bytes_share_one_fetch_and_one_may_leave(fetchd: Fetchd, store: Store) -> None:
    facts = inspect(fetchd, store)
    before = store.sent_bytes
    one = fetchd.start(facts, "one", pace_bytes_per_s=8_000_000)
    two = fetchd.start(facts, "two", pace_bytes_per_s=8_000_000)
    assert one.segment_id == two.segment_id
    fetchd.client.cancel(GroupId("one"), 1)
    fetchd.start(facts, "two")
    assert fetchd.client.wait(GroupId("two"), 0, deadline_s=30).n_bytes == two.n_bytes
    assert store.sent_bytes - before == sum(facts.files.values())


def test_a_cancelled_fetch_stops_at_once_and_leaves_nothing(fetchd: Fetchd, store: Store) -> None:
    facts = inspect(fetchd, store)
    whole = fetchd.free_bytes()
    started = fetchd.start(facts, pace_bytes_per_s=100_000)
    descriptors, reader = fetchd.open(started.segment_id)
    failures: list[PlatformError] = []

    def wait_in_vain() -> None:
        try:
            reader.wait(reader.n_bytes, 60)
        except PlatformError as e:
            failures.append(e)

    waiting = threading.Thread(target=wait_in_vain)
    waiting.start()
    fetchd.client.cancel(G, 1)
    waiting.join(30)  # the bytes would take minutes
    assert "cancelled" in str(failures[0])
    reader.close()
    descriptors.close()
    fetchd.client.close_descriptor_socket(InstanceId("i1"))
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
        fetchd.client.cancel(GroupId("one"), 1)
        wait_until(lambda: again.is_set() or any(e["event"] == "fetch_end" for e in fetchd.events))
        assert not again.is_set()
        store.fault = lambda request: False
        two = fetchd.start(facts, "two")
        assert two.segment_id != one.segment_id
        assert fetchd.client.wait(GroupId("two"), 0, deadline_s=30).n_bytes == two.n_bytes


def test_a_pace_is_kept_and_a_new_pace_is_obeyed_while_it_runs(fetchd: Fetchd, store: Store) -> None:
    facts = inspect(fetchd, store)
    pace, n_bytes = 1_000_000, sum(facts.files.values())
    began = time.monotonic()
    fetchd.start(facts, pace_bytes_per_s=pace)

    def arrived() -> int:
        (fetch,) = (e for e in fetchd.client.status().fetches if e.group_id == G)
        return n_bytes - fetch.pending_bytes

    wait_until(lambda: arrived() >= pace // 2)
    assert arrived() <= pace * (time.monotonic() - began) + 3 * 256 * 1024
    fetchd.start(facts)
    fetchd.client.wait(G, 0, deadline_s=30)
    assert time.monotonic() - began < 0.6 * n_bytes / pace, "it went on at the old pace"


def test_the_link_rate_bounds_all_fetches_together(tmp_path: Path, store: Store) -> None:
    other = write_model(store.root / "o", layer_bytes=1_000_000, seed=5)
    write_index(other)
    rate = 8_000_000
    with Fetchd(tmp_path, THAW_FETCHD_LINK_BYTES_PER_S=rate) as fetchd:
        models = [inspect(fetchd, store), fetchd.client.inspect(f"{store.uri}/o")]
        began = time.monotonic()
        for i, facts in enumerate(models):
            fetchd.start(facts, f"g{i}")
        for i in range(2):
            fetchd.client.wait(GroupId(f"g{i}"), 0, deadline_s=20)
        seconds = time.monotonic() - began
        total = sum(sum(m.files.values()) for m in models)
        assert total <= rate * seconds + 3 * 256 * 1024
        assert total >= rate * seconds * 0.5, "pacing wastes the link"
        assert fetchd.client.status().link_bytes_per_s == rate


def test_a_store_is_asked_again_only_after_the_pause_that_it_asks_for() -> None:
    assert pause_s(1, Busy("busy", 7.0)) >= 7.0
    assert pause_s(1, StoreUnavailable("away")) < 1.0


@pytest.mark.parametrize("after", ["100000", "Fri, 31 Dec 2100 23:59:59 GMT"])
def test_a_store_that_wants_a_longer_pause_than_a_start_may_take_is_given_up(
    fetchd: Fetchd, store: Store, after: str
) -> None:
    facts = inspect(fetchd, store)
    head = f"HTTP/1.1 429 Too Many Requests\r\nRetry-After: {after}\r\nContent-Length: 0\r\n\r\n".encode()
    store.fault = lambda request: request.sock.sendall(head) is None
    with pytest.raises(StoreUnavailable) as told:
        fetch(fetchd, facts)
    assert fetchd.reason(told.value)["error"].endswith("the store answered 429 (gave up after 1 attempts)")

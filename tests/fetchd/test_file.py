"""Everything that a start needs from fetchd, with a directory: inspect, fetch, descriptors, reader, residency, room."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from relay.clients.fetch import DescriptorClient
from tests.fetchd.harness import WEIGHTS, Fetchd, file_bytes, wait_until, write_index, write_model
from thaw.errors import (
    BadRequest,
    MemoryTooSmall,
    ModelChanged,
    ModelCorrupt,
    ModelNotFound,
    ModelUnsupported,
    NotFound,
    PlatformError,
    PoolFull,
    ProtocolError,
    StaleEpoch,
    Unavailable,
)
from thaw.ids import GroupId, InstanceId
from thaw.model import FileRange, ModelFacts
from thaw.tracing.evidence import explain
from thaw.tracing.timeline import analyse
from thaw.tracing.trace import Phase


@pytest.fixture(scope="module")
def fetchd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fetchd]:
    with Fetchd(tmp_path_factory.mktemp("fetchd")) as running:
        yield running


def inspect(fetchd: Fetchd, directory: Path) -> ModelFacts:
    return fetchd.client.inspect(directory.as_uri())


def test_a_model_arrives_in_the_reader_byte_for_byte_with_its_tensors_in_load_order(
    fetchd: Fetchd, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "m", seed=10)
    facts = inspect(fetchd, model)
    started = fetchd.start(facts, "whole")
    assert not started.resident
    with fetchd.reading(started.segment_id, "whole") as reader:
        assert reader.wait(reader.n_bytes, 30) == reader.n_bytes
        for name in facts.files:
            assert file_bytes(reader, facts, name) == (model / name).read_bytes()
        assert [p.file for p in reader.offer.layout] == ["config.json", "tokenizer.json", WEIGHTS]
        layers = [f"model.layers.{i}.w" for i in range(3)]
        assert [t.name for t in reader.offer.tensors] == ["model.embed_tokens.weight", *layers]
        first = reader.offer.tensors[1]
        assert reader.view(reader.locate(first.file, first.offset), 3)[0] == 0


def test_a_model_without_an_index_is_unverified_and_described_by_its_structure(fetchd: Fetchd, tmp_path: Path) -> None:
    facts = inspect(fetchd, write_model(tmp_path / "m", n_layers=4, layer_bytes=1000))
    assert (facts.n_layers, facts.layer_bytes, facts.outer_bytes) == (4, (1000,) * 4, 1000)
    assert (facts.verified, facts.sha256, len(facts.etag)) == (False, "", 32)
    assert facts.architecture == "LlamaForCausalLM"


def test_a_model_with_an_index_is_verified_and_named_by_its_root_checksum(fetchd: Fetchd, tmp_path: Path) -> None:
    facts = inspect(fetchd, write_index(write_model(tmp_path / "m")))
    assert facts.verified
    assert len(facts.sha256) == 64
    started = fetchd.start(facts, "verified")
    assert fetchd.wait("verified").n_bytes == started.n_bytes


def test_a_fetch_reports_where_its_time_went(fetchd: Fetchd, tmp_path: Path) -> None:
    facts = inspect(fetchd, write_model(tmp_path / "m", seed=30))
    done = fetchd.fetch(facts, "report")
    begin, first, end = done.events
    assert [e.name for e in done.events] == [Phase.FETCH_BEGIN, Phase.FETCH_FIRST_BYTE, Phase.FETCH_END]
    assert begin.mono_ns <= first.mono_ns <= end.mono_ns
    assert {(e.group_id, e.stage, e.host) for e in done.events} == {("report", 0, "host-1")}
    assert end.n_bytes == facts.n_bytes
    assert done.fetched_bytes == sum(facts.files.values())
    assert end.attrs["source"] == "file"
    assert end.attrs["resident"] is False
    assert {"bytes_per_s", "cpu_s", "connections", "retries", "reader_cpu_s", "core_wait_s"} <= end.attrs.keys()
    assert ("waits_for" in end.attrs) == ("wait_s" in end.attrs)  # a disk that answers at once is not waited for
    assert end.attrs.get("waits_for", "the store") == "the store"


def test_a_fetch_says_when_and_for_how_long_its_process_was_stopped(tmp_path: Path) -> None:
    with Fetchd(tmp_path, THAW_FETCHD_LINK_BYTES_PER_S=2_000_000) as fetchd:
        facts = inspect(fetchd, write_model(tmp_path / "m", seed=31, n_layers=2))
        fetchd.start(facts, "held-up")
        wait_until(lambda: any(f.pending_bytes < f.n_bytes for f in fetchd.client.status().fetches))
        os.kill(fetchd.process.pid, signal.SIGSTOP)
        threading.Event().wait(3.0)  # fetchd stays stopped for this long
        os.kill(fetchd.process.pid, signal.SIGCONT)
        done = fetchd.wait("held-up")
    (stop,) = (e for e in done.events if e.name == Phase.STOPPED_BEGIN)
    (end,) = (e for e in done.events if e.name == Phase.STOPPED_END)
    # the missed heartbeat was due at most 0.2 s after the stop, and its threads may have waited for a core before and after
    assert (end.mono_ns - stop.mono_ns) / 1e9 >= 2.0
    assert (stop.group_id, stop.host, stop.attrs["process"]) == ("held-up", "host-1", "fetchd")
    timeline = analyse(done.events)
    assert timeline is not None
    explained = explain(timeline, lambda _: None)
    (fetch,) = explained.accounts
    shares = {s.what: s.seconds for s in fetch.shares}
    assert shares["stopped"] >= 2.0
    assert shares["waiting for its share of the link"] > 0
    assert sum(shares.values()) <= fetch.phase.seconds + 0.01  # the stop is not counted as waiting for the link too
    assert [s.during for s in explained.stops] == [("fetch",)]


def test_a_second_start_of_the_same_bytes_is_served_from_host_memory(fetchd: Fetchd, tmp_path: Path) -> None:
    facts = inspect(fetchd, write_model(tmp_path / "m", seed=40))
    first = fetchd.start(facts, "first")
    fetchd.wait("first")
    second = fetchd.start(facts, "second")
    assert (second.segment_id, second.resident) == (first.segment_id, True)
    done = fetchd.wait("second")
    assert done.fetched_bytes == 0
    assert [e.name for e in done.events] == [Phase.FETCH_BEGIN, Phase.FETCH_END]


def test_only_the_asked_ranges_are_fetched_and_only_their_tensors_offered(fetchd: Fetchd, tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", seed=60)
    facts = inspect(fetchd, model)
    data = (model / WEIGHTS).read_bytes()
    start = data.index(b"\x01" + data[len(data) - 3_000_000 :][:20])
    ranges = (FileRange("config.json", 0, facts.files["config.json"]), FileRange(WEIGHTS, start, 3_000_001))
    with fetchd.reading(fetchd.start(facts, "part", ranges).segment_id, "part") as reader:
        assert reader.wait(reader.n_bytes, 30) == reader.n_bytes
        assert bytes(reader.view(reader.locate(WEIGHTS, start), 3_000_001)) == data[start : start + 3_000_001]
        assert [t.name for t in reader.offer.tensors] == ["model.layers.1.w"]
        with pytest.raises(KeyError, match="does not hold byte 0"):
            reader.locate(WEIGHTS, 0)


def test_an_older_schedulers_commands_are_refused(tmp_path: Path) -> None:
    facts_dir = write_model(tmp_path / "m", layer_bytes=1000)
    with Fetchd(tmp_path) as fetchd:
        facts = inspect(fetchd, facts_dir)
        fetchd.start(facts, "new", epoch=7)
        with pytest.raises(StaleEpoch, match="epoch 6 is over; 7 has been seen"):
            fetchd.start(facts, "old", epoch=6)
        with pytest.raises(StaleEpoch):
            fetchd.client.cancel(GroupId("new"), 6)


def test_a_model_larger_than_the_pool_is_refused_with_both_numbers_before_a_byte_moves(tmp_path: Path) -> None:
    with Fetchd(tmp_path, THAW_FETCHD_POOL_MB=8) as fetchd:
        facts = inspect(fetchd, write_model(tmp_path / "m", layer_bytes=4_000_000))
        with pytest.raises(MemoryTooSmall, match=r"needs 12\d+ bytes .*8388608 of 8388608 bytes are not in use"):
            fetchd.start(facts)
        assert fetchd.free_bytes() == 8 * 2**20


def test_an_idle_model_makes_room_and_a_held_one_does_not(tmp_path: Path) -> None:
    one, two = write_model(tmp_path / "1", seed=1), write_model(tmp_path / "2", seed=2)
    with Fetchd(tmp_path, THAW_FETCHD_POOL_MB=16) as fetchd:
        first, second = inspect(fetchd, one), inspect(fetchd, two)
        with fetchd.reading(fetchd.start(first, "a").segment_id, "a") as reader:
            assert reader.wait(reader.n_bytes, 30) == reader.n_bytes
            with pytest.raises(PoolFull, match=r"needs 9\d+ bytes .* 4194304 of 16777216 bytes are not in use"):
                fetchd.start(second, "b")
        # the fetch ends a moment after its last byte was there to read
        wait_until(lambda: fetchd.client.status().segments[0].complete)
        assert fetchd.start(first, "a2").resident
        fetchd.cancel("a2")
        with fetchd.reading(fetchd.start(second, "b").segment_id, "b") as reader:
            assert reader.wait(reader.n_bytes, 30) == reader.n_bytes
            assert file_bytes(reader, second, WEIGHTS) == (two / WEIGHTS).read_bytes()
            assert not any(reader._region.view[reader.n_bytes :]), "the tail of a reused slab shows the model before it"
            assert [s.uri for s in fetchd.client.status().segments] == [two.as_uri()]


def test_without_retain_the_slabs_are_free_once_the_last_holder_goes(tmp_path: Path) -> None:
    with Fetchd(tmp_path, THAW_FETCHD_RETAIN="false") as fetchd:
        facts = inspect(fetchd, write_model(tmp_path / "m"))
        whole = fetchd.free_bytes()
        for _ in range(3):
            with fetchd.reading(fetchd.start(facts).segment_id):
                fetchd.wait()
                assert fetchd.free_bytes() < whole
            assert fetchd.free_bytes() == whole
            fetchd.cancel()


def test_a_prefetched_segment_nobody_took_is_let_go_after_its_time(tmp_path: Path) -> None:
    with Fetchd(tmp_path, THAW_FETCHD_RETAIN="false", THAW_FETCHD_HOLD_S="0.2") as fetchd:
        facts = inspect(fetchd, write_model(tmp_path / "m", layer_bytes=1000))
        whole = fetchd.free_bytes()
        fetchd.start(facts)
        wait_until(lambda: fetchd.free_bytes() == whole and not fetchd.client.status().segments)
        with pytest.raises(NotFound):
            fetchd.wait()


@pytest.mark.parametrize("is_noticed", [True, False], ids=["and was looked at again", "and fetchd knows the old one"])
def test_a_model_that_changed_since_it_was_planned_is_neither_mixed_with_the_old_one_nor_called_damaged(
    fetchd: Fetchd, tmp_path: Path, is_noticed: bool
) -> None:
    model = write_model(tmp_path / "m", seed=70)
    facts = inspect(fetchd, model)
    write_model(model, seed=71)
    assert not is_noticed or inspect(fetchd, model).etag != facts.etag
    with pytest.raises(ModelChanged, match="has changed: version .* was planned"):
        fetchd.fetch(facts, "stale")


@pytest.mark.parametrize("part", ["ranges", "later_ranges"])
def test_only_known_plain_names_are_fetched(fetchd: Fetchd, tmp_path: Path, part: str) -> None:
    facts = inspect(fetchd, write_model(tmp_path / "m", layer_bytes=10))
    with pytest.raises(BadRequest, match="cannot be fetched"):
        fetchd.start(facts, "names", **{part: (FileRange("../secret.safetensors", 0, 1),)})


@pytest.mark.parametrize("uri", ["file:///nowhere/at/all", "nonsense", "http://[bad", "s3://"])
def test_a_uri_that_leads_nowhere_is_a_model_not_found(fetchd: Fetchd, uri: str) -> None:
    with pytest.raises(ModelNotFound):
        fetchd.client.inspect(uri)


def test_a_scheme_that_no_source_has_is_answered_with_the_schemes_that_there_are(fetchd: Fetchd) -> None:
    with pytest.raises(ModelNotFound, match="no model store of this host serves 'ftp://x/y'") as caught:
        fetchd.client.inspect("ftp://x/y")
    assert caught.value.hint == "a uri begins with one of these schemes: file, hf, http, https, s3"


def test_pickled_weights_are_refused_with_the_way_out(fetchd: Fetchd, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelUnsupported, match="holds pytorch_model.bin and no safetensors") as caught:
        inspect(fetchd, tmp_path)
    assert "convert" in caught.value.hint


def test_a_descriptor_socket_of_nobody_and_a_segment_of_nobody_are_not_found(fetchd: Fetchd) -> None:
    with pytest.raises(NotFound, match="no descriptor socket of instance ghost"):
        fetchd.client.grant_segment(InstanceId("ghost"), "x", GroupId("g"), 0)
    fetchd.client.open_descriptor_socket(InstanceId("i9"))
    with pytest.raises(NotFound, match="no segment x"):
        fetchd.client.grant_segment(InstanceId("i9"), "x", GroupId("g"), 0)
    with pytest.raises(BadRequest):
        fetchd.client.open_descriptor_socket(InstanceId("../x"))
    fetchd.client.close_descriptor_socket(InstanceId("i9"))
    fetchd.client.close_descriptor_socket(InstanceId("i9"))


def test_a_descriptor_socket_waits_for_its_grant_and_ends_when_it_is_closed(fetchd: Fetchd) -> None:
    descriptors = DescriptorClient.connect(fetchd.client.open_descriptor_socket(InstanceId("stem")))
    with pytest.raises(PlatformError, match=r"no segment was granted within 0.1 s"):
        descriptors.segment(deadline_s=0.1)
    descriptors.close()
    descriptors = DescriptorClient.connect(fetchd.client.open_descriptor_socket(InstanceId("stem")))
    assert "stem" in fetchd.client.descriptor_sockets()
    fetchd.client.close_descriptor_socket(InstanceId("stem"))
    with pytest.raises((Unavailable, ProtocolError)):
        descriptors.segment(deadline_s=20)
    descriptors.close()
    assert "stem" not in fetchd.client.descriptor_sockets()


def test_a_second_fetchd_on_the_same_socket_refuses_to_start(fetchd: Fetchd, tmp_path: Path) -> None:
    with Fetchd(tmp_path, THAW_FETCHD_SOCKET=fetchd.socket) as second:
        assert second.events[-1]["event"] == "start_failed"
        assert "another process listens" in second.events[-1]["error"]
    assert fetchd.client.status().pool_bytes == 96 * 2**20


def test_a_broken_config_is_corrupt_and_a_missing_one_is_not_found(fetchd: Fetchd, tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", layer_bytes=10)
    for content in ("{", "[]", "[" * 100_000):
        (model / "config.json").write_text(content)
        with pytest.raises(ModelCorrupt, match=r"config.json is not"):
            inspect(fetchd, model)
    (model / "config.json").unlink()
    with pytest.raises(ModelNotFound, match=r"has no config.json"):
        inspect(fetchd, model)
    write_model(model, layer_bytes=10)
    assert inspect(fetchd, model).n_layers == 3

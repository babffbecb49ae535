"""Models on a hub: commits of a name, rights to read, redirects to signed URLs, and bytes held once."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fetchd.backoff import pause_s
from fetchd.catalog import Catalog
from fetchd.credentials import credentials_of
from fetchd.settings import FetchdSettings
from fetchd.sources.base import Busy
from fetchd.sources.hub import HubSource
from fetchd.sources.registry import open_source
from tests.fetchd.harness import WEIGHTS, Fetchd, wait_until, write_index, write_model
from tests.hub import Answering, LoopbackHub, files_in
from thaw.checkpoints.versions import POINTER_NAME
from thaw.errors import ModelCorrupt, ModelNotFound, PlatformError, StoreUnavailable, ThawError
from thaw.hub import models as words
from thaw.model import CHUNK_BYTES, INDEX_NAME, ModelFacts
from thaw.settings import SettingError

BASE = "hf://org/base"


def checkpoint(directory: Path, seed: int = 1, layer_bytes: int = 1_000_000) -> dict[str, bytes]:
    made = files_in(write_model(directory / f"m{seed}-{layer_bytes}", seed=seed, layer_bytes=layer_bytes))
    return {**made, "1_Pooling/config.json": b'{"pooling_mode": "cls"}'}  # the only file of a model in a folder


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    return checkpoint(tmp_path)


@pytest.fixture
def hub(files: dict[str, bytes]) -> Iterator[LoopbackHub]:
    with LoopbackHub(page_size=2) as running:
        running.add("org/base", {**files, "README.md": b"# one"})
        yield running


@contextmanager
def host(tmp_path: Path, hub: LoopbackHub, **more: object) -> Iterator[Fetchd]:
    with Fetchd(tmp_path, HF_ENDPOINT=hub.endpoint, **more) as running:
        yield running


@pytest.fixture
def fetchd(tmp_path: Path, hub: LoopbackHub) -> Iterator[Fetchd]:
    with host(tmp_path, hub) as running:
        yield running


_groups = itertools.count()


def fetched(fetchd: Fetchd, facts: ModelFacts) -> dict[str, bytes]:
    """The files that a start with these facts gets."""
    return fetchd.files(facts, f"g{next(_groups)}")


def credentials(tmp_path: Path, *entries: dict[str, object]) -> str:
    path = tmp_path / "credentials.json"
    path.write_text(json.dumps(entries))
    path.chmod(0o600)
    return str(path)


# what a name means ------------------------------------------------------------------------------------------------------


def test_a_model_on_a_hub_arrives_whole_through_signed_urls(
    fetchd: Fetchd, hub: LoopbackHub, files: dict[str, bytes]
) -> None:
    hub.weak = WEIGHTS
    facts = fetchd.client.inspect(BASE)
    commit = hub.repositories["org/base"].branches["main"]
    assert (facts.uri, facts.name) == (f"{BASE}@{commit}", BASE)
    assert facts.version.startswith(f"{commit}.")
    assert facts.n_layers == 3
    assert fetched(fetchd, facts) == files
    assert all(path.startswith("/blobs/") for path in hub.requests("store"))


def test_a_name_means_the_newest_commit_at_each_look_and_a_start_gets_the_commit_that_was_planned(
    fetchd: Fetchd, hub: LoopbackHub, files: dict[str, bytes], tmp_path: Path
) -> None:
    old = fetchd.client.inspect(BASE)
    other = checkpoint(tmp_path, seed=2)
    commit = hub.repositories["org/base"].commit(other)
    new = fetchd.client.inspect(BASE)
    assert new.uri == f"{BASE}@{commit}"
    assert new.version != old.version
    assert fetched(fetchd, new) == other
    assert fetched(fetchd, old) == files


def test_a_look_at_a_commit_that_is_known_is_one_request(fetchd: Fetchd, hub: LoopbackHub) -> None:
    first = fetchd.client.inspect(BASE)
    hub.asked.clear()
    assert fetchd.client.inspect(BASE) == first
    assert [(a.server, a.method, a.path) for a in hub.asked] == [
        ("hub", "HEAD", "/org/base/resolve/main/config.json"),
    ]


@pytest.mark.parametrize("revision", ["v1.0", "refs/pr/1", "0123456789abcdef"])
def test_tags_and_refs_are_revisions_too(fetchd: Fetchd, hub: LoopbackHub, tmp_path: Path, revision: str) -> None:
    other = checkpoint(tmp_path, seed=3)
    commit = hub.repositories["org/base"].commit(other, revision)
    facts = fetchd.client.inspect(f"{BASE}@{revision}")
    assert facts.uri == f"{BASE}@{commit}"
    assert fetched(fetchd, facts) == other


def test_a_file_that_is_not_the_one_that_the_commit_lists_is_corrupt(fetchd: Fetchd, hub: LoopbackHub) -> None:
    facts = fetchd.client.inspect(BASE)

    def another_commit(answering: Answering) -> None:
        answering.tell(302, Location=f"{hub.store}/blobs/x", X_Repo_Commit="f" * 40, X_Linked_Etag='"e"')

    hub.fault = lambda a: a.command == "GET" and "/resolve/" in a.path and another_commit(a) is None
    hub.expire()  # the URLs that the inspection has brought
    with pytest.raises(ModelCorrupt, match="the hub gives another file than it lists"):
        fetched(fetchd, facts)


@pytest.mark.parametrize("name", ["tokenizer.json", WEIGHTS])
def test_a_file_of_one_chunk_must_have_the_hash_that_the_hub_lists(
    fetchd: Fetchd, hub: LoopbackHub, files: dict[str, bytes], name: str
) -> None:
    facts = fetchd.client.inspect(BASE)
    wrong = files[name][:-1] + b"?"
    hub.fault = lambda a: a.span is not None and a.span[1] + 1 == len(wrong) and a.give(wrong) is None
    with pytest.raises(ModelCorrupt, match=f"{name} is not the file that the hub lists"):
        fetched(fetchd, facts)


def test_an_index_of_ours_in_a_repository_is_not_believed(fetchd: Fetchd, hub: LoopbackHub, tmp_path: Path) -> None:
    """The index could claim the checksums of another tenant's files, whose bytes this host may hold."""
    claims = write_index(write_model(tmp_path / "claims", layer_bytes=1000))
    (claims / POINTER_NAME).write_text("{")
    hub.add("org/claims", files_in(claims))
    facts = fetchd.client.inspect("hf://org/claims")
    assert not facts.verified
    assert INDEX_NAME not in facts.files


# who may read -----------------------------------------------------------------------------------------------------------


def test_each_refusal_is_one_sentence_and_the_next_step(
    hub: LoopbackHub, files: dict[str, bytes], tmp_path: Path
) -> None:
    hub.tokens = {"useless"}
    hub.add("org/gated", files, opens=frozenset({"t"}), is_gated=True)
    hub.add("shut/gated", files, opens=frozenset({"t"}), is_gated=True)
    hub.add("org/adapter", {"adapter_config.json": b"{}"})
    hub.add("org/gguf", {"config.json": b"{}", "weights.gguf": b"x"})
    hub.moved["org/was"] = "org/base"
    page = f"{hub.endpoint}/org/gated"
    token_file = tmp_path / "token"
    token_file.write_text("useless\n")
    of_file = {"prefix": "hf://shut", "token_file": str(token_file)}
    table = credentials(tmp_path, of_file, {"prefix": "hf://bad", "token": "old"})
    gated = "hf://org/gated is gated, and its authors want to see a token"
    told = {
        "hf://org/gated": (gated, f"request access at {page}, then"),
        "hf://shut/gated": ("gave no access to the owner of the token", '"prefix": "hf://shut/gated"'),
        "hf://org/none": ("the hub has no such model, or it is private", "check the name"),
        "hf://org/gguf": ("holds no weights in safetensors", "name a repository with model.safetensors"),
        f"{BASE}@v9": (f"{BASE} has no revision v9", "/org/base/tree/main lists"),
        "hf://org/adapter": ("holds no config.json", "config.json, a tokenizer and safetensors"),
        "hf://bad/x": ("the hub does not accept the token", "THAW_FETCHD_CREDENTIALS"),
        "hf://org/was": ("has moved to hf://org/base", "use that URI"),
    }
    with host(tmp_path, hub, THAW_FETCHD_CREDENTIALS=table) as fetchd:
        for uri, (sentence, hint) in told.items():
            with pytest.raises(ModelNotFound) as found:
                fetchd.client.inspect(uri)
            assert sentence in found.value.message
            assert hint in found.value.hint
            assert "\n" not in found.value.message
            assert "useless" not in found.value.message + found.value.hint


def test_a_token_goes_to_the_hub_and_to_no_store(hub: LoopbackHub, files: dict[str, bytes], tmp_path: Path) -> None:
    hub.tokens = {"secret-token"}
    hub.add("team/x", files, opens=frozenset({"secret-token"}))
    token_file = tmp_path / "token"
    token_file.write_text("secret-token\n")
    table = credentials(tmp_path, {"prefix": "hf://team", "token_file": str(token_file)})
    with host(tmp_path, hub, THAW_FETCHD_CREDENTIALS=table) as fetchd:
        assert fetched(fetchd, fetchd.client.inspect("hf://team/x")) == files
        assert {a.token for a in hub.asked if a.server == "hub"} == {"secret-token"}
        assert {a.token for a in hub.asked if a.server == "store"} == {""}
        hub.asked.clear()
        fetchd.client.inspect(BASE)
        assert {a.token for a in hub.asked} == {""}, "a model of another prefix is asked for without it"
        token_file.write_text("no token\r\nX: y")
        with pytest.raises(PlatformError, match="is no token of a hub"):
            fetchd.client.inspect("hf://team/x")
        token_file.unlink()
        with pytest.raises(PlatformError, match="the hub's token cannot be read"):
            fetchd.client.inspect("hf://team/x")
        assert "secret-token" not in str(fetchd.events)


@pytest.mark.parametrize(
    "entry",
    [
        {"prefix": "hf://team"},
        {"prefix": "hf://team", "token": "a", "token_file": "b"},
        {"prefix": "hf://team", "token": "a", "key_id": "b"},
        {"prefix": "hf://team/x@main", "token": "a"},
        {"prefix": "s3://team", "token_file": "a", "anonymous": True},
        {"prefix": "https://team", "token": "a"},
    ],
)
def test_a_table_of_tokens_that_is_wrong_is_refused(tmp_path: Path, entry: dict[str, object]) -> None:
    with pytest.raises(SettingError, match="THAW_FETCHD_CREDENTIALS"):
        credentials_of(FetchdSettings("s", "d", credentials=credentials(tmp_path, entry)))


def test_a_hub_that_is_no_url_stops_the_start(tmp_path: Path) -> None:
    with Fetchd(tmp_path, HF_ENDPOINT="huggingface.co") as fetchd:
        assert fetchd.events[-1]["event"] == "start_failed"
        assert "HF_ENDPOINT" in str(fetchd.events)


@pytest.mark.parametrize(
    ("sentence", "answer"),
    [
        ("the hub has no such model, or it is private", lambda a: a.tell(404, X_Error_Code="RepoNotFound")),
        ("goes on at http://other.example", lambda a: a.tell(200, b"[]", Link='<//other.example/x>; rel="next"')),
        ("has more than 32 pages", lambda a: a.tell(200, b"[]", Link=f'<{a.path}>; rel="next"')),
    ],
)
def test_a_list_of_files_that_cannot_be_read_to_its_end_is_no_repository_without_a_model(
    fetchd: Fetchd, hub: LoopbackHub, sentence: str, answer: Callable[[Answering], None]
) -> None:
    hub.fault = lambda a: "/tree/" in a.path and answer(a) is None
    with pytest.raises(ModelNotFound, match=sentence):
        fetchd.client.inspect(BASE)
    assert len(hub.requests("hub", "GET")) <= 32


def test_the_hubs_word_leads_to_no_address_that_is_not_public(hub: LoopbackHub, tmp_path: Path) -> None:
    with host(tmp_path, hub, THAW_FETCHD_ALLOW="", THAW_FETCHD_RETRIES=1) as fetchd:
        with pytest.raises(StoreUnavailable, match="leads to an address that this host does not connect to"):
            fetchd.client.inspect(BASE)
        assert hub.requests("store") == []


# the bytes --------------------------------------------------------------------------------------------------------------


def test_a_signed_url_that_expires_is_made_anew_and_the_fetch_goes_on_where_it_stopped(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    large = checkpoint(tmp_path, layer_bytes=7_000_000)
    hub.add("org/large", large)
    cut: list[int] = []

    def cut_and_expire(answering: Answering) -> bool:
        first, last = answering.span or (0, 0)
        if answering.name != "store" or last - first <= 1_000_000 or cut:
            return False
        cut.append(first + 500_000)
        data = hub.blob(answering.path.split("?")[0].rpartition("/")[2])
        assert data is not None
        hub.expire()
        answering.give(data, cut=500_000)
        return True

    with host(tmp_path, hub, THAW_FETCHD_CONNECTIONS=1) as fetchd:
        facts = fetchd.client.inspect("hf://org/large")
        hub.fault = cut_and_expire
        hub.asked.clear()
        hub.sent_bytes = 0
        assert fetched(fetchd, facts) == large
    asked = [(a.server, a.first) for a in hub.asked if "config" not in a.path and "tokenizer" not in a.path]
    assert asked[:3] == [("store", 0), ("hub", cut[0]), ("store", cut[0])]
    assert len([server for server, _ in asked if server == "hub"]) == 1, "the new URL serves the other chunks, too"
    assert asked[3:] == [("store", i * CHUNK_BYTES) for i in (1, 2)]


@pytest.mark.parametrize("status", [403, 500])
def test_a_signed_url_that_served_and_now_fails_is_made_anew(
    fetchd: Fetchd, hub: LoopbackHub, files: dict[str, bytes], status: int
) -> None:
    facts = fetchd.client.inspect(BASE)
    hub.expire()
    hub.fault = lambda a: a.name == "store" and "signature=0" in a.path and a.tell(status) is None
    hub.asked.clear()
    assert fetched(fetchd, facts) == files
    asked = [a.server for a in hub.asked if a.first == 0 and "config" not in a.path and "tokenizer" not in a.path]
    assert asked == ["store", "hub", "store"]


@pytest.mark.parametrize("way", ["500", "416", "range", "gone", "port", "space", "private"])
def test_a_signed_url_that_fails_is_forgotten_and_no_error_tells_it(
    hub: LoopbackHub, files: dict[str, bytes], tmp_path: Path, way: str
) -> None:
    store, allowed = hub.store, hub.endpoint.partition("//")[2] + "," + hub.store.partition("//")[2]

    def fails(answering: Answering) -> bool:
        if answering.name != "store" or "signature=0" not in answering.path:
            return False
        if way == "range":
            answering.tell(206, b"x", Content_Range="bytes 0-0/1")
        else:
            answering.tell(int(way))
        return True

    if way in ("500", "416", "range"):
        hub.fault = fails
    else:
        with socket.create_server(("127.0.0.1", 0)) as gone:
            port = gone.getsockname()[1]
        at = {"gone": f"127.0.0.1:{port}", "port": "127.0.0.1:99999", "space": "127.0.0.1/a b", "private": "[::1]:9"}
        hub.store = f"http://{at[way]}"
        allowed += f",127.0.0.1:{port}"
    with host(tmp_path, hub, THAW_FETCHD_RETRIES=1, THAW_FETCHD_ALLOW=allowed) as fetchd:
        with pytest.raises(ThawError) as found:
            fetchd.client.inspect(BASE)
        told = found.value.message + found.value.hint
        assert not [word for word in ("signature", "blobs", "127.0", "::1", "99999", "a b") if word in told], told
        if way in ("gone", "private"):
            wait_until(lambda: any(e["event"] == "hub_failed" and e["cause"] for e in fetchd.events))
        hub.store = store
        hub.expire()
        assert fetched(fetchd, fetchd.client.inspect(BASE)) == files


def test_a_store_of_the_hub_may_lead_to_another_one(fetchd: Fetchd, hub: LoopbackHub, files: dict[str, bytes]) -> None:
    hub.fault = lambda a: a.name == "store" and "hop" not in a.path and a.tell(302, Location=f"{a.path}&hop=1") is None
    assert fetched(fetchd, fetchd.client.inspect(BASE)) == files
    hub.fault = lambda a: a.name == "store" and a.tell(302, Location=a.path) is None
    hub.add("org/other", {**files, "tokenizer.json": b"{}"})
    with pytest.raises(StoreUnavailable, match="leads from one place to the next"):
        fetchd.client.inspect("hf://org/other")


def test_a_store_that_refuses_even_a_new_url_is_unavailable(hub: LoopbackHub, tmp_path: Path) -> None:
    with host(tmp_path, hub, THAW_FETCHD_RETRIES=2) as fetchd:
        facts = fetchd.client.inspect(BASE)
        hub.fault = lambda a: a.name == "store" and a.tell(403) is None
        with pytest.raises(StoreUnavailable, match=r"refuses the URL .* just signed \(gave up after 2 attempts\)"):
            fetched(fetchd, facts)


def test_a_hub_that_is_busy_is_asked_again_after_its_pause_and_by_nobody_before(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    with host(tmp_path, hub) as fetchd:
        hub.fault = lambda a: len(hub.asked) == 1 and a.tell(429, Retry_After="1") is None
        facts = fetchd.client.inspect(BASE)
        hub.fault = lambda a: a.name == "hub" and a.tell(429, RateLimit='"resolvers";r=0;t=100') is None
        n_before = len(hub.asked)
        for _ in range(3):
            with pytest.raises(StoreUnavailable):
                fetchd.client.inspect(BASE)
        assert len(hub.asked) == n_before + 1
        assert facts.n_layers == 3
    assert 3.0 < pause_s(1, Busy("x", 3.0)) <= 3.1, "and not by all hosts at once"


def test_a_pause_that_a_hub_wants_for_one_model_is_no_other_ones_and_none_is_endless(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    hub.fault = lambda a: "/org/slow/" in a.path and a.tell(503, Retry_After="999999999") is None
    with host(tmp_path, hub) as fetchd:
        with pytest.raises(StoreUnavailable, match="503"):
            fetchd.client.inspect("hf://org/slow")
        assert fetchd.client.inspect(BASE).n_layers == 3
    hub.fault = lambda a: a.tell(429, Retry_After="999999999") is None
    source = open_source(BASE, FetchdSettings("s", "d", hub_endpoint=hub.endpoint))
    assert isinstance(source, HubSource)
    for _ in range(2):
        with pytest.raises(Busy) as found:
            source.newest(source.connect())
        assert 50 < found.value.after_s <= 60


def test_the_pauses_of_one_inspection_have_a_limit_together(hub: LoopbackHub) -> None:
    class Clock(threading.Event):
        waited = 0.0

        def wait(self, timeout: float | None = None) -> bool:
            self.waited += timeout or 0.0
            return False

    clock, n_asked = Clock(), itertools.count(1)
    settings = FetchdSettings("s", "d", hub_endpoint=hub.endpoint, allow="127.0.0.1")
    catalog = Catalog(lambda uri: open_source(uri, settings), 100, clock)
    hub.fault = lambda a: next(n_asked) % 2 == 1 and a.tell(503, Retry_After="6") is None
    with pytest.raises(StoreUnavailable, match="503"):
        catalog.inspect(BASE)
    assert 18 <= clock.waited <= 20


# held once --------------------------------------------------------------------------------------------------------------


def test_repositories_and_commits_with_the_same_files_are_held_once(
    fetchd: Fetchd, hub: LoopbackHub, files: dict[str, bytes]
) -> None:
    one = fetchd.client.inspect(BASE)
    assert fetched(fetchd, one) == files
    sent = hub.sent_bytes
    hub.add("other/copy", {**files, "README.md": b"# a copy"})
    hub.repositories["org/base"].commit({**files, "README.md": b"# one, better told"})
    for uri in (BASE, "hf://other/copy"):
        facts = fetchd.client.inspect(uri)
        assert facts.version != one.version
        header = hub.sent_bytes - sent
        assert fetched(fetchd, facts) == files
        assert hub.sent_bytes - sent == header
    assert len(fetchd.client.status().segments) == 1


def test_who_may_not_read_a_model_gets_none_of_its_bytes_although_the_host_holds_them(
    fetchd: Fetchd, hub: LoopbackHub, files: dict[str, bytes]
) -> None:
    fetched(fetchd, fetchd.client.inspect(BASE))
    hub.add("other/gated", files, opens=frozenset({"t"}), is_gated=True)
    with pytest.raises(ModelNotFound, match="is gated"):
        fetchd.client.inspect("hf://other/gated")
    repository = hub.repositories["org/base"]
    repository.opens, repository.is_gated = frozenset({"t"}), True
    for uri in (BASE, f"{BASE}@{repository.branches['main']}"):
        with pytest.raises(ModelNotFound, match="is gated"):
            fetchd.client.inspect(uri)


def test_the_same_checksums_from_a_web_server_share_nothing_with_a_hub() -> None:
    version = words.version("a" * 40, "c0ffee")
    assert words.content_of(BASE, version) == words.content_of("hf://other/x", words.version("b" * 40, "c0ffee"))
    for uri in ("https://evil.example/x", "s3://evil/x", "hf-x://org/base"):
        assert words.content_of(uri, version) == (uri, version)


def test_a_model_neither_joins_the_fetch_of_another_nor_waits_for_its_pauses(
    hub: LoopbackHub, files: dict[str, bytes], tmp_path: Path
) -> None:
    hub.add("other/copy", files)
    with host(tmp_path, hub, THAW_FETCHD_RETRIES=3) as fetchd:
        one, two = fetchd.client.inspect(BASE), fetchd.client.inspect("hf://other/copy")
        hub.fault = lambda a: "/org/base/" in a.path and a.tell(503, Retry_After="40") is None
        hub.expire()
        first = fetchd.start(one, "one")
        wait_until(lambda: any("/org/base/" in path for path in hub.requests("hub", "GET")[-4:]))
        assert fetchd.start(two, "two").segment_id != first.segment_id
        fetchd.wait("two")
        assert fetched(fetchd, two) == files


def test_a_reader_that_the_store_sends_away_leaves_its_connection_to_the_other(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    large = checkpoint(tmp_path, layer_bytes=5_000_000)
    hub.add("org/large", large)
    with host(tmp_path, hub, THAW_FETCHD_CONNECTIONS=1, THAW_FETCHD_RETRIES=2) as fetchd:
        facts = fetchd.client.inspect("hf://org/large")
        n_before = len(hub.asked)

        def second_was_asked_for() -> bool:
            return any(a.first == CHUNK_BYTES for a in hub.asked[n_before:] if a.server == "store")

        def busy(answering: Answering) -> bool:
            is_first = answering.name == "store" and answering.span is not None and answering.span[0] == 0
            return is_first and not second_was_asked_for() and answering.tell(503, Retry_After="2") is None

        hub.fault = busy
        assert fetched(fetchd, facts) == large


def test_a_model_that_is_withdrawn_fails_no_start_of_another_with_the_same_files(
    hub: LoopbackHub, files: dict[str, bytes], tmp_path: Path
) -> None:
    hub.add("other/copy", files)
    both, opened = threading.Event(), []
    with host(tmp_path, hub, THAW_FETCHD_READ_TIMEOUT_S=30) as fetchd:
        one, two = fetchd.client.inspect(BASE), fetchd.client.inspect("hf://other/copy")
        hub.expire()

        def withdrawn(answering: Answering) -> bool:
            if "/org/base/" in answering.path and not opened:
                both.wait(20)
                return answering.tell(401, X_Error_Code="RepoNotFound") is None
            return False

        hub.fault = withdrawn
        fetchd.start(one, "one")
        fetchd.start(two, "two")
        both.set()
        with contextlib.suppress(ModelNotFound):  # the other fetch may have brought all of its bytes before
            fetchd.wait("one")
        fetchd.wait("two")
        sent = hub.sent_bytes
        hub.fault = lambda a: False
        assert fetched(fetchd, one) == files
        assert hub.sent_bytes == sent, "bytes that are here serve every model that has them"

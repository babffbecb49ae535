"""The versions of a model: plain names, pins, pointers, and directories that are written in place."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fetchd.harness import WEIGHTS, Fetchd, Instead, Request, Store, flip, wait_until, write_index, write_model
from thaw.checkpoints import versions
from thaw.cli.model_stores import checkpoints
from thaw.cli.model_stores.stores import open_store
from thaw.errors import ModelCorrupt, ModelNotFound, ModelUnsupported
from thaw.model import INDEX_NAME

OTHER = "0123456789abcdef"


@pytest.fixture(scope="module")
def fetchd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fetchd]:
    with Fetchd(tmp_path_factory.mktemp("fetchd")) as running:
        yield running


def push(tmp_path: Path, seed: int, **shape: int) -> tuple[str, bytes]:
    """Push a model to the name ``x``; return its version and its weights."""
    model = write_model(tmp_path / f"model{seed}", seed=seed, **shape)
    index = checkpoints.push(model, open_store((tmp_path / "x").as_uri()), lambda _: None)
    return index.sha256, (model / WEIGHTS).read_bytes()


def serve(tmp_path: Path, version: str) -> None:
    """Let the store serve this version of ``x``.  It does not unquote names."""
    place = f"x@{versions.short(version)}"
    (tmp_path / place.replace("@", "%40")).symlink_to(tmp_path / place)


def test_a_plain_name_means_the_newest_version_and_a_pin_always_the_same(fetchd: Fetchd, tmp_path: Path) -> None:
    uri = (tmp_path / "x").as_uri()
    found = []
    for seed in (1, 2):
        version, weights = push(tmp_path, seed, layer_bytes=seed * 1000)
        facts = fetchd.client.inspect(uri)
        assert (facts.uri, facts.name, facts.version) == (versions.pin(uri, version), uri, version)
        found.append((facts, weights))
    (old, old_weights), (new, new_weights) = found
    assert new.n_bytes > old.n_bytes
    assert fetchd.files(new, "new")[WEIGHTS] == new_weights
    assert fetchd.files(old, "old")[WEIGHTS] == old_weights, (
        "a start that was planned before the push gets what was planned"
    )
    pinned = fetchd.client.inspect(old.uri)
    assert (pinned.uri, pinned.name, pinned.version) == (old.uri, "", old.version)


def test_a_version_is_a_plain_checkpoint_that_other_programs_can_load(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", layer_bytes=100)
    (model / WEIGHTS).rename(model / "model-1.safetensors")
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"w": "model-1.safetensors"}}')
    index = checkpoints.push(model, open_store((tmp_path / "x").as_uri()), lambda _: None)
    place = Path(str(tmp_path / "x") + "@" + versions.short(index.sha256))
    assert {p.name for p in place.iterdir()} - {INDEX_NAME} == {p.name for p in model.iterdir()}
    assert all((place / p.name).read_bytes() == p.read_bytes() for p in model.iterdir())
    assert {p.name for p in (tmp_path / "x").iterdir()} == {versions.POINTER_NAME}


def test_a_look_at_a_known_model_is_one_request_and_at_a_pin_none(tmp_path: Path) -> None:
    version, _ = push(tmp_path, 1, layer_bytes=1000)
    serve(tmp_path, version)
    with Store(tmp_path) as store, Fetchd(tmp_path) as fetchd:
        first = fetchd.client.inspect(f"{store.uri}/x")
        store.requests.clear()
        assert fetchd.client.inspect(f"{store.uri}/x") == first
        assert [name for _, name, _ in store.requests] == [versions.POINTER_NAME]
        fetchd.client.inspect(first.uri)
        assert len(store.requests) == 1


def test_a_directory_that_gets_a_pointer_is_read_through_it_from_then_on(fetchd: Fetchd, tmp_path: Path) -> None:
    plain = write_model(tmp_path / "x", seed=5, layer_bytes=1000)
    before = fetchd.client.inspect(plain.as_uri())
    assert (before.uri, before.name) == (plain.as_uri(), "")
    version, weights = push(tmp_path, 6, layer_bytes=1000)
    after = fetchd.client.inspect(plain.as_uri())
    assert after.version == version
    assert fetchd.files(after, "after")[WEIGHTS] == weights


@pytest.mark.parametrize(
    ("pointer", "error"),
    [
        (b"", ModelCorrupt),
        (b"{", ModelCorrupt),
        (b" " * versions.POINTER_BYTES, ModelCorrupt),
        (versions.write_pointer("../" + "0" * 61), ModelCorrupt),
        (versions.write_pointer("A" * 64), ModelCorrupt),
        (versions.write_pointer("0" * 64)[:-10], ModelCorrupt),
        (versions.write_pointer("0" * 64).replace(b"1", b"2"), ModelUnsupported),
    ],
)
def test_a_pointer_that_cannot_be_read_is_told_and_not_passed_over(
    fetchd: Fetchd, tmp_path: Path, pointer: bytes, error: type[Exception]
) -> None:
    directory = write_model(tmp_path / "x", layer_bytes=100)
    (directory / versions.POINTER_NAME).write_bytes(pointer)
    with pytest.raises(error, match=versions.POINTER_NAME):
        fetchd.client.inspect(directory.as_uri())


def test_a_pin_of_a_version_that_is_not_there_or_not_whole_is_not_found(fetchd: Fetchd, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        fetchd.client.inspect(f"{(tmp_path / 'x').as_uri()}@{OTHER}")
    half = write_model(tmp_path / f"x@{OTHER}", layer_bytes=100)  # a push writes the index last
    with pytest.raises(ModelNotFound, match="there is no such version"):
        fetchd.client.inspect(f"{(tmp_path / 'x').as_uri()}@{OTHER}")
    write_index(half)
    with pytest.raises(ModelCorrupt, match="the place holds another version"):
        fetchd.client.inspect(f"{(tmp_path / 'x').as_uri()}@{OTHER}")


def _touch(path: Path) -> None:
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))


def _damage(path: Path) -> None:
    flip(path, -1)


def _replace(path: Path) -> None:
    beside = path.with_name("beside")
    beside.write_bytes(path.read_bytes())
    os.utime(beside, ns=(1, path.stat().st_mtime_ns))
    beside.rename(path)


@pytest.mark.parametrize(("change", "is_whole"), [(_touch, True), (_replace, True), (_damage, False)])
def test_files_that_are_written_after_their_index_are_read_and_checked_anew(
    fetchd: Fetchd, tmp_path: Path, change: Callable[[Path], None], is_whole: bool
) -> None:
    directory = write_index(write_model(tmp_path / "m", layer_bytes=10_000))
    facts = fetchd.client.inspect(directory.as_uri())
    first = f"{change.__name__}-1"
    fetchd.files(facts, first)
    assert fetchd.start(facts, f"{first}-again").resident
    change(directory / WEIGHTS)
    facts, second = fetchd.client.inspect(directory.as_uri()), f"{change.__name__}-2"
    if is_whole:
        assert fetchd.files(facts, second)[WEIGHTS] == (directory / WEIGHTS).read_bytes()
        assert fetchd.wait(second).fetched_bytes > 0
    else:
        with pytest.raises(ModelCorrupt, match="chunk 0"):
            fetchd.fetch(facts, second)


@pytest.mark.parametrize("status", ["401 Unauthorized", "403 Forbidden", "301 Moved", "400 Bad Request"])
def test_a_pointer_that_is_refused_leads_to_no_older_weights_beside_it(tmp_path: Path, status: str) -> None:
    write_model(tmp_path / "x", seed=1, layer_bytes=1000)
    push(tmp_path, 2, layer_bytes=1000)
    answer = f"HTTP/1.1 {status}\r\nLocation: /y\r\nContent-Length: 0\r\n\r\n".encode()
    refuse = Instead(lambda r: r.name == versions.POINTER_NAME, lambda r: r.sock.sendall(answer))
    with (
        Store(tmp_path, refuse) as store,
        Fetchd(tmp_path) as fetchd,
        pytest.raises(ModelNotFound, match="no model could be read there"),
    ):
        fetchd.client.inspect(f"{store.uri}/x")


def test_a_store_that_hides_what_is_missing_still_serves_a_directory_without_versions(tmp_path: Path) -> None:
    write_model(tmp_path / "x", layer_bytes=1000)
    with Store(tmp_path, missing="403 Forbidden") as store, Fetchd(tmp_path) as fetchd:
        facts = fetchd.client.inspect(f"{store.uri}/x")
        assert facts.uri == f"{store.uri}/x"
        version, _ = push(tmp_path, 2, layer_bytes=1000)
        serve(tmp_path, version)
        assert fetchd.client.inspect(f"{store.uri}/x").version == version
        (tmp_path / "x" / versions.POINTER_NAME).unlink()
        with pytest.raises(ModelNotFound, match="no model could be read there"):
            fetchd.client.inspect(f"{store.uri}/x")


def test_the_objects_of_a_directory_are_compared_side_by_side(tmp_path: Path) -> None:
    shards = [f"model-{i}.safetensors" for i in range(6)]
    directory = write_model(tmp_path / "x", layer_bytes=100)
    for name in shards:
        (directory / name).write_bytes((directory / WEIGHTS).read_bytes())
    (directory / WEIGHTS).unlink()
    weights = {f"w{i}": name for i, name in enumerate(shards)}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    together, is_second = threading.Barrier(len(shards)), threading.Event()

    def all_at_once(request: Request) -> bool:
        if is_second.is_set() and request.method == "HEAD" and request.name in shards:
            together.wait(30)
        return False

    with Store(tmp_path, all_at_once) as store, Fetchd(tmp_path, THAW_FETCHD_READ_TIMEOUT_S=20) as fetchd:
        first = fetchd.client.inspect(f"{store.uri}/x")
        is_second.set()
        assert fetchd.client.inspect(f"{store.uri}/x") == first
        assert not together.broken


def test_resident_bytes_are_had_while_the_store_does_not_answer_for_the_pointer(tmp_path: Path) -> None:
    asked, answers = threading.Event(), threading.Event()

    def silent(request: Request) -> bool:
        if asked.is_set():
            answers.wait(20)
        return False

    write_model(tmp_path / "x", layer_bytes=1000)
    with Store(tmp_path, silent) as store, Fetchd(tmp_path, THAW_FETCHD_READ_TIMEOUT_S=30) as fetchd:
        facts = fetchd.client.inspect(f"{store.uri}/x")
        fetchd.files(facts, "first")
        n_asked = len(store.requests)
        asked.set()
        look = threading.Thread(target=lambda: fetchd.client.inspect(f"{store.uri}/x"))
        look.start()
        wait_until(lambda: len(store.requests) > n_asked)
        assert fetchd.start(facts, "second").resident
        assert look.is_alive()
        answers.set()
        look.join(20)

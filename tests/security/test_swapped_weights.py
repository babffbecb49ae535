"""Somebody who may write to a model's store puts other weights, or another index, under a version that is pinned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import forked
from tests.fetchd.harness import Fetchd, Store, digest, file_bytes, write_index, write_model
from thaw.checkpoints import checkpoint, versions
from thaw.cli.model_stores import checkpoints
from thaw.cli.model_stores.stores import open_store
from thaw.errors import ModelCorrupt
from thaw.ids import GroupId
from thaw.model import CHUNK_BYTES, INDEX_NAME, FileRange

WEIGHTS = "model.safetensors"
OTHER_VERSION, OTHER_ROOT = "the place holds another version", "its root is not that of its hash tree"


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Fetchd, Fetchd]]:
    """Two hosts."""
    for name in "ab":
        (tmp_path / name).mkdir()
    with Fetchd(tmp_path / "a") as first, Fetchd(tmp_path / "b") as second:
        yield first, second


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The place of the version of a model of two chunks that was pushed."""
    source = write_model(tmp_path / "source", layer_bytes=4_000_000)
    index = checkpoints.push(source, open_store((tmp_path / "x").as_uri()), lambda _: None)
    return tmp_path / f"x@{versions.short(index.sha256)}"


def swap(path: Path, at: int) -> None:
    """Change a weight; header, length and tensors stay what they were."""
    with path.open("r+b") as f:
        f.seek(at)
        byte = f.read(1)
        f.seek(at)
        f.write(bytes([byte[0] ^ 1]))


def rewrite(place: Path, *, root: bool) -> None:
    """Write an index whose digests are those of the files that are there now; ``root``: with its own root, else with
    the root that was there."""
    old = json.loads((place / INDEX_NAME).read_bytes())
    write_index(place)
    new = json.loads((place / INDEX_NAME).read_bytes())
    assert [(f["name"], f["n_bytes"]) for f in new["files"]] == [(f["name"], f["n_bytes"]) for f in old["files"]]
    assert new["sha256"] != old["sha256"]
    if not root:
        (place / INDEX_NAME).write_text(json.dumps({**new, "sha256": old["sha256"]}))


@pytest.mark.parametrize("root", [False, True])
def test_other_weights_under_equal_headers_are_refused_although_their_digests_were_rewritten(
    place: Path, two: tuple[Fetchd, Fetchd], root: bool
) -> None:
    first, second = two
    facts = first.client.inspect(place.as_uri())
    swap(place / WEIGHTS, CHUNK_BYTES + 5)
    rewrite(place, root=root)
    expected = OTHER_VERSION if root else OTHER_ROOT
    with pytest.raises(ModelCorrupt, match=expected):
        second.client.inspect(place.as_uri())
    second.start(facts, "g")  # a plan that was made before
    with pytest.raises(ModelCorrupt, match=expected):
        second.client.wait(GroupId("g"), 0, deadline_s=20)


def test_weights_that_are_swapped_after_the_inspection_are_named_and_a_host_that_has_the_good_ones_serves_on(
    tmp_path: Path, place: Path, two: tuple[Fetchd, Fetchd]
) -> None:
    first, second = two
    good = (place / WEIGHTS).read_bytes()
    (tmp_path / place.name.replace("@", "%40")).symlink_to(place)  # the store does not unquote names
    with Store(tmp_path) as store:
        uri = f"{store.uri}/{place.name}"
        facts = first.client.inspect(uri)
        first.start(facts, "before")
        first.client.wait(GroupId("before"), 0, deadline_s=20)
        second.client.inspect(uri)
        swap(place / WEIGHTS, CHUNK_BYTES + 5)
        second.start(facts, "swapped")
        with pytest.raises(ModelCorrupt) as told:
            second.client.wait(GroupId("swapped"), 0, deadline_s=20)
        assert second.reason(told.value)["error"] == (
            f"{WEIGHTS}: chunk 1 failed its checksum twice (bytes {CHUNK_BYTES} to {len(good) - 1} of the file)"
        )
        again = first.start(facts, "after")
        assert again.resident
        descriptors, reader = first.open(again.segment_id)
        try:
            assert file_bytes(reader, facts, WEIGHTS) == good
        finally:
            reader.close()
            descriptors.close()


def test_a_stages_part_of_a_chunk_is_bound_too(fetchd: Fetchd, place: Path) -> None:
    """A stage fetches pieces of chunks.  Their digests are those of tensors, which the root binds as well."""
    facts = fetchd.client.inspect(place.as_uri())
    index = checkpoint.read_index((place / INDEX_NAME).read_bytes())
    layer = next(t for t in index.tensors if t.name == "model.layers.0.w")
    swap(place / WEIGHTS, layer.offset + 7)
    fetchd.start(facts, "stage", (FileRange(WEIGHTS, layer.offset, layer.n_bytes),))
    with pytest.raises(ModelCorrupt, match=r"tensor model\.layers\.0\.w failed its checksum twice"):
        fetchd.client.wait(GroupId("stage"), 0, deadline_s=20)
    plain = json.loads((place / INDEX_NAME).read_bytes())
    data = (place / WEIGHTS).read_bytes()[layer.offset : layer.offset + layer.n_bytes]
    changed = next(t for t in plain["tensors"] if t["name"] == layer.name)
    changed["edges_blake3"] = [digest(data)]
    (place / INDEX_NAME).write_text(json.dumps(plain))
    with pytest.raises(ModelCorrupt, match=OTHER_ROOT):
        checkpoints.read_index(open_store(place.as_uri()))


@pytest.mark.parametrize("field", ["name", "dtype", "shape"])
def test_what_the_index_says_of_tensors_is_bound(fetchd: Fetchd, place: Path, field: str) -> None:
    """The bytes are unchanged, but the index assigns them to another layer, or says another type or shape."""
    plain = json.loads((place / INDEX_NAME).read_bytes())
    one, other = (t for t in plain["tensors"] if t["name"] in ("model.layers.0.w", "model.layers.1.w"))
    if field == "name":
        one["name"], other["name"] = other["name"], one["name"]
    elif field == "dtype":
        one["dtype"] = "I8"
    else:
        one["shape"] = [1, *one["shape"]]
    (place / INDEX_NAME).write_text(json.dumps(plain))
    with pytest.raises(ModelCorrupt, match=OTHER_ROOT):
        fetchd.client.inspect(place.as_uri())


@pytest.mark.parametrize("length", ["other", "same"])
def test_the_config_is_bound_before_a_plan_is_made_of_it(
    tmp_path: Path, place: Path, two: tuple[Fetchd, Fetchd], length: str
) -> None:
    """The config determines layers, parts and architecture, which the scheduler keeps for each version."""
    first, second = two
    config = (place / "config.json").read_bytes()
    swapped = config.replace(b'"num_hidden_layers": 3', b'"num_hidden_layers": 2') + b" " * (length == "other")
    assert swapped != config
    facts = first.client.inspect(place.as_uri())
    (place / "config.json").write_bytes(swapped)
    with pytest.raises(ModelCorrupt, match="config.json is not the one of this version"):
        second.client.inspect(place.as_uri())
    assert first.client.inspect(place.as_uri()) == facts
    store, root = checkpoints.resolve(open_store((tmp_path / "x").as_uri()))
    with pytest.raises(ModelCorrupt, match="config.json is not the one of this version"):
        checkpoints.read_facts(store, checkpoints.read_index(store, root))


def test_the_digits_of_a_name_are_no_proof_and_the_whole_root_is(fetchd: Fetchd, tmp_path: Path, place: Path) -> None:
    """Somebody has made two models whose roots begin alike; a pointer and a pin with 64 digits tell them apart."""
    root = checkpoint.read_index((place / INDEX_NAME).read_bytes()).sha256
    twin = root[:16] + "0" * 48
    uri = (tmp_path / "x").as_uri()
    by_name, by_root = (fetchd.client.inspect(f"{uri}@{digits}") for digits in (root[:16], root))
    assert (by_root.uri, by_root.version, by_root.asked_for) == (by_name.uri, root, f"{uri}@{root}")
    with pytest.raises(ModelCorrupt, match=OTHER_VERSION):
        fetchd.client.inspect(f"{uri}@{twin}")
    (tmp_path / "x" / versions.POINTER_NAME).write_bytes(versions.write_pointer(twin))
    with pytest.raises(ModelCorrupt, match=OTHER_VERSION):
        fetchd.client.inspect(uri)
    for name in (uri, f"{uri}@{twin}"):
        with pytest.raises(ModelCorrupt, match=OTHER_VERSION):
            checkpoints.read_index(*checkpoints.resolve(open_store(name)))


def test_verify_names_the_chunk_and_tells_an_index_that_was_rewritten(tmp_path: Path, place: Path) -> None:
    store, root = checkpoints.resolve(open_store((tmp_path / "x").as_uri()))
    swap(place / WEIGHTS, CHUNK_BYTES + 5)
    with pytest.raises(ModelCorrupt, match=f"{WEIGHTS}: chunk 1 at byte {CHUNK_BYTES} is not what was pushed"):
        checkpoints.verify(store, checkpoints.read_index(store, root), lambda _: None)
    good = (place / INDEX_NAME).read_bytes()
    for own_root, expected in (False, OTHER_ROOT), (True, OTHER_VERSION):
        rewrite(place, root=own_root)
        with pytest.raises(ModelCorrupt, match=expected):
            checkpoints.read_index(store, root)
        (place / INDEX_NAME).write_bytes(good)


def test_a_directory_without_an_index_is_said_to_be_unbound(tmp_path: Path, fetchd: Fetchd) -> None:
    model = write_model(tmp_path / "m")
    facts = fetchd.client.inspect(model.as_uri())
    assert (facts.verified, facts.sha256) == (False, "")
    said = forked.run("thaw.cli.main", "model", "inspect", model.as_uri(), env=os.environ).stdout
    assert "version  not bound" in said
    assert "thaw model push DIR URI" in said


@pytest.mark.full
@pytest.mark.vllm
def test_what_vllms_own_preload_takes_for_the_same_weights_is_another_version(tmp_path: Path) -> None:
    """`vllm preload` serves weights to every process with the same fingerprint, and the fingerprint covers only
    headers."""
    a, b = (write_model(tmp_path / name) for name in "ab")
    swap(b / WEIGHTS, (b / WEIGHTS).stat().st_size - 1)
    script = (
        "import sys; from vllm.model_executor.model_loader.weight_cache.protocol import hash_checkpoint; "
        "print(*map(hash_checkpoint, sys.argv[1:]))"
    )
    done = subprocess.run((sys.executable, "-c", script, a, b), capture_output=True, text=True, check=True)
    first, second = done.stdout.split()[-2:]
    assert first == second
    roots = [checkpoints.hash_files(model, lambda _: None).index.sha256 for model in (a, b)]
    assert roots[0] != roots[1]

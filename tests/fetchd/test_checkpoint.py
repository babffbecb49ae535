"""Attacks with the headers, indexes and names that fetchd reads from a store: it must check them first."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fetchd.harness import digest, safetensors_bytes, write_index, write_model
from thaw import wire
from thaw.checkpoints import checkpoint, hash_tree
from thaw.errors import ModelCorrupt, ModelUnsupported
from thaw.model import CHUNK_BYTES, INDEX_NAME, ModelFile, TensorInfo

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "checkpoint-index.json").read_text())
FILE = safetensors_bytes({"a": b"1234", "b": b"", "c": b"56"})


def parse(data: bytes) -> tuple[TensorInfo, ...]:
    n = checkpoint.header_bytes("f", data[:8], len(data))
    return checkpoint.parse_header("f", data[8 : 8 + n], len(data))


def with_header(header: Any, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [4], "data_offsets": [0, 4], **changes}


def test_a_small_file_is_read_as_it_is() -> None:
    start = len(FILE) - 6
    assert parse(FILE) == (
        TensorInfo("a", "f", start, 4, "U8", (4,)),
        TensorInfo("b", "f", start + 4, 0, "U8", (0,)),
        TensorInfo("c", "f", start + 4, 2, "U8", (2,)),
    )


@pytest.mark.parametrize("length", range(len(FILE)))
def test_a_file_cut_at_any_byte_is_corrupt(length: int) -> None:
    with pytest.raises(ModelCorrupt):
        parse(FILE[:length])


def test_a_file_with_one_byte_more_is_corrupt() -> None:
    with pytest.raises(ModelCorrupt, match="its tensors end at byte"):
        parse(FILE + b"x")


@pytest.mark.parametrize("length", [0, 1, len(FILE), 2**31, 100 * 2**20 + 1, 2**63, 2**64 - 1])
def test_a_header_length_that_cannot_be_is_refused_before_anything_is_read(length: int) -> None:
    with pytest.raises(ModelCorrupt, match="header claims"):
        checkpoint.header_bytes("f", length.to_bytes(8, "little"), len(FILE))


LIES = {
    "no usable shape": [
        *({"shape": shape} for shape in ([-4], [4.0], [True, 4], "4", None, [1] * 17 + [4])),
        *({"data_offsets": offsets} for offsets in ([0], [0, 4, 8], [-4, 0], [0, 2**60], None)),
    ],
    "claims 4 bytes": [{"shape": [5]}, {"shape": [2**40, 2**40]}, {"dtype": "F32"}, {"dtype": "F4", "shape": [7]}],
    "claims -4 bytes": [{"data_offsets": [4, 0]}],
    "leaves a gap": [{"data_offsets": [1, 5]}],
}


@pytest.mark.parametrize(("problem", "changes"), [(p, changes) for p, lies in LIES.items() for changes in lies])
def test_a_lie_in_any_field_of_a_tensor_is_named(problem: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelCorrupt, match=problem):
        parse(with_header({"t": entry(**changes)}, b"1234"))


@pytest.mark.parametrize("dtype", [None, 8, "I4096", "", ["U8"]])
def test_an_unknown_dtype_is_unsupported(dtype: object) -> None:
    with pytest.raises(ModelUnsupported, match="has dtype"):
        parse(with_header({"t": entry(dtype=dtype)}, b"1234"))


NO_JSON_OBJECT = [b"[]", b"{", b"nul", b'"x"', b"\xff\xfe", b"[" * 100_000, b"  "]


@pytest.mark.parametrize("header", [*NO_JSON_OBJECT, b'{"t": 1, "t": 2}', b'{"t": []}', b'{"t": null}'])
def test_a_header_that_is_not_an_object_of_tensors_is_corrupt(header: bytes) -> None:
    with pytest.raises(ModelCorrupt):
        parse(with_header(header, b""))


@pytest.mark.parametrize("second", [{}, {"shape": [2], "data_offsets": [2, 4]}])
def test_overlapping_tensors_are_corrupt(second: dict[str, Any]) -> None:
    with pytest.raises(ModelCorrupt, match="overlaps"):
        parse(with_header({"a": entry(), "b": entry(**second)}, b"1234"))


def test_every_single_bit_flip_is_refused_or_changes_names_only() -> None:
    good = parse(FILE)
    for byte in range(len(FILE) - 6):
        for bit in range(8):
            flipped = bytearray(FILE)
            flipped[byte] ^= 1 << bit
            try:
                found = parse(bytes(flipped))
            except (ModelCorrupt, ModelUnsupported):
                continue
            assert sum(t.n_bytes for t in found) == sum(t.n_bytes for t in good)


FETCHABLE = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.model"]
CODE = ["modeling.py", "pytorch_model.bin", "model.bin"]
PATHS = ["../x.safetensors", "a/b.safetensors", "/etc/passwd", ".safetensors", "a\0.safetensors", "a.safetensors\n", ""]


def test_only_plain_names_of_known_files_may_be_fetched() -> None:
    names = [*FETCHABLE, *CODE, *PATHS, "x" * 300 + ".safetensors"]
    assert [name for name in names if checkpoint.is_fetchable(name)] == FETCHABLE


@pytest.mark.parametrize("weight_map", [None, [], {}, {"a": 1}, {"a": "../../etc/x.safetensors"}, {"a": []}])
def test_a_shard_index_that_names_nothing_fetchable_is_corrupt(weight_map: object) -> None:
    for plain in ({}, [], {"weight_map": weight_map}):
        with pytest.raises(ModelCorrupt):
            checkpoint.shard_names(json.dumps(plain).encode())
    with pytest.raises(ModelCorrupt):
        checkpoint.shard_names(b"")


@pytest.fixture(scope="module")
def index_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    model = write_index(write_model(tmp_path_factory.mktemp("m"), layer_bytes=4_000_000))
    return (model / INDEX_NAME).read_bytes()


def test_an_index_comes_back_as_it_was_written(index_bytes: bytes) -> None:
    index = checkpoint.read_index(index_bytes)
    assert checkpoint.write_index(index) == index_bytes
    assert [f.name for f in index.files] == ["config.json", "tokenizer.json", "model.safetensors"]
    assert len(index.files[-1].chunks_blake3) == -(-index.files[-1].n_bytes // CHUNK_BYTES) == 2
    assert index.verified


def root_of(plain: dict[str, Any], order: int = 1) -> str:
    files = [wire.from_plain(ModelFile, f) for f in plain["files"]]
    return hash_tree.root(files[::order], [wire.from_plain(TensorInfo, t) for t in plain["tensors"]][::order])


def test_the_root_is_the_one_that_the_format_describes() -> None:
    vector = VECTORS["root"]
    assert hashlib.sha256("".join(f"{line}\n" for line in vector["lines"]).encode()).hexdigest() == vector["sha256"]
    assert root_of(vector) == root_of(vector, order=-1) == vector["sha256"]


def leaves(plain: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every value that is no list and no object, and its place."""
    inside = plain.items() if isinstance(plain, dict) else enumerate(plain) if isinstance(plain, list) else ()
    if not isinstance(plain, dict | list):
        yield path, plain
    for key, value in inside:
        yield from leaves(value, (*path, key))


def changed(plain: dict[str, Any], path: Sequence[Any], value: Any) -> dict[str, Any]:
    copy = json.loads(json.dumps(plain))
    at: Any = copy
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return dict(copy)


BOUND = [leaf for leaf in leaves(VECTORS["root"]) if leaf[0][0] in ("files", "tensors")]


@pytest.mark.parametrize(("path", "old"), BOUND, ids=[".".join(map(str, path)) for path, _ in BOUND])
def test_the_root_binds_every_field_of_files_and_tensors(path: tuple[Any, ...], old: Any) -> None:
    new = not old if isinstance(old, bool) else old + 1 if isinstance(old, int) else f"x{old[1:]}"
    assert new != old
    assert root_of(changed(VECTORS["root"], path, new)) != VECTORS["root"]["sha256"]


LIES_OF_AN_INDEX = {
    ("sha256",): ["0" * 64],
    ("verified",): [False],
    ("files",): [[], None],
    ("files", 1): [None],
    ("files", 0, "name"): ["../config.json", "tokenizer.json"],
    ("files", 2, "n_bytes"): [5, -1, 2**70],
    ("files", 2, "chunks_blake3"): [[]],
    ("files", 2, "chunks_blake3", 0): ["0" * 16, "0" * 64],
    ("files", 2, "sidecar"): [True],
    ("tensors", 0, "name"): ["x" * 2000],
    ("tensors", 0, "file"): ["other.safetensors"],
    ("tensors", 0, "dtype"): ["PICKLE"],
    ("tensors", 0, "offset"): [-1, 2**60],
    ("tensors", 0, "n_bytes"): [1],
    ("tensors", 0, "shape"): [[-1000], [10**18] * 16, [1] * 16 + [1000], [int("9" * 4000)], [1000.0]],
    ("tensors", 1, "offset"): [300],
}


@pytest.mark.parametrize("path", LIES_OF_AN_INDEX, ids=lambda path: ".".join(map(str, path)))
def test_a_lie_in_any_field_of_an_index_is_corrupt(index_bytes: bytes, path: tuple[Any, ...]) -> None:
    for value in LIES_OF_AN_INDEX[path]:
        with pytest.raises(ModelCorrupt):
            checkpoint.read_index(json.dumps(changed(json.loads(index_bytes), path, value)).encode())


def test_an_index_cut_anywhere_is_corrupt_and_a_newer_one_is_unsupported(index_bytes: bytes) -> None:
    for length in range(0, len(index_bytes), 7):
        with pytest.raises((ModelCorrupt, ModelUnsupported)):
            checkpoint.read_index(index_bytes[:length])
    plain = json.loads(index_bytes)
    with pytest.raises(ModelUnsupported, match="version 3"):
        checkpoint.read_index(json.dumps({**plain, "version": 3}).encode())
    assert checkpoint.read_index(json.dumps({**plain, "newer field": 1}).encode()).verified


def tensor(name: str, n_bytes: int, at: int) -> TensorInfo:
    return TensorInfo(name, "model.safetensors", at, n_bytes, "U8", (n_bytes,))


@pytest.mark.parametrize(
    ("config", "n_layers", "layer_bytes", "outer"),
    [
        ({"num_hidden_layers": 2}, 2, (10, 20), 7),
        ({"n_layer": 2}, 2, (10, 20), 7),
        ({}, 2, (10, 20), 7),
        ({"text_config": {"num_hidden_layers": 2}}, 2, (10, 20), 7),
        ({"num_hidden_layers": 1}, 1, (10,), 27),
        ({"num_hidden_layers": 3}, 3, (10, 20, 0), 7),
        ({"num_hidden_layers": "x"}, 2, (10, 20), 7),
    ],
)
@pytest.mark.parametrize("prefix", ["model.layers", "h", "transformer.h", "model.language_model.layers", "blocks"])
def test_layers_are_counted_and_weighed_by_name(
    config: Mapping[str, Any], n_layers: int, layer_bytes: tuple[int, ...], outer: int, prefix: str
) -> None:
    tensors = (tensor("model.embed.weight", 7, 0), tensor(f"{prefix}.0.a", 10, 7), tensor(f"{prefix}.1.b", 20, 17))
    index = checkpoint.build_index([ModelFile("model.safetensors", 37, False)], tensors, etag="e")
    facts = checkpoint.facts_of("u", index, config)
    assert (facts.n_layers, facts.layer_bytes, facts.outer_bytes) == (n_layers, layer_bytes, outer)
    assert facts.etag == "e"


def test_the_digests_of_chunks_are_blake3_of_8_mib_pieces() -> None:
    pieces = [b"a" * CHUNK_BYTES, b"b"]
    described = checkpoint.describe_file("model.safetensors", pieces, digest)
    assert described.chunks_blake3 == tuple(digest(p) for p in pieces)
    assert described.n_bytes == CHUNK_BYTES + 1


def test_the_edges_of_tensors_and_their_checksums_are_those_of_the_vectors() -> None:
    n_bytes = VECTORS["file_bytes"]
    data = (bytes(range(251)) * (n_bytes // 251 + 1))[:n_bytes]
    tensors = [tensor(v["name"], v["n_bytes"], v["offset"]) for v in VECTORS["tensors"]]
    sums = hash_tree.TensorDigests(tensors, digest)
    for at in range(0, n_bytes, CHUNK_BYTES):
        sums.update(data[at : at + CHUNK_BYTES])
    for vector, found in zip(VECTORS["tensors"], sums.tensors(), strict=True):
        assert [list(edge) for edge in hash_tree.edges(found)] == vector["edges"]
        assert list(found.edges_blake3) == vector["edges_blake3"]


@pytest.mark.parametrize("sums", [[], ["0" * 64] * 3, ["0" * 64] * 9, ["0" * 16]])
def test_an_index_with_a_wrong_number_of_tensor_digests_is_corrupt(index_bytes: bytes, sums: list[str]) -> None:
    wrong = changed(json.loads(index_bytes), ["tensors", 0, "edges_blake3"], sums)
    with pytest.raises(ModelCorrupt, match="digests"):
        checkpoint.read_index(json.dumps(wrong).encode())

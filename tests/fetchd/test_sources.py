"""One suite for all sources that need no special server (S3 has its own module with a real server)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fetchd.settings import FetchdSettings
from fetchd.sources.base import Connection, Source, Target, Unthrottled, read_bytes
from fetchd.sources.file import FileSource
from fetchd.sources.http import HttpSource
from fetchd.sources.registry import open_source
from tests.fetchd.harness import Store
from tests.hub import LoopbackHub, files_in
from thaw.errors import ModelCorrupt, ModelNotFound

DATA = bytes(range(256)) * 64  # 16 KiB


@pytest.fixture(params=["file", "http", "hf"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Source]:
    (tmp_path / "m d").mkdir()
    (tmp_path / "m d" / "model.safetensors").write_bytes(DATA)
    (tmp_path / "m d" / "config.json").write_bytes(b"{}")
    if request.param == "file":
        yield FileSource(tmp_path / "m d")
        return
    if request.param == "hf":
        with LoopbackHub() as hub:
            commit = hub.add("org/m", files_in(tmp_path / "m d")).branches["main"]
            settings = FetchdSettings("s", "d", hub_endpoint=hub.endpoint, allow="127.0.0.1")
            yield open_source(f"hf://org/m@{commit}", settings)
        return
    (tmp_path / "m%20d").symlink_to(tmp_path / "m d")  # the store does not unquote names
    with Store(tmp_path) as store:
        yield HttpSource(f"{store.uri}/m d", 20.0)


@pytest.fixture
def connection(source: Source) -> Iterator[Connection]:
    made = source.connect()
    yield made
    made.close()


def test_an_objects_size_and_version_are_known_before_it_is_read(connection: Connection) -> None:
    info = connection.stat("model.safetensors")
    assert info.n_bytes == len(DATA)
    assert info.etag == connection.stat("model.safetensors").etag != ""


def test_any_range_comes_back_exactly(connection: Connection) -> None:
    for offset, n_bytes in ((0, len(DATA)), (0, 1), (1, 1), (4096, 4096), (4095, 4098), (len(DATA) - 1, 1), (5, 0)):
        assert read_bytes(connection, "model.safetensors", offset, n_bytes) == DATA[offset : offset + n_bytes]


def test_one_read_fills_scattered_pieces_and_resumes_where_it_stopped(connection: Connection) -> None:
    buffers = [bytearray(3), bytearray(5000), bytearray(1)]
    target = Target([memoryview(b) for b in buffers])
    target.next(2)[:] = DATA[10:12]
    target.advance(2)
    connection.read_into("model.safetensors", 10, target, Unthrottled(), "")
    assert b"".join(buffers) == DATA[10 : 10 + 5004]
    assert target.left == 0


def test_objects_can_be_read_in_turn_on_one_connection(connection: Connection) -> None:
    for _ in range(3):
        assert read_bytes(connection, "config.json", 0, 2) == b"{}"
        assert read_bytes(connection, "model.safetensors", 256, 4) == b"\x00\x01\x02\x03"


def test_what_is_not_there_is_not_found_and_what_is_too_short_is_corrupt(connection: Connection) -> None:
    for ask in (connection.stat, lambda name: read_bytes(connection, name, 0, 1)):
        with pytest.raises(ModelNotFound):
            ask("tokenizer.json")
    for offset in (len(DATA) - 1, len(DATA) + 5):
        with pytest.raises(ModelCorrupt):
            read_bytes(connection, "model.safetensors", offset, 2)
    assert read_bytes(connection, "config.json", 0, 2) == b"{}", "a refusal spoils the connection for nobody"


def test_another_version_than_the_one_inspected_is_corrupt(connection: Connection) -> None:
    with pytest.raises(ModelCorrupt, match="has changed"):
        read_bytes(connection, "model.safetensors", 0, 4, "another")

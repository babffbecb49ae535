"""The storage source of docs/extending.md, in a real fetchd."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from fetchd.settings import FetchdSettings
from fetchd.sources.base import Target, Unthrottled, read_bytes
from fetchd.sources.registry import open_source
from tests.fetchd.harness import Fetchd, file_bytes, write_model
from thaw.errors import ModelCorrupt, ModelNotFound


@pytest.fixture
def archive(tmp_path: Path, installed: Path) -> Path:
    model = write_model(tmp_path / "model", n_layers=3, layer_bytes=3_000_001)
    path = tmp_path / "model.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for file in model.iterdir():
            archive.write(file, file.name)
    return path


def test_fetchd_brings_a_model_from_a_source_that_a_package_has_added(archive: Path, tmp_path: Path) -> None:
    with Fetchd(tmp_path, PYTHONPATH=os.environ["PYTHONPATH"]) as fetchd:
        facts = fetchd.client.inspect(f"zip://{archive}")
        started = fetchd.start(facts)
        client, reader = fetchd.open(started.segment_id)
        assert reader.wait(reader.n_bytes, 20) == reader.n_bytes
        for name in facts.files:
            assert file_bytes(reader, facts, name) == (tmp_path / "model" / name).read_bytes()
        client.close()
        with pytest.raises(ModelNotFound) as caught:
            fetchd.client.inspect("zap:///m")
        assert caught.value.hint == "a uri begins with one of these schemes: file, hf, http, https, s3, zip"


def test_its_reads_keep_what_the_protocol_of_sources_promises(archive: Path) -> None:
    connection = open_source(f"zip://{archive}", FetchdSettings("s", "d")).connect()
    data = (archive.parent / "model" / "model.safetensors").read_bytes()
    info = connection.stat("model.safetensors")
    assert info.n_bytes == len(data)
    for offset, n_bytes in ((0, 1), (4095, 4098), (len(data) - 1, 1), (5, 0)):
        assert read_bytes(connection, "model.safetensors", offset, n_bytes) == data[offset : offset + n_bytes]
    buffers = [bytearray(3), bytearray(5000)]
    target = Target([memoryview(b) for b in buffers])
    target.next(2)[:] = data[10:12]
    target.advance(2)
    assert connection.read_into("model.safetensors", 10, target, Unthrottled(), "") == info.etag
    assert b"".join(buffers) == data[10 : 10 + 5003]
    with pytest.raises(ModelNotFound):
        connection.stat("nothing")
    with pytest.raises(ModelNotFound, match="no zip file of this host"):
        open_source("zip:///nowhere.zip", FetchdSettings("s", "d"))
    with pytest.raises(ModelCorrupt):
        read_bytes(connection, "model.safetensors", len(data) - 1, 2)
    with pytest.raises(ModelCorrupt):
        read_bytes(connection, "model.safetensors", 0, 2, "another")
    connection.close()

"""Pushes to a real S3 server do not send bytes again that an earlier push has sent or that another version has."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from thaw.checkpoints import versions
from thaw.cli.model_stores import checkpoints, s3
from thaw.cli.model_stores.stores import open_store
from thaw.errors import ModelCorrupt
from thaw.model import CHUNK_BYTES

N_CHUNKS = 4
WEIGHTS = "model.safetensors"


class Watched:
    """A client that notes the parts, and that ends the push at one of them as Ctrl-C does."""

    def __init__(self, client: Any, calls: list[str], end_at: int) -> None:
        self._client, self._calls, self._end_at = client, calls, end_at

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._client, name)
        if name not in ("upload_part", "upload_part_copy"):
            return call

        def noting(**arguments: Any) -> Any:
            if len(self._calls) == self._end_at:
                raise KeyboardInterrupt
            self._calls.append(f"{name} {arguments['PartNumber']}")
            return call(**arguments)

        return noting


def watch(monkeypatch: pytest.MonkeyPatch, end_at: int = -1) -> list[str]:
    calls: list[str] = []
    made = s3.client
    monkeypatch.setattr(s3, "client", lambda: Watched(made(), calls, end_at))
    return calls


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"num_hidden_layers": 1}')
    header = {"model.layers.0.w": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}
    n_bytes = N_CHUNKS * CHUNK_BYTES - 1000
    for _ in range(3):  # until the header's own length is counted
        n_data = n_bytes - 8 - len(json.dumps(header))
        header["model.layers.0.w"] |= {"shape": [n_data], "data_offsets": [0, n_data]}
    text = json.dumps(header).encode()
    data = os.urandom(n_bytes - 8 - len(text))
    (directory / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + data)
    return directory


def push(model: Path, uri: str) -> checkpoints.Pushed:
    pushed = checkpoints.upload(checkpoints.hash_files(model, lambda _: None), open_store(uri), lambda _: None)
    verify(versions.pin(uri, pushed.index.sha256))
    return pushed


def verify(pin: str) -> None:
    store = open_store(pin)
    checkpoints.verify(store, checkpoints.read_index(store), lambda _: None)


def unfinished(uri: str) -> list[str]:
    client = s3.client()
    prefix = uri.removeprefix("s3://models/")
    found = client.list_multipart_uploads(Bucket="models", Prefix=prefix).get("Uploads", [])
    client.close()
    return [upload["Key"] for upload in found]


def test_a_push_that_was_cut_goes_on_at_the_part_at_which_it_stopped(
    model: Path, s3_store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as cut:
        first = watch(cut, end_at=2)
        with pytest.raises(KeyboardInterrupt):
            push(model, s3_store)
    assert first == ["upload_part 1", "upload_part 2"]
    again = watch(monkeypatch)
    pushed = push(model, s3_store)
    assert again == ["upload_part 3", "upload_part 4"]
    assert pushed.sent_bytes == 2 * CHUNK_BYTES - 1000
    assert unfinished(s3_store) == []


def change(model: Path, at: int) -> None:
    with (model / WEIGHTS).open("r+b") as f:
        f.seek(at)
        f.write(os.urandom(64))


def test_only_the_chunks_that_the_newest_version_lacks_are_sent(
    model: Path, s3_store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = push(model, s3_store).index
    change(model, 2 * CHUNK_BYTES + 5)
    calls = watch(monkeypatch)
    new = push(model, s3_store)
    assert calls == ["upload_part_copy 1", "upload_part_copy 2", "upload_part 3", "upload_part_copy 4"]
    assert new.sent_bytes == CHUNK_BYTES + (model / "config.json").stat().st_size
    verify(versions.pin(s3_store, old.sha256))
    calls.clear()
    assert push(model, s3_store).sent_bytes == 0, "the version is there"
    assert calls == []


def test_a_file_that_changes_while_it_is_pushed_leaves_no_parts(model: Path, s3_store: str) -> None:
    hashed = checkpoints.hash_files(model, lambda _: None)
    change(model, 3 * CHUNK_BYTES)
    with pytest.raises(ModelCorrupt, match="changed while it was pushed"):
        checkpoints.upload(hashed, open_store(s3_store), lambda _: None)
    assert unfinished(s3_store) == []

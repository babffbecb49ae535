"""``thaw model``: push, list, inspect and verify, with directories and a web server."""

from __future__ import annotations

import functools
import hashlib
import http.server
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from thaw import checkpoint
from thaw.model import CHUNK_BYTES

N_WEIGHTS = CHUNK_BYTES + 4096  # two chunks, of which the second is short


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}')
    (directory / "tokenizer.json").write_text("{}")
    (directory / "evil.py").write_text("raise SystemExit")
    header = json.dumps({"model.layers.0.w": {"dtype": "U8", "shape": [N_WEIGHTS], "data_offsets": [0, N_WEIGHTS]}})
    weights = len(header).to_bytes(8, "little") + header.encode() + os.urandom(N_WEIGHTS)
    (directory / "model.safetensors").write_bytes(weights)
    return directory


def test_a_pushed_model_has_an_index_whose_checksums_are_those_of_the_files(
    thaw: Run, model: Path, tmp_path: Path
) -> None:
    target = tmp_path / "store" / "m"
    done = thaw("model", "push", str(model), target.as_uri())
    assert done.returncode == 0, done.stderr
    index = checkpoint.read_index((target / "thaw-index.json").read_bytes())
    assert [f.name for f in index.files] == ["config.json", "tokenizer.json", "model.safetensors"]
    assert sorted(p.name for p in target.iterdir()) == sorted([*(f.name for f in index.files), "thaw-index.json"])
    for file in index.files:
        assert (target / file.name).read_bytes() == (model / file.name).read_bytes()
        assert file.sha256 == hashlib.sha256((model / file.name).read_bytes()).hexdigest()
    assert len(index.files[2].chunks_xxh3) == 2
    assert f"sha256 {index.sha256}" in done.stdout


def test_verify_names_the_file_and_the_chunk_that_changed(thaw: Run, model: Path, tmp_path: Path) -> None:
    target = tmp_path / "m"
    thaw("model", "push", str(model), target.as_uri())
    good = thaw("model", "verify", target.as_uri())
    assert "4 chunks of 3 files are what was pushed" in good.stdout
    with (target / "model.safetensors").open("r+b") as f:
        f.seek(CHUNK_BYTES + 100)
        byte = f.read(1)
        f.seek(CHUNK_BYTES + 100)
        f.write(bytes([byte[0] ^ 1]))
    bad = thaw("model", "verify", target.as_uri())
    assert f"model.safetensors: chunk 1 at byte {CHUNK_BYTES} is not what was pushed" in bad.stderr
    assert bad.returncode == 246


def test_a_file_that_lost_its_end_is_told(thaw: Run, model: Path, tmp_path: Path) -> None:
    target = tmp_path / "m"
    thaw("model", "push", str(model), target.as_uri())
    os.truncate(target / "model.safetensors", CHUNK_BYTES)
    assert f"has {CHUNK_BYTES} bytes" in thaw("model", "verify", target.as_uri()).stderr


def test_inspect_tells_layers_and_bytes(thaw: Run, model: Path, tmp_path: Path) -> None:
    thaw("model", "push", str(model), (tmp_path / "m").as_uri())
    text = thaw("model", "inspect", (tmp_path / "m").as_uri()).stdout
    assert "LlamaForCausalLM" in text
    assert "layers   1, 8 MiB the largest" in text


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("truncate", "the file has"),
        ("no config", "has no config.json"),
        ("no weights", "has no safetensors file"),
        ("missing shard", "is named in model.safetensors.index.json but does not exist"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_refused_before_anything_is_written(
    thaw: Run, model: Path, tmp_path: Path, spoil: str, message: str
) -> None:
    if spoil == "truncate":
        os.truncate(model / "model.safetensors", 1000)
    elif spoil == "no config":
        (model / "config.json").unlink()
    elif spoil == "no weights":
        (model / "model.safetensors").unlink()
    else:
        shards = {"weight_map": {"w": "model-2.safetensors"}}
        (model / "model.safetensors.index.json").write_text(json.dumps(shards))
    done = thaw("model", "push", str(model), (tmp_path / "m").as_uri())
    assert message in done.stderr
    assert done.returncode == 246
    assert not (tmp_path / "m").exists()


def test_a_push_that_replaces_a_model_takes_the_old_index_away_first(thaw: Run, model: Path, tmp_path: Path) -> None:
    target = tmp_path / "m"
    thaw("model", "push", str(model), target.as_uri())
    first = (target / "thaw-index.json").read_bytes()
    (model / "tokenizer.json").write_text('{"new": 1}')
    assert thaw("model", "push", str(model), target.as_uri()).returncode == 0
    assert (target / "thaw-index.json").read_bytes() != first
    assert thaw("model", "verify", target.as_uri()).returncode == 0


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_a_model_on_a_web_server_can_be_verified_but_not_pushed(
    thaw: Run, model: Path, tmp_path: Path, web: str
) -> None:
    thaw("model", "push", str(model), (tmp_path / "m").as_uri())
    assert thaw("model", "verify", f"{web}/m").returncode == 0
    pushed = thaw("model", "push", str(model), f"{web}/m")
    assert pushed.stderr == f"error: {web}/m is read only\nhint: push to s3:// or file:// instead\n"


def test_a_uri_without_a_store_is_refused_with_the_forms_there_are(thaw: Run, model: Path) -> None:
    done = thaw("model", "push", str(model), "models/x")
    assert done.stderr == (
        "error: 'models/x' is not the URI of a model\n"
        "hint: s3://bucket/prefix, file:///absolute/path or http://host/path\n"
    )

"""``thaw model``: push, list, inspect and verify, with directories and a web server."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer

from tests.cli.conftest import KEY, Run
from tests.cli.fake_gateway import FakeGateway
from tests.fetchd.harness import Store
from tests.thaw_runtime.adapters import write_adapter
from thaw import wire
from thaw.checkpoints import checkpoint, model_json, versions
from thaw.cli.commands import models
from thaw.cli.model_stores import checkpoints
from thaw.cli.model_stores.stores import DirectoryStore, open_store
from thaw.dev.layout import Platform
from thaw.dev.processes import ProcessId
from thaw.errors import DeveloperError, ModelCorrupt, ModelUnsupported
from thaw.model import CHUNK_BYTES, ModelIndex
from thaw.model_uri import ModelUri

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


def place_of(name: Path) -> Path:
    """The directory of the version that a plain name means."""
    sha256 = versions.read_pointer(name.as_uri(), (name / versions.POINTER_NAME).read_bytes())
    return name.with_name(f"{name.name}@{sha256[:16]}")


def pushed_to(model: Path, name: Path) -> ModelIndex:
    return checkpoints.push(model, open_store(name.as_uri()), lambda _: None)


@pytest.fixture
def name(model: Path, tmp_path: Path) -> Path:
    """The name of a model that was pushed."""
    pushed_to(model, tmp_path / "m")
    return tmp_path / "m"


@pytest.mark.parametrize("odd", ["#new", "?x", "/../m", "//m", "%zz"])
def test_a_push_to_a_uri_that_could_mean_another_model_writes_nothing(
    thaw: Run, model: Path, name: Path, tmp_path: Path, odd: str
) -> None:
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    for words in (("push", str(model)), ("delete", "--force"), ("versions",), ("gc",), ("inspect",), ("verify",)):
        done = thaw("model", *words, f"{name.as_uri()}{odd}")
        assert done.returncode != 0, words
        assert "is not a model's uri" in done.stderr, words
    after = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if "home" not in p.parts}
    assert after == {p: t for p, t in before.items() if "home" not in p.parts}


def test_a_pushed_model_has_an_index_with_the_files_checksums(thaw: Run, model: Path, tmp_path: Path) -> None:
    name = tmp_path / "a store" / "m"
    done = thaw("model", "push", str(model), f"file://{name}")
    assert done.returncode == 0, done.stderr
    target = place_of(name)
    index = checkpoint.read_index((target / "thaw-index.json").read_bytes())
    assert [f.name for f in index.files] == ["config.json", "tokenizer.json", "model.safetensors"]
    assert sorted(p.name for p in target.iterdir()) == sorted([*(f.name for f in index.files), "thaw-index.json"])
    for file in index.files:
        assert (target / file.name).read_bytes() == (model / file.name).read_bytes()
    assert len(index.files[2].chunks_blake3) == 2
    assert f"sha256 {index.sha256}" in done.stdout
    assert f"version {ModelUri.parse(target.as_uri())}" in done.stdout


def test_verify_names_the_file_and_the_chunk_that_changed(thaw: Run, name: Path) -> None:
    good = thaw("model", "verify", name.as_uri())
    assert "4 chunks of 3 files are what was pushed" in good.stdout
    with (place_of(name) / "model.safetensors").open("r+b") as f:
        f.seek(CHUNK_BYTES + 100)
        byte = f.read(1)
        f.seek(CHUNK_BYTES + 100)
        f.write(bytes([byte[0] ^ 1]))
    bad = thaw("model", "verify", name.as_uri())
    assert f"model.safetensors: chunk 1 at byte {CHUNK_BYTES} is not what was pushed" in bad.stderr
    assert bad.returncode == 246


def test_a_file_that_lost_its_end_is_told(thaw: Run, name: Path) -> None:
    os.truncate(place_of(name) / "model.safetensors", CHUNK_BYTES)
    assert f"has {CHUNK_BYTES} bytes" in thaw("model", "verify", name.as_uri()).stderr


def test_inspect_tells_layers_and_bytes(thaw: Run, name: Path) -> None:
    text = thaw("model", "inspect", name.as_uri()).stdout
    assert "LlamaForCausalLM" in text
    assert "layers   1, 8 MiB the largest" in text


def test_a_model_that_no_host_would_read_is_refused_before_anything_is_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_json, "MAX_CHUNKS", 3)  # two sidecars, and weights of two chunks
    with pytest.raises(ModelUnsupported, match="no host would read the index of this model: .* more than 3 chunks"):
        checkpoints.push(model, open_store((tmp_path / "x").as_uri()), lambda _: None)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_a_model_that_is_pushed_again_is_another_version_beside_the_old(thaw: Run, model: Path, name: Path) -> None:
    old = place_of(name)
    before = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in old.iterdir()}
    (model / "tokenizer.json").write_text('{"new": 1}')
    assert thaw("model", "push", str(model), name.as_uri()).returncode == 0
    assert place_of(name) != old
    assert {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in old.iterdir()} == before
    assert thaw("model", "verify", name.as_uri()).returncode == 0
    pinned = thaw("model", "inspect", old.as_uri())
    newest = thaw("model", "inspect", name.as_uri())
    assert checkpoint.read_index((old / "thaw-index.json").read_bytes()).sha256 in pinned.stdout
    assert f"newest   file://{place_of(name)}" in newest.stdout


def test_nothing_is_pushed_to_a_pin(thaw: Run, model: Path, tmp_path: Path) -> None:
    uri = f"{(tmp_path / 'm').as_uri()}@0123456789abcdef"
    done = thaw("model", "push", str(model), uri)
    assert "is one version of a model, and a version never changes" in done.stderr
    assert f"hint: push to the plain name: {(tmp_path / 'm').as_uri()}" in done.stderr
    assert not list(tmp_path.glob("m*@*"))


class Cut(Exception):
    """The machine that pushes loses its power."""


class Observed(DirectoryStore):
    """Records the written files, and ends the push before a file of a given name."""

    def __init__(self, model: ModelUri, *, written: list[str], cut_at: str = "") -> None:
        super().__init__(model)
        self._written, self._cut_at = written, cut_at

    def _write(self, name: str, chunks: Iterator[bytes]) -> None:
        if name == self._cut_at:
            raise Cut
        self._written.append(name)
        super()._write(name, chunks)


@pytest.mark.parametrize("cut_at", ["config.json", "model.safetensors", "thaw-index.json", versions.POINTER_NAME])
def test_a_push_that_is_cut_leaves_the_old_version_and_the_next_one_goes_on_where_it_stopped(
    model: Path, name: Path, monkeypatch: pytest.MonkeyPatch, cut_at: str
) -> None:
    old = place_of(name)
    (model / "config.json").write_text('{"num_hidden_layers": 1, "new": 1}')
    written: list[str] = []

    def open_observed(uri: str, cut_at: str) -> Observed:
        return Observed(ModelUri.parse(uri), written=written, cut_at=cut_at)

    monkeypatch.setattr(checkpoints, "open_store", lambda uri: open_observed(uri, cut_at))
    with pytest.raises(Cut):
        checkpoints.push(model, open_observed(name.as_uri(), cut_at), lambda _: None)
    assert place_of(name) == old
    n_sent = len(written)
    monkeypatch.setattr(checkpoints, "open_store", lambda uri: open_observed(uri, ""))
    index = checkpoints.push(model, open_observed(name.as_uri(), ""), lambda _: None)
    assert place_of(name).name == f"m@{index.sha256[:16]}"
    files = [f.name for f in index.files]
    assert sorted(n for n in written if n in files) == sorted(files), "each file was sent once"
    assert written[n_sent:][-2:] == ["thaw-index.json", versions.POINTER_NAME]


def test_ctrl_c_says_that_nothing_was_harmed_and_how_to_go_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints, "upload", interrupt)
    uri = (tmp_path / "m").as_uri()
    with pytest.raises(typer.Exit) as caught:
        models.push(str(model), uri)
    assert caught.value.exit_code == 130
    told = f"stopped: {uri} is what it was; the same command goes on where this one stopped\n"
    assert capsys.readouterr().err == told


def test_a_file_that_changes_while_it_is_pushed_becomes_no_version(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = tmp_path / "m"
    hashed = checkpoints.hash_files(model, lambda _: None)
    for change in (lambda p: p.write_bytes(p.read_bytes() + b"x"), lambda p: p.write_bytes(b"x" * p.stat().st_size)):
        change(model / "model.safetensors")
        with pytest.raises(ModelCorrupt, match="changed while it was pushed"):
            checkpoints.upload(hashed, open_store(name.as_uri()), lambda _: None)
    assert not (name / versions.POINTER_NAME).exists()
    assert not list(tmp_path.glob("m@*/model.safetensors"))


def test_only_what_the_shard_index_or_the_plain_file_names_is_pushed(model: Path, tmp_path: Path) -> None:
    weights = (model / "model.safetensors").read_bytes()
    for stray in ("adapter_model.safetensors", "consolidated.safetensors", "model-00003-of-00002.safetensors"):
        (model / stray).write_bytes(weights)
    index = pushed_to(model, tmp_path / "plain")
    assert [f.name for f in index.files] == ["config.json", "tokenizer.json", "model.safetensors"]
    assert len(index.tensors) == 1
    (model / "model-1.safetensors").write_bytes(weights)
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"w": "model-1.safetensors"}}')
    index = pushed_to(model, tmp_path / "shards")
    assert [f.name for f in index.files] == ["config.json", "tokenizer.json", "model-1.safetensors"]


def test_models_are_listed_with_their_newest_version(thaw: Run, model: Path, tmp_path: Path, home: Path) -> None:
    store = tmp_path / "store"
    for change in ("1", "2"):
        (model / "tokenizer.json").write_text(change)
        index = pushed_to(model, store / "m")
    shutil.copytree(model, store / "copied")
    rest = {"ports": (), "hosts": 1, "link": "", "driver": "", "started_wall_ms": 0}
    described = Platform(ProcessId(1, 1), *[""] * 4, str(store), *[""] * 3, **rest)
    (home / "dev").mkdir()
    (home / "dev" / "platform.json").write_text(wire.dumps(described).decode())
    lines = thaw("model", "list", env={"COLUMNS": "300"}).stdout.splitlines()
    rows = [line.split() for line in lines if "file://" in line]
    listed = [(r[0], r[-3:]) for r in rows if "store/m" in r[0]]
    assert listed == [(f"file://{store}/m", [index.sha256[:16], "2", "?"])], "no platform says who uses it"
    assert [r[0] for r in rows] == [f"file://{store}/copied", f"file://{store}/m"]


def test_an_adapter_is_pushed_with_its_two_files_and_nothing_else(model: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", 1)
    for stray in ("config.json", "tokenizer.json"):
        (adapter / stray).write_bytes((model / stray).read_bytes())
    store = open_store((tmp_path / "pushed").as_uri())
    index = checkpoints.push(adapter, store, lambda _: None)
    assert [f.name for f in index.files] == ["adapter_config.json", "adapter_model.safetensors"]
    assert index.verified
    place, root = checkpoints.resolve(store)
    assert checkpoints.read_facts(place, checkpoints.read_index(place, root)).sha256 == index.sha256


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9000000000\n"
SHARDS = json.dumps({"weight_map": {"w": "model-2.safetensors"}})


def becomes(name: str, file: str = "", text: str = "") -> Callable[[Path], object]:
    """The weights get this name, or go if it is empty, and the directory gets this file."""

    def become(model: Path) -> None:
        weights = model / "model.safetensors"
        weights.rename(model / name) if name else weights.unlink()
        if file:
            (model / file).write_text(text)

    return become


def cached(*below: str) -> Callable[[Path], object]:
    """The files are in the cache of a hub."""

    def become(model: Path) -> None:
        repo = model.joinpath(*below)
        for revision in ("aaaa", "zzzz"):
            (repo / "snapshots" / revision).mkdir(parents=True)
        for path in [p for p in model.iterdir() if p.is_file()]:
            path.rename(repo / "snapshots" / "aaaa" / path.name)
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text("aaaa")

    return become


NEARLY: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "truncated": (lambda m: os.truncate(m / "model.safetensors", 1000), "the file has", ""),
    "no config": (lambda m: (m / "config.json").unlink(), "has no config.json", ""),
    "no weights": (becomes(""), "has no safetensors file", ""),
    "only strays": (
        becomes("consolidated.safetensors"),
        "has neither model.safetensors nor model.safetensors.index.json, only consolidated",
        "",
    ),
    "a missing shard": (
        lambda m: (m / "model.safetensors.index.json").write_text(SHARDS),
        "is named in model.safetensors.index.json but does not exist",
        "",
    ),
    "adapter": (
        becomes("adapter_model.bin", "adapter_config.json", '{"base_model_name_or_path": "org/base"}'),
        "holds an adapter for org/base, but not its adapter_model.safetensors",
        "save_pretrained",
    ),
    "GGUF": (
        becomes("small.Q4_K_M.gguf"),
        "has no safetensors file, only small.Q4_K_M.gguf",
        "thaw model push {model}/small.Q4_K_M.gguf URI",
    ),
    "pickle": (
        becomes("pytorch_model-00001-of-00002.bin", "training_args.bin"),
        "has no safetensors file, only pytorch_model-00001-of-00002.bin",
        "from transformers import",
    ),
    "pointer": (
        lambda m: (m / "model.safetensors").write_text(POINTER),
        "model.safetensors is a git-lfs pointer and not the file itself",
        "lfs pull",
    ),
    "pointer beside": (
        lambda m: (m / "tokenizer.json").write_text(POINTER.replace("9000000000", "9")),
        "tokenizer.json is a git-lfs pointer and not the file itself",
        "lfs pull",
    ),
    "repository": (cached(), "is a model's directory in a hub cache", "thaw model push {model}/snapshots/aaaa URI"),
    "cache": (
        cached("models--org--name"),
        "is a hub cache with the models of 1 repositories",
        "thaw model push {model}/models--org--name/snapshots/aaaa URI",
    ),
}


@pytest.mark.parametrize("kind", NEARLY)
def test_what_is_nearly_a_model_is_named_with_the_command_that_helps(model: Path, tmp_path: Path, kind: str) -> None:
    become, message, command = NEARLY[kind]
    become(model)
    with pytest.raises(DeveloperError, match=re.escape(message)) as caught:
        pushed_to(model, tmp_path / "m")
    assert command.format(model=model) in caught.value.hint
    assert not (tmp_path / "m").exists()


def test_a_model_on_a_web_server_can_be_verified_but_not_pushed(thaw: Run, model: Path, name: Path) -> None:
    with Store(name.parent) as store:
        assert thaw("model", "verify", f"{store.uri}/m").returncode == 0
        pushed = thaw("model", "push", str(model), f"{store.uri}/m")
    assert pushed.stderr == f"error: {store.uri}/m is read only\nhint: push to s3:// or file:// instead\n"


def test_a_uri_without_a_store_is_refused_with_the_forms_there_are(thaw: Run, model: Path) -> None:
    done = thaw("model", "push", str(model), "models/x")
    assert done.stderr == (
        "error: 'models/x' is not a model's uri: it does not begin with a scheme and ://\n"
        "hint: write it as s3://bucket/prefix, hf://org/name@revision, http(s)://host/path or file:///absolute/path\n"
    )


# ── what the engine says ──────────────────────────────────────────────────────────────────────────────────────────


def test_without_a_platform_a_push_says_that_the_deploy_will_ask(thaw: Run, model: Path, tmp_path: Path) -> None:
    done = thaw("model", "push", str(model), (tmp_path / "m").as_uri())
    assert "note: the engine is asked about this model when it is deployed (no platform is set in" in done.stderr


def test_a_missing_tokenizer_is_told_before_anything_is_read_or_sent(thaw: Run, model: Path, tmp_path: Path) -> None:
    (model / "tokenizer.json").unlink()
    done = thaw("model", "push", str(model), (tmp_path / "m").as_uri())
    assert f"{model} has no tokenizer.json\n" in done.stderr
    assert not (tmp_path / "m").exists()
    assert thaw("model", "push", str(model), (tmp_path / "m").as_uri(), "--force").returncode == 0


@pytest.mark.parametrize(
    ("status", "answer", "said"),
    [
        (200, {"checked": True, "notes": ["short"]}, "note: short"),
        (200, {"checked": False, "reason": "busy"}, "the engine was not asked whether it can run this model: busy"),
        (200, {"checked": True, "refusal": {"code": "ModelNotFound", "message": "no"}}, "does not see this store"),
        (403, {"error": "not allowed", "code": "c"}, "is asked about this model when it is deployed: not allowed"),
    ],
)
def test_a_push_asks_the_platform_and_goes_on_unless_it_refuses(
    thaw: Run, gateway: FakeGateway, model: Path, tmp_path: Path, status: int, answer: object, said: str
) -> None:
    gateway.answers["POST /api/v1/namespaces/_/preflight"] = (status, answer)
    uri = (tmp_path / "m").as_uri()
    done = thaw("model", "push", str(model), uri, "--apihost", gateway.url, "--auth", KEY)
    assert (done.returncode, said in done.stderr) == (0, True), done.stderr
    assert gateway.asked[0].body["config"]["model"]["uri"] == f"file://{place_of(tmp_path / 'm')}"


def test_a_push_that_waits_for_an_engine_says_so(thaw: Run, gateway: FakeGateway, model: Path, tmp_path: Path) -> None:
    asks = "POST /api/v1/namespaces/_/preflight"
    gateway.answers[asks] = (200, {"checked": True})
    gateway.held_until[asks] = "GET /api/v1/namespaces/_/limits"
    done = thaw("model", "push", str(model), (tmp_path / "m").as_uri(), "--apihost", gateway.url, "--auth", KEY)
    said = "checking: waiting for a free engine on a host to say whether the model would start …\n"
    assert (done.returncode, said in done.stderr) == (0, True), "this gateway does not say how long"


def test_a_push_that_is_refused_leaves_the_name_and_no_stamp(
    thaw: Run, gateway: FakeGateway, model: Path, tmp_path: Path
) -> None:
    refusal = {"code": "ModelUnsupported", "message": "no such architecture", "hint": "take another"}
    gateway.answers["POST /api/v1/namespaces/_/preflight"] = (200, {"checked": True, "refusal": refusal})
    done = thaw("model", "push", str(model), (tmp_path / "m").as_uri(), "--apihost", gateway.url, "--auth", KEY)
    assert done.returncode == 144
    assert "would not start, so the name means what it meant: no such architecture" in done.stderr
    assert "hint: take another; to let the name mean it anyway, push again with --force" in done.stderr
    assert not (tmp_path / "m" / versions.POINTER_NAME).exists()
    (place,) = tmp_path.glob("m@*")
    assert "thaw-push.stamp" not in {p.name for p in place.iterdir()}

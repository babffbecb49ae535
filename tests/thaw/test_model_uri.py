"""One reader for models' URIs: what is pushed to one is what a host reads from it, and who names it is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fetchd.settings import FetchdSettings
from fetchd.sources.registry import open_source
from tests.fetchd.harness import write_model
from thaw.checkpoints import versions
from thaw.cli.model_stores import checkpoints, s3
from thaw.cli.model_stores.stores import open_store
from thaw.cli.model_uses import Uses
from thaw.errors import BadRequest, ModelNotFound
from thaw.model_uri import ModelUri

DIGITS = "0123456789abcdef"
SETTINGS = FetchdSettings("s", "d", file_roots="/", s3_endpoint="http://store.example", s3_region="r")
READ_IN_TWO_WAYS = [
    *("s3://models/victim#new", "s3://models/victim?x", "s3://models/victim?versionId=1#x", "s3://models/./victim"),
    *("s3://models/other/../victim", "s3://models/%2e%2e/victim", "s3://models//victim", "s3://models/a//victim"),
    *("s3:///models/victim", "s3://models", "s3://models/", "s3://u@models/victim", "s3://models:80/victim"),
    *("file:///srv//victim", "file:////srv/victim", "file://localhost/srv/victim", "file:///", "file:srv/victim"),
    *("file:///srv/victim#new", "/srv/victim", "s3:models/victim", "s3://models/victim%2f", "s3://models/victim%23%zz"),
    *(
        " s3://models/victim",
        "s3://models/victim\n",
        "s3://models/vic\ttim",
        "s3://models\\victim",
        "ftp://models/victim",
    ),
]
parts = st.text(st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="/\\"), min_size=1, max_size=8)
paths = st.lists(parts.filter(lambda part: part not in (".", "..")), min_size=1, max_size=4)


@pytest.mark.parametrize("uri", READ_IN_TWO_WAYS)
def test_what_two_readers_could_read_in_two_ways_is_refused_by_each_of_them(uri: str) -> None:
    with pytest.raises(BadRequest):
        open_store(uri)
    with pytest.raises(ModelNotFound):
        open_source(uri, SETTINGS)
    assert (versions.plain_name(uri), versions.pinned(uri)) == (uri, "")
    if not uri.startswith("ftp"):  # which a package may add
        with pytest.raises(BadRequest):
            versions.pin(uri, DIGITS)


@given(paths)
def test_the_command_writes_the_objects_that_a_host_reads(path: list[str]) -> None:
    uri = str(ModelUri("s3", "models", tuple(path)))
    assert ModelUri.parse(uri) == ModelUri("s3", "models", tuple(path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(s3, "client", lambda: None)  # which takes long to make
        store: Any = open_store(uri)
    source: Any = open_source(uri, SETTINGS)
    at = store._at("config.json")
    asked = unquote(urlsplit(f"{source.base_url}/config.json").path)
    assert asked == f"/{at['Bucket']}/{at['Key']}" == f"/models/{'/'.join(path)}/config.json"


@given(paths, st.data())
def test_two_spellings_of_a_place_have_one_canonical_text(path: list[str], data: st.DataObject) -> None:
    def spelled(part: str) -> str:
        escape = data.draw(st.lists(st.booleans(), min_size=len(part), max_size=len(part)))
        must = set('%?#\\ "') | {c for c in part if not c.isascii() or c.isspace()}
        written = (
            "".join(f"%{b:02x}" for b in c.encode()) if yes or c in must else c
            for c, yes in zip(part, escape, strict=True)
        )
        return "".join(written)

    uri = "S3://models/" + "/".join(map(spelled, path)) + data.draw(st.sampled_from(["", "/", "//"]))
    model = ModelUri.parse(uri)
    assert model == ModelUri("s3", "models", tuple(path))
    assert str(ModelUri.parse(str(model))) == str(model)
    assert versions.pinned(uri) == versions.pinned(str(model))
    pin = versions.pin(versions.plain_name(uri), DIGITS)
    assert (versions.pinned(pin), versions.plain_name(pin)) == (DIGITS, versions.plain_name(uri))


@pytest.mark.parametrize(
    "uri",
    [
        "hf://org/name@refs/pr/1",
        "hf://org/name@v1+x",
        "hf://org",
        "https://store.example:8443/a",
        "http://[::1]:8000/m",
        "http://h",
        "s3://",
    ],
)
def test_a_canonical_text_is_read_as_the_same_place_again(uri: str) -> None:
    assert str(ModelUri.parse_prefix(uri)) == uri
    assert ModelUri.parse_prefix(str(ModelUri.parse_prefix(uri))) == ModelUri.parse_prefix(uri)


def test_a_push_to_an_odd_name_is_what_a_host_reads_there(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", layer_bytes=1000)
    place = tmp_path / "a b%23#ü@"
    index = checkpoints.push(model, open_store(place.as_uri()), lambda _: None)
    assert (place / versions.POINTER_NAME).exists()
    source = open_source(versions.pin(place.as_uri(), index.sha256), SETTINGS)
    connection = source.connect()
    assert connection.stat("config.json").n_bytes == (model / "config.json").stat().st_size
    connection.close()
    assert open_store(place.as_uri()).versions() == [versions.pin(place.as_uri(), index.sha256)]


def test_a_function_whose_uri_cannot_be_read_may_use_any_model() -> None:
    uses = Uses(frozenset({("f", "s3://models/victim#new"), ("g", "s3://models/other")}), frozenset())
    assert uses.of_name("s3://models/victim") == ["f"]
    assert uses.of_version("s3://models/victim", DIGITS, newest=False) == ["f"]
    assert uses.of_version("s3://models/victim", DIGITS, newest=True) == ["f"]


def test_a_function_is_found_by_every_spelling_of_the_uri_that_it_names() -> None:
    named = {f"s3://models/a%20b@{DIGITS}", "S3://models/a%20%62/", f"s3://models/a b%40{DIGITS}"}
    uses = Uses(frozenset((f"f{n}", uri) for n, uri in enumerate(sorted(named))), frozenset())
    assert uses.of_name("s3://models/a b") == ["f0", "f1", "f2"]
    assert len(uses.of_version("s3://models/%61%20b/", DIGITS, newest=False)) == 2


def test_a_directory_with_two_names_is_used_by_those_who_name_the_other(tmp_path: Path) -> None:
    (tmp_path / "models" / "victim").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "models")
    uses = Uses(frozenset({("f", (tmp_path / "link" / "victim").as_uri()), ("g", "s3://models/victim")}), frozenset())
    assert uses.of_name((tmp_path / "models" / "victim").as_uri()) == ["f"]
    assert uses.of_name((tmp_path / "models" / "other").as_uri()) == []

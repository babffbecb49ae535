"""The files that say how an embedding model pools: accepted and refused ones, and their way to a store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.embedding_models import write_model
from thaw.checkpoints import checkpoint, pooling
from thaw.cli.model_stores import checkpoints, removal
from thaw.cli.model_stores.stores import open_store
from thaw.errors import ModelCorrupt, ModelUnsupported

ST = "sentence_transformers.models."


def files(pooled: Any = None, *modules: tuple[str, str], missing: str = "") -> dict[str, bytes]:
    kinds = modules or ((f"{ST}Transformer", ""), (f"{ST}Pooling", "1_Pooling"))
    plain = {
        pooling.MODULES_NAME: [{"type": kind, "path": path} for kind, path in kinds],
        pooling.POOLING_NAME: pooled or {"pooling_mode_mean_tokens": True, "include_prompt": True},
    }
    return {name: json.dumps(value).encode() for name, value in plain.items() if name != missing}


@pytest.mark.parametrize(
    ("pooled", "mode"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False, "include_prompt": True}, "CLS"),
        ({"pooling_mode_mean_tokens": True}, "MEAN"),
        ({"pooling_mode_lasttoken": True}, "LAST"),
        ({"pooling_mode": "lasttoken"}, "LAST"),
        ({"pooling_mode": "cls"}, "CLS"),
    ],
)
def test_each_pooling_is_read_by_each_of_its_names(pooled: Any, mode: str) -> None:
    assert pooling.pooling_of(files(pooled).get) == mode


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (files(missing=pooling.MODULES_NAME), "has no modules.json, which says how it pools"),
        (files(missing=pooling.POOLING_NAME), "1_Pooling/config.json, which is not among the model's files"),
        (files({"pooling_mode_mean_sqrt_len_tokens": True}), "asks for the pooling mean_sqrt_len_tokens"),
        (files({"pooling_mode_max_tokens": True}), "asks for the pooling max_tokens"),
        (files({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}), "mean_tokens and cls_token"),
        (files({"pooling_mode_mean_tokens": False}), "asks for the pooling (none)"),
        (files({"pooling_mode": ["cls", "mean"]}), "asks for the pooling"),
        (files(None, (f"{ST}Transformer", "")), "names no pooling"),
        (files(None, (f"{ST}Transformer", ""), (f"{ST}Pooling", "../x")), "has its pooling in ['../x']"),
        (files(None, (f"{ST}Pooling", "1_Pooling"), (f"{ST}Dense", "2_Dense")), "has the module 'sentence_transform"),
        (files(None, ("custom.Pooling", "1_Pooling")), "has the module 'custom.Pooling'"),
    ],
)
def test_a_pooling_that_would_be_guessed_is_refused(found: dict[str, bytes], says: str) -> None:
    with pytest.raises(ModelUnsupported) as refused:
        pooling.pooling_of(found.get)
    assert says in refused.value.message
    assert refused.value.hint


@pytest.mark.parametrize("data", [b"{", b"{}", b"[1]", b'[{"type": 1, "path": ""}]', b"[" * 100_000])
def test_damaged_files_are_called_so(data: bytes) -> None:
    with pytest.raises(ModelCorrupt):
        pooling.pooling_of({pooling.MODULES_NAME: data}.get)


def test_a_push_takes_the_pooling_files_along_and_a_removal_takes_them_away(tmp_path: Path) -> None:
    model, uri = write_model(tmp_path / "model", "qwen3"), f"file://{tmp_path}/store/embed"
    (model / "2_Dense").mkdir()
    (model / "2_Dense" / "config.json").write_text("{}")
    index = checkpoints.push(model, open_store(uri), lambda _: None)
    assert {pooling.POOLING_NAME, pooling.MODULES_NAME, pooling.TEXT_NAME} < {f.name for f in index.files}
    place = checkpoints.newest(open_store(uri))
    checkpoints.verify(place, index, lambda _: None)
    assert pooling.POOLING_NAME in place.objects()
    facts = checkpoints.read_facts(place, checkpoints.read_index(place))
    assert facts.parts is None  # so no scheduler divides it into stages
    assert "2_Dense/config.json" not in facts.files

    (model / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    other = checkpoints.push(model, open_store(uri), lambda _: None)
    assert other.sha256 != index.sha256
    removal.delete(uri, removal_asks_nobody)
    assert list((tmp_path / "store").rglob("*.json")) == []
    assert list((tmp_path / "store").rglob("1_Pooling")) == []


def removal_asks_nobody() -> Any:
    class Nobody:
        def of_name(self, uri: str) -> list[str]:
            return []

        def of_version(self, uri: str, digits: str, *, newest: bool) -> list[str]:
            return []

    return Nobody()


def test_no_other_name_with_a_folder_is_fetched() -> None:
    assert checkpoint.is_fetchable(pooling.POOLING_NAME)
    for name in ("2_Dense/config.json", "1_Pooling/../config.json", "1_Pooling/model.safetensors", "/modules.json"):
        assert not checkpoint.is_fetchable(name)

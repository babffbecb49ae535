"""The functions that share instances."""

from __future__ import annotations

from typing import Any

import pytest

from thaw.action import KIND_LLM, Action, Exec, Limits
from thaw.config import LORA_RANK, parse_llm_config
from thaw.errors import ConfigError
from thaw.ids import ActionName, Namespace
from thaw.pools import is_pool, pool_of

BASE = {"base": "s3://models/base", "adapter": "s3://models/a"}


def function(model: dict[str, Any], name: str = "guest/f", timeout: int = 1000, **config: Any) -> Action:
    parsed = parse_llm_config({"kind": "llm:vllm", "model": model, **config})
    namespace = Namespace(name.partition("/")[0])
    return Action(ActionName(name), namespace, "0.0.7", Exec(KIND_LLM), Limits(timeout), config=parsed)


def test_functions_that_differ_in_their_adapter_have_one_pool() -> None:
    one = function({**BASE, "served_name": "x"}, timeout=5)
    other = function({**BASE, "adapter": "s3://models/b"}, "guest/g")
    assert one.served_by == other.served_by != one.name
    assert pool_of(one) == pool_of(other)


@pytest.mark.parametrize(
    "other",
    [
        function(BASE, "other/f"),
        function({**BASE, "base": "s3://models/other"}),
        function(BASE, engine={"max_model_len": 64}),
        function(BASE, engine={"max_lora_rank": 8}),
        function(BASE, resources={"gpu_memory_mb": 64}),
        function(BASE, scaling={"max_batch": 2}),
    ],
    ids=lambda action: str(action.name),
)
def test_another_namespace_base_or_setting_is_another_pool(other: Action) -> None:
    assert function(BASE).served_by != other.served_by


def test_a_pool_runs_the_base_in_one_stage_with_places_for_adapters() -> None:
    pool = pool_of(function(BASE, scaling={"max_batch": 3}))
    assert pool is not None
    assert pool.config is not None
    assert is_pool(pool)
    assert (pool.config.model.uri, pool.config.model.adapter) == ("s3://models/base", "")
    assert (pool.config.adapter_slots, pool.config.engine.max_lora_rank) == (3, LORA_RANK)
    assert (pool.config.scaling.stages, pool.config.scaling.max_stages) == (1, 1)
    assert (pool.served_by, pool.served_version) == (pool.name, pool.version)


def test_a_function_without_an_adapter_is_served_by_itself() -> None:
    plain = function({"uri": "s3://models/base"})
    assert (plain.served_by, plain.served_version, pool_of(plain)) == (plain.name, "0.0.7", None)
    assert plain.config is not None
    assert plain.config.adapter_slots == 0


@pytest.mark.parametrize(
    ("model", "config", "path", "words"),
    [
        ({"base": "s3://models/base"}, {}, "$.model.adapter", "required but missing"),
        ({"adapter": "s3://models/a"}, {}, "$.model.base", "required but missing"),
        ({**BASE, "uri": "s3://models/base"}, {}, "$.model.base", "it cannot stand beside uri"),
        (BASE, {"scaling": {"stages": 2}}, "$.scaling.stages", "a model with adapters runs in one stage"),
        (BASE, {"scaling": {"max_stages": 2}}, "$.scaling.max_stages", "a model with adapters runs in one stage"),
        (BASE, {"engine": {"max_lora_rank": 9}}, "$.engine.max_lora_rank", "is not one of"),
        ({"uri": "s3://models/base"}, {"engine": {"max_lora_rank": 8}}, "$.engine.max_lora_rank", "no adapter"),
    ],
)
def test_a_config_that_cannot_be_says_which_key_is_wrong(
    model: dict[str, Any], config: dict[str, Any], path: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        function(model, **config)
    assert path in caught.value.message

"""The function config: the schema is the contract, and an error names the path, the value and the fix."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from thaw.config import MOST_INSTANCES, LlmConfig, parse_llm_config, schema
from thaw.errors import ConfigError

MINIMAL: dict[str, Any] = {"kind": "llm:vllm", "model": {"uri": "s3://models/smollm2-135m"}}


def test_a_minimal_config_gets_the_documented_defaults() -> None:
    config = parse_llm_config(MINIMAL)
    assert isinstance(config, LlmConfig)
    assert (config.scaling.keep_alive_s, config.scaling.max_batch, config.transport) == (300.0, 8, "auto")
    assert config.reserve_bytes == 2048 * 1024 * 1024


def test_a_limit_of_fetching_is_in_megabits_and_absent_by_default() -> None:
    assert parse_llm_config(MINIMAL).fetch_bytes_per_s is None
    assert parse_llm_config(MINIMAL | {"resources": {"fetch_mbit": 200}}).fetch_bytes_per_s == 25_000_000
    with pytest.raises(ConfigError, match="fetch_mbit"):
        parse_llm_config(MINIMAL | {"resources": {"fetch_mbit": 0}})


def _allowed_args() -> set[str]:
    """The allowed arguments, read from the engine's source, because importing the engine needs vLLM."""
    source = Path(__file__).parents[2] / "runtime-python/thaw_runtime/engine/vllm/configuration.py"
    assigned = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.Assign)]
    (call,) = (node.value for node in assigned if ast.unparse(node.targets[0]) == "ALLOWED_ARGS")
    return set(ast.literal_eval(call.args[0]))


ALLOWED_ARGS = _allowed_args()


def test_a_deploy_takes_the_arguments_that_the_engine_takes() -> None:
    assert set(schema()["properties"]["engine"]["properties"]["args"]["propertyNames"]["enum"]) == ALLOWED_ARGS
    args = dict.fromkeys(ALLOWED_ARGS, 1)
    assert parse_llm_config(MINIMAL | {"engine": {"args": args}}).engine.args == args


URIS = "s3://bucket/prefix, hf://org/name@revision, http(s)://host/path or file:///absolute/path"
STAGES = "forces the number of stages, 1 to 8; leave it out to let the scheduler decide"
TTFT = "milliseconds to the first token, 1 to 3600000"
KEPT = "instances kept when idle, 0 to 1024; a group of stages counts as one"
STAYS = "seconds an idle instance stays, 0 to 31536000 (a year)"
TIMEOUT = "milliseconds a request may take, cold start included, 100 to 3600000"


@pytest.mark.parametrize(
    ("change", "path", "fix"),
    [
        ({"kind": "llm:other"}, "$.kind", 'the only kind that takes a config is "llm:vllm"'),
        ({"model": {}}, "$.model.uri", f"add it: {URIS}"),
        ({"model": {"uri": "ftp://x"}}, "$.model.uri", URIS),
        ({"model": {"url": "s3://x", "uri": "s3://x"}}, "$.model.url", "known keys: adapter, base, served_name, uri"),
        ({"scaling": {"max_batch": 0}}, "$.scaling.max_batch", "requests one instance runs at once, 1 to 1024"),
        ({"scaling": {"stages": 9}}, "$.scaling.stages", STAGES),
        ({"scaling": {"stages": 2, "keep": 3}}, "$.scaling.keep", "set it to at most 2"),
        ({"engine": {"dtype": "fp4"}}, "$.engine.dtype", "one of auto, float32, float16, bfloat16"),
        ({"slo": {"ttft_ms": 10**400}}, "$.slo.ttft_ms", TTFT),
        ({"slo": {"ttft_ms": 7500.0}}, "$.slo.ttft_ms", TTFT),
        (
            {"scaling": {"max_instances": 10**12}},
            "$.scaling.max_instances",
            "1 to 1024; a group of stages counts as one",
        ),
        ({"scaling": {"min_instances": True}}, "$.scaling.min_instances", KEPT),
        ({"scaling": {"keep_alive_s": math.nan}}, "$.scaling.keep_alive_s", STAYS),
        ({"scaling": {"keep_alive_s": math.inf}}, "$.scaling.keep_alive_s", STAYS),
        (
            {"engine": {"args": {"tensor_parallel_size": 2}}},
            "$.engine.args",
            f"one of {', '.join(sorted(ALLOWED_ARGS))}",
        ),
        ({"limits": {"timeout": "5s"}}, "$.limits.timeout", TIMEOUT),
    ],
)
def test_a_violation_names_its_path_and_the_fix(change: dict[str, Any], path: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_llm_config(MINIMAL | change)
    assert caught.value.path == path
    assert str(caught.value).startswith(f"{path}: ")
    assert caught.value.hint == fix
    assert caught.value.http_status == 400


@pytest.mark.parametrize("plain", [None, [], "x", 3])
def test_what_is_not_an_object_is_refused(plain: object) -> None:
    with pytest.raises(ConfigError, match=r"^\$: "):
        parse_llm_config(plain)


def test_every_number_has_a_least_and_a_most() -> None:
    def numbers(node: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        for name, child in node.get("properties", {}).items():
            yield from numbers(child)
            if child.get("type") in ("integer", "number"):
                yield name, child

    found = dict(numbers(schema()))
    assert [name for name, node in found.items() if not {"minimum", "maximum"} <= node.keys()] == []
    assert {found[name]["maximum"] for name in ("min_instances", "max_instances")} == {MOST_INSTANCES}
    assert parse_llm_config(MINIMAL | {"scaling": {"keep_alive_s": 0.5}}).scaling.keep_alive_s == 0.5

"""Kubernetes accepts the definition of ModelFunction, which accepts the same configs as the config's schema."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kubernetes.api_server import Refusal
from tests.kubernetes.custom_resources import checked
from tests.kubernetes.schema import problems
from thaw.config import parse_llm_config
from thaw.kubernetes.crd import definition, spec_schema

EXAMPLES = Path(__file__).parents[2] / "examples/chat"
CONFIG = {"kind": "llm:vllm", "model": {"uri": "s3://models/tiny"}}
VERSION = definition()["spec"]["versions"][0]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]


def nodes(schema: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield where, schema
    for name, each in schema.get("properties", {}).items():
        yield from nodes(each, f"{where}.{name}")
    if "items" in schema:
        yield from nodes(schema["items"], f"{where}[]")


def test_the_definition_is_what_the_api_describes() -> None:
    assert problems(definition(), "V1CustomResourceDefinition") == []


def test_the_schema_is_structural() -> None:
    """Kubernetes refuses a definition that breaks these rules."""
    for where, node in nodes(SCHEMA):
        assert "type" in node, where
        assert not {"additionalProperties", "propertyNames", "const", "$schema", "$id", "title"} & node.keys(), where


def test_each_of_a_fixed_set_of_values_is_taken() -> None:
    """Each value must have the type of its set."""
    sets = {where: node for where, node in nodes(SCHEMA) if "enum" in node}
    assert {".spec.engine.max_lora_rank", ".spec.kind", ".spec.transport"} <= sets.keys()
    for where, node in sets.items():
        assert [checked(each, node, where) for each in node["enum"]] == node["enum"]


def test_a_rank_of_adapters_is_taken_as_the_config_takes_it() -> None:
    model = {"base": "s3://models/tiny", "adapter": "s3://models/a"}
    spec = checked({"kind": "llm:vllm", "model": model, "engine": {"max_lora_rank": 64}}, spec_schema(), "spec")
    assert parse_llm_config(spec).engine.max_lora_rank == 64


def test_an_engine_argument_is_kept_for_the_gateway_to_judge() -> None:
    args = SCHEMA["properties"]["spec"]["properties"]["engine"]["properties"]["args"]
    assert args["x-kubernetes-preserve-unknown-fields"] is True
    spec = {**CONFIG, "engine": {"args": {"block_size": 16}}}
    assert checked(spec, spec_schema(), "spec")["engine"] == {"args": {"block_size": 16}}


def test_what_a_cluster_completes_is_a_config() -> None:
    spec = checked(CONFIG, spec_schema(), "spec")
    assert spec["scaling"] == {"min_instances": 0}  # /scale needs it to be there
    assert parse_llm_config(spec) == parse_llm_config(CONFIG)


def test_the_cluster_refuses_more_instances_than_there_may_be() -> None:
    (check,) = spec_schema()["properties"]["scaling"]["x-kubernetes-validations"]
    assert check["rule"] == "self.min_instances <= (has(self.max_instances) ? self.max_instances : 8)"
    assert parse_llm_config(CONFIG).scaling.max_instances == 8


@pytest.mark.parametrize(
    "wrong",
    [
        {**CONFIG, "kind": "python:3.11"},
        {"kind": "llm:vllm"},
        {**CONFIG, "model": {"uri": "models/tiny"}},
        {**CONFIG, "scalling": {}},
        {**CONFIG, "scaling": {"min_instances": -1}},
        {**CONFIG, "transport": "pigeon"},
        {**CONFIG, "slo": {"ttft_ms": 1.5}},
    ],
)
def test_what_the_config_refuses_the_cluster_refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=r"\$"):
        parse_llm_config(wrong)
    with pytest.raises(Refusal):
        checked(wrong, spec_schema(), "spec")


def test_each_path_of_scale_and_of_the_columns_is_in_the_schema() -> None:
    known = {where for where, _ in nodes(SCHEMA)}
    columns = {c["jsonPath"].replace('[?(@.type=="Ready")]', "[]") for c in VERSION["additionalPrinterColumns"]}
    assert columns - known == {".metadata.creationTimestamp"}
    assert set(VERSION["subresources"]["scale"].values()) <= known


def test_the_example_is_the_config_of_the_other_example() -> None:
    example = yaml.safe_load((EXAMPLES / "chat.yaml").read_text())
    assert (example["apiVersion"], example["kind"]) == ("thaw.dev/v1", "ModelFunction")
    spec = checked(example["spec"], spec_schema(), "spec")
    assert parse_llm_config(spec) == parse_llm_config(json.loads((EXAMPLES / "chat.json").read_text()))


def test_it_is_printed_for_a_cluster_with_packages_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "thaw.kubernetes.crd"], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(done.stdout) == definition()

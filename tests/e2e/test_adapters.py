"""Functions with adapters of one base model on a whole platform: only they share its instances."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.machine import Machine
from tests.thaw_runtime.adapters import LINEAR, write_adapter, write_base

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

SETTINGS = {
    "engine": {"max_model_len": 128, "dtype": "float32"},
    "resources": {"gpu_memory_mb": 256},
    "scaling": {"max_batch": 2},
}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    made = Machine(tmp_path_factory.mktemp("platform"), dict(os.environ))
    place = tmp_path_factory.mktemp("models")
    try:
        made.up()
        push(made, write_base(place / "base"), "base")
        for seed, name in enumerate(("a", "b", "c", "d"), 1):
            push(made, write_adapter(place / name, seed), name)
        push(made, write_adapter(place / "other", 5, base={**LINEAR, "mlp.up_proj": (96, 64)}), "other")
        yield made
    finally:
        made.down()
    assert made.leftovers() == []


def push(machine: Machine, directory: Path, name: str) -> None:
    machine.thaw("model", "push", str(directory), f"s3://models/{name}")


def put(machine: Machine, name: str, adapter: str, **changes: Any) -> Any:
    model = {"base": "s3://models/base", "adapter": f"s3://models/{adapter}"}
    config = {"kind": "llm:vllm", "model": model, **SETTINGS, **changes}
    return machine.request("PUT", f"/api/v1/namespaces/_/actions/{name}?overwrite=true", json={"config": config})


def ask(machine: Machine, name: str) -> tuple[str, dict[str, Any]]:
    """The answer, and its record."""
    body = {"model": name, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    reply = machine.request("POST", "/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    printed = machine.thaw("activation", "get", reply.headers["X-Openwhisk-Activation-Id"], "--wait", "20").stdout
    return reply.json()["choices"][0]["text"], json.loads(printed[printed.index("{") :])


def fetched_before(machine: Machine, name: str) -> list[bool]:
    """Return for each fetch of an adapter, in order, whether its bytes were already in the host's memory."""
    lines = (machine.state_dir / "logs" / "host-0-fetchd.log").read_text().splitlines()
    events = [json.loads(line) for line in lines if '"fetch_begin"' in line]
    return [e["resident"] for e in events if e["uri"].startswith(f"s3://models/{name}@")]


def annotation(record: dict[str, Any], key: str) -> Any:
    return next((a["value"] for a in record["annotations"] if a["key"] == key), None)


def test_functions_with_adapters_of_one_base_answer_from_one_instance(machine: Machine) -> None:
    for name in ("a", "b", "c"):
        assert put(machine, name, name).status_code == 200
    found = {name: ask(machine, name) for name in ("a", "b", "c", "a")}  # two places, so the third makes one leave
    texts = {name: text for name, (text, _) in found.items()}
    assert len(set(texts.values())) == 3, texts
    assert ask(machine, "a")[0] == texts["a"]
    records = [record for _, record in found.values()]
    assert len({annotation(r, "instance") or r.get("instanceId") for r in records}) == 1, records
    assert {r["name"] for r in records} == {"a", "b", "c"}


def test_an_adapter_is_fetched_while_its_request_waits_for_the_base(machine: Machine) -> None:
    assert put(machine, "cold", "d", engine={**SETTINGS["engine"], "max_model_len": 64}).status_code == 200
    ask(machine, "cold")
    assert fetched_before(machine, "d") == [False, True]


def test_a_pool_is_nobodys_function_and_goes_with_its_last_one(machine: Machine) -> None:
    for name in ("first", "second"):
        assert put(machine, name, "a", scaling={"max_batch": 1}).status_code == 200
    ask(machine, "first")
    listed = machine.request("GET", "/api/v1/namespaces/_/actions").json()
    assert {a["name"] for a in listed} >= {"first", "second"}
    assert not [a for a in listed if a["name"].startswith(".")]
    serving = machine.request("GET", "/api/v1/namespaces/_/actions/second").json()
    assert machine.request("DELETE", "/api/v1/namespaces/_/actions/first").status_code == 200
    ask(machine, "second")
    assert "modelVersion" in json.dumps(serving), "what answers first answers second too"
    assert machine.request("DELETE", "/api/v1/namespaces/_/actions/second").status_code == 200


@pytest.mark.parametrize(
    ("adapter", "changes", "words"),
    [
        ("other", {}, "is no adapter of s3://models/base"),
        ("a", {"engine": {"max_lora_rank": 8}, "scaling": {"stages": 2}}, "a model with adapters runs in one stage"),
        ("base", {}, "holds a model and not an adapter"),
        ("nobody-pushed-this", {}, "nobody-pushed-this"),
    ],
)
def test_a_deploy_says_why_an_adapter_would_not_do(
    machine: Machine, adapter: str, changes: dict[str, Any], words: str
) -> None:
    refused = put(machine, "refused", adapter, **changes)
    assert refused.status_code == 400, refused.text
    assert words in refused.json()["error"]

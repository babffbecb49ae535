"""Functions whose models come from a hub, on a platform with a real engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import requests

from relay.clients.fetch import FetchClient
from tests.e2e import bad_models
from tests.e2e.machine import Machine
from tests.fetchd.harness import wait_until
from tests.hub import LoopbackHub, files_in
from thaw.dev.layout import Layout

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackHub]:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "thaw" / "models"
    files = files_in(bad_models.tiny_checkpoint(tmp_path_factory.mktemp("hub") / "made", cache))
    with LoopbackHub() as running:
        running.add("org/base", files)
        running.add("org/copy", {**files, "README.md": b"the same model"})
        running.add("org/gated", files, opens=frozenset({"t"}), is_gated=True)
        yield running


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory, hub: LoopbackHub) -> Iterator[Machine]:
    made = Machine(tmp_path_factory.mktemp("platform"), dict(os.environ))
    made.env |= {"THAW_MODELS": "hf://org", "HF_ENDPOINT": hub.endpoint, "THAW_FETCHD_ALLOW": "127.0.0.1"}
    with ExitStack() as stack:
        stack.callback(lambda: made.leftovers() == [] or pytest.fail(str(made.leftovers())))
        stack.callback(made.down)
        made.up()
        yield made


def deploy(machine: Machine, name: str, uri: str, query: str = "") -> requests.Response:
    config = {
        "kind": "llm:vllm",
        "model": {"uri": uri},
        "engine": {"max_model_len": 128},
        "resources": {"gpu_memory_mb": 256},
        "scaling": {"keep_alive_s": 0},
    }
    return machine.request("PUT", f"/api/v1/namespaces/_/actions/{name}{query}", json={"config": config})


def answer(machine: Machine, name: str) -> dict[str, Any]:
    """The record of a request that was answered."""
    asked = machine.chat(name, "Hi", max_tokens=2)
    assert asked.status_code == 200, asked.text
    activation_id = asked.headers["X-Openwhisk-Activation-Id"]
    return dict(machine.request("GET", f"/api/v1/namespaces/_/activations/{activation_id}").json())


def version_in(record: dict[str, Any]) -> str:
    return next(str(a["value"]) for a in record["annotations"] if a["key"] == "modelVersion")


def until_idle(machine: Machine, name: str) -> None:
    wait_until(lambda: not machine.request("GET", f"/api/v1/namespaces/_/actions/{name}").json().get("instances"), 60)


def test_a_model_of_a_hub_answers_from_nothing_and_a_new_commit_at_the_next_start(
    machine: Machine, hub: LoopbackHub
) -> None:
    base = hub.repositories["org/base"]
    assert deploy(machine, "base", "hf://org/base").status_code == 200
    first = version_in(answer(machine, "base"))
    assert first.startswith(base.branches["main"])
    commit = base.commit({**base.commits[base.branches["main"]], "generation_config.json": b'{"temperature": 0.5}'})
    until_idle(machine, "base")
    assert version_in(answer(machine, "base")).startswith(commit)


def test_functions_with_one_model_in_two_repositories_hold_it_once(machine: Machine, hub: LoopbackHub) -> None:
    base, copy = hub.repositories["org/base"], hub.repositories["org/copy"]
    copy.commit({**base.commits[base.branches["main"]], "README.md": b"the same model"})
    known = Layout(machine.state_dir).read_platform()
    assert known is not None
    fetchd = FetchClient(str(Path(known.run_dir) / "host-0" / "fetchd.sock"))
    for name, uri in (("one", "hf://org/base"), ("other", "hf://org/copy")):
        assert deploy(machine, name, uri).status_code == 200
        answer(machine, name)
        if name == "one":
            segments = {s.segment_id for s in fetchd.status().segments}
    assert {s.segment_id for s in fetchd.status().segments} == segments


def test_a_gated_model_says_where_to_ask_and_another_organisation_is_refused_when_it_is_deployed(
    machine: Machine, hub: LoopbackHub
) -> None:
    refused = deploy(machine, "gated", "hf://org/gated")
    assert refused.status_code == 400, refused.text
    assert "hf://org/gated is gated" in refused.json()["error"]
    assert f"{hub.endpoint}/org/gated" in refused.json()["hint"]
    assert deploy(machine, "gated", "hf://org/gated", "?force=true").status_code == 200
    failed = machine.chat("gated", "Hi", max_tokens=2)
    error = failed.json()["error"]
    assert (failed.status_code, error["code"]) == (502, "ModelNotFound")
    assert "hf://org/gated is gated" in error["message"]
    assert f"{hub.endpoint}/org/gated" in error["hint"]
    assert deploy(machine, "theirs", "hf://other/base").status_code == 403
    assert deploy(machine, "theirs", "hf://org").status_code == 400

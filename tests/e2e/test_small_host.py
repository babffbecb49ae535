"""A host with hardly any room still says of each model, before it is deployed, whether it would start."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from tests.e2e import bad_models
from tests.e2e.machine import Machine
from thaw.checkpoints.versions import POINTER_NAME
from thaw.model import INDEX_NAME

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
MEMORY_MB = "1920"
"""A stem cell (768) and a check (1024) fit, or a stem cell and an instance (256), but not all three."""
POOL_MB = "128"
"""Two slabs, so every third model finds the pool full."""


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path, dict(os.environ))
    made.env["THAW_MODELS"] = f"file://{tmp_path}"
    try:
        made.up("--memory-mb", MEMORY_MB, "--pool-mb", POOL_MB)
        yield made
    finally:
        made.down()
    assert made.leftovers() == []


def deployed(machine: Machine, name: str, directory: Path) -> requests.Response:
    config = {
        "kind": "llm:vllm",
        "model": {"uri": directory.as_uri()},
        "engine": {"max_model_len": 128},
        "resources": {"gpu_memory_mb": 256},
    }
    return machine.request("PUT", f"/api/v1/namespaces/_/actions/{name}", json={"config": config})


def test_models_come_and_go_and_each_is_checked_before_it_runs(small: Machine, tmp_path: Path) -> None:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "thaw" / "models"
    made = bad_models.tiny_checkpoint(tmp_path / "made", cache)
    for k in range(3):
        bad_models.change_config(made, rms_norm_eps=1e-5 * (k + 1))  # other bytes, which share nothing in the pool
        place = tmp_path / f"m{k}"
        pushed = small.thaw("model", "push", str(made), place.as_uri())
        assert "was not asked" not in pushed.stderr, pushed.stderr
        found = deployed(small, f"chat{k}", place)
        assert (found.status_code, found.json()["preflight"]["checked"]) == (200, True), found.text
        assert small.chat(f"chat{k}", "Hi", max_tokens=2).status_code == 200
        small.thaw("action", "delete", f"chat{k}")  # the next push does not wait until its memory is back
    before = (tmp_path / "m0" / POINTER_NAME).read_bytes()
    broken = Path(shutil.copytree(made, tmp_path / "broken"))
    (broken / INDEX_NAME).unlink(missing_ok=True)
    bad_models.change_config(broken, architectures=["FooForCausalLM"])
    refused = small.thaw("model", "push", str(broken), (tmp_path / "m0").as_uri(), check=False)
    assert "the engine has no architecture FooForCausalLM" in refused.stderr
    assert (refused.returncode, (tmp_path / "m0" / POINTER_NAME).read_bytes()) == (144, before)
    assert deployed(small, "broken", broken).status_code == 400

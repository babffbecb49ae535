"""A real embedding model, pushed and deployed as users do it, answers with the vectors that everybody else gets."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
import pytest

from tests import minilm
from tests.e2e.machine import Machine

pytestmark = [pytest.mark.vllm, pytest.mark.full, pytest.mark.timeout(900)]
LONG = "The ship left the harbour at dawn, and nobody on the quay knew when it would come back. " * 10
"""It has more tokens than the 128 to which the model's tokenizer.json cuts, and fewer than the 256 that it was made for."""
TEXTS = [*minilm.EXAMPLE, "Ärger über 東京", LONG]


@dataclass(frozen=True, slots=True)
class Deployed:
    machine: Machine
    model: Path
    notes: str  # what the deploy said

    def embed(self, given: Any, **more: Any) -> list[list[float]]:
        reply = self.machine.request("POST", "/v1/embeddings", json={"model": "minilm", "input": given, **more})
        assert reply.status_code == 200, reply.text
        return [one["embedding"] for one in reply.json()["data"]]


@pytest.fixture(scope="module")
def deployed(platform: Machine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    model = minilm.obtain(Path(platformdirs.user_cache_dir("thaw")) / "models")
    platform.thaw("model", "push", str(model), "s3://models/minilm")
    config = {"kind": "llm:vllm", "model": {"uri": "s3://models/minilm"}, "engine": {"dtype": "float32"}}
    path = tmp_path_factory.mktemp("minilm") / "config.json"
    path.write_text(json.dumps({**config, "resources": {"gpu_memory_mb": 512, "host_memory_mb": 1024}}))
    said = platform.thaw("action", "create", "minilm", "--config", str(path))
    yield Deployed(platform, model, said.stdout + said.stderr)
    platform.thaw("action", "delete", "minilm")


def cosine(v: list[float], w: list[float]) -> float:
    """Of vectors of length 1."""
    return sum(a * b for a, b in zip(v, w, strict=True))


def test_similarities_are_those_that_sentence_transformers_publishes(deployed: Deployed) -> None:
    found = deployed.embed(list(minilm.EXAMPLE))
    assert [len(v) for v in found] == [minilm.DIMENSIONS] * len(found)
    for i, j in itertools.product(range(len(found)), repeat=2):
        assert round(cosine(found[i], found[j]), 4) == pytest.approx(minilm.SIMILARITIES[i][j], abs=1.5e-4)


def test_vectors_are_those_of_the_transformers_library(deployed: Deployed) -> None:
    for found, wanted in zip(deployed.embed(TEXTS), minilm.reference(deployed.model, TEXTS), strict=True):
        assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) < 2e-5


def test_the_deploy_says_what_the_model_does_and_a_chat_is_refused_at_once(deployed: Deployed) -> None:
    assert "it is an embedding model" in deployed.notes
    reply = deployed.machine.chat("minilm", "Hello")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "model")
    assert "generates no text: use /v1/embeddings. That was so when the function was deployed" in reply.text


def test_a_text_is_never_cut_and_one_beyond_the_model_s_length_is_refused(deployed: Deployed) -> None:
    reply = deployed.machine.request("POST", "/v1/embeddings", json={"model": "minilm", "input": LONG * 2})
    assert (reply.status_code, "maximum context length is 256 tokens" in reply.text) == (400, True), reply.text


def test_an_invocation_has_the_same_vectors(deployed: Deployed) -> None:
    path = "/api/v1/namespaces/_/actions/minilm?blocking=true&result=true"
    reply = deployed.machine.request("POST", path, json={"input": TEXTS[0]})
    assert [one["embedding"] for one in reply.json()["data"]] == deployed.embed(TEXTS[0])

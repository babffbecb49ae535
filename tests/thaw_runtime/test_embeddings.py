"""Real containers with the real engine and tiny embedding models answer with plain vLLM's vectors."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from relay.clients.http_unix import UnixConnection
from tests.embedding_models import FAMILIES, HIDDEN, LAYERS, write_model
from tests.thaw_runtime.conftest import Container, Zygote, forked_container, run_probe
from thaw_runtime.engine.kv_memory import geometry, peak_intermediate_bytes

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TEXTS = ("Hello World", "a longer text ABOUT the sea, and the ships on it", "x", "Ärger mit ß", "hello world")
SHORTER = 16
MAX_BATCHED_TOKENS, TEXTS_AT_ONCE = 2048, 128


def vectors(messages: list[dict[str, Any]]) -> list[list[float]]:
    assert messages[-1]["t"] == "RunFinished", messages[-1]
    found = {i: base64.b64decode(data) for m in messages[:-1] for i, data in m["vectors"]}
    return [list(struct.unpack(f"<{len(data) // 4}f", data)) for _, data in sorted(found.items())]


def assert_equal(found: list[list[float]], wanted: list[list[float]]) -> None:
    assert [len(v) for v in found] == [len(v) for v in wanted]
    assert max(abs(a - b) for v, w in zip(found, wanted, strict=True) for a, b in zip(v, w, strict=True)) < 2e-5


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("models")
    return {family: write_model(made / family, family) for family in FAMILIES}


@pytest.fixture(scope="module")
def plain(directories: dict[str, Path]) -> dict[str, list[list[float]]]:
    """Plain vLLM's vectors of TEXTS."""
    said = run_probe("embedding_reference", *map(str, directories.values()), stdin=json.dumps([TEXTS, 0]))
    lines = [line.removeprefix("REFERENCE ") for line in said.stdout.splitlines() if line.startswith("REFERENCE ")]
    assert len(lines) == len(FAMILIES), said.stderr[-3000:]
    return dict(map(json.loads, lines))


def _need_without_kv(model: Path) -> int:
    """The bytes of an encoder's weights and of its largest batch."""
    header = (model / "model.safetensors").read_bytes()
    weights = len(header) - 8 - int.from_bytes(header[:8], "little")
    shape = geometry(json.loads((model / "config.json").read_text()), LAYERS, last_stage=False)
    return weights + peak_intermediate_bytes(shape, "float32", MAX_BATCHED_TOKENS, TEXTS_AT_ONCE)


@pytest.fixture(scope="module")
def memories() -> dict[str, dict[str, int]]:
    """How each container divided its reserve; ``containers`` fills it."""
    return {}


@pytest.fixture(scope="module")
def containers(
    zygote: Zygote,
    directories: dict[str, Path],
    memories: dict[str, dict[str, int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Container]]:
    """The encoder's reserve has no byte for keys and values."""
    with ExitStack() as stack:
        made = {}
        for family, model in directories.items():
            own = tmp_path_factory.mktemp(family)
            made[family] = stack.enter_context(forked_container(zygote, own, model))
            made[family].http = UnixConnection(made[family].socket, timeout=600)
        for family, container in made.items():
            reserve = _need_without_kv(directories[family]) if family == "bert" else 1 << 30
            status, reply = container.init(dtype="float32", reserve=reserve)
            assert status == 200, reply
            memories[family] = reply["memory"]
        yield made


@pytest.mark.parametrize("family", FAMILIES)
def test_every_form_of_input_gets_plain_vllms_vectors(family: str, containers: Any, plain: Any) -> None:
    container = containers[family]
    found = vectors(container.stream({"input": list(TEXTS)}, "embeddings"))
    assert_equal(found, plain[family])
    assert (found[0] == found[4]) == (family == "bert")  # bert converts all letters to lower case
    assert_equal(vectors(container.stream({"input": TEXTS[1]}, "embeddings")), plain[family][1:2])
    special = ((), (256,)) if family == "qwen3" else ((258,), (259,))
    ids = [*special[0], *TEXTS[2].encode(), *special[1]]
    messages = container.stream({"input": ids}, "embeddings")
    assert messages[-1]["prompt_tokens"] == len(ids)
    # the alphabet's order is that of the bytes, so a byte is its token
    assert_equal(vectors(messages), plain[family][2:3])
    assert_equal(vectors(container.stream({"input": [ids, ids]}, "embeddings")), [plain[family][2]] * 2)


def test_only_a_decoder_gets_memory_for_keys_and_values(containers: Any, memories: dict[str, dict[str, int]]) -> None:
    """The other tests show that the encoder answers without it."""
    assert (memories["bert"]["kv"], memories["bert"]["kv_tokens"]) == (0, 0)
    assert memories["qwen3"]["kv"] > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_two_thousand_texts_are_one_answer_in_their_order(family: str, containers: Any, plain: Any) -> None:
    asked = [TEXTS[i % len(TEXTS)] for i in range(2048)]
    found = vectors(containers[family].stream({"input": asked}, "embeddings"))
    assert_equal(found, [plain[family][i % len(TEXTS)] for i in range(2048)])


def test_shorter_vectors_are_those_of_the_model_that_has_them(containers: Any, plain: Any) -> None:
    found = vectors(containers["qwen3"].stream({"input": TEXTS[0], "dimensions": SHORTER}, "embeddings"))
    cut = plain["qwen3"][0][:SHORTER]
    length = sum(x * x for x in cut) ** 0.5
    assert_equal(found, [[x / length for x in cut]])
    for family, dimensions, says in (
        ("bert", SHORTER, f"this model has vectors of {HIDDEN} dimensions and no shorter ones: leave it out"),
        ("qwen3", HIDDEN + 1, f"this model has vectors of 1 to {HIDDEN} dimensions, not of {HIDDEN + 1}"),
    ):
        status, reply = containers[family].run({"input": "a", "dimensions": dimensions}, "embeddings")
        assert (status, reply["error"]) == (400, f"dimensions: {says}")


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_model_cannot_answer_is_refused_by_name(family: str, containers: Any) -> None:
    container = containers[family]
    for body, says in (
        ({"input": ["a", "b" * 200]}, "input[1] has 20"),
        ({"input": [[1], [9999]]}, "input[1]: token id 9999 is outside the vocabulary of 264"),
        ({"input": [-1]}, "input: token id -1 is outside"),
    ):
        status, reply = container.run(body, "embeddings")
        assert (status, says in reply["error"]) == (400, True), reply
    status, reply = container.run({"prompt": "a"}, "completions")
    assert (status, reply["error"]) == (
        400,
        "model: this model computes embeddings and generates no text: use /v1/embeddings",
    )
    assert len(vectors(container.stream({"input": "still there"}, "embeddings"))) == 1

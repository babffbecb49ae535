"""LoRA adapters in the real engine: each answers as the model does into which it was merged."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relay.clients.http_unix import UnixConnection
from relay.protocol.adapter_messages import ADAPTER_HEADER, CONFIG_BYTES_HEADER, REPLACES_HEADER
from tests.thaw_runtime.adapters import LINEAR, merge, write_adapter, write_base
from tests.thaw_runtime.conftest import STREAM, Forked, Zygote, end, forked_container, frames, llm_init, run_body
from tests.thaw_runtime.fake_descriptor_socket import FakeDescriptorSocket
from thaw.checkpoints.checkpoint import ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME
from thaw.config import ScalingConfig
from thaw.errors import AdapterMissing
from thaw_runtime.engine.kv_memory import adapter_bytes, geometry
from thaw_runtime.engine.stage_memory import slots_bytes

pytestmark = pytest.mark.vllm

N_TOKENS = 24
PROMPT = list(range(40, 110))  # longer than a block, so that a prefix cache has something to keep
BODY = {"prompt": PROMPT, "max_tokens": N_TOKENS, "temperature": 0, "ignore_eos": True}


class Adapted(Forked):
    """A container that takes adapters; ``slots`` of them at once."""

    def __init__(self, zygote: Zygote, model: Path, directory: Path, slots: int = 2) -> None:
        directory.mkdir()
        self.zygote = zygote
        super().__init__(zygote, directory, FakeDescriptorSocket(model, directory / "socket"))
        self.wait_listening()
        init = llm_init(dtype="float32", max_model_len=1024, args={"block_size": 32})
        engine = replace(init.config.engine, max_lora_rank=8)
        config = replace(init.config, engine=engine, scaling=ScalingConfig(max_batch=slots))
        status, reply = self.ask("POST", "/init", {"value": replace(init, config=config)})
        assert status == 200, reply
        self.memory: Mapping[str, int] = reply["memory"]

    def load(self, name: str, adapter: Path, replaces: str = "") -> tuple[int, Any]:
        config, weights = (adapter / ADAPTER_CONFIG_NAME).read_bytes(), (adapter / ADAPTER_WEIGHTS_NAME).read_bytes()
        headers = {ADAPTER_HEADER: name, REPLACES_HEADER: replaces, CONFIG_BYTES_HEADER: str(len(config))}
        http = UnixConnection(self.socket, timeout=120)
        http.request("POST", "/adapter", config + weights, headers)
        reply = http.getresponse()
        answer = reply.status, json.loads(reply.read())
        http.close()
        return answer

    def wait_idle(self) -> None:
        """Wait until a request whose client has gone uses its adapter no longer."""
        deadline = time.monotonic() + 60
        while self.ask("GET", "/health")[1]["inflight"]:
            assert time.monotonic() < deadline

    def hold(self, adapters: Mapping[str, Path], *names: str) -> None:
        """Load these, and nothing else."""
        strangers = [n for n in self.ask("GET", "/adapters")[1]["names"] if n not in names]
        for name in names:
            status, reply = self.load(name, adapters[name], replaces=strangers.pop() if strangers else "")
            assert status == 200, reply

    def answer(self, adapter: str = "", body: Mapping[str, Any] = BODY, **value: Any) -> list[dict[str, Any]]:
        http = UnixConnection(self.socket, timeout=120)
        headers = STREAM | ({ADAPTER_HEADER: adapter} if adapter else {})
        http.request("POST", "/run", json.dumps(run_body(body, "completions", **value)), headers)
        reply = http.getresponse()
        found = list(frames(reply)) if reply.status == 200 else [{**json.loads(reply.read()), "status": reply.status}]
        http.close()
        return found

    def tokens(self, adapter: str = "", body: Mapping[str, Any] = BODY) -> list[int]:
        messages = self.answer(adapter, body)
        assert messages[-1].get("t") == "RunFinished", messages[-1]
        return [m["token_id"] for m in messages[:-1]]

    def close(self) -> None:
        end(self.zygote, self)
        self.descriptor_socket.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def base(place: Path) -> Path:
    return write_base(place / "base")


@pytest.fixture(scope="module")
def adapters(place: Path) -> dict[str, Path]:
    return {
        name: write_adapter(place / name, seed, rank) for name, seed, rank in (("a", 1, 4), ("b", 2, 8), ("c", 3, 2))
    }


@pytest.fixture(scope="module")
def engine(zygote: Zygote, base: Path, place: Path) -> Iterator[Adapted]:
    made = Adapted(zygote, base, place / "engine")
    yield made
    made.close()


@pytest.fixture(scope="module")
def wanted(zygote: Zygote, base: Path, adapters: Mapping[str, Path], place: Path) -> dict[str, list[int]]:
    """The answers of the base and of the merged models, each in an engine that takes no adapters."""
    found = {}
    for name in ("", "a", "b", "c"):
        directory = place / f"plain-{name}"
        directory.mkdir()
        model = base if not name else merge(base, adapters[name], place / f"merged-{name}")
        with forked_container(zygote, directory, model) as container:
            status, reply = container.init(dtype="float32", args={"block_size": 32})
            assert status == 200, reply
            messages = container.stream(BODY)
            assert messages[-1]["t"] == "RunFinished", messages[-1]
            found[name] = [m["token_id"] for m in messages[:-1]]
    assert len({tuple(tokens) for tokens in found.values()}) == 4, "answers that are the same prove nothing"
    return found


def test_each_adapter_answers_as_the_model_it_was_merged_into_in_one_batch_with_the_others_and_the_base(
    engine: Adapted, adapters: Mapping[str, Path], wanted: Mapping[str, list[int]]
) -> None:
    engine.hold(adapters, "a", "b")
    assert engine.ask("GET", "/adapters") == (200, {"names": ["a", "b"]})
    found: dict[tuple[str, int], list[int]] = {}

    def run(name: str, i: int) -> None:
        found[name, i] = engine.tokens(name)

    threads = [threading.Thread(target=run, args=(name, i)) for i in range(3) for name in ("a", "", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {(name, i): wanted[name] for i in range(3) for name in ("a", "", "b")}


def test_an_adapter_takes_the_place_of_another_one_and_comes_back(
    engine: Adapted, adapters: Mapping[str, Path], wanted: Mapping[str, list[int]]
) -> None:
    engine.hold(adapters, "a", "b")
    assert engine.load("c", adapters["c"], replaces="a") == (200, {"ok": True})
    assert [engine.tokens(name) for name in ("c", "b", "")] == [wanted[name] for name in ("c", "b", "")]
    (refused,) = engine.answer("a")
    assert (refused["status"], refused["info"]["code"]) == (AdapterMissing.http_status, "AdapterMissing")
    assert engine.load("a", adapters["a"], replaces="c") == (200, {"ok": True})
    assert engine.tokens("a") == wanted["a"]


def test_an_adapter_never_reads_the_prefix_that_another_one_computed(
    engine: Adapted, adapters: Mapping[str, Path]
) -> None:
    engine.hold(adapters, "a", "b")
    body = BODY | {"prompt": [7, *PROMPT]}  # nobody has computed it yet

    def cached(name: str) -> int:
        ends = [e for e in engine.answer(name, body)[-1]["events"] if e["name"] == "prefill.end"]
        return int(ends[0]["attrs"].get("cached_tokens", 0))

    assert [cached(name) for name in ("a", "b", "")] == [0, 0, 0]
    assert all(cached(name) > 0 for name in ("a", "b", ""))


def test_an_adapter_that_a_request_uses_is_not_replaced(engine: Adapted, adapters: Mapping[str, Path]) -> None:
    engine.hold(adapters, "a", "b")
    http = UnixConnection(engine.socket, timeout=120)
    body = run_body(BODY | {"max_tokens": 900}, "completions")
    http.request("POST", "/run", json.dumps(body), STREAM | {ADAPTER_HEADER: "a"})
    messages = frames(http.getresponse())
    first = next(messages)
    assert first.get("adapter") == "a", first
    status, reply = engine.load("c", adapters["c"], replaces="a")
    assert (status, reply["info"]["code"]) == (500, "InstanceBusy")
    http.close()
    engine.wait_idle()
    assert engine.ask("GET", "/adapters")[1]["names"] == ["a", "b"]


def test_no_adapter_is_evicted_that_nobody_named(
    engine: Adapted, adapters: Mapping[str, Path], wanted: Mapping[str, list[int]]
) -> None:
    engine.hold(adapters, "a", "b")
    status, reply = engine.load("c", adapters["c"])
    assert (status, reply["info"]["message"]) == (500, "all 2 places for adapters are taken")
    assert [engine.tokens(name) for name in ("a", "b")] == [wanted[name] for name in ("a", "b")]


def test_what_does_not_fit_the_base_fails_alone_and_says_so(
    engine: Adapted, adapters: Mapping[str, Path], wanted: Mapping[str, list[int]], place: Path
) -> None:
    engine.hold(adapters, "a", "b")
    status, reply = engine.load("wide", write_adapter(place / "wide", 4, rank=16), replaces="b")
    assert (status, reply["info"]["code"]) == (502, "ModelUnsupported")
    assert "has rank 16, and the function takes adapters of rank 8 at most" in reply["error"]
    assert engine.tokens("a") == wanted["a"]


def test_an_adapter_of_a_smaller_model_is_not_copied_into_a_corner_of_its_place(
    engine: Adapted, adapters: Mapping[str, Path], place: Path
) -> None:
    engine.hold(adapters, "a", "b")
    half = {name: (rows // 2, columns // 2) for name, (rows, columns) in LINEAR.items()}
    status, reply = engine.load("small", write_adapter(place / "small", 5, base=half), replaces="b")
    assert (status, reply["info"]["code"]) == (502, "ModelUnsupported"), reply
    assert "mlp.down_proj is 32 x 64, and that of the model of this instance 64 x 128" in reply["error"]


def test_an_adapter_that_takes_its_own_place_stays(
    engine: Adapted, adapters: Mapping[str, Path], wanted: Mapping[str, list[int]]
) -> None:
    engine.hold(adapters, "a", "b")
    assert engine.load("a", adapters["a"], replaces="a") == (200, {"ok": True})
    assert engine.tokens("a") == wanted["a"]


def test_the_adapters_are_named_in_the_order_of_their_loads(engine: Adapted, adapters: Mapping[str, Path]) -> None:
    for order in (("a", "b"), ("b", "a")):
        engine.hold(adapters, *order)
        assert engine.ask("GET", "/adapters")[1]["names"] == list(order)


def test_a_run_whose_adapter_the_host_does_not_bring_is_refused(engine: Adapted) -> None:
    http = UnixConnection(engine.socket, timeout=120)
    body = run_body(BODY, "completions", adapter="s3://models/a")
    http.request("POST", "/run", json.dumps(body), STREAM)
    refused = json.loads(http.getresponse().read())
    http.close()
    assert "the function has an adapter, and this host brings none" in refused["error"]


def test_an_answer_that_another_version_of_the_adapter_began_is_not_continued(
    engine: Adapted, adapters: Mapping[str, Path]
) -> None:
    engine.hold(adapters, "a", "b")
    (refused,) = engine.answer("a", resume={"output_token_ids": [1, 2], "adapter": "an older one"})
    assert refused["info"]["code"] == "ModelChanged"


def test_the_slots_for_adapters_come_out_of_the_functions_memory(engine: Adapted, base: Path) -> None:
    shape = geometry(json.loads((base / "config.json").read_text()), 2)
    slots = adapter_bytes(shape, "float32", rank=8, slots=2)
    assert slots == 2 * 8 * 4 * 2 * (2 * 128 + 2 * (64 + 32) + 3 * (64 + 128))  # slots, rank, bytes, layers, widths
    assert engine.memory["weights"] > 2 * slots
    init = llm_init(dtype="float32")
    config = replace(
        init.config, engine=replace(init.config.engine, max_lora_rank=8), scaling=ScalingConfig(max_batch=2)
    )
    counted = [slots_bytes(replace(init, config=config), shape, "float32", on_cpu=on_cpu) for on_cpu in (True, False)]
    assert counted == [2 * slots, slots], "a GPU does not hold the host's copies"

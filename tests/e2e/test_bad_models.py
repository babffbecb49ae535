"""A model that cannot run makes its activation fail soon, with the reason, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.conftest import free_port
from tests.e2e import bad_models
from tests.e2e.bad_models import WEIGHTS, Shop
from thaw.cli.model_stores import s3
from thaw.model import INDEX_NAME

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
SOON_S = 30.0
"""The limit for a failure that needs a start of the engine on a busy machine.  Most failures take a tenth of a second.
"""

Refused = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def pushed(shop: Shop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good model with its index, as ``thaw model push`` writes it into a directory."""
    base = tmp_path_factory.mktemp("models")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "thaw" / "models"
    made = bad_models.tiny_checkpoint(base / "made", cache)
    return Path(push(shop, made, f"file://{base}/pushed").removeprefix("file://"))


def push(shop: Shop, directory: Path, uri: str) -> str:
    """Push a model; return the URI of its version."""
    lines = shop.machine.thaw("model", "push", str(directory), uri).stdout.splitlines()
    return next(line.removeprefix("version ") for line in lines if line.startswith("version "))


@pytest.fixture
def model(pushed: Path, tmp_path: Path) -> Path:
    """A copy to damage, with its index."""
    return Path(shutil.copytree(pushed, tmp_path / "model"))


@pytest.fixture
def bare(model: Path) -> Path:
    """A copy without an index, so its bytes were never checked."""
    (model / INDEX_NAME).unlink()
    return model


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return request.node.originalname.removeprefix("test_")[:60]  # type: ignore[no-any-return]


@pytest.fixture
def refused(shop: Shop, name: str) -> Iterator[Refused]:
    """Deploy a URI, ask, and check what holds for all models that cannot run.  It returns the body of the error."""

    def check(uri: str, code: str, *words: str, hint: str = "", **config: object) -> dict[str, Any]:
        shop.deploy(name, uri, **config)
        began = time.monotonic()
        with shop.nothing_left_behind():
            response = shop.ask(name)
            took_s = time.monotonic() - began
        assert took_s < SOON_S
        error: dict[str, Any] = response.json()["error"]
        assert response.status_code == (500 if code == "StoreUnavailable" else 502), response.text
        assert error["code"] == code, error
        assert all(w in error["message"] for w in words), error
        assert hint in error.get("hint", ""), error
        assert error_in_record(shop, response) == (error["message"], error.get("hint"))
        assert shop.ask("chat", max_tokens=1).status_code == 200
        return error

    yield check
    shop.delete(name)


def error_in_record(shop: Shop, response: requests.Response) -> tuple[str, str | None]:
    """The error and its hint, as ``thaw activation get`` shows them."""
    record = shop.record(response.headers["X-Openwhisk-Activation-Id"])
    assert record["response"]["success"] is False
    assert record["statusCode"] in (2, 3)
    return record["response"]["result"]["error"], record["response"]["result"].get("hint")


def test_the_undamaged_model_answers(shop: Shop, pushed: Path) -> None:
    """Otherwise every other test here could pass for another reason."""
    with shop.nothing_left_behind():
        shop.deploy("undamaged", f"file://{pushed}", scaling={"keep_alive_s": 0})
        assert shop.ask("undamaged").status_code == 200
        shop.delete("undamaged")


# ── missing models ────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_unknown_model_uri(refused: Refused) -> None:
    refused("s3://models/nobody-pushed-this", "ModelNotFound", "s3://models/nobody-pushed-this", hint="thaw model push")


def test_a_missing_bucket(refused: Refused) -> None:
    refused("s3://no-such-bucket/m", "ModelNotFound", "s3://no-such-bucket/m", hint="check the uri")


def test_a_uri_that_no_source_serves_is_refused_when_it_is_deployed(shop: Shop) -> None:
    body = {"config": {"kind": "llm:vllm", "model": {"uri": "file://elsewhere/m"}}}
    put = shop.machine.request("PUT", "/api/v1/namespaces/_/actions/elsewhere", json=body)
    assert (put.status_code, "is not a model's uri" in put.json()["error"]) == (400, True), put.text


def test_an_object_that_the_index_names_and_s3_does_not_have(refused: Refused, shop: Shop, model: Path) -> None:
    place = push(shop, model, "s3://models/incomplete").removeprefix("s3://models/")
    assert shop.known is not None
    client = s3.client(shop.known.store_env())
    client.delete_object(Bucket="models", Key=f"{place}/{WEIGHTS}")
    client.close()
    refused("s3://models/incomplete", "ModelNotFound", WEIGHTS, hint="uri")


def test_a_shard_that_is_named_and_not_there(refused: Refused, bare: Path) -> None:
    shards = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (bare / "model.safetensors.index.json").write_text(json.dumps(shards))
    refused(f"file://{bare}", "ModelNotFound", "model-00001-of-00002.safetensors", hint="whole checkpoint")


def test_an_http_store_that_is_down(refused: Refused) -> None:
    """The start waits for a store that restarts, and the error comes before the request's time limit."""
    down = f"http://127.0.0.1:{free_port()}/m"
    said = "no model could be read there"
    refused(down, "StoreUnavailable", said, hint="an operator finds the reason", limits={"timeout": 10_000})


# ── damaged models ────────────────────────────────────────────────────────────────────────────────────────────────


def test_truncated_weights_of_which_the_index_says_more(refused: Refused, model: Path) -> None:
    bad_models.cut(model / WEIGHTS, 1000)
    refused(f"file://{model}", "ModelCorrupt", WEIGHTS, "1000 bytes too early", hint="truncated")


def test_truncated_weights_without_an_index(refused: Refused, bare: Path) -> None:
    bad_models.cut(bare / WEIGHTS, 1)
    refused(f"file://{bare}", "ModelCorrupt", WEIGHTS, "its tensors end at byte", hint="upload it again")


def test_one_wrong_bit_is_caught_by_its_checksum_before_the_engine_sees_it(
    refused: Refused, shop: Shop, model: Path
) -> None:
    bad_models.flip_a_bit(model / WEIGHTS, -5000)
    refused(f"file://{model}", "ModelCorrupt", WEIGHTS, "failed its checksum", hint="push the model again")
    segments = [s for s in shop.fetchd.status().segments if s.uri == f"file://{model}"]
    assert all(s.n_bytes < (model / WEIGHTS).stat().st_size for s in segments), "only the check's small files are there"


def test_one_wrong_bit_in_s3_is_caught_too(refused: Refused, shop: Shop, model: Path) -> None:
    place = push(shop, model, "s3://models/damaged").removeprefix("s3://models/")
    bad_models.flip_a_bit(model / WEIGHTS, 100_000)
    assert shop.known is not None
    client = s3.client(shop.known.store_env())
    client.put_object(Bucket="models", Key=f"{place}/{WEIGHTS}", Body=(model / WEIGHTS).read_bytes())
    client.close()
    refused("s3://models/damaged", "ModelCorrupt", WEIGHTS, "failed its checksum", hint="push the model again")


def test_a_header_whose_offsets_lie_beyond_the_file(refused: Refused, bare: Path) -> None:
    def lie(header: dict[str, Any]) -> None:
        norm = header["model.norm.weight"]
        norm["data_offsets"][1] += 2 * 10**9
        norm["shape"] = [norm["shape"][0] + 10**9]

    bad_models.change_header(bare / WEIGHTS, lie)
    refused(f"file://{bare}", "ModelCorrupt", WEIGHTS)


def test_a_header_whose_shape_is_not_that_of_its_bytes(refused: Refused, bare: Path) -> None:
    bad_models.change_header(bare / WEIGHTS, lambda header: header["model.norm.weight"].update(shape=[63]))
    refused(f"file://{bare}", "ModelCorrupt", "model.norm.weight", "[63]")


def test_a_header_that_claims_to_be_endless(refused: Refused, bare: Path) -> None:
    with (bare / WEIGHTS).open("r+b") as f:
        f.write((2**62).to_bytes(8, "little"))
    refused(f"file://{bare}", "ModelCorrupt", "its header claims", hint="not a safetensors file")


def test_weights_that_are_not_those_of_config_json(refused: Refused, bare: Path) -> None:
    bad_models.change_config(bare, num_hidden_layers=bad_models.LAYERS + 1)
    refused(f"file://{bare}", "ModelCorrupt", "lacks 6", "model.layers.2.")


def test_a_config_json_that_is_not_json(refused: Refused, bare: Path) -> None:
    (bare / "config.json").write_text("{")
    refused(f"file://{bare}", "ModelCorrupt", "config.json is not JSON")


def test_a_tokenizer_that_cannot_be_read(refused: Refused, bare: Path) -> None:
    (bare / "tokenizer.json").write_text("{}")
    refused(f"file://{bare}", "ModelCorrupt", "tokenizer.json")


# ── models that cannot run here ───────────────────────────────────────────────────────────────────────────────────


def test_device_memory_that_is_smaller_than_the_weights(refused: Refused) -> None:
    few = {"gpu_memory_mb": 100}
    refused("s3://models/smollm2-135m", "MemoryTooSmall", " weights", "100 MiB", hint="gpu_memory_mb", resources=few)


def test_device_memory_that_no_host_has(refused: Refused, pushed: Path) -> None:
    much = {"gpu_memory_mb": 10_000_000}
    refused(
        f"file://{pushed}", "MemoryTooSmall", "10000000 MiB", "largest device", hint="gpu_memory_mb", resources=much
    )


def test_a_checkpoint_that_is_not_safetensors(refused: Refused, bare: Path) -> None:
    (bare / WEIGHTS).rename(bare / "pytorch_model.bin")
    refused(f"file://{bare}", "ModelUnsupported", "pytorch_model.bin", hint="safe_serialization")


def test_an_architecture_that_the_engine_does_not_have(refused: Refused, bare: Path) -> None:
    bad_models.change_config(bare, architectures=["NobodyWroteThisForCausalLM"])
    refused(f"file://{bare}", "ModelUnsupported", "NobodyWroteThisForCausalLM", hint="supported models")


# ── other kinds of requests ───────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def damaged(shop: Shop, model: Path, name: str) -> Iterator[str]:
    bad_models.flip_a_bit(model / WEIGHTS, -5000)
    shop.deploy(name, f"file://{model}")
    yield name
    with shop.nothing_left_behind():
        shop.delete(name)


def test_a_stream_ends_with_the_reason(shop: Shop, damaged: str) -> None:
    response = shop.ask(damaged, stream=True)
    body = response.content.decode()
    error = json.loads(body[body.index('{"error"') :].splitlines()[0])["error"]
    assert error["code"] == "ModelCorrupt"
    assert "checksum" in error["message"]
    assert error_in_record(shop, response) == (error["message"], error["hint"])


def test_a_202_ends_in_a_record_with_the_reason(shop: Shop, damaged: str) -> None:
    accepted = shop.http.post(
        f"{shop.machine.url}/api/v1/namespaces/_/actions/{damaged}", json={"prompt": "x"}, timeout=30
    )
    assert accepted.status_code == 202
    result = shop.record(accepted.json()["activationId"])["response"]["result"]
    assert "checksum" in result["error"]
    assert result["hint"]


def test_everybody_who_waits_for_the_same_bad_model_hears_of_it(shop: Shop, damaged: str) -> None:
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(shop.ask, [damaged] * 6))
    assert [a.json()["error"]["code"] for a in answers] == ["ModelCorrupt"] * 6


def test_a_model_that_is_pushed_again_answers_without_a_new_deployment(
    shop: Shop, damaged: str, model: Path, pushed: Path, tmp_path: Path
) -> None:
    assert shop.ask(damaged).status_code == 502
    other = Path(shutil.copytree(pushed, tmp_path / "other"))
    bad_models.change_config(other, rms_norm_eps=1e-6)
    shop.machine.thaw("model", "push", str(other), f"file://{model}")
    assert shop.ask(damaged).status_code == 200


def test_a_model_that_is_replaced_after_it_was_inspected_answers_the_very_first_request(
    shop: Shop, name: str, model: Path, pushed: Path, tmp_path: Path
) -> None:
    with shop.nothing_left_behind():
        shop.deploy(name, f"file://{model}", scaling={"keep_alive_s": 0})
        assert shop.ask(name).status_code == 200
        shop.machine.thaw("action", "delete", name)
    other = Path(shutil.copytree(pushed, tmp_path / "other"))
    bad_models.change_config(other, rms_norm_eps=1e-6)
    with shop.nothing_left_behind():
        shop.deploy(name, f"file://{model}", scaling={"keep_alive_s": 0})
        shop.machine.thaw("model", "push", str(other), f"file://{model}")
        assert shop.ask(name).status_code == 200
        shop.delete(name)


# ── before anything is deployed ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ({"scaling": {"max_batch": 0}}, "$.scaling.max_batch: value is less than the minimum of 1 (got 0)"),
        ({"resources": {"gpu_mem": 1}}, "$.resources.gpu_mem: unknown key (got 1)"),
        ({"model": {}}, "$.model.uri: required but missing (got None)"),
        (
            {"model": {"uri": "ftp://x"}},
            "$.model.uri: value does not match '^(s3|hf|https?|file)://.+' (got 'ftp://x')",
        ),
        ({"engine": {"dtype": "int3"}}, "$.engine.dtype: value is not one of"),
    ],
)
def test_a_config_error_names_path_value_and_fix_and_deploys_nothing(
    shop: Shop, tmp_path: Path, section: dict[str, Any], line: str
) -> None:
    config = tmp_path / "bad.json"
    config.write_text(json.dumps({"kind": "llm:vllm", "model": {"uri": "s3://models/smollm2-135m"}, **section}))
    done = shop.machine.thaw("action", "create", "misconfigured", "--config", str(config), check=False)
    error, hint = done.stderr.splitlines()
    assert error.startswith(f"error: {line}")
    assert hint.startswith("hint: ")
    assert len(hint) > len("hint: ")
    assert done.returncode == 144  # 400 modulo 256, as with wsk
    assert shop.http.get(f"{shop.machine.url}/api/v1/namespaces/_/actions/misconfigured", timeout=30).status_code == 404


def test_what_is_wrong_without_our_cli_is_refused_by_the_gateway_in_the_same_words(shop: Shop) -> None:
    config = {"kind": "llm:vllm", "model": {"uri": "s3://m/m"}, "scaling": {"max_batch": 0}}
    body = {"exec": {"kind": "llm:vllm", "code": "", "binary": False}, "config": config}
    answer = shop.http.put(f"{shop.machine.url}/api/v1/namespaces/_/actions/misconfigured", json=body, timeout=30)
    assert answer.status_code == 400
    assert "$.scaling.max_batch: value is less than the minimum of 1 (got 0): requests" in answer.json()["error"]


def test_hosts_are_listed_while_all_this_goes_on(shop: Shop) -> None:
    assert "host-0" in shop.machine.thaw("host", "list").stdout


# ── what is said before anything runs ─────────────────────────────────────────────────────────────────────────────


def put(shop: Shop, name: str, uri: str, query: str = "", **config: object) -> requests.Response:
    body = {"config": {"kind": "llm:vllm", "model": {"uri": uri}, "engine": {"max_model_len": 128}, **config}}
    path = f"/api/v1/namespaces/_/actions/{name}{query}"
    return shop.machine.request("PUT", path, json=body)


def test_a_model_that_no_start_could_serve_is_refused_when_it_is_deployed(shop: Shop, bare: Path, name: str) -> None:
    bad_models.change_config(bare, architectures=["FooForCausalLM"])
    with shop.nothing_left_behind():
        refused = put(shop, name, f"file://{bare}")
    said = refused.json()
    assert (refused.status_code, said["error"]) == (
        400,
        "This model would not start: the engine has no architecture FooForCausalLM",
    )
    assert "--force" in said["hint"]
    assert shop.machine.request("GET", f"/api/v1/namespaces/_/actions/{name}").status_code == 404
    forced = put(shop, name, f"file://{bare}", "?force=true").json()
    assert forced["preflight"]["refusal"]["code"] == "ModelUnsupported"
    shop.delete(name)


def test_a_bucket_that_does_not_exist_is_told_when_a_function_is_deployed(shop: Shop, name: str) -> None:
    refused = put(shop, name, "s3://no-such-bucket/m")
    assert (refused.status_code, "s3://no-such-bucket/m" in refused.json()["error"]) == (400, True), refused.text


def test_more_context_than_the_model_has_is_cut_and_told(shop: Shop, pushed: Path, name: str) -> None:
    with shop.nothing_left_behind():
        accepted = put(shop, name, f"file://{pushed}", engine={"max_model_len": 4096}, scaling={"keep_alive_s": 0})
        found = accepted.json()["preflight"]
        assert (accepted.status_code, found["checked"], found["maxModelLen"]) == (200, True, 512), accepted.text
        assert found["notes"] == ["the model's context is 512 tokens, so engine.max_model_len is 512 and not 4096"]
        assert shop.ask(name).status_code == 200
        shop.delete(name)


def test_a_push_of_what_would_not_start_leaves_the_name_as_it_was(shop: Shop, pushed: Path, tmp_path: Path) -> None:
    uri, model = f"file://{tmp_path}/named", Path(shutil.copytree(pushed, tmp_path / "made"))
    (model / INDEX_NAME).unlink()
    push(shop, model, uri)
    before = (tmp_path / "named" / "thaw-version.json").read_bytes()
    bad_models.change_config(model, architectures=["BertModel"])
    with shop.nothing_left_behind():
        refused = shop.machine.thaw("model", "push", str(model), uri, check=False)
    assert "has no modules.json" in refused.stderr
    assert "--force" in refused.stderr
    assert (refused.returncode, (tmp_path / "named" / "thaw-version.json").read_bytes()) == (144, before)
    shop.machine.thaw("model", "push", str(model), uri, "--force")
    assert (tmp_path / "named" / "thaw-version.json").read_bytes() != before

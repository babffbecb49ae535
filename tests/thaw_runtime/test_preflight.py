"""The engine's check of a model before it runs: one sentence for each problem that would keep it from starting."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import pytest

from tests.thaw_runtime.conftest import run_probe
from tests.thaw_runtime.tokenizer_cases import byte_level

pytestmark = pytest.mark.vllm

FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**FLOAT8, "strategy": "channel", "dynamic": False},
            "input_activations": {**FLOAT8, "strategy": "token", "dynamic": True},
        }
    },
}
OWN_CODE = {"AutoConfig": "configuration_foo.FooConfig", "AutoModelForCausalLM": "modeling_foo.Foo"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}

MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 128,
    "n_head": 4,
    "n_layer": 2,
    "n_inner": 256,
    "n_positions": 512,
}
LARGE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 10, "num_attention_heads": 16}
YARN = {"rope_type": "yarn", "factor": 40000.0, "original_max_position_embeddings": 512}

BERT = {"architectures": ["BertModel"], "model_type": "bert", "num_key_value_heads": None, "type_vocab_size": 2}
POOLING = {
    "modules.json": [
        {"type": "sentence_transformers.models.Transformer", "path": ""},
        {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
    ],
    "1_Pooling/config.json": {"pooling_mode_mean_tokens": True},
}

REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "an architecture that the engine does not have": (
        {"config": {"architectures": ["FooForCausalLM"]}},
        "ModelUnsupported",
        "the engine has no architecture FooForCausalLM",
    ),
    "a name that is no name": (
        {"config": {"architectures": ["\x1b]0;hi\x07" + "A" * 500_000]}},
        "ModelUnsupported",
        "the engine has no architecture ?]0;hi?" + "A" * 192 + "…",
    ),
    "an architecture that is no text": (
        {"config": {"architectures": [{}]}},
        "ModelUnsupported",
        "the model's config.json does not list its architectures by name",
    ),
    "architectures that are no list": (
        {"config": {"architectures": "LlamaForCausalLM"}},
        "ModelUnsupported",
        "the model's config.json does not list its architectures by name",
    ),
    "a long text where a number belongs": (
        {"config": {"hidden_size": "m" * 500_000}},
        "InitFailed",
        "config.json cannot be used: Field 'hidden_size' expected int, got str (value: '" + "m" * 220 + "…",
    ),
    "adapters of a model with experts": (
        {"config": MIXTRAL, "max_lora_rank": 16},
        "ModelUnsupported",
        "MixtralForCausalLM takes no adapters: it has experts, whose adapters were not tried",
    ),
    "adapters of a model for which vLLM has none": (
        {"config": GPT2, "max_lora_rank": 16},
        "ModelUnsupported",
        "GPT2LMHeadModel takes no adapters: vLLM has no adapters for it",
    ),
    "a model_type that Transformers does not know": (
        {"config": {"model_type": "foo"}},
        "ModelUnsupported",
        "The checkpoint you are trying to load has model type `foo` but Transformers does not recognize this "
        "architecture.",
    ),
    "code that comes with the checkpoint": (
        {"config": {"architectures": ["FooForCausalLM"], "model_type": "foo", "auto_map": OWN_CODE}},
        "ModelUnsupported",
        "The architecture FooForCausalLM is code that the checkpoint brings itself (auto_map), and Thaw runs no code of "
        "a checkpoint",
    ),
    "a configuration whose class comes with the checkpoint": (
        {"config": {"model_type": "foo", "auto_map": OWN_CODE}},
        "ModelUnsupported",
        "The configuration of this model is code that the checkpoint brings itself (auto_map), and Thaw runs no code of "
        "a checkpoint",
    ),
    "an encoder that does not say how it pools": (
        {"config": {"architectures": ["BertModel"], "model_type": "bert"}},
        "ModelUnsupported",
        "the model computes embeddings and has no modules.json, which says how it pools its tokens",
    ),
    "a decoder without the file of its pooling": (
        {"config": {}, "files": {"modules.json": POOLING["modules.json"]}},
        "ModelUnsupported",
        "modules.json names 1_Pooling/config.json, which is not among the model's files",
    ),
    "an encoder that classifies": (
        {"config": {**BERT, "architectures": ["BertForSequenceClassification"]}, "files": POOLING},
        "ModelUnsupported",
        "the model has no embeddings of texts (classify, token_classify), and Thaw serves models that generate text or "
        "embed it",
    ),
    "an embedding model in two stages": (
        {"config": {}, "files": POOLING, "stages": 2},
        "ModelUnsupported",
        "an embedding model runs in one stage",
    ),
    "a model of pictures": (
        {"config": {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}},
        "ModelUnsupported",
        "LlavaForConditionalGeneration reads pictures or sound beside text, and Thaw serves models of text alone",
    ),
    "a state-space model": (
        {"config": {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}},
        "ModelUnsupported",
        "the engine cannot compute this model: it has no kernel selective_scan_fwd for it on a CPU",
    ),
    "a model with some state-space layers": (
        {"config": {"architectures": ["JambaForCausalLM"], "model_type": "jamba"}},
        "ModelUnsupported",
        "the engine cannot compute this model: it has no kernel selective_scan_fwd for it on a CPU",
    ),
    "FP8 for which a CPU has no kernel": (
        {"config": {"quantization_config": FP8}},
        "ModelUnsupported",
        "the engine cannot compute fp8 weights on a CPU: it has no kernel static_scaled_fp8_quant for it",
    ),
    "FP8 that the function asks for": (
        {"config": {}, "args": {"quantization": "fp8"}},
        "ModelUnsupported",
        "the engine cannot compute fp8 weights on a CPU: it has no kernel static_scaled_fp8_quant for it",
    ),
    "bitsandbytes": (
        {"config": {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}},
        "ModelUnsupported",
        "the engine cannot compute bitsandbytes weights on a CPU: Unknown quantization method: bitsandbytes",
    ),
    "a config.json with a wrong type": (
        {"config": {"hidden_size": "many"}},
        "InitFailed",
        "config.json cannot be used: Field 'hidden_size' expected int, got str (value: 'many')",
    ),
    "heads that do not divide the width": (
        {"config": {"num_attention_heads": 5}},
        "InitFailed",
        "config.json cannot be used: The hidden size (128) is not a multiple of the number of attention heads (5).",
    ),
    "an engine argument that is none": (
        {"config": {}, "args": {"foo": 1}},
        "InitFailed",
        "engine.args.foo cannot be set here",
    ),
    "more weights than memory": (
        {"config": LARGE, "weight_bytes": 1200 << 20},
        "MemoryTooSmall",
        "the model needs 1557 MiB (1147 weights, 407 intermediates, 4 for one request of 256 tokens) and the worker has "
        "1024 MiB",
    ),
    "more weights than memory however they are stored": (
        {"config": {}, "weight_bytes": 1 << 31},
        "MemoryTooSmall",
        "the model needs 1085 MiB (1025 weights, 60 intermediates, 1 for one request of 256 tokens) and the worker has "
        "1024 MiB",
    ),
}
ACCEPTED: dict[str, tuple[dict[str, Any], int, list[str]]] = {
    "a plain model": ({"config": {}}, 256, []),
    "code beside an architecture that the engine has": ({"config": {"auto_map": OWN_CODE}}, 256, []),
    "a model that takes adapters": ({"config": {}, "max_lora_rank": 16}, 256, []),
    "FP8 for which a CPU has a kernel": ({"config": {"quantization_config": COMPRESSED}}, 256, []),
    "weights of four bytes of which config.json does not say so": (
        {"config": {"torch_dtype": None}, "weight_bytes": 1600 << 20},
        256,
        [],
    ),
    "weights of four bytes of which config.json says that they have two": (
        {"config": {"torch_dtype": "bfloat16"}, "weight_bytes": 1600 << 20},
        256,
        [],
    ),
    "a context whose tables of positions would fill the host": (
        {"config": {"max_position_embeddings": 20_000_000}, "bound": 1},
        256,
        [],
    ),
    "an encoder that says how it pools": ({"config": BERT, "files": POOLING}, 256, []),
    "a decoder that says how it pools": ({"config": {}, "files": POOLING}, 256, []),
    "less context than asked for": (
        {"config": {"max_position_embeddings": 64}},
        64,
        ["the model's context is 64 tokens, so engine.max_model_len is 64 and not 256"],
    ),
}


if platform.machine() == "x86_64" and " avx512f" not in Path("/proc/cpuinfo").read_text():
    REFUSED["GPTQ, for which vLLM has no kernel without AVX-512"] = (
        {"config": {"quantization_config": GPTQ}},
        "ModelUnsupported",
        "the engine cannot compute gptq weights on a CPU: it has no kernel cpu_gemm_wna16 for it",
    )
else:
    ACCEPTED["GPTQ"] = ({"config": {"quantization_config": GPTQ}}, 256, [])


LARGE_TEXT = {
    "tokenizer.json": byte_level(n_more=60_000),
    "tokenizer_config.json": {"chat_template": "<{{ messages[0].content }}>"},
}
READ: dict[str, tuple[dict[str, Any], str | None]] = {
    "a tokenizer": ({"config": {}, "files": LARGE_TEXT, "bound": 1}, "<Hello!>"),
    "a tokenizer that brings its code": (
        {"config": {}, "files": LARGE_TEXT | {"tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["t.T", None]}}}},
        None,
    ),
    "no tokenizer": ({"config": {}}, None),
}
UNCHECKED: dict[str, dict[str, Any]] = {
    "tables of positions beyond the bound of memory": {"config": {"rope_scaling": YARN}, "bound": 1},
    "a quantised model beyond the bound of memory": {
        "config": {**LARGE, "num_hidden_layers": 60, "quantization_config": GPTQ},
        "bound": 1,
    },
}


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    """The answers to all cases, from one process that imports the engine once."""
    cases = {name: case for name, (case, *_) in {**REFUSED, **ACCEPTED, **READ}.items()} | UNCHECKED
    done = run_probe("preflight_probe", stdin=json.dumps(cases))
    lines = [line.removeprefix("ANSWER ") for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert len(lines) == len(cases), done.stderr[-3000:]
    return dict(json.loads(line) for line in lines)


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_start_could_serve_is_refused_with_a_sentence_and_the_next_step(name: str, said: Any) -> None:
    _, code, message = REFUSED[name]
    found = said[name]
    assert (found["code"], found["message"]) == (code, message)
    assert found["hint"]
    assert found["left"] == []


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_runs_is_accepted_with_what_will_be_different(name: str, said: Any) -> None:
    _, max_model_len, notes = ACCEPTED[name]
    found = said[name]
    assert (found["code"], found.get("max_model_len"), found.get("notes")) == ("", max_model_len, notes), found
    assert found["engine"].startswith("vLLM ")
    assert found["left"] == []


@pytest.mark.parametrize("name", READ)
def test_a_tokenizer_that_vllm_can_read_is_read_and_no_other_refuses_the_model(name: str, said: Any) -> None:
    found = said[name]
    assert (found["code"], found.get("prompt"), found["left"]) == ("", READ[name][1], []), found


@pytest.mark.parametrize("name", UNCHECKED)
def test_memory_that_a_check_may_not_take_refuses_nothing(name: str, said: Any) -> None:
    found = said[name]
    assert found["code"] == "PlatformError", found
    assert found["message"] == "the model, built empty, takes more memory than a check may"
    assert found["left"] == []

"""The engine's check of a checkpoint with all of its tensors: is it the model's, and can the model compute, and in how
many stages?"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.thaw_runtime.conftest import run_probe
from tests.thaw_runtime.families import ALL_ATTENTION, FAMILIES, ONE_STAGE, STATEFUL

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

LAYER = "model.layers.2."
ONE_WORKER_FIRST = "the model runs in one stage: "
STATE = "its layers keep a state, and a pipeline passes on keys and values alone"
PUSH_AGAIN = "push the whole checkpoint again, or correct its config.json"

LIMITED: dict[str, tuple[dict[str, Any], str]] = {
    "layers that keep a state": ({"family": "granitemoehybrid"}, STATE),
    "a convolution as its state": ({"family": "lfm2"}, STATE),
    "a state and no attention": ({"family": "mamba2"}, STATE),
    "no pipelines in vLLM": (
        {"family": "gemma3n"},
        "the engine cannot compute stage 1 of 3 of this model: NotImplementedError: Pipeline parallelism is not "
        "supported for this model. Supported models implement the `SupportsPP` interface.",
    ),
    "a head tied to an embedding that a stage lacks": (
        {"family": "ernie4_5_moe"},
        "the engine cannot compute stage 1 of 3 of this model: AttributeError: 'PPMissingLayer' object has no attribute "
        "'tie_weights'",
    ),
    "a norm without weights before the layers": (
        {"family": "nanochat"},
        "the engine cannot compute stage 1 of 3 of this model: its decoder has a step without weights (TPAwareRMSNorm), "
        "which every stage would do",
    ),
}
SEVERAL = {name: {"family": name} for name in ("llama", "gpt_oss", "minicpm3", "olmo", "opt")}
"""GPT-OSS has other names for its modules than the checkpoint, MiniCPM3 no residual; OLMo's norm has no weights, but
its library says to which stage it belongs."""
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a missing tensor": (
        {"family": "qwen3", "without": [f"{LAYER}mlp.down_proj.weight"]},
        "ModelCorrupt",
        f"the checkpoint lacks {LAYER}mlp.down_proj.weight, or a part of it, which the model has by its config.json",
    ),
    "a missing part of joined tensors": (
        {"family": "qwen3", "without": [f"{LAYER}self_attn.k_proj.weight"]},
        "ModelCorrupt",
        f"the checkpoint lacks {LAYER}self_attn.qkv_proj.weight, or a part of it, which the model has by its config.json",
    ),
    "a head that is neither there nor tied": (
        {"family": "qwen3", "without": ["lm_head.weight"]},
        "ModelCorrupt",
        "the checkpoint lacks lm_head.weight, or a part of it, which the model has by its config.json",
    ),
    "a missing expert": (
        {"family": "qwen3_moe", "without": [f"{LAYER}mlp.experts.3.up_proj.weight"]},
        "ModelCorrupt",
        f"the checkpoint lacks {LAYER}mlp.experts.routed_experts.w13_weight, or a part of it, which the model has by its "
        "config.json",
    ),
    "names without their prefix": (
        {"family": "qwen3", "renamed": ["model.", ""]},
        "ModelCorrupt",
        "the checkpoint's tensor embed_tokens.weight, BF16 [512, 128], does not fit the model: ValueError: There is no "
        "module or parameter named 'embed_tokens' in Qwen3ForCausalLM.",
    ),
    "a narrower model than the checkpoint": (
        {"family": "qwen3", "config": {"intermediate_size": 192}},
        "ModelCorrupt",
        "the checkpoint's tensor model.layers.0.mlp.down_proj.weight, BF16 [128, 256], is larger than the one that the "
        "model has by its config.json",
    ),
    "a wider model than the checkpoint": (
        {"family": "qwen3", "config": {"intermediate_size": 512}},
        "ModelCorrupt",
        "the checkpoint's tensor model.layers.0.mlp.down_proj.weight, BF16 [128, 256], does not fit the model: ",
    ),
    "a choice of experts that this processor's router does not have": (
        {"family": "minimax_m2"},
        "ModelUnsupported",
        "the engine cannot compute this model: ",
    ),
    "a type that the kernel does not take": (
        {"family": "qwen3_next", "dtype": "float32"},
        "ModelUnsupported",
        "the engine cannot compute this model: AssertionError: CPU GDN attention requires BF16.",
    ),
    "stages for a model that keeps a state": (
        {"family": "granitemoehybrid", "stages": 2},
        "ModelUnsupported",
        f"the model cannot run in 2 stages: {STATE}",
    ),
    "stages for a model without pipelines": (
        {"family": "gemma3n", "stages": 2},
        "ModelUnsupported",
        "the model cannot run in 2 stages: the engine cannot compute stage 1 of 2 of this model: ",
    ),
}
OTHERS = {"qwen3_next": {"family": "qwen3_next", "dtype": "bfloat16"}, "sees": {"family": "mistral3"}}


@pytest.fixture(scope="module")
def answers() -> Mapping[str, dict[str, Any]]:
    limited = {name: case for name, (case, _) in LIMITED.items()}
    return ask({**limited, **SEVERAL, **{name: case for name, (case, _, _) in REFUSED.items()}, **OTHERS})


def ask(cases: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    whole = {name: {"dtype": "float32", **case} for name, case in cases.items()}
    done = run_probe("preflight_probe", stdin=json.dumps(whole))
    lines = [line.removeprefix("ANSWER ") for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    found: dict[str, dict[str, Any]] = dict(map(json.loads, lines))
    assert found.keys() == cases.keys(), done.stderr[-3000:]
    return found


@pytest.mark.parametrize("name", LIMITED)
def test_a_model_that_cannot_be_divided_runs_in_one_stage_and_a_note_says_why(
    answers: Mapping[str, dict[str, Any]], name: str
) -> None:
    said = answers[name]
    assert (said["code"], said.get("most_stages"), said.get("left")) == ("", 1, [])
    assert said["notes"] == [ONE_WORKER_FIRST + LIMITED[name][1]]


@pytest.mark.parametrize("name", SEVERAL)
def test_a_model_whose_stages_compute_may_have_several(answers: Mapping[str, dict[str, Any]], name: str) -> None:
    said = answers[name]
    assert (said["code"], said.get("most_stages"), said.get("notes")) == ("", 0, [])


@pytest.mark.parametrize("name", REFUSED)
def test_a_checkpoint_that_would_not_answer_is_refused(answers: Mapping[str, dict[str, Any]], name: str) -> None:
    _, code, begin = REFUSED[name]
    assert answers[name]["code"] == code
    assert answers[name]["message"].startswith(begin)
    if code == "ModelCorrupt":
        assert answers[name]["hint"] == PUSH_AGAIN


def test_the_language_model_of_one_that_sees_is_tried_alone_and_a_note_says_so(
    answers: Mapping[str, dict[str, Any]],
) -> None:
    said = answers["sees"]
    assert (said["code"], said["most_stages"]) == ("", 0)
    assert said["notes"] == [
        "the model also reads pictures or sound; its language model is served, which answers text alone"
    ]


def test_a_kernel_that_takes_bfloat16_alone_gets_it(answers: Mapping[str, dict[str, Any]]) -> None:
    assert answers["qwen3_next"]["code"] == ""


def test_the_same_family_without_a_state_is_tried_in_stages() -> None:
    assert set(ALL_ATTENTION["layer_types"]) == {"attention"}
    (said,) = ask({"all attention": {"family": "all_attention"}}).values()
    assert said["code"] == ""
    assert STATE not in said["notes"][0]


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
OF_GPTQ = ("qweight", "scales", "qzeros")


def test_a_quantised_checkpoint_without_one_of_its_tensors_is_refused() -> None:
    """vLLM would load it and answer, with whatever was in the memory of the layer."""
    quantised = {"family": "qwen3", "gptq": GPTQ, "dtype": "bfloat16"}
    lacking = {name: {**quantised, "without": [f"{LAYER}mlp.down_proj.{name}"]} for name in OF_GPTQ}
    joined = {"k": {**quantised, "without": [f"{LAYER}self_attn.k_proj.qweight"]}}
    found = ask({"whole": quantised, "without offsets": no_order(quantised), **lacking, **joined})
    assert {found.pop("whole")["code"], found.pop("without offsets")["code"]} <= {"", "ModelUnsupported"}
    assert {name: said["code"] for name, said in found.items()} == dict.fromkeys(found, "ModelCorrupt")
    assert found["k"]["message"].startswith(f"the checkpoint lacks {LAYER}self_attn.qkv_proj.qweight, or a part of it")


def no_order(case: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint whose every layer lacks the order of its inputs, as many do."""
    layers = [f"model.layers.{i}." for i in range(8)]
    parts = ("mlp.gate", "mlp.up", "mlp.down", "self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o")
    return {**case, "without": [f"{layer}{part}_proj.g_idx" for layer in layers for part in parts]}


MADE_IF_GIVEN = "phi", "lm_head.bias"
"""vLLM's Transformers backend gives the head a bias only if the checkpoint has one, so nothing tells that it lacks."""


@pytest.mark.full
@pytest.mark.parametrize("family", [*FAMILIES, *STATEFUL])
def test_every_whole_checkpoint_is_accepted_and_none_that_lacks_a_tensor(family: str) -> None:
    names = [name for name in tensor_names(family) if (family, name) != MADE_IF_GIVEN]
    lacking = {f"without {name}": {"family": family, "without": [name]} for name in names[:: max(1, len(names) // 24)]}
    found = ask({"whole": {"family": family}, **lacking})
    whole = found.pop("whole")
    assert (whole["code"], whole.get("most_stages")) == ("", int(family in (*ONE_STAGE, *STATEFUL)))
    assert {name: said["code"] for name, said in found.items()} == dict.fromkeys(found, "ModelCorrupt")


def tensor_names(family: str) -> Sequence[str]:
    (said,) = ask({"names": {"family": family, "only_names": True}}).values()
    names: list[str] = said["names"]
    return names

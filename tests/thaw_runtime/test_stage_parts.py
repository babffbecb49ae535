"""The tensors and modules of a stage, when its segment or its family's skeleton has more."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from relay.protocol.messages import LlmInit, StageShape
from tests.thaw_runtime.conftest import llm_init
from thaw.errors import InitFailed
from thaw.model import TensorInfo
from thaw.plan import StageRole
from thaw_runtime.pipeline.stage_parts import StagePart

LLAMA = ("model.embed_tokens.weight", *(f"model.layers.{i}.mlp.weight" for i in range(4)), "model.norm.weight")
GPT2 = ("wte.weight", "wpe.weight", *(f"h.{i}.mlp.weight" for i in range(4)), "ln_f.weight")
BOUNDS = ((0, 1), (1, 3), (3, 4))


def offered(names: tuple[str, ...]) -> tuple[TensorInfo, ...]:
    """Tensors of 8 bytes each, in the order of a file."""
    return tuple(TensorInfo(name, "model.safetensors", 8 * i, 8, "F32", (2,)) for i, name in enumerate(names))


def part(stage: int) -> StagePart:
    return StagePart(stage, 3, BOUNDS)


def names(stage: int, tensors: tuple[TensorInfo, ...]) -> list[str]:
    return [t.name for t in part(stage).tensors(tensors)]


@pytest.mark.parametrize("model", [LLAMA, (*LLAMA, "lm_head.weight"), GPT2], ids=["tied", "untied", "gpt2"])
def test_every_tensor_is_some_stages_and_a_tied_embedding_two_stages(model: tuple[str, ...]) -> None:
    loaded = [name for stage in range(3) for name in names(stage, offered(model))]
    tied = [] if "lm_head.weight" in model else [model[0]]
    assert sorted(loaded) == sorted([*model, *tied])


def test_what_a_full_worker_fetches_later_is_loaded_then_and_not_now() -> None:
    whole = offered(LLAMA)
    for stage in range(3):
        own, rest = part(stage).tensors(whole), part(stage).rest(whole)
        assert part(stage).tensors(own) == own
        assert sorted([*own, *rest], key=lambda t: t.offset) == list(whole)


def test_of_a_whole_skeleton_a_stage_computes_what_it_has_the_weights_of() -> None:
    modules = ("model.embed_tokens", *(f"model.layers.{i}.mlp" for i in range(4)), "model.norm", "lm_head")
    whole = offered((*LLAMA, "lm_head.weight"))
    computed = [[m for m in modules if part(k).computes(m, part(k).tensors(whole))] for k in range(3)]
    assert computed == [list(modules[:2]), list(modules[2:4]), list(modules[4:])]


def test_a_tied_embedding_is_computed_with_at_both_ends_of_whole_skeletons() -> None:
    modules = ("model.embed_tokens", "model.norm", "lm_head")
    computed = [[m for m in modules if part(k).computes(m, part(k).tensors(offered(LLAMA)))] for k in range(3)]
    assert computed == [["model.embed_tokens"], [], list(modules)]


def test_a_worker_is_full_where_the_shapes_of_the_stages_say_so() -> None:
    shapes = tuple(
        replace(s, role=StageRole.FULL if k else StageRole.LOW) for k, s in enumerate(init(BOUNDS, 0).stages)
    )
    assert [StagePart.of(replace(init(BOUNDS, k), stages=shapes)).full for k in range(3)] == [False, True, True]


def test_a_whole_model_has_everything_that_was_offered() -> None:
    whole = offered((*LLAMA, "strange.weight"))
    assert StagePart(0, 1, ((0, 0),)).tensors(whole) == whole


def test_modules_that_only_another_stage_calls_are_not_needed() -> None:
    modules = ("transformer.wte", "transformer.wpe", "transformer.ln_f", "lm_head")
    needed = [[m for m in modules if part(k).needs_module(m, part(k).tensors(offered(GPT2)))] for k in range(3)]
    assert needed == [["transformer.wte", "transformer.wpe"], [], ["transformer.wte", "transformer.ln_f", "lm_head"]]


def init(bounds: tuple[tuple[int, int], ...], stage: int) -> LlmInit:
    shapes = tuple(StageShape(b, 1, 1) for b in bounds)
    return replace(llm_init(), stage=stage, n_stages=3, layers=BOUNDS[stage], stages=shapes)


def test_stages_that_do_not_follow_one_another_are_refused() -> None:
    assert StagePart.of(init(BOUNDS, 1)) == part(1)
    assert all(a[1] == b[0] for a, b in pairwise(BOUNDS))
    for wrong in ((), BOUNDS[:2], ((0, 1), (2, 3), (3, 4)), ((0, 1), (1, 2), (2, 4)), ((0, 1), (1, 1), (1, 4))):
        with pytest.raises(InitFailed, match="stage 1 of 3 has layers"):
            StagePart.of(init(wrong, 1))

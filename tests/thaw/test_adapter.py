"""The check whether an adapter fits its base model, by the names and shapes of their tensors."""

from __future__ import annotations

import re
from typing import Any

import pytest

from thaw.checkpoints import adapter
from thaw.errors import ModelUnsupported
from thaw.model import TensorInfo


def tensors(**shapes: tuple[int, ...]) -> list[TensorInfo]:
    return [TensorInfo(name.replace("__", "."), "f", 0, 0, "F32", shape) for name, shape in shapes.items()]


BASE = tensors(model__layers__0__q__weight=(64, 32), packed__qweight=(8, 8))
Q = "base_model__model__model__layers__0__q"


def check(**shapes: tuple[int, ...]) -> None:
    adapter.check("s3://m/a", tensors(**shapes), "s3://m/base", BASE, max_rank=16)


def change(module: str = Q, *, a: tuple[int, ...] = (4, 32), b: tuple[int, ...] = (64, 4)) -> dict[str, Any]:
    return {f"{module}__lora_A__weight": a, f"{module}__lora_B__weight": b}


def test_an_adapter_of_its_base_is_taken() -> None:
    default = {f"{Q}__lora_A__default__weight": (16, 32), f"{Q}__lora_B__default__weight": (64, 16)}
    check(**default, **change("base_model__model__packed", a=(4, 9), b=(9, 4)))


@pytest.mark.parametrize(
    ("shapes", "message", "hint"),
    [
        ({}, "changes nothing", "save the adapter again"),
        (
            {f"{Q}__lora_A__weight": (4, 32)},
            "only one half of its change to model.layers.0.q",
            "save the adapter again",
        ),
        (
            change(a=(32, 32), b=(64, 32)),
            "has rank 32, and the function takes adapters of rank 16 at most",
            "set engine.max_lora_rank to at least 32",
        ),
        (
            change(a=(4, 48)),
            "is no adapter of s3://m/base: its model.layers.0.q is 64 x 48, and that of s3://m/base 64 x 32",
            "model.base",
        ),
        (
            change(a=(4, 64), b=(32, 4)),
            "its model.layers.0.q is 32 x 64, and that of s3://m/base 64 x 32",
            "model.base",
        ),
        (change(b=(64, 8)), "have the ranks 4 and 8", ""),
        (change("base_model__model__deeper"), "it changes deeper, which s3://m/base does not have", "model.base"),
        (change("base_model__model__lm_head"), "adapters of embeddings and heads are not taken", "merge it"),
        ({f"{Q}__lora_magnitude_vector": (4,)}, "is no part of a plain LoRA adapter", "merge it"),
    ],
)
def test_one_that_does_not_fit_says_why_and_what_helps(
    shapes: dict[str, tuple[int, ...]], message: str, hint: str
) -> None:
    with pytest.raises(ModelUnsupported, match=re.escape(message)) as caught:
        check(**shapes)
    assert hint in caught.value.hint

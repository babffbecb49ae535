"""LoRA adapters: recognises them, and checks whether one fits its base model.

An adapter of rank r changes the product with a weight W of shape (rows, columns) to W + B·A, times a factor, with A of
shape (r, columns) and B of (rows, r).  The names of its tensors say which weights those are.  This module is pure: the
caller has read the headers of both.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from thaw.checkpoints import checkpoint
from thaw.errors import ModelUnsupported
from thaw.model import TensorInfo

_PART: Final = re.compile(r"base_model\.model\.(.{1,300})\.lora_([AB])(?:\.default)?\.weight")
_HEAD: Final = re.compile(r"(?:\A|\.)(?:lm_head|embed_out|output)\Z")
_MERGE: Final = "merge it into its base model and push the result as a model of its own"


_NEEDED: Final = ("r", "lora_alpha", "target_modules")
_NOT_TAKEN: Final = (
    "modules_to_save",
    "use_dora",
    "lora_bias",
    "alora_invocation_tokens",
    "layer_replication",
    "use_bdlora",
    "use_qalora",
)
"""Keys of PEFT's config under which an adapter is more than two matrices a layer.  vLLM refuses them, too."""
_PLAIN_STARTS: Final = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""The names among the values of ``init_lora_weights`` that leave the base model's weights unchanged."""


def is_one(names: Collection[str]) -> bool:
    """Whether these files, which were pushed or found together, are an adapter: a model is fetched without this one."""
    return checkpoint.ADAPTER_CONFIG_NAME in names


def check_config(what: str, config: Mapping[str, Any]) -> None:
    """``config``: the content of adapter_config.json.  Raises ModelUnsupported, with the next step."""
    for key in _NEEDED:
        if config.get(key) is None:
            raise ModelUnsupported(f"{what}: its adapter_config.json has no {key}", hint="save the adapter again")
    for key in _NOT_TAKEN:
        if config.get(key):
            raise ModelUnsupported(f"{what} is no plain LoRA adapter: its config sets {key}", hint=_MERGE)
    if (bias := config.get("bias") or "none") != "none":
        raise ModelUnsupported(f"{what} changes biases: its config has bias {bias!r:.40}", hint=_MERGE)
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower() not in _PLAIN_STARTS:
        raise ModelUnsupported(
            f"{what} belongs to a base model that its training changed: its config has init_lora_weights {start!r:.40}",
            hint="convert it to a plain LoRA adapter (PEFT: path_initial_model_for_weight_conversion), or merge it",
        )


def check(
    what: str, tensors: Sequence[TensorInfo], base: str, base_tensors: Sequence[TensorInfo], max_rank: int
) -> None:
    """``what`` and ``base`` name the two in errors.  Raises ModelUnsupported, with the next step."""
    parts: dict[str, dict[str, TensorInfo]] = {}
    for t in tensors:
        found = _PART.fullmatch(t.name)
        if found is None or len(t.shape) != 2:
            raise ModelUnsupported(
                f"{what} has the tensor {t.name!r:.120}, which is no part of a plain LoRA adapter", hint=_MERGE
            )
        parts.setdefault(found[1], {})[found[2]] = t
    if not parts:
        raise ModelUnsupported(f"{what} changes nothing: it has no tensors", hint="save the adapter again")
    shapes = {t.name: t.shape for t in base_tensors}
    for name, pair in parts.items():
        _check_part(what, name, pair, base, shapes, max_rank)


def _check_part(
    what: str,
    name: str,
    pair: Mapping[str, TensorInfo],
    base: str,
    shapes: Mapping[str, tuple[int, ...]],
    max_rank: int,
) -> None:
    if "A" not in pair or "B" not in pair:
        raise ModelUnsupported(f"{what} has only one half of its change to {name}", hint="save the adapter again")
    if checkpoint.is_entry(name) or _HEAD.search(name):
        raise ModelUnsupported(f"{what} changes {name}; adapters of embeddings and heads are not taken", hint=_MERGE)
    (rank, columns), (rows, other_rank) = pair["A"].shape, pair["B"].shape
    if rank != other_rank:
        raise ModelUnsupported(f"{what}: the halves of its change to {name} have the ranks {rank} and {other_rank}")
    if rank > max_rank:
        raise ModelUnsupported(
            f"{what} has rank {rank}, and the function takes adapters of rank {max_rank} at most",
            hint=f"set engine.max_lora_rank to at least {rank}",
        )
    wanted = shapes.get(f"{name}.weight")
    if wanted is None and f"{name}.qweight" in shapes:
        return  # packed by its quantisation
    if wanted is None:
        raise _other_base(what, base, f"it changes {name}, which {base} does not have")
    if wanted != (rows, columns):
        raise _other_base(what, base, f"its {name} is {rows} x {columns}, and that of {base} {_times(wanted)}")


def _times(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _other_base(what: str, base: str, why: str) -> ModelUnsupported:
    return ModelUnsupported(
        f"{what} is no adapter of {base}: {why}", hint="name the model that it was trained on as model.base"
    )

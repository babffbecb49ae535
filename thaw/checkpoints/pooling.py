"""The files with which an embedding model defines how its tokens' vectors become one, as sentence-transformers has
them.

An engine that lacks them takes the default of the model's architecture, which may be another pooling: the answers look
like embeddings and are not those of the model.  So an embedding model must have these files, and they may ask only for
steps that the engine computes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

from thaw.errors import ModelCorrupt, ModelUnsupported

MODULES_NAME: Final = "modules.json"
POOLING_NAME: Final = "1_Pooling/config.json"
TEXT_NAME: Final = "sentence_bert_config.json"
NAMES: Final = (MODULES_NAME, POOLING_NAME, "config_sentence_transformers.json", TEXT_NAME)

_SAVE: Final = "save the model with sentence-transformers, SentenceTransformer(MODEL).save(DIR), and push DIR"
_PREFIX: Final = "sentence_transformers."
_TYPES: Final = {
    "models.Transformer": "Transformer",
    "base.modules.transformer.Transformer": "Transformer",
    "sentence_transformer.modules.transformer.Transformer": "Transformer",
    "models.Pooling": "Pooling",
    "sentence_transformer.modules.pooling.Pooling": "Pooling",
    "models.Normalize": "Normalize",
    "base.modules.normalize.Normalize": "Normalize",
    "sentence_transformer.modules.normalize.Normalize": "Normalize",
}
"""The modules that engines compute, by the names that sentence-transformers gave them in its releases."""
_MODES: Final = {
    "cls": "CLS",
    "cls_token": "CLS",
    "lasttoken": "LAST",
    "mean": "MEAN",
    "mean_tokens": "MEAN",
}
"""The value of ``pooling_mode``, or the part behind ``pooling_mode_``, and the engines' name for it."""


def pooling_of(read: Callable[[str], bytes | None]) -> str:
    """CLS, LAST or MEAN: how the model's files say that it pools; ``read`` gives the content of one by its name.

    Raises ModelUnsupported for a model without these files or with a step that no engine computes, and ModelCorrupt."""
    data = read(MODULES_NAME)
    if data is None:
        raise ModelUnsupported(
            f"the model computes embeddings and has no {MODULES_NAME}, which says how it pools its tokens",
            hint=f"if it was pushed by an older release, push it again; otherwise {_SAVE}",
        )
    modules = [(_kind(module), module["path"]) for module in _modules(data)]
    paths = [path for kind, path in modules if kind == "Pooling"]
    if paths != [POOLING_NAME.rpartition("/")[0]]:
        where = f"has its pooling in {paths!r:.60}" if paths else "names no pooling"
        raise ModelUnsupported(f"{MODULES_NAME} {where}, and {POOLING_NAME} is read", hint=_SAVE)
    if (pooling := read(POOLING_NAME)) is None:
        raise ModelUnsupported(
            f"{MODULES_NAME} names {POOLING_NAME}, which is not among the model's files",
            hint="push the whole directory again",
        )
    return _mode(_object(POOLING_NAME, pooling))


def _mode(plain: dict[str, Any]) -> str:
    mode, prefix = plain.get("pooling_mode"), "pooling_mode_"
    named = [] if mode is None else [str(mode)]
    named += [key.removeprefix(prefix) for key, on in plain.items() if on is True and key.startswith(prefix)]
    if len(named) != 1 or named[0] not in _MODES:
        raise ModelUnsupported(
            f"{POOLING_NAME} asks for the pooling {' and '.join(named) or '(none)':.80}, and the engine computes "
            f"one of {', '.join(_MODES)}",
            hint="use a model with one of these poolings",
        )
    return _MODES[named[0]]


def lowers_case(read: Callable[[str], bytes | None]) -> bool:
    """Whether the model's texts are lowered before they are tokenised.  Raises ModelCorrupt."""
    data = read(TEXT_NAME)
    return data is not None and _object(TEXT_NAME, data).get("do_lower_case") is True


def _modules(data: bytes) -> list[Any]:
    plain = _json(MODULES_NAME, data)
    if not isinstance(plain, list):
        raise ModelCorrupt(f"{MODULES_NAME} is not a list of modules")
    return plain


def _kind(module: Any) -> str:
    """Raises ModelUnsupported for a module that changes the answer and that engines do not compute."""
    if not isinstance(module, dict) or not all(isinstance(module.get(key), str) for key in ("type", "path")):
        raise ModelCorrupt(f"{MODULES_NAME} has a module without a type and a path")
    kind = _TYPES.get(module["type"].removeprefix(_PREFIX)) if module["type"].startswith(_PREFIX) else None
    if kind is None:
        raise ModelUnsupported(
            f"{MODULES_NAME} has the module {module['type']!r:.80}, and only Transformer, Pooling and Normalize are "
            "computed here",
            hint="use an embedding model without further modules",
        )
    return kind


def _object(name: str, data: bytes) -> dict[str, Any]:
    plain = _json(name, data)
    if not isinstance(plain, dict):
        raise ModelCorrupt(f"{name} is not a JSON object")
    return plain


def _json(name: str, data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as e:
        raise ModelCorrupt(f"{name} is not JSON: {type(e).__name__}") from None

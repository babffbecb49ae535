"""Checks a request's body against the API's description: unknown fields, wrong types, missing ones.

The models of the package ``kubernetes`` are generated from the OpenAPI description of Kubernetes.  Each names its fields
with their types, and refuses to be made without those that are required.
"""

from __future__ import annotations

import re
from typing import Any

from kubernetes import client as models

_PLAIN: dict[str, type | tuple[type, ...]] = {
    "str": str,
    "int": int,
    "bool": bool,
    "float": (int, float),
    "datetime": str,
}


def problems(value: Any, kind: str, where: str = "", *, partial: bool = False) -> list[str]:
    """Describe each way in which ``value`` is no ``kind`` (``V1Pod``, ``list[str]``, …).  ``partial``: a patch, which may
    leave out required fields."""
    if kind == "object":
        return []
    if kind in _PLAIN:
        is_wrong = not isinstance(value, _PLAIN[kind]) or (kind in ("int", "float") and isinstance(value, bool))
        return [f"{where} is {value!r}, not a {kind}"] if is_wrong else []
    listed, mapped = re.fullmatch(r"list\[(.+)\]", kind), re.fullmatch(r"dict\(str, (.+)\)", kind)
    if listed:
        return (
            [p for i, v in enumerate(value) for p in problems(v, listed[1], f"{where}[{i}]", partial=partial)]
            if isinstance(value, list)
            else [f"{where} is no list"]
        )
    if not isinstance(value, dict):
        return [f"{where} is no object"]
    if mapped:
        return [p for k, v in value.items() for p in problems(v, mapped[1], f"{where}.{k}", partial=partial)]
    return _of_model(value, getattr(models, kind), where, partial)


def _of_model(value: dict[str, Any], model: Any, where: str, partial: bool) -> list[str]:
    names = {there: here for here, there in model.attribute_map.items()}
    found = [f"{where}.{name} is no field of {model.__name__}" for name in value if name not in names]
    for name, field in value.items():
        if name in names and field is not None:
            found += problems(field, model.openapi_types[names[name]], f"{where}.{name}", partial=partial)
    if not found and not partial:
        try:
            model(**{names[name]: field for name, field in value.items()})
        except ValueError as e:
            found.append(f"{where}: {e}")
    return found

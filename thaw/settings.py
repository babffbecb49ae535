"""Settings are read once from the environment and then frozen.  An error names the variable and the fix.

A component declares a frozen dataclass whose fields carry :func:`setting`; :func:`load` fills it.  The settings
reference in docs/ is generated from these declarations.
"""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from thaw.errors import ThawError

T = TypeVar("T")


class SettingError(ThawError):
    """A variable is missing or has a value that cannot be used."""


def setting(variable: str, help_text: str, default: Any = dataclasses.MISSING) -> Any:
    """A dataclass field read from ``variable``; without a default the variable must be set."""
    metadata = {"variable": variable, "help": help_text}
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def load(cls: type[T], environ: Mapping[str, str] | None = None) -> T:
    """Fill ``cls`` from the environment.  Raises SettingError that names the variable."""
    env = os.environ if environ is None else environ
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        variable, help_text = field.metadata["variable"], field.metadata["help"]
        if variable in env:
            values[field.name] = _parse(variable, env[variable], hints[field.name])
        elif field.default is dataclasses.MISSING:
            raise SettingError(f"{variable} is not set", hint=f"set it: {help_text}")
    return cls(**values)


def _parse(variable: str, text: str, hint: Any) -> Any:
    try:
        if hint is bool:
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
        if hint in (int, float, str):
            return hint(text)
    except (KeyError, ValueError):
        raise SettingError(
            f"{variable}={text!r} is not a {hint.__name__}", hint=f"set {variable} to a {hint.__name__}"
        ) from None
    if type(None) in typing.get_args(hint):
        inner = next(a for a in typing.get_args(hint) if a is not type(None))
        return None if text == "" else _parse(variable, text, inner)
    raise TypeError(f"{variable}: no parser for {hint}")

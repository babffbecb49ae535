"""Looks for the names of a table (vllm_names.py) in an installed package.  Imports no vLLM by itself."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from thaw.errors import PlatformError
from thaw_runtime.engine.vllm.name_entry import Kind, Names
from thaw_runtime.engine.vllm.vllm_names import WRITTEN_FOR


def check(names: Iterable[Names], installed: str, *, on_cpu: bool) -> None:
    """Raises PlatformError for the first name that the installed vLLM lacks, or the first package that it imports and
    that is not installed.
    """
    for entry in names:
        if on_cpu or not entry.cpu_only:
            has = _LOOK[entry.kind](entry.where)
            for name in entry.names:
                if not has(name):
                    raise _gone(entry, name, installed)


def _gone(entry: Names, name: str, installed: str) -> PlatformError:
    return PlatformError(
        f"vLLM {installed} has no {entry.where.replace(':', '.')}.{name}, which Thaw uses to {entry.purpose}; "
        f"this release of Thaw was written for vLLM {WRITTEN_FOR}",
        hint=f"install vLLM {WRITTEN_FOR}, or change thaw_runtime/engine/vllm/ where it uses this name",
    )


def _attributes(where: str) -> Callable[[str], bool]:
    """A module has its submodules, too, whether or not they have been imported."""
    found = _object(where)
    if found is None:
        return lambda name: False
    return lambda name: hasattr(found, name) or (inspect.ismodule(found) and _object(f"{where}.{name}") is not None)


def _parameters(where: str) -> Callable[[str], bool]:
    function = _object(where)
    names = inspect.signature(function).parameters if callable(function) else {}
    return lambda name: name in names


def _fields(where: str) -> Callable[[str], bool]:
    """Reads the source and imports nothing: some classes are needed by few models."""
    is_class = ":" in where
    text, owner = (_class_source(where), "self") if is_class else (_source(where), "")

    def has(name: str) -> bool:
        return f"\n    {name}:" in text or re.search(rf"{owner}\.{name}\b", text) is not None

    return has


_LOOK: Final = {Kind.ATTRIBUTE: _attributes, Kind.FIELD: _fields, Kind.PARAMETER: _parameters}


def _object(where: str) -> Any:
    """None if a part of the path does not exist."""
    module, _, path = where.partition(":")
    try:
        found: Any = sys.modules.get(module) or importlib.import_module(module)
    except ModuleNotFoundError as e:
        _check_that_it_is_the_module(module, e)
        return None
    for name in filter(None, path.split(".")):
        found = getattr(found, name, None)
    return found


def _class_source(where: str) -> str:
    """From the line of the class to the next line of the module's own; "" if there is none."""
    module, _, name = where.partition(":")
    text = _source(module)
    begin = re.search(rf"\nclass {name}\b", text)
    if begin is None:
        return ""
    ends = (text.find(line, begin.end()) for line in ("\nclass ", "\ndef ", "\n@"))
    return text[begin.end() : min((end for end in ends if end >= 0), default=len(text))]


@lru_cache(maxsize=2)
def _source(module: str) -> str:
    """The text of a module; "" if there is none."""
    try:
        spec = sys.modules[module].__spec__ if module in sys.modules else importlib.util.find_spec(module)
    except ModuleNotFoundError as e:
        _check_that_it_is_the_module(module, e)
        return ""
    return Path(spec.origin).read_text() if spec is not None and spec.origin is not None else ""


def _check_that_it_is_the_module(module: str, error: ModuleNotFoundError) -> None:
    """Raises PlatformError if the import found the module, but not another one that the module imports."""
    missing = str(error.name)
    if not f"{module}.".startswith(f"{missing}."):
        raise PlatformError(
            f"the engine's installation lacks the Python package {missing}, which {module} imports",
            hint="install every package of the engine's lock file, as scripts/setup.sh does",
        ) from error

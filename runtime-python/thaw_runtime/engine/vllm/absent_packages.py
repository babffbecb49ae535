"""Import a class of a language model whose module also imports packages for pictures and sound.

The engine's image for CPUs has none of them (deps/cpu-overrides.txt), and a language model calls none: vLLM has
Qwen 3.5's in one module with the model that sees.  While such a module is imported, each package that is absent is an
empty stand-in, whose every name stands for anything and fails when it is called.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final, NoReturn

FOR_OTHER_INPUTS: Final = frozenset({"torchvision", "torchaudio", "torchcodec", "cv2", "PIL", "soundfile", "librosa"})
"""Packages that only models of pictures and sound call."""


@contextmanager
def stand_ins() -> Iterator[None]:
    """While the block runs, absent packages can be imported.  Afterwards they are absent again."""
    absent = frozenset(name for name in FOR_OTHER_INPUTS if importlib.util.find_spec(name) is None)
    finder = _Finder(absent)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [n for n in sys.modules if n.partition(".")[0] in absent]:
            del sys.modules[name]


class _Finder(MetaPathFinder, Loader):
    def __init__(self, absent: frozenset[str]) -> None:
        self._absent = absent

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self._absent else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to execute."""


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Absent,), {"__module__": self.__name__})


class _Absent:
    """Stands for a class or function of an absent package."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._fail()

    def _fail(self) -> NoReturn:
        module = type(self).__module__
        raise ModuleNotFoundError(f"{module} is not installed", name=module.partition(".")[0])

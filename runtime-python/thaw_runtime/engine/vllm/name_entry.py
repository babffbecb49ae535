"""An entry of the table of vLLM's names that Thaw uses (vllm_names.py)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Kind(Enum):
    """The way in which the check looks for a name."""

    ATTRIBUTE = auto()
    """The object at ``where`` has it: a name in a module, or a method, property or class variable."""
    FIELD = auto()
    """Instances of the class at ``where`` have it: the source of the class says ``self.name`` or ``name:``.  Where
    ``where`` is a module, its source says ``.name`` of any object."""
    PARAMETER = auto()
    """The function at ``where`` takes it."""


@dataclass(frozen=True, slots=True)
class Names:
    """Some names of one module, class, object or function, and for what Thaw uses them."""

    where: str  # "module" or "module:path.in.module"
    names: tuple[str, ...]
    purpose: str  # follows "which Thaw uses to"
    kind: Kind = Kind.ATTRIBUTE
    cpu_only: bool = False  # vLLM has it only where it computes on CPUs


def names(where: str, names: str, purpose: str, kind: Kind = Kind.ATTRIBUTE, *, cpu_only: bool = False) -> Names:
    return Names(where, tuple(names.split()), purpose, kind, cpu_only)

"""A registry maps a name to what implements it.  Thaw has one for each thing that others can add (docs/extending.md).

A registry's table names the implementations that Thaw has, one line each.  A package of somebody else adds one with an
entry point of the registry's group, so installing the package is all that has to be done, in an image as on a laptop
(decision 23).  Installed packages are looked through only for a name that the table lacks, so Thaw's own parts cost a
start nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import reduce
from typing import Final, Generic, TypeVar, cast

from thaw.errors import PlatformError

T = TypeVar("T")

DRIVERS: Final = "thaw.drivers"
ENGINES: Final = "thaw.engines"
SOURCES: Final = "thaw.sources"
TRANSPORTS: Final = "thaw.transports"


def installed(group: str) -> Mapping[str, str]:
    """Name to place (``"package.module:attribute"``) of what installed packages add to ``group``, sorted by name.
    None of these packages is imported."""
    from importlib import metadata  # 20 ms, which only a name that is not Thaw's own has to wait for

    return dict(sorted((point.name, point.value) for point in metadata.entry_points(group=group)))


class Registry(Generic[T]):
    """``table`` maps a name to an implementation, or to its place when its import takes long."""

    def __init__(self, group: str, table: Mapping[str, T | str]) -> None:
        self._group, self._table = group, table

    def find(self, name: str) -> T | None:
        """None for a name that nobody has registered.  Raises PlatformError for one that cannot be imported."""
        found = self._table[name] if name in self._table else installed(self._group).get(name)
        return self._load(name, found) if isinstance(found, str) else found

    def known(self) -> str:
        """All names, as an error lists them."""
        return ", ".join(sorted({*self._table, *installed(self._group)}))

    def _load(self, name: str, place: str) -> T:
        module, _, attributes = place.partition(":")
        try:
            return cast(T, reduce(getattr, attributes.split("."), importlib.import_module(module)))
        except (ImportError, AttributeError) as e:
            raise PlatformError(
                f"{name!r} of {self._group} is at {place!r}, which cannot be imported: {e}",
                hint="install or repair the package that provides it",
            ) from e

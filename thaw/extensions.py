"""A registry maps a name to its implementation.  Thaw has one for each kind of extension (docs/extending.md).

A registry's table names Thaw's own implementations, one line each.  Another package adds one with an entry point of the
registry's group, so it is enough to install the package, in an image or on a laptop (decision 23).  Thaw searches the
installed packages only for a name that the table lacks, so a start with Thaw's own implementations pays nothing.
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
    """The implementations that installed packages add to ``group``: name → place (``"package.module:attribute"``),
    sorted by name.  Imports none of these packages.
    """
    from importlib import metadata  # a slow import, made only for a name that is not Thaw's own

    return dict(sorted((point.name, point.value) for point in metadata.entry_points(group=group)))


class Registry(Generic[T]):
    """``table`` maps a name to an implementation, or to its place if its import takes long."""

    def __init__(self, group: str, table: Mapping[str, T | str]) -> None:
        self._group, self._table = group, table

    def find(self, name: str) -> T | None:
        """The implementation of ``name``; None if the name is not registered.  Raises PlatformError if the
        implementation cannot be imported.
        """
        found = self._table[name] if name in self._table else installed(self._group).get(name)
        return self._load(name, found) if isinstance(found, str) else found

    def known(self) -> str:
        """All names, in the form in which an error lists them."""
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

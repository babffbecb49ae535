"""Finds the uses of each version of a model: functions that name it, and instances and starts that run it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from thaw.checkpoints import versions
from thaw.cli.context import client
from thaw.errors import BadRequest, Unauthorized
from thaw.model_uri import ModelUri


@dataclass(frozen=True, slots=True)
class Uses:
    """``actions`` has (function, URI) for each URI that a function names, which are two if it has an adapter;
    ``running`` has (function, version) for instances and starts."""

    actions: frozenset[tuple[str, str]]
    running: frozenset[tuple[str, str]]

    def of_name(self, uri: str) -> list[str]:
        """The functions that name the model, by its plain name or a pin."""
        return sorted({a for a, named in self.actions if _names(named, uri, with_pins=True)})

    def of_version(self, uri: str, digits: str, *, newest: bool) -> list[str]:
        """The users of this version of the model with the plain name ``uri``; with ``newest``, also functions that name
        the plain name.  A pin of the same digits counts with any name, because a store may have several addresses."""
        named = {a for a, pin in self.actions if _pins(pin, digits)}
        if newest:
            named |= {a for a, name in self.actions if _names(name, uri, with_pins=False)}
        runs = {a for a, version in self.running if versions.short(version) == digits}
        return sorted(named | {f"{a} (runs)" for a in runs - named})


def uses() -> Uses:
    """Ask the platform.  Raises Unauthorized without one, and what the API raises for a tenant's key."""
    try:
        found: dict[str, Any] = client().get("/api/v1/thaw/models")
    except Unauthorized as e:
        raise Unauthorized(
            "no platform is set, so nobody knows which functions use this model",
            hint=f"{e.hint}; thaw model delete --force asks nobody",
        ) from e
    return Uses(
        frozenset((one["action"], one["uri"]) for one in found["actions"]),
        frozenset((one["action"], one["modelVersion"]) for one in found["running"]),
    )


def _names(named: str, uri: str, *, with_pins: bool) -> bool:
    """Whether a function's ``named`` may mean the model with the plain name ``uri``."""
    if not _is_readable(named):
        return True
    if versions.pinned(named) and not with_pins:
        return False
    one, other = (ModelUri.parse(versions.plain_name(text)) for text in (named, uri))
    return one == other or bool(one.directory and os.path.realpath(one.directory) == os.path.realpath(other.directory))


def _pins(named: str, digits: str) -> bool:
    return versions.pinned(named) == digits or not _is_readable(named)


def _is_readable(named: str) -> bool:
    """A text that cannot be read may mean any model: whoever accepted it had another reader."""
    try:
        ModelUri.parse(named)
    except BadRequest:
        return False
    return True

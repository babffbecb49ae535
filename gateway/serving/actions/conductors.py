"""Reads the result of a conductor: an action with the annotation ``conductor``, whose result names the next action.
Pure.

::

    arguments ─▶ conductor ─▶ {action, params, state} ─▶ action(params) ─▶ its result and the state ─▶ conductor ─▶ …
                     └──────▶ {params}, or any other result: the end
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

TOO_LONG: Final = "Too many actions in the composition."


@dataclass(frozen=True, slots=True)
class Said:
    """``action`` is None at the end, whose result is ``params`` then."""

    action: object
    params: Any
    state: Mapping[str, Any]


def said(result: Any) -> Said:
    if not isinstance(result, dict):
        return Said(None, result, {})
    params = _boxed("value", result["params"]) if "params" in result else None
    state = _boxed("state", result["state"]) if "state" in result else {}
    action = result.get("action")
    if action is None:
        return Said(None, result if params is None else params, {})
    return Said(action, params or {}, state)


def most_runs(most_actions: int) -> int:
    """How often conductors may run in a composition of so many actions: before, between and after them, with all of
    these doubled."""
    return 2 * most_actions + 1


def as_arguments(result: Any) -> dict[str, Any]:
    return _boxed("value", result)


def unreadable(action: object) -> str:
    return f"Failed to parse action name from json value {action!r:.200} during composition."


def not_found(name: str) -> str:
    return f"Failed to resolve action with name '{name}' during composition."


def not_allowed(name: str) -> str:
    return f"Failed entitlement check for action with name '{name}' during composition."


def _boxed(name: str, value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {name: value}

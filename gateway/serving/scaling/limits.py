"""How many instances an action has at least and at most, and how long an idle one stays.  Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from thaw.action import Action
from thaw.config import check_scaling, parse_llm_config
from thaw.errors import BadRequest

NAMES: Final = ("min_instances", "max_instances", "keep_alive_s")


def of_action(action: Action) -> dict[str, Any]:
    holder = action if action.config is None else action.config.scaling
    return {name: getattr(holder, name) for name in NAMES}


def least_of(action: Action) -> int:
    """How many instances it keeps while nobody calls."""
    if action.config is not None:
        return action.config.scaling.min_instances
    return 0 if action.is_sequence else action.min_instances


def rescaled(action: Action, changes: Mapping[str, Any]) -> Action:
    """The action with these changes and its version as it is.  Raises BadRequest, ConfigError."""
    if not changes or not changes.keys() <= set(NAMES):
        raise BadRequest(f"The scaling of an action is one or more of {', '.join(NAMES)}.")
    check_scaling(dict(changes))
    wanted = {**of_action(action), **changes}
    if wanted["min_instances"] > wanted["max_instances"]:
        raise BadRequest(
            f"min_instances ({wanted['min_instances']}) is more than max_instances ({wanted['max_instances']})."
        )
    wanted["keep_alive_s"] = float(wanted["keep_alive_s"])
    if action.config is None:
        return replace(action, **wanted)
    plain = json.loads(str(action.exec.code))
    plain["scaling"] = {**plain.get("scaling", {}), **wanted}
    return replace(
        action,
        exec=replace(action.exec, code=json.dumps(plain)),
        config=parse_llm_config(plain),
        keep_alive_s=wanted["keep_alive_s"],
        max_instances=wanted["max_instances"],
    )

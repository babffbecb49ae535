"""…/scaling/NAME and …/warm/NAME: set how many instances an action has, and start one before its calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from flask import Blueprint, Response

from gateway.api.held import client_watched, wait_s
from gateway.api.http import action_name, caller, gateway, json_object, json_response, query_version
from gateway.api.openwhisk.action_body import key_values
from gateway.serving.actions.action_cache import namespace_of
from gateway.serving.call import Call
from gateway.serving.scaling.limits import of_action, rescaled
from relay.state.rewriting import rewrite_action
from thaw import wire
from thaw.action import Action
from thaw.errors import BadRequest, TooLarge
from thaw.ids import ActivationId, random_hex_id

blueprint = Blueprint("scaling", __name__, url_prefix="/api/v1/namespaces/<ns>")
_MOST_BYTES: Final = 64 * 1024
_MOST_NOTED: Final = 16 * 1024


@blueprint.get("/scaling/<path:name>")
def scaling(ns: str, name: str) -> Response:
    return _answer(_with_instances(gateway().actions.get(action_name(ns, name))))


@blueprint.put("/scaling/<path:name>")
def scale(ns: str, name: str) -> Response:
    """Change what the body names.  The action keeps its version, and its instances go on."""
    core, full_name = gateway(), action_name(ns, name)
    changes, version = json_object(_MOST_BYTES), query_version()
    annotations = _annotations(changes.pop("annotations", []))
    before: Action | None = None
    added = 0

    def change(old: Action) -> Action:
        nonlocal before, added
        old.check_version(version)
        _refuse_shared(old)
        before, new = old, rescaled(_with_instances(old), changes)
        added = core.kept.check(new, old)
        return replace(new, annotations=_noted(old, annotations))

    action = rewrite_action(core.client, namespace_of(full_name), full_name, change)
    core.actions.forget(full_name)
    core.kept.check_written(action, before, added)
    return _answer(action)


@blueprint.post("/warm/<path:name>")
def warm(ns: str, name: str) -> Response:
    """Start an instance unless a slot is free, and answer when its start has begun, or with ``wait_s`` when it is ready
    or the time is over."""
    core = gateway()
    action, longest_s = _with_instances(core.actions.get(action_name(ns, name))), wait_s()
    with client_watched() as hangup:
        call = Call(ActivationId(random_hex_id()), action, caller(), {}, hangup)
        core.admit(call)
        found = core.warming.warm(call, longest_s)
    return json_response({"action": action.name, **wire.to_plain(found)})


def _with_instances(action: Action) -> Action:
    if action.is_sequence:
        raise BadRequest(f"{action.name} is a sequence, which has no instances: name the actions in it.")
    return action


def _annotations(plain: Any) -> dict[str, object]:
    """Return the caller's own annotations, which are written in the same step.  Only names with a prefix are allowed:
    the platform reads none of those, while other annotations change how the action runs.  Raises BadRequest,
    TooLarge."""
    found = key_values("annotations", plain, gateway().settings.parameters_bytes)
    if unfit := sorted(key for key in found if "/" not in key):
        raise BadRequest(
            f"Only annotations with a prefix, as example.com/note, come with a scaling: not {unfit[0]:.80}.",
            hint="update the action: thaw action update NAME --annotation KEY VALUE",
        )
    return found


def _noted(action: Action, notes: Mapping[str, object]) -> Mapping[str, object]:
    """Raises TooLarge: no quota counts the bytes that a scaling writes."""
    merged = {**action.annotations, **notes}
    n_bytes = len(json.dumps({key: value for key, value in merged.items() if "/" in key}))
    if notes and n_bytes > _MOST_NOTED:
        raise TooLarge(f"Annotations with a prefix are larger than allowed: {n_bytes} > {_MOST_NOTED} bytes.")
    return merged


def _refuse_shared(action: Action) -> None:
    """Functions with adapters share instances while their settings are the same (thaw/pools.py).  Raises BadRequest."""
    if action.adapter:
        raise BadRequest(
            f"{action.name} shares its instances with the functions that differ from it in their adapter alone.",
            hint="change scaling in its config, and deploy that: thaw action update NAME --config FILE",
        )


def _answer(action: Action) -> Response:
    plain: dict[str, Any] = {"action": action.name, "version": action.version, **of_action(action)}
    return json_response(plain)

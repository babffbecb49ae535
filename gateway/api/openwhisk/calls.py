"""Makes the call of an action from its arguments, for every way in which an action is invoked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gateway.api.embeddings_body import check_embeddings
from gateway.api.openai_body import choose_seed, validate
from gateway.serving.actions.model_kinds import check_endpoint
from gateway.serving.actions.packages import Target
from gateway.serving.answers.several import several
from gateway.serving.call import Call
from gateway.serving.hangup import Hangup
from relay.protocol.messages import EMBEDDINGS
from relay.state.api_keys import Subject
from thaw.action import Action
from thaw.errors import BadRequest
from thaw.ids import ActivationId, random_hex_id
from thaw.tracing.trace import Phase

PROTECTED: Final = "Request defines parameters that are not allowed (e.g., reserved properties)."


def make_call(
    target: Target, subject: Subject, given: Any, hangup: Hangup, *, cause: str = "", caused_by: str = ""
) -> Call:
    """``given``: the arguments, an object or the list that an earlier component of a sequence returned.  Raises
    BadRequest."""
    action = target.action
    payload = arguments(action, given) if isinstance(given, dict) else given
    call = Call(ActivationId(random_hex_id()), action, subject, payload, hangup)
    call.cause, call.caused_by, call.binding = cause, caused_by, target.binding
    if action.is_llm:
        if not isinstance(payload, dict):
            raise BadRequest(f"{action.name} takes an object with messages, a prompt or an input, and not a list.")
        call.endpoint = _endpoint(payload)
        payload.setdefault("model", action.name.rpartition("/")[2])
        check_endpoint(action, call.endpoint)
        payload = call.payload = _checked(call.endpoint, payload)
        call.seed = choose_seed(payload, call.activation_id)
    call.trace(Phase.RECEIVED)
    return call


def _endpoint(payload: Mapping[str, Any]) -> str:
    """Return the endpoint of /v1 that takes a body with these fields."""
    if "messages" in payload:
        return "chat"
    return EMBEDDINGS if "input" in payload and "prompt" not in payload else "completions"


def _checked(endpoint: str, payload: dict[str, Any]) -> dict[str, Any]:
    """The payload without what has no effect.  Raises BadRequest."""
    if endpoint == EMBEDDINGS:
        check_embeddings(payload)
        return payload
    payload.pop("stream", None)
    payload.pop("stream_options", None)
    effective = validate(endpoint, payload)
    if not several(effective).is_one:
        raise BadRequest("an activation has one answer: leave n, best_of and further prompts out")
    return effective


def arguments(action: Action, given: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the bound parameters with the call's, which win.  With ``final`` a bound parameter cannot be replaced."""
    if action.annotations.get("final") is True and set(given) & set(action.parameters):
        raise BadRequest(PROTECTED)
    return {**action.parameters, **given}

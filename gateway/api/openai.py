"""/v1: the API of OpenAI's SDKs.  The client is held until ``limits.timeout``; a stream is written as it comes.

While a streaming client waits for a cold start it reads SSE comments (``: thaw queued``), written when something
happens, and once a second while bytes arrive; SDKs skip them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from flask import Blueprint, Response, request

from gateway.api.bad_field import BadField
from gateway.api.embeddings_body import check_embeddings
from gateway.api.http import (
    ACTIVATION_HEADER,
    caller,
    gateway,
    json_object,
    json_response,
    openai_error,
    takes,
)
from gateway.api.openai_body import check_text, validate
from gateway.api.several_answers import stream, whole
from gateway.api.streaming import START_HEADER, Asked, begin, go_on, how_started, last_event
from gateway.core import Gateway
from gateway.serving.actions.action_cache import simple_name
from gateway.serving.actions.model_kinds import check_endpoint
from gateway.serving.answers.several import several
from gateway.serving.hangup import watched
from relay.protocol.messages import EMBEDDINGS
from relay.state.api_keys import Subject
from thaw.action import Action
from thaw.errors import NotFound

blueprint = Blueprint("openai", __name__)


class ModelMissing(NotFound):
    """OpenAI's model_not_found."""

    param = "model"
    openai_code = "model_not_found"


@blueprint.get("/v1/models")
def models() -> Response:
    subject = caller()
    found = [a for a in gateway().actions.list(subject.namespace) if a.is_llm]
    return json_response({"object": "list", "data": list(_listed(found))})


@blueprint.get("/v1/models/<path:name>")
def model(name: str) -> Response:
    return json_response(_model(_find(caller().namespace, name), name))


def body_bytes() -> int:
    return gateway().settings.llm_payload_bytes


@blueprint.post("/v1/chat/completions")
@takes(body_bytes)
def chat() -> Response:
    return _answer("chat")


@blueprint.post("/v1/completions")
@takes(body_bytes)
def completions() -> Response:
    return _answer("completions")


@blueprint.post("/v1/embeddings")
@takes(body_bytes)
def embeddings() -> Response:
    return _at_once(EMBEDDINGS, check_embeddings)


@blueprint.post("/tokenize")
@takes(body_bytes)
def tokenize() -> Response:
    return _at_once("tokenize", partial(check_text, "tokenize"))


@blueprint.post("/detokenize")
@takes(body_bytes)
def detokenize() -> Response:
    return _at_once("detokenize", partial(check_text, "detokenize"))


def _model(action: Action, name: str) -> dict[str, Any]:
    """``name`` is the name that a client uses; ``root`` is the name of the action."""
    root = simple_name(action.name)
    return {
        "id": name,
        "object": "model",
        "created": action.updated_ms // 1000,
        "owned_by": action.namespace,
        "root": root,
        "served_name": (action.config.model.served_name if action.config else "") or root,
    }


def _listed(actions: Sequence[Action]) -> Iterator[dict[str, Any]]:
    """Each model by its served name if that leads to it: an action's own name goes before a served one."""
    taken = {simple_name(a.name) for a in actions}
    for action in actions:
        served = action.config.model.served_name if action.config else ""
        yield _model(action, simple_name(action.name) if served in taken else served or simple_name(action.name))
        taken.add(served)


def _find(namespace: Any, name: str) -> Action:
    try:
        return gateway().actions.by_model(namespace, name)
    except NotFound as e:
        raise ModelMissing(f"The model `{name}` does not exist.") from e


def asked_model(subject: Subject, body: Mapping[str, Any], endpoint: str) -> Action:
    """Raises BadField, ModelMissing, and BadParameter for a model that is known not to answer this endpoint."""
    if not isinstance(body.get("model"), str):
        raise BadField("model", "model must be the name of a deployed action.")
    action = _find(subject.namespace, body["model"])
    check_endpoint(action, endpoint)
    return action


def _answer(endpoint: str) -> Response:
    core, subject = gateway(), caller()
    body = json_object(body_bytes())
    action = asked_model(subject, body, endpoint)
    asked = Asked(action, subject, endpoint, validate(endpoint, body))
    if (had := last_event(core, asked)) is not None:
        return go_on(core, asked, had)
    core.storage.check(action.namespace)
    made = several(asked.body)
    core.caps.check(action, len(made.bodies))
    if not made.is_one:
        return stream(core, asked, made) if body.get("stream") else whole(core, asked, made)
    return begin(core, asked) if body.get("stream") else _whole(core, asked)


def _at_once(endpoint: str, check: Callable[[Mapping[str, Any]], None]) -> Response:
    """Answer a request that is no stream.  The tokenizer is in the model's container, too, so each such request is an
    activation, which may wait for a start."""
    core, subject = gateway(), caller()
    body = json_object(body_bytes())
    check(body)
    action = asked_model(subject, body, endpoint)
    core.storage.check(action.namespace)
    core.caps.check(action)
    return _whole(core, Asked(action, subject, endpoint, body))


def _whole(core: Gateway, asked: Asked) -> Response:
    with ExitStack() as entered:
        hangup, unwatch = watched(core.hangups, request.environ.get("gunicorn.socket"))
        entered.callback(unwatch)
        entered.enter_context(core.throttle.counted(asked.subject.namespace))
        call = asked.call(hangup)
        call.answers_apart = True
        outcome = core.execute(call)
        vectors, call.vectors = call.vectors, None  # the record has no place for them
        core.ended(call, outcome)
    if outcome.error is not None:
        response = json_response(openai_error(outcome.error), outcome.error.http_status)
    elif vectors is not None:
        texts = vectors.texts(asked.body["model"], asked.body.get("encoding_format") or "float")
        response = Response(texts, mimetype="application/json")
    else:
        response = json_response(outcome.result)
    response.headers[ACTIVATION_HEADER] = call.activation_id
    if outcome.error is None:
        response.headers[START_HEADER] = how_started(call)
    return response

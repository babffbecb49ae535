"""/v1/responses: OpenAI's newer form of a chat.  Nothing is kept: each request has its whole conversation.

A response is a chat in other words.  The container runs the chat, and the activation's record has it.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, closing

from flask import Blueprint, Response, request

from gateway.api.bad_field import BadField
from gateway.api.http import ACTIVATION_HEADER, caller, gateway, json_object, json_response, openai_error, takes
from gateway.api.openai import asked_model, body_bytes
from gateway.api.responses_body import chat_of, own_words
from gateway.api.streaming import (
    LAST_EVENT_HEADER,
    RESUMABLE_HEADER,
    START_HEADER,
    Asked,
    Step,
    counted,
    how_started,
    watching,
    written,
)
from gateway.serving.answers.responses_format import ResponseEvents, repeated
from gateway.serving.call import Call
from relay.protocol.messages import RunFinished, RunToken
from thaw.errors import BadRequest, ThawError

blueprint = Blueprint("responses", __name__)


@blueprint.post("/v1/responses")
@takes(body_bytes)
def create() -> Response:
    core, subject = gateway(), caller()
    body = json_object(body_bytes())
    action = asked_model(subject, body, "chat")
    chat = chat_of(body)
    _refuse_resumption()
    core.storage.check(action.namespace)
    core.caps.check(action)
    with ExitStack() as entered:
        call = Asked(action, subject, "chat", chat).call(watching(core, entered))
        answer = ResponseEvents(call, repeated(body))
        steps = _in_own_words(counted(core, call, entered))
        return written(call, answer, steps) if body.get("stream") else _whole(call, answer, steps)


def _refuse_resumption() -> None:
    """The events of a response have no ids.  Raises BadField."""
    for name in (LAST_EVENT_HEADER, RESUMABLE_HEADER):
        if request.headers.get(name, "0") != "0":
            raise BadField(name, f"A response cannot be gone on with: leave {name} out, or ask /v1/chat/completions.")


def _in_own_words(steps: Generator[Step, None, None]) -> Generator[Step, None, None]:
    try:
        yield from steps
    except BadRequest as e:
        raise own_words(e) from e


def _whole(call: Call, answer: ResponseEvents, steps: Generator[Step, None, None]) -> Response:
    try:
        with closing(steps):
            for step in steps:
                if isinstance(step, RunToken):
                    answer.of_token(step)
                elif isinstance(step, RunFinished):
                    answer.of_end(step)
    except ThawError as e:
        response = json_response(openai_error(e), e.http_status)
    else:
        response = json_response(answer.whole())
        response.headers[START_HEADER] = how_started(call)
    response.headers[ACTIVATION_HEADER] = call.activation_id
    return response

"""/api/v1/web/NAMESPACE/PACKAGE|default/ACTION[.EXTENSION][/PATH]: web actions, which are called without a key.

Such a request counts as one of the action's namespace: its memory for long bodies, its connections, its invocations,
and a throttle for web requests alone, so that strangers leave its API to a namespace.  An action without the annotation
``web-export`` is not there at all.
"""

from __future__ import annotations

import base64
import hmac
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl, unquote

from flask import Blueprint, Response, g, request

from gateway import metrics
from gateway.api import bounded_json
from gateway.api.http import ACTIVATION_HEADER, account, gateway, own_cors, read_body, takes
from gateway.api.openwhisk.calls import PROTECTED, make_call
from gateway.api.openwhisk.cloud_event import Event, Mode
from gateway.api.openwhisk.event_body import event_arguments, sent_event
from gateway.api.openwhisk.http_answer import begin
from gateway.api.openwhisk.invoke import event_answer, payload_bytes
from gateway.api.openwhisk.web_answer import WebAnswer, answer, is_json, is_text, split_extension
from gateway.serving.actions.packages import MISSING, Target
from gateway.serving.hangup import watched
from gateway.serving.runs import Outcome
from relay.state.api_keys import Subject
from thaw.action import Action
from thaw.activation import ActivationStatus
from thaw.errors import BadRequest, Forbidden, NotFound, PlatformError, ThawError, Unauthorized
from thaw.ids import ActionName, Namespace, is_entity_name

blueprint = Blueprint("web", __name__)
_ROUTE: Final = "/api/v1/web/<ns>/<package>/<path:rest>"
_METHODS: Final = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS")
_NO_PACKAGE: Final = "default"
RESERVED: Final = frozenset(("__ow_method", "__ow_headers", "__ow_path", "__ow_user", "__ow_query", "__ow_body"))
_NOT_READY: Final = "Response not yet ready."
_CORS_METHODS: Final = "OPTIONS, GET, DELETE, POST, PUT, HEAD, PATCH"
_CORS_HEADERS: Final = "Authorization, Origin, X-Requested-With, Content-Type, Accept, User-Agent"


class NotReady(PlatformError):
    """The action runs on; its record will have the result."""

    http_status = 202


@dataclass(frozen=True, slots=True)
class _Asked:
    """The parts of a request's path.  ``path`` is the part behind the extension, as it was sent."""

    target: Target
    owner: Namespace
    extension: str
    path: str


def _body_bytes(ns: str, package: str, rest: str) -> int:
    asked = _asked()
    _admit(asked)
    return payload_bytes(asked.target.action)


@blueprint.route(_ROUTE, methods=_METHODS, provide_automatic_options=False, merge_slashes=False)
@takes(_body_bytes, needs_key=False)
def web(ns: str, package: str, rest: str) -> Response:
    asked = _asked()
    action = asked.target.action
    is_custom = action.annotations.get("web-custom-options") is True
    own_cors({} if is_custom else _cors())
    if request.method == "OPTIONS" and not is_custom:
        return Response(status=200)
    user = _admit(asked)
    event = None if action.annotations.get("raw-http") is True else sent_event(payload_bytes(action))
    mode, given = None if event is None else event.mode, _arguments(action, asked.path, user, event)
    del event  # the arguments contain its data, and are released when they have been sent
    return _invoke(asked, given, mode)


def _admit(asked: _Asked) -> str:
    """Refuse or count the request, and return the namespace of its key, empty without one.  A refused request counts
    towards no namespace, or strangers could use up the share of the callers with the secret.  Raises Unauthorized,
    Throttled."""
    user = _user()
    if request.method != "OPTIONS":
        _check_allowed(asked.target.action, user)
    account(asked.owner)
    return user


def _asked() -> _Asked:
    """Raises NotFound for every reason, so that a stranger does not learn what exists."""
    if "web_asked" not in g:
        path = str(request.environ.get("RAW_URI") or request.full_path).partition("?")[0]
        parted = path.partition("/api/v1/web/")[2].split("/", 3)
        if len(parted) < 3:  # the route matches the decoded path, which may have more parts
            raise NotFound(MISSING)
        namespace, package, segment, *rest = parted
        name, extension = split_extension(unquote(segment))
        owner, package = Namespace(unquote(namespace)), unquote(package)
        if not all(map(is_entity_name, (owner, package, name))):
            raise NotFound(MISSING)
        parts = (owner, name) if package == _NO_PACKAGE else (owner, package, name)
        try:
            target = gateway().packages.target(ActionName("/".join(parts)), owner)
        except (NotFound, Forbidden):
            raise NotFound(MISSING) from None
        if target.action.annotations.get("web-export") is not True:
            raise NotFound(MISSING)
        if target.action.namespace != owner:  # its owner must not make our parameters public
            raise NotFound(MISSING)
        g.web_asked = _Asked(target, owner, extension, f"/{rest[0]}" if rest else "")
    found: _Asked = g.web_asked
    return found


def _user() -> str:
    """The namespace of the key that the request has; empty without one.  Other credentials are the function's."""
    sent = request.headers.get("Authorization", "")
    if not sent.lower().startswith("basic "):
        return ""
    try:
        return gateway().auth.subject(sent).namespace
    except Unauthorized:
        return ""


def _check_allowed(action: Action, user: str) -> None:
    """``require-whisk-auth``: true asks for any key of this installation, a string or a number for that secret.  Any
    other value, of an action that was written before such were refused, opens to nobody."""
    wanted = action.annotations.get("require-whisk-auth", False)
    if isinstance(wanted, bool):
        is_open = bool(user) or not wanted
    else:
        sent = request.headers.get("X-Require-Whisk-Auth", "").encode("latin-1", "replace")
        secret = str(wanted).encode("utf-8", "replace") if isinstance(wanted, str | int | float) else b""
        is_open = bool(secret) and hmac.compare_digest(sent, secret)
    if not is_open:
        raise Unauthorized("The supplied authentication is invalid.")


def _arguments(action: Action, path: str, user: str, event: Event | None) -> dict[str, Any]:
    """Query and body, the body's before the query's, and the request's own properties.  Raises BadRequest, TooLarge."""
    query = request.query_string.decode("latin-1")
    if action.annotations.get("raw-http") is True:
        return {**_properties(path, user), "__ow_query": query, "__ow_body": _opaque(read_body(payload_bytes(action)))}
    body = _parsed(read_body(payload_bytes(action))) if event is None else event_arguments(action, event)
    given = {**dict(parse_qsl(query, keep_blank_values=True)), **(body if isinstance(body, dict) else {})}
    if not RESERVED.isdisjoint(given):
        raise BadRequest(PROTECTED)
    opaque = {} if body is None or isinstance(body, dict) else {"__ow_body": body}
    if action.is_llm:
        return given  # a model's request has no place for them
    return {**_properties(path, user), **given, **opaque}


def _properties(path: str, user: str) -> dict[str, Any]:
    headers = {name.lower(): value for name, value in request.headers.items()}
    if user:
        del headers["authorization"]  # a function learns who called it, but not the caller's key
    found: dict[str, Any] = {"__ow_method": request.method.lower(), "__ow_headers": headers, "__ow_path": path}
    return {**found, "__ow_user": user} if user else found


def _parsed(data: bytes) -> Any:
    """A JSON value, the fields of a form, or the body as text or base64; None without a body."""
    if not data:
        return None
    if is_json(request.mimetype):
        return bounded_json.parse(data)
    if request.mimetype == "application/x-www-form-urlencoded":
        return dict(parse_qsl(data.decode("utf-8", "replace"), keep_blank_values=True))
    return _opaque(data)


def _opaque(data: bytes) -> str:
    """Text as it is, all else in base64; JSON too, which is OpenWhisk's way."""
    if is_text(request.mimetype) and request.mimetype != "application/json":
        return data.decode("utf-8", "replace")
    return base64.b64encode(data).decode()


def _invoke(asked: _Asked, given: dict[str, Any], mode: Mode | None) -> Response:
    action = asked.target.action
    if action.is_http_server and not action.is_composed and asked.extension == ".http" and mode is None:
        return _pass_on(asked, given)
    core = gateway()
    hangup, unwatch = watched(core.hangups, request.environ.get("gunicorn.socket"))
    try:
        call = make_call(asked.target, Subject(asked.owner, str(asked.owner)), given, hangup)
        g.activation_id = call.activation_id
        core.admit(call)
        with ExitStack() as counted:
            place = counted.enter_context(core.throttle.counted(asked.owner))
            outcome = core.blocking.run(call, core.settings.blocking_s, counted, place)
    finally:
        unwatch()
    if outcome is None:
        raise NotReady(_NOT_READY)
    metrics.ended(call, outcome)
    result = _projected(outcome)
    if mode is not None and asked.extension == ".http":
        answered = event_answer(call, result, mode)
        if answered is not None:
            return answered
    return _response(answer(asked.extension, result))


def _pass_on(asked: _Asked, given: dict[str, Any]) -> Response:
    """Call an image's server, and answer as it does."""
    core = gateway()
    with ExitStack() as counted:
        hangup, unwatch = watched(core.hangups, request.environ.get("gunicorn.socket"))
        counted.callback(unwatch)
        call = make_call(asked.target, Subject(asked.owner, str(asked.owner)), given, hangup)
        g.activation_id = call.activation_id
        core.admit(call)
        counted.enter_context(core.throttle.counted(asked.owner))
        begun = begin(core, call, counted)
    return begun if isinstance(begun, Response) else _response(answer(asked.extension, _projected(begun)))


def _projected(outcome: Outcome) -> Any:
    """Return the value for the answer: a result, or the value under ``error`` of an application error.  Raises
    ThawError."""
    if outcome.status is ActivationStatus.SUCCESS:
        return outcome.result
    if outcome.status is ActivationStatus.APPLICATION_ERROR and isinstance(outcome.result, dict):
        return outcome.result.get("error")
    if outcome.status is ActivationStatus.DEVELOPER_ERROR:
        raise BadRequest("There was an error processing your request.")
    raise ThawError("There was an internal server error.")


def _response(made: WebAnswer) -> Response:
    response = Response(made.body, made.status)
    del response.headers["Content-Type"]
    if made.content_type:
        response.headers["Content-Type"] = made.content_type
    for name, value in made.headers:
        response.headers.add(name, value)
    response.headers[ACTIVATION_HEADER] = g.activation_id
    return response


def _cors() -> dict[str, str]:
    return {
        "Access-Control-Allow-Origin": "*",
        "Access-Control-Allow-Methods": _CORS_METHODS,
        "Access-Control-Allow-Headers": request.headers.get("Access-Control-Request-Headers", _CORS_HEADERS),
    }

"""Shared by every route: the caller, the transaction id, error bodies, bodies within their limits."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from flask import Flask, Response, current_app, g, request
from werkzeug.exceptions import HTTPException

from gateway.api import bounded_json
from gateway.core import Gateway
from gateway.front.bounds import UNCHECKED_BODY_BYTES
from gateway.front.visit import VISIT, Visit
from gateway.serving.actions.packages import MISSING, forbidden
from relay.state.api_keys import Subject
from thaw import wire
from thaw.errors import (
    BadRequest,
    ConfigError,
    NotFound,
    ThawError,
    Throttled,
    TooLarge,
    Unauthorized,
    Unavailable,
)
from thaw.ids import ActionName, Namespace, is_entity_name, random_hex_id
from thaw.process import lasting

View = TypeVar("View", bound=Callable[..., Response])

ACTIVATION_HEADER: Final = "X-Openwhisk-Activation-Id"
_ALLOWED_HEADERS: Final = (
    "Authorization, Origin, X-Requested-With, Content-Type, Accept, User-Agent, Last-Event-ID, X-Thaw-Resumable"
)
_CORS: Final = {
    "Access-Control-Allow-Origin": "*",
    "Access-Control-Allow-Methods": "GET, DELETE, POST, PUT, HEAD",
    "Access-Control-Expose-Headers": f"X-Request-ID, {ACTIVATION_HEADER}, X-Thaw-Start, Retry-After, WWW-Authenticate",
}
_WEB: Final = "web.web"
_INVOCATIONS: Final = (
    "invoke.invoke",
    *(f"openai.{name}" for name in ("chat", "completions", "embeddings", "tokenize", "detokenize")),
    "responses.create",
)
OPENAI_PATHS: Final = ("/v1/", "/tokenize", "/detokenize")
"""Their errors are OpenAI's object."""
_ALWAYS_ANSWERED: Final = ("/health", "/live", "/metrics")
_TRANSACTION = re.compile(r"\A[\x21-\x7e]{1,128}\Z")
_WHOLE = re.compile(r"\A-?[0-9]{1,20}\Z", re.ASCII)
_MOST: Final = 2**53 - 1
"""The largest number that every reader of JSON understands.  The state server takes no more than 64 bits."""
_TRY_AGAIN_S: Final = "1"
"""Retry-After of a 503: what is missing comes back by itself, a host or the state server."""
_OPENAI_TYPES: Final = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def gateway() -> Gateway:
    core: Gateway = current_app.extensions["thaw"]
    return core


def caller() -> Subject:
    """Return the caller.  From here on the request counts as one of that namespace.  Raises Unauthorized, Throttled."""
    if "subject" not in g:
        subject: Subject = gateway().auth.subject(request.headers.get("Authorization"))
        visit: Visit | None = request.environ.get(VISIT)
        if visit is not None:
            visit.namespace = subject.namespace
        if visit is None or not visit.head_only:  # the request counts when its body is there, too
            _count(subject.namespace)
        g.subject = subject
    known: Subject = g.subject
    return known


def _count(namespace: Namespace) -> None:
    # The throttle of invocations counts these; others are brief, or are some of the few that serving/held/ holds.
    if request.endpoint in _INVOCATIONS:
        gateway().calls.enter_again(namespace)
    else:
        gateway().calls.enter(namespace)
        g.counted = namespace


def account(namespace: Namespace) -> None:
    """Count this request, which needs no key, as one of ``namespace``, apart from those with its keys.  Raises
    Throttled."""
    visit: Visit | None = request.environ.get(VISIT)
    if visit is not None:
        visit.namespace = namespace
    if visit is None or not visit.head_only:
        gateway().web_calls.enter_again(namespace)


def takes(limit: Callable[..., int], *, needs_key: bool = True) -> Callable[[View], View]:
    """A view that takes a body of up to ``limit(...)`` bytes, a function of the view's own arguments.  It may raise the
    errors that the view would raise before it reads the body.  Without ``needs_key`` it also decides which namespace's
    memory the body takes (account())."""

    def mark(view: View) -> View:
        view.body_limit, view.needs_key = limit, needs_key  # type: ignore[attr-defined]
        return view

    return mark


def _max_bytes() -> int:
    """Check the body that this request announces, before any of it arrives.  Raises ThawError, HTTPException."""
    if request.routing_exception is not None:
        raise request.routing_exception
    view = current_app.view_functions[request.endpoint or ""]
    limit: Callable[..., int] = getattr(view, "body_limit", lambda **_: UNCHECKED_BODY_BYTES)
    if getattr(view, "needs_key", True):
        caller()
    max_bytes = limit(**(request.view_args or {}))
    if request.content_length is not None and request.content_length > max_bytes:
        raise too_large(request.content_length, max_bytes)
    return max_bytes


def too_large(n_bytes: int, max_bytes: int) -> TooLarge:
    return TooLarge(f"Request larger than allowed: {n_bytes} > {max_bytes} bytes.")


def caller_now() -> Subject:
    """Return the caller after asking the state server now, for routes where a revoked key must not work for another
    moment.  Raises Unauthorized."""
    g.subject = gateway().auth.subject(request.headers.get("Authorization"), anew=True)
    return caller()


def namespace(named: str) -> Namespace:
    """The caller's own, by its name or ``_``.  Raises Forbidden for another tenant's."""
    own = caller().namespace
    if named not in ("_", own):
        raise forbidden(named)
    return own


def action_name(named_namespace: str, name: str) -> ActionName:
    """The whole name of an action in the caller's own namespace, ``name`` or ``package/name``.  Raises NotFound,
    Forbidden, BadRequest."""
    return _full_name(namespace(named_namespace), name)


def any_action_name(named_namespace: str, name: str) -> ActionName:
    """An action that may be in another tenant's shared package: Packages.target() says whether it is."""
    own = caller().namespace
    return _full_name(own if named_namespace == "_" else Namespace(named_namespace), name)


def _full_name(namespace: Namespace, name: str) -> ActionName:
    parts = name.split("/")
    if len(parts) > 2:
        raise NotFound(MISSING, hint="an action is named NAME or PACKAGE/NAME")
    for part in parts:
        entity_name(part)
    return ActionName(f"{namespace}/{name}")


def entity_name(name: str) -> str:
    """Raises BadRequest."""
    if not is_entity_name(name):
        raise BadRequest("The request content was malformed:\nname is not a valid entity name.")
    return name


def query_flag(name: str) -> bool:
    text = request.args.get(name, "false").lower()
    if text not in ("true", "false"):
        raise BadRequest(f"The query parameter was malformed:\n{name} must be true or false, not '{text}'.")
    return text == "true"


def query_version() -> str:
    """The version that an action must have to be written; empty: any.  A deleted action's is never used again."""
    return request.args.get("version", "")


def query_int(name: str, default: int | None = None, *, low: int = 0, high: int = _MOST) -> int | None:
    text = request.args.get(name)
    if text is None:
        return default
    if not _WHOLE.match(text):
        raise BadRequest(f"The query parameter '{name}' must be a whole number, not '{text:.40}'.")
    value = int(text)
    if not low <= value <= high:
        raise BadRequest(f"The value of '{name}' must be between {low} and {high}, not {value}.")
    return value


def json_object(max_bytes: int, *, optional: bool = False) -> dict[str, Any]:
    """The request's JSON object.  Raises TooLarge, BadRequest."""
    plain = bounded_json.parse(_body(max_bytes, b"{}" if optional else b""))
    if not isinstance(plain, dict):
        raise BadRequest("The request content was malformed:\nthe body must be a JSON object.")
    return plain


def _body(max_bytes: int, blank: bytes) -> bytes:
    """The request's body, or ``blank``.  Raises TooLarge."""
    data = read_body(max_bytes)
    return data if data.strip() else blank


def read_body(max_bytes: int) -> bytes:
    """The request's body, which nothing else keeps.  Raises TooLarge."""
    if request.content_length is not None and request.content_length > max_bytes:
        raise too_large(request.content_length, max_bytes)
    data = request.stream.read(max_bytes + 1)
    request.stream.close()
    if len(data) > max_bytes:
        raise too_large(len(data), max_bytes)
    return data


def body_reader(max_bytes: int) -> Callable[[int], bytes]:
    """A function that reads the request's body in parts.  It raises TooLarge."""
    if request.content_length is not None and request.content_length > max_bytes:
        raise too_large(request.content_length, max_bytes)
    n_read = 0

    def read(n_bytes: int) -> bytes:
        nonlocal n_read
        data: bytes = request.stream.read(n_bytes)
        n_read += len(data)
        if n_read > max_bytes:
            raise too_large(n_read, max_bytes)
        return data

    return read


def openai_error(error: ThawError) -> dict[str, Any]:
    """Return OpenAI's error object.  The object of an error on this side also says what to do (``hint``)."""
    status = error.http_status
    kind = _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    code: str | None = getattr(error, "openai_code", None)
    if isinstance(error, Unauthorized):
        code = "invalid_api_key"
    elif isinstance(error, Throttled):
        code = "rate_limit_exceeded"
    elif isinstance(error, BadRequest) and error.hint == "context_length_exceeded":
        code = error.hint
    elif status >= 500:
        code = error.code
    param = getattr(error, "param", None)
    fields = {"message": error.message, "type": kind, "param": param, "code": code}
    return {"error": {**fields, "hint": error.hint} if status >= 500 and error.hint else fields}


def own_cors(headers: Mapping[str, str]) -> None:
    """This answer has these CORS headers instead of the API's, as far as it has none of its own."""
    g.cors = headers


def error_body(error: ThawError) -> dict[str, Any]:
    if request.path.startswith(OPENAI_PATHS):
        return openai_error(error)
    if isinstance(error, ConfigError) and error.hint:  # its fix is part of the sentence, which wsk shows, too
        return {"error": f"{error.message}: {error.hint}", "code": g.transaction_id}
    body = {"error": error.message, "code": g.transaction_id}
    return {**body, "hint": error.hint} if error.hint else body


def install(app: Flask) -> None:
    """Add transaction ids, CORS headers and error bodies to every answer, and count requests out."""

    @app.before_request
    def begin() -> Response | None:
        sent = request.headers.get("X-Request-ID", "")
        g.transaction_id = sent if _TRANSACTION.match(sent) else random_hex_id()
        if lasting.dead() and request.path not in _ALWAYS_ANSWERED:
            raise Unavailable("This gateway is about to be started again.", hint="try again in a second")
        visit: Visit | None = request.environ.get(VISIT)
        if visit is not None and visit.refusal is not None:
            raise visit.refusal
        if visit is not None and visit.head_only:
            visit.max_bytes = _max_bytes()
            return Response()
        return Response(status=200) if request.method == "OPTIONS" and request.endpoint != _WEB else None

    @app.after_request
    def finish(response: Response) -> Response:
        response.headers["X-Request-ID"] = g.transaction_id
        if response.status_code == 503:
            response.headers.setdefault("Retry-After", _TRY_AGAIN_S)
        if request.endpoint == _WEB and (policy := gateway().settings.web_policy):
            # beside the function's own: a browser obeys both
            response.headers.add("Content-Security-Policy", policy)
        for name, value in g.get("cors", _CORS).items():
            response.headers.setdefault(name, value)
        if "cors" not in g:  # SDKs send headers of their own (x-stainless-*), which change nothing here
            asked = request.headers.get("Access-Control-Request-Headers", _ALLOWED_HEADERS)
            response.headers.setdefault("Access-Control-Allow-Headers", asked)
        return response

    @app.teardown_request
    def count_out(_error: BaseException | None) -> None:
        if "counted" in g:
            gateway().calls.leave(g.pop("counted"))

    @app.errorhandler(ThawError)
    def on_error(error: ThawError) -> Response:
        headers = {}
        if "activation_id" in g:
            headers[ACTIVATION_HEADER] = g.activation_id
        if isinstance(error, Unauthorized):
            headers["WWW-Authenticate"] = "Basic"
        if isinstance(error, Throttled):
            headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
        response = json_response(error_body(error), error.http_status)
        response.headers.update(headers)
        return response

    @app.errorhandler(HTTPException)
    def on_http(error: HTTPException) -> Response:
        status = error.code or 500
        message = MISSING if status == 404 else error.description or error.name
        named = NotFound(message) if status == 404 else BadRequest(message)
        return json_response(error_body(named), status)

    @app.errorhandler(Exception)
    def on_bug(error: Exception) -> Response:
        gateway().log.event("request_failed", transaction_id=g.transaction_id, path=request.path, error=repr(error))
        return json_response(error_body(ThawError("There was an internal server error.")), 500)


def json_response(plain: object, status: int = 200) -> Response:
    return Response(wire.encode(plain, (", ", ": ")), status, content_type="application/json")

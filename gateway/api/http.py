"""Shared by every route: the caller, the transaction id, error bodies, bodies within their limits."""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final

from flask import Flask, Response, current_app, g, request
from werkzeug.exceptions import HTTPException

from gateway.core import Gateway
from relay.state.api_keys import Subject
from thaw import lasting, wire
from thaw.errors import (
    BadRequest,
    ConfigError,
    Conflict,
    Forbidden,
    NotFound,
    ThawError,
    Throttled,
    TooLarge,
    Unauthorized,
    Unavailable,
)
from thaw.ids import ActionName, Namespace, is_entity_name, random_hex_id

ACTIVATION_HEADER: Final = "X-Openwhisk-Activation-Id"
MISSING: Final = "The requested resource does not exist."
_ALLOWED_HEADERS: Final = (
    "Authorization, Origin, X-Requested-With, Content-Type, Accept, User-Agent, Last-Event-ID, X-Thaw-Resumable"
)
_ALWAYS_ANSWERED: Final = ("/health", "/metrics")
_TRANSACTION = re.compile(r"\A[\x21-\x7e]{1,128}\Z")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_OPENAI_TYPES: Final = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class BadField(BadRequest):
    """An OpenAI body is wrong at ``param``."""

    def __init__(self, param: str, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.openai_code = param, code


def gateway() -> Gateway:
    core: Gateway = current_app.extensions["thaw"]
    return core


def caller() -> Subject:
    """Raises Unauthorized."""
    if "subject" not in g:
        g.subject = gateway().auth.subject(request.headers.get("Authorization"))
    subject: Subject = g.subject
    return subject


def caller_now() -> Subject:
    """The caller by what the state server says now, for routes where a revoked key must not work for another moment.
    Raises Unauthorized."""
    g.subject = gateway().auth.subject(request.headers.get("Authorization"), anew=True)
    return caller()


def namespace(named: str) -> Namespace:
    """The caller's own, by its name or ``_``.  Raises Forbidden for another tenant's."""
    own = caller().namespace
    if named not in ("_", own):
        raise Forbidden(f"The supplied authentication is not authorized to access '{named}'.")
    return own


def action_name(named_namespace: str, name: str) -> ActionName:
    """Raises NotFound for a name in a package: this version has none."""
    own = namespace(named_namespace)
    if "/" in name:
        raise NotFound(MISSING, hint="packages are absent in this version: name actions without one")
    if not is_entity_name(name):
        raise BadRequest("The request content was malformed:\nname is not a valid entity name.")
    return ActionName(f"{own}/{name}")


def query_flag(name: str) -> bool:
    text = request.args.get(name, "false").lower()
    if text not in ("true", "false"):
        raise BadRequest(f"The query parameter was malformed:\n{name} must be true or false, not '{text}'.")
    return text == "true"


def query_int(name: str, default: int | None = None, *, low: int = 0, high: int | None = None) -> int | None:
    text = request.args.get(name)
    if text is None:
        return default
    try:
        value = int(text)
    except ValueError:
        raise BadRequest(f"The query parameter '{name}' must be a whole number, not '{text}'.") from None
    if value < low or (high is not None and value > high):
        limits = f"at least {low}" if high is None else f"between {low} and {high}"
        raise BadRequest(f"The value of '{name}' must be {limits}, not {value}.")
    return value


def json_object(max_bytes: int, *, optional: bool = False) -> dict[str, Any]:
    """The request's JSON object.  Raises TooLarge, BadRequest."""
    if request.content_length is not None and request.content_length > max_bytes:
        raise TooLarge(f"Request larger than allowed: {request.content_length} > {max_bytes} bytes.")
    data = request.stream.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise TooLarge(f"Request larger than allowed: {len(data)} > {max_bytes} bytes.")
    if optional and not data.strip():
        return {}
    try:
        text = data.decode("utf-8-sig")
        plain = json.loads(text)
        if _SURROGATE.search(text):
            json.dumps(plain, ensure_ascii=False).encode()  # half a pair is no character, and no UTF-8
    except (ValueError, RecursionError) as e:
        raise BadRequest(f"The request content was malformed:\n{e}") from e
    if not isinstance(plain, dict):
        raise BadRequest("The request content was malformed:\nthe body must be a JSON object.")
    return plain


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


def error_body(error: ThawError) -> dict[str, Any]:
    if request.path.startswith("/v1/"):
        return openai_error(error)
    message = error.message
    if isinstance(error, ConfigError) and error.hint:
        message = f"{message}: {error.hint}"
    body = {"error": message, "code": g.transaction_id}
    return (
        {**body, "hint": error.hint} if isinstance(error, Unauthorized | Forbidden | Conflict) and error.hint else body
    )


def install(app: Flask) -> None:
    """Add transaction ids, CORS headers and error bodies to every answer."""

    @app.before_request
    def begin() -> Response | None:
        sent = request.headers.get("X-Request-ID", "")
        g.transaction_id = sent if _TRANSACTION.match(sent) else random_hex_id()
        if lasting.dead() and request.path not in _ALWAYS_ANSWERED:
            raise Unavailable("This gateway is about to be started again.", hint="try again in a second")
        return Response(status=200) if request.method == "OPTIONS" else None

    @app.after_request
    def finish(response: Response) -> Response:
        response.headers["X-Request-ID"] = g.transaction_id
        response.headers["Access-Control-Allow-Origin"] = "*"
        response.headers["Access-Control-Allow-Methods"] = "GET, DELETE, POST, PUT, HEAD"
        response.headers["Access-Control-Allow-Headers"] = _ALLOWED_HEADERS
        return response

    @app.errorhandler(ThawError)
    def on_error(error: ThawError) -> Response:
        headers = {}
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

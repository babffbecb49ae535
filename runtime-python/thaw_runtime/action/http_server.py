"""Convert a run to a request for the HTTP server in an image, and the server's answer to the run's result.  Pure.

A web request arrives as OpenWhisk's raw-http arguments (``__ow_method``, ``__ow_path``, ``__ow_query``,
``__ow_headers``, ``__ow_body``) and reaches the server as it was; any other invocation is ``POST /`` with its arguments
as JSON.  The answer to a web request is ``{statusCode, headers, body}``; to another one it is the JSON that the server
answers.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

_TOKEN: Final = re.compile(r"\A[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
_TARGET: Final = re.compile(r"\A/[!-~]*\Z")
_OF_THE_CONNECTION: Final = frozenset(
    ("connection", "content-length", "expect", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding")
)
_TEXTS: Final = frozenset(
    (
        "application/javascript",
        "application/x-javascript",
        "application/ecmascript",
        "application/json",
        "application/xml",
        "application/x-www-form-urlencoded",
        "image/svg+xml",
    )
)
"""A copy of the list in gateway/api/openwhisk/web_answer.py, which reads the results; this image does not contain that
package."""


class NotForServer(Exception):
    """The arguments do not describe a request."""


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes
    is_web: bool


def request_of(value: Mapping[str, Any]) -> Request:
    """Return the request to the server for a run's arguments.  Raises NotForServer."""
    if "__ow_method" not in value:
        return Request("POST", "/", {"content-type": "application/json"}, json.dumps(value).encode(), False)
    method, path, query = (str(value.get(f"__ow_{name}") or "") for name in ("method", "path", "query"))
    target = (path or "/") + (f"?{query}" if query else "")
    given = value.get("__ow_headers") or {}
    if not _TOKEN.match(method) or not _TARGET.match(target) or not isinstance(given, dict):
        raise NotForServer("the request's method, path or headers cannot be sent to a server")
    headers = {
        str(name).lower(): str(text)
        for name, text in given.items()
        if _TOKEN.match(str(name)) and str(text).isprintable() and str(text).isascii()
    }
    plain = {name: text for name, text in headers.items() if name not in _OF_THE_CONNECTION}
    return Request(method.upper(), target, plain, _body(value.get("__ow_body") or "", plain), True)


def result_of(request: Request, status: int, headers: Mapping[str, Any], body: bytes) -> Any:
    """The run's result; one with ``error`` is an application error.  ``headers`` are those of named_headers()."""
    if request.is_web:
        found = dict(headers)
        media = str(found.get("content-type", "application/octet-stream"))
        found.setdefault("content-type", media)
        text = body.decode("utf-8", "replace") if _is_text(media) else base64.b64encode(body).decode()
        return {"statusCode": status, "headers": found, "body": text}
    try:
        plain = json.loads(body) if body else {}
    except (ValueError, RecursionError):
        plain = None
    if 200 <= status < 300 and isinstance(plain, dict | list):
        return plain
    if 200 <= status < 300:
        return {"body": body.decode("utf-8", "replace")}
    named_error = plain.get("error") if isinstance(plain, dict) else None
    return {"error": named_error or f"the server answered with status {status}"}


def named_headers(headers: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """The headers by name, without those of the connection.  A repeated one is a list of its texts."""
    named: dict[str, list[str]] = {}
    for name, text in headers:
        if name.lower() not in _OF_THE_CONNECTION:
            named.setdefault(name.lower(), []).append(text)
    return {name: texts if len(texts) > 1 else texts[0] for name, texts in named.items()}


def _body(text: str, headers: Mapping[str, str]) -> bytes:
    media = headers.get("content-type", "")
    if _is_text(media) and media.partition(";")[0].strip().lower() != "application/json":
        return text.encode()
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise NotForServer("the request's body cannot be read") from None


def _is_text(media: str) -> bool:
    plain = media.partition(";")[0].strip().lower()
    return plain.startswith("text/") or plain in _TEXTS or plain.endswith(("+json", "+xml"))

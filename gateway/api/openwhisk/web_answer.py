"""A web action's result as an HTTP answer, by the extension of the request.  Pure; after OpenWhisk's transcoders.

::

    .http  {statusCode, headers, body}   the default          .json  an object or a list
    .html  the string under body or html                      .svg   the string under body or svg
    .text  the value under body or text
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from thaw import wire
from thaw.errors import BadRequest, NotFound

EXTENSIONS: Final = (".http", ".json", ".html", ".svg", ".text")
_TOKEN: Final = re.compile(r"\A[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
_MEDIA_TYPE: Final = re.compile(r"\A[\w!#$&^.+-]+/[\w!#$&^.+-]+\Z")
_OF_THE_CONNECTION: Final = frozenset(
    ("connection", "content-length", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade")
)
"""A function must not say where its answer ends: the next answer on the connection would begin elsewhere."""
_OF_THE_GATEWAY: Final = frozenset(("date", "server"))
"""Every answer has these from the gateway, and an answer has each of them once."""
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
_NO_BODY: Final = (204, 304)


@dataclass(frozen=True, slots=True)
class WebAnswer:
    """``content_type`` is empty where there is no body."""

    status: int
    body: bytes = b""
    content_type: str = ""
    headers: tuple[tuple[str, str], ...] = ()


def split_extension(name: str) -> tuple[str, str]:
    """The action's name and the extension, which is ``.http`` where none is known."""
    for extension in EXTENSIONS:
        if name.endswith(extension):
            return name[: -len(extension)], extension
    return name, ".http"


def is_text(media_type: str) -> bool:
    """Whether a body of this type is text; every other body is base64 on its way to and from a function."""
    return media_type.startswith("text/") or media_type in _TEXTS or media_type.endswith(("+json", "+xml"))


def is_json(media_type: str) -> bool:
    return media_type == "application/json" or media_type.endswith("+json")


def answer(extension: str, result: Any) -> WebAnswer:
    """Raises BadRequest, NotFound."""
    return _AS[extension](result)


def streamed_head(status: int, headers: dict[str, Any]) -> WebAnswer:
    """The head of an answer whose body is passed on as it comes, with its content type among its headers.  Raises
    BadRequest."""
    return WebAnswer(_status(status) or 200, headers=tuple(_headers(headers)))


def _as_json(result: Any) -> WebAnswer:
    if not isinstance(result, dict | list):
        raise _invalid("application/json")
    return WebAnswer(200, wire.encode(result), "application/json")


def _as_text(result: Any) -> WebAnswer:
    value = result
    if isinstance(result, dict):
        if "body" not in result and "text" not in result:
            raise NotFound("Response does not include requested property.")
        value = result["body"] if "body" in result else result["text"]
    text = value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False)
    return WebAnswer(200, _utf8(text), "text/plain; charset=UTF-8")


def _as_markup(field: str, content_type: str) -> Callable[[Any], WebAnswer]:
    def as_markup(result: Any) -> WebAnswer:
        value = result.get("body", result.get(field)) if isinstance(result, dict) else result
        if not isinstance(value, str):
            raise _invalid(content_type)
        return WebAnswer(200, _utf8(value), f"{content_type}; charset=UTF-8")

    return as_markup


def _as_http(result: Any) -> WebAnswer:
    if not isinstance(result, dict):
        raise _invalid("message/http")
    status = _status(result.get("statusCode"))
    headers = _headers(result.get("headers", {}))
    body = result.get("body")
    named = next((value for name, value in headers if name.lower() == "content-type"), None)
    others = tuple(header for header in headers if header[0].lower() != "content-type")
    if body is None or body == "" or status in _NO_BODY:
        return WebAnswer(status or 204, headers=others)
    if isinstance(body, str):
        data, content_type = _from_text(body, named or "text/html")
    else:
        data, content_type = wire.encode(body), named or "application/json"
        if not is_json(_media_type(content_type)):
            raise BadRequest("Response type in header did not match generated content type.")
    return WebAnswer(status or 200, data, content_type, others)


def _from_text(body: str, content_type: str) -> tuple[bytes, str]:
    media_type = _media_type(content_type)
    if is_text(media_type):
        charset = "" if "charset" in content_type.lower() or is_json(media_type) else "; charset=UTF-8"
        return _utf8(body), content_type + charset
    try:
        return base64.b64decode(body, validate=True), content_type
    except (binascii.Error, ValueError):
        raise BadRequest("Response type in header did not match generated content type.") from None


def _media_type(content_type: str) -> str:
    media_type = content_type.partition(";")[0].strip().lower()
    if not _MEDIA_TYPE.match(media_type):
        raise BadRequest("Response did not specify a known content-type.")
    return media_type


def _status(code: Any) -> int | None:
    """A status that ends an answer: 100 to 199 would be followed by another one.  A function's number may be NaN."""
    if code is None:
        return None
    if isinstance(code, str) and len(code) == 3 and code.isascii() and code.isdigit():
        code = int(code)
    if type(code) not in (int, float) or not 200 <= code <= 599 or code != int(code):
        raise _invalid("message/http")
    return int(code)


def _headers(plain: Any) -> list[tuple[str, str]]:
    if not isinstance(plain, dict):
        raise _invalid("message/http")
    found = [(name, text) for name, value in plain.items() for text in _texts(value)]
    for name, text in found:
        if not _TOKEN.match(name) or not text.isprintable() or any(ord(c) > 255 for c in text):
            raise _invalid("message/http")
    return [header for header in found if header[0].lower() not in _OF_THE_CONNECTION | _OF_THE_GATEWAY]


def _texts(value: Any) -> list[str]:
    """The values of one header; a list is several headers of the name."""
    if isinstance(value, list):
        return [text for inner in value for text in _texts(inner)]
    if isinstance(value, bool):
        return [str(value).lower()]
    if not isinstance(value, str | int | float):
        raise _invalid("message/http")
    return [str(value)]


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _invalid(media_type: str) -> BadRequest:
    return BadRequest(f"Response is not valid '{media_type}'.")


_AS: Final[dict[str, Callable[[Any], WebAnswer]]] = {
    ".http": _as_http,
    ".json": _as_json,
    ".html": _as_markup("html", "text/html"),
    ".svg": _as_markup("svg", "image/svg+xml"),
    ".text": _as_text,
}

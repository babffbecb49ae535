"""What a thread does with a connection: it reads the head, calls the application and writes the answer.

The parser and the response are gunicorn's.  The body is in memory already, and ``100 Continue`` was sent by the worker.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any, Final

from gunicorn.http import wsgi
from gunicorn.http.errors import (
    ExpectationFailed,
    LimitRequestHeaders,
    LimitRequestLine,
    NoMoreData,
    ParseException,
    UnsupportedTransferCoding,
)
from gunicorn.http.message import Request
from gunicorn.http.unreader import IterUnreader

from gateway.front.connection import Connection, Out
from gateway.front.visit import VISIT, Visit

Wsgi = Callable[[dict[str, Any], Any], Iterable[bytes]]
_STATUS: Final = {
    LimitRequestLine: HTTPStatus.REQUEST_URI_TOO_LONG,
    LimitRequestHeaders: HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    UnsupportedTransferCoding: HTTPStatus.NOT_IMPLEMENTED,
    ExpectationFailed: HTTPStatus.EXPECTATION_FAILED,
}


def answer(cfg: Any, app: Wsgi, connection: Connection, visit: Visit, out: Out, *, keep: bool) -> bool:
    """Return whether the connection takes another request.  ``keep``: whether the worker would let it.  Raises OSError
    when the client is gone."""
    request = connection.request
    if request is None:
        return False  # the worker has given the request up
    try:
        parsed = Request(cfg, IterUnreader([request.head]), connection.client)
    except (ParseException, NoMoreData, StopIteration) as e:
        out.refuse(_STATUS.get(type(e), HTTPStatus.BAD_REQUEST), f"The request was malformed: {e}")
        return False
    parsed._expected_100_continue = False
    parsed.body = io.BytesIO() if visit.head_only else request.body()
    response, environ = wsgi.create(parsed, out, connection.client, connection.server, cfg)
    environ |= {"wsgi.multithread": True, "gunicorn.socket": connection.sock, VISIT: visit}
    if not keep or not request.complete:
        response.force_close()
    return _write(response, app(environ, response.start_response), visit, out)


def _write(response: Any, parts: Iterable[bytes], visit: Visit, out: Out) -> bool:
    try:
        if visit.max_bytes is not None:
            return True  # the client may send its body
        out.begin(leaves=response.response_length is not None)
        for part in parts:
            response.write(part)
        response.close()
        out.flush()
    finally:
        close = getattr(parts, "close", None)
        if close is not None:
            close()
    return not response.should_close()

"""A thread's work on a connection: it reads the head, calls the application and writes the answer.

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
    parts = app(environ, response.start_response)
    if visit.max_bytes is not None:
        _close(parts)
        return True  # the client may send its body
    out.begin(leaves=visit.as_read or (response.response_length is not None and not visit.as_made))
    return Answering(response, parts, out, as_read=visit.as_read, as_made=visit.as_made).go_on()


class Answering:
    """An answer that is being written: at once, or part by part as its client reads."""

    def __init__(
        self, response: Any, parts: Iterable[bytes], out: Out, *, as_read: bool, as_made: bool = False
    ) -> None:
        self._response, self._parts, self._out = response, parts, out
        self._as_read, self._as_made = as_read, as_made
        self._left = iter(parts)

    def go_on(self) -> bool:
        """Return whether the connection takes another request.  The answer is not at its end if ``out.more`` is set.
        Raises OSError when the client is gone, or the answer breaks off."""
        at_end = True
        try:
            if self._as_made:  # the first part may be long in coming
                self._response.send_headers()
                self._out.flush()
            for part in self._left:
                self._response.write(part)
                if self._as_read and self._out.left is not None:
                    self._out.more, at_end = self, False
                    return False
            self._response.close()
            self._out.flush()
        except BaseException:
            self._out.is_broken = not self._response.chunked and self._response.response_length is None
            raise
        finally:
            if at_end:
                self.close()
        return not self._response.should_close()

    def close(self) -> None:
        _close(self._parts)


def _close(parts: Iterable[bytes]) -> None:
    close = getattr(parts, "close", None)
    if close is not None:
        close()

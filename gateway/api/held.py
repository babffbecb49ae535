"""Shared code for held requests: how long they wait (``wait_s``), and the end of the wait when the client goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from flask import request

from gateway.api.http import gateway
from gateway.serving.hangup import Hangup, watched
from thaw.errors import BadRequest

LONGEST_WAIT_S: Final = 30.0
"""The longest wait of a held request.  It occupies one of the gateway's threads, so the client has to ask again."""


def wait_s() -> float:
    """Return the wait that the request asks for, in seconds, by default 0.  Raises BadRequest."""
    text = request.args.get("wait_s")
    try:
        found = float(text or 0)
    except ValueError:
        found = -1.0
    if not 0 <= found <= LONGEST_WAIT_S:
        raise BadRequest(f"wait_s must be a number of seconds, at most {LONGEST_WAIT_S:g}")
    return found


@contextmanager
def client_watched() -> Iterator[Hangup]:
    hangup, unwatch = watched(gateway().hangups, request.environ.get("gunicorn.socket"))
    try:
        yield hangup
    finally:
        unwatch()

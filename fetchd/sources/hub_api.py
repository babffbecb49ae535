"""The errors of a hub's answers (thaw/hub/answers.py has the sentences), and the pauses that it asks for."""

from __future__ import annotations

import http.client
import re
from typing import Final

from fetchd.marks import AddressRefused
from fetchd.sources.base import Busy, NotAUri, Refused
from fetchd.sources.http_client import passing
from thaw.errors import StoreUnavailable, ThawError
from thaw.hub import answers as hub_answers
from thaw.hub.models import HubModel

MOST_PAUSE_S: Final = 60.0
"""A hub that wants to be left alone for longer is asked once in between: one wrong number must not stop a host."""

_RATE_LIMIT: Final = re.compile(r'"\w+"\s*;\s*r\s*=\s*0\s*;\s*t\s*=\s*([0-9]{1,9})')
_HOW: Final = 'an operator adds {"prefix": "hf://%s", "token_file": "…"} to the file THAW_FETCHD_CREDENTIALS'


def refusal(
    response: http.client.HTTPResponse, model: HubModel, endpoint: str, file: str, *, has_token: bool
) -> ThawError:
    """The error of an answer that is neither ``file`` nor a redirect to it."""
    if (error := busy_or_down(response, str(model))) is not None:
        return error
    how = _HOW % model.repository
    found = hub_answers.refusal(response.status, response.msg, model, endpoint, file, has_token=has_token, how=how)
    return (NotAUri if found.is_move else Refused)(found.sentence, hint=found.hint)


def busy_or_down(response: http.client.HTTPResponse, what: str) -> StoreUnavailable | None:
    """The error of a hub, or of its store, that may answer in another way later; None for another answer."""
    error = passing(response, what)
    if error is None:
        return None
    after_s = error.after_s if isinstance(error, Busy) else _until_more_s(response)
    return Busy(error.message, min(after_s, MOST_PAUSE_S), hint=error.hint) if after_s > 0 else error


def told(error: Exception) -> str:
    """Why there is no connection, without an address: a tenant reads it, and a hub's stores may be in our network."""
    if isinstance(error, AddressRefused):
        return "the hub leads to an address that this host does not connect to (THAW_FETCHD_ALLOW)"
    return f"the hub or its store cannot be reached ({type(error).__name__})"


def _until_more_s(response: http.client.HTTPResponse) -> float:
    found = _RATE_LIMIT.search(response.getheader("RateLimit", "")) if response.status == 429 else None
    return float(found[1]) if found else 0.0

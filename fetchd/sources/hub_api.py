"""The errors of a hub's answers (thaw/hub_answers.py has the sentences), and the pauses that it asks for."""

from __future__ import annotations

import http.client
import re
from typing import Final

from fetchd.sources.base import Busy, NotAUri, Refused
from fetchd.sources.http_client import passing
from thaw import hub_answers
from thaw.errors import StoreUnavailable, ThawError
from thaw.hub import HubModel

_RATE_LIMIT: Final = re.compile(r'"\w+"\s*;\s*r\s*=\s*0\s*;\s*t\s*=\s*([0-9]{1,9})')
_HOW: Final = 'an operator adds {"prefix": "hf://%s", "token_file": "…"} to the file THAW_FETCHD_CREDENTIALS'


def refusal(response: http.client.HTTPResponse, model: HubModel, endpoint: str, *, has_token: bool) -> ThawError:
    """The error of an answer that is neither the object nor a redirect to it."""
    if (error := busy_or_down(response, str(model))) is not None:
        return error
    how = _HOW % model.repository
    found = hub_answers.refusal(response.status, response.msg, model, endpoint, has_token=has_token, how=how)
    return (NotAUri if found.is_move else Refused)(found.sentence, hint=found.hint)


def busy_or_down(response: http.client.HTTPResponse, what: str) -> StoreUnavailable | None:
    """The error of a hub that may answer in another way later; None for another answer."""
    error = passing(response, what)
    if error is None or isinstance(error, Busy) or response.status != 429:
        return error
    found = _RATE_LIMIT.search(response.getheader("RateLimit", ""))
    return Busy(error.message, float(found[1]), hint=error.hint) if found else error

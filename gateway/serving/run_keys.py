"""Keys for one run: what a function with the annotation ``provide-api-key`` finds in ``__OW_API_KEY``.

::

    activation id as a uuid : thaw.<namespace, subject, until, base64>.<HMAC of all that>

OpenWhisk hands a function the key of its caller.  Here nobody knows that key, only its hash, and a web request has no
key.  So a run gets one that says by itself whose it is.  It is a tenant's, works at every gateway of the installation,
and ends with the run's time limit; nothing is stored.
"""

from __future__ import annotations

import base64
import hmac
import json
import uuid
from hashlib import sha256
from typing import Final

from gateway.serving.call import Call
from relay.state.api_keys import Subject
from thaw.ids import Namespace

_MARK: Final = ":thaw."


class RunKeys:
    def __init__(self, token: str) -> None:
        """``token``: the installation's, which all gateways know."""
        self._secret = hmac.digest(token.encode(), b"run keys", "sha256")

    def make(self, call: Call, until_ms: int) -> str:
        whose = json.dumps([call.subject.namespace, call.subject.subject, until_ms]).encode()
        body = f"{uuid.UUID(call.activation_id)}{_MARK}{base64.urlsafe_b64encode(whose).decode()}"
        return f"{body}.{self._sign(body)}"

    def subject(self, key: str, now_ms: int) -> Subject | None:
        """Whose run has the key; None for a key of another kind, one that is over, and one that we did not make."""
        body, _, signature = key.rpartition(".")
        if _MARK not in body or not hmac.compare_digest(signature.encode(), self._sign(body).encode()):
            return None
        namespace, subject, until_ms = json.loads(base64.urlsafe_b64decode(body.partition(_MARK)[2]))
        return Subject(Namespace(namespace), subject) if now_ms <= until_ms else None

    def _sign(self, body: str) -> str:
        return hmac.new(self._secret, body.encode(), sha256).hexdigest()

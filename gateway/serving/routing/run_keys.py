"""Keys for one run: a function with the annotation ``provide-api-key`` finds one in ``__OW_API_KEY``.

::

    activation id as a uuid : thaw.<namespace, subject, the caller's key's hash, until, base64>.<HMAC of all that>

OpenWhisk hands a function the key of its caller.  Here nobody knows that key, only its hash, and a web request has no
key.  So a run gets a key that itself names its owner.  It is a tenant's, works at every gateway of the installation,
and ends with the run's time limit, or when the caller's own key is revoked; nothing is stored.  A run that was called
with such a key gets a key that ends no later, so that a function which was called once cannot renew it for ever.
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
        caller = call.subject
        until_ms = min(until_ms, caller.until_ms or until_ms)
        whose = json.dumps([caller.namespace, caller.subject, caller.digest, until_ms]).encode()
        body = f"{uuid.UUID(call.activation_id)}{_MARK}{base64.urlsafe_b64encode(whose).decode()}"
        return f"{body}.{self._sign(body)}"

    def subject(self, key: str, now_ms: int) -> Subject | None:
        """Return the owner of the run that has the key; None for a key of another kind, an expired one, and one that we
        did not make.  This does not check whether the caller's own key is still live."""
        body, _, signature = key.rpartition(".")
        if _MARK not in body or not hmac.compare_digest(signature.encode(), self._sign(body).encode()):
            return None
        namespace, subject, digest, until_ms = json.loads(base64.urlsafe_b64decode(body.partition(_MARK)[2]))
        if now_ms > until_ms:
            return None
        return Subject(Namespace(namespace), subject, digest=digest, until_ms=until_ms)

    def _sign(self, body: str) -> str:
        return hmac.new(self._secret, body.encode(), sha256).hexdigest()

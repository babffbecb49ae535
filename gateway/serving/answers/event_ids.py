"""The ids of a stream's events.  A client that reconnects sends back the last one, and so says where it was.

::

    5f1c…e09a . 6a21b0c4 . pV3k…8Qd2 : 17 . 9ab3f00c
    activation  started    proof       index checksum

*Started* is when the answer was first asked for, in seconds since 1970: an id is of use only for a while.  The *proof*
is 15 bytes in base64url: six of a digest of the request, and nine of a MAC over tenant, activation, start and digest.
So any gateway can tell, without asking anyone, whether an id belongs to this tenant and to this body.  The *index* is
the token's number.  The events after the last token (held-back text, finish reason, usage) have the three numbers that
follow it.  The *checksum* is the CRC-32 of the ids of all tokens up to the index: an answer that was computed again
must agree with the part that the client has.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from thaw.action import Action
from thaw.errors import BadRequest, Conflict, NotFound
from thaw.ids import ActivationId, Namespace

_ID: Final = re.compile(r"\A([0-9a-f]{32})\.([0-9a-f]{8})\.([\w-]{20}):(\d{1,9})\.([0-9a-f]{8})\Z", re.ASCII)
_DIGEST_BYTES: Final = 6
_MAC_BYTES: Final = 9
N_FINAL: Final = 3
"""The events after the last token: held-back text, finish reason, usage."""


@dataclass(frozen=True, slots=True)
class EventId:
    activation_id: ActivationId
    started_s: int
    digest: bytes  # the request's
    index: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Identifies a request's body.  ``n_bytes``: its length as JSON, which estimates the memory that it takes."""

    digest: bytes
    n_bytes: int


def fingerprint(action: Action, endpoint: str, body: Mapping[str, Any]) -> Fingerprint:
    """Two requests with the same digest have the same answer: the version of the action counts, and the body's order of
    keys does not."""
    plain = [action.name, action.version, endpoint, body]
    encoded = json.dumps(plain, sort_keys=True).encode()
    return Fingerprint(hashlib.sha256(encoded).digest()[:_DIGEST_BYTES], len(encoded))


def request_digest(action: Action, endpoint: str, body: Mapping[str, Any]) -> bytes:
    """See fingerprint()."""
    return fingerprint(action, endpoint, body).digest


class EventIds:
    """``secret`` is known to all gateways of an installation and to nobody else."""

    def __init__(self, secret: str) -> None:
        self._key = hashlib.sha256(f"event ids {secret}".encode()).digest()

    def prefix(self, namespace: Namespace, activation_id: ActivationId, started_s: int, digest: bytes) -> str:
        """The part of the ids that all events of one activation's streams share."""
        proof = base64.urlsafe_b64encode(digest + self._mac(namespace, activation_id, started_s, digest))
        return f"{activation_id}.{started_s:08x}.{proof.decode()}"

    def read(self, text: str, namespace: Namespace) -> EventId:
        """Raises UnknownEvent for an id that no gateway gave to this tenant."""
        match = _ID.match(text.strip())
        if match is not None:
            activation_id, started_s = ActivationId(match[1]), int(match[2], 16)
            proof = base64.urlsafe_b64decode(match[3])
            digest, mac = proof[:_DIGEST_BYTES], proof[_DIGEST_BYTES:]
            if hmac.compare_digest(mac, self._mac(namespace, activation_id, started_s, digest)):
                return EventId(activation_id, started_s, digest, int(match[4]), int(match[5], 16))
        raise UnknownEvent

    def _mac(self, namespace: Namespace, activation_id: ActivationId, started_s: int, digest: bytes) -> bytes:
        message = f"{namespace}\n{activation_id}\n{started_s}\n".encode() + digest
        return hmac.digest(self._key, message, "sha256")[:_MAC_BYTES]


class UnknownEvent(NotFound):
    """Nobody gave this id to this tenant, or it is too long ago."""

    def __init__(self) -> None:
        super().__init__("There is no event with this Last-Event-ID. Leave the header out to ask anew.")


class OtherRequest(BadRequest):
    """The id is the tenant's, but the answer to this request is another one."""

    param = "Last-Event-ID"

    def __init__(self) -> None:
        super().__init__(
            "Last-Event-ID belongs to another request, or the model was updated since. Send the same body to the same "
            "endpoint, or leave the header out to ask anew."
        )


class OtherAnswer(Conflict):
    param = "Last-Event-ID"

    def __init__(self) -> None:
        super().__init__(
            "The answer was computed again and does not continue what came before Last-Event-ID. Leave the header out "
            "to ask anew."
        )


class Progress:
    """How far an answer is, and which of its events its client lacks.  ``had``: the last one that the client has."""

    def __init__(self, had: EventId | None = None) -> None:
        self.n_tokens = 0
        self.checksum = 0
        self._had, self._wanted = (-1, 0) if had is None else (had.index, had.checksum)

    def token(self, token_id: int) -> bool:
        """Count the next token.  Return whether the client lacks it.  Raises OtherAnswer."""
        index, self.n_tokens = self.n_tokens, self.n_tokens + 1
        self.checksum = zlib.crc32(token_id.to_bytes(8, "little"), self.checksum)
        if index == self._had:
            self._verify()
        return index > self._had

    def lacks_final(self, number: int) -> bool:
        """Whether the client lacks event ``number`` (0, 1 or 2) after the last token.  Raises OtherAnswer."""
        if self._had >= self.n_tokens:
            self._verify()
            if self._had >= self.n_tokens + N_FINAL:
                raise OtherAnswer
        return self.n_tokens + number > self._had

    def _verify(self) -> None:
        if self.checksum != self._wanted:
            raise OtherAnswer

"""API keys: ``uuid:key`` as HTTP Basic (OpenWhisk) or Bearer (OpenAI SDKs), looked up by its SHA-256."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable
from typing import Final

from gateway.serving.routing.run_keys import RunKeys
from relay.state.api_keys import ApiKeys, Subject, digest_of
from thaw.clock import wall_ms
from thaw.errors import Unauthorized
from thaw.ids import Namespace

CACHE_S: Final = 60.0
"""For this long a known key costs no round trip, and a key that another gateway revoked still works, except where an
operator's key is asked for."""
_CACHED: Final = 10_000


class Authenticator:
    def __init__(
        self, keys: ApiKeys, now_s: Callable[[], float] = time.monotonic, run_keys: RunKeys | None = None
    ) -> None:
        self._keys, self._now_s, self._run_keys = keys, now_s, run_keys
        self._lock = threading.Lock()
        self._revoked = 0
        self._known: dict[str, tuple[float, Subject]] = {}

    def knows(self, authorization: str) -> bool:
        """Whether the header's key is answered without the state server."""
        try:
            _digest(authorization)
        except Unauthorized:
            return True
        return self.known_namespace(authorization) is not None

    def known_namespace(self, authorization: str) -> Namespace | None:
        """The namespace of the header's key, if that is known without the state server."""
        try:
            digest = _digest(authorization)
        except Unauthorized:
            return None
        with self._lock:
            known = self._known.get(digest)
        return known[1].namespace if known is not None and known[0] > self._now_s() else None

    def subject(self, authorization: str | None, *, anew: bool = False) -> Subject:
        """Return the subject that the header belongs to.  ``anew``: ask the state server even if the answer is
        remembered.  Raises Unauthorized, Unavailable."""
        credentials = _credentials(authorization)
        of_run = None if self._run_keys is None else self._run_keys.subject(credentials, wall_ms())
        if of_run is None:
            return self._owner(digest_of(credentials), self._keys.subject, anew)
        if of_run.digest:
            self._owner(of_run.digest, self._keys.subject, anew)
        else:  # a web request has no key: the run's works while its namespace has one
            self._owner(f"of {of_run.namespace}", lambda _: self._keys.any_subject(of_run.namespace), anew)
        return of_run

    def _owner(self, named: str, read: Callable[[str], Subject | None], anew: bool) -> Subject:
        """``named``: the digest of a key, or "of NAMESPACE".  Raises Unauthorized when it has no live key."""
        now_s = self._now_s()
        with self._lock:
            known, revoked = self._known.get(named), self._revoked
        if known is not None and known[0] > now_s and not anew:
            return known[1]
        subject = read(named)
        if subject is None:
            if known is not None:
                self.forget()
            raise Unauthorized("The supplied authentication is invalid.", hint="thaw property set --auth UUID:KEY")
        with self._lock:
            if len(self._known) >= _CACHED:
                self._known.clear()
            if revoked == self._revoked:  # else this key may have been revoked while it was read
                self._known[named] = (now_s + CACHE_S, subject)
        return subject

    def forget(self) -> None:
        """A key was revoked: it ends here at once, and with it the keys of its runs."""
        with self._lock:
            self._revoked += 1
            self._known.clear()


def _digest(authorization: str | None) -> str:
    return digest_of(_credentials(authorization))


def _credentials(authorization: str | None) -> str:
    if not authorization:
        raise Unauthorized("The resource requires authentication, which was not supplied with the request.")
    scheme, _, value = authorization.strip().partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value.strip(), validate=True).decode()
        except ValueError:  # not base64, not ASCII, or not UTF-8 inside
            pass
    raise Unauthorized("The supplied authentication is invalid.", hint="send Basic base64(uuid:key) or Bearer uuid:key")

"""Long code of actions, in pieces beside the action that names it.

::

    begin ─▶ add, add, add … ─▶ end ──▶ Records.put_action ──▶ the action is updated, or deleted
             the upload expires         it stays               it expires, or goes with the next one

Code that no action names has a lifetime.  So a gateway that dies while it writes code leaves nothing behind, and a host
that reads the code of an action while somebody updates it reads to the end.  A namespace keeps only the latest few such
codes, so that updates without end do not fill the server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Final

import redis

from relay.state import keys, redis_link
from thaw.action import Action, StoredCode
from thaw.errors import PlatformError, Unavailable
from thaw.ids import random_hex_id

UNNAMED_TTL_S: Final = 1200
"""How long code without an action lasts: longer than the slowest client that a gateway serves takes to read 48 MiB."""
_DISCARD: Final = """
if redis.call('TTL', KEYS[1]) >= 0 then return redis.call('DEL', KEYS[1]) end
return 0
"""
"""An action may have taken the code although the answer to its writer was lost.  It has no lifetime then."""


class Upload:
    """One code on its way into the state server."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client
        self._id = random_hex_id()
        self._digests: list[str] = []
        self.n_bytes = 0

    def add(self, piece: bytes) -> None:
        """``piece`` is UTF-8 of whole characters.  Raises Unavailable, PlatformError."""
        with redis_link.translated("write code"):
            pipe = self._redis.pipeline(transaction=True)
            pipe.hset(keys.code(self._id), str(len(self._digests)), piece)
            pipe.expire(keys.code(self._id), UNNAMED_TTL_S)
            pipe.execute()
        self._digests.append(hashlib.sha256(piece).hexdigest())
        self.n_bytes += len(piece)

    def end(self) -> StoredCode:
        """Return the reference that the code's action stores.  :meth:`Records.put_action` then makes the code
        permanent."""
        return StoredCode(self._id, tuple(self._digests), self.n_bytes)

    def discard(self) -> None:
        """Delete the code unless an action has it.  If the delete fails, the code expires."""
        if not self._digests:
            return
        try:
            with redis_link.translated("delete code"):
                self._redis.eval(_DISCARD, 1, keys.code(self._id))
        except PlatformError:
            pass


class Codes:
    def __init__(self, client: redis.Redis) -> None:
        self._redis = client

    def begin(self) -> Upload:
        return Upload(self._redis)

    def pieces(self, action: Action) -> Iterator[bytes]:
        """Yield the code as UTF-8, each piece checked against its digest and read when it is asked for.  Raises
        Unavailable when the action was changed or deleted meanwhile, PlatformError for a piece that is lost or
        damaged."""
        code = action.exec.code
        if isinstance(code, str):
            yield code.encode()
            return
        for number, digest in enumerate(code.digests):
            with redis_link.translated("read code"):
                piece: Any = self._redis.hget(keys.code(code.id), str(number))
            if piece is None:
                raise self._why_gone(action)
            if hashlib.sha256(piece).hexdigest() != digest:
                raise PlatformError("The stored code of the action is damaged.", hint="deploy the action again")
            yield piece

    def _why_gone(self, action: Action) -> PlatformError:
        with redis_link.translated("read an action's last version"):
            pipe = self._redis.pipeline(transaction=False)
            pipe.get(keys.last_version(action.name))
            pipe.hexists(keys.actions(action.namespace), action.name)
            last, exists = pipe.execute()
        if exists and last is not None and redis_link.text(last) == action.version:
            return PlatformError("The code of the action is lost: deploy the action again.")
        return Unavailable("The action was changed or deleted while its code was read: try again.")

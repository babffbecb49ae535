"""API keys in the state server: their owners, their rights, and whether they were revoked.

A key is ``uuid:secret``.  It is stored under its SHA-256, so nobody who reads the state server learns a key.  A revoked
key keeps its row: a gateway that starts with the same THAW_FIRST_KEY must not bring it back.
"""

from __future__ import annotations

import enum
import hashlib
import secrets
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import redis

from relay.state import keys, redis_link
from thaw import wire
from thaw.clock import wall_ms
from thaw.errors import Conflict, NotFound
from thaw.ids import Namespace

T = TypeVar("T")


class Role(enum.StrEnum):
    """An operator sees to hosts, keys and namespaces; a tenant deploys and runs in its own namespace only."""

    OPERATOR = "operator"
    TENANT = "tenant"


@dataclass(frozen=True, slots=True)
class Subject:
    """The owner of an API key.  ``digest`` is the hash of that key: later actions of this owner are allowed as long as
    the key is live.  ``until_ms`` is the time at which the authority ends in any case; 0: it has no such time."""

    namespace: Namespace
    subject: str
    role: Role = Role.TENANT
    digest: str = field(default="", compare=False)
    until_ms: int = field(default=0, compare=False)

    @property
    def is_operator(self) -> bool:
        return self.role is Role.OPERATOR


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A row of the state server.  Rows of earlier versions have neither role nor id nor times; they are tenants'."""

    namespace: Namespace
    subject: str
    role: Role = Role.TENANT
    key_id: str = ""  # the uuid of ``uuid:secret``
    created_ms: int = 0
    revoked_ms: int = 0

    @property
    def is_live(self) -> bool:
        return not self.revoked_ms


@dataclass(frozen=True, slots=True)
class Listed:
    """One key in a list of keys.  ``key_id`` of a row without an id is the beginning of its hash."""

    key_id: str
    key: ApiKey
    digest: str


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


class ApiKeys:
    def __init__(self, client: redis.Redis) -> None:
        self._redis = client

    def subject(self, digest: str) -> Subject | None:
        """The owner of the key; None for one that is unknown or revoked."""
        with redis_link.translated("look a key up"):
            row: Any = self._redis.hget(keys.API_KEYS, digest)
        key = None if row is None else wire.loads(ApiKey, row)
        return None if key is None or not key.is_live else Subject(key.namespace, key.subject, key.role, digest)

    def any_subject(self, namespace: Namespace) -> Subject | None:
        """The owner of a key of this namespace; None when it has none that works."""
        found = self.list(namespace)
        return Subject(namespace, found[0].key.subject, digest=found[0].digest) if found else None

    def any(self) -> bool:
        with redis_link.translated("count keys"):
            return bool(self._redis.hlen(keys.API_KEYS))

    def create(self, namespace: Namespace, role: Role) -> tuple[str, ApiKey]:
        """Make a key and return it with its row.  This is the only time that the key itself is known."""
        key_id = str(uuid.uuid4())
        secret = f"{key_id}:{secrets.token_urlsafe(48)}"
        key = ApiKey(namespace, str(namespace), role, key_id, wall_ms())
        self.put(digest_of(secret), key)
        return secret, key

    def put(self, digest: str, key: ApiKey) -> None:
        with redis_link.translated("write a key"):
            self._redis.hset(keys.API_KEYS, digest, wire.dumps(key))

    def admit(self, secret: str, key: ApiKey) -> None:
        """Write the row unless there is one.  A live row of an earlier version, without an id, is replaced."""
        digest = digest_of(secret)

        def change(pipe: Any) -> None:
            row = pipe.hget(keys.API_KEYS, digest)
            pipe.multi()
            had = None if row is None else wire.loads(ApiKey, row)
            if had is None or (had.is_live and not had.key_id):
                pipe.hset(keys.API_KEYS, digest, wire.dumps(key))

        self._transaction("admit a key", change)

    def list(self, namespace: Namespace | None = None) -> list[Listed]:
        """The keys that work, of one namespace or of all, the oldest first."""
        with redis_link.translated("list keys"):
            rows: Any = self._redis.hgetall(keys.API_KEYS)
        found = [one for one in _listed(rows) if one.key.is_live and namespace in (None, one.key.namespace)]
        return sorted(found, key=lambda one: (one.key.created_ms, one.key_id))

    def revoke(self, key_id: str) -> tuple[Listed, ...]:
        """End every key of that id, and return them as they were.  A key that was revoked before is no error.  Raises
        NotFound, and Conflict for the last key of an operator: without one, nobody could make another."""

        def change(pipe: Any) -> tuple[Listed, ...]:
            every = _listed(pipe.hgetall(keys.API_KEYS))
            found = tuple(one for one in every if one.key_id == key_id)
            if not found:
                raise NotFound(f"There is no key {key_id:.80}.", hint="thaw key list")
            ending = [one for one in found if one.key.is_live]
            staying = [one for one in every if one.key.is_live and one.key_id != key_id]
            if _has_operator(ending) and not _has_operator(staying):
                raise Conflict(
                    "This is the last key of an operator, so it cannot be revoked.",
                    hint="make another first: thaw key create --namespace N --operator",
                )
            pipe.multi()
            for one in ending:
                ended = replace(one.key, key_id=key_id, revoked_ms=wall_ms())
                pipe.hset(keys.API_KEYS, one.digest, wire.dumps(ended))
            return found

        return self._transaction("revoke a key", change)

    def _transaction(self, doing: str, change: Callable[[Any], T]) -> T:
        """Read and write the rows as one step: when another gateway wrote meanwhile, ``change`` is called again."""
        with redis_link.translated(doing):
            client: Any = self._redis  # redis-py's types know no result of the callable
            result: T = client.transaction(change, keys.API_KEYS, value_from_callable=True)
        return result


def _listed(rows: dict[bytes, bytes]) -> list[Listed]:
    found = []
    for name, row in rows.items():
        digest, key = redis_link.text(name), wire.loads(ApiKey, row)
        found.append(Listed(key.key_id or f"sha256-{digest[:16]}", key, digest))
    return found


def _has_operator(some: Sequence[Listed]) -> bool:
    return any(one.key.role is Role.OPERATOR for one in some)

"""The connection to a Redis-protocol server, and the one place where its exceptions become ours."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, cast

import redis
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.client import Pipeline
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, ReadOnlyError, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from thaw.errors import PlatformError, Unavailable

CALL_TIMEOUT_S = 5.0
"""A call that has no answer in this time counts as a lost server; AOF rewrites stay well below it."""


_MAX_CONNECTIONS: Final = 32
"""The most connections of one client.  A thousand threads that call at once wait for one of these, up to the call's
timeout.  A connection for each thread would cost the server four calls of greeting before the call itself."""
_NO_WRITES_NOW: Final = re.compile(
    r"(?:\A|of pipeline caused error: )(?:OOM|READONLY|MISCONF|NOREPLICAS|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|BUSY)\b"
)
"""How a server begins to say that it refuses writes for a while: its memory or its disk is full, it is or needs a
replica, a script runs for too long.  redis-py has classes for two of these, and its pipelines put words before them."""
Waiting = Callable[[], AbstractContextManager[None]]


class _Pipeline(Pipeline):
    waiting: Waiting = nullcontext

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        with self.waiting():
            return super().execute(raise_on_error)


class _Client(redis.Redis):
    """``waiting()`` is the block in which a thread has a connection, or waits for one.  Whatever a thread waits for at
    the end of that block, it has none any more."""

    waiting: Waiting = nullcontext

    def execute_command(self, *args: Any, **options: Any) -> Any:
        with self.waiting():
            return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> _Pipeline:
        made = _Pipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)
        made.waiting = self.waiting
        return made


def connect(
    url: str, *, timeout_s: float = CALL_TIMEOUT_S, n_retries: int = 3, waiting: Waiting = nullcontext
) -> redis.Redis:
    """A client for ordinary calls: binary replies, bounded waits, quick retries over a server restart.  ``waiting``
    gives the block in which a thread waits for the server."""
    retry = Retry(ExponentialBackoff(cap=0.5, base=0.05), n_retries)
    pool = redis.BlockingConnectionPool.from_url(
        url,
        max_connections=_MAX_CONNECTIONS,
        timeout=timeout_s,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=retry,
        retry_on_error=[RedisConnectionError],
        health_check_interval=30,
    )
    client: Any = _Client.from_pool(pool)
    client.waiting = waiting
    return cast(redis.Redis, client)


def connect_blocking(url: str) -> redis.Redis:
    """A client for one thread that blocks in reads.  redis-py's default timeout of 5 s would raise in a longer wait."""
    return redis.Redis.from_url(
        url,
        socket_timeout=None,
        socket_connect_timeout=CALL_TIMEOUT_S,
        socket_keepalive=True,
        single_connection_client=True,
    )


def connect_listening(url: str) -> redis.Redis:
    """A client for one thread that waits for messages with timeouts of its own.  Nothing is tried twice: it begins anew
    with all that it listens to."""
    return redis.Redis.from_url(
        url,
        socket_timeout=CALL_TIMEOUT_S,
        socket_connect_timeout=CALL_TIMEOUT_S,
        socket_keepalive=True,
        retry=Retry(NoBackoff(), 0),
    )


@contextmanager
def translated(doing: str, server: str = "the state server") -> Iterator[None]:
    """RedisError → the error of :func:`refusal`."""
    try:
        yield
    except RedisError as e:
        raise refusal(doing, e, server) from e


def refusal(doing: str, error: RedisError, server: str = "the state server") -> PlatformError:
    """Unavailable when there is no server, no answer, or a server that takes no writes for now; PlatformError for what
    would fail again."""
    if isinstance(error, (RedisConnectionError, RedisTimeoutError)):
        return Unavailable(f"{doing}: {server} does not answer: {error}", hint="is Redis running?")
    if isinstance(error, (OutOfMemoryError, ReadOnlyError)) or _NO_WRITES_NOW.search(str(error)):
        hint = "try again later; INFO memory, persistence and replication of the server say why"
        return Unavailable(f"{doing}: {server} takes no writes now: {error}", hint=hint)
    return PlatformError(f"{doing}: {server} refused: {error}")


def text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)

"""The path that the messages between the stages of a measured pipeline took.

A figure that is published for the relay must come from messages that went through the relay.  Where the traces say
something else, the benchmark ends and publishes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from bench._platform import BenchPlatform
from thaw.tracing.hops import MIXED, HopPath, hops_of, path_of
from thaw.tracing.trace import TraceEvent

_CLAIMED: Final = {"auto": HopPath.RELAY, "redis": HopPath.RELAY, "tcp": HopPath.TCP, "object": HopPath.OBJECT}


def expected(transport: str, *, direct: bool) -> str:
    """The path of a pipeline whose config says ``transport``.  ``direct``: its stages may connect to one another."""
    path = _CLAIMED[transport]
    return (HopPath.TCP if direct and path is HopPath.RELAY else path).value


def checked(events: Iterable[TraceEvent], n_stages: int, claimed: str) -> str:
    """Return the path of an answer of ``n_stages``, or "" for one stage.

    Raises SystemExit if the path is not the ``claimed`` one.
    """
    taken = path_of(hops_of(events))
    if n_stages > 1 and taken != claimed:
        raise SystemExit(f"{n_stages} stages that were to use {claimed} used {taken or 'a path they did not name'}")
    return taken


def of_answer(platform: BenchPlatform, activation_id: str, n_stages: int, claimed: str) -> str:
    """Return the path of one answer, read from its trace; see :func:`checked`."""
    return checked(platform.trace(activation_id)[0], n_stages, claimed)


def together(paths: Iterable[str]) -> str:
    """Return the common path of several answers, ``mixed``, or "" if no answer had several stages."""
    found = {path for path in paths if path}
    return MIXED if len(found) > 1 else "".join(found)

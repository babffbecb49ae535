"""Which path the messages between the stages of a measured pipeline took.

A figure that is published as one of the relay must have gone through the relay: where the traces say something else,
the benchmark ends and publishes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from bench._platform import BenchPlatform
from thaw.hops import MIXED, HopPath, hops_of, path_of
from thaw.trace import TraceEvent

_CLAIMED: Final = {"auto": HopPath.RELAY, "redis": HopPath.RELAY, "tcp": HopPath.TCP, "object": HopPath.OBJECT}


def expected(transport: str, *, direct: bool) -> str:
    """What a pipeline with this ``transport`` of its config uses; ``direct``: its stages may reach one another."""
    path = _CLAIMED[transport]
    return (HopPath.TCP if direct and path is HopPath.RELAY else path).value


def checked(events: Iterable[TraceEvent], n_stages: int, claimed: str) -> str:
    """The path of an answer of ``n_stages``; "" for one stage.  Raises SystemExit if it is not the ``claimed`` one."""
    taken = path_of(hops_of(events))
    if n_stages > 1 and taken != claimed:
        raise SystemExit(f"{n_stages} stages that were to use {claimed} used {taken or 'a path they did not name'}")
    return taken


def of_answer(platform: BenchPlatform, activation_id: str, n_stages: int, claimed: str) -> str:
    """The path of one answer, read from its trace; see :func:`checked`."""
    return checked(platform.trace(activation_id)[0], n_stages, claimed)


def together(paths: Iterable[str]) -> str:
    """Of several answers: their path, ``mixed``, or "" if none had several stages."""
    found = {path for path in paths if path}
    return MIXED if len(found) > 1 else "".join(found)

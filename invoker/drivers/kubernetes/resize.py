"""Bounds a stem cell once its function is known.

A cluster that takes the new limits has only noted them: the node grants them afterwards, and says so in the pod's
status.  A container with less memory than its function may use would be killed, so the start waits for more memory; it
does not wait for less memory or another share of the CPU.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Mapping
from typing import Final

from invoker.drivers.kubernetes.container import Container
from invoker.drivers.kubernetes.seen import Seen, quantity_bytes
from thaw.errors import PlatformError, Unavailable, WorkerLost

_GRANTED_S: Final = 10.0  # the node looks at its pods every second
_HINT: Final = "Kubernetes 1.33 can, where the node has room; or set THAW_STEM_CELLS=off"

Resources = Mapping[str, Mapping[str, str]]


def resize(send: Callable[[Resources], Seen], container: Container, wanted: Resources) -> str:
    """Returns why the memory limit stays as it was, larger than wanted; empty when it does not.  Raises PlatformError
    when the container cannot have as much as is wanted."""
    has = container.pod.memory_bytes if container.pod is not None else 0
    memory = quantity_bytes(wanted["limits"]["memory"])
    try:
        container.note(send(wanted))
    except (Unavailable, WorkerLost):
        raise
    except PlatformError as e:  # a cluster before 1.33 never resizes, one before 1.34 never takes memory away
        if memory > has:
            raise _too_small(e.message) from e
        return _without_memory(send, wanted) or e.message
    if memory > has:
        _await(container, memory)
    return ""


def _without_memory(send: Callable[[Resources], Seen], wanted: Resources) -> str:
    """Why not even the rest is taken."""
    limits = {name: amount for name, amount in wanted["limits"].items() if name != "memory"}
    try:
        send({**wanted, "limits": limits})
    except (Unavailable, WorkerLost):
        raise
    except PlatformError as e:
        return e.message
    return ""


def _await(container: Container, memory: int) -> None:
    deadline = time.monotonic() + _GRANTED_S
    poll = select.poll()
    for fd in (container.moved_fd, container.cancelled_fd):
        poll.register(fd, select.POLLIN)
    while not container.cancelled:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(container.moved_fd)
        pod, left_s = container.pod, deadline - time.monotonic()
        if container.over.is_set():
            raise WorkerLost("the stem cell has ended")
        if pod is not None and pod.granted_bytes >= memory:
            return
        if pod is not None and pod.unresized:
            raise _too_small(pod.unresized)
        if left_s <= 0:
            raise _too_small("the node has not granted it in time")
        poll.poll(1000 * left_s)
    raise WorkerLost("the start was given up")


def _too_small(why: str) -> PlatformError:
    return PlatformError(f"the stem cell's memory cannot grow: {why}", hint=_HINT)

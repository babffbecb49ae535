"""Waits until a pod's container runs, or until the cluster says why it does not.

The socket is waited for as well: the node reports a running container up to a second late.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Final

from invoker.drivers.kubernetes.container import Container
from invoker.drivers.kubernetes.seen import Seen
from invoker.drivers.socket_wait import wait_socket_until
from thaw.errors import PlatformError, Unavailable, WorkerLost

_PLACED_S: Final = 30.0  # as long as a start waits for memory of this host


def await_running(container: Container, node: str, deadline: float) -> None:
    """``deadline`` is of the monotonic clock.  Raises PlatformError (Unavailable: another host may do) when it does not
    come up."""
    placed_by = min(deadline, time.monotonic() + _PLACED_S)
    while True:
        pod = container.pod
        if pod is None or pod.running or (pod.ended is not None and pod.ended.exit_code is not None):
            return
        if pod.ended is not None or container.over.is_set():
            reason = pod.ended.reason if pod.ended is not None else "its pod was deleted"
            raise Unavailable(f"the cluster did not start the container: {reason}")
        if pod.trouble:
            raise PlatformError(pod.trouble, hint="push the image to where the cluster's nodes pull from")
        if container.cancelled:
            raise WorkerLost("the start was given up")
        until = deadline if pod.node else placed_by
        if time.monotonic() >= until:
            raise Unavailable(_why_not_yet(pod, node), hint=f"kubectl describe pod {pod.name}")
        if _socket_is_there(container, until - time.monotonic()):
            return


def _socket_is_there(container: Container, wait_s: float) -> bool:
    """False when the pod has changed, the start was given up, or ``wait_s`` is over."""
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(container.moved_fd)
    pod = container.pod
    if pod is None or pod.running or pod.ended or pod.trouble or container.over.is_set():
        return False  # it changed before we began to wait
    with contextlib.suppress(PlatformError):
        path = container.handle.socket_path
        wait_socket_until(path, container.moved_fd, wait_s, container.cancelled_fd).close()
        return True
    return False


def _why_not_yet(pod: Seen, node: str) -> str:
    if not pod.node:
        return f"the cluster has no room on {node}: {pod.unplaced or 'its scheduler has not answered'}"
    return f"the node has not started the pod {pod.name} in time"

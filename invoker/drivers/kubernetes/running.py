"""Waits until a pod's container runs, or until the cluster says why it does not.

The socket is waited for as well: the node reports a running container up to a second late.  A node that lacks the
container's descriptor socket says nothing of it in the pod's status and tries again for ever; so the end of that
socket, which is the end of its fetchd, is waited for, too.  The socket of a user's image is that of the container
beside it, which may run long before the image has been pulled, so there the node's report is waited for.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from contextlib import ExitStack
from typing import Final

from invoker.drivers.kubernetes.container import Container
from invoker.drivers.kubernetes.seen import Seen
from invoker.drivers.registry_errors import HINT, why
from invoker.drivers.socket_wait import wait_socket_until, watch_end
from thaw.errors import InitFailed, PlatformError, Unavailable, WorkerLost

_PLACED_S: Final = 30.0  # as long as a start waits for memory of this host


def await_running(
    container: Container, node: str, deadline: float, descriptor_socket: str = "", image: str = ""
) -> None:
    """``deadline`` is of the monotonic clock, ``image`` a user's.  Raises PlatformError (Unavailable: another host may
    do) when it does not come up, InitFailed when the user's image cannot be pulled."""
    with ExitStack() as undo:
        changed = undo.enter_context(select.epoll())
        changed.register(container.moved_fd, select.EPOLLIN)
        fetchd_gone = undo.enter_context(select.epoll())
        if descriptor_socket:
            try:
                gone_fd = watch_end(descriptor_socket)
            except PlatformError as e:
                raise _without_fetchd() from e
            undo.callback(os.close, gone_fd)
            for epoll in (changed, fetchd_gone):
                epoll.register(gone_fd, select.EPOLLIN)
        _await_running(container, node, deadline, changed, fetchd_gone, image)


def await_pulled(container: Container, node: str, deadline: float, image: str) -> str:
    """The image that the node has made the container from, as the node names it.  Raises as await_running() does."""
    placed_by = min(deadline, time.monotonic() + _PLACED_S)
    while True:
        pod = container.pod
        if pod is not None and pod.pulled_image:
            return pod.pulled_image
        if pod is None or container.over.is_set():
            raise Unavailable("the cluster did not pull the image: its pod was deleted")
        if pod.trouble:
            raise _trouble(pod, image)
        until = deadline if pod.node else placed_by
        if time.monotonic() >= until:
            raise Unavailable(_why_not_yet(pod, node), hint=f"kubectl describe pod {pod.name}")
        _wait_for_news(container, container.moved_fd, until)


def _await_running(
    container: Container, node: str, deadline: float, changed: select.epoll, fetchd_gone: select.epoll, image: str
) -> None:
    placed_by = min(deadline, time.monotonic() + _PLACED_S)
    while True:
        pod = container.pod
        if pod is None or pod.running or (pod.ended is not None and pod.ended.exit_code is not None):
            return
        if pod.ended is not None or container.over.is_set():
            reason = pod.ended.reason if pod.ended is not None else "its pod was deleted"
            raise Unavailable(f"the cluster did not start the container: {reason}")
        if pod.trouble:
            raise _trouble(pod, image)
        if container.cancelled:
            raise WorkerLost("the start was given up")
        if fetchd_gone.poll(0):
            raise _without_fetchd()
        until = deadline if pod.node else placed_by
        if time.monotonic() >= until:
            raise Unavailable(_why_not_yet(pod, node), hint=f"kubectl describe pod {pod.name}")
        if image:
            _wait_for_news(container, changed.fileno(), until)
        elif _socket_is_there(container, changed.fileno(), until):
            return


def _socket_is_there(container: Container, changed_fd: int, until: float) -> bool:
    """False when the pod has changed, the start was given up, or it is ``until``.  Raises PlatformError when the
    socket's directory cannot be watched."""
    _forget_news(container)
    pod = container.pod
    if pod is None or pod.running or pod.ended or pod.trouble or container.over.is_set():
        return False  # it changed before we began to wait
    try:
        path = container.handle.socket_path
        wait_socket_until(path, changed_fd, until - time.monotonic(), container.cancelled_fd).close()
    except PlatformError as e:
        if not isinstance(e, WorkerLost) and time.monotonic() < until:
            raise
        return False
    return True


def _wait_for_news(container: Container, changed_fd: int, until: float) -> None:
    """Wait until the pod has changed, the start was given up, or it is ``until``."""
    poll = select.poll()
    for fd in (changed_fd, container.cancelled_fd):
        poll.register(fd, select.POLLIN)
    poll.poll(max(0.0, 1000 * (until - time.monotonic())))
    _forget_news(container)


def _forget_news(container: Container) -> None:
    """Before the pod is looked at: what changes afterwards is news again."""
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(container.moved_fd)


def _trouble(pod: Seen, image: str) -> PlatformError | InitFailed:
    """``image``: a user's, or empty."""
    if not image or not pod.no_image or image not in pod.trouble:
        return PlatformError(pod.trouble, hint=_hint(pod))
    said = pod.trouble.partition(f"{image}: ")[2]
    if not said:
        return InitFailed(f"The image {image} is not on this host.", hint="operators allow pulls: THAW_IMAGE_PULL_S")
    return InitFailed(f"The image {image} cannot be pulled: {why(said, 'imagePullSecrets')}", hint=HINT)


def _without_fetchd() -> Unavailable:
    return Unavailable("fetchd ended while the container was being made", hint="the start is tried again")


def _hint(pod: Seen) -> str:
    return (
        "push the image to where the cluster's nodes pull from" if pod.no_image else f"kubectl describe pod {pod.name}"
    )


def _why_not_yet(pod: Seen, node: str) -> str:
    if not pod.node:
        return f"the cluster has no room on {node}: {pod.unplaced or 'its scheduler has not answered'}"
    return f"the node has not started the pod {pod.name} in time"

"""One container of the driver: its handle, its pod as it was last seen, and events for threads that wait for it."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

from invoker.drivers.base import Handle
from invoker.drivers.kubernetes.client import PodEvent
from invoker.drivers.kubernetes.logs import PodLogs
from invoker.drivers.kubernetes.pulls import Pull
from invoker.drivers.kubernetes.seen import Ended, Seen


class Container:
    """Its fields change under ``lock``."""

    def __init__(self, handle: Handle, pod: Seen | None = None) -> None:
        self.lock = threading.Lock()
        self.handle = handle
        self.pod = pod
        self.asked = pod is not None  # for a pod: there may be one
        self.started = pod is not None
        self.reported = False
        self.deleting = False
        self.gone = False  # there is no such pod any more
        self.is_ours = False  # an instance, which is this invoker's alone: it has started, claimed or taken it over
        self.is_anothers = False  # it was ours, and is another invoker's now
        self.logs: PodLogs | None = None
        self.pull: Pull | None = None
        self.over = threading.Event()
        """The pod's container has ended, or the pod is gone."""
        self.ended = threading.Event()
        """Its end has been reported."""
        self.moved_fd = _eventfd()  # readable when the pod has changed
        self.ended_fd = _eventfd()
        self.cancelled_fd = _eventfd()
        self._cancelled = threading.Event()
        self._closed = False

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    @property
    def has_run(self) -> bool:
        """False when the node has said that it cannot start it, or has not got it."""
        return self.pod is None or (not self.pod.trouble and bool(self.pod.node))

    def cancel(self) -> None:
        """Wake the threads that wait for its start."""
        self._cancelled.set()
        self._signal(self.cancelled_fd)

    def note(self, pod: Seen) -> None:
        """Keep the newest state: the watch may be ahead of an answer."""
        with self.lock:
            if not self.knows_newer_than(pod):
                self.pod = pod

    def knows_newer_than(self, pod: Seen) -> bool:
        return self.pod is not None and _is_older(pod.version, self.pod.version)

    def see(self, event: PodEvent) -> Ended | None:
        """Take news of the pod; return how it ended, if it has."""
        pod = event.what
        if pod is None or (self.pod is not None and self.pod.uid != pod.uid):
            return None  # this is an earlier pod of the same name
        self.note(pod)
        ended = pod.ended
        if event.kind == "DELETED":
            self.gone = True
            ended = ended or Ended(None)
        if ended is not None and not ended.reason and not self.deleting and (self.gone or pod.deleting):
            ended = replace(
                ended, reason="its pod was deleted"
            )  # a function that is asked to end does so with status 0
        if ended is not None:
            self.over.set()
        self._signal(self.moved_fd)
        return ended

    def report_ended(self) -> None:
        self.ended.set()
        self._signal(self.ended_fd)

    def close(self) -> None:
        if self.logs is not None:
            self.logs.close()
        with self.lock:
            self._closed = True
            for fd in (self.moved_fd, self.ended_fd, self.cancelled_fd):
                os.close(fd)

    def _signal(self, fd: int) -> None:
        with self.lock:
            if not self._closed:
                os.eventfd_write(fd, 1)


def _is_older(version: str, than: str) -> bool:
    """Versions are numbers that grow; if a cluster counts differently, the report that came later counts as newer."""
    return version.isdigit() and than.isdigit() and int(version) < int(than)


def _eventfd() -> int:
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

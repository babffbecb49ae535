"""Containers as pods of a cluster, on the invoker's own node: hardened, found again by their labels.

The API server is asked to create, claim, limit and delete a pod; everything else is watched
(thaw/kubernetes/watch.py), and a function is reached through a socket in a directory of the node.  So a warm run never
passes the cluster, and goes on while the API server is away; a start waits for it.

A stem cell belongs to the invoker that claims it first: two invokers have the same pods while one replaces the other.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Self

from invoker.drivers import io_directory, log_files, process_ids
from invoker.drivers.base import DriverContext, Exit, Handle, LogChunk, Owned, Spec, Stats, status_of
from invoker.drivers.confined import Limits
from invoker.drivers.kubernetes import pinning
from invoker.drivers.kubernetes import spec as pod_spec
from invoker.drivers.kubernetes.bodies import Bodies
from invoker.drivers.kubernetes.claimants import Claimants
from invoker.drivers.kubernetes.client import Cluster, PodEvent
from invoker.drivers.kubernetes.container import Container
from invoker.drivers.kubernetes.earlier import EarlierContainers, Fence, handle_in
from invoker.drivers.kubernetes.later import Later
from invoker.drivers.kubernetes.log_watch import LogWatch
from invoker.drivers.kubernetes.logs import PodLogs, log_path
from invoker.drivers.kubernetes.patience import Patience
from invoker.drivers.kubernetes.place import Place, find_place
from invoker.drivers.kubernetes.pods import Left, Pods
from invoker.drivers.kubernetes.pulls import Pull
from invoker.drivers.kubernetes.resize import Resources, resize
from invoker.drivers.kubernetes.running import await_running
from invoker.drivers.kubernetes.seen import Ended, Seen
from invoker.drivers.ownership import OwnedContainers, listener
from invoker.drivers.relay_socket import RelaySockets
from invoker.drivers.socket_wait import wait_socket_until
from thaw.action import KIND_LLM
from thaw.errors import PlatformError, WorkerLost
from thaw.host import name_on_machine
from thaw.kubernetes.api import CALL_S, Event
from thaw.kubernetes.watch import Watch
from thaw.logs import Log

_KILLED_S: Final = 10.0  # from SIGKILL to the node's report of the end, memory of gigabytes included
_LAST_LINES_S: Final = 1.0  # between a container's end and its last line
_LEAST_CALL_S: Final = 1.0


class KubernetesDriver:
    name = "kubernetes"
    share = "enforced"
    whole_devices = True
    zygote = None  # each stem cell is a pod

    def __init__(
        self,
        cluster: Cluster,
        run_dir: Path,
        host_id: str,
        place: Place,
        limits: Limits,
        log: Log,
        replaced: Callable[[], None] = lambda: None,
    ) -> None:
        """``replaced`` is called when another invoker has taken over what was ours.  Raises Unavailable when the API
        server is away, PlatformError when it refuses us."""
        self._cluster, self._place, self._limits, self._log = cluster, place, limits, log
        self._owned = OwnedContainers(run_dir, by_environment=False)  # a pod's is another user's
        self.owner = pod_spec.owner_label(name_on_machine(host_id, str(run_dir.absolute())))
        self._selector = f"{pod_spec.OWNER}={self.owner}"
        cluster.list(self._selector)
        self._claimants = Claimants(cluster, place.pod_name, place.pod_uid)
        self._pods = Pods(cluster, self.owner, self._claimants)
        self._earlier = EarlierContainers(cluster, self._pods, self._claimants, self._owned, place.images)
        self._fence = Fence(self._pods, replaced, log)
        self._callbacks: list[Callable[[Exit], None]] = []
        self._lock = threading.Lock()
        self._containers: dict[str, Container] = {}
        self._later, self._log_watch = Later(log), LogWatch()  # deletions, and output
        self._relays = RelaySockets(run_dir / "relays", log)
        self._bodies = Bodies(place, self.owner, limits, self._claimants.own, run_dir, self._relays.directory)
        self._watch = Watch(cluster, self._selector, self._take, self._again, self._later.try_now, log)
        self._patience = Patience(self._watch)

    @classmethod
    def make(cls, context: DriverContext) -> Self:
        settings = context.settings
        cluster = Cluster(settings.pod_namespace, settings.kubeconfig)
        place = find_place(settings, cluster, context.run_dir)
        limits = Limits(settings.n_cores, settings.pids, settings.tmp_mb, max(2048, 2 * settings.stem_cell_mb))
        return cls(cluster, context.run_dir, settings.host_id, place, limits, context.log, context.cut_off)

    def reachable(self) -> bool:
        return not self._watch.away

    def on_exit(self, callback: Callable[[Exit], None]) -> None:
        self._callbacks.append(callback)

    # a container's life --------------------------------------------------------------------------------------------

    def pin(self, image: str, *, deadline_s: float) -> str:
        if not pinning.needs_pin(image):
            return image
        spec, deadline = pinning.spec_of(image), time.monotonic() + deadline_s
        container = Container(handle_in(self._owned, spec.container_id, spec.kind))
        with self._lock:
            self._containers[spec.container_id] = container
        try:
            self._make(container, self._bodies.pulling(container.handle, spec), deadline)
            return pinning.await_pinned(image, container, self._place.node, deadline)
        finally:
            self._drop(container, wait_s=0.0)  # nothing of it runs

    def create(self, spec: Spec) -> Handle:
        """Prepare the directory; the pod is made by ``start``, because a pod that exists runs."""
        with self._lock:
            known = self._containers.get(spec.container_id)
        if known is not None:
            return known.handle
        handle = handle_in(self._owned, spec.container_id, spec.kind)
        try:
            self._write(handle, spec.labels)
            io_directory.make(handle)
        except PlatformError:
            self._owned.remove(handle)
            raise
        with self._lock:
            self._containers[spec.container_id] = Container(handle)
        return handle

    def start(self, handle: Handle, spec: Spec) -> Handle:
        """Waits for the API server if it is away, and returns when the container runs."""
        container = self._get(handle)
        if container.started:
            return container.handle
        began = time.monotonic()
        deadline = began + self._place.start_s
        self._make(container, self._bodies.of(handle, spec), deadline)
        await_running(container, self._place.node, deadline, spec.descriptor_socket, spec.image)
        took_s = time.monotonic() - began
        logs = self._follow(container, only_new=False)
        with container.lock:
            container.started, container.logs = True, logs
            container.is_ours = spec.labels.get("role") != pod_spec.STEM_CELL
            ended = container.pod.ended if container.pod is not None else None
        if container.gone and ended is None:
            self._gone(container)
        if ended is not None:
            self._ended(container, ended)
        if container.pod is not None and spec.labels.get("role") != pod_spec.STEM_CELL:
            container.pull = Pull(self._cluster, container.pod.uid, took_s)
        return handle

    def connect(self, handle: Handle, *, deadline_s: float) -> Handle:
        container = self._get(handle)
        with wait_socket_until(handle.socket_path, container.ended_fd, deadline_s, container.cancelled_fd) as sock:
            pid, ticks = listener(sock)
        io_directory.close(handle)
        with container.lock:
            container.handle = replace(container.handle, pid=pid, start_ticks=ticks)
        return replace(container.handle, image_pull_s=container.pull.seconds() if container.pull is not None else 0.0)

    def claim(self, handle: Handle) -> bool:
        container = self._get(handle)
        deadline = time.monotonic() + self._place.start_s
        if self._patience.call(lambda: self._pods.claim(container), deadline, container):
            container.is_ours = True
            return True
        with self._lock:
            self._containers.pop(handle.container_id, None)
        container.close()  # its directory is the other invoker's now
        return False

    def relabel(self, handle: Handle, labels: Mapping[str, str]) -> None:
        """An instance's record is longer than a label may be: it is kept beside the container."""
        container = self._get(handle)  # raises for one that has been removed: a file written for it would stay
        self._write(container.handle, labels)

    def limit(self, handle: Handle, share: float, memory_bytes: int) -> None:
        container = self._get(handle)
        request = self._place.request_mb[handle.kind] << 20
        bounds = pod_spec.resources(share, memory_bytes, self._limits, request)
        name, deadline = pod_spec.pod_name(handle.container_id), time.monotonic() + self._place.start_s

        def send(wanted: Resources) -> Seen:
            body = {"spec": {"containers": [{"name": pod_spec.CONTAINER_NAME, "resources": wanted}]}}
            return self._patience.call(lambda: self._cluster.resize(name, body), deadline, container)

        if why_not := resize(send, container, bounds):
            self._log.event("limit_not_applied", container_id=handle.container_id, error=why_not)

    def relay_address(self, address: str) -> str:
        return self._relays.inside(address, str(self._relays.directory.absolute()))

    def pause(self, handle: Handle) -> None:
        raise PlatformError("a pod cannot be paused", hint="the kubelet would see a container that does not answer")

    def unpause(self, handle: Handle) -> None:
        """No pod is ever paused."""

    def stop(self, handle: Handle, *, deadline_s: float) -> None:
        with self._lock:
            container = self._containers.get(handle.container_id)
        if container is None:
            return
        container.cancel()
        self._watch.look_up()
        if container.ended.is_set() or not container.started:
            return
        until = time.monotonic() + deadline_s + _KILLED_S
        self._delete(container, deadline_s, timeout_s=max(_LEAST_CALL_S, deadline_s))
        if not container.ended.wait(until - time.monotonic()):
            name = pod_spec.pod_name(handle.container_id)
            raise PlatformError(f"the pod {name} does not end", hint=f"kubectl describe pod {name}")

    def remove(self, handle: Handle) -> None:
        """Returns when nothing of the container is left.  A pod that cannot be deleted now is deleted later; this call
        does not wait for that."""
        with self._lock:
            container = self._containers.get(handle.container_id)
            if container is None:
                container = self._containers[handle.container_id] = Container(handle)
                container.asked = True
        container.cancel()
        self._drop(container, _KILLED_S)

    # logs and usage ------------------------------------------------------------------------------------------------

    def logs(self, handle: Handle, stream: str, cursor: int) -> LogChunk:
        return log_files.read(handle, stream, cursor)

    def more_logs(self, handle: Handle, cursors: tuple[int, int], deadline_s: float) -> bool:
        with self._lock:
            container = self._containers.get(handle.container_id)
        return container is not None and container.logs is not None and container.logs.wait_grown(cursors, deadline_s)

    def truncate_logs(self, handle: Handle, stream: str) -> None:
        log_files.empty(handle, stream)

    def stats(self, handle: Handle) -> Stats:
        """Zeros where the node's processes are hidden from this one (no ``hostPID``)."""
        pid = self._get(handle).handle.pid
        return Stats(*process_ids.usage(pid)) if pid else Stats(0, 0.0)

    # containers of an earlier invoker ------------------------------------------------------------------------------

    def list_owned(self) -> Sequence[Owned]:
        return self._earlier.all(self._selector)

    def take_over(self, owned: Owned) -> bool:
        return self._earlier.take_over(owned)

    def adopt(self, owned: Owned) -> None:
        handle = owned.handle
        if handle.kind == KIND_LLM:
            self._relays.reopen()
        container = Container(handle, self._cluster.get(pod_spec.pod_name(handle.container_id)))
        container.asked = container.started = True  # its end is reported even if the pod is gone already
        container.is_ours = container.pod is not None and container.pod.claimant == self._claimants.own
        with self._lock:
            self._containers[handle.container_id] = container
        container.logs = self._follow(container, only_new=True)
        self._write(handle, owned.labels)
        if container.pod is None:
            self._gone(container)
        else:
            self._look(container)

    def end(self, owned: Sequence[Owned]) -> Sequence[Owned]:
        """Pods that another living invoker has claimed are left to it, for as long as it lives."""
        ending = [(one, container) for one in owned if (container := self._end(one)) is not None]
        until = time.monotonic() + _KILLED_S
        for _, container in ending:
            if not container.over.wait(max(0.0, until - time.monotonic())):
                self._delete_later(container, "the pod does not end")
            self._forget(container)
        return [one for one, _ in ending]

    def close(self) -> None:
        self._watch.stop()
        self._later.stop()
        with self._lock:
            containers = list(self._containers.values())
            self._containers.clear()
        for container in containers:
            container.close()
        self._log_watch.close()
        self._relays.close()
        self._cluster.close()

    # the cluster ---------------------------------------------------------------------------------------------------

    def _make(self, container: Container, body: Mapping[str, Any], deadline: float) -> None:
        container.asked = True
        container.note(self._patience.call(lambda: self._pods.make(body), deadline, container))

    def _delete(self, container: Container, deadline_s: float, *, timeout_s: float = CALL_S) -> None:
        if container.deleting or container.gone:
            return
        container.deleting = True
        name = pod_spec.pod_name(container.handle.container_id)
        try:
            # 0 would take the object away at once, and leave the processes to end some time later
            left = self._pods.end(name, max(1, math.ceil(deadline_s)), container.pod, timeout_s=timeout_s)
        except PlatformError:
            container.deleting = False
            raise
        container.is_anothers = left is Left.CLAIMED
        if left is not Left.DELETED:
            self._gone(container)

    def _drop(self, container: Container, wait_s: float) -> None:
        try:
            if container.asked:
                self._delete(container, 0.0)
                if container.has_run:  # a node takes its time over a pod that never ran
                    container.over.wait(wait_s)
        except PlatformError as e:
            self._delete_later(container, e.message)
        self._forget(container)

    def _delete_later(self, container: Container, why: str) -> None:
        name = pod_spec.pod_name(container.handle.container_id)
        self._log.event("removal_postponed", container_id=container.handle.container_id, error=why)
        self._later.add(name, lambda: self._pods.end(name) is not None)  # it is gone, or will go, or is another's

    def _end(self, owned: Owned) -> Container | None:
        """The container to wait for; None for one that is left to another invoker."""
        name = pod_spec.pod_name(owned.handle.container_id)
        container = Container(owned.handle)
        container.asked = container.deleting = True
        with self._lock:
            self._containers[owned.handle.container_id] = container
        try:
            left = self._pods.end(name)
        except PlatformError as e:
            self._delete_later(container, e.message)
            left = Left.GONE  # as far as this call goes
        if left is Left.CLAIMED:
            with self._lock:
                self._containers.pop(owned.handle.container_id, None)
            container.close()
            self._later.add(name, lambda: self._is_ended(name, owned.handle))
            return None
        if left is Left.GONE:
            container.over.set()
        return container

    def _is_ended(self, name: str, handle: Handle) -> bool:
        """Whether a pod that was left to another invoker has no claimant any more; then it is ended."""
        if self._pods.end(name) is Left.CLAIMED:
            return False
        self._owned.remove(handle)
        return True

    def _write(self, handle: Handle, labels: Mapping[str, str]) -> None:
        self._owned.write(handle, {**labels, pod_spec.CLAIMANT: self._claimants.own})

    def _forget(self, container: Container) -> None:
        with self._lock:
            self._containers.pop(container.handle.container_id, None)
        container.close()
        if not container.is_anothers:
            self._owned.remove(container.handle)

    def _take(self, event: PodEvent) -> None:
        with self._lock:
            container = self._containers.get(event.what.container_id) if event.what is not None else None
        if container is None:
            return
        if event.what is not None and event.what.unresized and not (container.pod and container.pod.unresized):
            self._log.event("limit_not_applied", container_id=event.what.container_id, error=event.what.unresized)
        if event.what is not None and self._fence.is_broken_by(container, event.what):
            return
        ended = container.see(event)
        if ended is not None:
            self._ended(container, ended)

    def _again(self, pods: Sequence[Seen]) -> None:
        """Events were missed: containers that are not in the list have probably ended meanwhile."""
        for pod in pods:
            self._take(Event("MODIFIED", pod.version, pod))
        listed = {pod.container_id for pod in pods}
        with self._lock:
            missing = [c for c in self._containers.values() if c.asked and c.handle.container_id not in listed]
        for container in missing:
            self._look(container)

    def _look(self, container: Container) -> None:
        """A pod that was being created when the list was read is there now, or will be."""
        was_made = container.pod is not None  # before the question: its answer may come later than that of its creation
        pod = self._cluster.get(pod_spec.pod_name(container.handle.container_id))
        if pod is None:
            if was_made:
                self._gone(container)
            return
        ended = container.see(Event("MODIFIED", pod.version, pod))
        if ended is not None:
            self._ended(container, ended)

    def _gone(self, container: Container) -> None:
        container.gone = True
        container.over.set()
        self._ended(container, Ended(None, "" if container.deleting else "its pod was deleted"))

    def _ended(self, container: Container, ended: Ended) -> None:
        with container.lock:
            if container.reported or not container.started:
                return  # start reports it, when its lines can be followed
            container.reported = True
        # a thread of its own, because the last lines may be on their way, and other containers end meanwhile
        threading.Thread(target=self._report, args=(container, ended), name="container-end", daemon=True).start()

    def _report(self, container: Container, ended: Ended) -> None:
        if container.logs is not None:
            container.logs.wait_ended(_LAST_LINES_S)
        container.report_ended()
        exit_ = Exit(
            container.handle.container_id, status_of(ended.exit_code), ended.reason, out_of_memory=ended.out_of_memory
        )
        for callback in self._callbacks:
            callback(exit_)

    def _follow(self, container: Container, *, only_new: bool) -> PodLogs | None:
        pod = container.pod
        if pod is None:
            return None
        path = log_path(self._place.pod_logs, self._place.namespace, pod.name, pod.uid, pod_spec.CONTAINER_NAME)
        try:
            return PodLogs(self._log_watch, path, container.handle, only_new=only_new)
        except OSError as e:
            self._log.event("logs_not_followed", container_id=container.handle.container_id, error=str(e))
            return None

    def _get(self, handle: Handle) -> Container:
        with self._lock:
            container = self._containers.get(handle.container_id)
        if container is None:
            raise WorkerLost("the container has been removed")
        return container

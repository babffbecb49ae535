"""Containers of an earlier invoker of this host: found by their pods' label, and made this invoker's own one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from threading import Lock, Thread

from invoker.drivers import io_directory, process_ids
from invoker.drivers.base import Handle, Owned
from invoker.drivers.kubernetes import spec as pod_spec
from invoker.drivers.kubernetes.claimants import Claimants
from invoker.drivers.kubernetes.client import Cluster
from invoker.drivers.kubernetes.container import Container
from invoker.drivers.kubernetes.pods import Pods
from invoker.drivers.kubernetes.seen import Seen
from invoker.drivers.ownership import OwnedContainers, find_listener
from thaw.logs import Log


class EarlierContainers:
    def __init__(
        self, cluster: Cluster, pods: Pods, claimants: Claimants, written: OwnedContainers, images: Mapping[str, str]
    ) -> None:
        """``images`` are those of new containers, by kind."""
        self._cluster, self._pods, self._claimants = cluster, pods, claimants
        self._written, self._images = written, images

    def all(self, selector: str) -> Sequence[Owned]:
        """The pods under our label.  Directories of containers that are gone are removed, but for those of starts of a
        living invoker, which may be about to make their pods."""
        written = {owned.handle.container_id: owned for owned in self._written.all()}
        found = []
        pods, _ = self._cluster.list(selector)
        for pod in pods:
            if pod.deleting and not pod.running:
                continue  # nothing of it is left but an object, for some seconds
            noted = written.pop(pod.container_id, None)
            labels = {k: v for k, v in noted.labels.items() if k != pod_spec.CLAIMANT} if noted else {}
            labels["role"] = pod.role  # a claim changes the pod first, and the file a moment later
            is_current = pod.image == self._images.get(pod.kind)
            found.append(Owned(self._handle_of(pod, noted), labels, pod.running and not pod.deleting, is_current))
        for left in written.values():
            if not self._claimants.lives(left.labels.get(pod_spec.CLAIMANT, "")):
                self._written.remove(left.handle)
        return tuple(found)

    def take_over(self, owned: Owned) -> bool:
        container = Container(owned.handle, self._cluster.get(pod_spec.pod_name(owned.handle.container_id)))
        try:
            return self._pods.take_over(container)
        finally:
            container.close()

    def _handle_of(self, pod: Seen, noted: Owned | None) -> Handle:
        handle = handle_in(self._written, pod.container_id, pod.kind)
        if noted is not None and process_ids.is_alive(noted.handle.pid, noted.handle.start_ticks):
            return replace(handle, pid=noted.handle.pid, start_ticks=noted.handle.start_ticks)
        pid, ticks = find_listener(handle.socket_path)
        return replace(handle, pid=pid, start_ticks=ticks)


class Fence:
    """Notices that another invoker has taken over what is ours: this process was thought dead, and must end."""

    def __init__(self, pods: Pods, replaced: Callable[[], None], log: Log) -> None:
        self._pods, self._replaced, self._log = pods, replaced, log
        self._lock = Lock()
        self._is_broken = False

    def is_broken_by(self, container: Container, pod: Seen) -> bool:
        """Whether ``pod`` says that ``container`` is another invoker's now.  A report from before we took it over may
        come late, and names the invoker that had it then."""
        if not container.is_ours or not self._pods.has_another_claimant(pod) or container.knows_newer_than(pod):
            return False
        container.is_anothers = True
        with self._lock:
            first, self._is_broken = not self._is_broken, True
        if first:
            self._log.event("replaced", container_id=container.handle.container_id, claimant=pod.claimant)
            Thread(target=self._replaced, name="replaced", daemon=True).start()
        return True


def handle_in(written: OwnedContainers, container_id: str, kind: str) -> Handle:
    handle = written.handle(container_id, kind)
    return replace(handle, socket=str(io_directory.of(handle) / "s"))

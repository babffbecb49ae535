"""The three writes that another invoker of this host may make at the same time: make, claim and end a pod.

A claim and the end of a stem cell name the version of the pod that they have seen, so exactly one of them succeeds.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any, Final

from invoker.drivers.kubernetes import spec as pod_spec
from invoker.drivers.kubernetes.claimants import Claimants
from invoker.drivers.kubernetes.client import Cluster
from invoker.drivers.kubernetes.container import Container
from invoker.drivers.kubernetes.seen import Seen
from thaw.errors import PlatformError, Unavailable, WorkerLost

_CLAIMS: Final = 20
"""The node's reports change a pod's version, too; a pod that changes more often than this is not waiting for us."""


class Left(Enum):
    """The outcome for a pod that an earlier invoker left."""

    DELETED = auto()  # it will end
    GONE = auto()
    CLAIMED = auto()  # a living invoker has it


class Pods:
    def __init__(self, cluster: Cluster, owner: str, claimants: Claimants) -> None:
        self._cluster, self._owner, self._claimants = cluster, owner, claimants

    def make(self, body: Mapping[str, Any]) -> Seen:
        """Raises PlatformError when somebody else's pod has the name."""
        name = body["metadata"]["name"]
        pod = self._cluster.create(body) or self._cluster.get(name)  # perhaps we made it, and the answer was lost
        if pod is None:
            raise Unavailable(f"another pod {name} has just ended")
        if pod.owner != self._owner:
            raise PlatformError(f"there is a pod {name} that is not this host's")
        return pod

    def claim(self, container: Container) -> bool:
        """Take a stem cell; False when another invoker was first.  Raises WorkerLost when it is no more."""
        name = pod_spec.pod_name(container.handle.container_id)
        for _ in range(_CLAIMS):
            pod = container.pod
            if pod is None or pod.deleting or pod.ended is not None:
                break
            if pod.role != pod_spec.STEM_CELL:
                return pod.claimant == self._claimants.own
            change = {
                "resourceVersion": pod.version,
                "labels": {pod_spec.ROLE: pod_spec.INSTANCE},
                "annotations": {pod_spec.CLAIMANT: self._claimants.own},
            }
            claimed = self._cluster.patch(name, {"metadata": change})
            now = claimed or self._cluster.get(name)
            if now is None:
                break
            container.note(now)
            if claimed is not None:
                return True
        raise WorkerLost(f"the stem cell {name} is no more")

    def end(self, name: str) -> Left:
        """End a pod of an earlier invoker, unless an invoker that lives has it.  Raises PlatformError."""
        for _ in range(_CLAIMS):
            pod = self._cluster.get(name)
            if pod is None:
                return Left.GONE
            if pod.role != pod_spec.STEM_CELL and self._claimants.lives(pod.claimant):
                return Left.CLAIMED
            if self._cluster.delete(name, 1, version=pod.version):
                return Left.DELETED
        raise Unavailable(f"the pod {name} changes too often to be deleted")

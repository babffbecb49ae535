"""The writes that another invoker of this host may make at the same time: make, claim, take over and end a pod.

All but the first name the version of the pod that they have seen, so exactly one of several succeeds.  The others see
then whose the pod is, and leave it alone if another invoker has it that lives.
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
from thaw.kubernetes.api import CALL_S

_TRIES: Final = 20
"""The node's reports change a pod's version, too; a pod that changes more often than this is not waiting for us."""


class Left(Enum):
    """The outcome for a pod that is to be ended."""

    DELETED = auto()  # it will end
    GONE = auto()
    CLAIMED = auto()  # another invoker has it, and lives


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
        for _ in range(_TRIES):
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

    def take_over(self, container: Container) -> bool:
        """Take an instance of an earlier invoker; False when that one lives.  A container that has ended can be taken,
        too: its end is still to be reported.  Raises PlatformError."""
        name = pod_spec.pod_name(container.handle.container_id)
        for _ in range(_TRIES):
            pod = container.pod
            if pod is None or pod.ended is not None or pod.claimant == self._claimants.own:
                return True
            if self._claimants.lives(pod.claimant):
                return False
            change = {"resourceVersion": pod.version, "annotations": {pod_spec.CLAIMANT: self._claimants.own}}
            taken = self._cluster.patch(name, {"metadata": change})
            now = taken or self._cluster.get(name)
            if now is None:
                return True
            container.note(now)
        raise Unavailable(f"the pod {name} changes too often to be taken over")

    def has_another_claimant(self, pod: Seen) -> bool:
        """Whether an instance's pod names another invoker, dead or alive."""
        return pod.role != pod_spec.STEM_CELL and pod.claimant not in ("", self._claimants.own)

    def is_anothers(self, pod: Seen) -> bool:
        """Whether another invoker has the pod, and lives.  Raises PlatformError."""
        return self.has_another_claimant(pod) and self._claimants.lives(pod.claimant)

    def end(self, name: str, grace_s: int = 1, pod: Seen | None = None, *, timeout_s: float = CALL_S) -> Left:
        """End a pod unless it is another invoker's; ``pod`` is its last known state.  Raises PlatformError."""
        refused = ""
        for _ in range(_TRIES):
            pod = pod or self._cluster.get(name)
            if pod is None:
                return Left.GONE
            if pod.version == refused:
                raise Unavailable(f"the cluster does not delete the pod {name}", hint="it is asked again later")
            if self.is_anothers(pod):
                return Left.CLAIMED
            if self._cluster.delete(name, grace_s, version=pod.version, timeout_s=timeout_s):
                return Left.DELETED
            refused, pod = pod.version, None
        raise Unavailable(f"the pod {name} changes too often to be deleted")

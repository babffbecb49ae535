"""The three writes that another invoker of this host may make at the same time: make, claim and end a pod.

A claim and the end of a stem cell name the version of the pod that they have seen, so exactly one of them succeeds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from invoker.drivers.kubernetes import spec as pod_spec
from invoker.drivers.kubernetes.client import Cluster
from invoker.drivers.kubernetes.container import Container
from invoker.drivers.kubernetes.seen import Seen
from thaw.errors import Conflict, NotFound, PlatformError
from thaw.ids import random_hex_id

_CLAIMS: Final = 20
"""The node's reports change a pod's version, too; a pod that changes more often than this is not waiting for us."""


class Pods:
    def __init__(self, cluster: Cluster, owner: str) -> None:
        self._cluster, self._owner = cluster, owner
        self._claimant = random_hex_id()  # of this process: its successor is another one

    def make(self, body: Mapping[str, Any]) -> Seen:
        """Raises PlatformError when somebody else's pod has the name."""
        try:
            return self._cluster.create(body)
        except Conflict as e:  # perhaps we made it, and the answer was lost
            found = self._cluster.get(body["metadata"]["name"])
            if found.owner != self._owner:
                raise PlatformError(f"there is a pod {found.name} that is not this host's") from e
            return found

    def claim(self, container: Container) -> bool:
        """Take a stem cell; False when it is no more, or another invoker was first."""
        name = pod_spec.pod_name(container.handle.container_id)
        for _ in range(_CLAIMS):
            pod = container.pod
            if pod is None or pod.deleting or pod.role != pod_spec.STEM_CELL:
                return pod is not None and not pod.deleting and pod.claimant == self._claimant
            change = {
                "resourceVersion": pod.version,
                "labels": {pod_spec.ROLE: pod_spec.INSTANCE},
                "annotations": {pod_spec.CLAIMANT: self._claimant},
            }
            try:
                try:
                    container.note(self._cluster.patch(name, {"metadata": change}))
                    return True
                except Conflict:
                    container.note(self._cluster.get(name))
            except NotFound:
                return False
        return False

    def delete_unclaimed(self, container: Container, *, was_cell: bool) -> bool:
        """False when the pod is gone.  Raises Conflict when it was a stem cell and another invoker has claimed it."""
        name = pod_spec.pod_name(container.handle.container_id)
        for _ in range(_CLAIMS):
            try:
                pod = self._cluster.get(name)
            except NotFound:
                return False
            if was_cell and pod.role != pod_spec.STEM_CELL:
                raise Conflict(f"another invoker has claimed {name}")
            try:
                container.deleting = True
                self._cluster.delete(name, 1, version=pod.version)
                return True
            except NotFound:
                return False
            except Conflict:
                continue  # its version has changed
        raise PlatformError(f"the pod {name} changes too often to be deleted")

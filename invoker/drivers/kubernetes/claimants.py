"""Knows which invoker process has a pod, and whether that process is known to live.

While one invoker of a node replaces another both see the same pods.  A pod that a living invoker starts is left to it.
A pod whose invoker was killed belongs to nobody, and is ended.  A process is known by its pod: the name, the uid, and a
word of its own, because a container that is started again has the same pod.
"""

from __future__ import annotations

from invoker.drivers.kubernetes.client import Cluster
from thaw.ids import random_hex_id


class Claimants:
    def __init__(self, cluster: Cluster, pod_name: str, pod_uid: str) -> None:
        """Both are empty for an invoker that is no pod."""
        self._cluster, self._pod_uid = cluster, pod_uid
        self.own = f"{pod_name}/{pod_uid}/{random_hex_id()}"

    def lives(self, claimant: str) -> bool:
        """False for an invoker of which nothing is known.  Raises PlatformError."""
        if claimant == self.own:
            return True
        name, _, rest = claimant.partition("/")
        uid = rest.partition("/")[0]
        if not name or not uid or uid == self._pod_uid:
            return False  # in our own pod one process follows the other
        pod = self._cluster.get(name)
        return pod is not None and pod.uid == uid and pod.ended is None

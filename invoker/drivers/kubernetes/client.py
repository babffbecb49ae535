"""Pods of the invoker's namespace, as values (thaw/kubernetes/api.py says how the cluster is asked)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from invoker.drivers.kubernetes.seen import Seen, seen
from invoker.drivers.kubernetes.spec import Owner
from thaw.kubernetes.api import CALL_S, MERGE, MERGE_BY_NAME, Collection, Event

_EVENTS_S: Final = 2.0  # an explanation that comes later comes too late
POD_NAME: Final = "THAW_POD_NAME"
PodEvent = Event[Seen]


@dataclass(frozen=True, slots=True)
class NodePod:
    """The pod of this process.  ``host_paths``: the directories that it has from the node, {path here: path there}."""

    name: str
    uid: str
    owner: Owner
    host_paths: Mapping[str, str]


class Cluster(Collection[Seen]):
    def __init__(self, namespace: str, kubeconfig: str = "") -> None:
        """Raises PlatformError when there are no credentials."""
        super().__init__(f"/api/v1/namespaces/{namespace}/pods", "pods", "invoker", seen, kubeconfig)
        self._events_path = f"/api/v1/namespaces/{namespace}/events"

    def create(self, pod: Mapping[str, Any]) -> Seen | None:
        """None when a pod of this name exists."""
        made = self.ask("create the pod", "POST", "", {"AlreadyExists"}, body=pod)
        return None if made is None else seen(made)

    def get(self, name: str) -> Seen | None:
        """None when there is no such pod."""
        found = self.ask("read the pod", "GET", f"/{name}", {"NotFound"})
        return None if found is None else seen(found)

    def node_pod(self, name: str) -> NodePod:
        return _node_pod(self.call("read this invoker's own pod", "GET", f"/{name}"))

    def messages(self, uid: str, reason: str) -> Sequence[str]:
        """The messages of the node's events about a pod for this reason."""
        query = [("fieldSelector", f"involvedObject.uid={uid},reason={reason}")]
        with self._translated("list events"):
            found = self.call("list events", "GET", "", query=query, timeout_s=_EVENTS_S, of=self._events_path)
            return [str(event.get("message", "")) for event in found["items"]]

    def patch(self, name: str, body: Mapping[str, Any]) -> Seen | None:
        """Merge ``body`` into the pod.  None when there is no such pod, or none of the body's resourceVersion."""
        changed = self.ask("patch the pod", "PATCH", f"/{name}", {"NotFound", "Conflict"}, body=body, content=MERGE)
        return None if changed is None else seen(changed)

    def resize(self, name: str, body: Mapping[str, Any]) -> Seen:
        """Merge ``body`` into the pod, lists by their items' names.  The answer has the wanted state, not the actual
        one.  Raises PlatformError for a cluster that cannot resize running pods (before 1.33)."""
        path = f"/{name}/resize"
        return seen(self.call("limit the container", "PATCH", path, body=body, content=MERGE_BY_NAME))

    def delete(self, name: str, grace_s: int, *, version: str = "", timeout_s: float = CALL_S) -> bool:
        """Ask for the pod's end: SIGTERM, and SIGKILL after ``grace_s``.  False when there is no such pod, or none of
        this version."""
        body: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": grace_s}
        if version:
            body["preconditions"] = {"resourceVersion": version}
        none_for = {"NotFound", "Conflict"} if version else {"NotFound"}
        return self.ask("delete the pod", "DELETE", f"/{name}", none_for, body=body, timeout_s=timeout_s) is not None


def _node_pod(pod: Mapping[str, Any]) -> NodePod:
    """The owner is the object that made the pod (a DaemonSet): it outlives the pod, as the containers do when the pod
    is replaced."""
    meta, spec = pod["metadata"], pod["spec"]
    maker = next((o for o in meta.get("ownerReferences") or [] if o.get("controller")), None)
    owner = (
        Owner(maker["apiVersion"], maker["kind"], maker["name"], maker["uid"])
        if maker is not None
        else Owner("v1", "Pod", meta["name"], meta["uid"])
    )
    there = {v["name"]: v["hostPath"]["path"] for v in spec.get("volumes") or [] if v.get("hostPath")}
    mounts = [m for container in _own_containers(spec) for m in container.get("volumeMounts") or []]
    host_paths = {m["mountPath"]: there[m["name"]] for m in mounts if m["name"] in there}
    return NodePod(str(meta["name"]), str(meta["uid"]), owner, host_paths)


def _own_containers(spec: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Ours is the one that is told its pod's name; all of them where that is told in another way."""
    containers: Sequence[Mapping[str, Any]] = spec["containers"]
    return [c for c in containers if any(e["name"] == POD_NAME for e in c.get("env") or [])] or containers

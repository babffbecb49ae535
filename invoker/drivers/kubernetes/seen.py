"""The cluster's report of a pod, as a value.  Pure: the JSON of a pod in, one :class:`Seen` out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from invoker.drivers.kubernetes.spec import CLAIMANT, CONTAINER, CONTAINER_NAME, KIND, OWNER, ROLE

_NO_IMAGE: Final = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "RegistryUnavailable"})
_NOT_THERE: Final = "ErrImageNeverPull"
_NOT_MADE: Final = frozenset(
    {"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "PostStartHookError"}
)
_NOT_NAMED: Final = frozenset({"", "Error", "Completed", "OOMKilled"})
"""Reasons of an end that the exit status shows already, or for which we have our own text."""

_UNITS: Final = {
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
    "Ti": 1 << 40,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
}


@dataclass(frozen=True, slots=True)
class Ended:
    """``exit_code`` is None for a pod that ended without a report of its container, or that never had one."""

    exit_code: int | None
    reason: str = ""
    out_of_memory: bool = False


@dataclass(frozen=True, slots=True)
class Seen:
    """``version`` is the object's resourceVersion.

    ``trouble`` says why the node cannot start the container (``no_image``: for want of its image), ``unplaced`` why the
    cluster's scheduler has not bound the pod (it may do so later); both are empty while there is no such reason.
    ``claimant`` is the invoker process that has the pod, ``memory_bytes`` the container's limit as it is wanted,
    ``granted_bytes`` as the node has granted it (0: it has not said so), ``unresized`` why it has not.  ``image`` is
    the container's, and ``pulled_image`` the one that the node has made it from, as the node names it; empty: it has
    made none.
    """

    name: str
    uid: str
    version: str
    container_id: str
    owner: str
    kind: str
    role: str
    node: str = ""
    image: str = ""
    running: bool = False
    ended: Ended | None = None
    trouble: str = ""
    no_image: bool = False
    unplaced: str = ""
    claimant: str = ""
    deleting: bool = False
    memory_bytes: int = 0
    granted_bytes: int = 0
    unresized: str = ""
    pulled_image: str = ""


def seen(pod: Mapping[str, Any]) -> Seen:
    meta, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    labels, annotations = meta.get("labels") or {}, meta.get("annotations") or {}
    state = _container_status(status).get("state") or {}
    waiting = _waiting(status)
    return Seen(
        str(meta["name"]),
        str(meta.get("uid", "")),
        str(meta.get("resourceVersion", "")),
        str(labels.get(CONTAINER, "")),
        str(labels.get(OWNER, "")),
        str(annotations.get(KIND, "")),
        str(labels.get(ROLE, "")),
        str(spec.get("nodeName") or ""),
        str(_container(spec).get("image", "")),
        running="running" in state,
        ended=_ended(spec, status, state),
        trouble=_trouble(spec, *waiting),
        no_image=waiting[1].get("reason") in _NO_IMAGE | {_NOT_THERE},
        unplaced=_unplaced(status),
        claimant=str(annotations.get(CLAIMANT, "")),
        deleting=bool(meta.get("deletionTimestamp")),
        memory_bytes=_memory_limit(_container(spec)),
        granted_bytes=_memory_limit(_container_status(status)),
        unresized=_unresized(status),
        pulled_image=str(_container_status(status).get("imageID") or ""),
    )


def quantity_bytes(text: str) -> int:
    """``2Gi`` → 2147483648; 0 for a text that is no amount of memory."""
    digits = text.rstrip("".join(_UNITS))
    try:
        return int(float(digits) * _UNITS.get(text[len(digits) :], 1))
    except ValueError:
        return 0


def _container_status(status: Mapping[str, Any]) -> Mapping[str, Any]:
    statuses: Sequence[Mapping[str, Any]] = status.get("containerStatuses") or []
    return next((s for s in statuses if s.get("name") == CONTAINER_NAME), {})


def _waiting(status: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The name and the state of a container that the node cannot start; of the function's own if there is none."""
    statuses: Sequence[Mapping[str, Any]] = status.get("containerStatuses") or []
    waiting = [(str(s.get("name", "")), (s.get("state") or {}).get("waiting") or {}) for s in statuses]
    stuck = [(name, why) for name, why in waiting if why.get("reason") in _NO_IMAGE | _NOT_MADE | {_NOT_THERE}]
    return stuck[0] if stuck else (CONTAINER_NAME, {})


def _ended(spec: Mapping[str, Any], status: Mapping[str, Any], state: Mapping[str, Any]) -> Ended | None:
    terminated = state.get("terminated")
    pod_reason = _sentence(status.get("reason"), status.get("message")) if status.get("phase") == "Failed" else ""
    if terminated is None:
        return Ended(None, pod_reason or "the pod failed") if status.get("phase") == "Failed" else None
    out_of_memory = terminated.get("reason") == "OOMKilled"
    reason = pod_reason
    if out_of_memory:
        reason = f"out of memory: its limit is {_memory_limit(_container(spec)) >> 20} MiB"
    elif not reason and terminated.get("reason", "") not in _NOT_NAMED:
        reason = _sentence(terminated.get("reason"), terminated.get("message"))
    return Ended(int(terminated.get("exitCode", 0)), reason, out_of_memory)


def _trouble(spec: Mapping[str, Any], name: str, waiting: Mapping[str, Any]) -> str:
    reason, message = str(waiting.get("reason", "")), str(waiting.get("message", ""))
    image = _container(spec, name).get("image", "")
    if reason == _NOT_THERE:
        return f"the image {image} is not on this node"
    if reason in _NO_IMAGE:
        return _sentence(f"the node cannot pull the image {image}", message or reason)
    return _sentence("the node cannot start the container", message or reason) if reason in _NOT_MADE else ""


def _unplaced(status: Mapping[str, Any]) -> str:
    conditions: Sequence[Mapping[str, Any]] = status.get("conditions") or []
    for condition in conditions:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return str(condition.get("message") or condition.get("reason") or "")
    return ""


def _unresized(status: Mapping[str, Any]) -> str:
    """A condition since 1.33, before that a word."""
    conditions: Sequence[Mapping[str, Any]] = status.get("conditions") or []
    for condition in conditions:
        if condition.get("type") == "PodResizePending" and condition.get("status") == "True":
            return _sentence(condition.get("reason"), condition.get("message"))
    said = str(status.get("resize") or "")
    return said if said in ("Deferred", "Infeasible") else ""


def _memory_limit(container: Mapping[str, Any]) -> int:
    limits = (container.get("resources") or {}).get("limits") or {}
    return quantity_bytes(str(limits.get("memory", "")))


def _container(spec: Mapping[str, Any], name: str = CONTAINER_NAME) -> Mapping[str, Any]:
    containers: Sequence[Mapping[str, Any]] = spec.get("containers") or []
    return next((c for c in containers if c.get("name") == name), {})


def _sentence(what: object, why: object) -> str:
    return ": ".join(str(part) for part in (what, why) if part)

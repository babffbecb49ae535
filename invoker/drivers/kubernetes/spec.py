"""The pod with which a cluster runs a container.  Pure.

The pod is bound to the invoker's own node by affinity, so the cluster's scheduler and the device plugin account for it.
It is reached through a socket, and reaches fetchd and the relay server through others.  They are in directories
of the node that have the same paths inside the pod::

    <run_dir>/c/<id>/io/s        the container's socket; the directory is closed to it once the socket is there
    its descriptor socket        from fetchd (llm)
    <run_dir>/packages/          installed packages, read-only (python)
    <run_dir>/relays/            one socket a relay server, read-only (llm)
    /tmp                         memory, bounded
    /root/termination-log        the node's file, which every container has; no user but root gets into /root

Everything else is read-only.

The pod of a user's image has two containers.  The image's own has no path of the node but a closed directory, in which
the node's file lies, because anybody might get into the image's /root.  The one beside it, which has the socket,
reaches the image's program through the network that containers of a pod share.

A pod always has a network.  Nothing in it uses one: a network policy for ``APP_LABEL`` closes it (docs/kubernetes.md).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from invoker.drivers.base import Spec
from invoker.drivers.confined import ENVIRONMENT, OF_OWN_IMAGES, SCRATCH, Limits
from invoker.drivers.programs import PROGRAMS
from thaw.action import KIND_LLM

APP_LABEL: Final = "app.kubernetes.io/name"
APP: Final = "thaw-function"
OWNER: Final = "thaw.dev/owner"
CONTAINER: Final = "thaw.dev/container"
ROLE: Final = "thaw.dev/role"
KIND: Final = "thaw.dev/kind"  # an annotation: a label's value may have no colon
CLAIMANT: Final = "thaw.dev/claimant"  # an annotation: the invoker process whose start has the pod (claimants.py)
STEM_CELL: Final = "stem-cell"
INSTANCE: Final = "instance"

CONTAINER_NAME: Final = "function"
PORT_NAME: Final = "port"
_PORT_LIMITS: Final = Limits(1, tmp_mb=1)
_PORT_BYTES: Final = 256 << 20
"""The memory of the container beside a user's image, which holds each request that it passes on whole."""
_NO_PROGRAM: Final = "/thaw-wants-the-digest-alone"
"""A program that no image has.  A node that makes a container with it pulls the image, says its digest, and runs
nothing of it."""
TERMINATION_FILE: Final = "termination-log"
_TERMINATION_LOG: Final = f"/root/{TERMINATION_FILE}"
"""A file of the node's disk that nothing bounds; by default everybody may write it, at /dev/termination-log."""
_DISK: Final = {"requests": "16Mi", "limits": "1Gi"}
"""The disk space of a container's output, which is all that it can write to its node's disk.  A container that writes
more is evicted."""
GPU: Final = "nvidia.com/gpu"
_FIRST_UID: Final = 1 << 20
_N_UIDS: Final = 1 << 30
"""Uids beyond those of people, of systemd and of the usual ranges for user namespaces."""
_MIB: Final = 1 << 20
_LEAST_CPU_M: Final = 10  # a quota of 1 ms in 100 ms, the kernel's smallest
_LABEL_CHARACTERS: Final = 63


@dataclass(frozen=True, slots=True)
class Owner:
    """The object whose deletion deletes the pod."""

    api_version: str
    kind: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class Mounts:
    """Paths on the node; all but ``io`` may be empty.  ``closed``: a directory that only root gets into, with a file of
    the name of _TERMINATION_LOG's."""

    io: str
    descriptor_socket: str = ""
    relays: str = ""
    packages: str = ""
    closed: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """``image`` is the platform's, of the spec's kind.  ``request_mb`` is the memory that the cluster counts for a
    container whose own limit is not known yet."""

    image: str
    node: str
    owner_label: str
    mounts: Mounts
    limits: Limits
    request_mb: int
    pull: bool = True
    owner: Owner | None = None
    claimant: str = ""


def pod_name(container_id: str) -> str:
    return f"thaw-{container_id}".lower()


def owner_label(name: str) -> str:
    """The label's value for an invoker of this name; names end with a hash, so the end is kept."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)[-_LABEL_CHARACTERS:].strip("-_.")


def uid_of(container_id: str) -> int:
    """The user id of a container, which no other container of the node is likely to have."""
    digest = hashlib.sha256(container_id.encode()).digest()
    return _FIRST_UID + int.from_bytes(digest[:8]) % _N_UIDS


def pod(spec: Spec, asked: Asked) -> dict[str, Any]:
    """The body of ``POST /api/v1/namespaces/…/pods``."""
    labels = {
        APP_LABEL: APP,
        OWNER: asked.owner_label,
        CONTAINER: spec.container_id,
        ROLE: spec.labels.get("role", INSTANCE),
    }
    annotations = {KIND: spec.kind}
    if labels[ROLE] != STEM_CELL:
        annotations[CLAIMANT] = asked.claimant
    metadata: dict[str, Any] = {"name": pod_name(spec.container_id), "labels": labels, "annotations": annotations}
    if asked.owner is not None:
        metadata["ownerReferences"] = [_reference(asked.owner)]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": _spec(spec, asked)}


def pulling_pod(spec: Spec, asked: Asked) -> dict[str, Any]:
    """A pod whose node pulls a user's image anew and runs nothing of it."""
    made = pod(spec, asked)
    container = _own_image(spec, asked) | {"command": [_NO_PROGRAM]}
    container["imagePullPolicy"] = "Always" if asked.pull else "Never"
    made["spec"] |= {"containers": [container], "volumes": [_memory("scratch", 1), _closed(asked.mounts)]}
    return made


def resources(share: float, memory_bytes: int, limits: Limits, request_bytes: int) -> dict[str, dict[str, str]]:
    """Requests are what the cluster's scheduler counts.  The CPU request stays small: shares of a host overlap, and
    requests that differ from the limits keep the pod's quality of service the same when it is resized."""
    cpu_m = max(_LEAST_CPU_M, int(1000 * min(1.0, share) * limits.n_cores))
    memory = memory_bytes or limits.default_memory_mb * _MIB
    return {
        "requests": {"cpu": f"{_LEAST_CPU_M}m", "memory": str(min(memory, memory_bytes or request_bytes))},
        "limits": {"cpu": f"{cpu_m}m", "memory": str(memory)},
    }


def _reference(owner: Owner) -> dict[str, Any]:
    return {
        "apiVersion": owner.api_version,
        "kind": owner.kind,
        "name": owner.name,
        "uid": owner.uid,
        "controller": False,  # else the owner would count the pod as its own replica
        "blockOwnerDeletion": False,
    }


def _spec(spec: Spec, asked: Asked) -> dict[str, Any]:
    uid = uid_of(spec.container_id)
    return {
        "restartPolicy": "Never",
        "affinity": _on_node(asked.node),
        "tolerations": [{"key": GPU, "operator": "Exists"}],  # nodes with GPUs keep other pods away by this taint
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "dnsPolicy": "None",  # no name is looked up; the policy demands a server
        "dnsConfig": {"nameservers": ["127.0.0.1"]},
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": uid,
            "runAsGroup": uid,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_own_image(spec, asked), _port(spec, asked)] if spec.image else [_container(spec, asked)],
        "volumes": [
            _memory("scratch", asked.limits.tmp_mb),
            *([_memory("port-scratch", _PORT_LIMITS.tmp_mb), _closed(asked.mounts)] if spec.image else []),
            *(
                {"name": name, "hostPath": {"path": path, "type": kind}}
                for name, path, kind, _ in _host_paths(spec, asked.mounts)
            ),
        ],
    }


def _container(spec: Spec, asked: Asked) -> dict[str, Any]:
    environment = {**ENVIRONMENT, "THAW_SOCKET": f"{asked.mounts.io}/s", **spec.env}
    if asked.mounts.packages:
        environment["THAW_LAYERS"] = asked.mounts.packages
    if spec.descriptor_socket:
        environment["THAW_DOOR"] = asked.mounts.descriptor_socket
    bounds = resources(spec.share, spec.memory_bytes, asked.limits, asked.request_mb * _MIB)
    if spec.kind == KIND_LLM and not spec.device.startswith("cpu"):
        bounds["limits"][GPU] = "1"
    return {
        **_hardened(CONTAINER_NAME, asked.image, environment, _with_disk(bounds), pull=asked.pull),
        "command": ["python"],
        "args": list(PROGRAMS[spec.kind]),
        "workingDir": SCRATCH,
        "volumeMounts": [{"name": "scratch", "mountPath": SCRATCH}, *_host_mounts(spec, asked.mounts)],
    }


def _own_image(spec: Spec, asked: Asked) -> dict[str, Any]:
    """The image's own program, in its own working directory."""
    bounds = resources(spec.share, spec.memory_bytes, asked.limits, asked.request_mb * _MIB)
    closed = asked.mounts.closed
    return {
        **_hardened(CONTAINER_NAME, spec.image, {**OF_OWN_IMAGES, **spec.env}, _with_disk(bounds), pull=asked.pull),
        "terminationMessagePath": f"{closed}/{TERMINATION_FILE}",
        "volumeMounts": [
            {"name": "scratch", "mountPath": SCRATCH},
            {"name": "closed", "mountPath": closed, "readOnly": True},
        ],
    }


def _port(spec: Spec, asked: Asked) -> dict[str, Any]:
    environment = {**ENVIRONMENT, "THAW_SOCKET": f"{asked.mounts.io}/s"}
    if "PORT" in spec.env:
        environment["PORT"] = spec.env["PORT"]
    bounds = resources(1.0, _PORT_BYTES, _PORT_LIMITS, _PORT_BYTES)
    bounds["requests"]["memory"] = str(asked.request_mb * _MIB)
    made = _hardened(PORT_NAME, asked.image, environment, _with_disk(bounds), pull=asked.pull)
    uid = uid_of(f"{spec.container_id}-{PORT_NAME}")
    made["securityContext"] |= {"runAsUser": uid, "runAsGroup": uid}
    return {
        **made,
        "command": ["python"],
        "args": ["-m", "thaw_runtime.action.image_port"],
        "workingDir": SCRATCH,
        "volumeMounts": [{"name": "port-scratch", "mountPath": SCRATCH}, *_host_mounts(spec, asked.mounts)],
    }


def _hardened(
    name: str, image: str, environment: Mapping[str, str], bounds: Mapping[str, Any], *, pull: bool
) -> dict[str, Any]:
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": "IfNotPresent" if pull else "Never",
        "env": [{"name": key, "value": value} for key, value in sorted(environment.items())],
        "resources": bounds,
        "terminationMessagePath": _TERMINATION_LOG,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "privileged": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }


def _with_disk(bounds: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    for name, amount in _DISK.items():
        bounds[name]["ephemeral-storage"] = amount
    return bounds


def _memory(name: str, size_mb: int) -> dict[str, Any]:
    return {"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": f"{size_mb}Mi"}}


def _closed(mounts: Mounts) -> dict[str, Any]:
    return {"name": "closed", "hostPath": {"path": mounts.closed, "type": "Directory"}}


def _host_mounts(spec: Spec, mounts: Mounts) -> list[dict[str, Any]]:
    return [
        {"name": name, "mountPath": path, "readOnly": read_only}
        for name, path, _, read_only in _host_paths(spec, mounts)
    ]


def _host_paths(spec: Spec, mounts: Mounts) -> Sequence[tuple[str, str, str, bool]]:
    """(name, path, what must be there, whether it is read-only); a path that is missing fails the start."""
    found = [("io", mounts.io, "Directory", False)]
    if mounts.descriptor_socket:
        found.append(("descriptors", mounts.descriptor_socket, "Socket", True))
    if mounts.relays and spec.kind == KIND_LLM:
        found.append(("relays", mounts.relays, "Directory", True))
    if mounts.packages:
        found.append(("packages", mounts.packages, "Directory", True))
    return found


def _on_node(node: str) -> Mapping[str, Any]:
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}

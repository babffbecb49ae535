"""The hardened configuration with which the engine creates a container.  Pure.

A function's container has no network at all.  It is reached through a socket that it makes in a mounted directory, it
reaches fetchd through its own descriptor socket and, in a pipeline, the relay server through a socket that is forwarded
(relay_socket.py).
So there is no address to connect to: not the host, not another function, not the metadata service.

Inside::

    /run/thaw/io/s         the container's socket; the directory is closed to it once the socket is there
    /run/thaw/door         this container's descriptor socket (llm)
    /run/thaw/packages/    installed packages, read-only; a layer cannot be found without its name (python)
    /run/thaw/relays/      one socket a relay server, read-only (llm)
    /tmp                   memory, bounded; everything else is read-only
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from invoker.drivers.base import Spec
from invoker.drivers.confined import ENVIRONMENT, OF_OWN_IMAGES, SCRATCH, Limits
from invoker.drivers.programs import PROGRAMS
from thaw.action import KIND_LLM, KIND_PYTHON
from thaw.errors import InitFailed

IO: Final = "/run/thaw/io"
DESCRIPTOR_SOCKET: Final = "/run/thaw/door"
RELAYS: Final = "/run/thaw/relays"
PACKAGES: Final = "/run/thaw/packages"
PERIOD_US: Final = 100_000  # the kernel's default
_MIB: Final = 1024 * 1024
_PORT_BYTES: Final = 256 * _MIB
"""The memory of the container beside a user's image, which holds each request that it passes on whole."""
_LOG_OPTIONS: Final = {"max-size": "10m", "max-file": "2"}
"""OpenWhisk's largest log of one activation is 10 MB; the engine keeps at most twice as much of a function's output."""


@dataclass(frozen=True, slots=True)
class Mounts:
    """Paths on the engine's machine; all but ``io`` may be empty."""

    io: str
    descriptor_socket: str = ""
    relays: str = ""
    packages: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    image: str
    labels: Mapping[str, str]
    mounts: Mounts
    limits: Limits
    uid: int
    seccomp: str
    """The profile's JSON."""
    devices: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    volumes: Sequence[str] = ()
    """The volumes that a user's image declares."""


def config(spec: Spec, asked: Asked) -> dict[str, Any]:
    """The body of ``POST /containers/create``."""
    environment = {**ENVIRONMENT, "THAW_SOCKET": f"{IO}/s", **spec.env}
    if spec.descriptor_socket:
        environment["THAW_DOOR"] = DESCRIPTOR_SOCKET
    if asked.mounts.packages:
        environment["THAW_LAYERS"] = PACKAGES
    if spec.image:
        return _of_own_image(spec, asked)
    return {
        "Image": asked.image,
        "Entrypoint": ["python"],
        "Cmd": list(PROGRAMS[spec.kind]),
        "WorkingDir": SCRATCH,
        "User": f"{asked.uid}:{asked.uid}",
        "Env": [f"{name}={value}" for name, value in sorted(environment.items())],
        "Labels": dict(asked.labels),
        "Healthcheck": {"Test": ["NONE"]},
        "NetworkDisabled": True,
        "HostConfig": _host_config(spec, asked),
    }


def _of_own_image(spec: Spec, asked: Asked) -> dict[str, Any]:
    """A user's image runs its own program and has no mount at all: port_config() makes its socket.  A volume that it
    declares would be a folder of the engine's disk without a bound, so it is in memory instead, like /tmp."""
    host = _host_config(spec, asked)
    size = f"rw,nosuid,nodev,size={asked.limits.tmp_mb}m,mode=1777"
    for path in asked.volumes:
        if not path.startswith("/") or ":" in path or "," in path or path == "/":
            raise InitFailed(f"The image declares a volume that no container may have: {path:.100}")
        host["Tmpfs"][path] = size
    return {
        "Image": asked.image,
        "User": f"{asked.uid}:{asked.uid}",
        "Env": [f"{name}={value}" for name, value in sorted({**OF_OWN_IMAGES, **spec.env}.items())],
        "Labels": dict(asked.labels),
        "Healthcheck": {"Test": ["NONE"]},
        "StopSignal": "SIGTERM",
        "NetworkDisabled": True,
        "HostConfig": host,
    }


def port_config(container: str, asked: Asked) -> dict[str, Any]:
    """The small container beside that of a user's image: it makes the socket, and forwards the requests that come
    through it to the port on which the image listens.  It shares the image's network, which has no interface but
    loopback."""
    spec = Spec("", KIND_PYTHON, memory_bytes=_PORT_BYTES)
    host = _host_config(spec, asked)
    host["NetworkMode"] = f"container:{container}"
    return {
        "Image": asked.image,
        "Entrypoint": ["python"],
        "Cmd": ["-m", "thaw_runtime.action.image_port"],
        "WorkingDir": SCRATCH,
        "User": f"{asked.uid}:{asked.uid}",
        "Env": [f"{name}={value}" for name, value in sorted({**ENVIRONMENT, "THAW_SOCKET": f"{IO}/s"}.items())],
        "Labels": dict(asked.labels),
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": host,
    }


def _host_config(spec: Spec, asked: Asked) -> dict[str, Any]:
    limits = asked.limits
    memory = spec.memory_bytes or limits.default_memory_mb * _MIB
    return {
        "NetworkMode": "none",
        "IpcMode": "private",
        "ReadonlyRootfs": True,
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges:true", f"seccomp={asked.seccomp}"],
        "PidsLimit": limits.pids,
        "Memory": memory,
        "MemorySwap": memory,  # the same: no swap
        "CpuPeriod": PERIOD_US,
        "CpuQuota": cpu_quota_us(spec.share, limits.n_cores),
        "Tmpfs": {SCRATCH: f"rw,nosuid,nodev,size={limits.tmp_mb}m,mode=1777"},
        "Mounts": _mounts(spec, asked.mounts),
        "LogConfig": {"Type": "json-file", "Config": _LOG_OPTIONS},
        "Ulimits": [{"Name": "core", "Soft": 0, "Hard": 0}],
        "RestartPolicy": {"Name": "no"},
        "DeviceRequests": [dict(d) for d in asked.devices],
    }


def cpu_quota_us(share: float, n_cores: int) -> int:
    """The CPU quota of a share; the kernel accepts no less than 1 ms."""
    return max(1000, int(min(1.0, share) * n_cores * PERIOD_US))


def _mounts(spec: Spec, mounts: Mounts) -> list[dict[str, Any]]:
    found = [_bind(mounts.io, IO, read_only=False)] if mounts.io else []
    if mounts.descriptor_socket:
        # a socket can be connected to all the same
        found.append(_bind(mounts.descriptor_socket, DESCRIPTOR_SOCKET, read_only=True))
    if mounts.relays and spec.kind == KIND_LLM:
        found.append(_bind(mounts.relays, RELAYS, read_only=True))
    if mounts.packages:
        found.append(_bind(mounts.packages, PACKAGES, read_only=True))
    return found


def _bind(source: str, target: str, *, read_only: bool) -> dict[str, Any]:
    """Type bind: unlike ``-v`` it fails when the source is missing, instead of making a directory as root.  The engine
    chooses the propagation, because it needs another one for paths in its own volumes."""
    return {"Type": "bind", "Source": source, "Target": target, "ReadOnly": read_only}

"""Where an invoker's pods are made, from its settings and from its own pod."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from invoker.drivers.kubernetes.client import Cluster
from invoker.drivers.kubernetes.spec import Owner
from invoker.settings import InvokerSettings
from thaw.action import KIND_LLM, KIND_PYTHON
from thaw.errors import PlatformError
from thaw.settings import SettingError

_LEAST_START_S: Final = 60.0
_PYTHON_REQUEST_MB: Final = 64  # a waiting interpreter and its proxy


@dataclass(frozen=True, slots=True)
class Place:
    """Where pods are made and where their node keeps their output.  ``start_s`` is the longest wait until a pod runs,
    the pull of its image included.  ``pod_name`` and ``pod_uid`` are of the invoker's own pod; empty: it is none."""

    namespace: str
    node: str
    images: Mapping[str, str]
    request_mb: Mapping[str, int]
    pod_logs: Path
    start_s: float
    pull: bool = True
    owner: Owner | None = None
    pod_name: str = ""
    pod_uid: str = ""


def find_place(settings: InvokerSettings, cluster: Cluster, run_dir: Path) -> Place:
    """Raises SettingError without a node's name, PlatformError when sockets would have another path on the node."""
    if not settings.node_name:
        raise SettingError("THAW_NODE_NAME is not set", hint="set it to the node's name, spec.nodeName of this pod")
    own = None
    if settings.pod_name:
        own = cluster.node_pod(settings.pod_name)
        for path in (str(run_dir.absolute()), os.path.dirname(settings.fetchd_socket)):
            check_same_path(path, own.host_paths)
    return Place(
        settings.pod_namespace,
        settings.node_name,
        {KIND_PYTHON: settings.image_python, KIND_LLM: settings.image_llm},
        {KIND_PYTHON: _PYTHON_REQUEST_MB, KIND_LLM: settings.stem_cell_mb},
        Path(settings.pod_logs),
        max(_LEAST_START_S, settings.image_pull_s),
        settings.image_pull_s > 0,
        own.owner if own is not None else None,
        own.name if own is not None else "",
        own.uid if own is not None else "",
    )


def check_same_path(path: str, host_paths: Mapping[str, str]) -> None:
    """Raises PlatformError unless ``path`` is a directory of the node that has the same name in this pod."""
    inside = [m for m in host_paths if PurePosixPath(path).is_relative_to(m)]
    if not inside or host_paths[max(inside, key=len)] != max(inside, key=len):
        raise PlatformError(
            f"{path} is not mounted from the node under the same path",
            hint="give the invoker's pod a hostPath volume for it, with the same path and mountPath",
        )

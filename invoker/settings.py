"""The invoker's settings."""

from __future__ import annotations

import os
from dataclasses import dataclass

from thaw.settings import setting

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class InvokerSettings:
    state_url: str = setting("THAW_STATE_URL", "the state server, redis://host:port/db")
    host_id: str = setting("THAW_HOST_ID", "this host's name in the registry")
    run_dir: str = setting("THAW_RUN_DIR", "directory of this host's sockets, logs and owned processes")
    fetchd_socket: str = setting("THAW_FETCHD_SOCKET", "fetchd's control socket on this host")
    bind: str = setting("THAW_INVOKER_BIND", "host:port of the data port; port 0 takes a free one", "127.0.0.1:0")
    advertise: str = setting("THAW_INVOKER_ADVERTISE", "host:port at which gateways reach the data port", "")
    metrics_token: str = setting(
        "THAW_METRICS_TOKEN", "bearer token of /metrics, beside the installation's; empty: there is no other", ""
    )
    stage_address: str = setting(
        "THAW_STAGE_ADDRESS", "address at which containers of other hosts reach this host's; empty: they cannot", ""
    )
    api_host: str = setting(
        "THAW_API_HOST", "URL of the API as functions reach it, their __OW_API_HOST; empty: they are told none", ""
    )
    memory_mb: int = setting("THAW_MEMORY_MB", "device memory this host declares, MiB", 4096)
    device: str = setting("THAW_DEVICE", "name of the device", "cpu")
    driver: str = setting(
        "THAW_DRIVER", "container driver: process, docker, kubernetes, or one that a package adds", "process"
    )
    docker_host: str = setting("DOCKER_HOST", "the engine's socket (driver docker)", "unix:///var/run/docker.sock")
    kubeconfig: str = setting("KUBECONFIG", "credentials (driver kubernetes); empty: those of this pod", "")
    pod_namespace: str = setting("THAW_POD_NAMESPACE", "namespace of the functions' pods (driver kubernetes)", "thaw")
    node_name: str = setting("THAW_NODE_NAME", "this node's name in the cluster (driver kubernetes)", "")
    pod_name: str = setting("THAW_POD_NAME", "this invoker's own pod; empty: it is none (driver kubernetes)", "")
    pod_logs: str = setting(
        "THAW_POD_LOGS", "where the node keeps the output of pods (driver kubernetes)", "/var/log/pods"
    )
    image_python: str = setting("THAW_IMAGE_PYTHON", "image of python:3.11 functions", "thaw/python:0.1.0")
    image_llm: str = setting("THAW_IMAGE_LLM", "image of llm:vllm functions", "thaw/vllm-cpu:0.1.0")
    image_pull_s: float = setting("THAW_IMAGE_PULL_S", "longest pull of a missing image; 0: never pull", 600.0)
    images_mb: int = setting(
        "THAW_IMAGES_MB",
        "disk for images that were pulled for functions (driver docker), MiB; beyond it the unused ones are removed",
        20480,
    )
    package_index: str = setting(
        "THAW_PACKAGE_INDEX",
        "URL of the index of functions' packages; empty: what pip's configuration says; off: none are installed",
        "",
    )
    packages_mb: int = setting("THAW_PACKAGES_MB", "disk for the installed packages of functions, MiB", 4096)
    pids: int = setting("THAW_CONTAINER_PIDS", "processes and threads of one container", 512)
    container_uids: str = setting(
        "THAW_CONTAINER_UIDS",
        "uids of which each container gets one (driver docker), FIRST-LAST; gids are the same",
        "2000000000-2000065535",
    )
    tmp_mb: int = setting("THAW_CONTAINER_TMP_MB", "a container's /tmp, MiB, counted as its memory", 256)
    stem_cells: str = setting("THAW_STEM_CELLS", "keep stem cells, as many as the scheduler says: on or off", "on")
    zygote_parent: str = setting(
        "THAW_ZYGOTE_PARENT", "socket of a pre-imported process that hosts on one machine fork theirs from", ""
    )
    stem_cell_mb: int = setting("THAW_STEM_CELL_MB", "memory counted for the pre-imported llm process, MiB", 768)
    link_bytes_per_s: float | None = setting(
        "THAW_LINK_BYTES_PER_S", "this host's network link; empty: 1 Gbit/s is supposed until it was measured", None
    )
    start_timeout_s: float = setting("THAW_START_TIMEOUT_S", "longest wait for one /init", 900.0)
    consolidate_timeout_s: float = setting(
        "THAW_CONSOLIDATE_TIMEOUT_S",
        "after this time the scheduler hears that a pipeline has not become one worker",
        900.0,
    )
    drain_s: float = setting("THAW_DRAIN_S", "how long running requests may finish at shutdown", 5.0)
    handover_s: float = setting(
        "THAW_HANDOVER_S",
        "at shutdown leave the containers to the next invoker of this host, for which the scheduler waits so long; 0: "
        "end them",
        0.0,
    )
    cpu_share: str = setting("THAW_CPU_SHARE", "enforce compute shares by cgroup quota: on or off", "on")

    @property
    def memory_bytes(self) -> int:
        return self.memory_mb * MIB

    @property
    def n_cores(self) -> int:
        return len(os.sched_getaffinity(0))

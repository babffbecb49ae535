"""An API server and a node of the test's own, and drivers for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from invoker.drivers.confined import Limits
from invoker.drivers.kubernetes.client import Cluster
from invoker.drivers.kubernetes.driver import KubernetesDriver
from invoker.drivers.kubernetes.place import Place
from tests.kubernetes.api_server import NAMESPACE, ApiServer
from tests.kubernetes.kubelet import NODE, Kubelet
from thaw.action import KIND_LLM, KIND_PYTHON
from thaw.logs import Log


class FakeCluster:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.api = ApiServer()
        self.kubelet = Kubelet(self.api, directory / "pod-logs")
        self.kubeconfig = self.api.kubeconfig(directory)

    def place(self, **other: Any) -> Place:
        images = {KIND_PYTHON: "thaw/python:test", KIND_LLM: "thaw/llm:test"}
        request_mb = {KIND_PYTHON: 64, KIND_LLM: 768}
        place = Place(NAMESPACE, NODE, images, request_mb, self.directory / "pod-logs", start_s=20.0)
        return replace(place, **other)

    def driver(
        self,
        run_dir: Path,
        host_id: str = "host-t",
        replaced: Callable[[], None] = lambda: None,
        **place: Any,
    ) -> KubernetesDriver:
        cluster = Cluster(NAMESPACE, self.kubeconfig)
        return KubernetesDriver(cluster, run_dir, host_id, self.place(**place), Limits(2), Log("test"), replaced)

    def close(self) -> None:
        self.kubelet.close()
        self.api.close()
        assert self.api.problems == []


@contextmanager
def fake_cluster(directory: Path) -> Iterator[FakeCluster]:
    cluster = FakeCluster(directory)
    try:
        yield cluster
    finally:
        cluster.close()

"""An API server and a node of the test's own, drivers for them, and containers that do one simple thing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from invoker.drivers.base import Driver, Handle, Spec
from invoker.drivers.confined import Limits
from invoker.drivers.kubernetes.client import Cluster
from invoker.drivers.kubernetes.driver import KubernetesDriver
from invoker.drivers.kubernetes.place import Place
from invoker.drivers.programs import PROGRAMS
from tests.container_ends import Ends
from tests.kubernetes.api_server import NAMESPACE, ApiServer
from tests.kubernetes.kubelet import NODE, Kubelet
from thaw.action import KIND_LLM, KIND_PYTHON
from thaw.errors import PlatformError, ThawError
from thaw.logs import Log

WAIT_S = 20.0
LISTENS = """
import os, socket, time
s = socket.socket(socket.AF_UNIX); s.bind(os.environ['THAW_SOCKET'] + '.new'); s.listen()
os.rename(os.environ['THAW_SOCKET'] + '.new', os.environ['THAW_SOCKET']); print('up', flush=True)
while True:
    s.accept()[0].close()
"""
"""A container that takes connections: it starts in a tenth of the time that a function's proxy needs."""


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
        self, run_dir: Path, host_id: str = "host-t", replaced: Callable[[], None] = lambda: None, **place: Any
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


def spec(container_id: str = "one", role: str = "instance") -> Spec:
    return Spec(container_id, KIND_PYTHON, labels={"role": role}, memory_bytes=256 << 20 if role == "instance" else 0)


def cell(container_id: str = "cell") -> Spec:
    return spec(container_id, "stem-cell")


def runs(monkeypatch: pytest.MonkeyPatch, code: str = LISTENS) -> None:
    monkeypatch.setitem(PROGRAMS, KIND_PYTHON, ("-c", code))


def up(driver: Driver, wanted: Spec | None = None) -> Handle:
    wanted = wanted or spec()
    return driver.connect(driver.start(driver.create(wanted), wanted), deadline_s=WAIT_S)


def meanwhile(call: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Call it in a thread of its own.  The future has what it returns, or the platform's error that it raises."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call(*arguments))
        except PlatformError as e:
            future.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    return future


class Node:
    """A node of a cluster and the driver of its invoker."""

    def __init__(self, cluster: FakeCluster, driver: KubernetesDriver) -> None:
        self.cluster, self.driver = cluster, driver
        self.api, self.kubelet = cluster.api, cluster.kubelet
        self.ends = Ends(driver)

    def up(self, wanted: Spec | None = None) -> Handle:
        return up(self.driver, wanted)

    def refused(self, match: str, kind: type[ThawError] = PlatformError, wanted: Spec | None = None) -> ThawError:
        """Start a container, which fails like this, and remove it.  Return the error."""
        wanted = wanted or spec()
        handle = self.driver.create(wanted)
        with pytest.raises(kind, match=match) as failed:
            self.driver.start(handle, wanted)
        self.driver.remove(handle)
        assert not handle.directory.exists()
        return failed.value

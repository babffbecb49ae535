"""Invokers as processes of their own on a cluster of the test, one after another, and the scheduler's side of them."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, cast

from relay.state import redis_link
from relay.state.records import Records
from relay.state.registry import Registry
from tests.invoker.platform import HOST, WAIT_S, Events, Host
from tests.kubernetes.api_server import NAMESPACE
from tests.kubernetes.cluster import FakeCluster
from tests.kubernetes.kubelet import NODE
from thaw.ids import random_hex_id
from thaw.instance import InstanceRecord


class Invoker:
    """One process, with the events that it has logged."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.log: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "invoker.main"], env={**os.environ, **environment}, stderr=subprocess.PIPE
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                with self._changed:
                    self.log.append(json.loads(line) if line.startswith(b"{") else {"event": line.decode()})
                    self._changed.notify_all()

    def wait(self, event: str) -> dict[str, Any]:
        with self._changed:
            found = self._changed.wait_for(lambda: next((e for e in self.log if e["event"] == event), None), WAIT_S)
        assert found is not None, f"no {event}: {self.log}"
        return found

    def named(self, event: str) -> list[dict[str, Any]]:
        return [e for e in self.log if e["event"] == event]

    def ask_to_end(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        self.ask_to_end()
        assert self._process.wait(WAIT_S) == 0, self.log
        self._reader.join(WAIT_S)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(WAIT_S)
        self._reader.join(WAIT_S)


class Invokers(Host):
    """A host whose invokers follow one another; runs are sent to the address in the instance's record."""

    def __init__(self, cluster: FakeCluster, url: str, run_dir: Path) -> None:
        self.cluster, self.url, self.run_dir = cluster, url, run_dir
        self.client = redis_link.connect(url)
        self.registry, self.records = Registry(self.client), Records(self.client)
        self.events = Events(url)
        self.epoch = 1
        self._begun: list[Invoker] = []

    def begin(self, **other: str) -> Invoker:
        """Return when it is ready; ``other`` are further variables."""
        environment = {
            "THAW_STATE_URL": self.url,
            "THAW_HOST_ID": HOST,
            "THAW_RUN_DIR": str(self.run_dir),
            "THAW_FETCHD_SOCKET": str(self.run_dir / "fetchd.s"),
            "THAW_MEMORY_MB": "2048",
            "THAW_DRIVER": "kubernetes",
            "KUBECONFIG": self.cluster.kubeconfig,
            "THAW_POD_NAMESPACE": NAMESPACE,
            "THAW_NODE_NAME": NODE,
            "THAW_POD_LOGS": str(self.cluster.directory / "pod-logs"),
            "THAW_IMAGE_PYTHON": "thaw/python:test",
            "THAW_HANDOVER_S": "60",
            "THAW_DRAIN_S": "10",
            **other,
        }
        self._begun.append(invoker := Invoker(environment))
        invoker.wait("ready")
        return invoker

    def close(self) -> None:
        for invoker in self._begun:
            invoker.kill()
        super().close()

    def call(self, record: InstanceRecord, value: Any) -> Any:
        with closing(self.calling(record, value)) as connection:
            return json.loads(connection.getresponse().read())

    def calling(self, record: InstanceRecord, value: Any) -> http.client.HTTPConnection:
        """A run whose answer has not been read."""
        host, _, port = record.address.rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=WAIT_S)
        body = json.dumps({"value": value, "activation_id": random_hex_id()})
        connection.request("POST", f"/instances/{record.instance_id}/run", body, self.headers())
        return connection

    def adopted(self, before: InstanceRecord) -> InstanceRecord:
        """The record as a later invoker has put it."""

        def is_newer(event: Any) -> bool:
            found = getattr(event, "instance", None)
            return found is not None and found.instance_id == before.instance_id and found.address != before.address

        told = self.events.wait(is_newer, f"record of {before.instance_id} by another invoker")
        return cast(InstanceRecord, told.instance)

    def pods(self, role: str) -> set[str]:
        return self.cluster.api.left(role)


def directory_of(run_dir: Path, pod: str) -> Path:
    """Where a container's socket and its owner are."""
    return run_dir / "c" / hashlib.sha256(pod.removeprefix("thaw-").encode()).hexdigest()[:12]

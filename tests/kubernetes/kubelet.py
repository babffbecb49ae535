"""A node for :class:`~tests.kubernetes.api_server.ApiServer`: its pods' containers are processes of this machine.

It binds pods to itself, starts them, writes their output in the CRI's format, reports how they end, and ends them when
their pod is deleted: SIGTERM, SIGKILL when the grace period is over, and some time later the object goes.  ``trouble`` makes it report
that a container cannot be started, ``unresized`` that it cannot have other limits; ``unplaced`` keeps the cluster's
scheduler from binding pods.  ``images`` has the programs of users' images, and ``digests`` the names under which it reports
images.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from invoker.drivers import process_ids
from invoker.drivers.kubernetes.logs import log_path
from tests.kubernetes.api_server import NAMESPACE, ApiServer, Event

NODE = "node-1"
LINGERS_S = 0.3
STAMP = b"2026-01-01T00:00:00.000000000Z"
PASSED_ON = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "HF_HUB_OFFLINE")


@dataclass
class _Container:
    name: str
    uid: str
    process: subprocess.Popen[bytes] | None = None
    port: subprocess.Popen[bytes] | None = None  # beside that of a user's image
    image: str = ""
    deleting: bool = False
    resources: dict[str, Any] = field(default_factory=dict)
    how: dict[str, Any] = field(default_factory=dict)  # further fields of its end
    over: threading.Event = field(default_factory=threading.Event)


class Kubelet:
    def __init__(self, api: ApiServer, logs: Path) -> None:
        self.api, self.logs = api, logs
        self.trouble: dict[str, str] = {}
        self.images: dict[str, list[str]] = {}
        self.digests: dict[str, str] = {}
        self.unplaced = ""
        self.before_running: Callable[[str], None] = lambda name: None
        self.unresized: dict[str, str] = {}
        self.before_resizing: Callable[[], None] = lambda: None
        self._containers: dict[str, _Container] = {}
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._scratch = tempfile.TemporaryDirectory(prefix="thaw-kubelet-")
        self._threads: list[threading.Thread] = []
        api.on_change = self._events.put
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    # faults --------------------------------------------------------------------------------------------------------

    def kill(self, name: str, **how: Any) -> None:
        """Kill a pod's container; ``how`` holds further fields of its end (``reason="OOMKilled"``)."""
        container = self._containers[name]
        container.how = how
        self._kill(container, signal.SIGKILL)

    def evict(self, name: str, message: str) -> None:
        """The node is short of something: it ends the pod, whose object stays."""

        def failed(pod: dict[str, Any]) -> None:
            pod["status"] |= {"phase": "Failed", "reason": "Evicted", "message": message}

        self.api.change(name, failed)
        self._kill(self._containers[name], signal.SIGKILL)

    def rotate(self, name: str) -> None:
        """Begin another log file under the same name, as a kubelet has the runtime do."""
        path = self._log_path(self._containers[name])
        path.rename(path.with_name("0.log.1"))
        path.touch()

    def log(self, name: str, stream: str, tag: str, text: str) -> None:
        self._write(self._containers[name], stream, tag, text.encode())

    def pid(self, name: str) -> int:
        process = self._containers[name].process
        return process.pid if process is not None else 0

    def close(self) -> None:
        """Leaves no process."""
        self._events.put(None)
        self._thread.join()
        for container in self._containers.values():
            self._kill(container, signal.SIGKILL)
        for thread in self._threads:
            thread.join()
        self._scratch.cleanup()

    # a node's life -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            name, metadata = event.pod["metadata"]["name"], event.pod["metadata"]
            if event.kind == "ADDED":
                self._added(name, event.pod)
            elif event.kind == "MODIFIED" and "deletionTimestamp" in metadata:
                self._deleted(name, metadata["deletionGracePeriodSeconds"])
            elif event.kind == "MODIFIED":
                self._resized(name, event.pod["spec"]["containers"][0]["resources"])

    def _added(self, name: str, pod: dict[str, Any]) -> None:
        container = self._containers[name] = _Container(name, pod["metadata"]["uid"])
        container.resources = pod["spec"]["containers"][0]["resources"]
        container.image = pod["spec"]["containers"][0]["image"]
        if self.unplaced:
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": self.unplaced}
            self._report(name, {"phase": "Pending", "conditions": [condition]})
            return
        self.api.change(name, lambda p: p["spec"].update(nodeName=NODE))
        for port in pod["spec"]["containers"][1:]:
            container.port = self._spawn(port, subprocess.DEVNULL)
        if self.trouble:
            self._report(name, {"phase": "Pending"}, {"waiting": self.trouble})
            return
        if pod["spec"]["containers"][0].get("command", ["python"]) != ["python"]:
            container.over.set()
            why = {"exitCode": 128, "reason": "StartError", "message": "no such file or directory"}
            self._report(name, {"phase": "Failed"}, {"terminated": why})
            return
        path = self._log_path(container)
        path.parent.mkdir(parents=True)
        path.touch()
        self.before_running(name)
        if not all(map(_is_there, pod["spec"]["volumes"])):
            return  # it tries again for ever, and only an event says why
        container.process = self._spawn(pod["spec"]["containers"][0])
        self._report(name, {"phase": "Running"}, {"running": {"startedAt": STAMP.decode()}})
        thread = threading.Thread(target=self._follow, args=(container, container.process), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _resized(self, name: str, wanted: dict[str, Any]) -> None:
        container = self._containers[name]
        if container.process is None or wanted == container.resources:
            return
        self.before_resizing()
        container.resources = wanted
        if self.unresized:
            self._report(name, {"conditions": [{"type": "PodResizePending", "status": "True", **self.unresized}]})
        else:
            self._report(name, {}, {"running": {"startedAt": STAMP.decode()}})

    def _deleted(self, name: str, grace_s: int) -> None:
        container = self._containers[name]
        if container.deleting:
            return
        container.deleting = True
        if container.over.is_set():
            self._kill(container, signal.SIGKILL)
            self._clean_up(name)
            return
        if container.process is None:
            self._kill(container, signal.SIGKILL)
            return  # a node takes its time over a pod that never ran
        self._kill(container, signal.SIGTERM)
        thread = threading.Thread(target=self._end, args=(container, grace_s), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _end(self, container: _Container, grace_s: int) -> None:
        container.over.wait(grace_s)
        self._kill(container, signal.SIGKILL)

    def _spawn(self, container: dict[str, Any], output: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
        program = [sys.executable, *container["args"]] if "command" in container else self.images[container["image"]]
        kept = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        own = {e["name"]: e["value"] for e in container["env"]} | {"TMPDIR": self._scratch.name}
        return subprocess.Popen(
            program,
            env={**kept, **own},
            cwd=self._scratch.name,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )

    def _follow(self, container: _Container, process: subprocess.Popen[bytes]) -> None:
        """Copy the output; when the container has ended, report it."""
        readers = [
            threading.Thread(target=self._copy, args=(container, stream, pipe), daemon=True)
            for stream, pipe in (("stdout", process.stdout), ("stderr", process.stderr))
        ]
        for reader in readers:
            reader.start()
        status = process.wait()
        process_ids.end_group(process.pid, 60.0)  # as the end of a pid namespace does
        for reader in readers:
            reader.join()
        container.over.set()
        how = {"exitCode": status if status >= 0 else 128 - status, "reason": "Error" if status else "Completed"}
        state = {"terminated": how | container.how}
        self._report(container.name, {"phase": "Failed" if status else "Succeeded"}, state)
        if container.deleting:
            self._clean_up(container.name)

    def _clean_up(self, name: str) -> None:
        """The object stays until the node has removed the pod's volumes."""
        timer = threading.Timer(LINGERS_S, self.api.vanish, [name])
        self._threads.append(timer)
        timer.start()

    def _copy(self, container: _Container, stream: str, pipe: Any) -> None:
        with pipe:
            for line in pipe:
                self._write(container, stream, "F" if line.endswith(b"\n") else "P", line.rstrip(b"\n"))

    def _write(self, container: _Container, stream: str, tag: str, text: bytes) -> None:
        with self._log_path(container).open("ab", buffering=0) as file:
            file.write(b" ".join((STAMP, stream.encode(), tag.encode(), text)) + b"\n")

    def _log_path(self, container: _Container) -> Path:
        return log_path(self.logs, NAMESPACE, container.name, container.uid, "function")

    def _report(self, name: str, status: dict[str, Any], state: dict[str, Any] | None = None) -> None:
        def change(pod: dict[str, Any]) -> None:
            pod["status"] = {**pod["status"], **status}
            if state is not None:
                granted = self._containers[name].resources
                image = self.digests.get(self._containers[name].image, "") if "waiting" not in state else ""
                shown = {"name": "function", "state": state, "resources": granted, "imageID": image}
                pod["status"]["containerStatuses"] = [shown]

        self.api.change(name, change)

    def _kill(self, container: _Container, sig: signal.Signals) -> None:
        if container.port is not None and sig is signal.SIGKILL:
            container.port.kill()
            container.port.wait()
        if container.process is not None and not container.over.is_set():
            with contextlib.suppress(ProcessLookupError):
                container.process.send_signal(sig)


def _is_there(volume: dict[str, Any]) -> bool:
    """The check of a hostPath volume that has a type."""
    path = Path(volume["hostPath"]["path"]) if "hostPath" in volume else None
    return path is None or (path.is_socket() if volume["hostPath"]["type"] == "Socket" else path.is_dir())

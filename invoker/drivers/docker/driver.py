"""Containers of a Docker engine: hardened, without a network, found again by their labels.

The engine is asked to create, start, stop; a function is reached through a socket in a mounted directory, so a warm
run never passes the engine, and goes on while the engine is being restarted (with live-restore).  A container belongs
to the invoker whose label it carries: the host's name and the place of its run directory on the engine's machine.  Two
invokers on one engine never see each other's.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Self

from invoker.drivers import io_directory, log_files, process_ids
from invoker.drivers.base import DriverContext, Exit, Handle, LogChunk, Owned, Spec, Stats, status_of
from invoker.drivers.confined import Limits
from invoker.drivers.docker import seccomp
from invoker.drivers.docker import spec as docker_spec
from invoker.drivers.docker.client import Engine, EngineEvent, Seen, gpu_request
from invoker.drivers.docker.events import EngineEvents
from invoker.drivers.docker.images import Images, ImageStore
from invoker.drivers.docker.logs import LogFollower
from invoker.drivers.docker.paths import EnginePaths
from invoker.drivers.docker.ports import CONTAINER, PORT_OF, UID, Ports, port_id
from invoker.drivers.docker.spec import Asked, Mounts
from invoker.drivers.docker.uids import DEFAULT_RANGE, UidRange, Uids
from invoker.drivers.layer_directory import layers_of
from invoker.drivers.ownership import OwnedContainers
from invoker.drivers.relay_socket import RelaySockets
from invoker.drivers.socket_wait import listens, wait_socket_until
from thaw.action import KIND_LLM, KIND_PYTHON
from thaw.errors import NotFound, PlatformError, WorkerLost
from thaw.host import name_on_machine
from thaw.logs import Log

OWNER: Final = "thaw.owner"
KIND: Final = "thaw.kind"
_KILLED_S: Final = 10.0  # from SIGKILL to the engine's report of the end, memory of gigabytes included
_LAST_LINES_S: Final = 1.0  # between a container's end and its last line
_KILLED: Final = 128 + signal.SIGKILL
_CAUSE_S: Final = 0.5  # between the end of a container that was killed and the engine's report that it had no memory
_ENGINE_BACK_S: Final = 60.0


@dataclass(slots=True)
class _Container:
    handle: Handle
    memory_bytes: int = 0
    started: bool = False
    out_of_memory: threading.Event = field(default_factory=threading.Event)
    is_stopped: bool = False  # by this driver
    early_end: tuple[int | None] | None = None  # it ended before its start had returned
    reported: bool = False
    ended: threading.Event = field(default_factory=threading.Event)
    ended_fd: int = -1  # readable once it has ended
    cancelled_fd: int = -1  # readable once it is to be stopped
    logs: LogFollower | None = None
    has_port: bool = True
    """Whether a second container runs beside it; assumed to be true for one that an earlier invoker made."""


class DockerDriver:
    name = "docker"
    share = "enforced"
    whole_devices = False
    zygote = None  # each stem cell is a container

    def __init__(
        self,
        engine: Engine,
        run_dir: Path,
        host_id: str,
        images: Images,
        limits: Limits,
        log: Log,
        cut_off: Callable[[], None] = lambda: None,
        uids: UidRange = DEFAULT_RANGE,
    ) -> None:
        """``cut_off`` is called when only a new life can reach the engine again (events.py).  Raises Unavailable
        when there is no engine, PlatformError when ``run_dir`` is none of its machine's, SettingError when its
        containers cannot have the uids."""
        engine.check()
        if engine.maps_users():
            uids.check_mapped()
        self._engine, self._limits, self._log = engine, limits, log
        self._images = ImageStore(engine, images, run_dir / "images", log)
        self._paths = EnginePaths.find(engine)
        self._owned = OwnedContainers(run_dir)
        self.owner = name_on_machine(host_id, self._paths.there(str(run_dir.absolute())))
        self._host_id = host_id
        self._callbacks: list[Callable[[Exit], None]] = []
        self._lock = threading.Lock()
        self._containers: dict[str, _Container] = {}
        self._doomed: dict[str, str] = {}  # name → id of those to be removed when the engine is back
        self._uids = Uids(uids, self.owner)
        self._ports = Ports(engine, self._images, limits, self.owner, self._take_uid)
        self._relays = RelaySockets(run_dir / "relays", log)
        self._packages = layers_of(run_dir.absolute())
        self._events = EngineEvents(engine, f"{OWNER}={self.owner}", self._event, self._reconcile, cut_off, log)

    @classmethod
    def make(cls, context: DriverContext) -> Self:
        settings = context.settings
        by_kind = {KIND_PYTHON: settings.image_python, KIND_LLM: settings.image_llm}
        images = Images(by_kind, settings.image_pull_s, settings.images_mb << 20)
        limits = Limits(settings.n_cores, settings.pids, settings.tmp_mb, max(2048, 2 * settings.stem_cell_mb))
        uids = UidRange.parse(settings.container_uids)
        engine = Engine(settings.docker_host)
        return cls(engine, context.run_dir, settings.host_id, images, limits, context.log, context.cut_off, uids)

    def reachable(self) -> bool:
        """Try a new connection: an engine that is ending still serves the connections that were made before."""
        return listens(self._engine.socket_path)

    def on_exit(self, callback: Callable[[Exit], None]) -> None:
        self._callbacks.append(callback)

    # a container's life --------------------------------------------------------------------------------------------

    def pin(self, image: str, *, deadline_s: float) -> str:
        return self._images.pin(image, deadline_s)

    def create(self, spec: Spec) -> Handle:
        with self._lock:
            known = self._containers.get(spec.container_id)
        if known is not None:
            return known.handle
        handle = self._handle(spec.container_id, spec.kind)
        try:
            self._owned.write(handle, spec.labels)
            io_directory.make(handle)
        except PlatformError:
            self._owned.remove(handle)
            raise
        with self._lock:
            self._containers[spec.container_id] = _Container(
                handle,
                spec.memory_bytes,
                ended_fd=os.eventfd(0, os.EFD_CLOEXEC),
                cancelled_fd=os.eventfd(0, os.EFD_CLOEXEC),
                has_port=bool(spec.image),
            )
        try:
            pulled_s = self._create(handle, spec)
        except PlatformError:
            self.remove(handle)
            raise
        return replace(handle, image_pull_s=pulled_s)

    def start(self, handle: Handle, spec: Spec) -> Handle:
        container = self._get(handle)
        if container.started:
            return container.handle
        began = time.time()
        name = self._name(handle)
        self._engine.start(name)
        if spec.image:
            self._ports.open(name, spec.container_id, self._paths.there(str(io_directory.of(handle))))
        seen = self._engine.inspect(name)
        started = replace(handle, pid=seen.pid, start_ticks=process_ids.start_ticks(seen.pid) or 0 if seen.pid else 0)
        self._owned.write(started, spec.labels)
        with self._lock:
            container.handle, container.started = started, True
            container.logs = self._follow(container, began)
            early = container.early_end
        if early is not None or not seen.running:
            self._ended(container, early[0] if early is not None else seen.exit_code)
        return started

    def connect(self, handle: Handle, *, deadline_s: float) -> Handle:
        container = self._get(handle)
        wait_socket_until(handle.socket_path, container.ended_fd, deadline_s, container.cancelled_fd).close()
        io_directory.close(handle)
        return handle

    def claim(self, handle: Handle) -> bool:
        """No other invoker has its stem cells."""
        return True

    def relabel(self, handle: Handle, labels: Mapping[str, str]) -> None:
        """An engine's labels never change: these are kept beside the container."""
        self._get(handle)  # raises for a container that has been removed: a file written for it would stay
        self._owned.write(handle, labels)

    def limit(self, handle: Handle, share: float, memory_bytes: int) -> None:
        self._get(handle).memory_bytes = memory_bytes
        quota = docker_spec.cpu_quota_us(share, self._limits.n_cores)
        self._engine.update(
            self._name(handle), cpu_quota_us=quota, cpu_period_us=docker_spec.PERIOD_US, memory_bytes=memory_bytes
        )

    def relay_address(self, address: str) -> str:
        return self._relays.inside(address, docker_spec.RELAYS)

    def pause(self, handle: Handle) -> None:
        self._engine.pause(self._name(handle))

    def unpause(self, handle: Handle) -> None:
        self._engine.unpause(self._name(handle))

    def stop(self, handle: Handle, *, deadline_s: float) -> None:
        with self._lock:
            container = self._containers.get(handle.container_id)
        if container is None:
            return
        os.eventfd_write(container.cancelled_fd, 1)
        if container.ended.is_set() or not container.started:
            return
        container.is_stopped = True
        name = self._name(handle)
        self._engine.signal(name, "SIGTERM")
        self._engine.unpause(name)  # a paused process gets SIGTERM only then
        if not container.ended.wait(deadline_s):
            self._engine.signal(name, "SIGKILL")
            if not container.ended.wait(_KILLED_S):
                raise PlatformError(f"container {name} does not die", hint="see the engine's log")

    def remove(self, handle: Handle) -> None:
        """If the engine is away, the container is removed when it is back; this call does not wait for that."""
        removed = True
        with self._lock:
            container = self._containers.get(handle.container_id)
        try:
            if container is None or container.has_port:
                self._ports.remove(self._name(handle))
            self._engine.remove(self._name(handle))
        except PlatformError as e:
            removed = False
            self._log.event("removal_postponed", container_id=handle.container_id, error=e.message)
        with self._lock:
            if removed:
                self._release(handle.container_id)
            else:
                self._doomed[self._name(handle)] = handle.container_id
            container = self._containers.pop(handle.container_id, None)
        if container is not None:
            if container.logs is not None:
                container.logs.close()
            for fd in (container.ended_fd, container.cancelled_fd):
                os.close(fd)
        self._owned.remove(handle)

    # logs and usage ------------------------------------------------------------------------------------------------

    def logs(self, handle: Handle, stream: str, cursor: int) -> LogChunk:
        return log_files.read(handle, stream, cursor)

    def more_logs(self, handle: Handle, cursors: tuple[int, int], deadline_s: float) -> bool:
        with self._lock:
            container = self._containers.get(handle.container_id)
        return container is not None and container.logs is not None and container.logs.wait_grown(cursors, deadline_s)

    def truncate_logs(self, handle: Handle, stream: str) -> None:
        log_files.empty(handle, stream)

    def stats(self, handle: Handle) -> Stats:
        return Stats(*self._engine.usage(self._name(handle)))

    # containers of an earlier invoker ------------------------------------------------------------------------------

    def list_owned(self) -> Sequence[Owned]:
        """The containers that the engine has under our label.  Directories of containers that are gone are removed."""
        labels = {owned.handle.container_id: owned for owned in self._owned.all()}
        found = []
        for seen in self._engine.list(f"{OWNER}={self.owner}"):
            container_id = seen.labels[CONTAINER]
            written = labels.pop(container_id, None)
            found.append(Owned(self._handle_of(seen), written.labels if written else {}, seen.running))
        self._ports.end_others({self._name(owned.handle) for owned in found})
        for left in labels.values():
            if left.handle.container_id not in self._containers:
                self._owned.remove(left.handle)
        return tuple(found)

    def take_over(self, owned: Owned) -> bool:
        return True  # two invokers never have the same run directory

    def adopt(self, owned: Owned) -> None:
        handle = owned.handle
        if handle.kind == KIND_LLM:
            self._relays.reopen()
        container = _Container(
            handle, started=True, ended_fd=os.eventfd(0, os.EFD_CLOEXEC), cancelled_fd=os.eventfd(0, os.EFD_CLOEXEC)
        )
        with self._lock:
            self._containers[handle.container_id] = container
            container.logs = self._follow(container, time.time())
        self._owned.write(handle, owned.labels)
        self._look(container)

    def end(self, owned: Sequence[Owned]) -> Sequence[Owned]:
        for one in owned:
            self.remove(one.handle)
        return owned

    def close(self) -> None:
        self._events.stop()
        with self._lock:
            containers = list(self._containers.values())
        for container in containers:
            if container.logs is not None:
                container.logs.close()
        self._relays.close()
        self._engine.close()

    # the engine ----------------------------------------------------------------------------------------------------

    def _create(self, handle: Handle, spec: Spec) -> float:
        """Returns the seconds that its image was pulled."""
        image = self._images.of_kind(spec.kind)
        volumes: Sequence[str] = ()
        pulled_s = 0.0
        if spec.image:
            seen, pulled_s = self._images.seen(spec.image)
            image, volumes = seen.id, seen.volumes
        mounts = Mounts(
            self._paths.there(str(io_directory.of(handle))),
            self._paths.there(spec.descriptor_socket) if spec.descriptor_socket else "",
            self._paths.there(str(self._relays.directory)) if spec.kind == KIND_LLM else "",
            self._paths.there(str(self._packages)) if spec.kind == KIND_PYTHON else "",
        )
        mounts = Mounts("") if spec.image else mounts
        uid = self._take_uid(spec.container_id)
        labels = {
            OWNER: self.owner,
            CONTAINER: spec.container_id,
            KIND: spec.kind,
            UID: str(uid),
            PORT_OF: "",  # an image may have labels of its own, which ours replace
            "thaw.host": self._host_id,
        }
        devices = () if spec.device.startswith("cpu") or spec.kind != KIND_LLM else (gpu_request(spec.device),)
        body = docker_spec.config(
            spec, Asked(image, labels, mounts, self._limits, uid, seccomp.profile(), devices, volumes)
        )
        return pulled_s + self._images.creating(
            spec.image or image, lambda: self._engine.create(self._name(handle), body)
        )

    def _take_uid(self, container_id: str) -> int:
        live = frozenset(int(value) for value in self._engine.label_values(UID) if value.isdigit())
        with self._lock:
            return self._uids.take(container_id, live)

    def _release(self, container_id: str) -> None:
        self._uids.release(container_id)
        self._uids.release(port_id(container_id))

    def _name(self, handle: Handle) -> str:
        return f"thaw-{self.owner}-{handle.container_id}"

    def _handle(self, container_id: str, kind: str) -> Handle:
        handle = self._owned.handle(container_id, kind)
        return replace(handle, socket=str(io_directory.of(handle) / "s"))

    def _handle_of(self, seen: Seen) -> Handle:
        handle = self._handle(seen.labels[CONTAINER], seen.labels.get(KIND, ""))
        return replace(handle, pid=seen.pid, start_ticks=process_ids.start_ticks(seen.pid) or 0 if seen.pid else 0)

    def _get(self, handle: Handle) -> _Container:
        with self._lock:
            container = self._containers.get(handle.container_id)
        if container is None:
            raise WorkerLost("the container has been removed")
        return container

    def _follow(self, container: _Container, since: float) -> LogFollower:
        name = self._name(container.handle)

        def runs() -> bool:
            try:
                return self._engine.inspect(name).running
            except NotFound:
                return False

        def back(given_up: Callable[[], bool]) -> bool:
            return self._events.wait_back(_ENGINE_BACK_S, given_up)

        return LogFollower(
            self._engine.socket_path, name, container.handle, runs, back, self._events.look_up, since=since
        )

    def _event(self, event: EngineEvent) -> None:
        with self._lock:
            container = self._containers.get(event.labels.get(CONTAINER, ""))
        if container is None:
            return
        if event.action == "oom":
            container.out_of_memory.set()
        elif event.action == "die":
            self._ended(container, int(event.labels.get("exitCode", 0)))

    def _reconcile(self) -> None:
        """The engine is back: containers that it does not run any more have ended while it was away."""
        with self._lock:
            containers, doomed = list(self._containers.values()), list(self._doomed.items())
        for name, container_id in doomed:
            self._ports.remove(name)
            self._engine.remove(name)
            with self._lock:
                self._doomed.pop(name, None)
                self._release(container_id)
        for container in containers:
            if container.started:
                self._look(container)

    def _look(self, container: _Container) -> None:
        try:
            seen = self._engine.inspect(self._name(container.handle))
        except NotFound:
            self._ended(container, None)
            return
        container.memory_bytes = seen.memory_bytes
        if not seen.running:
            if seen.out_of_memory:
                container.out_of_memory.set()
            self._ended(container, seen.exit_code)

    def _ended(self, container: _Container, exit_code: int | None) -> None:
        with self._lock:
            if not container.started:
                container.early_end = (exit_code,)  # start reports it, when its lines can be followed
                return
            if container.reported:
                return
            container.reported = True
        # a thread of its own, because the last lines may be on their way, and other containers end meanwhile
        threading.Thread(target=self._report, args=(container, exit_code), name="container-end", daemon=True).start()

    def _report(self, container: _Container, exit_code: int | None) -> None:
        if container.logs is not None:
            container.logs.wait_ended(_LAST_LINES_S)
        if exit_code == _KILLED and not container.is_stopped:  # the engine may report the cause after the end
            container.out_of_memory.wait(_CAUSE_S)
        reason, out_of_memory = "", container.out_of_memory.is_set()
        if out_of_memory:
            limit = container.memory_bytes or self._limits.default_memory_mb << 20
            reason = f"out of memory: its limit is {limit >> 20} MiB"
        container.ended.set()
        with self._lock:
            if container.handle.container_id in self._containers:
                os.eventfd_write(container.ended_fd, 1)
        for callback in self._callbacks:
            callback(Exit(container.handle.container_id, status_of(exit_code), reason, out_of_memory))

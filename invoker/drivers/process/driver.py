"""Containers as child processes, for one machine without Docker and for trusted code.

Each container leads its own session, so it is ended as a whole, and it outlives an invoker that is killed: the next
invoker finds it again (ownership.py).  A container gets only the environment variables of a list, and inherits none:
the invoker's own hold credentials.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Self

from invoker.drivers import log_files, process_ids
from invoker.drivers.base import DriverContext, Exit, Handle, LogChunk, Owned, Spec, Stats, no_images, status_of
from invoker.drivers.cpu_shares import Shares, find_shares
from invoker.drivers.exit_watch import ExitWatch
from invoker.drivers.layer_directory import layers_of
from invoker.drivers.ownership import OwnedContainers
from invoker.drivers.process.zygote import Zygote
from invoker.drivers.programs import PROGRAMS
from invoker.drivers.relay_socket import RelaySockets
from invoker.drivers.socket_wait import wait_socket
from invoker.settings import InvokerSettings
from relay.state.relay_tls import TLS_SCHEME
from thaw.action import KIND_LLM
from thaw.errors import PlatformError
from thaw.host import name_on_machine
from thaw.logs import Log

KEPT_ENVIRONMENT: Final = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TZ",
    "TMPDIR",
    "PYTHONPATH",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "OMP_NUM_THREADS",
    "HF_HUB_OFFLINE",
    "XDG_CACHE_HOME",
    "CUDA_VISIBLE_DEVICES",
    "VLLM_CONFIGURE_LOGGING",
    "PYTHONDONTWRITEBYTECODE",
    "THAW_LLM_ENGINE",
    "THAW_CPU_CEILING",
    "THAW_LOGITS_NOISE",
    "THAW_SHARED_PREFIXES",
)
_KILLED_S: Final = 10.0  # from SIGKILL to the end, memory of gigabytes included
_EXIT_STATUS_S: Final = 0.5  # between a process's end and its zygote's report of it


class ProcessDriver:
    name = "process"
    whole_devices = False
    pin = staticmethod(no_images)

    def __init__(self, run_dir: Path, shares: Shares, n_cores: int, log: Log, *, zygote_parent: str = "") -> None:
        self._owned = OwnedContainers(run_dir)
        self._shares, self._n_cores, self._log = shares, n_cores, log
        self.share = shares.name
        shares.sweep(frozenset(owned.handle.container_id for owned in self._owned.all()))
        self._exits = ExitWatch()
        self._callbacks: list[Callable[[Exit], None]] = []
        self._lock = threading.Lock()
        self._handles: dict[str, Handle] = {}
        self._ended: dict[str, threading.Event] = {}
        self._cancelled: dict[str, int] = {}
        self._relays = RelaySockets(run_dir / "relays", log)
        self._packages = layers_of(run_dir.absolute())
        self.zygote = Zygote(run_dir, _kept_environment(), self._exits, log, zygote_parent)

    @classmethod
    def make(cls, context: DriverContext) -> Self:
        settings = context.settings
        shares = find_host_shares(settings)
        return cls(context.run_dir, shares, settings.n_cores, context.log, zygote_parent=settings.zygote_parent)

    def command(self, kind: str) -> list[str]:
        """The program that runs in a container of ``kind``, and its arguments."""
        return [sys.executable, *PROGRAMS[kind]]

    def reachable(self) -> bool:
        return True

    def on_exit(self, callback: Callable[[Exit], None]) -> None:
        self._callbacks.append(callback)

    def create(self, spec: Spec) -> Handle:
        with self._lock:
            known = self._handles.get(spec.container_id)
        if known is not None:
            return known
        handle = self._owned.handle(spec.container_id, spec.kind)
        self._owned.write(handle, spec.labels)
        with self._lock:
            self._handles[spec.container_id] = handle
            self._cancelled[spec.container_id] = os.eventfd(0, os.EFD_CLOEXEC)
        return handle

    def start(self, handle: Handle, spec: Spec) -> Handle:
        with self._lock:
            known = self._handles.get(handle.container_id, handle)
        if known.pid:
            return known
        # the files that a killed process leaves in its directory are removed with that
        env = {
            "THAW_SOCKET": handle.socket_path,
            "TMPDIR": str(handle.directory),
            "THAW_LAYERS": str(self._packages),
            **({"THAW_DOOR": spec.descriptor_socket} if spec.descriptor_socket else {}),
            **spec.env,
        }
        pid = self._forked(handle, env) if spec.fork else self._spawned(handle, env)
        started = Handle(handle.container_id, handle.kind, handle.directory, pid, process_ids.start_ticks(pid) or 0)
        self._owned.write(started, spec.labels)
        if spec.share < 1.0:
            self._shares.apply(handle.container_id, pid, spec.share * self._n_cores)
        self._watch(started, forked=spec.fork)
        return started

    def connect(self, handle: Handle, *, deadline_s: float) -> Handle:
        wait_socket(handle.socket_path, handle.pid, deadline_s, self._cancelled[handle.container_id]).close()
        return handle

    def claim(self, handle: Handle) -> bool:
        """No other invoker has its stem cells."""
        return True

    def relabel(self, handle: Handle, labels: Mapping[str, str]) -> None:
        self._owned.write(handle, labels)

    def limit(self, handle: Handle, share: float, memory_bytes: int) -> None:
        """Nothing bounds a process's memory here: this driver is for trusted code."""
        if share < 1.0:
            self._shares.apply(handle.container_id, handle.pid, share * self._n_cores)

    def relay_address(self, address: str) -> str:
        if not address.startswith(TLS_SCHEME):
            return address
        return self._relays.inside(address, str(self._relays.directory))

    def pause(self, handle: Handle) -> None:
        process_ids.signal_tree(handle.pid, handle.start_ticks, signal.SIGSTOP)

    def unpause(self, handle: Handle) -> None:
        process_ids.signal_tree(handle.pid, handle.start_ticks, signal.SIGCONT)

    def stop(self, handle: Handle, *, deadline_s: float) -> None:
        with self._lock:
            handle = self._handles.get(handle.container_id, handle)
            ended = self._ended.get(handle.container_id)
            if handle.container_id in self._cancelled:
                os.eventfd_write(self._cancelled[handle.container_id], 1)
        if ended is None or ended.is_set():
            return
        # The first process alone: it would take the end of another one, which came before its own, for a loss, and tell
        # the callers so.  Its own end ends the others.
        process_ids.signal_one(handle.pid, handle.start_ticks, signal.SIGTERM)
        process_ids.signal_one(handle.pid, handle.start_ticks, signal.SIGCONT)  # a stopped one gets SIGTERM only then
        if not ended.wait(deadline_s):
            process_ids.signal_tree(handle.pid, handle.start_ticks, signal.SIGKILL)
            if not ended.wait(_KILLED_S):
                raise PlatformError(f"process {handle.pid} does not die", hint="it may hang in the kernel")

    def remove(self, handle: Handle) -> None:
        """Returns when nothing of the container is left: processes, files, cgroup."""
        with self._lock:
            handle = self._handles.get(handle.container_id, handle)
            watched = handle.container_id in self._ended
        if watched:  # else another process may have its pid by now
            process_ids.end_group(handle.pid, _KILLED_S)
        self._shares.remove(handle.container_id)
        self._owned.remove(handle)
        with self._lock:
            self._handles.pop(handle.container_id, None)
            self._ended.pop(handle.container_id, None)
            cancelled = self._cancelled.pop(handle.container_id, None)
        if cancelled is not None:
            os.close(cancelled)

    def logs(self, handle: Handle, stream: str, cursor: int) -> LogChunk:
        return log_files.read(handle, stream, cursor)

    def more_logs(self, handle: Handle, cursors: tuple[int, int], deadline_s: float) -> bool:
        return False  # containers write into the files themselves

    def truncate_logs(self, handle: Handle, stream: str) -> None:
        log_files.empty(handle, stream)

    def stats(self, handle: Handle) -> Stats:
        return Stats(*process_ids.usage(handle.pid))

    def list_owned(self) -> Sequence[Owned]:
        return tuple(self._owned.all())

    def take_over(self, owned: Owned) -> bool:
        return True  # two invokers never have the same run directory

    def adopt(self, owned: Owned) -> None:
        handle = owned.handle
        if handle.kind == KIND_LLM:
            self._relays.reopen()
        with self._lock:
            self._cancelled.setdefault(handle.container_id, os.eventfd(0, os.EFD_CLOEXEC))
        self._owned.write(handle, owned.labels)
        self._watch(handle, forked=False)

    def end(self, owned: Sequence[Owned]) -> Sequence[Owned]:
        for one in owned:
            _stop_unwatched(one.handle)
            self.remove(one.handle)
        return owned

    def close(self) -> None:
        self._exits.close()
        self._shares.close()
        self._relays.close()

    # processes -----------------------------------------------------------------------------------------------------

    def _spawned(self, handle: Handle, env: Mapping[str, str]) -> int:
        with handle.stdout.open("ab") as out, handle.stderr.open("ab") as err:
            try:
                process = subprocess.Popen(
                    self.command(handle.kind),
                    env={**_kept_environment(), **env},
                    cwd=handle.directory,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
            except OSError as e:
                raise PlatformError(f"cannot start a container: {e}") from e
        process.returncode = 0  # the exit watch reaps it; Popen must not wait for it
        return process.pid

    def _forked(self, handle: Handle, env: Mapping[str, str]) -> int:
        return self.zygote.fork(handle.container_id, env, handle.stdout, handle.stderr)

    def _watch(self, handle: Handle, *, forked: bool) -> None:
        ended = threading.Event()
        with self._lock:
            self._handles[handle.container_id] = handle
            self._ended[handle.container_id] = ended

        def exited(status: int | None) -> None:
            process_ids.kill_group(handle.pid)
            if status is None and forked:
                status = self.zygote.status_of(handle.pid, _EXIT_STATUS_S)
            ended.set()
            for callback in self._callbacks:
                callback(Exit(handle.container_id, status_of(status)))

        self._exits.watch(handle.pid, exited)


def _stop_unwatched(handle: Handle) -> None:
    """End a container of an earlier invoker that is not watched; returns when it is gone."""
    if not process_ids.is_alive(handle.pid, handle.start_ticks):
        return
    process_ids.signal_tree(handle.pid, handle.start_ticks, signal.SIGKILL)
    if process_ids.wait_gone(handle.pid, handle.start_ticks, _KILLED_S):
        process_ids.end_group(handle.pid, _KILLED_S)


def _kept_environment() -> dict[str, str]:
    return {name: os.environ[name] for name in KEPT_ENVIRONMENT if name in os.environ}


def find_host_shares(settings: InvokerSettings) -> Shares:
    """Return the object that bounds the shares of this host's containers, in a cgroup of this host alone."""
    return find_shares(name_on_machine(settings.host_id, settings.run_dir), enabled=settings.cpu_share == "on")

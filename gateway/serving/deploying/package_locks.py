"""The packages of a function are installed when it is deployed: a host finds the versions and keeps the files.

::

    PUT  numpy>=2  ──▶ POST /packages of a host ──▶ numpy==2.1.0 --hash=sha256:… ──▶ the action

The action keeps what the host found, so every other host installs the same files at its first start, and a package that
cannot be installed is the deploy's error.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from gateway.serving.hangup import Hangup
from gateway.serving.routing.invoker_pool import InvokerPool
from relay.protocol.data_port_messages import PackagesFound, PackagesWanted
from relay.state.registry import Registry
from thaw import requirements, wire
from thaw.action import Action
from thaw.errors import PlatformError, Throttled, TimeLimitExceeded, Unavailable

AT_ONCE: Final = 4
"""Deploys of one gateway that wait for packages, one of a namespace: each has a thread."""
_ASKED: Final = 3
"""Hosts that are asked until one can install."""
_MOST_BYTES: Final = 2 * requirements.MOST_BYTES


class PackageLocks:
    def __init__(self, registry: Registry, pool: InvokerPool, deadline_s: float) -> None:
        self._registry, self._pool, self._deadline_s = registry, pool, deadline_s
        self._lock = threading.Lock()
        self._inside: set[str] = set()

    def locked(self, action: Action) -> Action:
        """The action with the packages that a host has installed for it.  Raises BadRequest, which names the package,
        Throttled, and Unavailable when no host can install anything now."""
        if not action.exec.packages:
            return action
        with self._entered(action.namespace):
            found = self._found(action)
        return replace(action, exec=replace(action.exec, packages=requirements.bounded(found)))

    @contextmanager
    def _entered(self, namespace: str) -> Iterator[None]:
        with self._lock:
            if namespace in self._inside or len(self._inside) >= AT_ONCE:
                raise Throttled(
                    "The packages of another deploy are being installed.", hint="deploy one function after another"
                )
            self._inside.add(namespace)
        try:
            yield
        finally:
            with self._lock:
                self._inside.remove(namespace)

    def _found(self, action: Action) -> tuple[str, ...]:
        ends_s = time.monotonic() + self._deadline_s
        why = "the platform has no host"
        hosts = sorted((r for r in self._registry.live_hosts() if r.takes_starts), key=lambda r: r.host_id)
        for host in hosts[:_ASKED]:
            left_ms = round(1000 * (ends_s - time.monotonic()))
            if left_ms <= 0:
                break
            wanted = PackagesWanted(action.exec.packages, left_ms, action.namespace)
            try:
                return self._asked(host.address, wanted, ends_s)
            except TimeLimitExceeded:
                why = f"no host has installed them within {self._deadline_s:g} s (THAW_PACKAGES_S)"
            except PlatformError as e:
                why = e.message
        raise Unavailable(
            f"The packages of requirements.txt cannot be installed now: {why}",
            hint="try again, or bring the packages in the zip's folder virtualenv (docs/functions.md)",
        )

    def _asked(self, address: str, wanted: PackagesWanted, ends_s: float) -> tuple[str, ...]:
        body = wire.dumps(wanted)
        reply = self._pool.post(address, "/packages", body, stream=False, deadline_s=ends_s, hangup=Hangup())
        reply.read_head()
        return wire.from_plain(PackagesFound, reply.read_json(max_bytes=_MOST_BYTES)).packages

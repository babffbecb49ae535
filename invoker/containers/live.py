"""One instance as its invoker holds it: the table's state, the record that others see, and the resources to release."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from invoker.containers import instance
from invoker.containers.adapter_slots import AdapterSlots
from invoker.containers.instance import Effect, Event, State
from invoker.drivers.activation_logs import LogCollector
from invoker.drivers.base import CONTRACT, Handle
from relay.clients.http_unix import UnixConnection
from thaw import wire
from thaw.action import KIND_BLACKBOX, KIND_PYTHON, Action
from thaw.clock import wall_ms
from thaw.errors import ThawError
from thaw.ids import InstanceId
from thaw.instance import InstanceRecord, InstanceState


@dataclass(slots=True, eq=False)
class Run:
    live: Live
    has_slot: bool = True


class Live:
    def __init__(self, record: InstanceRecord, kind: str) -> None:
        self.lock = threading.RLock()
        self.state = State.STARTING
        self.record = record
        self.kind = kind
        self.function: Action | None = None
        self.handle: Handle | None = None
        self.logs: LogCollector | None = None  # only a function has one
        self.has_descriptor_socket = False
        self.fetching = False  # fetchd fetches for it: the instance's end must cancel that
        self.ungranted = False  # fetchd may hold a segment for it that no descriptor socket has yet
        self.served = False  # it was READY once
        self.error: ThawError | None = None  # the first reason to end; later ones follow from it
        self.inflight = 0  # runs whose answers have not been sent in full
        self.slots_taken = 0  # runs that the container has not answered in full
        self.n_drains = 0  # the deadline of an earlier drain means nothing to a later one
        self.unwanted = 0  # runs in flight whose callers hung up
        self.init_over = threading.Event()  # not set while its container may still answer /init
        self.init_over.set()
        self.exited = threading.Event()  # its process has ended by itself, and it is known how
        self.out_of_memory = False
        self.adapters: AdapterSlots | None = None  # once a run has wanted one
        self.gone = threading.Event()
        self.idle = threading.Event()
        self.idle.set()
        self._connections: deque[UnixConnection] = deque()  # to its container, idle
        self._dropped = False

    @property
    def timeout_s(self) -> float:
        return self.function.limits.timeout / 1000 if self.function is not None else 300.0

    @property
    def descriptor_socket_id(self) -> InstanceId:
        """The name of its descriptor socket is the name of its container: its own, unless it took a stem cell."""
        return self.record.instance_id if self.handle is None else InstanceId(self.handle.container_id)

    @property
    def cell_kind(self) -> str:
        """The kind of stem cell that it could be made from; there are none of users' own images."""
        return KIND_BLACKBOX if self.function is not None and self.function.exec.image else self.kind

    @property
    def aborts_runs(self) -> bool:
        """Whether a run ends when its connection to the container closes: an engine's does, and that of an HTTP server
        in an image.  Functions know no such end."""
        return self.kind != KIND_PYTHON or self.serves_http

    @property
    def serves_http(self) -> bool:
        return self.function is not None and self.function.is_http_server

    @property
    def in_group(self) -> bool:
        """Whether it is one stage of several, which is of no use without the others."""
        return self.record.n_stages > 1

    def apply(self, event: Event) -> Effect:
        """Move by the table and update the record; the caller must carry out the returned effect."""
        with self.lock:
            step = instance.step(self.state, event)
            self.state = step.state
            self._update_record()
            return step.effect

    def blame(self, error: ThawError) -> None:
        with self.lock:
            if self.error is None:
                self.error = error

    def amend(self, **fields: Any) -> None:
        """Complete the record with the facts from the start."""
        with self.lock:
            self.record = replace(self.record, **fields)

    def become(self, made: Callable[[InstanceRecord], InstanceRecord]) -> None:
        """Replace the record by the result of ``made`` for it."""
        with self.lock:
            self.record = made(self.record)

    def begins_to_consolidate(self) -> bool:
        """Note that it is becoming one worker; False if that is noted already."""
        with self.lock:
            begins = not self.record.is_consolidating
            self.amend(is_consolidating=True)
            return begins

    def note_exit(self) -> None:
        """Its process has ended, and it is known how."""
        self.exited.set()
        if self.adapters is not None:
            self.adapters.close()

    def labels(self) -> dict[str, str]:
        """The labels that the driver keeps for an invoker that takes over."""
        record = wire.dumps(self.record).decode()
        return {"role": "instance", "contract": CONTRACT, "record": record, "kind": self.kind}

    def attach(self, handle: Handle) -> bool:
        """The container belongs to this instance from now on; False if the start was given up meanwhile."""
        with self.lock:
            if self.state is not State.STARTING:
                return False
            self.handle = handle
            return True

    @contextmanager
    def unwanted_run(self) -> Iterator[bool]:
        """One of its runs lost its caller.  Yields True if another run has a caller: then the container must go on."""
        with self.lock:
            self.unwanted += 1
            shared = self.unwanted < self.slots_taken
        try:
            yield shared
        finally:
            with self.lock:
                self.unwanted -= 1

    def _update_record(self) -> None:
        state = instance.PUBLIC[self.state]
        was_idle = self.record.idle_since_wall_ms
        idle_since = wall_ms() if self.state is State.IDLE and was_idle is None else was_idle
        self.record = replace(
            self.record,
            state=state,
            inflight=self.slots_taken,
            idle_since_wall_ms=idle_since if self.state is State.IDLE else None,
            error=self.error.info() if state is InstanceState.GONE and self.error is not None else None,
        )

    def take_connection(self) -> UnixConnection | None:
        """A connection that was kept from an earlier run; the other side may have closed it by now."""
        try:
            return self._connections.pop()
        except IndexError:
            return None

    def keep_connection(self, connection: UnixConnection) -> None:
        """Keep a connection for the next run.  Close it if the container has ended before: nothing else would."""
        self._connections.append(connection)
        if self._dropped:
            self.drop_connections()

    def drop_connections(self) -> None:
        """Close all kept connections, now and from now on."""
        self._dropped = True
        while (kept := self.take_connection()) is not None:
            kept.close()

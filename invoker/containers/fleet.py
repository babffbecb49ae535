"""All instances of this host: which of them take runs, how they end, and the resources that are released then."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import Final

from invoker import metrics
from invoker.containers.instance import Effect, Event, State
from invoker.containers.killed_or_failed import hint, how, start_error
from invoker.containers.last_output import LastOutput, printed_by
from invoker.containers.live import Live, Run
from invoker.containers.memory_ledger import Ledger
from invoker.containers.pool_users import PoolUsers
from invoker.containers.publish import Publisher
from invoker.drivers.activation_logs import LogCollector
from invoker.drivers.base import Driver, Exit, Handle
from relay.clients.fetch import FetchClient
from thaw.action import KIND_BLACKBOX, KIND_LLM, KIND_PYTHON
from thaw.errors import (
    InstanceBusy,
    InstanceGone,
    PlatformError,
    ThawError,
    WorkerLost,
)
from thaw.ids import GroupId, InstanceId
from thaw.instance import InstanceRecord
from thaw.logs import Log

STOP_S: Final = 3.0
"""From SIGTERM to SIGKILL: a container has no state that is worth a longer wait."""

INIT_ENDS_S: Final = 5.0
"""From the end of a container to the end of its /init.  A child of its process may keep the connection open."""

BURY_S: Final = 60.0  # calls to fetchd are bounded by half of it

MIB: Final = 1024 * 1024


_EARLY_EXITS_KEPT: Final = 64
"""A container may end before its start has attached it.  Stem cells, which no instance has yet, end here too."""


class Fleet:
    def __init__(
        self,
        driver: Driver,
        fetch: FetchClient,
        publisher: Publisher,
        ledger: Ledger,
        last_output: LastOutput,
        log: Log,
    ) -> None:
        self.driver, self.fetch, self.publisher, self.ledger, self.log = driver, fetch, publisher, ledger, log
        self.last_output = last_output
        self.epoch = 0
        self._takes_runs = True
        self.on_buried: Callable[[], None] = lambda: None
        self.pool_users = PoolUsers()
        self.on_pool_left: Callable[[], None] = lambda: None
        """Called after an instance has released its part of fetchd's pool."""
        self._lock = threading.Lock()
        self._instances: dict[InstanceId, Live] = {}
        self._by_container: dict[str, Live] = {}
        self._early_exits: OrderedDict[str, Exit] = OrderedDict()
        driver.on_exit(self._exited)

    # the instances -------------------------------------------------------------------------------------------------

    def add(self, live: Live) -> bool:
        """Add an instance.  False if it is known already."""
        # Expect the memory first: the end of the instance gives it back.  Do not hold our lock meanwhile: a thread that
        # waits for memory holds the ledger's.
        self.ledger.expect(live.record.instance_id, live.record.reserve_bytes)
        with self._lock:
            if live.record.instance_id in self._instances:
                return False
            if live.kind == KIND_LLM:
                self.pool_users.enter(live.record.instance_id)
            self._instances[live.record.instance_id] = live
            return True

    def find(self, instance_id: InstanceId) -> Live | None:
        with self._lock:
            return self._instances.get(instance_id)

    def all(self) -> list[Live]:
        with self._lock:
            return list(self._instances.values())

    def packages_in_use(self) -> Collection[tuple[str, ...]]:
        """The packages of the functions that have a container here, or are about to."""
        return {live.function.exec.packages for live in self.all() if live.function is not None}

    def of_group(self, group_id: GroupId) -> Iterable[Live]:
        return [live for live in self.all() if live.record.group_id == group_id]

    def attach(self, live: Live, handle: Handle) -> bool:
        """Give ``live`` its container.  False if its start was given up meanwhile."""
        if live.kind == KIND_PYTHON:  # an LLM container's output stays on the host, and no gateway asks for it
            limit = (live.function.limits.logs if live.function else 10) * MIB
            live.logs = LogCollector(
                handle,
                self.driver.logs,
                self.driver.truncate_logs,
                limit,
                self.driver.more_logs,
                of_image=live.cell_kind == KIND_BLACKBOX,
            )
        with self._lock:
            if not live.attach(handle):
                return False
            self._by_container[handle.container_id] = live
            end = self._early_exits.pop(handle.container_id, None)
        if end is not None:
            self._in_background(lambda: self._after_exit(live, end))
        return True

    def announce(self, live: Live, *, flip: bool = False) -> None:
        """Publish the instance as it is now.  This holds its lock: a record that was read before a change must not be
        put after it, or an instance that has gone would be announced as idle."""
        with live.lock:
            self.publisher.put(live.record, flip=flip)

    def announce_again(self, live: Live) -> None:
        """Answer a repeated command: its sender may have missed the state."""
        with live.lock:
            self.publisher.say_again(live.record)

    def relabel(self, live: Live) -> None:
        """Let an invoker that takes over find the instance as it is now.  Where that fails, it asks the container."""
        try:
            if live.handle is not None:
                self.driver.relabel(live.handle, live.labels())
        except PlatformError as e:
            self.log.event("relabel_failed", instance_id=live.record.instance_id, error=e.message)

    # runs ----------------------------------------------------------------------------------------------------------

    def begin_run(self, instance_id: InstanceId) -> Run:
        """Take a slot.  Raises InstanceGone, InstanceBusy; then nothing ran."""
        live = self.find(instance_id)
        if live is None:
            raise InstanceGone(f"no instance {instance_id} on this host")
        if not live.record.takes_requests:
            raise InstanceGone(f"instance {instance_id} is stage {live.record.stage} of a group, not its first")
        with live.lock:
            if not self._takes_runs:
                raise InstanceGone("another invoker is about to take this host over")
            if live.state not in (State.IDLE, State.BUSY):
                raise InstanceGone(f"instance {instance_id} is {live.state}")
            if live.slots_taken >= live.record.slots:
                raise InstanceBusy(f"all {live.record.slots} slots of instance {instance_id} are taken")
            live.slots_taken += 1
            live.inflight += 1
            live.idle.clear()
            effect = live.apply(Event.RUN_BEGAN)
        if effect is Effect.FLIP:
            self.announce(live, flip=True)
        return Run(live)

    def take_no_runs(self) -> None:
        """Refuse every run from now on, and announce no idle instance, which would invite runs."""
        self._takes_runs = False

    def free_slot(self, run: Run) -> None:
        """The container has answered ``run`` in full.  Call this before the caller has the whole answer: a caller that
        has it may send another run at once, which must find the slot free."""
        with run.live.lock:
            run.live.slots_taken -= run.has_slot
            run.has_slot = False

    def end_run(self, run: Run) -> None:
        """The answer was sent, or there is none."""
        live = run.live
        with live.lock:
            self.free_slot(run)
            live.inflight -= 1
            effect = Effect.NONE
            if live.state is State.DRAINING and live.inflight:
                live.amend(inflight=live.inflight)  # an operator may wait for the runs that are left
                self.publisher.put(live.record, flip=True)
            if live.inflight == 0:
                live.idle.set()
                effect = live.apply(Event.LAST_RUN_ENDED)
        if effect is Effect.FLIP:
            if self._takes_runs:
                self.announce(live, flip=True)
            self.ledger.wake()  # an idle instance may be evicted for a start that waits
        elif effect is Effect.STOP:
            self._in_background(lambda: self.stop(live))

    # ends ----------------------------------------------------------------------------------------------------------

    def release(self, instance_id: InstanceId, *, only_idle: bool, drain_s: float, drained: bool = False) -> None:
        """Drain and remove.  ``drained``: this happens because the host is emptied.  Raises InstanceBusy when
        ``only_idle`` and a request is in flight."""
        live = self.find(instance_id)
        if live is None:
            return  # a repeated command: the instance has gone
        if only_idle:
            effect = live.apply(Event.RELEASE)
            if effect is Effect.REFUSE:
                raise InstanceBusy(f"instance {instance_id} is {live.state}")
        else:
            with live.lock:
                effect = live.apply(Event.DRAIN)
                if effect is Effect.ANNOUNCE:
                    live.n_drains += 1
                    live.amend(drained=drained)
                n_drains = live.n_drains
        if effect is Effect.STOP:
            self._in_background(lambda: self.stop(live))
        elif effect is Effect.ANNOUNCE:
            self.announce(live)
            self._in_background(lambda: self._drain(live, drain_s, n_drains))

    def undrain(self, instance_id: InstanceId) -> None:
        """Let an instance that still drains take runs again."""
        live = self.find(instance_id)
        if live is None:
            return
        with live.lock:
            if live.apply(Event.UNDRAIN) is Effect.ANNOUNCE:
                live.amend(drained=False)
                self.announce(live)

    def kill(self, live: Live, error: ThawError | None) -> None:
        """End the instance in any state, for example because its group was given up."""
        if self.begin_end(live, error):
            self.stop(live)

    def begin_end(self, live: Live, error: ThawError | None) -> bool:
        """Decide that the instance ends, in any state; its container's end is no loss from now on.  If this is True,
        the caller must call :meth:`stop`.

        Call this before anything by which the container may end.  ``error``: why the instance failed, if it did.
        """
        with live.lock:  # else an instance that drains for a moment could be taken back
            if error is not None:
                live.blame(error)
            return any(live.apply(event) is Effect.STOP for event in (Event.CANCEL, Event.DRAIN, Event.DEADLINE))

    def stop(self, live: Live) -> None:
        """STOPPING → GONE: end the process, then undo the rest.  Its memory is free when this returns."""
        if live.served:
            self.announce(live)
        if live.handle is not None:
            try:
                self.driver.stop(live.handle, deadline_s=STOP_S)
            except PlatformError as e:
                self.log.event("stop_failed", instance_id=live.record.instance_id, error=e.message)
        if live.apply(Event.STOPPED) is Effect.BURY:
            self._bury(live)
        else:
            live.gone.wait(BURY_S)  # the exit was seen first, and the thread that saw it buries the instance

    def _drain(self, live: Live, drain_s: float, n_drains: int) -> None:
        if live.idle.wait(drain_s):
            return
        with live.lock:
            effect = live.apply(Event.DEADLINE) if live.n_drains == n_drains else Effect.NONE
        if effect is Effect.STOP:
            self.stop(live)

    def _exited(self, end: Exit) -> None:
        with self._lock:
            live = self._by_container.get(end.container_id)
            if live is None:
                self._early_exits[end.container_id] = end
                if len(self._early_exits) > _EARLY_EXITS_KEPT:
                    self._early_exits.popitem(last=False)
                return
        self._in_background(lambda: self._after_exit(live, end))

    def _after_exit(self, live: Live, end: Exit) -> None:
        live.init_over.wait(INIT_ENDS_S)  # a container that refuses to start ends at once, and its answer says why
        with live.lock:
            state = live.state
            if state in (State.STARTING, State.INITIALISING):
                live.blame(start_error(live, end))
            elif state in (State.IDLE, State.BUSY, State.DRAINING):
                live.blame(WorkerLost(f"the container ended ({how(end)})", hint=hint(live)))
            live.out_of_memory = end.out_of_memory
            effect = live.apply(Event.EXITED)
        live.note_exit()
        if effect is Effect.BURY:
            self._bury(live)

    def _bury(self, live: Live) -> None:
        """Announce first, so that no gateway routes here; give memory back last, when the process has none."""
        record = live.record
        self.announce(live)
        metrics.INSTANCES_ENDED.labels(reason=record.error.code if record.error else "released").inc()
        self.log.event(
            "instance_gone",
            instance_id=record.instance_id,
            group_id=record.group_id,
            error=record.error.message if record.error else "",
        )
        live.drop_connections()
        self.close_fetches(live)
        if live.handle is not None:
            self.last_output.keep(record, printed_by(live.handle), record.error.message if record.error else "")
            self.driver.remove(live.handle)
        with self._lock:
            self._instances.pop(record.instance_id, None)
            if live.handle is not None:
                self._by_container.pop(live.handle.container_id, None)
        self.ledger.give_back(record.instance_id)
        live.gone.set()
        self.on_buried()

    def close_fetches(self, live: Live) -> None:
        """Close the descriptor socket and the fetch of ``live``; may be called twice."""
        record = live.record
        if live.fetching or live.ungranted:
            live.fetching = live.ungranted = False
            self._tell_fetchd(record, "fetch_cancel_failed", lambda: self.fetch.cancel(record.group_id, self.epoch))
        if live.has_descriptor_socket:
            live.has_descriptor_socket = False
            self._tell_fetchd(
                record,
                "descriptor_socket_close_failed",
                lambda: self.fetch.close_descriptor_socket(live.descriptor_socket_id),
            )
        if self.pool_users.leave(record.instance_id):
            self.on_pool_left()

    def _tell_fetchd(self, record: InstanceRecord, failure: str, tell: Callable[[], None]) -> None:
        try:
            tell()
        except ThawError as e:  # fetchd is away: its own clean-up and our next start close the rest
            self.log.event(failure, instance_id=record.instance_id, error=e.message)

    def _in_background(self, run: Callable[[], None]) -> None:
        threading.Thread(target=run, name="ending", daemon=True).start()

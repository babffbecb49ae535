"""A start, from the command to READY.

::

    fetchd:     FetchStart ─────────── bytes arrive ──────────────────▶ FetchDone
    here:       place → descriptor socket → container (or stem cell) → grant → /init ──────▶ READY
                                                                  └ fails at once if the fetch does

The fetch begins first: everything else is done while the bytes arrive.  After any failure the instance ends by its
table, which closes the descriptor socket, gives the fetch up, ends the process and announces GONE with the first error.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final

from invoker import metrics
from invoker.containers.fleet import Fleet
from invoker.containers.init import (
    InitCall,
    group_link,
    image_environment,
    init_body,
    keep_alive_s_of,
    llm_init,
    python_init,
    slots_in,
)
from invoker.containers.instance import Effect, Event, State
from invoker.containers.killed_or_failed import add_output, hint_of_start
from invoker.containers.live import Live
from invoker.containers.placing import Placement, Placing
from invoker.containers.start_evidence import ContainerEvidence
from invoker.containers.stem_cells import StemCells
from invoker.drivers.base import Handle, Spec
from invoker.packages.layers import Layers
from invoker.settings import MIB, InvokerSettings
from relay.protocol.messages import FetchStart, GroupCredential, InitReply, Start
from relay.state.records import Records
from thaw import wire
from thaw.action import KIND_BLACKBOX, KIND_LLM, KIND_PYTHON, Action
from thaw.clock import wall_ms
from thaw.errors import InitFailed, NotFound, PlatformError, ThawError, Unavailable, WorkerLost
from thaw.ids import HostId, InstanceId, Namespace, random_hex_id
from thaw.instance import InstanceRecord, InstanceState, StartMode
from thaw.logs import Log
from thaw.plan import Plan, PlanStage
from thaw.tracing.trace import Phase, TraceEvent, event

CONTAINER_ANSWERS_S: Final = 60.0
EXIT_SEEN_S: Final = 5.0
FETCH_END_S: Final = 10.0
"""The longest wait for fetchd's report once the engine has taken every byte: the report is then on its way."""


@dataclass(frozen=True, slots=True)
class Deps:
    settings: InvokerSettings
    fleet: Fleet
    placing: Placing
    cells: StemCells
    records: Records
    layers: Layers
    credential: Callable[[str], GroupCredential]  # the group's credential, by the reference in its plan
    address: str  # the data port's
    log: Log


def new_live(command: Start, deps: Deps) -> Live:
    """The instance that ``command`` asks for, STARTING."""
    plan, stage = command.plan, stage_of(command)
    record = InstanceRecord(
        command.instance_id,
        HostId(deps.settings.host_id),
        plan.action,
        plan.action_version,
        plan.group_id,
        InstanceState.STARTING,
        deps.address,
        1 if stage.stage == 0 else 0,
        stage.reserve_bytes,
        stage.device,
        StartMode.COLD,
        created_wall_ms=wall_ms(),
        stage=stage.stage,
        n_stages=len(plan.stages),
        model_version=plan.model.version if plan.model is not None else "",
    )
    return Live(record, KIND_LLM if plan.model is not None else KIND_PYTHON)


def stage_of(command: Start) -> PlanStage:
    """Raises Unavailable for a stage that the plan does not have."""
    for stage in command.plan.stages:
        if stage.stage == command.stage:
            return stage
    raise Unavailable(f"the plan has no stage {command.stage}")


class Starting:
    """One start on its own thread."""

    def __init__(self, command: Start, live: Live, deps: Deps) -> None:
        self._plan: Plan = command.plan
        self._stage = stage_of(command)
        self._live, self._deps, self._fleet = live, deps, deps.fleet
        self._activation_ids = command.activation_ids
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._events: list[TraceEvent] = []
        self._init_call: InitCall | None = None
        self._fetch_ended = threading.Event()
        self._segment_id = ""
        self._spent: Mapping[str, object] = {}  # evidence of a container that was made for this start

    def run(self) -> None:
        self._mark(Phase.COMMAND)
        try:
            self._start()
        except ThawError as e:
            self._fail(e)
        except Exception as e:  # noqa: BLE001  the edge of a thread: a bug must not leave an instance STARTING for ever
            self._deps.log.event("start_crashed", traceback=traceback.format_exc())
            self._fail(PlatformError(f"the start failed on a bug: {e!r}", hint="see the invoker's log"))
        self._write_trace()
        self._deps.cells.refill()  # not before: making another cell would take CPU time from this start

    def _start(self) -> None:
        live, record = self._live, self._live.record
        if self._plan.model is not None:
            self._begin_fetch()
        live.function = self._function()
        live.amend(
            slots=slots_in(live.function, record.stage, record.n_stages),
            keep_alive_s=keep_alive_s_of(live.function),
            reserve_bytes=record.reserve_bytes or live.function.limits.memory << 20,
        )
        self._mark(Phase.CONTAINER_BEGIN)
        if live.function.exec.image:
            self._fleet.driver.pin(live.function.exec.image, deadline_s=self._deps.settings.image_pull_s)
        self._evidence = ContainerEvidence()
        importing_s = self._deps.placing.wait_warm(live)
        path = self._container(self._deps.placing.place(live))
        waited = {"stem_cell_wait_s": round(importing_s, 3)} if importing_s > 0.001 else {}
        self._mark(Phase.CONTAINER_END, mode=live.record.start_mode.value, **waited, **self._spent)
        if live.apply(Event.UP) is not Effect.INIT:
            raise _given_up(live)
        self._init(path)
        self._ready()

    # the bytes -----------------------------------------------------------------------------------------------------

    def _begin_fetch(self) -> None:
        plan, stage = self._plan, self._stage
        assert plan.model is not None  # noqa: S101
        self._live.fetching = self._live.ungranted = True
        request = FetchStart(
            plan.group_id,
            stage.stage,
            plan.epoch,
            plan.model,
            stage.first_ranges,
            stage.fetch_deadline_ms,
            stage.pace_bytes_per_s,
            later_ranges=stage.later_ranges,
            namespace=plan.action.partition("/")[0],
        )
        with self._fleet.pool_users.asking(self._live.record.instance_id):
            self._segment_id = self._fleet.fetch.start(request).segment_id
            if not self._live.fetching:  # it was ended while fetchd was away, so the fetch was not given up
                self._fleet.fetch.cancel(plan.group_id, plan.epoch)
                raise _given_up(self._live)
        threading.Thread(target=self._await_fetch, name="fetch", daemon=True).start()

    def _await_fetch(self) -> None:
        deadline_s = self._deps.settings.start_timeout_s
        try:
            done = self._fleet.fetch.wait(self._plan.group_id, self._stage.stage, deadline_s=deadline_s)
            with self._lock:
                self._events += done.events
            self._live.fetching = bool(self._stage.later_ranges)  # these come in the background until the end
        except ThawError as e:
            self._fail(e)
        finally:
            self._fetch_ended.set()

    # the container -------------------------------------------------------------------------------------------------

    def _container(self, placement: Placement) -> str:
        """The path of a socket that answers.  A zygote that fails is replaced by a cold start."""
        cell, handle = placement
        if handle is not None and self._claimed(handle) and self._bounded(handle) and self._granted(handle):
            self._take(handle, StartMode.PREWARMED)
            return self._connect(handle).socket_path
        descriptor_socket = self._descriptor_socket() if self._plan.model is not None else ""
        if cell is not None and cell.shared:
            try:
                return self._create(descriptor_socket, fork=True)
            except PlatformError as e:
                if self._live.handle is not None:
                    raise
                self._deps.log.event("fork_failed", instance_id=self._live.record.instance_id, error=e.message)
        return self._create(descriptor_socket, fork=False)

    def _claimed(self, handle: Handle) -> bool:
        """Whether the stem cell is ours: an invoker that replaces this one may have taken it, or it has ended."""
        try:
            claimed = self._fleet.driver.claim(handle)
        except WorkerLost:
            self._deps.cells.end(handle)
            claimed = False
        except ThawError:
            self._deps.cells.end(handle)
            raise
        if not claimed:
            self._deps.log.event("stem_cell_lost", container_id=handle.container_id)
        return claimed

    def _bounded(self, handle: Handle) -> bool:
        """Give a stem cell the function's limits.  If it cannot have them it is ended, and this is False: a container
        that is made with them can."""
        try:
            self._fleet.driver.limit(handle, self._stage.share, self._memory_bytes())
        except ThawError as e:
            self._deps.cells.end(handle)
            self._deps.log.event("stem_cell_not_bounded", container_id=handle.container_id, error=e.message)
            return False
        return True

    def _granted(self, handle: Handle) -> bool:
        """Give a stem cell its model, through the descriptor socket it was made with.  False if the socket is no more.

        A cell that did not get its model is ended: nothing else refers to it any more.
        """
        if self._plan.model is None:
            return True
        try:
            self._grant(InstanceId(handle.container_id))
        except ThawError as e:
            self._deps.cells.end(handle)
            if not isinstance(e, NotFound):
                raise
            self._deps.log.event("stem_cell_stale", container_id=handle.container_id, error=e.message)
            return False  # fetchd was restarted after the cell was made
        self._live.has_descriptor_socket = True
        return True

    def _descriptor_socket(self) -> str:
        """Open the instance's own descriptor socket and grant its segment; return the socket's path."""
        instance_id = self._live.record.instance_id
        self._live.has_descriptor_socket = True  # before the call: if its answer is lost, the socket may be open
        with self._evidence.waiting_for("fetchd"):
            path = self._fleet.fetch.open_descriptor_socket(instance_id)
            self._live.has_descriptor_socket = True  # again: an end meanwhile may have come before it was open
            self._grant(instance_id)
        return path

    def _grant(self, instance_id: InstanceId) -> None:
        self._fleet.fetch.grant_segment(instance_id, self._segment_id, self._plan.group_id, self._stage.stage)
        self._live.ungranted = False

    def _create(self, descriptor_socket: str, *, fork: bool) -> str:
        record, driver = self._live.record, self._fleet.driver
        identity = {"THAW_INSTANCE_ID": record.instance_id, "THAW_HOST_ID": record.host_id}
        if self._live.function is not None:
            identity |= image_environment(self._live.function)
        spec = Spec(
            record.instance_id,
            self._live.kind,
            identity,
            self._live.labels(),
            self._stage.share,
            fork,
            self._memory_bytes(),
            descriptor_socket,
            self._stage.device,
            self._live.function.exec.image if self._live.function is not None else "",
        )
        handle = driver.create(spec)
        cell_pid = driver.zygote.pid if fork and driver.zygote is not None else 0
        try:
            with self._evidence.waiting_for("the stem cell", cell_pid) if cell_pid else nullcontext():
                handle = driver.start(handle, spec)
        except Exception:  # a bug, too: nothing else knows the container yet
            driver.remove(handle)
            raise
        self._evidence.begun()
        self._take(handle, StartMode.PREWARMED if fork else StartMode.COLD)
        if fork:
            driver.limit(handle, self._stage.share, self._memory_bytes())
        handle = self._connect(handle)
        pulled = {"image_pull_s": round(handle.image_pull_s, 3)} if handle.image_pull_s > 0 else {}
        self._spent = {**pulled, **self._evidence.answered(handle.pid)}
        return handle.socket_path

    def _connect(self, handle: Handle) -> Handle:
        """The container, whose socket answers now."""
        try:
            return self._fleet.driver.connect(handle, deadline_s=CONTAINER_ANSWERS_S)
        except WorkerLost as e:
            raise self._why_it_ended(e) from e

    def _why_it_ended(self, e: WorkerLost) -> ThawError:
        """Return the error from the container's exit.  The driver's report of the exit may come after this call."""
        self._live.gone.wait(EXIT_SEEN_S)
        error = self._live.error or e
        if self._live.cell_kind == KIND_BLACKBOX and isinstance(error, WorkerLost):
            return InitFailed(f"The image's program ended before it was ready: {error.message}", hint=error.hint)
        return error

    def _take(self, handle: Handle, mode: StartMode) -> None:
        live = self._live
        live.amend(start_mode=mode)
        if not self._fleet.attach(live, handle):
            self._deps.cells.end(handle)
            raise _given_up(live)
        self._fleet.driver.relabel(handle, live.labels())

    def _memory_bytes(self) -> int:
        """The container's limit of host memory.  A worker whose device is the CPU has its reserve there too."""
        function = self._live.function
        assert function is not None  # noqa: S101
        if function.config is None:
            return function.limits.memory * MIB
        on_host = self._stage.reserve_bytes if self._stage.device.startswith("cpu") else 0
        return function.config.resources.host_memory_mb * MIB + on_host

    # the function --------------------------------------------------------------------------------------------------

    def _function(self) -> Action:
        namespace = Namespace(self._plan.action.partition("/")[0])
        function = self._deps.records.action(namespace, self._plan.action)
        if function.version != self._plan.action_version:
            raise Unavailable(
                f"{self._plan.action} is at version {function.version}, the plan at {self._plan.action_version}",
                hint="the scheduler plans anew",
            )
        return function

    def _init(self, path: str) -> None:
        function = self._live.function
        assert function is not None  # noqa: S101
        began = time.monotonic()
        if function.is_llm:
            link = group_link(self._plan.transport, self._deps.credential, self._deps.settings.stage_address)
            if link is not None:
                link = replace(link, address=self._fleet.driver.relay_address(link.address))
            value = wire.to_plain(llm_init(self._plan, self._stage, function, self._deps.settings, link))
            reply = wire.from_plain(InitReply, self._post_init(path, init_body(value)))
            with self._lock:
                self._events += reply.events
        else:
            self._mark(Phase.INIT_BEGIN)
            layer = self._deps.layers.ensure(function.exec.packages, deadline_s=self._deps.settings.start_timeout_s)
            mark, code = random_hex_id(), self._deps.records.code.pieces(function)
            init = python_init(function, mark, self._deps.settings.api_host, layer)
            self._post_init(path, init_body(init, mark, code))
            self._mark(Phase.INIT_END)
        init_ms = max(1, round(1000 * (time.monotonic() - began)))
        self._live.amend(init_ms=init_ms)

    def _post_init(self, path: str, body: bytes) -> Any:
        call = self._init_call = InitCall(path, self._deps.settings.start_timeout_s)
        live = self._live
        live.init_over.clear()
        try:
            return call.post(body)
        except ThawError as e:
            if isinstance(e, WorkerLost) and not call.answered:
                live.init_over.set()
                raise self._why_it_ended(e) from e
            e.hint = hint_of_start(live, e)
            add_output(live, e)
            live.blame(e)
            raise
        finally:
            self._init_call = None
            live.init_over.set()

    # the end -------------------------------------------------------------------------------------------------------

    def _ready(self) -> None:
        live = self._live
        live.served = True
        if live.apply(Event.INIT_DONE) is not Effect.READY:
            raise _given_up(live)
        self._mark(Phase.READY)
        self._fleet.announce(live)
        if live.handle is not None:
            self._fleet.driver.relabel(live.handle, live.labels())  # READY: a restarted invoker adopts it
        mode = live.record.start_mode.value
        metrics.STARTS.labels(mode=mode, outcome="ready").inc()
        metrics.START_SECONDS.labels(mode=mode).observe(time.monotonic() - self._began)
        self._write_trace()
        if self._plan.model is not None:
            self._fetch_ended.wait(FETCH_END_S)

    def _fail(self, error: ThawError) -> None:
        """End the instance for this reason; also called by the fetch's thread, which must wake the start's."""
        live = self._live
        add_output(live, error)
        live.blame(error)
        if live.apply(Event.START_FAILED) is Effect.STOP:
            metrics.STARTS.labels(mode=live.record.start_mode.value, outcome=error.code).inc()
            self._deps.log.event(
                "start_failed",
                instance_id=live.record.instance_id,
                group_id=self._plan.group_id,
                error=error.message,
                printed=error.printed if live.kind == KIND_LLM else "",
            )
            call = self._init_call
            if call is not None:
                call.abort()
            self._fleet.stop(live)
        elif live.state in (State.STOPPING, State.GONE):
            self._fleet.close_fetches(live)  # it ended while its descriptor socket was being opened

    def _mark(self, name: Phase, **attrs: object) -> None:
        marked = event(
            name, group_id=self._plan.group_id, stage=self._stage.stage, host=self._deps.settings.host_id, attrs=attrs
        )
        with self._lock:
            self._events.append(marked)

    def _write_trace(self) -> None:
        """Write the events since the last call."""
        with self._lock:
            events, self._events = self._events, []
        try:
            self._deps.records.add_trace(self._plan.action, self._plan.group_id, events)
        except PlatformError as e:  # the start itself has ended; only its explanation is poorer
            self._deps.log.event("trace_lost", group_id=self._plan.group_id, error=e.message)


def _given_up(live: Live) -> ThawError:
    return live.error or WorkerLost("the start was given up")

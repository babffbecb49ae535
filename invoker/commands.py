"""The scheduler's commands: fenced by epoch, idempotent by command id, and carried out beside the command stream."""

from __future__ import annotations

import threading
import time
import traceback
from collections import OrderedDict
from typing import Any, Final

import redis

from invoker import metrics
from invoker.containers.adapters import Adapters
from invoker.containers.consolidate import Consolidating
from invoker.containers.instance import Effect, Event
from invoker.containers.live import Live
from invoker.containers.plans import check_plan
from invoker.containers.start import Deps, Starting, new_live, stage_of
from invoker.containers.stem_cells import StemCells
from relay.protocol.messages import (
    Cancel,
    Command,
    CommandRefused,
    Consolidate,
    InspectModel,
    ModelInspected,
    Release,
    SetStemCells,
    Start,
    Undrain,
)
from relay.state import bus
from relay.state.registry import Registry
from thaw.errors import (
    BadRequest,
    ErrorInfo,
    InstanceBusy,
    ModelUnsupported,
    PlatformError,
    StaleEpoch,
    ThawError,
    Unavailable,
    WorkerLost,
)
from thaw.ids import CommandId, GroupId, HostId
from thaw.model import ModelFacts

_REMEMBERED: Final = 10_000
"""How many command ids are remembered: hours of starts.  Repeats come within seconds (a killed invoker's unacknowledged
command)."""


class Commands:
    def __init__(
        self,
        deps: Deps,
        cells: StemCells,
        consolidating: Consolidating,
        adapters: Adapters,
        registry: Registry,
        client: redis.Redis,
    ) -> None:
        self._deps, self._cells, self._consolidating, self._adapters = deps, cells, consolidating, adapters
        self._registry, self._redis = registry, client
        self._fleet = deps.fleet
        self._host_id = HostId(deps.settings.host_id)
        self._seen: OrderedDict[CommandId, None] = OrderedDict()
        self._starts: list[threading.Thread] = []  # those that are under way, and others that have ended
        self.draining = False

    def handle(self, command: Any) -> None:
        """The only thread of the command stream calls this."""
        if not isinstance(command, Command):
            self._deps.log.event("not_a_command", got=type(command).__name__)
            return
        name = type(command.body).__name__
        try:
            self._check_epoch(command)
            if command.command_id not in self._seen:
                self._remember(command.command_id)
                self._carry_out(command)
            metrics.COMMANDS.labels(type=name, outcome="taken").inc()
        except ThawError as e:
            metrics.COMMANDS.labels(type=name, outcome=e.code).inc()
            self._refuse(command, e)
        except Exception as e:  # noqa: BLE001  the edge of a thread: a bug must not end this host's command stream
            self._deps.log.event("command_crashed", command=name, traceback=traceback.format_exc())
            self._refuse(command, PlatformError(f"the command failed on a bug: {type(e).__name__}: {e}"))

    def _check_epoch(self, command: Command) -> None:
        if command.epoch < self._fleet.epoch:
            raise StaleEpoch(
                f"command of epoch {command.epoch}; this host follows {self._fleet.epoch}",
                hint="a newer scheduler has taken over",
            )
        self._fleet.epoch = command.epoch

    def _remember(self, command_id: CommandId) -> None:
        self._seen[command_id] = None
        while len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)

    def _carry_out(self, command: Command) -> None:
        body = command.body
        match body:
            case Start():
                self._start(body)
            case InspectModel():
                self._in_background(command, lambda: self._inspect(body, command.command_id))
            case Release():
                self._release(body)
            case Undrain():
                self._fleet.undrain(body.instance_id)
            case Cancel():
                self._in_background(command, lambda: self._cancel(body.group_id))
            case Consolidate():
                self._consolidating.begin(body.instance_id)
            case SetStemCells() if self._deps.settings.stem_cells == "on" and not self.draining:
                self._cells.set_target(body.kind, body.count)
            case SetStemCells():
                pass  # the operator wants no stem cells on this host, or the host is draining

    def _start(self, body: Start) -> None:
        if self.draining:
            raise Unavailable("this host is draining", hint="the scheduler starts elsewhere")
        check_plan(body.plan)
        stage = stage_of(body)
        if stage.host != self._host_id:
            raise BadRequest(f"stage {body.stage} of the plan is for {stage.host}, this is {self._host_id}")
        if (known := self._fleet.find(body.instance_id)) is not None:
            self._fleet.announce(known)  # a repeated command: publish its state again
            return
        if body.plan.model is not None:  # before the record gets its time of creation
            self._fleet.pool_users.enter(body.instance_id)
        live = new_live(body, self._deps)
        self._fleet.add(live)
        self._fleet.announce(live)
        thread = threading.Thread(target=Starting(body, live, self._deps).run, name="start", daemon=True)
        thread.start()
        self._starts = [*(t for t in self._starts if t.is_alive()), thread]
        self._adapters.fetch_ahead(body.adapters, body.plan.action.partition("/")[0])

    def wait_starts(self, deadline_s: float) -> bool:
        """Wait until no start is under way, when no further command comes.  A start that was given up still removes the
        container that it makes, and needs the driver for that.  False when the time is over."""
        deadline = time.monotonic() + deadline_s
        for thread in self._starts:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._starts)

    def _inspect(self, body: InspectModel, command_id: CommandId) -> None:
        began = time.monotonic()

        def answer(facts: ModelFacts | None, error: ErrorInfo | None = None, unchanged: str = "") -> None:
            took_s = round(time.monotonic() - began, 4)
            seen = ModelInspected(body.uri, self._host_id, facts, error, unchanged, command_id, took_s)
            bus.publish(self._redis, seen)

        try:
            facts = self._fleet.fetch.inspect(body.uri, body.namespaces)
        except ThawError as e:
            answer(None, e.info())
            return
        if (facts.uri, facts.version) == (body.known_uri, body.known_version):
            answer(None, unchanged=facts.version)
            return
        try:
            answer(self._registry.put_model(facts))
        except ModelUnsupported as e:
            answer(None, e.info())

    def _release(self, body: Release) -> None:
        live = self._fleet.find(body.instance_id)
        drain_s = live.timeout_s if live is not None else 0.0
        try:
            self._fleet.release(body.instance_id, only_idle=body.only_idle, drain_s=drain_s, drained=body.drained)
        except InstanceBusy:
            if live is not None:
                self._fleet.announce(live)  # the scheduler's view was out of date
            raise

    def _cancel(self, group_id: GroupId) -> None:
        """End the group's starts and fetches.  A worker that serves without other stages goes on, also one that has
        become one a moment ago; a stage of a pipeline ends in any state, as the other stages do: its requests are
        continued elsewhere."""
        ending = [
            threading.Thread(target=self._give_up, args=(live,), name="cancel", daemon=True)
            for live in self._fleet.of_group(group_id)
        ]
        for thread in ending:
            thread.start()
        self._fleet.fetch.cancel(group_id, self._fleet.epoch)
        for thread in ending:
            thread.join()

    def _give_up(self, live: Live) -> None:
        if live.in_group and self._consolidating.has_switched(live):
            return
        if live.in_group:
            # a later stage that is ready answers no caller itself, so its end is not reported as a loss
            ended_well = live.served and not live.record.takes_requests
            self._fleet.kill(live, None if ended_well else WorkerLost("its pipeline group was given up"))
        elif self._cancels(live):
            self._fleet.stop(live)

    @staticmethod
    def _cancels(live: Live) -> bool:
        with live.lock:  # the container's own end must not come between the two
            cancels = live.apply(Event.CANCEL) is Effect.STOP
            if cancels:
                live.blame(WorkerLost("the start was cancelled"))
        return cancels

    def _in_background(self, command: Command, run: Any) -> None:
        def guarded() -> None:
            try:
                run()
            except ThawError as e:
                self._refuse(command, e)

        threading.Thread(target=guarded, name=type(command.body).__name__.lower(), daemon=True).start()

    def _refuse(self, command: Command, error: ThawError) -> None:
        group_id = _group_of(command)
        self._deps.log.event("command_refused", command_id=command.command_id, group_id=group_id, error=error.message)
        try:
            bus.publish(self._redis, CommandRefused(command.command_id, self._host_id, group_id, error.info()))
        except PlatformError as e:
            self._deps.log.event("refusal_lost", command_id=command.command_id, error=e.message)


def _group_of(command: Command) -> GroupId:
    body = command.body
    if isinstance(body, Start):
        return body.plan.group_id
    return body.group_id if isinstance(body, Cancel | Consolidate) else GroupId("")

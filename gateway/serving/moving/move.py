"""One attempt to move one run to one destination: its state, its place in the waiting room and its cost so far.

migration.py advances it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from gateway.serving.call import Call
from gateway.serving.hangup import Hangup
from gateway.serving.moving import move_rules
from gateway.serving.moving.move_rules import Command, Event, State
from gateway.serving.routing.routes import Route
from gateway.serving.routing.versions import Versions
from gateway.serving.routing.waiting_room import Ticket
from thaw.errors import PlatformError, ThawError
from thaw.instance import InstanceRecord


@dataclass(frozen=True, slots=True)
class Limits:
    """``n_threads``: rounds that a gateway has at once.  A destination that answers no round within ``round_s``, or no
    last one within ``first_message_s``, counts as failed; a run whose thread reaches no token boundary within
    ``boundary_s`` gives its slot there back.  A run is moved at most ``attempts`` times in vain."""

    n_threads: int = 8
    round_s: float = 60.0
    boundary_s: float = 30.0
    first_message_s: float = 10.0
    attempts: int = 3


class _Nudge(threading.Event):
    """A ticket's event that also wakes the asker."""

    def __init__(self, wake: Callable[[], None]) -> None:
        super().__init__()
        self._wake = wake

    def set(self) -> None:
        super().set()
        self._wake()


class Move:
    """One attempt to move one run to one destination.  ``take`` gives each command to one thread only."""

    def __init__(self, call: Call, source: InstanceRecord, wake: Callable[[], None]) -> None:
        self.call, self._source, self._wake = call, source, wake
        self._began_s = time.monotonic()
        self.ticket = self._new_ticket()
        self.state = State.ASKING
        self.route: Route | None = None  # the destination's slot, held from RESUMING until the run or its end has it
        self.hangup = Hangup()  # cuts the round that is on its way
        self.n_rounds = self.n_tokens = 0  # rounds, and tokens that they computed
        self.rounds_s = self.last_round_s = 0.0  # how long they took
        self.error: ThawError | None = None  # why it ended, if the destination failed
        self.is_last = False  # no further destination is to be tried
        self.ask_again_s: float | None = None
        self.n_refusals = 0  # since the last round
        self._lock = threading.Lock()

    def take(self, event: Event, error: ThawError | None = None, *, is_last: bool = False) -> tuple[Command, ...]:
        with self._lock:
            step = move_rules.step(self.state, event)
            if step.state is State.RESUMING and self.state is State.ASKING:
                self.route, self.hangup = self.ticket.route, Hangup()
            elif step.state is State.ASKING and self.state is not State.ASKING:
                self.ticket = self._new_ticket()
            elif step.state is State.ENDED and step.commands:
                self.error, self.is_last = error, is_last
            self.state = step.state
            return step.commands

    def check_version(self, versions: Versions) -> None:
        """Raises WorkerLost when no worker can be started for it."""
        versions.check(self.ticket.action, self.ticket.version, self.ticket.called)

    def _new_ticket(self) -> Ticket:
        action, version = self.call.action.served_by, self._source.action_version
        wake = _Nudge(self._wake)
        return Ticket(
            self.call.activation_id,
            action,
            version,
            self._began_s,
            wake,
            exact=True,
            moves=True,
            model_version=self.call.model_version,
            called=self.call.action.name,
            adapter=self.call.wanted_adapter,
        )

    @property
    def destination(self) -> Route:
        if self.route is None:
            raise PlatformError("a move has no destination yet")
        return self.route

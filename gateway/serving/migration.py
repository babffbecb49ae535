"""Moves of running LLM requests to other workers, by tokens: what happens beside the requests' own threads.

::

    request's thread (moving.py)     reads the source ─────────────────────────────┬─ reads the destination ──▶
                                       │ begin                            boundary ↑ switch
    asker (one thread)                 └▶ a slot elsewhere                         │
    workers (at most Limits.n_threads)      └▶ round 1 ─▶ round 2 ─▶ … ─▶ caught up┘

A request asks for its second slot as any request asks for its first one: it stands in the waiting room with the time at
which it came, and its demand starts a worker where there is none.  That wait costs no thread of its own.  A round sends
the destination the tokens so far, and the destination computes them into its prefix cache while the source goes on.
The threads are there only while something moves.  move_rules.py says what follows from what.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gateway.serving import move_rules
from gateway.serving.call import Call
from gateway.serving.demand import Demand
from gateway.serving.hangup import ClientGone, Hangup
from gateway.serving.invoker_pool import InvokerPool, Reply, Unreachable
from gateway.serving.move_rules import Command, Event, State
from gateway.serving.routes import Route
from gateway.serving.sending import send_run
from gateway.serving.waiting_room import Ticket, WaitingRoom
from relay.protocol.messages import RunFailed, RunFinished
from thaw.errors import (
    InstanceBusy,
    InstanceGone,
    PlatformError,
    ProtocolError,
    ThawError,
    TimeLimitExceeded,
    WorkerLost,
    from_info,
)
from thaw.logs import Log

_ASK_AGAIN_S: Final = (0.05, 0.1, 0.25, 0.5)
"""Waits between two tries at instances whose slots other gateways hold, as in dispatch.py."""


@dataclass(frozen=True, slots=True)
class Limits:
    """``n_threads``: moves that a gateway advances at once.  A destination that answers no round within ``round_s``, or
    no last one within ``first_message_s``, counts as failed; a run whose thread reaches no token boundary within
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
    """One attempt to move one run to one destination.  ``take`` decides who does what: a command is given once."""

    def __init__(self, call: Call, wake: Callable[[], None]) -> None:
        self.call = call
        self.ticket = Ticket(call.activation_id, call.action.name, call.action.version, call.received_s, _Nudge(wake))
        self.state = State.ASKING
        self.route: Route | None = None  # the destination's slot, held from RESUMING until the run or its end has it
        self.hangup = Hangup()  # cuts the round that is on its way
        self.settled = threading.Event()  # caught up, and then switched or ended
        self.n_rounds = self.n_tokens = 0  # rounds, and tokens that they computed
        self.rounds_s = 0.0  # how long they took
        self.error: ThawError | None = None  # why it ended, if the destination failed
        self.ask_again_s: float | None = None
        self.n_refusals = 0
        self._lock = threading.Lock()

    def take(self, event: Event) -> tuple[Command, ...]:
        with self._lock:
            step = move_rules.step(self.state, event)
            if step.state is State.RESUMING and self.state is State.ASKING:
                self.route = self.ticket.route
            self.state = step.state
            return step.commands

    @property
    def destination(self) -> Route:
        if self.route is None:
            raise PlatformError("a move has no destination yet")
        return self.route


class Migrations:
    """All moves of this gateway."""

    def __init__(
        self, room: WaitingRoom, demand: Demand, pool: InvokerPool, log: Log, limits: Limits | None = None
    ) -> None:
        self.limits = limits or Limits()
        self._room, self._demand, self._pool, self._log = room, demand, pool, log
        self._changed = threading.Condition()
        self._asking: dict[Move, None] = {}
        self._unsettled: list[Call] = []  # whose demand may not say what the room says
        self._nudged = self._has_asker = False
        self._due: deque[Move] = deque()  # for the workers
        self._n_workers = 0

    # what the request's own thread does ----------------------------------------------------------------------------

    def begin(self, call: Call) -> Move:
        """Look for another worker for ``call``.  Never blocks on the network."""
        move = Move(call, self._nudge)
        self._room.enter(move.ticket)
        if move.ticket.route is not None:
            move.take(Event.SLOT_FOUND)
            self._give_to_worker(move)
            return move
        with self._changed:
            self._asking[move] = None
            self._unsettled.append(call)
            self._start_asker()
        return move

    def send_last(self, move: Move) -> Reply:
        """Let the destination answer from the tokens emitted.  Raises as InvokerPool.post()."""
        call = move.call
        return send_run(
            self._pool,
            call,
            move.destination.record,
            deadline_s=call.run_deadline_s(),
            patience_s=self.limits.first_message_s,
        )

    def give_back(self, route: Route) -> None:
        """The source has been stopped."""
        self._room.release(route)

    def end(self, move: Move, event: Event) -> Route | None:
        """The run needs no move any more.  Returns the destination's slot if the run goes on there."""
        commands = move.take(event)
        self._carry_out(move, commands, None)
        return move.route if Command.CONTINUE_AT_DEST in commands else None

    def failed(self, move: Move, error: ThawError) -> None:
        """The destination did not do what it was to do."""
        commands = move.take(Event.DEST_FAILED)
        if commands:
            move.error = error
            self._log.event("move_failed", activation_id=move.call.activation_id, error=error.message)
        self._carry_out(move, commands, error)

    def _carry_out(self, move: Move, commands: tuple[Command, ...], error: ThawError | None) -> None:
        move.settled.set()
        for command in commands:
            match command:
                case Command.LEAVE_QUEUE:
                    self._room.leave(move.ticket)
                    self._settle(move)
                case Command.DROP_AT_DEST:
                    move.hangup.set()
                    self._drop(move.destination, error)
                case Command.CONTINUE_AT_DEST:
                    move.hangup.set()

    def _drop(self, route: Route, error: ThawError | None) -> None:
        """Give a slot back; what the room thinks of the instance depends on why."""
        if isinstance(error, (InstanceGone, InstanceBusy, Unreachable)):
            self._room.refused(route, gone=isinstance(error, InstanceGone))
        elif isinstance(error, WorkerLost):
            self._room.lost(route)
        else:
            self._room.release(route)

    # the asker -----------------------------------------------------------------------------------------------------

    def _nudge(self) -> None:
        """Called under the room's lock."""
        with self._changed:
            self._nudged = True
            self._changed.notify_all()

    def _settle(self, move: Move) -> None:
        with self._changed:
            self._asking.pop(move, None)
            self._unsettled.append(move.call)
            self._start_asker()

    def _start_asker(self) -> None:
        self._changed.notify_all()
        if not self._has_asker:
            self._has_asker = True
            threading.Thread(target=self._ask, name="move-asker", daemon=True).start()

    def _ask(self) -> None:
        while (news := self._next_news()) is not None:
            asking, unsettled = news
            for call in unsettled:
                self._demand.settle(call)
            for move in asking:
                self._look(move)

    def _next_news(self) -> tuple[list[Move], list[Call]] | None:
        """Sleep until something is to be done.  None when no move waits, and the thread ends."""
        with self._changed:
            if not self._asking and not self._unsettled:
                self._has_asker = False
                return None
            due_s = min((m.ask_again_s for m in self._asking if m.ask_again_s is not None), default=None)
            left_s = None if due_s is None else max(0.0, due_s - time.monotonic())
            self._changed.wait_for(lambda: self._nudged or self._unsettled or not self._asking, left_s)
            self._nudged = False
            unsettled, self._unsettled = self._unsettled, []
            return list(self._asking), unsettled

    def _look(self, move: Move) -> None:
        if move.ticket.error is not None:
            self.failed(move, move.ticket.error)
        elif move.ticket.route is not None:
            if Command.COMPUTE_AT_DEST in move.take(Event.SLOT_FOUND):
                self._settle(move)
                self._give_to_worker(move)
        elif not self._room.must_ask(move.ticket):
            move.ask_again_s, move.n_refusals = None, 0
        elif move.ask_again_s is None or time.monotonic() >= move.ask_again_s:
            if move.ask_again_s is not None:
                self._room.retry(move.call.action.name)
            pause_s = _ASK_AGAIN_S[min(move.n_refusals, len(_ASK_AGAIN_S) - 1)]
            move.ask_again_s, move.n_refusals = time.monotonic() + pause_s, move.n_refusals + 1

    # the workers ---------------------------------------------------------------------------------------------------

    def _give_to_worker(self, move: Move) -> None:
        with self._changed:
            self._due.append(move)
            if self._n_workers < self.limits.n_threads:
                self._n_workers += 1
                threading.Thread(target=self._work, name="mover", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._due:
                    self._n_workers -= 1
                    return
                move = self._due.popleft()
            self._advance(move)

    def _advance(self, move: Move) -> None:
        try:
            self._rounds(move)
        except ClientGone:
            return  # the move has ended, and whoever ended it has the slot
        except ThawError as e:
            self.failed(move, e)
            return
        except Exception as e:  # noqa: BLE001  an error of our own ends the move, not the thread of the others
            self.failed(move, PlatformError(f"a move failed on a bug: {type(e).__name__}: {e}"))
            return
        move.take(Event.CAUGHT_UP)
        if not move.settled.wait(self.limits.boundary_s):
            commands = move.take(Event.OVERDUE)
            if commands:
                move.error = TimeLimitExceeded(f"the run read no token for {self.limits.boundary_s:g} s")
            self._carry_out(move, commands, None)

    def _rounds(self, move: Move) -> None:
        """Let the destination compute what was emitted, until little is missing or a round gains little."""
        emitted = move.call.emitted
        known = 0  # tokens that the destination has, its prompt among them
        while True:
            n_sent, began_s = len(emitted), time.monotonic()
            n_prompt = self._compute(move, emitted[:n_sent])
            move.rounds_s += time.monotonic() - began_s
            move.n_rounds, move.n_tokens = move.n_rounds + 1, move.n_tokens + n_prompt + n_sent - known
            missing = len(emitted) - n_sent
            gained, known = n_prompt + n_sent - known - missing, n_prompt + n_sent
            if move_rules.is_enough(missing, gained):
                return

    def _compute(self, move: Move, tokens: list[int]) -> int:
        """One round.  Returns the number of tokens of the prompt.  Raises as InvokerPool.post() and Reply do, and the
        error that the destination names."""
        reply = send_run(
            self._pool,
            move.call,
            move.destination.record,
            deadline_s=min(move.call.run_deadline_s(), time.monotonic() + self.limits.round_s),
            hangup=move.hangup,
            tokens=tokens,
            prefill_only=True,
        )
        try:
            reply.read_head()
            message = reply.read_message()
            if isinstance(message, RunFailed):
                raise from_info(message.error)
            if not isinstance(message, RunFinished):
                raise ProtocolError(f"a round was answered with a {type(message).__name__}")
            reply.finish()
            return message.prompt_tokens
        finally:
            reply.abort()  # nothing, if it has ended well

"""Moves of running LLM requests to other workers, by tokens: the work beside the requests' own threads.

::

    request's thread, between_tokens.py: it reads the source ──────────────────────┬─ reads the destination ──▶
                                       │ begin                            boundary ↑ switch
    asker (one thread)                 └▶ a slot elsewhere                         │
    workers (at most Limits.n_threads)      └▶ round 1 ─▶ round 2 ─▶ … ─▶ caught up┘

A request asks for its second slot as any request asks for its first one: it stands in the waiting room, and its demand
starts a worker where there is none.  It came there when its move began: until then and meanwhile its source serves it.
Neither that wait nor the one for the request's thread costs a thread of its own.  A round sends the destination the
tokens so far, and the destination computes them into its prefix cache while the source goes on.  The threads are there
only while something moves.  move_rules.py has the rules.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from gateway.serving.call import Call
from gateway.serving.hangup import ClientGone
from gateway.serving.moving import move_rules
from gateway.serving.moving.move import Limits, Move
from gateway.serving.moving.move_rules import Command, Event, Next, State
from gateway.serving.routing.demand import Demand
from gateway.serving.routing.elsewhere import give_back
from gateway.serving.routing.invoker_pool import InvokerPool, Reply
from gateway.serving.routing.routes import Route
from gateway.serving.routing.sending import send_run
from gateway.serving.routing.versions import Versions
from gateway.serving.routing.waiting_room import WaitingRoom
from relay.protocol.messages import RunFailed, RunFinished
from thaw.errors import (
    InstanceBusy,
    PlatformError,
    ProtocolError,
    ThawError,
    TimeLimitExceeded,
    WorkerLost,
    from_info,
)
from thaw.instance import InstanceRecord
from thaw.logs import Log

T = TypeVar("T")

_ASK_AGAIN_S: Final = (0.05, 0.1, 0.25, 0.5)
"""Waits between two tries at instances whose slots other gateways hold, as in dispatch.py."""


class Migrations:
    """All moves of this gateway."""

    def __init__(
        self,
        room: WaitingRoom,
        demand: Demand,
        pool: InvokerPool,
        versions: Versions,
        log: Log,
        limits: Limits | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self._room, self._demand, self._pool, self._versions, self._log = room, demand, pool, versions, log
        self._changed = threading.Condition()
        self._asking: dict[Move, None] = {}
        self._unchecked: dict[Move, bool] = {}  # their versions may have changed; True: their demand, too
        self._caught_up: dict[Move, float] = {}  # until when they wait for a token boundary
        self._nudged = self._has_asker = False
        self._due: deque[Move] = deque()  # for the workers
        self._n_workers = 0

    # calls by the request's own thread -----------------------------------------------------------------------------

    def begin(self, call: Call, source: InstanceRecord) -> Move:
        """Look for another worker for ``call``.  Never blocks on the network, and never raises: a move that cannot
        begin has ended."""
        move = Move(call, source, self._nudge)
        self._ask_for_slot(move)
        return move

    def at_boundary(self, move: Move) -> bool:
        """The run has read a token: True when it is to be sent to the destination now."""
        commands = move.take(Event.BOUNDARY)
        self._stop_waiting(move)
        return Command.SEND_TO_DEST in commands

    def send_last(self, move: Move) -> tuple[Reply, object]:
        """Let the destination answer from the tokens emitted.  Returns its reply and the first message of it.  Raises
        as InvokerPool.post() and Reply do, and the error in which the run failed at once."""
        deadline_s = move.call.run_deadline_s()
        patience_s = move_rules.patience_s(move.last_round_s, self.limits.first_message_s)
        to = move.destination.record
        with _limited(move, f"the destination sent nothing within {patience_s:.1f} s of the switch"):
            return _sent_again_if_busy(
                move,
                lambda: _answered(send_run(self._pool, move.call, to, deadline_s=deadline_s, patience_s=patience_s)),
            )

    def give_back(self, route: Route) -> None:
        """The source has been stopped."""
        self._room.release(route)

    def end(self, move: Move, event: Event) -> Route | None:
        """The run needs no move any more.  Returns the destination's slot if the run goes on there."""
        commands = move.take(event)
        self._carry_out(move, commands, None)
        return move.route if Command.CONTINUE_AT_DEST in commands else None

    def failed(self, move: Move, error: ThawError, *, is_last: bool = False) -> None:
        """The destination has failed.  ``is_last``: another one would fail, too."""
        is_busy = isinstance(error, InstanceBusy)
        commands = move.take(Event.DEST_BUSY if is_busy else Event.DEST_FAILED, error, is_last=is_last)
        if commands and not is_busy:
            self._log.event("move_failed", activation_id=move.call.activation_id, error=error.message)
        self._carry_out(move, commands, error)

    def _carry_out(self, move: Move, commands: tuple[Command, ...], error: ThawError | None) -> None:
        self._stop_waiting(move)
        for command in commands:
            match command:
                case Command.LEAVE_QUEUE:
                    self._room.leave(move.ticket)
                    self._settle(move)
                case Command.DROP_AT_DEST:
                    move.hangup.set()
                    give_back(self._room, move.destination, error)
                case Command.CONTINUE_AT_DEST:
                    move.hangup.set()
                case Command.ASK_AGAIN:
                    self._ask_for_slot(move)

    def _ask_for_slot(self, move: Move) -> None:
        try:
            self._enter(move)
        except Exception as e:  # noqa: BLE001  the run goes on at its source, whatever is wrong with its move
            self.failed(move, _fault(e))

    def _enter(self, move: Move) -> None:
        """Raises PlatformError."""
        self._room.enter(move.ticket)
        if move.state is not State.ASKING:  # it has ended meanwhile, perhaps before it was in the room
            self._room.leave(move.ticket)
        elif move.ticket.route is not None:
            self._found(move)
        else:
            with self._changed:
                self._asking[move], self._unchecked[move] = None, True
                if not self._has_attentive_asker():
                    raise PlatformError("the gateway has no thread left for a move")

    def _found(self, move: Move) -> None:
        if Command.COMPUTE_AT_DEST in move.take(Event.SLOT_FOUND):
            self._give_to_worker(move)

    # the asker -----------------------------------------------------------------------------------------------------

    def _nudge(self) -> None:
        """Called under the room's lock."""
        with self._changed:
            self._nudged = True
            self._changed.notify_all()

    def _settle(self, move: Move) -> None:
        """It does not ask any more."""
        with self._changed:
            self._asking.pop(move, None)
            self._unchecked[move] = True
            self._has_attentive_asker()  # without a thread the next move's asker does it

    def _stop_waiting(self, move: Move) -> None:
        with self._changed:
            if self._caught_up.pop(move, None) is not None:
                self._changed.notify_all()

    def _has_attentive_asker(self) -> bool:
        """Have the asker look, and start it if there is none.  False if no thread can be started now."""
        self._nudged = True
        self._changed.notify_all()
        if not self._has_asker:
            try:
                threading.Thread(target=self._attend, name="move-asker", daemon=True).start()
            except RuntimeError:
                return False
            self._has_asker = True
        return True

    def _attend(self) -> None:
        """The asker.  Slots come first, because writes to the state server may take long."""
        try:
            while self._has_news():
                self._look_at_all()
        except BaseException:
            with self._changed:
                self._has_asker = False
            raise

    def _look_at_all(self) -> None:
        with self._changed:
            asking, now_s = list(self._asking), time.monotonic()
            overdue = [move for move, until_s in self._caught_up.items() if until_s <= now_s]
            unchecked = next(iter(self._unchecked), None)
            tells = unchecked is not None and self._unchecked.pop(unchecked)
        for move in asking:
            self._guarded(move, self._look)
        for move in overdue:
            self._guarded(move, self._give_up_waiting)
        if unchecked is not None:
            self._guarded(unchecked, self._tell if tells else self._check)

    def _has_news(self) -> bool:
        """Sleep until something is to be done.  False when nothing moves, and the thread ends."""
        with self._changed:
            due_s = [m.ask_again_s for m in self._asking if m.ask_again_s is not None] + [*self._caught_up.values()]
            left_s = max(0.0, min(due_s) - time.monotonic()) if due_s else None
            self._changed.wait_for(lambda: self._nudged or self._unchecked or self._is_idle(), left_s)
            self._nudged = False
            self._has_asker = not self._is_idle()
            return self._has_asker

    def _is_idle(self) -> bool:
        return not (self._asking or self._unchecked or self._caught_up)

    def _guarded(self, move: Move, step: Callable[[Move], object]) -> None:
        """An error of our own ends its move, not the asker of the others."""
        try:
            step(move)
        except Exception as e:  # noqa: BLE001
            self.failed(move, _fault(e))

    def _look(self, move: Move) -> None:
        ticket = move.ticket
        if ticket.error is not None:
            self.failed(move, ticket.error)
        elif ticket.route is not None:
            self._settle(move)
            self._found(move)
        else:
            if ticket.event.is_set():
                ticket.event.clear()
                with self._changed:
                    self._unchecked.setdefault(move, False)
            self._ask_again(move)

    def _ask_again(self, move: Move) -> None:
        """Ask instances again that refused, less and less often."""
        if not self._room.must_ask(move.ticket):
            move.ask_again_s = None
        elif move.ask_again_s is None or time.monotonic() >= move.ask_again_s:
            if move.ask_again_s is not None:
                self._room.retry(move.call.action.served_by)
            pause_s = _ASK_AGAIN_S[min(move.n_refusals, len(_ASK_AGAIN_S) - 1)]
            move.ask_again_s, move.n_refusals = time.monotonic() + pause_s, move.n_refusals + 1

    def _tell(self, move: Move) -> None:
        """Tell the scheduler the room's demand, unless it would start another version than the source's."""
        if self._check(move):
            self._demand.settle(move.call)

    def _check(self, move: Move) -> bool:
        """End a move for which no worker can be started.  False if it has ended here."""
        if move.state is State.ASKING:
            try:
                move.check_version(self._versions)
            except WorkerLost as e:
                self.failed(move, e, is_last=True)
                return False
        return True

    def _give_up_waiting(self, move: Move) -> None:
        late = TimeLimitExceeded(f"the run read no token for {self.limits.boundary_s:g} s")
        self._carry_out(move, move.take(Event.OVERDUE, late), None)

    # the workers ---------------------------------------------------------------------------------------------------

    def _give_to_worker(self, move: Move) -> None:
        """Raises RuntimeError when there is no worker and none can be started."""
        with self._changed:
            if self._n_workers < self.limits.n_threads:
                try:
                    threading.Thread(target=self._work, name="mover", daemon=True).start()
                    self._n_workers += 1
                except RuntimeError:
                    if not self._n_workers:
                        raise
            self._due.append(move)

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
            self.failed(move, _fault(e))
            return
        with self._changed:  # first: the run's thread may be at a boundary as soon as it may switch there
            self._caught_up[move] = time.monotonic() + self.limits.boundary_s
            self._has_attentive_asker()
        move.take(Event.CAUGHT_UP)
        if move.state is not State.CAUGHT_UP:
            self._stop_waiting(move)

    def _rounds(self, move: Move) -> None:
        """Let the destination compute the emitted tokens, until the switch will be short.  Raises as _compute(), and
        TimeLimitExceeded when it would not be."""
        emitted = move.call.emitted
        known = n_in_vain = 0  # tokens that the destination has, its prompt among them
        while True:
            n_sent, began_s = len(emitted), time.monotonic()
            with _limited(move, f"the destination computed no round within {self.limits.round_s:g} s"):
                n_prompt = _sent_again_if_busy(move, lambda n=n_sent: self._compute(move, emitted[:n]))  # type: ignore[misc]
            took_s = time.monotonic() - began_s
            move.last_round_s, move.rounds_s = took_s, move.rounds_s + took_s
            move.n_rounds, move.n_tokens = move.n_rounds + 1, move.n_tokens + n_prompt + n_sent - known
            move.n_refusals = 0
            missing = len(emitted) - n_sent
            gained, known = n_prompt + n_sent - known - missing, n_prompt + n_sent
            match move_rules.after_round(missing, gained, took_s, n_in_vain):
                case Next.SWITCH:
                    return
                case Next.GIVE_UP:
                    raise TimeLimitExceeded(
                        f"the destination needs {took_s:.1f} s for a round, and misses {missing} tokens still"
                    )
            n_in_vain += gained <= move_rules.FEW_TOKENS

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


def _answered(reply: Reply) -> tuple[Reply, object]:
    """Raises as Reply's methods do, and the error in which the run failed at once."""
    try:
        reply.read_head()
        message: object = reply.read_message()
        if isinstance(message, RunFailed):
            raise from_info(message.error)
    except BaseException:
        reply.abort()
        raise
    return reply, message


@contextmanager
def _limited(move: Move, late: str) -> Iterator[None]:
    """A time limit that is exceeded is the move's own, and ``late`` says which, until the run's time is over."""
    try:
        yield
    except TimeLimitExceeded as e:
        if time.monotonic() >= move.call.run_deadline_s():
            raise
        raise TimeLimitExceeded(late) from e


def _sent_again_if_busy(move: Move, send: Callable[[], T]) -> T:
    """An invoker frees a slot just after the last byte of the run that had it, which may have been our last round."""
    try:
        return send()
    except InstanceBusy:
        if move.n_refusals:  # it is refused for longer than that
            raise
        return send()


def _fault(error: Exception) -> ThawError:
    return error if isinstance(error, ThawError) else PlatformError(f"a move failed on a bug: {error!r}")

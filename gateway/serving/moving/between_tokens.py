"""A running LLM request whose worker leaves, as the request's own thread sees it: it looks between two tokens.

The warm path has one Moving for each run, which does nothing until the run's route leaves.
"""

from __future__ import annotations

import time

from gateway.serving.call import Call
from gateway.serving.moving.migration import Migrations
from gateway.serving.moving.move import Move
from gateway.serving.moving.move_rules import Event, State
from gateway.serving.routing.invoker_pool import Reply
from gateway.serving.routing.routes import Route
from thaw.errors import ThawError, TimeLimitExceeded
from thaw.instance import InstanceRecord
from thaw.tracing.trace import Phase


class Moving:
    __slots__ = ("_call", "_left", "_migrations", "_move", "_n_failed")

    def __init__(self, migrations: Migrations, call: Call) -> None:
        self._migrations, self._call = migrations, call
        self._move: Move | None = None
        self._left: InstanceRecord | None = None  # the worker that moves have failed to leave
        self._n_failed = 0

    @property
    def is_under_way(self) -> bool:
        return self._move is not None

    def at_boundary(self, route: Route, reply: Reply) -> tuple[Route, Reply, object] | None:
        """Between two tokens of a run whose route leaves, or that moves: return the new route and reply and the first
        message of the destination when the run has moved.  ``reply`` is ended then, and ``route`` given back.  Raises
        ClientGone."""
        move = self._move
        if not route.leaves:
            self._stop(Event.STAYS, "the host is not emptied after all")
        elif move is None:
            self._begin(route)
        elif move.state is State.ENDED:
            self._note_failure(move)
        elif move.state is State.CAUGHT_UP:
            return self._switch(move, route, reply)
        return None

    def at_hand(self) -> Route | None:
        """The run has lost its worker: return the slot at the destination, if it has one.  The caller gives it back."""
        return self._stop(Event.SOURCE_FAILED, "the worker was lost first")

    def end(self) -> None:
        """The run is over, however it ended."""
        self._stop(Event.RUN_ENDED, "the run ended first")

    def _begin(self, route: Route) -> None:
        if route.record is not self._left:  # it has a new one when the host was taken back, or the run has moved
            self._left, self._n_failed = route.record, 0
        if self._n_failed >= self._migrations.limits.attempts:
            return
        self._call.trace(Phase.MOVE_BEGIN, {"from": route.record.host_id})
        self._move = self._migrations.begin(self._call, route.record)

    def _stop(self, event: Event, why: str) -> Route | None:
        move, self._move = self._move, None
        if move is None:
            return None
        at_hand = self._migrations.end(move, event)
        self._trace_end(move, {"stayed": why} if at_hand is None else {"to": at_hand.record.host_id, "lost": True})
        return at_hand

    def _note_failure(self, move: Move) -> None:
        """The source goes on, and another destination may be tried."""
        self._move = None
        self._n_failed = self._migrations.limits.attempts if move.is_last else self._n_failed + 1
        self._trace_end(move, {"stayed": move.error.message if move.error is not None else "it ended"})

    def _switch(self, move: Move, route: Route, reply: Reply) -> tuple[Route, Reply, object] | None:
        if not self._migrations.at_boundary(move):
            return None  # it has ended meanwhile
        began_s = time.monotonic()
        try:
            new, message = self._migrations.send_last(move)
        except ThawError as e:
            self._call.hangup.check()
            self._migrations.failed(move, e, is_last=isinstance(e, TimeLimitExceeded))  # the client waited enough
            return None
        new.extend(self._call.run_deadline_s())
        move.take(Event.FIRST_MESSAGE)
        self._move = None
        reply.abort()
        self._migrations.give_back(route)
        self._note_move(move, time.monotonic() - began_s)
        return move.destination, new, message

    def _note_move(self, move: Move, pause_s: float) -> None:
        """The record keeps naming the instance that a cold request was started for: its trace explains the start."""
        call, to = self._call, move.destination.record
        if not call.cold:
            call.instance = to
        call.trace(Phase.DISPATCHED, {"instance_id": to.instance_id, "host": to.host_id})
        self._trace_end(move, {"to": to.host_id, "pause_s": round(pause_s, 4)})

    def _trace_end(self, move: Move, attrs: dict[str, object]) -> None:
        rounds = {"rounds": move.n_rounds, "tokens": move.n_tokens, "rounds_s": round(move.rounds_s, 4)}
        self._call.trace(Phase.MOVE_END, {**attrs, **rounds})

"""Sequences, whose components run one after another, and compositions, in which a conductor names the next action.

::

    sequence's activation ── logs: the components' activation ids
        ├── component 1 (cause: the sequence's activation)
        └── component 2 …                                      the first failure is the sequence's

A component is an ordinary call with a record of its own.  A component may be a sequence; all of one activation together
run a bounded number of actions, also when somebody changed a component meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from gateway.serving.actions import conductors
from gateway.serving.actions.packages import Packages, Target, qualified
from gateway.serving.call import Call
from gateway.serving.dispatch import Dispatcher
from gateway.serving.execute import Steps, steps
from gateway.serving.hangup import Hangup
from gateway.serving.outcome import outcome_of
from gateway.serving.routing.invoker_pool import Reply
from gateway.serving.runs import Outcome
from relay.state.api_keys import Subject
from thaw.action import KIND_SEQUENCE, Action
from thaw.activation import ActivationStatus
from thaw.clock import wall_ms
from thaw.errors import BadRequest, DeveloperError, Forbidden, NotFound, PlatformError, ThawError
from thaw.ids import ActionName, ActivationId, Namespace

_TOO_LONG = "Too many actions in the sequence."


class CallMaker(Protocol):
    """Makes the call of a component.  Raises RequestError for arguments that it does not take."""

    def __call__(
        self, target: Target, subject: Subject, given: Any, hangup: Hangup, *, cause: str = "", caused_by: str = ""
    ) -> Call: ...


@dataclass(slots=True)
class _Left:
    """How many actions and how many sequences one activation may still run, and how often its conductors may.
    Sequences that only call one another would otherwise go on without end."""

    actions: int
    sequences: int
    conductors: int

    def take(self, action: Action) -> None:
        """Raises DeveloperError."""
        if (self.sequences if action.is_sequence else self.actions) <= 0:
            raise DeveloperError(_TOO_LONG)
        if action.is_sequence:
            self.sequences -= 1
        else:
            self.actions -= 1


class Sequences:
    def __init__(
        self,
        dispatcher: Dispatcher,
        packages: Packages,
        make_call: CallMaker,
        ended: Callable[[Call, Outcome], None],
        caused: Callable[[Call], list[ActivationId]],
        most_actions: int,
    ) -> None:
        """``ended`` has the record of a component written; ``caused`` finds those that have one."""
        self._dispatcher, self._packages, self._make_call = dispatcher, packages, make_call
        self._ended, self._caused, self._most_actions = ended, caused, most_actions

    def check(self, action: Action) -> None:
        """Look at a sequence before it is written.  Raises BadRequest for one whose components are not there, that
        would run itself, or that is too long."""
        if not action.exec.components:
            raise BadRequest("The request content was malformed:\nA sequence needs at least one component.")
        most = max(self._length(action.exec.components, action.namespace, (action.name,)))
        if most > self._most_actions:
            raise BadRequest(f"{_TOO_LONG} It has {most}, and {self._most_actions} are allowed.")

    def steps(self, call: Call) -> Steps:
        """Run the call of a sequence or composition.  Never raises."""
        return self._steps(
            call, _Left(self._most_actions, self._most_actions, conductors.most_runs(self._most_actions))
        )

    def _length(
        self, names: tuple[ActionName, ...], caller: Namespace, above: tuple[ActionName, ...]
    ) -> tuple[int, int]:
        """The numbers of actions and of sequences below, at least; counting ends where there are too many."""
        n_actions = n_sequences = 0
        for name in names:
            if max(n_actions, n_sequences, len(above)) > self._most_actions:
                return self._most_actions + 1, n_sequences
            if name in above or (action := self._component(name, caller).action).name in above:
                raise BadRequest("Sequence may not refer to itself.")
            if action.is_sequence:
                below = self._length(action.exec.components, caller, (*above, action.name))
                n_actions, n_sequences = n_actions + below[0], n_sequences + 1 + below[1]
            else:
                n_actions += 1
        return n_actions, n_sequences

    def _component(self, name: ActionName, caller: Namespace) -> Target:
        try:
            return self._packages.target(name, caller)
        except NotFound:
            raise BadRequest(f"Sequence component does not exist: /{name}.") from None

    def _steps(self, call: Call, left: _Left) -> Steps:
        if not call.action.is_composed:
            return (yield from steps(self._dispatcher, call))
        try:
            self._begin(call)
            return (yield from self._in_order(call, left) if call.action.is_sequence else self._conducted(call, left))
        except ThawError as e:
            return outcome_of(e)
        except Exception as e:  # noqa: BLE001  an error of our own ends the activation, not its thread
            return outcome_of(self._dispatcher.fault(call, e))

    def _begin(self, call: Call) -> None:
        """Take the one right to run the call, before any part of it runs."""
        if call.claim is not None and not call.claim():
            call.lines += self._caused(call)
            raise PlatformError("A gateway was lost while this sequence ran; it is not run twice.")
        call.claim, call.dispatched_ms = None, call.dispatched_ms or wall_ms()

    def _in_order(self, call: Call, left: _Left) -> Generator[str | Reply, None, Outcome]:
        given, outcome = call.payload, Outcome(ActivationStatus.SUCCESS, call.payload)
        for name in call.action.exec.components:
            outcome = yield from self._one(call, name, given, left)
            if outcome.status is not ActivationStatus.SUCCESS:
                return _of_whole(outcome)
            given = outcome.result
        return _of_whole(outcome)

    def _one(self, call: Call, name: ActionName, given: Any, left: _Left) -> Generator[str | Reply, None, Outcome]:
        target = self._component(name, call.subject.namespace)
        left.take(target.action)
        child = self._child(call, target, given)
        outcome = yield from self._steps(child, left)
        self._ended(child, outcome)
        return replace(outcome, n_bytes=outcome.n_bytes or child.answer_bytes)

    def _child(self, call: Call, target: Target, given: Any) -> Call:
        child = self._make_call(
            target, call.subject, given, call.hangup, cause=call.activation_id, caused_by=KIND_SEQUENCE
        )
        call.lines.append(child.activation_id)
        return child

    # compositions --------------------------------------------------------------------------------------------------

    def _conducted(self, call: Call, left: _Left) -> Generator[str | Reply, None, Outcome]:
        """If a component fails, the conductor gets its result and decides.  If the conductor itself fails, the
        composition ends."""
        given: Any = call.payload
        while True:
            outcome = yield from self._conductor(call, given, left)
            if outcome.status not in (ActivationStatus.SUCCESS, ActivationStatus.APPLICATION_ERROR):
                return _of_whole(outcome)
            said = conductors.said(outcome.result)
            if said.action is None:
                return Outcome(outcome.status, said.params, n_bytes=outcome.n_bytes)
            done = yield from self._next(call, said, left)
            if done.status is ActivationStatus.INTERNAL_ERROR:
                return Outcome(done.status, done.result)
            given = {**conductors.as_arguments(done.result), **said.state}

    def _conductor(self, call: Call, given: Any, left: _Left) -> Generator[str | Reply, None, Outcome]:
        """Run the conductor itself.  Its bound parameters are merged here: it may be final, and the first arguments
        have them."""
        if left.conductors <= 0:
            return Outcome(ActivationStatus.APPLICATION_ERROR, {"error": conductors.TOO_LONG})
        left.conductors -= 1
        bare = Target(replace(call.action, parameters={}), call.binding)
        child = self._child(call, bare, {**call.action.parameters, **conductors.as_arguments(given)})
        outcome = yield from steps(self._dispatcher, child)
        self._ended(child, outcome)
        return outcome

    def _next(self, call: Call, said: conductors.Said, left: _Left) -> Generator[str | Reply, None, Outcome]:
        """Run the action that the conductor named, or tell it why not."""
        error = conductors.unreadable(said.action)
        if isinstance(said.action, str) and left.actions <= 0:
            error = conductors.TOO_LONG
        elif isinstance(said.action, str):
            try:
                name = qualified(said.action, call.subject.namespace)
                self._packages.target(name, call.subject.namespace)
                return (yield from self._one(call, name, said.params, left))
            except NotFound:
                error = conductors.not_found(said.action)
            except Forbidden:
                error = conductors.not_allowed(said.action)
            except BadRequest as e:
                error = e.message
        return Outcome(ActivationStatus.APPLICATION_ERROR, {"error": error})


def _of_whole(last: Outcome) -> Outcome:
    """Return how an activation ended whose last component decided it."""
    return Outcome(last.status, last.result, timed_out=last.timed_out, n_bytes=last.n_bytes)

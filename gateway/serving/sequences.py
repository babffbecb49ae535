"""Sequences: components that run one after another, each with the result of the one before it.

::

    sequence's activation ── logs: the components' activation ids
        ├── component 1 (cause: the sequence's activation)
        └── component 2 …                                      the first failure is the sequence's

A component is an ordinary call with a record of its own.  A component may be a sequence; all of one activation together
run a bounded number of actions, also when somebody changed a component meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.serving.call import Call
from gateway.serving.dispatch import Dispatcher
from gateway.serving.execute import Steps, steps
from gateway.serving.hangup import Hangup
from gateway.serving.invoker_pool import Reply
from gateway.serving.outcome import outcome_of
from gateway.serving.packages import Packages, Target
from gateway.serving.runs import Outcome
from relay.state.api_keys import Subject
from thaw.action import Action
from thaw.activation import ActivationStatus
from thaw.clock import wall_ms
from thaw.errors import BadRequest, DeveloperError, NotFound, PlatformError, ThawError
from thaw.ids import ActionName, Namespace

_TOO_LONG = "Too many actions in the sequence."


class CallMaker(Protocol):
    """Makes the call of a component.  Raises RequestError for arguments that it does not take."""

    def __call__(
        self, target: Target, subject: Subject, given: Any, hangup: Hangup, *, cause: str = "", caused_by: str = ""
    ) -> Call: ...


@dataclass(slots=True)
class _Left:
    """How many actions one activation may still run."""

    actions: int

    def take(self) -> None:
        """Raises DeveloperError."""
        if self.actions <= 0:
            raise DeveloperError(_TOO_LONG)
        self.actions -= 1


class Sequences:
    def __init__(
        self,
        dispatcher: Dispatcher,
        packages: Packages,
        make_call: CallMaker,
        ended: Callable[[Call, Outcome], None],
        most_actions: int,
    ) -> None:
        """``ended`` has the record of a component written."""
        self._dispatcher, self._packages, self._make_call = dispatcher, packages, make_call
        self._ended, self._most_actions = ended, most_actions

    def check(self, action: Action) -> None:
        """Look at a sequence before it is written.  Raises BadRequest for one whose components are not there, that
        would run itself, or that is too long."""
        if not action.exec.components:
            raise BadRequest("The request content was malformed:\nA sequence needs at least one component.")
        n_actions = self._length(action.exec.components, action.namespace, (action.name,))
        if n_actions > self._most_actions:
            raise BadRequest(f"{_TOO_LONG} It has {n_actions}, and {self._most_actions} are allowed.")

    def steps(self, call: Call) -> Steps:
        """Run the call's sequence, as steps() runs an action.  Never raises."""
        return self._steps(call, _Left(self._most_actions))

    def _length(self, names: tuple[ActionName, ...], caller: Namespace, above: tuple[ActionName, ...]) -> int:
        """The number of actions below, at least; counting ends where there are too many."""
        n_actions = 0
        for name in names:
            if n_actions > self._most_actions or len(above) > self._most_actions:
                return self._most_actions + 1
            if name in above or (action := self._component(name, caller).action).name in above:
                raise BadRequest("Sequence may not refer to itself.")
            if action.is_sequence:
                n_actions += self._length(action.exec.components, caller, (*above, action.name))
            else:
                n_actions += 1
        return n_actions

    def _component(self, name: ActionName, caller: Namespace) -> Target:
        try:
            return self._packages.target(name, caller)
        except NotFound:
            raise BadRequest(f"Sequence component does not exist: /{name}.") from None

    def _steps(self, call: Call, left: _Left) -> Steps:
        if not call.action.is_sequence:
            return (yield from steps(self._dispatcher, call))
        try:
            return (yield from self._in_order(call, left))
        except ThawError as e:
            return outcome_of(e)
        except Exception as e:  # noqa: BLE001  an error of our own ends the activation, not its thread
            return outcome_of(self._dispatcher.fault(call, e))

    def _in_order(self, call: Call, left: _Left) -> Generator[str | Reply, None, Outcome]:
        if call.claim is not None and not call.claim():
            raise PlatformError("A gateway was lost while this sequence ran; it is not run twice.")
        call.claim, call.dispatched_ms = None, call.dispatched_ms or wall_ms()
        given = call.payload
        for name in call.action.exec.components:
            outcome = yield from self._one(call, name, given, left)
            if outcome.status is not ActivationStatus.SUCCESS:
                return Outcome(outcome.status, outcome.result, timed_out=outcome.timed_out)
            given = outcome.result
        return Outcome(ActivationStatus.SUCCESS, given)

    def _one(self, call: Call, name: ActionName, given: Any, left: _Left) -> Generator[str | Reply, None, Outcome]:
        target = self._component(name, call.subject.namespace)
        if not target.action.is_sequence:
            left.take()
        child = self._make_call(
            target, call.subject, given, call.hangup, cause=call.activation_id, caused_by=call.action.exec.kind
        )
        call.lines.append(child.activation_id)
        outcome = yield from self._steps(child, left)
        self._ended(child, outcome)
        return outcome

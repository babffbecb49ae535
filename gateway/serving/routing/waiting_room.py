"""Requests that no route can take: the oldest first per action, each asleep on an event of its own.

A slot that comes free (READY, a release) is handed straight to the request at the head of its action's queue, so a
newcomer never overtakes and no request wakes for nothing.  A request that lost its worker or was refused comes back
with its age, so it stands before all that came after it.  All state is behind one lock; nothing under it blocks.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

from gateway.serving.routing.routes import Route, RouteTable, Serving
from thaw.checkpoints import versions
from thaw.errors import ThawError, WorkerLost
from thaw.ids import ActionName, ActivationId, GroupId
from thaw.instance import InstanceRecord, InstanceState

DOUBT_S: Final = 2.0
"""The end of a broken pipeline is reported within this time; until then it gets no further requests, which would only
be lost too."""
_HANDED_KEPT: Final = 32
"""How many of the slots that were handed to a queue are kept to tell the queue's pace."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One request's place.  ``route`` or ``error`` settles it; ``notices`` tell a waiting client about its progress.

    ``exact``: only ``version`` can go on with an answer that it began.  ``moves``: a run that has a slot and is asking
    for one on another host; no request waits longer for it, and it does not count as one that waits.
    ``model_version``: the version of the model that began the request's answer, which only that version can go on
    with; empty for a request without an answer so far.  ``ahead``: nobody calls yet.  It stands behind all requests, so
    that it takes no turn of theirs, and wakes with each instance that is ready, though it gets none of its slots.
    ``action`` serves the request, and ``called`` is the one that it asked for, if that is another one.  ``looks``: its
    request is to look whether ``action`` still serves it.
    """

    activation_id: ActivationId
    action: ActionName
    version: str
    since_s: float = field(default_factory=time.monotonic)  # when the request came
    event: threading.Event = field(default_factory=threading.Event)
    route: Route | None = None
    error: ThawError | None = None
    notices: deque[str] = field(default_factory=deque)
    exact: bool = False
    moves: bool = False
    model_version: str = ""
    ahead: bool = False
    called: ActionName | None = None
    looks: bool = False
    adapter: str = ""  # that the request's demand names

    def is_of(self, action: ActionName) -> bool:
        """Whether its client asked for ``action``."""
        return (self.called or self.action) == action

    def look(self) -> None:
        self.looks = True
        self.event.set()


@dataclass(frozen=True, slots=True)
class Queue:
    """The state of one action's queue, from which a wait is estimated.  Runs that move are not in it."""

    n_waiting: int
    n_in_namespace: int
    oldest_s: float | None  # when the request at its head came
    handed_s: tuple[float, ...]  # when the last requests before it got their slots
    serving: frozenset[GroupId]  # groups that are ready


class WaitingRoom:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._table = RouteTable()
        self._queues: dict[ActionName, deque[Ticket]] = {}
        self._moving: Counter[ActionName] = Counter()  # runs that move, among those in the queue
        self._said: Mapping[ActionName, str] = {}  # sentences about starts in progress
        self._handed: dict[ActionName, deque[float]] = {}  # only actions with a queue

    # calls by requests ---------------------------------------------------------------------------------------------

    def enter(self, ticket: Ticket) -> None:
        """Give ``ticket`` a route, or its place in the queue.  leave() ends the wait, release() the route's use."""
        with self._lock:
            # while others wait there is no free slot for this version: slots are handed on as they come
            if not self._settle(ticket):
                queue = self._queues.setdefault(ticket.action, deque())
                queue.insert(_place(queue, ticket), ticket)
                self._moving[ticket.action] += ticket.moves
                if (said := self._said.get(ticket.action)) is not None:
                    ticket.notices.append(said)

    def leave(self, ticket: Ticket) -> None:
        """Give the place up.  A route that was handed over meanwhile goes to the next request."""
        with self._lock:
            queue = self._queues.get(ticket.action)
            if queue is not None and ticket in queue:
                self._unqueue(ticket)
            elif ticket.route is not None:
                route, ticket.route = ticket.route, None
                self._table.release(route, ran=False)
                self._serve(ticket.action)

    def release(self, route: Route) -> None:
        """The request on ``route`` ended."""
        with self._lock:
            self._table.release(route)
            self._serve(route.record.action)

    def refused(self, route: Route, *, gone: bool) -> None:
        """The instance did not take the request: either its invoker says that it left, or it is asked again later."""
        with self._lock:
            self._table.release(route, ran=False)
            if gone:
                self._table.drop(route)
                self._serve(route.record.action)
            else:
                route.full = True
                self._wake_asking(route.record.action)

    def lost(self, route: Route) -> None:
        """The worker was lost under a request.  A pipeline whose end is not reported within DOUBT_S goes on."""
        with self._lock:
            self._table.release(route)
            in_doubt = self._table.doubt(route)
            self._serve(route.record.action)
        if in_doubt:
            timer = threading.Timer(DOUBT_S, self.trust, [route.record])
            timer.daemon = True
            timer.start()

    def trust(self, record: InstanceRecord) -> None:
        """Send requests again to a pipeline that lost one, if it has reported since that it takes some."""
        with self._lock:
            if self._table.trust(record.instance_id, time.monotonic()):
                self._serve(record.action)

    def must_ask(self, ticket: Ticket) -> bool:
        """True when this request is to call retry(): it is the next, and an instance refused a request.  It is woken
        when this becomes true."""
        with self._lock:
            queue = self._queues.get(ticket.action)
            return queue is not None and queue[0] is ticket and self._table.is_any_full(ticket.action)

    def retry(self, action: ActionName) -> None:
        """Ask instances again that refused a while ago."""
        with self._lock:
            self._table.retry_full(action)
            self._serve(action)

    # calls by events -----------------------------------------------------------------------------------------------

    def instance_changed(self, record: InstanceRecord) -> None:
        with self._lock:
            if self._table.apply(record, time.monotonic()) or record.state is not InstanceState.STARTING:
                self._serve(record.action)
                for ticket in takewhile(lambda t: t.ahead, reversed(self._queues.get(record.action, ()))):
                    ticket.event.set()
            else:
                of_group = f" (stage {record.stage + 1} of {record.n_stages})" if record.n_stages > 1 else ""
                self._notify(record.action, f"starting on {record.host_id}{of_group}")

    def say(self, said: Mapping[ActionName, str]) -> None:
        """Tell the clients that wait how far the starts of their models are.  A client that comes later reads the last
        sentence at once, until ``say`` leaves its action out."""
        with self._lock:
            for action, sentence in said.items():
                if self._said.get(action) != sentence:
                    self._notify(action, sentence)
            self._said = dict(said)

    def is_waited_for(self, action: ActionName) -> bool:
        with self._lock:
            return action in self._queues

    def reload(self, records: Collection[InstanceRecord]) -> list[Ticket]:
        """Take over the registry's truth after a (re)connection.  Returns the requests that still wait."""
        with self._lock:
            for action in self._table.replace(records, time.monotonic()):
                self._serve(action)
            waiting = [t for queue in self._queues.values() for t in queue]
            for ticket in waiting:
                ticket.look()  # it may have missed that its action changed
            return waiting

    def all_waiting(self) -> list[Ticket]:
        with self._lock:
            return [t for queue in self._queues.values() for t in queue]

    def waiting(self, action: ActionName, activation_id: ActivationId) -> Ticket | None:
        with self._lock:
            return next((t for t in self._queues.get(action, ()) if t.activation_id == activation_id), None)

    def fail(self, action: ActionName, activation_ids: Collection[ActivationId], error: ThawError) -> None:
        with self._lock:
            self._fail([t for t in self._queues.get(action, ()) if t.activation_id in activation_ids], error)

    def fail_all(self, action: ActionName, error: ThawError) -> None:
        """Fail every request that asked for the action, whatever action serves it."""
        with self._lock:
            self._fail([t for queue in self._queues.values() for t in queue if t.is_of(action)], error)

    def _fail(self, tickets: Sequence[Ticket], error: ThawError) -> None:
        for ticket in tickets:
            self._unqueue(ticket)
            ticket.error = error
            ticket.event.set()

    def action_changed(self, action: ActionName) -> None:
        """Let every request that asked for the action, or is served by it, check which action and version serves it
        now."""
        with self._lock:
            for ticket in (t for queue in self._queues.values() for t in queue):
                if ticket.action == action or ticket.is_of(action):
                    ticket.look()

    def retire(self, action: ActionName) -> None:
        """The action was deleted: its instances are no routes for a later action of its name."""
        with self._lock:
            self._table.retire(action)

    def serving(self, action: ActionName) -> tuple[Serving, ...]:
        """Return the instances that take the action's requests, for answers about the action."""
        with self._lock:
            return self._table.serving(action)

    # metrics -------------------------------------------------------------------------------------------------------

    def counts(self) -> tuple[int, int]:
        """(requests waiting, routes)."""
        with self._lock:
            return sum(map(len, self._queues.values())), self._table.count()

    def queue(self, action: ActionName) -> Queue:
        namespace = action.partition("/")[0] + "/"
        with self._lock:
            queue = self._queues.get(action, ())
            within = sum(len(q) - self._moving[a] for a, q in self._queues.items() if a.startswith(namespace))
            oldest_s = next((t.since_s for t in queue if not t.moves), None)
            handed_s = tuple(self._handed.get(action, ()))
            return Queue(len(queue) - self._moving[action], within, oldest_s, handed_s, self._table.groups(action))

    def _serve(self, action: ActionName) -> None:
        """Hand free slots on.  A request that can use only some instances does not hold up one that can use any."""
        n_passed = 0
        while len(queue := self._queues.get(action, ())) > n_passed:
            ticket = queue[n_passed]
            if not self._settle(ticket):
                if not (ticket.exact or ticket.model_version):
                    return
                n_passed += 1
                continue
            if ticket.route is not None and not ticket.moves:
                self._handed.setdefault(action, deque(maxlen=_HANDED_KEPT)).append(time.monotonic())
            self._unqueue(ticket)
            ticket.event.set()

    def _settle(self, ticket: Ticket) -> bool:
        """Give the request a route if there is one for it, or an error if no start will bring one: once another version
        of the model serves, every further start takes that one, too."""
        ticket.route = self._table.take(
            ticket.action,
            ticket.version,
            exact=ticket.exact,
            moves=ticket.moves,
            model_version=ticket.model_version,
        )
        if ticket.route is None and ticket.model_version:
            other = self._table.other_model(ticket.action, ticket.model_version)
            ticket.error = _begun_with_another(ticket.model_version, other) if other else None
        return ticket.route is not None or ticket.error is not None

    def _notify(self, action: ActionName, notice: str) -> None:
        for ticket in self._queues.get(action, ()):
            ticket.notices.append(notice)
            ticket.event.set()

    def _wake_asking(self, action: ActionName) -> None:
        queue = self._queues.get(action)
        if queue and self._table.is_any_full(action):
            queue[0].event.set()

    def _unqueue(self, ticket: Ticket) -> None:
        queue = self._queues[ticket.action]
        queue.remove(ticket)
        self._moving[ticket.action] -= ticket.moves
        if not queue:
            del self._moving[ticket.action]
            del self._queues[ticket.action]
            self._handed.pop(ticket.action, None)
        self._wake_asking(ticket.action)


def _begun_with_another(began: str, other: str) -> WorkerLost:
    return WorkerLost(
        f"the worker of this answer was lost; version {versions.short(began)} of the model began it, and "
        f"{versions.short(other)} has taken its place",
        hint="send the request again",
    )


def _place(queue: Sequence[Ticket], ticket: Ticket) -> int:
    """Return the place behind all older requests, and before those that are ahead of their calls.  The search begins at
    the end, where nearly every request belongs."""
    at = len(queue)
    while at > 0 and (queue[at - 1].ahead, queue[at - 1].since_s) > (ticket.ahead, ticket.since_s):
        at -= 1
    return at

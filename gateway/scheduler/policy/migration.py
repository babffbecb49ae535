"""Live migration of one run: who does what next, and what becomes of it when something fails (ServerlessLLM 5.2, 5.4).

An interface: nothing in the platform moves a run between hosts yet.  ``startup.py`` plans moves and says what they
cost; this is the other half, the order that whoever carries them out must follow.  Pure: state and event in, state and
commands out.

::

    LOADING ──2 loaded──▶ ASKING ──3 accepted──▶ RESUMING ──4 caught up──▶ SWITCHING ──5 routed──▶ MOVED
    dest loads the        source is asked        dest recomputes the       source stops, sends     the route table
    model, unless idle    to migrate             tokens, in rounds         the last tokens         names dest
       │                     │                      │                         │
       └──── the run ends, the source fails, the destination fails: TABLE ────┘──▶ ENDED

The source answers its client until the route is switched, so before that no failure of the destination costs a token.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final, NamedTuple


class State(enum.StrEnum):
    LOADING = "loading"  # the destination loads the run's model
    ASKING = "asking"  # the source was asked to migrate and has not sent its tokens yet
    RESUMING = "resuming"  # the destination recomputes what was said so far
    SWITCHING = "switching"  # the source has stopped; its last tokens are on their way, then the route
    MOVED = "moved"
    ENDED = "ended"  # without having moved


class Event(enum.StrEnum):
    LOADED = "loaded"
    RESUME_ACCEPTED = "resume accepted"  # the source's tokens have reached the destination
    CAUGHT_UP = "caught up"  # what the destination lacks is small enough to stop for
    ROUTED = "routed"
    RUN_ENDED = "run ended"  # the source has said its last token
    SOURCE_FAILED = "source failed"
    DEST_FAILED = "destination failed"


class Command(enum.StrEnum):
    ASK_SOURCE = "source: migrate"
    RESUME_AT_DEST = "destination: resume these tokens"
    STOP_SOURCE = "source: stop, send the last tokens"
    ROUTE_TO_DEST = "route table: the destination"
    RELEASE_SOURCE = "source: drop the run"  # its device is free for whom it was moved away
    DROP_KV_AT_DEST = "destination: stop resuming, drop the KV cache"
    UNLOAD_AT_DEST = "destination: unload the model"
    CANCEL_LOAD_AT_DEST = "destination: cancel the load"
    TELL_SOURCE = "source: it is off, go on"
    RETRY_ELSEWHERE = "request: again, on another worker"


class Step(NamedTuple):
    state: State
    commands: tuple[Command, ...] = ()


_ENDED: Final = State.ENDED

TABLE: Final[Mapping[tuple[State, Event], Step]] = {
    # as it goes
    (State.LOADING, Event.LOADED): Step(State.ASKING, (Command.ASK_SOURCE,)),
    (State.ASKING, Event.RESUME_ACCEPTED): Step(State.RESUMING, (Command.RESUME_AT_DEST,)),
    (State.RESUMING, Event.CAUGHT_UP): Step(State.SWITCHING, (Command.STOP_SOURCE, Command.ROUTE_TO_DEST)),
    (State.SWITCHING, Event.ROUTED): Step(State.MOVED, (Command.RELEASE_SOURCE,)),
    # the run ends first: the source answers as usual; the destination keeps the model, as an idle instance
    (State.LOADING, Event.RUN_ENDED): Step(_ENDED),
    (State.ASKING, Event.RUN_ENDED): Step(_ENDED),
    (State.RESUMING, Event.RUN_ENDED): Step(_ENDED, (Command.DROP_KV_AT_DEST,)),
    (State.SWITCHING, Event.RUN_ENDED): Step(_ENDED, (Command.DROP_KV_AT_DEST,)),
    # the source fails: nobody needs the model there any more, and its request begins again like any other's
    (State.LOADING, Event.SOURCE_FAILED): Step(_ENDED, (Command.CANCEL_LOAD_AT_DEST, Command.UNLOAD_AT_DEST,
                                                        Command.RETRY_ELSEWHERE)),
    (State.ASKING, Event.SOURCE_FAILED): Step(_ENDED, (Command.UNLOAD_AT_DEST, Command.RETRY_ELSEWHERE)),
    (State.RESUMING, Event.SOURCE_FAILED): Step(_ENDED, (Command.DROP_KV_AT_DEST, Command.UNLOAD_AT_DEST,
                                                         Command.RETRY_ELSEWHERE)),
    (State.SWITCHING, Event.SOURCE_FAILED): Step(_ENDED, (Command.DROP_KV_AT_DEST, Command.UNLOAD_AT_DEST,
                                                          Command.RETRY_ELSEWHERE)),
    # the destination fails (the paper prints "source" for this paragraph too; R22): the source has never stopped
    (State.LOADING, Event.DEST_FAILED): Step(_ENDED),
    (State.ASKING, Event.DEST_FAILED): Step(_ENDED, (Command.TELL_SOURCE,)),
    (State.RESUMING, Event.DEST_FAILED): Step(_ENDED, (Command.TELL_SOURCE,)),
    (State.SWITCHING, Event.DEST_FAILED): Step(_ENDED, (Command.TELL_SOURCE,)),
}  # fmt: skip


def step(state: State, event: Event) -> Step:
    """What follows.  A word that crossed another (late, repeated, after the end) changes nothing."""
    return TABLE.get((state, event), Step(state))


class Rounds(NamedTuple):
    """Tokens that the destination recomputes while the source goes on saying more: ServerlessLLM's multi-round
    migration.  ``n_rounds`` is 0 when the destination is no faster than the source: then it never catches up."""

    n_rounds: int
    resume_s: float
    stopped_s: float  # how long nobody answers: the last round and the switch


def rounds(t_in: float, t_out: float, *, resume_per_token_s: float, round_s: float, token_s: float,
           few: int = 10) -> Rounds:  # fmt: skip
    """How long a migration lasts: each round brings what was said during the last one (seconds; tokens).

    ``a*(t_in + t_out) + b`` of the planner is the first one; the source stops when ``few`` tokens or less are missing,
    or when a round brings no more than that.
    """
    if resume_per_token_s >= token_s:
        return Rounds(0, float("inf"), float("inf"))
    missing, n, total_s = t_in + t_out, 0, 0.0
    while missing > few:
        took_s = resume_per_token_s * missing + round_s
        said = took_s / token_s
        n, total_s = n + 1, total_s + took_s
        gained, missing = missing - said, said
        if gained <= few:
            break
    last_s = resume_per_token_s * missing + round_s
    return Rounds(n, total_s + last_s, last_s)

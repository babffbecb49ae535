"""Live migration of one run: the next step of each side, and the rules for failures (ServerlessLLM 5.2, 5.4).

This is an interface: nothing in the platform moves a run between hosts yet.  ``serverlessllm.py`` plans moves and says
what they cost; this file is the other half, the order in which a component that moves a run must proceed.  It is
pure: state and event in, state and commands out.

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
    RESUMING = "resuming"  # the destination recomputes the tokens so far
    SWITCHING = "switching"  # the source has stopped; its last tokens are on their way, and the route is switched next
    MOVED = "moved"
    ENDED = "ended"  # without having moved


class Event(enum.StrEnum):
    LOADED = "loaded"
    RESUME_ACCEPTED = "resume accepted"  # the source's tokens have reached the destination
    CAUGHT_UP = "caught up"  # few enough tokens are missing at the destination to stop the source
    ROUTED = "routed"
    RUN_ENDED = "run ended"  # the source has produced its last token
    SOURCE_FAILED = "source failed"
    DEST_FAILED = "destination failed"


class Command(enum.StrEnum):
    ASK_SOURCE = "source: migrate"
    RESUME_AT_DEST = "destination: resume these tokens"
    STOP_SOURCE = "source: stop, send the last tokens"
    ROUTE_TO_DEST = "route table: the destination"
    RELEASE_SOURCE = "source: drop the run"  # its device is free for the start that the run was moved for
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
    # the normal course
    (State.LOADING, Event.LOADED): Step(State.ASKING, (Command.ASK_SOURCE,)),
    (State.ASKING, Event.RESUME_ACCEPTED): Step(State.RESUMING, (Command.RESUME_AT_DEST,)),
    (State.RESUMING, Event.CAUGHT_UP): Step(State.SWITCHING, (Command.STOP_SOURCE, Command.ROUTE_TO_DEST)),
    (State.SWITCHING, Event.ROUTED): Step(State.MOVED, (Command.RELEASE_SOURCE,)),
    # the run ends first: the source answers as usual; the destination keeps the model, as an idle instance
    (State.LOADING, Event.RUN_ENDED): Step(_ENDED),
    (State.ASKING, Event.RUN_ENDED): Step(_ENDED),
    (State.RESUMING, Event.RUN_ENDED): Step(_ENDED, (Command.DROP_KV_AT_DEST,)),
    (State.SWITCHING, Event.RUN_ENDED): Step(_ENDED, (Command.DROP_KV_AT_DEST,)),
    # the source fails: no run needs the model at the destination any more, and the request starts again like others
    (State.LOADING, Event.SOURCE_FAILED): Step(
        _ENDED, (Command.CANCEL_LOAD_AT_DEST, Command.UNLOAD_AT_DEST, Command.RETRY_ELSEWHERE)
    ),
    (State.ASKING, Event.SOURCE_FAILED): Step(_ENDED, (Command.UNLOAD_AT_DEST, Command.RETRY_ELSEWHERE)),
    (State.RESUMING, Event.SOURCE_FAILED): Step(
        _ENDED, (Command.DROP_KV_AT_DEST, Command.UNLOAD_AT_DEST, Command.RETRY_ELSEWHERE)
    ),
    (State.SWITCHING, Event.SOURCE_FAILED): Step(
        _ENDED, (Command.DROP_KV_AT_DEST, Command.UNLOAD_AT_DEST, Command.RETRY_ELSEWHERE)
    ),
    # the destination fails: the source has never stopped (the paper prints "source" for this paragraph too; that is R22
    # of tests/scheduler/test_ambiguities.py)
    (State.LOADING, Event.DEST_FAILED): Step(_ENDED),
    (State.ASKING, Event.DEST_FAILED): Step(_ENDED, (Command.TELL_SOURCE,)),
    (State.RESUMING, Event.DEST_FAILED): Step(_ENDED, (Command.TELL_SOURCE,)),
    (State.SWITCHING, Event.DEST_FAILED): Step(_ENDED, (Command.TELL_SOURCE,)),
}


def step(state: State, event: Event) -> Step:
    """Return what follows.  A message that comes late, repeatedly or after the end changes nothing."""
    return TABLE.get((state, event), Step(state))


class Rounds(NamedTuple):
    """ServerlessLLM's multi-round migration: the destination recomputes tokens while the source produces more of them.
    ``n_rounds`` is 0 when the destination is no faster than the source: then it never catches up."""

    n_rounds: int
    resume_s: float
    stopped_s: float  # how long no host answers: the last round and the switch


def rounds(
    t_in: float, t_out: float, *, resume_per_token_s: float, round_s: float, token_s: float, few: int = 10
) -> Rounds:
    """Return how long a migration lasts.  Each round recomputes the tokens that were produced during the last one
    (seconds; tokens).

    The planner's ``a*(t_in + t_out) + b`` is the first round.  The source stops when ``few`` tokens or less are
    missing, or when a round gains no more than that.
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

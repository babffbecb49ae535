"""A running LLM request moves to another worker: the commands that follow each event (ServerlessLLM 5.2 to 5.4).

migration.py carries this out.  This file is pure: state and event in, state and commands out.

::

    ASKING ─slot found─▶ RESUMING ─caught up─▶ CAUGHT_UP ─token boundary─▶ SWITCHING ─first message─▶ MOVED
    a slot elsewhere     the destination       few enough tokens           the run reads no more       it reads the
    is asked for, like   computes the tokens   are missing there           from the source; the        destination
    any other            so far, in rounds                                 destination has all tokens
       ▲                    │                     │                           │
       ├────────────────────┴── others took the slot ─────────────────────────┤
       │                    │                     │                           │
       └── the run ends or stays, the source or the destination fails ────────┘──▶ ENDED, without having moved

Two rules keep every token.  The run reads from one worker at a time.  And the source is stopped only when the
destination has sent its first message: until then the source computes on, its tokens wait in the connection, and the
run goes on reading there if the destination fails.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final, NamedTuple

FEW_TOKENS: Final = 10
"""The source may be stopped when so many tokens or fewer are missing at the destination (ServerlessLLM's number): a
destination computes them in one step, so a further round would not make the pause shorter."""


MANY_TOKENS: Final = 64
"""The source is not stopped when more tokens are missing, though rounds make them no fewer: the destination computes
them in one step on a GPU, and for seconds where it has no time."""

SLOW_ROUND_S: Final = 2.0
"""A client may think that its answer has stopped when no token comes for longer than this."""

IN_VAIN: Final = 1
"""The number of rounds in vain that are allowed: a round may be slow once, when it meets a new batch size."""

PATIENCE_S: Final = 1.0
"""The time that the switch may take beyond two rounds: a new connection, and a step of the requests that run there."""


class State(enum.StrEnum):
    ASKING = "asking"
    RESUMING = "resuming"
    CAUGHT_UP = "caught up"
    SWITCHING = "switching"
    MOVED = "moved"
    ENDED = "ended"  # without having moved


class Event(enum.StrEnum):
    SLOT_FOUND = "slot found"
    CAUGHT_UP = "caught up"
    BOUNDARY = "boundary"  # the run has read a token and not yet asked for the next one
    FIRST_MESSAGE = "first message"  # it comes from the destination, which answers from now on
    RUN_ENDED = "run ended"  # it has its last token, failed, or its client has gone
    STAYS = "stays"  # the host is not emptied after all
    SOURCE_FAILED = "source failed"
    DEST_FAILED = "destination failed"  # or it could not be started, or refused
    DEST_BUSY = "destination busy"  # other gateways have taken its slots
    OVERDUE = "overdue"  # no token boundary came: the client may have stopped reading


class Command(enum.StrEnum):
    COMPUTE_AT_DEST = "destination: compute these tokens"
    SEND_TO_DEST = "destination: answer from here"
    STOP_SOURCE = "source: stop"  # its slot is free then
    ASK_AGAIN = "queue: it wants a slot again"
    LEAVE_QUEUE = "queue: it wants no slot any more"
    DROP_AT_DEST = "destination: stop, and take the slot back"
    CONTINUE_AT_DEST = "run: go on at the destination, from the tokens emitted"


class Step(NamedTuple):
    state: State
    commands: tuple[Command, ...] = ()


_LEAVES: Final = Step(State.ENDED, (Command.LEAVE_QUEUE,))
_DROPS: Final = Step(State.ENDED, (Command.DROP_AT_DEST,))
_ASKS_AGAIN: Final = Step(State.ASKING, (Command.DROP_AT_DEST, Command.ASK_AGAIN))

TABLE: Final[Mapping[tuple[State, Event], Step]] = {
    # the normal course
    (State.ASKING, Event.SLOT_FOUND): Step(State.RESUMING, (Command.COMPUTE_AT_DEST,)),
    (State.RESUMING, Event.CAUGHT_UP): Step(State.CAUGHT_UP),
    (State.CAUGHT_UP, Event.BOUNDARY): Step(State.SWITCHING, (Command.SEND_TO_DEST,)),
    (State.SWITCHING, Event.FIRST_MESSAGE): Step(State.MOVED, (Command.STOP_SOURCE,)),
    # the run ends first: the source has answered as usual, and the destination keeps the model as an idle instance
    (State.ASKING, Event.RUN_ENDED): _LEAVES,
    (State.RESUMING, Event.RUN_ENDED): _DROPS,
    (State.CAUGHT_UP, Event.RUN_ENDED): _DROPS,
    (State.SWITCHING, Event.RUN_ENDED): _DROPS,
    # the drain is withdrawn: the source goes on
    (State.ASKING, Event.STAYS): _LEAVES,
    (State.RESUMING, Event.STAYS): _DROPS,
    (State.CAUGHT_UP, Event.STAYS): _DROPS,
    # the source fails.  While it switches, nobody reads from it, so nobody notices.
    (State.ASKING, Event.SOURCE_FAILED): _LEAVES,  # the run waits for a slot as every run that lost its worker
    (State.RESUMING, Event.SOURCE_FAILED): Step(State.ENDED, (Command.CONTINUE_AT_DEST,)),
    (State.CAUGHT_UP, Event.SOURCE_FAILED): Step(State.ENDED, (Command.CONTINUE_AT_DEST,)),
    # the destination fails: the source has never stopped (the paper prints "source" for this paragraph too; that is R22
    # of tests/scheduler/test_ambiguities.py)
    (State.ASKING, Event.DEST_FAILED): _LEAVES,
    (State.RESUMING, Event.DEST_FAILED): _DROPS,
    (State.CAUGHT_UP, Event.DEST_FAILED): _DROPS,
    (State.SWITCHING, Event.DEST_FAILED): _DROPS,
    # others were quicker, which is no failure: the same move asks again
    (State.RESUMING, Event.DEST_BUSY): _ASKS_AGAIN,
    (State.SWITCHING, Event.DEST_BUSY): _ASKS_AGAIN,
    # a run whose client does not read holds no slot at the destination for ever
    (State.CAUGHT_UP, Event.OVERDUE): _DROPS,
}


def step(state: State, event: Event) -> Step:
    """Return the next state and its commands.  A message that comes late, repeatedly or after the end changes
    nothing."""
    return TABLE.get((state, event), Step(state))


def is_enough(missing: float, gained: float, few: float = FEW_TOKENS) -> bool:
    """Return True when no further round shall follow one after which ``missing`` tokens are missing at the destination,
    ``gained`` fewer than before it."""
    return missing <= few or gained <= few


class Next(enum.Enum):
    ROUND = enum.auto()
    SWITCH = enum.auto()
    GIVE_UP = enum.auto()


def after_round(missing: int, gained: int, took_s: float, n_in_vain: int) -> Next:
    """Return the event that follows a round.  Nobody answers the client during the switch, and the last round says how
    long that takes, so there is none after a slow round.  ``n_in_vain``: the rounds before it that led neither to the
    switch nor much nearer to it."""
    if is_enough(missing, gained) and missing <= MANY_TOKENS and took_s <= SLOW_ROUND_S:
        return Next.SWITCH
    return Next.ROUND if gained > FEW_TOKENS or n_in_vain < IN_VAIN else Next.GIVE_UP


def patience_s(last_round_s: float, most_s: float) -> float:
    """Return how long the first message of the destination may take: it computes no more than in its last round."""
    return min(most_s, 2 * last_round_s + PATIENCE_S)


class Rounds(NamedTuple):
    """How long a migration is expected to take.  ``n_rounds`` is 0 when the destination never catches up, because it is
    no faster than the source."""

    n_rounds: int
    resume_s: float
    stopped_s: float  # how long no host answers: the last round and the switch


def rounds(
    t_in: float, t_out: float, *, resume_per_token_s: float, round_s: float, token_s: float, few: float = FEW_TOKENS
) -> Rounds:
    """Return how long a migration lasts.  Each round recomputes the tokens that were produced during the last one
    (seconds; tokens).

    The planner's ``a*(t_in + t_out) + b`` is the first round.
    """
    if resume_per_token_s >= token_s:
        return Rounds(0, float("inf"), float("inf"))
    missing, n, total_s = t_in + t_out, 0, 0.0
    while missing > few:
        took_s = resume_per_token_s * missing + round_s
        said = took_s / token_s
        n, total_s = n + 1, total_s + took_s
        gained, missing = missing - said, said
        if is_enough(missing, gained, few):
            break
    last_s = resume_per_token_s * missing + round_s
    return Rounds(n, total_s + last_s, last_s)

"""The life of an instance as one table: state x event → next state and effect.  Pure.

::

    STARTING ─up─▶ INITIALISING ─init_done─▶ IDLE ◀─last_run_ended── BUSY
        │              │                      │  ──────run_began─────▶ │
        │              │                      └──release──▶ STOPPING ◀─┴── DRAINING ◀─drain─ BUSY
        │              │                                                      └──undrain──────▶
        └─start_failed─┴──cancel──▶ STOPPING ──exited / stopped──▶ GONE

STARTING: memory is held, bytes are being fetched, the container is being made.  STOPPING: the process was asked to
end.  ``exited`` may come in any state (kill -9).  A cell of the table reads ``next/effect``; ``.`` means that the event
changes nothing, ``!`` that the event is refused.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from thaw.instance import InstanceState


class State(enum.StrEnum):
    STARTING = "starting"
    INITIALISING = "initialising"
    IDLE = "idle"
    BUSY = "busy"
    DRAINING = "draining"
    STOPPING = "stopping"
    GONE = "gone"


class Event(enum.StrEnum):
    UP = "up"  # the container's socket answers
    INIT_DONE = "init_done"
    START_FAILED = "start_failed"
    CANCEL = "cancel"  # the group is given up
    RUN_BEGAN = "run_began"
    LAST_RUN_ENDED = "last_run_ended"
    RELEASE = "release"  # only if idle
    DRAIN = "drain"  # finish the runs in progress, take nothing new
    UNDRAIN = "undrain"  # stay after all
    DEADLINE = "deadline"  # a drain took too long
    EXITED = "exited"  # the process is no more
    STOPPED = "stopped"  # our own clean-up is complete


class Effect(enum.StrEnum):
    NONE = "none"
    REFUSE = "refuse"
    INIT = "init"  # send /init
    READY = "ready"  # announce READY
    FLIP = "flip"  # idle ↔ busy: announce when convenient
    ANNOUNCE = "announce"  # it drains, or does so no more: announce that at once
    STOP = "stop"  # announce DRAINING if it served, then end the process
    BURY = "bury"  # close its descriptor socket, free memory, announce GONE


@dataclass(frozen=True, slots=True)
class Step:
    state: State
    effect: Effect


_GRID: Final = """
                starting       initialising   idle           busy             draining       stopping   gone
up              initialising/init  .          .              .                .              .          .
init_done       .              idle/ready     .              .                .              .          .
start_failed    stopping/stop  stopping/stop  .              .                .              .          .
cancel          stopping/stop  stopping/stop  .              .                .              .          .
run_began       !              !              busy/flip      busy/none        !              !          !
last_run_ended  .              .              .              idle/flip        stopping/stop  .          .
release         !              !              stopping/stop  !                .              .          .
drain           stopping/stop  stopping/stop  stopping/stop  draining/announce  .            .          .
undrain         .              .              .              .                busy/announce  .          .
deadline        .              .              .              .                stopping/stop  .          .
exited          gone/bury      gone/bury      gone/bury      gone/bury        gone/bury      gone/bury  .
stopped         gone/bury      gone/bury      gone/bury      gone/bury        gone/bury      gone/bury  .
"""


def _parse(grid: str) -> dict[tuple[State, Event], Step]:
    header, *rows = [line.split() for line in grid.strip().splitlines()]
    states = [State(name) for name in header]
    table: dict[tuple[State, Event], Step] = {}
    for event, *cells in rows:
        for state, cell in zip(states, cells, strict=True):
            table[state, Event(event)] = _step(state, cell)
    return table


def _step(state: State, cell: str) -> Step:
    if cell in (".", "!"):
        return Step(state, Effect.NONE if cell == "." else Effect.REFUSE)
    name, _, effect = cell.partition("/")
    return Step(State(name), Effect(effect))


TABLE: Final = _parse(_GRID)


def step(state: State, event: Event) -> Step:
    return TABLE[state, event]


PUBLIC: Final = {
    State.STARTING: InstanceState.STARTING,
    State.INITIALISING: InstanceState.STARTING,
    State.IDLE: InstanceState.READY,
    State.BUSY: InstanceState.READY,
    State.DRAINING: InstanceState.DRAINING,
    State.STOPPING: InstanceState.DRAINING,
    State.GONE: InstanceState.GONE,
}
"""How the registry sees a state."""

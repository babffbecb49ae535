"""Which errors mean that a run goes on at another instance, and what each of them says of the one that it leaves.

An error means the same whether it comes instead of an answer or in the middle of one: an instance that has accepted a
run may find only then that it cannot begin it.  Every caller that sends runs asks here, so an error that is added to
the list is followed everywhere.
"""

from __future__ import annotations

import enum
from typing import Final

from gateway.serving.routing.invoker_pool import Unreachable
from gateway.serving.routing.routes import Route
from gateway.serving.routing.waiting_room import WaitingRoom
from thaw.errors import InstanceBusy, InstanceGone, WorkerLost


class Sign(enum.Enum):
    """What an error says of the instance, and of the run."""

    GONE = enum.auto()  # it takes no runs any more, and nothing ran
    BUSY = enum.auto()  # it takes none now, and nothing ran
    LOST = enum.auto()  # it was lost, and may have run


_SIGNS: Final = {InstanceGone: Sign.GONE, InstanceBusy: Sign.BUSY, Unreachable: Sign.BUSY, WorkerLost: Sign.LOST}


def sign_of(error: BaseException | None) -> Sign | None:
    """None: the error is the run's own, and ends it."""
    return next((sign for cls, sign in _SIGNS.items() if isinstance(error, cls)), None)


def give_back(room: WaitingRoom, route: Route, error: BaseException | None) -> None:
    """Give a run's slot back.  ``error``: what it ended with there, if it did not end well."""
    match sign_of(error):
        case Sign.LOST:
            room.lost(route)
        case None:
            room.release(route)
        case sign:
            room.refused(route, gone=sign is Sign.GONE)

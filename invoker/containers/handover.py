"""The end of an invoker that leaves its containers to the next one on its host.

::

    no run is taken any more ──▶ runs in progress may finish ──▶ what cannot stay is ended ──▶ the rest is left

A container stays if it has served and needs nobody else: it has no run, or it is a model's, whose requests go on
elsewhere or in the same container later.  A start in progress is ended, and so is a stage of a pipeline: what connects
it with the others ends with its invoker.  A function that still runs after the drain is ended as at any other stop.
Nothing is announced of what stays: the next invoker announces it, under its own address, before it reports the host.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from invoker.containers.fleet import Fleet
from invoker.containers.instance import State
from invoker.containers.live import Live
from thaw.action import KIND_LLM

_ENDS_S: Final = 5.0  # a container's end after its drain


def hand_over(fleet: Fleet, drain_s: float) -> Sequence[Live]:
    """Call this when no run is taken any more.  Returns the instances that stay, when all others have ended or have had
    their time."""
    deadline = time.monotonic() + drain_s
    lives = fleet.all()
    staying = [live for live in lives if _can_stay(live)]
    for live in lives:
        if live not in staying:
            fleet.release(live.record.instance_id, only_idle=False, drain_s=drain_s)
    for live in staying:
        if not live.idle.wait(max(0.0, deadline - time.monotonic())) and live.kind != KIND_LLM:
            fleet.release(live.record.instance_id, only_idle=False, drain_s=0.0)
            staying = [other for other in staying if other is not live]
    for live in lives:
        if live not in staying and not live.gone.wait(max(0.0, deadline + _ENDS_S - time.monotonic())):
            fleet.log.event("instance_left", instance_id=live.record.instance_id)
    left = [live for live in staying if not live.gone.is_set()]
    for live in left:
        live.drop_connections()
    return left


def _can_stay(live: Live) -> bool:
    with live.lock:  # a run that was taken a moment ago is counted now
        serves = live.state in (State.IDLE, State.BUSY)
        needs_fetchd = live.fetching or live.ungranted
        return serves and not live.in_group and not live.record.is_consolidating and not needs_fetchd

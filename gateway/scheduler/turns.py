"""Whose turn it is when memory comes free: the action whose oldest request is due first.

Deadlines are moments (arrival + objective), so whoever waits comes nearer to the front with every second: a newcomer
with a tighter objective overtakes only as long as it is really due earlier, and nobody starves behind equals.
"""

from __future__ import annotations

import math

from gateway.scheduler.view import ClusterView
from thaw.ids import ActionName


def in_turn(view: ClusterView) -> list[ActionName]:
    """Actions that wait for room, in order; those that only lack their minimum come last."""
    return sorted(view.blocked, key=lambda name: (due_s(view, name), name))


def due_s(view: ClusterView, name: ActionName) -> float:
    facts, oldest = view.action(name).facts, next(view.waiting(name), None)
    return math.inf if facts is None or oldest is None else oldest.queued_s + facts.slo_ttft_s

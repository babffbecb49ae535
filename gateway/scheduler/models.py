"""Models: what a host's look at one changes."""

from __future__ import annotations

from gateway.scheduler.decisions import Decision, TimerKind, Wake
from gateway.scheduler.starts import INSPECT_DEADLINE_S, RETRY_BASE_S, RETRY_CAP_S, ensure_model, fail, rescale, wake
from gateway.scheduler.view import ClusterView, ModelView
from relay.messages import CommandRefused, ModelInspected
from thaw.errors import DeveloperError, ErrorInfo, StoreUnavailable, from_info
from thaw.ids import GroupId


def inspected(view: ClusterView, event: ModelInspected, now_s: float) -> list[Decision]:
    model = view.model(event.uri)
    if event.facts is None:
        error = event.error or StoreUnavailable(f"{event.uri} could not be inspected").info()
        return _failed(view, event.uri, model, error, now_s)
    model.take(event.facts)
    model.asked, model.attempts = None, 0
    return _rescale_users(view, model, now_s)


def refused(view: ClusterView, event: CommandRefused, now_s: float) -> list[Decision]:
    for uri, model in view.models.items():
        if model.asked is not None and model.asked[1] == event.command_id:
            return _failed(view, uri, model, event.error, now_s)
    return []


def overdue(view: ClusterView, uri: str, now_s: float) -> list[Decision]:
    """No answer: counts as a failure of the store.  Without a question, it is the pause after one that ends."""
    model = view.model(uri)
    if model.asked is not None and now_s < model.asked_s + INSPECT_DEADLINE_S:
        return []  # the timer of an earlier question
    if model.asked is not None:
        error = StoreUnavailable(f"no host could look at {uri} in time", hint="is the model store up?").info()
        return _failed(view, uri, model, error, now_s)
    waiting = any(view.action(a).waiting or view.action(a).minimum for a in model.actions)
    return ensure_model(view, uri, now_s) if waiting else []


def _failed(view: ClusterView, uri: str, model: ModelView, error: ErrorInfo, now_s: float) -> list[Decision]:
    model.asked = None
    not_ours = not isinstance(from_info(error), DeveloperError)
    if not_ours and model.attempts < view.settings.max_attempts:
        return [Wake(now_s + RETRY_BASE_S * 2**model.attempts, TimerKind.INSPECT, uri)]
    model.attempts, model.fresh = 0, False
    decided: list[Decision] = []
    for name in sorted(model.actions):
        action = view.action(name)
        decided += fail(view, name, tuple(action.waiting), error, GroupId(""))
        if not_ours and action.minimum:
            decided += wake(action, name, now_s + RETRY_CAP_S, now_s)
    return decided


def _rescale_users(view: ClusterView, model: ModelView, now_s: float) -> list[Decision]:
    return [d for name in sorted(model.actions) for d in rescale(view, name, now_s)]

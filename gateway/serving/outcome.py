"""How a call ended, as OpenWhisk's record of it."""

from __future__ import annotations

from gateway.serving.call import Call
from gateway.serving.hangup import ClientGone
from gateway.serving.runs import Outcome
from thaw import wire
from thaw.activation import Activation, ActivationStatus
from thaw.clock import wall_ms
from thaw.errors import DeveloperError, RequestError, ThawError, TimeLimitExceeded
from thaw.instance import StartMode


def outcome_of(error: ThawError) -> Outcome:
    """Return the outcome of an error: the caller's fault, the function's, or ours."""
    body = {"error": error.message}
    if error.hint and not isinstance(error, (ClientGone, RequestError)):
        body["hint"] = error.hint
    if isinstance(error, (ClientGone, RequestError)):
        return Outcome(ActivationStatus.APPLICATION_ERROR, body, error=error)
    if isinstance(error, DeveloperError):
        timed_out = isinstance(error, TimeLimitExceeded)
        return Outcome(ActivationStatus.DEVELOPER_ERROR, body, timed_out=timed_out, error=error)
    return Outcome(ActivationStatus.INTERNAL_ERROR, body, error=error)


def start_mode(call: Call) -> str:
    """Return the start mode of the instance that the call ran on.  A call that reached no instance waited for a cold
    start; a sequence or composition has none."""
    if call.instance is None:
        return "" if call.action.is_composed else str(StartMode.COLD)
    return str(call.instance.start_mode if call.cold else StartMode.WARM)


def activation_of(call: Call, outcome: Outcome, logs: tuple[str, ...] = ()) -> Activation:
    """``start`` is defined as in OpenWhisk: before init for a cold run, else at the dispatch.  The wait lies before
    it."""
    instance = call.instance if call.dispatched_ms is not None else None
    init_ms = instance.init_ms if instance is not None and call.cold else None
    dispatched_ms = call.received_ms if call.dispatched_ms is None else call.dispatched_ms
    start_ms = max(call.received_ms, dispatched_ms - (init_ms or 0))
    usage = {}
    if outcome.finished is not None:
        prompt, completion = outcome.finished.prompt_tokens, outcome.finished.completion_tokens
        usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return Activation(
        activation_id=call.activation_id,
        namespace=call.subject.namespace,
        action=call.action.name,
        action_version=call.action.version,
        subject=call.subject.subject,
        kind=call.action.exec.kind,
        start_ms=start_ms,
        end_ms=max(start_ms, wall_ms()),
        status=outcome.status,
        result=outcome.result,
        logs=(*call.lines, *logs),
        wait_ms=start_ms - call.received_ms,
        init_ms=init_ms,
        start_mode=start_mode(call),
        group_id=instance.group_id if instance is not None and call.cold else "",
        host=instance.host_id if instance is not None else "",
        instance_id=instance.instance_id if instance is not None else "",
        timed_out=outcome.timed_out,
        limits=wire.to_plain(call.action.limits),
        usage=usage,
        seed=call.seed,
        cause=call.cause,
        caused_by=call.caused_by,
        binding=call.binding,
        model_version=call.model_version if instance is not None else "",
    )

"""A run as an invoker gets it: where it is sent, and its body."""

from __future__ import annotations

import time
from collections.abc import Sequence

from gateway import quick_json
from gateway.serving.call import Call
from gateway.serving.hangup import Hangup
from gateway.serving.routing.invoker_pool import InvokerPool, Reply
from gateway.serving.routing.run_keys import RunKeys
from relay.protocol.adapter_messages import ADAPTER_HEADER, LEFT_HEADER, encoded
from relay.protocol.messages import ACTIVATION_HEADER, LlmResume, LlmRun
from thaw import wire
from thaw.action import Action
from thaw.clock import wall_ms
from thaw.instance import InstanceRecord


def send_run(
    pool: InvokerPool,
    call: Call,
    record: InstanceRecord,
    *,
    deadline_s: float,
    patience_s: float | None = None,
    hangup: Hangup | None = None,
    tokens: Sequence[int] | None = None,
    prefill_only: bool = False,
) -> Reply:
    """Send ``call`` to an instance.  ``deadline_s`` (monotonic) is the run's own; the reply is given up ``patience_s``
    from now if that is earlier.  ``tokens`` are those that the client has; by default all that were emitted.  Raises
    Unreachable, WorkerLost, ClientGone, TimeLimitExceeded."""
    given_up_s = deadline_s if patience_s is None else min(deadline_s, time.monotonic() + patience_s)
    return pool.post(
        record.address,
        f"/instances/{record.instance_id}/run",
        run_body(
            call,
            deadline_s,
            call.emitted if tokens is None else tokens,
            prefill_only=prefill_only,
            run_keys=pool.run_keys,
        ),
        stream=call.action.is_llm or call.answers_apart,
        deadline_s=given_up_s,
        hangup=hangup or call.hangup,
        headers=_headers(call, deadline_s),
        instance_id=record.instance_id,
    )


def _headers(call: Call, deadline_s: float) -> str:
    headers = f"{ACTIVATION_HEADER}: {call.activation_id}\r\n"
    if adapter := call.wanted_adapter:
        left_ms = max(0, round((deadline_s - time.monotonic()) * 1000))
        headers += f"{ADAPTER_HEADER}: {encoded(adapter)}\r\n{LEFT_HEADER}: {left_ms}\r\n"
    return headers


def run_body(
    call: Call,
    deadline_s: float,
    tokens: Sequence[int],
    *,
    prefill_only: bool = False,
    run_keys: RunKeys | None = None,
) -> bytes:
    """``/run``'s body: OpenWhisk's keys; for an LLM the value is an LlmRun, with the tokens that were already
    emitted.  A function with the annotation ``provide-api-key`` gets a key from ``run_keys``."""
    value = call.payload
    if call.action.is_llm:
        resume = LlmResume(tuple(tokens), call.model_version, call.adapter) if tokens else None
        run = LlmRun(call.endpoint, call.payload, call.seed or 0, resume, prefill_only, call.wanted_adapter)
        value = wire.to_plain(run)
    deadline_ms = wall_ms() + max(0, round((deadline_s - time.monotonic()) * 1000))
    plain = {
        "value": value,
        "namespace": call.subject.namespace,
        "action_name": f"/{call.action.name}",
        "action_version": call.action.version,
        "activation_id": call.activation_id,
        "transaction_id": call.activation_id,
        "deadline": str(deadline_ms),
    }
    if run_keys is not None and _wants_key(call.action):
        plain["api_key"] = run_keys.make(call, deadline_ms)
    return quick_json.encode(plain)


def _wants_key(action: Action) -> bool:
    """Runs at once share their process's variables, so they get none (an action written before this was refused)."""
    return not action.is_llm and action.limits.concurrency == 1 and action.annotations.get("provide-api-key") is True

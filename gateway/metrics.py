"""The gateway's metrics, which Prometheus reads at /metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gateway.serving.call import Call
from gateway.serving.outcome import start_mode
from gateway.serving.runs import Outcome
from thaw.tracing.trace import Phase

REGISTRY: Final = CollectorRegistry()
_BUCKETS: Final = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)

ACTIVATIONS = Counter("thaw_gateway_activations", "Activations ended.", ("kind", "status", "start"), registry=REGISTRY)
TTFT = Histogram(
    "thaw_gateway_first_token_seconds", "Request read to first token.", ("start",), buckets=_BUCKETS, registry=REGISTRY
)
TOKENS = Counter("thaw_gateway_completion_tokens", "Tokens delivered.", registry=REGISTRY)
RECONNECTS = Counter(
    "thaw_gateway_reconnects", "Clients that went on with a stream, by where it came from.", ("way",), registry=REGISTRY
)
MOVES = Counter(
    "thaw_gateway_moves",
    "Running LLM requests that were to move to another worker, by whether they moved or stayed to their end.",
    ("way",),
    registry=REGISTRY,
)
ABSENT = Gauge("thaw_gateway_absent_streams", "Streams kept for clients that hung up.", registry=REGISTRY)
WAITING = Gauge("thaw_gateway_waiting_requests", "Requests held without a route.", registry=REGISTRY)
ROUTES = Gauge("thaw_gateway_route_count", "Ready instances this gateway knows.", registry=REGISTRY)


def ended(call: Call, outcome: Outcome) -> None:
    start = start_mode(call)
    ACTIVATIONS.labels(call.action.exec.kind, outcome.status.text, start).inc()
    TOKENS.inc(len(call.emitted))
    for end in (e for e in call.events if e.name is Phase.MOVE_END):
        MOVES.labels("stayed" if "stayed" in end.attrs else "moved").inc()
    first = next((e for e in call.events if e.name is Phase.FIRST_TOKEN), None)
    if first is not None:
        TTFT.labels(start).observe(max(0.0, first.mono_ns / 1e9 - call.received_s))


def page(counts: Callable[[], tuple[int, int]], n_absent: Callable[[], int]) -> tuple[bytes, str]:
    waiting, routes = counts()
    ABSENT.set(n_absent())
    WAITING.set(waiting)
    ROUTES.set(routes)
    return generate_latest(REGISTRY), CONTENT_TYPE_LATEST

"""The scheduler's metrics; docs/metrics.md lists them.

Labels come from bounded sets: the largest actions and hosts have their own, the others share one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gateway.scheduler.decisions import Decision, FailDemand, Flag, ReleaseInstance, StartGroup
from gateway.scheduler.events import Event, StartRefused
from gateway.scheduler.view.cluster import ClusterView
from relay.protocol.messages import DemandAdded

REGISTRY: Final = CollectorRegistry()
LARGEST: Final = 100
OTHERS: Final = "(others)"
SEVERAL: Final = "(several)"
"""Events of more than one kind that were decided together."""

LEADING = Gauge("thaw_scheduler_leading", "1 while this process leads, 0 while it stands by", registry=REGISTRY)
LEASES_LOST = Counter(
    "thaw_scheduler_leases_lost", "Leaderships that ended because the lease was lost", registry=REGISTRY
)
COMMANDS_STALE = Counter(
    "thaw_scheduler_commands_stale", "Commands that hosts refused: a newer scheduler led", registry=REGISTRY
)
RELOADS = Counter(
    "thaw_scheduler_reloads", "Views made anew: taking over, and after the state server was away", registry=REGISTRY
)
DECISIONS = Counter("thaw_scheduler_decisions", "Decisions by kind", ["type"], registry=REGISTRY)
DECISION_SECONDS = Histogram(
    "thaw_scheduler_decision_seconds",
    "From events that came together to their decisions, "
    "without carrying them out; several: events of more than one kind",
    ["event"],
    registry=REGISTRY,
    buckets=(0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.064, 0.256, 1),
)
ADMISSIONS = Counter(
    "thaw_scheduler_admissions",
    "Groups by what links promise: promised (in time), fallback (too late), no_deadline; "
    "waits: a request that found no room",
    ["outcome"],
    registry=REGISTRY,
)
STARTS_REFUSED = Counter(
    "thaw_scheduler_starts_refused", "Groups that the relay server did not let in", registry=REGISTRY
)
RELEASES = Counter(
    "thaw_scheduler_releases",
    "Instances told to go, by reason; memory: evicted for another action",
    ["reason"],
    registry=REGISTRY,
)
FAILED = Counter(
    "thaw_scheduler_requests_failed", "Waiting requests that were ended, by error", ["code"], registry=REGISTRY
)
WAITING = Gauge(
    "thaw_scheduler_waiting_requests", "Requests in line, by action (the longest queues)", ["action"], registry=REGISTRY
)
BLOCKED = Gauge("thaw_scheduler_blocked_actions", "Actions that wait for memory or for a link", registry=REGISTRY)
STARTING = Gauge("thaw_scheduler_starting_groups", "Groups of which not every stage is ready", registry=REGISTRY)
PROMISED = Gauge(
    "thaw_scheduler_link_promised_seconds",
    "For how long a host's link is promised to fetches with a deadline (the fullest)",
    ["host"],
    registry=REGISTRY,
)
PENDING = Gauge("thaw_scheduler_ledger_pending_bytes", "Bytes that all links still have to bring", registry=REGISTRY)
TTFT_RATIO = Histogram(
    "thaw_scheduler_ttft_ratio",
    "A first token's real time over the foretold one, by stages",
    ["stages"],
    registry=REGISTRY,
    buckets=(0.25, 0.5, 0.75, 0.9, 1, 1.1, 1.25, 1.5, 2, 4, 8),
)
TTFT_ERROR = Histogram(
    "thaw_scheduler_ttft_error_seconds",
    "How far a first token was from its prediction, either way, by stages",
    ["stages"],
    registry=REGISTRY,
    buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40),
)
BELOW_BOUND = Counter(
    "thaw_scheduler_starts_below_bound",
    "Starts whose first token came before the bound of their plan: they were faster than all before",
    registry=REGISTRY,
)


def decided(view: ClusterView, events: Sequence[Event], decisions: Iterable[Decision], took_s: float) -> None:
    """Count one turn of the loop: events that came together, and the decisions on them."""
    kinds = {type(event).__name__ for event in events}
    DECISION_SECONDS.labels(event=kinds.pop() if len(kinds) == 1 else SEVERAL).observe(took_s)
    for decision in decisions:
        DECISIONS.labels(type=type(decision).__name__).inc()
        match decision:
            case StartGroup():
                ADMISSIONS.labels(outcome=_outcome(decision)).inc()
            case ReleaseInstance():
                RELEASES.labels(reason=decision.reason).inc()
            case FailDemand():
                FAILED.labels(code=decision.error.code).inc(len(decision.activation_ids))
            case Flag() if decision.name == "command_stale":
                COMMANDS_STALE.inc()
    for event in events:
        if isinstance(event, DemandAdded) and event.action in view.blocked:
            ADMISSIONS.labels(outcome="waits").inc()
        if isinstance(event, StartRefused):
            STARTS_REFUSED.inc()


def _outcome(start: StartGroup) -> str:
    if start.plan.model is None:
        return "no_deadline"
    return "fallback" if start.attrs.get("fallback") is True else "promised"


def look(view: ClusterView, now_s: float) -> None:
    """Set the gauges to the present state, once a heartbeat."""
    _set(WAITING, {name: len(a.waiting) for name, a in view.actions.items() if a.waiting})
    BLOCKED.set(len(view.blocked))
    STARTING.set(sum(group.is_starting for group in view.groups.values()))
    promised, pending = dict[str, float](), 0.0
    for host in view.hosts.values():
        if host.ledger.busy_until_s > now_s:
            pending += (host.ledger.busy_until_s - now_s) * host.ledger.bytes_per_s
            promised[host.host_id] = max(0.0, host.ledger.promised_until_s - now_s)
    _set(PROMISED, promised, together=max)
    PENDING.set(pending)


def _set(gauge: Gauge, values: Mapping[str, float], together: Callable[[Iterable[float]], float] = sum) -> None:
    """Set the largest values by name, and the others as one."""
    ordered = sorted(values.items(), key=lambda item: -item[1])
    gauge.clear()
    for name, value in ordered[:LARGEST]:
        gauge.labels(name).set(value)
    if len(ordered) > LARGEST:
        gauge.labels(OTHERS).set(together(value for _, value in ordered[LARGEST:]))


def foretold(n_stages: int, predicted_s: float, bound_s: float | None, actual_s: float) -> None:
    TTFT_RATIO.labels(stages=n_stages).observe(actual_s / predicted_s)
    TTFT_ERROR.labels(stages=n_stages).observe(abs(actual_s - predicted_s))
    if bound_s is not None and actual_s < bound_s:
        BELOW_BOUND.inc()


def page() -> bytes:
    return generate_latest(REGISTRY)

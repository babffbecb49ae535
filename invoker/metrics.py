"""The invoker's metrics, served on its data port.  Labels come from bounded sets; docs/metrics.md lists them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

REGISTRY = CollectorRegistry()
STARTS = Counter("thaw_invoker_starts", "Starts by mode and ending", ["mode", "outcome"], registry=REGISTRY)
START_SECONDS = Histogram(
    "thaw_invoker_start_seconds",
    "From the command to READY",
    ["mode"],
    registry=REGISTRY,
    buckets=(0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128),
)
RUNS = Counter("thaw_invoker_runs", "Runs by ending", ["outcome"], registry=REGISTRY)
RUN_SECONDS = Histogram("thaw_invoker_run_seconds", "From the slot taken to the last byte", registry=REGISTRY)
INSTANCES = Gauge("thaw_invoker_instances", "Instances by state", ["state"], registry=REGISTRY)
INSTANCES_ENDED = Counter(
    "thaw_invoker_instances_ended", "Instances that ended, by reason", ["reason"], registry=REGISTRY
)
MEMORY_HELD = Gauge("thaw_invoker_memory_held_bytes", "Declared memory that is held", registry=REGISTRY)
COMMANDS = Counter("thaw_invoker_commands", "Commands by type and ending", ["type", "outcome"], registry=REGISTRY)


def page() -> bytes:
    return generate_latest(REGISTRY)

"""fetchd's metrics.  It listens on no network: the invoker of the host serves them behind its own.

Labels come from bounded sets; docs/metrics.md lists them.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

REGISTRY = CollectorRegistry()
BYTES = Counter(
    "thaw_fetchd_bytes",
    "Bytes put into segments: from a kind of store, or copied from memory",
    ["source"],
    registry=REGISTRY,
)
FETCHES = Counter(
    "thaw_fetchd_fetches",
    "Fetches by ending: done, failed, cancelled; resident ones moved no byte",
    ["outcome"],
    registry=REGISTRY,
)
SLOW_CONNECTIONS = Counter(
    "thaw_fetchd_slow_connections",
    "Connections to a store that were given up because another one of the same fetch was much faster",
    registry=REGISTRY,
)
RUNNING = Gauge("thaw_fetchd_fetches_running", "Fetches that run now", registry=REGISTRY)
LINK = Gauge(
    "thaw_fetchd_link_bytes_per_second", "The link, configured or measured; 0 while unknown", registry=REGISTRY
)
POOL = Gauge("thaw_fetchd_pool_bytes", "Host memory for models", registry=REGISTRY)
POOL_FREE = Gauge("thaw_fetchd_pool_free_bytes", "Of it, in no segment", registry=REGISTRY)


def page() -> str:
    return generate_latest(REGISTRY).decode()

"""The scheduler's settings for an operator, read once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from gateway.scheduler.placement.link_ledger import DISCIPLINES
from gateway.scheduler.placement.schemes import VARIANTS
from relay.state.relay_tls import TLS_SCHEME, endpoint_of
from thaw.errors import PlatformError
from thaw.model_uri import policy_of
from thaw.settings import SettingError, setting

_RELAY_SCHEMES: Final = ("redis", "rediss", "unix")
"""Stages speak no TLS themselves.  A host's invoker does, for the stages on it."""


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    state_url: str = setting("THAW_STATE_URL", "the state server, redis://host:port/0")
    start_deadline_s: float = setting(
        "THAW_START_DEADLINE_S",
        "a start without progress for so long is given up, as are looks at a model whose store is away, seconds",
        600.0,
    )
    max_attempts: int = setting("THAW_START_ATTEMPTS", "starts tried for one request before it fails", 3)
    consolidate_deadline_s: float = setting(
        "THAW_CONSOLIDATE_DEADLINE_S",
        "a host that has not said within this time what became of a pipeline that was to become one worker is asked "
        "again; longer than the hosts' THAW_CONSOLIDATE_TIMEOUT_S, seconds",
        1_000.0,
    )
    hosts_refresh_s: float = setting("THAW_HOSTS_REFRESH_S", "how often heartbeats and leases are read, seconds", 1.0)
    window_s: float = setting("THAW_SCALING_WINDOW_S", "sliding window of arrivals for scaling out, seconds", 1.0)
    discipline: str = setting("THAW_LEDGER_DISCIPLINE", "how fetches share a host's link: edf or equal", "edf")
    variant: str = setting(
        "THAW_SELECT_VARIANT", "objective of Algorithm 1: min_sharing, slides or paper", "min_sharing"
    )
    relay_url: str = setting(
        "THAW_RELAY_URL",
        "the relay server that the stages of a group meet at, redis://host:port/0, rediss:// for TLS or unix:///path; "
        "empty: no group of more than one stage",
        "",
    )
    object_address: str = setting(
        "THAW_TRANSPORT_OBJECT",
        "where stages meet that use the transport object, "
        "s3://bucket/prefix or file:///directory; empty: not available",
        "",
    )
    bind: str = setting(
        "THAW_SCHEDULER_BIND",
        "host:port of /metrics, for holders of a token; port 0 takes a free one",
        "127.0.0.1:0",
    )
    metrics_token: str = setting(
        "THAW_METRICS_TOKEN", "bearer token of /metrics, beside the installation's; empty: there is no other", ""
    )
    models: str = setting(
        "THAW_MODELS",
        "prefixes of the models that every namespace may run, separated by commas; s3:// allows every bucket. Gateways "
        "and schedulers need the same; thaw namespace allow-models adds some for one namespace",
        "s3://models",
    )
    quota_starts: int = setting(
        "THAW_QUOTA_STARTS", "starts of a namespace in progress; gateways and schedulers need the same", 1_000
    )
    stem_cell_floor: int = setting("THAW_STEM_CELL_FLOOR", "stem cells a host keeps of a kind without an action", 0)
    stem_cell_idle_s: float = setting(
        "THAW_STEM_CELL_IDLE_S", "a kind without an action for this long goes down to the floor, seconds", 600.0
    )
    stem_cell_window_s: float = setting(
        "THAW_STEM_CELL_WINDOW_S",
        "starts of the last so many seconds say how many stem cells a host keeps beyond one",
        300.0,
    )

    def __post_init__(self) -> None:
        one_of("THAW_LEDGER_DISCIPLINE", self.discipline, DISCIPLINES)
        one_of("THAW_SELECT_VARIANT", self.variant, VARIANTS)
        if self.relay_url and urlsplit(self.relay_url).scheme not in _RELAY_SCHEMES:  # a URL may hold a password
            raise SettingError(
                f"THAW_RELAY_URL has the scheme {urlsplit(self.relay_url).scheme!r}, which the stages do not speak",
                hint="use redis://, rediss:// or unix://",
            )
        if self.relay_url.startswith(TLS_SCHEME):
            try:
                endpoint_of(self.relay_url)
            except PlatformError as e:
                raise SettingError(f"THAW_RELAY_URL: {e.message}", hint=e.hint) from e
        policy_of(self.models)
        if not self.bind.rpartition(":")[2].isdigit():
            raise SettingError(f"THAW_SCHEDULER_BIND={self.bind!r} names no port", hint="set it to host:port")


def one_of(variable: str, value: str, known: Sequence[str]) -> None:
    """Raises SettingError."""
    if value not in known:
        raise SettingError(f"{variable}={value!r} is not known", hint=f"set it to one of {', '.join(known)}")

"""The upper limits for a namespace, and its weight among others.

The defaults are settings (THAW_QUOTA_...); an operator's own values for one namespace have precedence
(``thaw namespace quota``).  Every count is for the whole installation with all its gateways.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Final

from thaw.ids import Namespace

MOST_WEIGHT: Final = 1_000.0
RECORDS: Final = 1_000_000
RECORD_AGE_S: Final = 7 * 24 * 3600
"""The default age of records: OpenWhisk's records stay for a week, too."""
KEPT: Final = 16


@dataclass(frozen=True, slots=True)
class Quotas:
    """``actions`` and ``code_bytes`` count deployed actions, ``record_bytes`` the records and 202s on the state server,
    ``held`` requests that wait for an instance, ``accepted`` 202s that have not ended, ``starts`` starts in progress,
    ``kept`` instances that actions keep while nobody calls.  Beyond ``records`` and ``record_bytes`` the oldest record
    gives way to a new one, and after ``record_age_s`` seconds each one does."""

    actions: int
    code_bytes: int
    record_bytes: int
    held: int
    accepted: int
    starts: int
    weight: float = 1.0
    records: int = RECORDS
    record_age_s: int = RECORD_AGE_S
    kept: int = KEPT


@dataclass(frozen=True, slots=True)
class OwnQuotas:
    """One namespace's own values.  None: the default."""

    actions: int | None = None
    code_bytes: int | None = None
    record_bytes: int | None = None
    held: int | None = None
    accepted: int | None = None
    starts: int | None = None
    weight: float | None = None
    records: int | None = None
    record_age_s: int | None = None
    kept: int | None = None

    def over(self, default: Quotas) -> Quotas:
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return replace(default, **{name: value for name, value in own.items() if value is not None})


LEAST: Final = {"records": 1, "record_age_s": 1}
"""The least values of these quotas; the others may be 0.  If no record were kept, a client that waits for one could not
read it."""
NAMES: Final = tuple(f.name for f in dataclasses.fields(OwnQuotas))


def setting_of(name: str) -> str:
    return f"THAW_QUOTA_{name.upper()}"


def who_raises(name: str, namespace: Namespace) -> str:
    """The sentence that tells how an operator raises a quota."""
    option = name.replace("_", "-")
    return f"{setting_of(name)} is the quota for all, thaw namespace quota {namespace} --{option} N sets it for one"

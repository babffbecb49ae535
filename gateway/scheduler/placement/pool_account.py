"""How much of one host's pool of memory for models is taken, as the scheduler counts it.

A host refuses no start that was counted here.  A start counts from its decision on, and its *claim* ends when the
host's report has taken its place, so the sum is at every moment an upper bound of the slabs that the host can come to
hold::

    decided ──▶ claim ──a report names its instance among the holders──▶ counted by the reports alone
                  ├──the instance is ready, and a later report was made──▶ the same, also where fetchd has lost its pool
                  └──the instance has ended, and a report made after its begin does not name it as a user──▶ forgotten

Two starts of the same content share one segment on the host.  That is counted only where the segment is complete and
held: a segment that is still being fetched may fail, and then each start has a segment of its own for a while.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Final

from relay.protocol.pool import content_key, n_slabs
from thaw.host import PoolReport
from thaw.ids import InstanceId
from thaw.model import FileRange
from thaw.plan import PlanModel, PlanStage

UNLIMITED: Final = 1 << 40
"""The number of slabs of a host that does not report its pool."""


@dataclass(slots=True)
class Claim:
    """The part of a pool that one stage takes.  Times are wall milliseconds of its host.

    ``ready_ms``: the instance was ready at this time at the latest.  ``ended_ms``: the instance has ended; this is when
    its host had made it.
    """

    key: str
    ranges: tuple[FileRange, ...]
    is_reported: bool = False
    is_leaving: bool = False
    ready_ms: int | None = None
    ended_ms: int | None = None


def claim_of(model: PlanModel, stage: PlanStage) -> Claim:
    key = content_key(model.uri, model.version, stage.first_ranges, stage.later_ranges)
    return Claim(key, (*stage.first_ranges, *stage.later_ranges))


class PoolAccount:
    """Slabs of one host's pool."""

    def __init__(self) -> None:
        self._report: PoolReport | None = None
        self._claims: dict[InstanceId, Claim] = {}
        self._shared: frozenset[str] = frozenset()
        self._free: int | None = None
        self._doubted_ms: int | None = None

    @property
    def slab_bytes(self) -> int:
        """0 for a host that does not report its pool."""
        return 0 if self._report is None else self._report.slab_bytes

    @property
    def n_slabs(self) -> int:
        return UNLIMITED if self._report is None else self._report.n_slabs

    # changes -------------------------------------------------------------------------------------------------------

    def claim(self, instance_id: InstanceId, claim: Claim) -> None:
        """A start was decided."""
        self._claims[instance_id] = claim
        self._note_holders(instance_id)
        self._free = None

    def enlarge(self, instance_id: InstanceId, claim: Claim) -> bool:
        """Replace a start's smaller claim by ``claim``.  Return False, and change nothing, when there is no room."""
        if self.need(claim) > max(0, self.free_slabs()) + self.need(self._claims[instance_id]):
            return False
        self.claim(instance_id, claim)
        return True

    def set_leaving(self, instance_id: InstanceId, *, leaving: bool) -> None:
        """The slabs of the instance will soon be free, or will not be after all."""
        if (claim := self._claims.get(instance_id)) is not None:
            claim.is_leaving = leaving

    def ready(self, instance_id: InstanceId, ready_ms: int) -> None:
        """The instance has its part.  A report that was made after ``ready_ms`` of the host's wall clock names
        everything that the instance still holds.  A report that is read later may have been made before."""
        if (claim := self._claims.get(instance_id)) is not None and claim.ready_ms is None:
            claim.ready_ms = max(ready_ms, 0 if self._report is None else self._report.seen_wall_ms)

    def end(self, instance_id: InstanceId, created_ms: int) -> None:
        """The instance has ended.  ``created_ms``: when its host made it; 0 if the host never began it."""
        claim = self._claims.get(instance_id)
        if claim is None:
            return
        if created_ms == 0:
            del self._claims[instance_id]
        else:
            claim.is_leaving, claim.ended_ms = True, created_ms
        self._free = None

    def end_with_next_report(self, instance_id: InstanceId) -> None:
        """The instance has ended as far as is known.  A report that is newer than the last one shows what is left of
        it."""
        self.end(instance_id, 0 if self._report is None else self._report.seen_wall_ms)

    def refused(self, created_ms: int) -> None:
        """The host had no room after all for an instance that it made at ``created_ms``.  No start is placed there
        until a later report has said how its pool stands."""
        self._doubted_ms = created_ms

    def take_report(self, report: PoolReport | None) -> None:
        """Take in a report.  A host whose fetchd does not answer (None) counts as unchanged."""
        if report is None:
            self._doubted_ms = None  # no report will come that could end the doubt
            return
        went_back = self._report is not None and report.seen_wall_ms < self._report.seen_wall_ms
        if self._doubted_ms is not None and (report.seen_wall_ms > self._doubted_ms or went_back):
            self._doubted_ms = None
        last, self._report = self._report, report
        is_same = last is not None and (last.slab_bytes, last.n_slabs, last.held) == (
            report.slab_bytes,
            report.n_slabs,
            report.held,
        )
        if is_same and not self._claims:  # most hosts, most of the time
            return
        self._free = None
        self._shared = frozenset(s.key for s in report.held if s.complete)
        self._settle(report, went_back=went_back)

    def _settle(self, report: PoolReport, *, went_back: bool) -> None:
        for instance_id in {i for s in report.held for i in s.instances} & self._claims.keys():
            self._claims[instance_id].is_reported = True
        users = frozenset(report.users)
        for instance_id, claim in list(self._claims.items()):
            if claim.ready_ms is not None and (report.seen_wall_ms > claim.ready_ms or went_back):
                claim.is_reported = True
            if claim.ended_ms is None or instance_id in users:
                continue
            if report.seen_wall_ms > claim.ended_ms or went_back:
                del self._claims[instance_id]

    def _note_holders(self, instance_id: InstanceId) -> None:
        if self._report is not None and any(instance_id in s.instances for s in self._report.held):
            self._claims[instance_id].is_reported = True

    # queries -------------------------------------------------------------------------------------------------------

    @property
    def is_doubted(self) -> bool:
        return self._doubted_ms is not None

    def free_slabs(self) -> int:
        """How many slabs another start can have now; negative where more was promised than there is."""
        if self._free is None:
            self._free = self._count(frozenset())
        return self._free

    def free_without(self, instances: Set[InstanceId] = frozenset()) -> int:
        """Return the slabs that are free once these instances, and all that are leaving anyway, have gone."""
        return self._count(instances | {i for i, claim in self._claims.items() if claim.is_leaving})

    def shares(self, key: str) -> bool:
        """True when a start of this content takes no further slabs."""
        return key in self._shared

    def need(self, claim: Claim) -> int:
        """Return the number of further slabs that a start takes."""
        if self._report is None or self.shares(claim.key):
            return 0
        return n_slabs(claim.ranges, self._report.slab_bytes)

    def _count(self, gone: Set[InstanceId]) -> int:
        report = self._report
        if report is None:
            return UNLIMITED
        held = sum(s.n_slabs for s in report.held if not s.instances or not gone >= set(s.instances))
        claimed = sum(self.need(c) for i, c in self._claims.items() if not c.is_reported and i not in gone)
        return report.n_slabs - held - claimed

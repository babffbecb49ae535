"""Offer the hosts to Algorithm 1 as servers, and turn the scheme that it chooses into a placement with its reasons."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from gateway.scheduler.events import ActionFacts
from gateway.scheduler.placement import predict
from gateway.scheduler.placement.expected import predicted_terms
from gateway.scheduler.placement.plans import Choice, Seat, low_reserve
from gateway.scheduler.placement.predict import Rates, Tier, Times
from gateway.scheduler.placement.reasons import Estimate, estimates
from gateway.scheduler.placement.schemes import (
    VARIANTS,
    Placement,
    Request,
    Scheme,
    Server,
    Size,
    Variant,
)
from gateway.scheduler.placement.stage_bytes import Stages
from gateway.scheduler.view.bound_terms import StageFacts, bound_terms
from gateway.scheduler.view.cluster import ClusterView
from gateway.scheduler.view.evictable_memory import Emptied
from gateway.scheduler.view.host_index import Wanted
from gateway.scheduler.view.hosts import HostView, Room
from thaw import partition
from thaw.action import KIND_LLM
from thaw.hub.models import is_same_content
from thaw.ids import GroupId, HostId
from thaw.instance import StartMode
from thaw.plan import StageRole
from thaw.tracing import bound

_ROUNDING_S = 1e-6
EXPLAINED_HOSTS = 32
"""With up to this many hosts every size is worked out, so that a trace can give the result of each.  With more hosts a
decision must be quick, and the trace covers only the sizes that had to be worked out."""
EXPLAINED_CANDIDATES = 8
"""The trace says for this many hosts when a worker would have its part there: the chosen hosts first, then the next
best."""


def variant(view: ClusterView) -> Variant:
    return next((v for v in VARIANTS if v == view.settings.variant), "min_sharing")


def could_be_in_time(view: ClusterView, facts: ActionFacts, stages: Stages, request: Request, most: int) -> bool:
    """False when no group of up to ``most`` stages meets the objectives, wherever it is placed: not even idle links as
    fast as the fastest would bring its bytes in time, and no host has the model in its memory."""
    if view.index.with_model(stages.facts.uri, stages.facts.version):
        return True
    times, fastest = list(_times(view, facts, stages).values()), _fastest(view, facts)
    if not times or fastest <= 0:
        return False
    best = _extreme(times, min)
    return any(_latest_s(request, s, fastest, best) is not None for s in range(1, most + 1))


def _fastest(view: ClusterView, facts: ActionFacts) -> float:
    """Bytes/s of the fastest fetch."""
    return min(view.index.fastest, facts.fetch_bytes_per_s or math.inf)


def _times(view: ClusterView, facts: ActionFacts, stages: Stages) -> dict[tuple[str, StartMode], Times]:
    """The times by kind of device, without a stem cell and with one."""
    modes, n_bytes = (StartMode.COLD, StartMode.PREWARMED), stages.facts.weight_bytes
    return {(k, m): view.history.times(facts.name, k, m, n_bytes) for k in view.index.kinds() for m in modes}


def _latest_s(request: Request, s: int, fastest: float, best: Times) -> float | None:
    """Return the latest deadline, from now, that ``s`` stages on devices of the ``best`` times leave to their fetches.
    None when a fetch at ``fastest`` would not keep it, or when a token takes longer than the objective."""
    within_s = predict.fetch_time_left(request.slo_ttft, request.t_w, s, 1.0, best)
    is_possible = request.part(s) / fastest <= within_s and predict.tpot(s, 1.0, best) <= request.slo_tpot
    return within_s if is_possible else None


def _due_s(fastest: float, request: Request, most: int, times: Iterable[Times]) -> tuple[float, float]:
    """Return the earliest and the latest deadline, from now, that a fetch at ``fastest`` could keep, over all sizes,
    over these times of the workers' devices and over the shares that low workers may get."""
    known = list(times)
    if not known or fastest <= 0:
        return 0.0, 0.0
    best, worst = _extreme(known, min), _extreme(known, max)
    earliest, latest = list[float](), list[float]()
    for s in range(1, most + 1):
        if (within_s := _latest_s(request, s, fastest, best)) is not None:
            late_s = predict.fetch_time_left(request.slo_ttft, request.t_w, s, predict.f_factor(s, 0), worst)
            earliest.append(max(late_s, request.part(s) / fastest))  # no deadline comes before the fetch could end
            latest.append(within_s)
    return min(earliest, default=0.0), max(latest, default=0.0)


def _due_of(view: ClusterView, size: Size, times: Collection[Times]) -> tuple[float, float]:
    """The earliest and the latest deadline, from now, of the fetches of one size on idle devices."""
    if not times:
        return 0.0, 0.0
    request = size.request
    factors = [predict.f_factor(size.s, size.w) if is_enforced else 1.0 for is_enforced in view.index.enforcing()]
    earliest, latest = (
        predict.fetch_time_left(request.slo_ttft, request.t_w, size.s, of(factors), _extreme(list(times), of))
        for of in (max, min)
    )
    return earliest - _ROUNDING_S, latest + _ROUNDING_S


def _extreme(times: Sequence[Times], of: Callable[[Iterable[float]], float]) -> Times:
    """Return times that no device of these is faster than (``of`` is min) or slower than (max) in any part of a
    pass."""
    t_p, t_d, t_n, t_tail = (of(each) for each in zip(*((t.t_p, t.t_d, t.t_n, t.t_tail) for t in times), strict=True))
    return Times(t_p=t_p, t_d=t_d, t_n=t_n, t_tail=t_tail)


def _mode(cell_s: float) -> StartMode:
    """``cell_s``: when the host has a stem cell."""
    return StartMode.COLD if cell_s == math.inf else StartMode.PREWARMED


def _wanted_for(facts: ActionFacts, stages: Stages, size: Size, due_s: tuple[float, float]) -> Wanted:
    low = (low_reserve(facts.need_bytes, size.s),) if size.w < size.s else ()
    full = (facts.need_bytes,) if size.w else ()
    part = size.request.part(size.s)
    return Wanted((*low, *full), size.s, *due_s, part, stages, only_promises=True, whole=part, one_size=True)


class Offers:
    """The hosts as Algorithm 1's servers, numbered so that a tie goes to the least loaded."""

    def __init__(
        self,
        view: ClusterView,
        facts: ActionFacts,
        stages: Stages,
        request: Request,
        most: int,
        now_s: float,
        *,
        without_idle: bool = False,
        only_promises: bool = False,
        size: Size | None = None,
    ) -> None:
        """``size``: the only size to search for, with workers on idle devices."""
        self._without_idle = without_idle
        self._view, self._name, self._model, self._now_s = view, facts.name, stages.facts, now_s
        self._most_bytes_per_s = facts.fetch_bytes_per_s or math.inf
        uri, version = stages.facts.uri, stages.facts.version
        times = _times(view, facts, stages)
        self._rates = {k: view.history.rates(facts.name, k) for k in view.index.kinds()}
        if size is None:
            # the bytes that a worker may need, least first: a low worker of ``most`` stages, …, a full worker
            needs = tuple(low_reserve(facts.need_bytes, s) for s in range(most, 0, -1))
            due_s = _due_s(_fastest(view, facts), request, most, times.values())
            wanted = Wanted(needs, most, *due_s, request.part(most), stages, only_promises, request.part(1))
        else:
            wanted = _wanted_for(facts, stages, size, _due_of(view, size, times.values()))
        holders = view.index.with_model(uri, version)
        also = set(holders)
        also |= view.idle.hosts(EXPLAINED_HOSTS) if without_idle else set()
        self._hosts = view.index.offers(wanted, now_s, also)
        self._resident = [
            h.host_id in holders and h.has_model(uri, stages.facts.weight_bytes, version) for h in self._hosts
        ]
        self._stages, self._most, self._whole = stages, most, request.part(1)
        self.servers = [self._server(i, times) for i in range(len(self._hosts))]

    def _server(self, i: int, times: Mapping[tuple[str, StartMode], Times]) -> Server:
        host = self._hosts[i]
        room, cell_s = host.room(for_model=True), host.cell_s(KIND_LLM)
        mode, wait_s = _mode(cell_s), 0.0 if cell_s == math.inf else max(0.0, cell_s - self._now_s)
        at: Room | Emptied = self._view.idle.emptied(host) if self._without_idle else room
        return Server(
            i,
            min(host.ledger.bytes_per_s, self._most_bytes_per_s),
            self._rates[room.kind].copy,
            at.gpus,
            times[room.kind, mode],
            at.fits,
            self._parts(host),
            wait_s,
            host.enforces_shares,
        )

    def _parts(self, host: HostView) -> tuple[int, ...] | None:
        """Return how many parts the host's pool takes, by the number of stages; None where the pool sets no limit.  A
        pool is independent of the devices, so it counts as it is, idle instances included."""
        if host.pool.slab_bytes == 0 and not host.pool.is_doubted:
            return None
        return tuple(host.pool_parts(self._stages, s) for s in range(1, self._most + 1))

    def tier(self, server: Server, n_bytes: float) -> Tier:
        """Return where a start on this server finds ``n_bytes`` of the model (all of them, or a stage's part)."""
        if not self._resident[server.id]:
            return Tier.REMOTE
        return Tier.RESIDENT if n_bytes == self._whole else Tier.MEMORY

    def bandwidth(self, server: Server, n_bytes: float, within_s: float) -> float:
        if self._resident[server.id]:
            return self._idle_rate(server, n_bytes)  # nothing is fetched, so promises to other fetches do not matter
        ledger = self._hosts[server.id].ledger
        found = ledger.bandwidth(n_bytes, self._now_s + within_s, self._now_s)
        return predict.limited_rate(n_bytes, found, ledger.bytes_per_s, self._most_bytes_per_s)

    def _idle_rate(self, server: Server, n_bytes: float) -> float:
        """Return the rate at which the part comes into its segment when no other start fetches."""
        rates = {Tier.RESIDENT: math.inf, Tier.MEMORY: self._rate_of(server).memory, Tier.REMOTE: server.bandwidth}
        return rates[self.tier(server, n_bytes)]

    def _rate_of(self, server: Server) -> Rates:
        return self._rates[self._hosts[server.id].room(for_model=True).kind]

    def host_id(self, i: int) -> HostId:
        return self._hosts[i].host_id

    def choice(
        self, scheme: Scheme, request: Request, facts: ActionFacts, why: Mapping[str, object], n_workers: int = 1
    ) -> Choice:
        """``n_workers``: how many workers the action lacks, which the group may leave behind."""
        seats = [
            *(self._seat(p, StageRole.FULL) for p in scheme.full),
            *(self._seat(p, StageRole.LOW) for p in scheme.low),
        ]
        keep = max(1, min(facts.keep or (n_workers if self._view.parts.consolidation else 1), scheme.w))
        if facts.keep is None and facts.forced_stages is not None:
            keep = 0  # a size that was forced stays, unless the function says otherwise
        slo = {"slo_ttft_s": facts.slo_ttft_s, "slo_tpot_s": facts.slo_tpot_s, "t_w_s": round(request.t_w, 3)}
        return Choice(
            tuple(seats), scheme.fetch_within_s, scheme.ttft, fallback=scheme.fallback, keep=keep, why={**slo, **why}
        )

    def explained(
        self, scheme: Scheme, request: Request, facts: ActionFacts, why: Mapping[str, object], n_workers: int = 1
    ) -> Choice:
        """Return the choice with its bound and its prediction in terms, and with what the trace says about each host
        that was examined."""
        found = self._estimates(scheme, request)
        candidates = [{"host": self._hosts[i].host_id, **each.plain()} for i, each in found[:EXPLAINED_CANDIDATES]]
        terms = bound_terms(self._view.history.best, self._name, self._stage_facts(scheme))
        bound_s = bound.least_s(terms)
        chosen = [(self.servers[i], self._known(i), each) for i, each in found if each.role and each.start is not None]
        return replace(
            self.choice(scheme, request, facts, {**why, "candidates": candidates}, n_workers),
            # no start can be faster than its bound, so none is predicted to be
            predicted_ttft_s=max(scheme.ttft, request.t_w + (bound_s or 0.0)),
            bound_ttft_s=bound_s,
            predicted_terms=predicted_terms(scheme, request, chosen, bound_s),
            bound_terms=terms,
        )

    def _estimates(self, scheme: Scheme, request: Request) -> list[tuple[int, Estimate]]:
        """Return estimates, the chosen hosts first.  Among many hosts only the chosen ones are estimated, because an
        estimate examines the host's link."""
        chosen = [p.server for p in (*scheme.full, *scheme.low)]
        servers = [self.servers[i] for i in set(chosen)] if len(self._view.hosts) > EXPLAINED_HOSTS else self.servers
        return estimates(scheme, servers, request, variant(self._view), self.bandwidth, self.tier)

    def _known(self, i: int) -> frozenset[str]:
        """Return which of the times on this server some start has already shown."""
        kind = self._hosts[i].room(for_model=True).kind
        return self._view.history.shown(self._name, kind, _mode(self._hosts[i].cell_s(KIND_LLM)))

    def _seat(self, at: Placement, role: StageRole) -> Seat:
        host = self._hosts[at.server]
        device = host.room(for_model=True).devices[at.gpu].device
        return Seat(host.host_id, device.name, device.kind, role)

    def _stage_facts(self, scheme: Scheme) -> list[StageFacts]:
        """Return the facts for the bound, by stage: each stage with its own bytes, not those of the largest part."""
        placed = (*scheme.full, *scheme.low)
        parts = self._stages.of(scheme.s)
        return [self._facts_of(k, at.server, parts[k].n_bytes) for k, at in enumerate(placed)]

    def _facts_of(self, stage: int, i: int, n_bytes: int) -> StageFacts:
        host, kind = self._hosts[i], self._hosts[i].room(for_model=True).kind
        tier = self.tier(self.servers[i], n_bytes)
        held, fetching = self._bytes_here(host)
        lacking = 0 if tier is not Tier.REMOTE else max(0, n_bytes - held - fetching)
        return StageFacts(
            stage,
            host.host_id,
            kind,
            _mode(host.cell_s(KIND_LLM)),
            n_bytes,
            lacking,
            tier is Tier.MEMORY,
            tier is Tier.REMOTE and n_bytes > held,
            host.report.declared_bytes_per_s,
            host.report.measured_bytes_per_s,
        )

    def _bytes_here(self, host: HostView) -> tuple[int, int]:
        """Return the bytes of the model that the host has, and the bytes that other starts there are fetching: a start
        may share both."""
        version = self._model.version
        uri = self._model.uri
        held = sum(r.n_bytes for r in host.report.resident if is_same_content(uri, version, r.uri, r.version))
        groups = {key.partition("/")[0] for key in host.ledger.fetches()}
        plans = (self._view.groups[GroupId(g)].plan for g in groups if GroupId(g) in self._view.groups)
        fetching = sum(
            partition.size((*stage.first_ranges, *stage.later_ranges))
            for plan in plans
            if plan.model is not None and is_same_content(uri, version, plan.model.uri, plan.model.version)
            for stage in plan.stages
            if stage.host == host.host_id
        )
        return held, fetching

"""Where one more worker of an action goes, what to evict for it, and whether it can ever fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gateway.scheduler import predict
from gateway.scheduler.events import ActionFacts
from gateway.scheduler.hosts import DeviceView, HostView
from gateway.scheduler.plans import Choice
from gateway.scheduler.predict import Times
from gateway.scheduler.schemes import VARIANTS, Request, Scheme, Server, Variant
from gateway.scheduler.select import select
from gateway.scheduler.view import ClusterView, InstanceView
from thaw.action import KIND_LLM
from thaw.ids import ActionName
from thaw.instance import InstanceState, StartMode
from thaw.model import ModelFacts

PLATFORM_MAX_STAGES = 1
"""Containers of this version hold a whole model: the runtime has no stage that sends hidden states on.  Algorithm 1
is asked for one stage only, whatever ``scaling.max_stages`` allows."""

PCIE_BYTES_PER_S = {"cpu": 20e9}
"""Segment → device.  A CPU host copies within its own memory."""
_PCIE_DEFAULT = 12e9


def place(view: ClusterView, facts: ActionFacts, model: ModelFacts | None, t_w: float, now_s: float) -> Choice | None:
    """The best host with room now, or None."""
    if model is None:
        return _least_loaded(view, facts)
    offers = _Offers(view, facts, model, now_s)
    request = Request(
        model.n_bytes, facts.need_bytes - model.n_bytes, facts.slo_ttft_s, facts.slo_tpot_s, max(0.0, t_w),
        offers.times(offers.kind, StartMode.COLD),
    )  # fmt: skip
    scheme = select(
        offers.servers, request, variant=_variant(view), max_stages=min(facts.max_stages, PLATFORM_MAX_STAGES),
        min_full=1, bandwidth=offers.bandwidth,
    )  # fmt: skip
    return None if scheme is None else offers.choice(scheme, request)


def _variant(view: ClusterView) -> Variant:
    return next((v for v in VARIANTS if v == view.settings.variant), "min_sharing")


def _least_loaded(view: ClusterView, facts: ActionFacts) -> Choice | None:
    """For a function without a model: fewest workers, then most free memory."""
    best = min(
        ((h.n_workers, -h.room(for_model=False).most_free, h.host_id)
         for h in view.live_hosts() if h.room(for_model=False).most_free >= facts.need_bytes),
        default=None,
    )  # fmt: skip
    if best is None:
        return None
    device = max(view.hosts[best[2]].room(for_model=False).devices, key=lambda d: d.free).device
    return Choice(best[2], device.name, device.kind)


def usable(host: HostView, facts: ActionFacts) -> tuple[DeviceView, ...]:
    return host.room(for_model=facts.is_llm).devices


class _Offers:
    """The hosts as Algorithm 1's servers, numbered so that a tie goes to the least loaded."""

    def __init__(self, view: ClusterView, facts: ActionFacts, model: ModelFacts, now_s: float) -> None:
        self._view, self._name, self._model, self._now_s = view, facts.name, model, now_s
        fitting = [h for h in view.live_hosts() if h.room(for_model=True).most_free >= facts.need_bytes]
        self._hosts = sorted(fitting, key=lambda h: (h.n_workers, h.host_id))
        kinds = sorted({h.room(for_model=True).kind for h in self._hosts})
        self.kind = kinds[0] if kinds else "cpu"
        times = {(k, m): self.times(k, m) for k in kinds for m in (StartMode.COLD, StartMode.PREWARMED)}
        self.servers = [self._server(i, times) for i in range(len(self._hosts))]

    def times(self, kind: str, mode: StartMode) -> Times:
        return self._view.history.times(self._name, kind, mode, self._model.weight_bytes)

    def _server(self, i: int, times: Mapping[tuple[str, StartMode], Times]) -> Server:
        room = self._hosts[i].room(for_model=True)
        mode = StartMode.PREWARMED if KIND_LLM in self._hosts[i].report.stem_kinds else StartMode.COLD
        pcie = PCIE_BYTES_PER_S.get(room.kind, _PCIE_DEFAULT)
        return Server(i, self._hosts[i].ledger.bytes_per_s, pcie, room.gpus, times[room.kind, mode])

    def bandwidth(self, server: Server, n_bytes: float, within_s: float) -> float:
        return self._hosts[server.id].ledger.bandwidth(n_bytes, self._now_s + within_s, self._now_s)

    def choice(self, scheme: Scheme, request: Request) -> Choice:
        at = scheme.full[0]
        host = self._hosts[at.server]
        device = host.room(for_model=True).devices[at.gpu].device
        server = self.servers[at.server]
        bound = predict.bound(request.n_bytes, server.bandwidth, server.pcie, request.t_w, 1, 1.0,
                              server.times or request.times)  # fmt: skip
        return Choice(
            host.host_id, device.name, device.kind, scheme.fetch_within_s, scheme.ttft, bound, scheme.fallback
        )


def evictions(view: ClusterView, facts: ActionFacts) -> list[InstanceView]:
    """Idle instances of other actions whose memory makes room, longest idle first; [] when nothing helps.

    Memory that releases already on their way will free counts: then there is nothing more to evict.
    """
    best: tuple[float, int, str] | None = None
    chosen: list[InstanceView] = []
    for host, device in _devices(view, facts):
        free = device.free + device.releasing
        if free >= facts.need_bytes:
            return []
        victims = _victims(view, host, device, facts, facts.need_bytes - free)
        if not victims:
            continue
        cost = (max(v.idle_since_s or 0.0 for v in victims), len(victims), host.host_id)
        if best is None or cost < best:
            best, chosen = cost, victims
    return chosen


def _devices(view: ClusterView, facts: ActionFacts) -> Iterator[tuple[HostView, DeviceView]]:
    return ((h, d) for h in view.live_hosts() for d in usable(h, facts))


def _victims(
    view: ClusterView, host: HostView, device: DeviceView, facts: ActionFacts, missing: int
) -> list[InstanceView]:
    idle = [view.instances[i] for i in view.on_host.get(host.host_id, ())]
    idle = [v for v in idle if v.is_idle and v.record.device == device.device.name and spare(view, v, facts)]
    idle.sort(key=lambda v: (v.idle_since_s or 0.0, v.record.instance_id))
    chosen: list[InstanceView] = []
    for victim in idle:
        if missing <= 0:
            break
        chosen.append(victim)
        missing -= victim.record.reserve_bytes
    return chosen if missing <= 0 else []


def spare(view: ClusterView, victim: InstanceView, facts: ActionFacts) -> bool:
    """May be evicted for another action: nobody waits for it and min_instances stays kept."""
    if victim.record.action == facts.name:
        return victim.record.action_version != facts.version
    owner = view.action(victim.record.action)
    return not owner.waiting and n_serving(view, victim.record.action) > minimum(view, victim.record.action)


def minimum(view: ClusterView, name: ActionName) -> int:
    action = view.actions.get(name)
    return 0 if action is None or action.deleted or action.facts is None else int(action.facts.min_instances)


def n_serving(view: ClusterView, name: ActionName) -> int:
    """Instances of the current version that start or are ready and stay."""
    action = view.actions.get(name)
    if action is None:
        return 0
    version = action.facts.version if action.facts else None
    serving = (InstanceState.STARTING, InstanceState.READY)
    return sum(
        1 for i in action.instances
        if (v := view.instances[i]).releasing is None and v.state in serving
        and version in (None, v.record.action_version)
    )  # fmt: skip

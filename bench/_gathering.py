"""A burst's arrivals replayed to the pure policy, with several ways to gather requests before a start is decided.

The scheduler's loop is simulated too: whenever the loop is free, it takes all requests that have arrived, and each
decision keeps it busy for a while.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bench._common import median, percentile
from bench.scheduler import model_facts
from bench.simulation.constants import KEEP_ALIVE_S, KV_RESERVE, MODELS, SLOTS
from gateway.scheduler.decisions import InspectModelOn, StartGroup, TimerKind, Wake
from gateway.scheduler.events import ActionFacts, ActionSeen, HostsSeen, Timer
from gateway.scheduler.policy import starts
from gateway.scheduler.policy.decide import decide_all
from gateway.scheduler.settings import SchedulerSettings
from gateway.scheduler.view.cluster import ClusterView
from gateway.scheduler.view.history import History
from relay.protocol.messages import DemandAdded, ModelInspected
from thaw.action import KIND_LLM
from thaw.host import Device, HostReport
from thaw.ids import ActionName, ActivationId, GatewayId, HostId, Namespace

N_HOSTS, LINK_BYTES_PER_S, DEVICE_BYTES = 16, 2e9, 24 * 10**9
_MODEL: Final = "llama2-7b"
_TTFT_OBJECTIVE_S: Final = 12.0
_ACTION: Final = ActionName("guest/f0")
_DECIDES_S: Final = 0.0015
"""The time of a decision that starts a group, as bench/scheduler.py measures it, plus the time to carry it out."""

_LOOKS_S: Final = 0.0002  # the time of a turn that starts nothing
_LONGEST_S: Final = 0.5  # longer than any way gathers requests


@dataclass(frozen=True, slots=True)
class Way:
    """One way to gather requests.

    After a start, the policy waits ``gather_s`` before it decides the next one.  Where ``pause_s`` is given, requests
    are held before the first start too: until no request has come for ``pause_s``, or until ``most_s`` after the first
    request.
    """

    name: str
    gather_s: float = 0.0
    pause_s: float = 0.0
    most_s: float = 0.0


WAYS: Final = (
    Way("each"),
    Way("gather_10", gather_s=0.010),
    Way("gather_25", gather_s=0.025),
    Way("gather_50", gather_s=0.050),  # the scheduler's own setting (starts.GATHER_S)
    Way("pause_2", pause_s=0.002, most_s=0.010),
    Way("pause_5", pause_s=0.005, most_s=0.025),
    Way("pause_10", pause_s=0.010, most_s=0.050),
)


@dataclass(frozen=True, slots=True)
class Met:
    """The starts for one burst.

    ``ttft_s`` is predicted: it is the mean over the burst's requests, counted from the first one's arrival.  A request
    gets the slot that is ready first, as in the gateway's queue.
    """

    n_groups: int
    n_workers: int
    ttft_s: float


def meet(arrivals_s: Sequence[float], way: Way) -> Met:
    """``arrivals_s`` are ordered and count from any moment."""
    with _gathering(way.gather_s):
        scheduler = _Scheduler()
        waiting = [at - arrivals_s[0] for at in arrivals_s]
        if way.pause_s:
            waiting = list(_after_pauses(waiting, way))
        free_s = 0.0
        while (at := min([*waiting[:1], *scheduler.due()], default=_LONGEST_S)) < _LONGEST_S:
            at = max(at, free_s)
            n = sum(handed <= at for handed in waiting)
            waiting = waiting[n:]
            free_s = at + (_DECIDES_S if scheduler.turn(n, at) else _LOOKS_S)
    return scheduler.met(len(arrivals_s))


def table(bursts: Sequence[Sequence[float]]) -> dict[str, dict[str, float]]:
    """The means over all bursts, for each way.  ``lone_ms`` is the additional wait of a request that comes alone."""
    found: dict[str, dict[str, float]] = {}
    for way in WAYS:
        met = [meet(burst, way) for burst in bursts]
        found[way.name] = {
            "groups": _mean([m.n_groups for m in met]),
            "workers": _mean([m.n_workers for m in met]),
            "ttft_s": _mean([m.ttft_s for m in met]),
            "lone_ms": 1000 * way.pause_s,
        }
    return found


def gaps_ms(bursts: Sequence[Sequence[float]]) -> dict[str, float]:
    """The gaps between the arrivals of all bursts.  The span and the longest gap are medians over the bursts."""
    gaps = [[1000 * (b - a) for a, b in itertools.pairwise(burst)] for burst in bursts]
    return {
        "span_ms": median([1000 * (burst[-1] - burst[0]) for burst in bursts]),
        "gap_p95_ms": percentile([gap for of_one in gaps for gap in of_one], 95),
        "longest_gap_ms": median([max(of_one) for of_one in gaps]),
    }


class _Scheduler:
    """A view of idle hosts, and the timers that the policy requested."""

    def __init__(self) -> None:
        numbers = itertools.count()
        settings = SchedulerSettings("redis://nowhere", relay_url="redis://relay:6379/0")
        self._view = ClusterView(1, settings, lambda: f"{next(numbers):032x}", History())
        self._began_s, self._timers, self._starts = 100.0, list[Wake](), list[tuple[float, StartGroup]]()
        self._asked = itertools.count()
        self._tell([HostsSeen(tuple(_host(i) for i in range(N_HOSTS))), ActionSeen(_facts())], 0.0)
        self._view.model("s3://m/0").take(model_facts(0, _MODEL), self._began_s)

    def due(self) -> list[float]:
        return [wake.at_s - self._began_s for wake in self._timers]

    def turn(self, n_requests: int, at_s: float) -> bool:
        """Tell the policy of the requests in their order, then of the timers that are due.

        Return True if the policy started a group.
        """
        now_s = self._began_s + at_s
        due = [wake for wake in self._timers if wake.at_s <= now_s]
        self._timers = [wake for wake in self._timers if wake.at_s > now_s]
        before = len(self._starts)
        self._tell([*(self._request() for _ in range(n_requests)), *(Timer(w.kind, w.key) for w in due)], at_s)
        return len(self._starts) > before

    def met(self, n_requests: int) -> Met:
        first_tokens = [
            at_s + (start.plan.predicted_ttft_s or 0.0)
            for at_s, start in self._starts
            for _ in range(SLOTS * len(start.plan.stages))
        ]
        if len(first_tokens) < n_requests:
            raise SystemExit(f"{len(first_tokens)} slots were started for {n_requests} requests")
        n_workers = sum(len(start.plan.stages) for _, start in self._starts)
        return Met(len(self._starts), n_workers, _mean(sorted(first_tokens)[:n_requests]))

    def _request(self) -> DemandAdded:
        activation = ActivationId(f"{next(self._asked):032x}")
        return DemandAdded(activation, _ACTION, Namespace("guest"), GatewayId("g"), 0)

    def _tell(self, events: Sequence[Any], at_s: float) -> None:
        for decision in decide_all(self._view, events, self._began_s + at_s):
            if isinstance(decision, StartGroup):
                self._starts.append((at_s, decision))
            elif isinstance(decision, Wake) and decision.kind is TimerKind.RESCALE:
                self._timers.append(decision)
            elif isinstance(decision, InspectModelOn):  # the model does not change
                self._tell(
                    [
                        ModelInspected(
                            decision.uri, decision.host_id, None, None, decision.known_version, decision.command_id
                        )
                    ],
                    at_s,
                )


def _after_pauses(waiting: Sequence[float], way: Way) -> Iterator[float]:
    """The moment in which each request is given to the policy."""
    begin = 0
    while begin < len(waiting):
        end = begin
        latest = waiting[begin] + way.most_s
        while end + 1 < len(waiting) and waiting[end + 1] <= min(waiting[end] + way.pause_s, latest):
            end += 1
        yield from [min(waiting[end] + way.pause_s, latest)] * (end + 1 - begin)
        begin = end + 1


@contextlib.contextmanager
def _gathering(seconds: float) -> Iterator[None]:
    kept, starts.GATHER_S = starts.GATHER_S, seconds
    try:
        yield
    finally:
        starts.GATHER_S = kept


def _facts() -> ActionFacts:
    return ActionFacts(
        _ACTION,
        "0.0.1",
        KIND_LLM,
        MODELS[_MODEL].n_bytes + KV_RESERVE,
        SLOTS,
        SLOTS,
        KEEP_ALIVE_S,
        model_uri="s3://m/0",
        max_stages=4,
        slo_ttft_s=_TTFT_OBJECTIVE_S,
    )


def _host(i: int) -> HostReport:
    device = Device("cuda:0", "A10", DEVICE_BYTES, DEVICE_BYTES)
    return HostReport(
        HostId(f"host-{i:02d}"),
        "boot",
        "a:1",
        (device,),
        16,
        LINK_BYTES_PER_S,
        "none",
        "process",
        0,
        100_000,
        stem_kinds=(KIND_LLM,),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

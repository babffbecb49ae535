"""Reasons in words, made from the counts in the traces of the runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from bench.simulation.metrics import Summary
from bench.simulation.specs import SYSTEMS, Mechanism
from bench.simulation.waits import Cause, Waits, total
from bench.simulation.workload import Request

WAITED: Final = {
    Cause.MEMORY: "for a device with room",
    Cause.SLOT: "for a slot of a busy worker",
    Cause.RUNTIME: "for their worker's runtime",
    Cause.SHARED_LINK: "while other fetches used their server's link",
    Cause.FETCH: "for the model's bytes at the rate of the whole link",
    Cause.LOAD: "for the loading behind the last byte",
    Cause.PREFILL: "for their prefill",
    Cause.GROUP: "for the longer pass through a group",
    Cause.FAILED: "for an answer that never came",
}
_WORTH_NAMING: Final = 0.05
_MOST_NAMED: Final = 3


def late(runs: Iterable[Summary], *, app: str | None = None) -> Counter[Cause]:
    """How many requests were too late, by the cause that took most of their time."""
    found = Counter[Cause]()
    for run in runs:
        for name, causes in run.late.items():
            if app in (None, name):
                found.update({Cause[cause]: n for cause, n in causes.items()})
    return found


def late_sentence(who: str, causes: Mapping[Cause, int]) -> str:
    """``ParaServe: of 412 late requests, the longest wait of 61 % for a device with room, of 27 % …``"""
    n_late = sum(causes.values())
    if n_late == 0:
        return f"{who}: no request was late."
    most = sorted(causes.items(), key=lambda item: -item[1])[:_MOST_NAMED]
    named = [f"{100 * n / n_late:.0f} % {WAITED[c]}" for c, n in most if n >= _WORTH_NAMING * n_late]
    return f"{who}: of {n_late} late requests, the longest wait of {', of '.join(named)}."


def level_sentence(who: str, runs: Sequence[Summary], simulated: float, published: float) -> str:
    """Say why a system answers fewer or more requests in time than published."""
    if simulated < published:
        return late_sentence(who, late(runs))
    n_requests = sum(r.n_requests for r in runs)
    n_warm = sum(r.n_requests * (100 - r.cold_pct) / 100 for r in runs)
    return f"{who}: {n_warm:.0f} of {n_requests} requests found a free slot."


def waits_sentence(who: str, requests: Sequence[Request]) -> str:
    """``one worker: 57.7 s, shared link 41.2 s, slot 8.0 s``: the mean TTFT and its causes."""
    mean = {cause: seconds / len(requests) for cause, seconds in total(r.waits for r in requests).items()}
    return f"{who}: {sum(mean.values()):.1f} s, {waits_in_words(mean)}"


def waits_in_words(waits: Waits) -> str:
    whole = sum(waits.values())
    most = sorted(waits.items(), key=lambda item: -item[1])
    return ", ".join(f"{cause} {seconds:.1f} s" for cause, seconds in most if seconds >= _WORTH_NAMING * whole)


def groups_sentence(who: str, runs: Sequence[Summary]) -> str:
    """Say how many starts were groups, which make tokens slower and hold more memory."""
    n_starts = sum(r.n_starts for r in runs)
    n_groups = sum(r.used.get(Mechanism.GROUPS.name, 0) for r in runs)
    return f"{who}: {n_groups} of {n_starts} starts were groups of several stages."


def without(mechanism: Mechanism) -> str:
    """Say why a band that needs this mechanism was not run.  Return an empty text if some system has the mechanism."""
    has = any(mechanism in spec.mechanisms for spec in SYSTEMS.values())
    return "" if has else f"no simulated system has this: {mechanism}"

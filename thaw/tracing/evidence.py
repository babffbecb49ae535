"""How much of a start its trace explains, and with what evidence: a strict reading of a timeline.

This module is pure: a timeline in, values out.  ``thaw activation explain`` prints the result, and the benchmarks
count with the same numbers.

A phase (a leaf of the timeline) of at most 100 ms explains itself.  A longer phase explains only the time that its own
evidence covers.  All evidence was measured where the waiting happened: CPU seconds of the thread that did the work,
seconds in which this thread or the other threads of a kernel waited for a core, seconds in which the thread was blocked
on something that the evidence names, and bytes at the rate of the link.  No time is computed as "the rest" and then
given a name: the rest of a phase is unexplained, in that phase.

A wait for another phase of the trace (``load`` waits for ``fetch``) passes the question on to that phase::

    fetch  |████████████ explained ████████████|··· unexplained ···|
    load       |────────── waited for fetch ───────────────────────|██ its own work ██|

Such a wait counts only while the other phase ran.  By itself it covers nothing on the time axis: the other phase must
cover that time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from thaw.tracing.timeline import Interval, Timeline, union

SHORT_S: Final = 0.1
_LINK_SLACK: Final = 1.02
"""The rate at which a shaped link carries payload is known only to about 2 %."""

_MEASURED: Final[Mapping[str, str]] = {
    "cpu_s": "computing",
    "reader_cpu_s": "computing",
    "core_wait_s": "waiting for a core",
    "threads_wait_s": "waiting for other threads of its kernels",
    "disk_wait_s": "waiting for the disk",
    "programs_s": "programs that it ran",
    "stem_cell_wait_s": "waiting for a stem cell to be made",
    "image_pull_s": "pulling the image of its container, which the host did not have",
}
"""Attributes of a phase's end that hold seconds, each counted once, and what each of them means."""

_SIDE_BY_SIDE: Final = "cpu_s"
"""For a fetch, this attribute is the sum over its connections.  ``reader_cpu_s`` and the waits of a fetch belong to the
connection that ended last, so a fetch counts ``reader_cpu_s`` instead.
"""

_OWN_CODE: Final = ("init", "run")  # these are leaves only if they hold no phase: then the function's own code ran
_PROCESS_OF: Final[Mapping[str, str]] = {
    "fetch": "fetchd",
    "libraries": "engine",
    "context": "engine",
    "model": "engine",
    "load": "engine",
    "kv": "engine",
    "engine": "engine",
    "prefill": "engine",
}
"""The process that each phase belongs to: while that process is stopped, the phase lasts longer."""

LinkRate = Callable[[Interval], float | None]
"""Returns the bytes per second of the link that a fetch used, or None if the rate is not known."""


@dataclass(frozen=True, slots=True)
class Share:
    """Seconds of a phase and the evidence for them, in words."""

    what: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Account:
    """One phase.  Of its ``covered_s``, another phase must explain ``passed_on_s``: this phase waited for that one."""

    phase: Interval
    shares: tuple[Share, ...]
    covered_s: float
    passed_on_s: float = 0.0

    @property
    def unexplained_s(self) -> float:
        return self.phase.seconds - self.covered_s

    @property
    def span(self) -> tuple[float, float]:
        """The part of the time axis that the phase covers.

        The wait comes first, because a phase does its own work on the result that it waited for.
        """
        return self.phase.begin_s + self.passed_on_s, self.phase.begin_s + self.covered_s


@dataclass(frozen=True, slots=True)
class Stop:
    """A process did not run, though it had work to do.  ``during`` names the phases of this process that the stop made
    longer.
    """

    interval: Interval
    during: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """An explanation of the time until the first token.  ``accounts`` has one item per leaf, in timeline order.

    ``worst`` is the phase with the most unexplained time that no other phase explains; ``worst_s`` is that time.
    """

    accounts: tuple[Account, ...]
    stops: tuple[Stop, ...]
    explained_s: float
    unexplained_s: float
    worst: Interval | None
    worst_s: float


def explain(timeline: Timeline, rate_of: LinkRate) -> Explanation:
    leaves = [i for i in timeline.intervals if i.is_leaf]
    stops = [i for i in timeline.intervals if i.phase == "stopped"]
    accounts = tuple(_account(leaf, leaves, stops, rate_of(leaf)) for leaf in leaves)
    spans = [*(a.span for a in accounts), *((s.begin_s, s.end_s) for s in stops)]
    covered = union((max(0.0, b), min(timeline.end_s, e)) for b, e in spans)
    explained_s = sum(e - b for b, e in covered)
    hit = tuple(Stop(s, tuple(_overlapped(s, leaves))) for s in stops)
    left = [(_left_s(a, covered, timeline.end_s), a.phase) for a in accounts]
    worst_s, worst = max(left, key=lambda found: found[0], default=(0.0, None))
    return Explanation(accounts, hit, explained_s, timeline.end_s - explained_s, worst if worst_s else None, worst_s)


def _left_s(account: Account, covered: Sequence[tuple[float, float]], end_s: float) -> float:
    """Seconds of the unexplained end of a phase that no other phase covers."""
    begin, end = account.span[1], min(end_s, account.phase.end_s)
    if account.unexplained_s <= 0 or end <= begin:
        return 0.0
    return end - begin - sum(max(0.0, min(end, e) - max(begin, b)) for b, e in covered)


def _account(leaf: Interval, leaves: Sequence[Interval], stops: Sequence[Interval], rate: float | None) -> Account:
    if leaf.phase in _OWN_CODE:
        return Account(leaf, (Share("the function's own code", leaf.seconds),), leaf.seconds)
    wait, passed_on_s = _wait(leaf, leaves)
    stopped = Share("stopped", sum(_overlap_s(leaf, s) for s in stops if _is_of(s, leaf)))
    names = [n for n in _MEASURED if not (leaf.phase == "fetch" and n == _SIDE_BY_SIDE)]
    said = [Share(_MEASURED[name], _number(leaf, name)) for name in names]
    shares = [s for s in (stopped, *said, wait) if s.seconds > 0]
    by_bytes = _by_bytes(leaf, rate)
    if by_bytes.seconds > sum(s.seconds for s in shares):
        shares = [by_bytes]
    if leaf.seconds <= SHORT_S:
        return Account(leaf, tuple(shares), leaf.seconds)
    covered_s = min(leaf.seconds, max(SHORT_S, sum(s.seconds for s in shares)))
    return Account(leaf, tuple(shares), covered_s, min(passed_on_s, covered_s))


def _wait(leaf: Interval, leaves: Sequence[Interval]) -> tuple[Share, float]:
    """Return the wait of the phase with its cause, and how many seconds of it another phase has to explain."""
    waited_s, awaited = _number(leaf, "wait_s"), str(dict(leaf.attrs).get("waits_for", ""))
    share = Share(f"waiting for {awaited}" if awaited else "waiting", waited_s)
    if awaited not in _PROCESS_OF:
        return share, 0.0
    ran_s = sum(_overlap_s(leaf, i) for i in leaves if (i.phase, i.host, i.stage) == (awaited, leaf.host, leaf.stage))
    passed_on_s = min(waited_s, ran_s)  # a wait beyond the end of the awaited phase has its cause in this phase
    return Share(share.what, passed_on_s), passed_on_s


def _by_bytes(leaf: Interval, rate: float | None) -> Share:
    if leaf.phase != "fetch" or not rate or not leaf.n_bytes or leaf.was_resident:
        return Share("", 0.0)
    return Share("its bytes at the link's rate", min(leaf.seconds, leaf.n_bytes / rate * _LINK_SLACK))


def _overlapped(stop: Interval, leaves: Iterable[Interval]) -> Iterable[str]:
    return dict.fromkeys(
        i.phase for i in leaves if _is_of(stop, i) and i.begin_s <= stop.end_s and i.end_s >= stop.begin_s
    )


def _is_of(stop: Interval, leaf: Interval) -> bool:
    process = dict(stop.attrs).get("process")
    return (stop.host, stop.stage, process) == (leaf.host, leaf.stage, _PROCESS_OF.get(leaf.phase))


def _overlap_s(a: Interval, b: Interval) -> float:
    return max(0.0, min(a.end_s, b.end_s) - max(a.begin_s, b.begin_s))


def _number(leaf: Interval, name: str) -> float:
    value = dict(leaf.attrs).get(name)
    return max(0.0, float(value)) if isinstance(value, (int, float)) else 0.0

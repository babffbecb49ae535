"""Sentences for the terminal: how a start spent its time, phase by phase, and the time that nothing explains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from thaw.cli.output.tables import duration
from thaw.tracing.evidence import SHORT_S, Account, Explanation, Share, Stop
from thaw.tracing.timeline import Interval

_MOST_LINES: Final = 6
_WORTH_SAYING_S: Final = 0.001


def evidence_lines(explanation: Explanation) -> Iterator[str]:
    """Name the stops first, because a stop explains every long phase around it.  Then name the longest phases, then the
    sum.
    """
    yield from (_stop_line(stop) for stop in explanation.stops)
    long = sorted((a for a in explanation.accounts if a.phase.seconds > SHORT_S), key=lambda a: -a.phase.seconds)
    if long:
        yield f"phases longer than {duration(SHORT_S)} and their evidence:"
    yield from (f"  {_account_line(account)}" for account in long[:_MOST_LINES])
    if len(long) > _MOST_LINES:
        yield f"  and {len(long) - _MOST_LINES} shorter ones"
    line = f"explained: {duration(explanation.explained_s)}; unexplained: {duration(explanation.unexplained_s)}"
    if explanation.worst is not None and explanation.worst_s >= _WORTH_SAYING_S:
        line += f"; the phase with most of it: {_named(explanation.worst)}, {duration(explanation.worst_s)}"
    yield line


def _stop_line(stop: Stop) -> str:
    said, i = dict(stop.interval.attrs), stop.interval
    who = f"{said.get('process', 'a process')}{f' on {i.host}' if i.host else ''}"
    where = f", in {' and '.join(stop.during)}" if stop.during else ""
    at, how = duration(max(0.0, i.begin_s)), f" ({said['signal']})" if "signal" in said else ""
    if i.seconds < _WORTH_SAYING_S:
        return f"{who} went on at {at}{where}{how}; it is not known how long it had been stopped"
    return f"{who} did not run for {duration(i.seconds)} at {at}{where}{how}"


def _account_line(account: Account) -> str:
    shares = [s for s in account.shares if s.seconds >= _WORTH_SAYING_S]
    parts = [f"{s.what} {duration(s.seconds)}" for s in sorted(shares, key=_by_size)]
    if account.unexplained_s >= _WORTH_SAYING_S:
        parts.append(f"unexplained {duration(account.unexplained_s)}")
    line = f"{_named(account.phase)}, {duration(account.phase.seconds)}: {', '.join(parts)}"
    return line + (_hint(account.phase) if account.unexplained_s > SHORT_S else "")


def _by_size(share: Share) -> float:
    return -share.seconds


def _hint(phase: Interval) -> str:
    """Name disk reads and page faults that may explain the time.  They were counted, but their time is not known."""
    said = dict(phase.attrs)
    faults, n_bytes = said.get("major_faults", 0), said.get("disk_bytes", 0)
    if not isinstance(faults, int) or not isinstance(n_bytes, int) or not (faults or n_bytes):
        return ""
    read = f"it read {n_bytes / (1 << 20):.0f} MiB from a disk, with {faults} page faults that waited for one"
    return f" ({read}; with the sysctl kernel.task_delayacct=1 its host counts for how long)"


def _named(phase: Interval) -> str:
    return f"{phase.phase}{f' on {phase.host}' if phase.host else ''}"

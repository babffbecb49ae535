"""The typical times of starts: the median of the last nine per (action, kind of device, start mode).

If something else delays one start, the median moves to its neighbour only; the mean that was used before moved by a
fifth of that start's time.  A lasting change is followed after five starts.  An even number of starts has two in the
middle, and the faster one counts, because a disturbance only ever makes a start slower.

A start from a stem cell waits for no imports, so it is learned apart from a cold start.  Most functions start rarely.
Times that do not depend on the function (container, context, libraries, hop, tail) are therefore also learned over all
functions, and stand in for times that are not known of one.

The loop feeds the history with the traces of starts that ended well and keeps it in the registry; the history does no
I/O itself.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Final

from gateway.scheduler.placement.predict import Rates, Times
from gateway.scheduler.view.shortest_times import Best
from thaw.instance import StartMode
from thaw.tracing.trace import Phase, TraceEvent

RECENT: Final = 9
"""How many measurements of each time are remembered: the fewest that tolerate four bad ones in a row and follow a
change within ten."""
_LONGEST_S: Final = 3_600.0  # a phase of more than an hour means a broken clock
_DEFAULT_TIMES: Final = Times()
_PAPER_WEIGHT_BYTES: Final = 13_476_839_424  # Llama2-7B, whose times are the defaults
_STEM_CELL_TIMES: Final = {"t_cc": 0.2, "t_l": 0.0}
"""The times of a fork, or of a waiting container whose imports are done.  They hold until a start from a stem cell was
seen."""

_OF_EVERY_ACTION: Final = frozenset(("t_c", "t_cc", "t_cu", "t_l", "t_n", "t_tail", "copy", "memory"))
_OF_EVERY_MODE: Final = frozenset(("t_p", "t_d", "t_n", "t_tail"))
_TIMES: Final = frozenset(f.name for f in fields(Times))
EVERY_ACTION: Final = "*"
"""Stands in place of an action's name.  A real name has a slash."""

_WAITS: Final = ("stem_cell_wait_s", "image_pull_s")
_ALL_IS_THERE: Final = (Phase.FETCH_END, Phase.CONTAINER_END, Phase.CONTEXT_END, Phase.LIBRARIES_END)
_DIRECT: Final = {
    "t_cc": (Phase.CONTAINER_BEGIN, Phase.CONTAINER_END),
    "t_l": (Phase.LIBRARIES_BEGIN, Phase.LIBRARIES_END),
}
_CONTEXT: Final = (Phase.CONTEXT_BEGIN, Phase.CONTEXT_END)
_PREFILL: Final = (Phase.PREFILL_BEGIN, Phase.PREFILL_END)
_RATES: Final = ("copy", "memory")
_OF_LEARNED: Final = (*_RATES, "ttft_ratio")
"""Values that are learned besides times.  The ratio shows people how good predictions were; the scheduler does not use
it."""
_COPY: Final = {"cpu": 20e9}
"""This holds until a start has shown it.  A CPU host copies within its own memory, others over PCIe."""
_COPY_DEFAULT: Final = 12e9
_MEMORY_DEFAULT: Final = 4e9
"""This holds until a start has shown it: one core copies and checks."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of one start; None where the trace does not say."""

    t_c: float | None = None
    t_cc: float | None = None
    t_cu: float | None = None
    t_l: float | None = None
    t_p: float | None = None
    t_d: float | None = None
    t_n: float | None = None
    t_tail: float | None = None
    copy: float | None = None  # bytes/s from the host's memory to the device
    memory: float | None = None  # bytes/s from one segment into another
    ttft_ratio: float | None = None  # the time to the first token, over its prediction


@dataclass(frozen=True, slots=True)
class Learned:
    """The medians.  ``known``: the names that have a measurement at all (the first one replaces the default).

    ``recent``: the last measurements of each name, the newest last.

    ``alone``: the known names that an instance of one stage has told.  A group's pass is a sum of several times; where
    one of them is known by itself, the group tells the other.
    """

    times: Times = _DEFAULT_TIMES
    copy: float = 0.0
    memory: float = 0.0
    known: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    ttft_ratio: float = 0.0
    recent: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


_NOTHING: Final = Learned()


@dataclass(frozen=True, slots=True)
class Pass:
    """The times that one request told of a group of ``s`` stages: prefill, and the mean time of the tokens behind the
    first; None where it does not say.  ``factor``: the group's F, by the shares that its workers had."""

    s: int
    factor: float
    prefill_s: float | None = None
    token_s: float | None = None


class History:
    """``best``: the best that starts have shown, beside their typical times."""

    def __init__(self, learned: Mapping[str, Learned] | None = None, best: Best | None = None) -> None:
        self.best = best or Best()
        self._learned: dict[str, Learned] = dict(learned or {})
        self._seen = {_action_and_kind(key) for key in self._learned}
        # answers since something was learned last
        self._times: dict[tuple[str, str, StartMode, int], Times] = {}
        self._rates: dict[tuple[str, str], Rates] = {}

    @staticmethod
    def key(action: str, device_kind: str, mode: StartMode) -> str:
        return f"{action}|{device_kind}|{mode}"

    def times(self, action: str, device_kind: str, mode: StartMode, weight_bytes: int) -> Times:
        """Return the times known of the action; else of its other mode (prefill, token, hop and tail hardly depend on
        it); else of any action; else the paper's times, with prefill and token scaled by the bytes they read."""
        known_as = self._known_as(action, device_kind)
        asked = known_as, device_kind, mode, weight_bytes
        if asked not in self._times:
            self._times[asked] = self._mixed(known_as, device_kind, mode, weight_bytes)
        return self._times[asked]

    def rates(self, action: str, device_kind: str) -> Rates:
        """The rates measured for this action, else for any action; they hardly depend on how a start began."""
        if (asked := (self._known_as(action, device_kind), device_kind)) not in self._rates:
            known = {"copy": _COPY.get(device_kind, _COPY_DEFAULT), "memory": _MEMORY_DEFAULT}
            for of, mode in itertools.product((EVERY_ACTION, asked[0]), StartMode):  # the better known come last
                seen = self.learned(of, device_kind, mode)
                known |= {n: getattr(seen, n) for n in _RATES if n in seen.known}
            self._rates[asked] = Rates(**known)
        return self._rates[asked]

    def _known_as(self, action: str, device_kind: str) -> str:
        """Return the action, or "" if nothing was learned of it on this kind of device.  The answers for all such
        actions are the same, and thousands of functions are fine-tunes of a few models."""
        return action if (action, device_kind) in self._seen else ""

    def shown(self, action: str, device_kind: str, mode: StartMode) -> frozenset[str]:
        """Names of the times and rates that some start has shown, so that no default stands for them."""
        found = set(self.learned(action, device_kind, mode).known)
        found |= set(self.learned(EVERY_ACTION, device_kind, mode).known)
        for of in (EVERY_ACTION, action):
            found |= set(self.learned(of, device_kind, _other(mode)).known) & (_OF_EVERY_MODE | set(_RATES))
        return frozenset(found)

    def _mixed(self, action: str, device_kind: str, mode: StartMode, weight_bytes: int) -> Times:
        other = _other(mode)
        learned = self.learned(action, device_kind, mode)
        scale = weight_bytes / _PAPER_WEIGHT_BYTES
        guessed = {"t_p": _DEFAULT_TIMES.t_p * scale, "t_d": _DEFAULT_TIMES.t_d * scale}
        if mode is StartMode.PREWARMED:
            guessed |= _STEM_CELL_TIMES
        for of, in_mode in ((EVERY_ACTION, other), (EVERY_ACTION, mode), (action, other)):  # the better known come last
            seen = self.learned(of, device_kind, in_mode)
            names = set(seen.known) & _TIMES if in_mode is mode else set(seen.known) & _OF_EVERY_MODE
            guessed |= {n: getattr(seen.times, n) for n in names}
        return replace(learned.times, **{n: v for n, v in guessed.items() if n not in learned.known})

    def learned(self, action: str, device_kind: str, mode: StartMode) -> Learned:
        return self._learned.get(self.key(action, device_kind, mode), _NOTHING)

    def update(self, action: str, device_kind: str, mode: StartMode, measured: Measured) -> Learned:
        """Take in one start; return the action's times as known by now, for the loop to keep (with EVERY_ACTION's)."""
        values = {f.name: getattr(measured, f.name) for f in fields(measured)}
        given = {n: v for n, v in values.items() if v is not None and math.isfinite(v) and v >= 0}
        of_every_action = {n: v for n, v in given.items() if n in _OF_EVERY_ACTION}
        self._mix_in(EVERY_ACTION, device_kind, mode, of_every_action)
        return self._mix_in(action, device_kind, mode, given)

    def update_pass(self, action: str, device_kind: str, mode: StartMode, seen: Pass) -> Learned:
        """Take in one request's prefill and tokens: Eq. 2 and the pass of Eq. 5, solved for what is not known yet."""
        measured = self._of_pass(action, device_kind, mode, seen)
        learned = self.update(action, device_kind, mode, measured)
        if seen.s == 1:
            told = {n for n in ("t_p", "t_d") if getattr(measured, n) is not None}
            learned = replace(learned, alone=tuple(sorted({*learned.alone, *told})))
            self._keep(action, device_kind, mode, learned)
        return learned

    def actions(self) -> set[str]:
        """Return the actions of which something was learned."""
        return ({action for action, _ in self._seen} | self.best.actions()) - {EVERY_ACTION}

    def forget(self, action: str) -> tuple[str, ...]:
        """Forget a deleted action; return the keys that must be deleted."""
        gone = tuple(key for key in self._learned if _action_and_kind(key)[0] == action)
        for key in gone:
            del self._learned[key]
            self._seen.discard(_action_and_kind(key))
        self._forget_answers()
        return gone

    def _of_pass(self, action: str, device_kind: str, mode: StartMode, seen: Pass) -> Measured:
        """Solve ``time = t * F + t_n * s`` (t is t_p or t_d).  Where t is known from an instance of one stage, the time
        tells the hop; else it tells t, with the hop as it is known so far."""
        if seen.s == 1:  # no hop
            return Measured(t_p=seen.prefill_s, t_d=seen.token_s)
        factor = seen.factor
        times = self.times(action, device_kind, mode, _PAPER_WEIGHT_BYTES)
        alone = {
            n: getattr(self.learned(action, device_kind, m).times, n)
            for m in (_other(mode), mode)
            for n in self.learned(action, device_kind, m).alone
        }
        t_n: float | None = None
        if seen.token_s is not None and "t_d" in alone:
            t_n = max(0.0, (seen.token_s - alone["t_d"] * factor) / seen.s)
        hop_s = times.t_n if t_n is None else t_n
        t_p = None if "t_p" in alone else _less_hops(seen.prefill_s, hop_s * seen.s, factor)
        t_d = None if "t_d" in alone else _less_hops(seen.token_s, hop_s * seen.s, factor)
        return Measured(t_p=t_p, t_d=t_d, t_n=t_n)

    def _mix_in(self, action: str, device_kind: str, mode: StartMode, given: Mapping[str, float]) -> Learned:
        old = self.learned(action, device_kind, mode)
        recent = {**old.recent, **{n: _recent(old, n, v) for n, v in given.items()}}
        typical = {n: _median(n, recent[n]) for n in given}
        copy, memory, ttft_ratio = (typical.pop(n, getattr(old, n)) for n in _OF_LEARNED)
        known = tuple(sorted({*old.known, *given}))
        new = Learned(replace(old.times, **typical), copy, memory, known, old.alone, ttft_ratio, recent)
        self._keep(action, device_kind, mode, new)
        return new

    def _keep(self, action: str, device_kind: str, mode: StartMode, learned: Learned) -> None:
        self._learned[self.key(action, device_kind, mode)] = learned
        self._seen.add((action, device_kind))
        self._forget_answers()

    def _forget_answers(self) -> None:
        self._times.clear()
        self._rates.clear()


def _action_and_kind(key: str) -> tuple[str, str]:
    """Read a key of History: the action, and the kind of device.  A key of another version may have no kind."""
    action, *rest = key.rsplit("|", 2)
    return action, rest[0] if len(rest) > 1 else ""


def _recent(old: Learned, name: str, value: float) -> tuple[float, ...]:
    """A mean that an older scheduler has kept counts as one start."""
    before = old.recent.get(name, ())
    if not before and name in old.known:
        before = (float(getattr(old if name in _OF_LEARNED else old.times, name)),)
    return (*before, value)[-RECENT:]


def _median(name: str, values: Sequence[float]) -> float:
    """Return the median.  Where two values are in the middle, the better one counts: the shorter time, the higher
    rate."""
    return statistics.median_high(values) if name in _RATES else statistics.median_low(values)


def _other(mode: StartMode) -> StartMode:
    return StartMode.COLD if mode is StartMode.PREWARMED else StartMode.PREWARMED


def _less_hops(took_s: float | None, hops_s: float, factor: float) -> float | None:
    """Return the time without the hops.  A belief that hops take more than half of a pass is wrong: the stages are left
    half."""
    return None if took_s is None else (took_s - min(hops_s, took_s / 2)) / factor


def measure(events: Iterable[TraceEvent]) -> Measured:
    """Return the times of one start (stage 0's) from its trace; phases that are absent or make no sense are None.  The
    tail is the longest of all stages, because a group is ready when all of them are.

    The wait for a stem cell is left out.  It depends on the moment, so the host predicts it
    (``StemTarget.ready_in_s``).  The pull of an image is left out, too: the next start there has the image.
    """
    by_stage: dict[int, list[TraceEvent]] = {0: []}
    for event in events:
        by_stage.setdefault(event.stage, []).append(event)
    mine = by_stage[0]
    direct = {name: _phase_s(mine, *pair) for name, pair in _DIRECT.items()} | {"t_cu": _sum_s(mine, *_CONTEXT)}
    beside_s = _phase_s(mine, Phase.LIBRARIES_BEGIN, Phase.CONTAINER_END)  # an import begins before its proxy answers
    libraries = None if direct["t_l"] is None else max(0.0, direct["t_l"] - (beside_s or 0.0))
    direct |= _without_waits(mine, direct["t_cc"], libraries)
    container, libraries = direct["t_cc"], direct["t_l"]
    t_c = None if container is None else container + (libraries or 0.0)
    tails = [t for t in map(_tail_s, by_stage.values()) if t is not None]
    rates = {"copy": _copy_rate(mine), "memory": _memory_rate(mine)}
    return Measured(t_c=t_c, t_tail=max(tails, default=None), **rates, **direct)


def _without_waits(
    events: Sequence[TraceEvent], container_s: float | None, libraries_s: float | None
) -> dict[str, float | None]:
    """``t_cc`` and ``t_l`` without the time that the start waited for its stem cell, or for its image."""
    end = next((e.attrs for e in reversed(events) if e.name == Phase.CONTAINER_END), {})
    waits = [w for name in _WAITS if isinstance(w := end.get(name), int | float)]
    if container_s is not None:
        container_s = max(0.0, container_s - sum(waits))
    # a cell that still imports when it is claimed writes the phase, and the start waits for its end
    claimed_importing = end.get("mode") == StartMode.PREWARMED
    return {"t_cc": container_s, "t_l": None if claimed_importing else libraries_s}


def measure_run(events: Iterable[TraceEvent], n_tokens: int, s: int = 1, factor: float = 1.0) -> Pass:
    """Return the times that stage 0 saw for one request in a group, which are those of the whole pass."""
    mine = [e for e in events if e.stage == 0]
    prefill_s, decoding_s = _phase_s(mine, *_PREFILL), _phase_s(mine, Phase.PREFILL_END, Phase.RUN_END)
    return Pass(s, factor, prefill_s, None if decoding_s is None or n_tokens < 2 else decoding_s / (n_tokens - 1))


def first_token_s(events: Iterable[TraceEvent]) -> float | None:
    """Return the time from a request's last byte to its first token, from its own trace."""
    return _phase_s(tuple(events), Phase.RECEIVED, Phase.FIRST_TOKEN)


def was_continued(events: Iterable[TraceEvent]) -> bool:
    """The gateway sent the request to another group after its first token, or asked for another group to move it there.
    The time to that token then says nothing of the other group's start."""
    by_gateway = [e for e in events if e.name in (Phase.FIRST_TOKEN, Phase.DISPATCHED, Phase.MOVE_BEGIN)]
    firsts = [e for e in by_gateway if e.name == Phase.FIRST_TOKEN]
    return any(e.wall_ns > first.wall_ns for first in firsts for e in by_gateway)


def was_one_worker(begun: Iterable[TraceEvent], run: Iterable[TraceEvent], phase: Phase) -> bool:
    """The group of the start ``begun`` had become one worker when the request came to ``phase``.  What came after the
    switch says nothing of a group of so many stages."""
    switched = [e for e in begun if e.name == Phase.CONSOLIDATE_END and "error" not in e.attrs]
    then = [e for e in run if e.name == phase]
    return any(s.boot_id == e.boot_id and s.mono_ns <= e.mono_ns for s in switched for e in then)


def foretold(events: Iterable[TraceEvent]) -> tuple[float, float | None] | None:
    """Return (predicted, bound) of a start in seconds, as its trace says, or None when nothing was predicted.  The
    bound is None when none of its terms was known."""
    attrs = next((e.attrs for e in events if e.name == Phase.PLANNED_END), {})
    predicted, bound = attrs.get("predicted_ttft_s"), attrs.get("bound_ttft_s")
    if not isinstance(predicted, int | float) or predicted <= 0:
        return None
    return float(predicted), float(bound) if isinstance(bound, int | float) else None


def _phase_s(events: Sequence[TraceEvent], begin: Phase, end: Phase) -> float | None:
    first = next((e for e in events if e.name == begin), None)
    last = next((e for e in reversed(events) if e.name == end), None)
    if first is None or last is None or first.boot_id != last.boot_id:
        return None
    took = (last.mono_ns - first.mono_ns) / 1e9
    return took if 0 <= took <= _LONGEST_S else None


def _sum_s(events: Sequence[TraceEvent], begin: Phase, end: Phase) -> float | None:
    """The sum of a phase that comes in parts, with other phases between them."""
    begins = [e for e in events if e.name == begin]
    ends = [e for e in events if e.name == end]
    parts = [_phase_s(pair, begin, end) for pair in zip(begins, ends, strict=False)]
    return math.fsum(p for p in parts if p is not None) if any(p is not None for p in parts) else None


def _copying(events: Sequence[TraceEvent]) -> tuple[float, int]:
    """Return (seconds, bytes) of loading the weights, without the wait for their bytes and without the rehearsal
    meanwhile."""
    took_s = _phase_s(events, Phase.LOAD_BEGIN, Phase.LOAD_END)
    end = _last(events, Phase.LOAD_END)
    if took_s is None or end is None:
        return 0.0, 0
    idle_s = math.fsum(_number(end, name) for name in ("wait_s", "rehearsal_s"))
    return max(0.0, took_s - idle_s), end.n_bytes or 0


def _copy_rate(events: Sequence[TraceEvent]) -> float | None:
    took_s, n_bytes = _copying(events)
    return n_bytes / took_s if took_s > 0 and n_bytes > 0 else None


def _memory_rate(events: Sequence[TraceEvent]) -> float | None:
    """The rate of a fetch, if another segment of its host had all of its bytes; else None."""
    took_s, end = _phase_s(events, Phase.FETCH_BEGIN, Phase.FETCH_END), _last(events, Phase.FETCH_END)
    if not took_s or end is None or not end.n_bytes or _number(end, "copied_bytes") < end.n_bytes:
        return None
    return end.n_bytes / took_s


def _last(events: Sequence[TraceEvent], name: Phase) -> TraceEvent | None:
    return next((e for e in reversed(events) if e.name == name), None)


def _number(event: TraceEvent, name: str) -> float:
    """An attribute that is a number; 0 where it is absent."""
    value = event.attrs.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


def _tail_s(events: Sequence[TraceEvent]) -> float | None:
    """Return the time from the moment when everything is there according to Eq. 5 (bytes, context and copy, libraries)
    to READY.  A start that fetched nothing has no last byte: from there on it loads a whole model, so it has no
    tail."""
    ready = next((e for e in reversed(events) if e.name == Phase.READY), None)
    there = [e for e in events if e.name in _ALL_IS_THERE]
    resident = any(e.name == Phase.FETCH_END and e.attrs.get("resident") is True for e in events)
    if resident or ready is None or not there or any(e.boot_id != ready.boot_id for e in there):
        return None
    copied_ns = [e.mono_ns + int(_copying(events)[0] * 1e9) for e in there if e.name == Phase.CONTEXT_END]
    took = (ready.mono_ns - max([*copied_ns, *(e.mono_ns for e in there)])) / 1e9
    return took if 0 <= took <= _LONGEST_S else None

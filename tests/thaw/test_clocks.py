"""Offsets between clocks are never outside the stated error, and an effect is never drawn before its cause."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from thaw.tracing.clocks import DRIFT, Reading, compare, event_of, narrowed, round_trip
from thaw.tracing.trace import Phase, TraceEvent

P = Phase
MS = 1_000_000
HOUR = 3_600_000 * MS
SERVER_ZERO = 1_700_000_000_000_000_000


@dataclass(frozen=True)
class Machine:
    """A machine whose wall clock is wrong.

    Its monotonic clock runs ``rate`` times as fast as the server's and began at another time.
    """

    boot: str
    began_ns: int
    wall_error_ns: int
    rate: float = 1.0

    def mono(self, server_ns: int) -> int:
        return self.began_ns + round((server_ns - SERVER_ZERO) * self.rate)

    def event(self, name: Phase, server_ns: int, host: str = "", stage: int = 0) -> TraceEvent:
        times = {"mono_ns": self.mono(server_ns), "wall_ns": server_ns + self.wall_error_ns}
        return TraceEvent(name, host=host, stage=stage, boot_id=self.boot, **times)


def machine(rng: random.Random, boot: str) -> Machine:
    return Machine(boot, rng.randrange(400 * 24 * HOUR), rng.randrange(-HOUR, HOUR), 1 + rng.uniform(-1, 1) * DRIFT / 2)


def heartbeat(rng: random.Random, here: Machine, server_ns: int) -> Reading:
    """A heartbeat that the server answers at ``server_ns``.

    The request and the answer travel for different times, of which some are long.
    """
    there, back = (round(rng.choice((0.05, 0.5, 40)) * rng.random() * MS) for _ in range(2))
    return round_trip(here.mono(server_ns - there), server_ns // 1000 * 1000, here.mono(server_ns + back))


def is_right(reading: Reading, here: Machine, server_ns: int) -> bool:
    return abs(server_ns - here.mono(server_ns) - reading.offset_ns) <= reading.error_ns


@pytest.mark.parametrize("seed", range(40))
def test_the_true_offset_is_always_within_the_stated_error(seed: int) -> None:
    rng = random.Random(seed)
    here, known, now_ns = machine(rng, "h"), None, SERVER_ZERO
    for _ in range(200):
        now_ns += rng.randrange(2000 * MS)
        single = heartbeat(rng, here, now_ns)
        known = narrowed(known, single)
        assert known.error_ns <= single.error_ns
        # the offset may be wanted for a later time, or for an event that happened before
        asked_ns = now_ns + 40 * MS + rng.randrange(-HOUR, HOUR)
        assert is_right(known.at(here.mono(asked_ns)), here, asked_ns)


def test_the_shortest_round_trip_decides_how_exact_it_is() -> None:
    known = None
    for i, delay_ms in enumerate((30, 0.2, 30, 30)):
        begun = i * 1000 * MS
        half = round(delay_ms * MS / 2)
        known = narrowed(known, round_trip(begun - half, SERVER_ZERO + begun, begun + half))
    assert known is not None
    assert known.error_ns == pytest.approx(0.1 * MS + 2000 * MS * DRIFT, rel=0.05)  # the good reading is 2 s old


def test_a_server_whose_clock_was_set_is_believed_from_then_on() -> None:
    first = round_trip(0, SERVER_ZERO, MS)
    second = round_trip(1000 * MS, SERVER_ZERO + HOUR, 1001 * MS)
    assert narrowed(first, second) == second


# ── a trace of several machines ───────────────────────────────────────────────────────────────────────────────────────

BOOTS = ("gateway", "scheduler", "h0", "h1", "h2")


def start(rng: random.Random, machines: list[Machine]) -> tuple[list[TraceEvent], dict[int, int]]:
    """A start on a gateway, a scheduler and three hosts, and the true time of each event, by the event's identity."""
    gateway, scheduler, *hosts = machines
    at = SERVER_ZERO + rng.randrange(HOUR)
    events: list[TraceEvent] = []
    truth: dict[int, int] = {}

    def add(here: Machine, name: Phase, when_ns: int, host: str = "", stage: int = 0) -> int:
        events.append(here.event(name, when_ns, host, stage))
        truth[id(events[-1])] = when_ns
        return when_ns

    def later(ns: int, most_ms: float = 3.0) -> int:
        return ns + 1 + rng.randrange(round(most_ms * MS))

    now = add(gateway, P.RECEIVED, at)
    now = add(scheduler, P.PLANNED_BEGIN, later(now))
    ready = []
    for stage, host in enumerate(hosts):
        begun = add(host, P.COMMAND, later(now), f"host-{stage}", stage)
        ready.append(add(host, P.READY, later(begun, 4000), f"host-{stage}", stage))
    add(scheduler, P.PLANNED_END, later(now))
    now = add(gateway, P.DISPATCHED, later(max(ready)))
    now = add(hosts[0], P.PREFILL_BEGIN, later(now), "host-0")
    now = add(hosts[0], P.PREFILL_END, later(now, 300), "host-0")
    now = add(gateway, P.FIRST_TOKEN, later(now))
    now = add(hosts[0], P.RUN_END, later(now, 900), "host-0")
    add(gateway, P.FINISHED, later(now))
    return events, truth


def readings(rng: random.Random, machines: list[Machine], events: list[TraceEvent]) -> list[TraceEvent]:
    """The readings that each machine adds to its first event, after some earlier heartbeats."""
    found = []
    for here in machines:
        like = next(e for e in events if e.boot_id == here.boot)
        server_ns = like.wall_ns - here.wall_error_ns
        known = None
        for before_s in (5, 4, 3, 2, 1):
            known = narrowed(known, heartbeat(rng, here, server_ns - before_s * 1000 * MS))
        assert known is not None
        found.append(event_of(known, like))
    return found


CAUSES = (
    (P.PLANNED_BEGIN, P.COMMAND),
    (P.DISPATCHED, P.PREFILL_BEGIN),
    (P.PREFILL_END, P.FIRST_TOKEN),
    (P.RUN_END, P.FINISHED),
)


@pytest.mark.parametrize("seed", range(60))
def test_every_event_stands_within_the_stated_error_of_its_time_and_no_effect_before_its_cause(seed: int) -> None:
    rng = random.Random(seed)
    machines = [machine(rng, boot) for boot in BOOTS]
    events, truth = start(rng, machines)
    told = readings(rng, machines, events) if seed % 3 else []  # without readings, only the order of events is known
    zero = events[0]
    clocks = compare([*events, *told], zero)
    assert set(clocks) == {m.boot for m in machines} - {"gateway"}

    def place_ns(e: TraceEvent) -> int:
        shift = clocks[e.boot_id].shift_ns if e.boot_id in clocks else 0
        return e.mono_ns + shift - zero.mono_ns

    for e in events:
        clock = clocks.get(e.boot_id)
        if clock is not None and clock.error_ns is None:
            assert not told
            continue
        off_ns = abs(place_ns(e) - (truth[id(e)] - truth[id(zero)]))
        # the axis is itself a clock with a drift of its own
        assert off_ns <= (clock.error_ns or 0 if clock else 0) + (place_ns(e) + 1) * DRIFT + 1
    if told:
        assert all(c.error_ns is not None and c.error_ns < 50 * MS for c in clocks.values())
        for cause, effect in CAUSES:
            last = max(place_ns(e) for e in events if e.name is cause)
            assert min(place_ns(e) for e in events if e.name is effect) >= last - round(10_000 * MS * DRIFT)


def test_readings_that_contradict_the_order_of_events_are_not_used() -> None:
    """The server's clock was set between two hosts' readings, so a command seems to arrive before its plan."""
    rng = random.Random(1)
    machines = [machine(rng, boot) for boot in BOOTS]
    events, _ = start(rng, machines)
    told = readings(rng, machines, events)
    moved = [
        replace(e, attrs={**e.attrs, "offset_ns": int(str(e.attrs["offset_ns"])) - HOUR}) if e.boot_id == "h0" else e
        for e in told
    ]
    clocks = compare([*events, *moved], events[0])
    assert clocks["h0"].shift_ns == compare(events, events[0])["h0"].shift_ns


def test_a_single_machine_has_nothing_to_compare() -> None:
    here = Machine("one", 5, 0)
    events = [here.event(P.RECEIVED, SERVER_ZERO), here.event(P.FINISHED, SERVER_ZERO + MS)]
    assert compare(events, events[0]) == {}

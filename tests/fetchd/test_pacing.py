"""The order of the readers of a shared link: ranks, deadlines, weights, and a link whose rate is not known yet."""

from __future__ import annotations

import math
import threading
import time
from typing import Self

import pytest

from fetchd.meter import KEPT, Meter
from fetchd.pacing import QUANTUM_BYTES, NetworkLink, Pacer, Share
from tests.fetchd.harness import wait_until

RATE = 20_000_000
WIRE = 200_000_000


class Readers:
    """Two readers of one fetch.  They read as fast as the pacer lets them, until the test ends them."""

    def __init__(
        self,
        link: NetworkLink,
        share: Share,
        pace: float | None = None,
        *,
        later: bool = False,
        wire: Wire | None = None,
    ) -> None:
        self.pacer, self.later, self._wire = Pacer(link, pace, share), later, wire
        self.taken = 0
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._read) for _ in range(2)]
        link.join(share)
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        while not self._ended.is_set():
            n_bytes = self.pacer.quantum(QUANTUM_BYTES)
            self.pacer.take(n_bytes, self._ended.is_set, later=self.later)
            if not self._ended.is_set():
                if self._wire is not None:
                    self._wire.carry(n_bytes)
                self.pacer.count(n_bytes)
                self.taken += n_bytes

    def end(self) -> None:
        if not self._ended.is_set():
            self._ended.set()
            self.pacer.wake()
            for thread in self._threads:
                thread.join(30)
            self.pacer.link.leave(self.pacer.share)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def due(seconds: float, **more: object) -> Share:
    return Share(deadline=time.monotonic() + seconds, **more)  # type: ignore[arg-type]


def test_a_link_gives_its_rate_whoever_asks_and_no_burst_after_a_pause() -> None:
    link = NetworkLink(RATE)
    began = time.monotonic()
    with Readers(link, Share()) as one, Readers(link, Share()) as two:
        wait_until(lambda: one.taken + two.taken > RATE // 2)
        seconds = time.monotonic() - began
        assert one.taken + two.taken <= RATE * seconds + 6 * QUANTUM_BYTES


def test_the_earliest_deadline_is_served_first_and_gives_the_link_back_when_it_ends() -> None:
    link = NetworkLink(RATE)
    with Readers(link, due(60)) as late, Readers(link, due(30)) as early, Readers(link, Share()) as plain:
        wait_until(lambda: early.taken > RATE // 4)
        assert late.taken + plain.taken < early.taken / 4
        early.end()
        before = late.taken
        wait_until(lambda: late.taken - before > RATE // 4)
        assert plain.taken < (late.taken - before) / 4


def test_under_equal_sharing_every_deadline_gets_the_same() -> None:
    link = NetworkLink(RATE, "equal")
    with Readers(link, due(60)) as one, Readers(link, due(30)) as two, Readers(link, Share()) as plain:
        wait_until(lambda: one.taken + two.taken > RATE // 2)
        assert 0.5 < one.taken / two.taken < 2
        assert plain.taken < one.taken / 4


def test_weights_divide_a_rank() -> None:
    link = NetworkLink(RATE)
    with Readers(link, Share(weight=3)) as heavy, Readers(link, Share(weight=1)) as light:
        wait_until(lambda: heavy.taken + light.taken > RATE // 2)
        assert 2 < heavy.taken / light.taken < 4.5


@pytest.mark.parametrize("last", ["background", "later"])
def test_background_and_later_parts_take_what_is_left_over(last: str) -> None:
    link = NetworkLink(RATE)
    rest = Readers(link, Share(background=last == "background", later=last == "later"), later=last == "later")
    with rest, Readers(link, Share(), pace=RATE / 2) as paced:
        wait_until(lambda: paced.taken > RATE // 4)
        assert rest.taken > paced.taken / 3, "the half that the pace leaves is wasted"
        paced.end()
        with Readers(link, Share()) as urgent:
            before = rest.taken
            wait_until(lambda: urgent.taken > RATE // 4)
            assert rest.taken - before < urgent.taken / 4


def test_a_deadline_that_has_passed_does_not_break_one_that_has_not() -> None:
    link = NetworkLink(RATE)
    with Readers(link, due(-1)) as missed, Readers(link, due(60)) as kept:
        wait_until(lambda: kept.taken > RATE // 4)
        assert missed.taken < kept.taken / 4


def test_a_pace_is_not_exceeded_and_a_changed_one_is_obeyed() -> None:
    link, pace = NetworkLink(None), 4_000_000
    began = time.monotonic()
    with Readers(link, Share(), pace=pace) as paced:
        wait_until(lambda: paced.taken > pace // 4)
        assert paced.taken <= pace * (time.monotonic() - began) + 4 * QUANTUM_BYTES
        paced.pacer.set(pace=None, deadline=math.inf, background=False, weight=1.0)
        before = paced.taken
        wait_until(lambda: paced.taken - before > 20 * pace, 15)  # at the old pace this would take 20 s


def test_on_an_unknown_link_the_better_rank_goes_alone_while_it_reads() -> None:
    link, best = NetworkLink(None), Share()
    link.join(best)
    pacer = Pacer(link, None, best)
    with Readers(link, Share(background=True)) as rest:
        for _ in range(1000):
            pacer.take(4096, lambda: False)
            pacer.count(4096)
        assert rest.taken == 0
        wait_until(lambda: rest.taken > 0)  # the fetch of the best rank has stopped reading, as if its store were gone
    link.leave(best)


def test_while_ranks_compete_the_link_is_kept_below_what_was_measured() -> None:
    link = NetworkLink(None)
    with Readers(link, Share()) as first:
        wait_until(lambda: link.bytes_per_s > 0)
        assert link.quantum() is None, "a lone fetch is not paced"
        with Readers(link, Share(background=True)):
            assert_kept_below_what_was_measured(link)
        assert link.quantum() is None
        first.end()


def test_where_nothing_lets_inference_pass_a_lone_fetch_leaves_it_room() -> None:
    link = NetworkLink(None, yields=True)
    with Readers(link, Share()):
        wait_until(lambda: link.bytes_per_s > 0)
        assert_kept_below_what_was_measured(link)


def assert_kept_below_what_was_measured(link: NetworkLink) -> None:
    with link._lock:  # every read may measure the link anew
        assert link._bucket.rate == pytest.approx(KEPT * link.bytes_per_s)


def test_who_reads_what_another_needs_reads_it_with_its_rank_and_without_pace() -> None:
    link = NetworkLink(RATE)
    with Readers(link, Share(background=True), pace=10_000) as slow, Readers(link, Share()) as plain:
        wait_until(lambda: plain.taken > RATE // 10)
        assert slow.taken < 100_000
        waiting = Pacer(link, None, due(30))
        with waiting.waiting_for([slow.pacer]):
            before = plain.taken
            wait_until(lambda: slow.taken > RATE // 4)
            assert plain.taken - before < slow.taken / 4
        before = slow.taken
        middle = plain.taken
        wait_until(lambda: plain.taken - middle > RATE // 10)
        assert slow.taken - before < RATE // 40


def test_a_cancel_wakes_a_sleeper() -> None:
    for pacer in (Pacer(NetworkLink(None), 1.0), Pacer(NetworkLink(1.0))):
        cancelled = threading.Event()
        sleeper = threading.Thread(target=pacer.take, args=(4096, cancelled.is_set))
        sleeper.start()
        cancelled.set()
        pacer.wake()
        sleeper.join(30)
        assert not sleeper.is_alive()


def test_a_quantum_is_never_more_than_asked_and_small_at_low_rates() -> None:
    assert Pacer(NetworkLink(None)).quantum(10**6) == 10**6
    assert Pacer(NetworkLink(1e9)).quantum(10**6) == QUANTUM_BYTES
    assert Pacer(NetworkLink(1e9), 200_000).quantum(10**6) == 10_000
    assert Pacer(NetworkLink(1e9), 1).quantum(100) == 100


class Wire:
    """A network with too many readers: it divides its rate among them and does not know their ranks."""

    def __init__(self, rate: float) -> None:
        self._rate, self._lock, self._free_at = rate, threading.Lock(), 0.0

    def carry(self, n_bytes: int) -> None:
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + n_bytes / self._rate
            wait = self._free_at - time.monotonic()
        threading.Event().wait(wait)


@pytest.mark.parametrize("yields", [False, pytest.param(True, marks=pytest.mark.full)])
def test_on_a_measured_link_the_best_rank_fills_the_wire_and_the_others_wait(yields: bool) -> None:
    wire, link = Wire(WIRE), NetworkLink(None, yields=yields)
    with Readers(link, Share(), wire=wire):
        wait_until(lambda: link.bytes_per_s > 0)
    with Readers(link, Share(background=True), wire=wire) as rest:
        wait_until(lambda: rest.taken > WIRE // 20)
        with Readers(link, due(60), wire=wire) as best:
            before = rest.taken
            wait_until(lambda: best.taken > WIRE // 2)
            assert rest.taken - before < best.taken / 4
        before = rest.taken
        wait_until(lambda: rest.taken - before > WIRE // 20)


def test_on_a_measured_link_the_others_get_what_a_paced_best_rank_leaves() -> None:
    wire, link = Wire(WIRE), NetworkLink(None)
    with Readers(link, Share(), wire=wire):
        wait_until(lambda: link.bytes_per_s > 0)
    paced = Readers(link, due(60), WIRE / 4, wire=wire)
    with Readers(link, Share(background=True), wire=wire) as rest, paced:
        wait_until(lambda: rest.taken > WIRE // 8)


UPTIMES_S = (0.0, 20.0, 10_000.0, 31_536_000.0)
"""A machine that just booted, two with clocks that round differently, and one that has been up for a year."""


@pytest.mark.parametrize("uptime_s", UPTIMES_S)
@pytest.mark.parametrize("link", [3e6, 125e6])
def test_a_measure_that_was_too_low_grows_until_the_link_does_not_follow(link: float, uptime_s: float) -> None:
    meter = Meter()
    now = measured(meter, 1e6, uptime_s)
    tops = []
    for _ in range(60):
        now, top = held_window(meter, link, now)
        tops.append(top)
    assert 0.999 * link <= meter.bytes_per_s <= 1.3 * link
    tries = [top for top in tops[-25:] if top > 1.001 * link]
    assert len(tries) <= 2, "once a minute it is filled for a window"


@pytest.mark.parametrize("uptime_s", UPTIMES_S)
def test_a_store_that_is_slow_for_a_while_does_not_lower_the_measure(uptime_s: float) -> None:
    meter = Meter()
    now = measured(meter, 50e6, uptime_s)
    for _ in range(10):
        now, _ = held_window(meter, 1e6, now)
    assert meter.bytes_per_s == pytest.approx(50e6, rel=0.01)


def measured(meter: Meter, rate: float, now: float) -> float:
    """Let the meter count a run of unpaced reading at ``rate``.  Return the time of its end."""
    meter.begin(now, clean=True)
    for _ in range(40):
        now += 1.0
        meter.count(int(rate), now)
    return now


def held_window(meter: Meter, link: float, now: float) -> tuple[float, float]:
    """Read for 2.1 s at the pace that follows from the measured rate.  Return the time of the end, and that pace."""
    for _ in range(21):
        now += 0.1
        allowed = KEPT * meter.bytes_per_s
        meter.count_held(int(0.1 * min(allowed, link)), now, allowed)
    return now, allowed

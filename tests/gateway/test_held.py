"""Requests that are held: each ends in time, sees every change, and costs no more than a look in a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest

from gateway.serving.hangup import ClientGone, Hangup
from gateway.serving.held import following
from gateway.serving.held.following import Followers, Following
from gateway.serving.held.until_news import LOOK_S, Held, Looks
from gateway.serving.held.work import WorkBook
from relay.state.endings import Cursor, Ending, Endings
from tests.gateway.waits import until
from thaw.errors import Throttled, Unavailable
from thaw.ids import ActivationId, Namespace
from thaw.process.bell import Bell

GUEST = Namespace("guest")


class Looked:
    """Counts the looks.  After ``n_blank`` looks without a result it finds news."""

    def __init__(self, n_blank: float = float("inf")) -> None:
        self.n, self.n_blank = 0, n_blank

    def __call__(self) -> tuple[float, bool]:
        self.n += 1
        return time.monotonic(), self.n > self.n_blank


class Rung(Looked):
    """Something changes during each look, after the look has read the state."""

    def __init__(self, bell: Bell, n_blank: float = float("inf")) -> None:
        super().__init__(n_blank)
        self.bell = bell

    def __call__(self) -> tuple[float, bool]:
        found = super().__call__()
        self.bell.ring()
        return found


def wait(held: Held, bell: Bell, look: Looked, wait_s: float = 60.0, hangup: Hangup | None = None) -> bool:
    return held.until_news(GUEST, hangup or Hangup(), wait_s, lambda: nullcontext(bell), look, bool)


@contextmanager
def ringing(*bells: Bell) -> Iterator[None]:
    """Ring the bells all the time, as changes by others do."""
    over = threading.Event()

    def ring() -> None:
        while not over.wait(0.0005):
            for bell in bells:
                bell.ring()

    thread = threading.Thread(target=ring)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_request_ends_in_time_and_looks_seldom_however_often_others_change_something() -> None:
    bell = Bell()
    look = Rung(bell)
    thread = threading.Thread(target=wait, args=(Held(8), bell, look, 3 * LOOK_S), daemon=True)
    with ringing(bell):
        thread.start()
        thread.join(20)
    assert not thread.is_alive()
    assert look.n <= 5


def test_news_between_a_look_and_the_sleep_is_seen() -> None:
    bell = Bell()
    assert wait(Held(8), bell, Rung(bell, 2)) is True


def test_whoever_hangs_up_and_whoever_is_left_at_the_worker_s_end_wait_no_more() -> None:
    held, bell, hangup = Held(8), Bell(), Hangup()
    look = Looked()
    with ThreadPoolExecutor(2) as pool:
        gone = pool.submit(wait, held, bell, look, 60.0, hangup)
        until(lambda: bell._listening)
        hangup.set()
        with pytest.raises(ClientGone):
            gone.result(20)
        left = pool.submit(wait, held, bell, Looked())
        until(lambda: bell._listening)
        held.end_all()
        assert left.result(20) is False
    assert wait(held, bell, Looked()) is False, "nobody is held any more"


def test_some_threads_are_left_for_requests_that_are_not_held() -> None:
    held = Held(4)
    with (
        held.held(GUEST, Hangup()),
        held.held(Namespace("other"), Hangup()),
        pytest.raises(Throttled),
        held.held(GUEST, Hangup()),
    ):
        pass
    with held.held(GUEST, Hangup()):
        pass


def test_what_many_look_at_is_read_once_for_all_of_them_and_so_is_its_error() -> None:
    looks, n_read, together = Looks[int](), [0], threading.Barrier(8)

    def read() -> int:
        n_read[0] += 1
        return n_read[0]

    def refuse() -> int:
        n_read[0] += 1
        raise Unavailable("away")

    def look(key: str, how: Callable[[], int]) -> int:
        together.wait(20)
        return looks.recent(key, how)[1]

    with ThreadPoolExecutor(8) as pool:
        assert [f.result(20) for f in [pool.submit(look, "a", read) for _ in range(8)]] == [1] * 8
        for asked in [pool.submit(look, "b", refuse) for _ in range(8)]:
            with pytest.raises(Unavailable):
                asked.result(20)
    assert n_read[0] == 2
    for n in range(2_000):
        looks.recent(n, lambda: 0)
    assert len(looks._looks) <= 256, "what is over takes no memory"


def most_looks(began_s: float) -> float:
    """The number of looks since then if all requests share them.  A request may begin late on a busy machine."""
    return 3 + (time.monotonic() - began_s) / LOOK_S


class Registry:
    """Counts how often it is read."""

    def __init__(self) -> None:
        self.n_read = 0

    def instances(self) -> list[Any]:
        self.n_read += 1
        return []

    def demand(self) -> list[Any]:
        return []


def test_requests_for_the_work_of_many_namespaces_share_one_reading_of_the_registry() -> None:
    registry, began_s = Registry(), time.monotonic()
    work, held = WorkBook(None, registry), Held(256)  # type: ignore[arg-type]
    mark = work.look(GUEST)[1][0]

    def ask(i: int) -> str:
        of = Namespace(f"n{i % 4}")
        return held.until_news(
            of,
            Hangup(),
            4 * LOOK_S,
            lambda: nullcontext(work.bell),
            lambda: work.look(of),
            lambda seen: seen[0] != mark,
        )[0]

    with ringing(work.bell), ThreadPoolExecutor(16) as pool:
        asked = [pool.submit(ask, i) for i in range(16)]
        assert {one.result(20) for one in asked} == {mark}
    assert registry.n_read <= most_looks(began_s)


def test_requests_that_wait_for_different_names_share_each_look_and_read_nothing_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The records of another name come all the time."""
    n_read, asked = [0], list[Cursor]()

    def after(_client: object, _namespace: Namespace, cursor: Cursor | None) -> Endings:
        assert cursor is not None
        asked.append(cursor)
        n_read[0] += 1
        new = tuple(Ending(Cursor(f"{i}-0", i), ActivationId("a" * 32), ("other",)) for i in range(n_read[0], 9))
        return Endings(new[-1].cursor if cursor.n < 8 else cursor, new if cursor.n < 8 else ())

    monkeypatch.setattr(following, "endings_after", after)
    followers, held, bell = Followers(None), Held(256), Bell()  # type: ignore[arg-type]
    began_s, first_looks_s = time.monotonic(), list[float]()

    def follow(i: int) -> bool:
        way, n_looks = Following(followers, GUEST, Cursor("0-0", 0), f"mine{i}", 30), 0

        def look() -> tuple[float, Following]:
            nonlocal n_looks
            found, n_looks = way.look(), n_looks + 1
            if n_looks == 1:
                first_looks_s.append(time.monotonic())
            return found

        return held.until_news(
            GUEST, Hangup(), 3 * LOOK_S, lambda: nullcontext(bell), look, lambda f: f.has_news
        ).has_news

    with ringing(bell), ThreadPoolExecutor(16) as pool:
        assert not any(one.result(20) for one in [pool.submit(follow, i) for i in range(16)])
    assert len(asked) <= most_looks(began_s)
    n_from_the_begin = sum(cursor.n == 0 for cursor in asked)
    assert n_from_the_begin <= 1 + (max(first_looks_s) - began_s) / LOOK_S, "each look is at what is newer"

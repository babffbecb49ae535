"""Garbage is collected between decisions."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from gateway.scheduler.io.gc_pauses import Pauses


@pytest.fixture
def as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


@pytest.mark.usefixtures("as_before")
def test_a_rebuilt_view_is_set_aside_and_thousands_of_new_objects_cause_no_pause() -> None:
    pauses, looked = Pauses(), list[str]()
    pauses.after_rebuild()
    assert gc.get_freeze_count() > 0
    assert gc.get_threshold() == (200_000, 10, 10)
    gc.callbacks.append(lambda phase, info: looked.append(phase))
    try:
        kept = [[i] for i in range(20_000)]
        assert looked == []
        pauses.after_heartbeats()
        assert looked == ["start", "stop"]
    finally:
        gc.callbacks.pop()
    assert len(kept) == 20_000
    assert not any(len(gc.get_objects(0)) > 10_000 for _ in range(1))  # the objects are no longer in generation 0


@pytest.mark.usefixtures("as_before")
def test_what_lives_long_is_looked_at_every_ten_minutes_and_the_young_after_every_heartbeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_at: list[int] = []
    monkeypatch.setattr(gc, "collect", looked_at.append)
    pauses = Pauses()
    for _ in range(1_200):
        pauses.after_heartbeats()
    assert [n for n, generation in enumerate(looked_at, start=1) if generation == 2] == [600, 1_200]
    assert set(looked_at) == {1, 2}

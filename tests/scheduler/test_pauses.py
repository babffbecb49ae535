"""Garbage is looked for between decisions."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from gateway.scheduler.pauses import Pauses


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
    gc.callbacks.append(lambda phase, info: looked.append(phase))
    try:
        kept = [[i] for i in range(20_000)]
        assert looked == []
        pauses.after_heartbeats()
        assert looked == ["start", "stop"]
    finally:
        gc.callbacks.pop()
    assert len(kept) == 20_000
    assert not any(len(gc.get_objects(0)) > 10_000 for _ in range(1))  # they are no longer young

"""Helpers for tests of the driver: containers that do one simple thing, and waiting for their ends."""

from __future__ import annotations

from typing import Any

import pytest

from invoker.drivers.base import Driver, Handle, Spec
from invoker.drivers.programs import PROGRAMS
from thaw.action import KIND_PYTHON

WAIT_S = 20.0
LISTENS = """
import os, socket, time
s = socket.socket(socket.AF_UNIX); s.bind(os.environ['THAW_SOCKET'] + '.new'); s.listen()
os.rename(os.environ['THAW_SOCKET'] + '.new', os.environ['THAW_SOCKET']); print('up', flush=True)
while True:
    s.accept()[0].close()
"""
"""A container that takes connections: it starts in a tenth of the time that a function's proxy needs."""


def spec(container_id: str = "one", role: str = "instance") -> Spec:
    return Spec(container_id, KIND_PYTHON, labels={"role": role}, memory_bytes=256 << 20 if role == "instance" else 0)


def cell(container_id: str = "cell") -> Spec:
    return spec(container_id, "stem-cell")


def runs(monkeypatch: pytest.MonkeyPatch, code: str = LISTENS) -> None:
    monkeypatch.setitem(PROGRAMS, KIND_PYTHON, ("-c", code))


def up(driver: Driver, wanted: Spec) -> Handle:
    return driver.connect(driver.start(driver.create(wanted), wanted), deadline_s=WAIT_S)


def by_hand(pod: dict[str, Any]) -> None:
    """Mark a pod as deleted, as ``kubectl delete`` does."""
    pod["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 1}

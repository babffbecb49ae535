"""One platform for all tests that do not break it.  The other tests start platforms of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.machine import Machine


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A running platform with the small real model in its store and the actions ``chat`` and ``hello``."""
    made = Machine(tmp_path_factory.mktemp("platform"), dict(os.environ))
    made.env["THAW_MODELS"] = f"file://{tmp_path_factory.getbasetemp()}, http://"  # tests damage models in directories
    try:
        made.up()
        made.thaw("model", "demo")
        made.thaw("action", "create", "chat", "--config", "examples/chat/chat.json")
        made.thaw("action", "create", "hello", "examples/hello/hello.py")
        yield made
    finally:
        made.down()
    assert made.leftovers() == []


@pytest.fixture
def own_machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path, dict(os.environ))
    try:
        yield made
    finally:
        made.down()
    assert made.leftovers() == []

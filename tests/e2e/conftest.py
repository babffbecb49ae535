"""Platforms that the tests of several modules share.  The tests that end or change one start platforms of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.e2e.bad_models import Shop
from tests.e2e.machine import Machine
from tests.order import is_last_module


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Machine]]:
    """The shared platforms that run now, by the fixture that gives them to tests."""
    kept: dict[str, Machine] = {}
    yield kept
    for machine in kept.values():  # a run that ended before the last test
        machine.down()


def start(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """A running platform with the small real model in its store and the actions ``chat`` and ``hello``."""
    made = Machine(tmp_path_factory.mktemp("platform"), dict(os.environ))
    made.env["THAW_MODELS"] = f"file://{tmp_path_factory.getbasetemp()}, http://"  # tests damage models in directories
    try:
        made.up()
        made.thaw("model", "demo")
        made.thaw("action", "create", "chat", "--config", "examples/chat/chat.json")
        made.thaw("action", "create", "hello", "examples/hello/hello.py")
    except BaseException:
        made.down()
        raise
    return made


def shared(
    name: str, request: pytest.FixtureRequest, running: dict[str, Machine], factory: pytest.TempPathFactory
) -> Iterator[Machine]:
    """The platform of fixture ``name``.  It starts with the first module that uses the fixture, and ends with the last
    one."""
    if name not in running:
        running[name] = start(factory)
    yield running[name]
    if is_last_module(request, name):
        made = running.pop(name)
        made.down()
        assert made.leftovers() == []


@pytest.fixture(scope="module")
def platform(
    request: pytest.FixtureRequest, running: dict[str, Machine], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Machine]:
    """A platform whose processes are left alone."""
    yield from shared("platform", request, running, tmp_path_factory)


@pytest.fixture(scope="module")
def besieged(
    request: pytest.FixtureRequest, running: dict[str, Machine], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Machine]:
    """A platform whose processes are killed.  It has to answer again after each test."""
    yield from shared("besieged", request, running, tmp_path_factory)


@pytest.fixture(scope="module")
def shop(
    request: pytest.FixtureRequest, running: dict[str, Machine], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shop]:
    """A platform on which only ``chat`` is warm, and that looks the same after each module."""
    for machine in shared("shop", request, running, tmp_path_factory):
        made = Shop(machine)
        with made.nothing_left_behind():
            yield made
        made.close()

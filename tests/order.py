"""The order in which tests run, and which of them may run side by side (``pytest -n``).

pytest-randomly shuffles the modules and the tests within each.  This module then corrects two things.  A test that needs
a shared fixture untouched comes before the others that share it, and a test that ends the fixture comes after them.
When tests run side by side, the modules that took longest in the last recorded run begin first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.durations import recorded
from tests.unchanged import leave_out

ONE_BY_ONE = {
    "docker": ("tests/docker/", "tests/conformance/test_driver.py"),  # a machine has one container engine
    "native": ("tests/native/",),  # they build into one folder
    "pipelines": tuple(  # they share one process that has imported vLLM, and plain vLLM's answers
        f"tests/thaw_runtime/test_{name}.py"
        for name in ("pipeline", "consolidated_pipelines", "scaled_up_pipelines", "families")
    ),
    "zygote": tuple(  # they share a zygote, and the process from which probes are forked
        f"tests/thaw_runtime/test_{name}.py"
        for name in ("vllm", "moves", "adapters", "embeddings", "kv_families", "preflight", "sampling", "amx")
    ),
    "platform": ("tests/e2e/", "tests/dev/"),  # each starts several engines, which fill the machine
}
"""Modules that run one after another, by the resource that they share."""


def unit_of(nodeid: str) -> str:
    """The unit of tests that one worker gets together: a test's module, or all modules that must not run beside it."""
    module = nodeid.partition("::")[0]
    return next((name for name, prefixes in ONE_BY_ONE.items() if module.startswith(prefixes)), module)


_RANKS = {"begins": -1, "ends": 1}


def in_place(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Put a test marked ``begins(fixture)`` before the tests of its module that share that fixture with it, and a test
    marked ``ends(fixture)`` after them.
    """
    fixtures = {i.path: str(mark.args[0]) for i in items for name in _RANKS for mark in i.iter_markers(name)}
    places: dict[object, int] = {}

    def place(n: int, item: pytest.Item) -> tuple[int, int]:
        if item.path not in fixtures:
            return n, 0
        parameters: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
        shared = (item.path, str(parameters.get(fixtures[item.path])))
        rank = sum(rank for name, rank in _RANKS.items() if item.get_closest_marker(name))
        return places.setdefault(shared, n), rank

    keys = {id(item): place(n, item) for n, item in enumerate(items)}
    return sorted(items, key=lambda item: keys[id(item)])


def beginners_first(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Put the module with a test marked ``begins(fixture)`` before the other modules that use the fixture, because
    modules may share it.
    """
    modules = list(dict.fromkeys(item.path for item in items))
    users: dict[str, set[Path]] = {}
    for item in items:
        for name in getattr(item, "fixturenames", ()):
            users.setdefault(name, set()).add(item.path)
    for beginner, name in {i.path: str(mark.args[0]) for i in items for mark in i.iter_markers("begins")}.items():
        first = min(modules.index(user) for user in users[name])
        modules.remove(beginner)
        modules.insert(first, beginner)
    places = {module: n for n, module in enumerate(modules)}
    return sorted(items, key=lambda item: places[item.path])


def is_last_module(request: pytest.FixtureRequest, fixture: str) -> bool:
    """Return True if no test of a later module uses this fixture."""
    items = request.session.items
    last = max(n for n, item in enumerate(items) if item.path == request.node.path)
    return not any(fixture in getattr(item, "fixturenames", ()) for item in items[last + 1 :])


def long_ones_first(items: Sequence[pytest.Item], seconds: Mapping[str, float]) -> list[pytest.Item]:
    """The units that take longest begin first, so that no worker ends long after the others.

    ``seconds``: what each module takes.
    """
    took = Counter[str]()
    for module in dict.fromkeys(item.nodeid.partition("::")[0] for item in items):
        took[unit_of(module)] += seconds.get(module, 0.0)  # type: ignore[assignment]
    places = {unit: n for n, unit in enumerate(dict.fromkeys(unit_of(item.nodeid) for item in items))}
    return sorted(items, key=lambda item: (-took[unit := unit_of(item.nodeid)], places[unit]))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:] = beginners_first(in_place(leave_out(config, items)))
    if hasattr(config, "workerinput"):
        items[:] = long_ones_first(items, recorded())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    config.option.loadscopereorder = False  # this module decides the order
    return Units(config, log)

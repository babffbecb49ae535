"""The rules of tests/order.py for the order in which tests run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests import durations
from tests.durations import is_quick
from tests.order import long_ones_first

pytest_plugins = ["pytester"]

MODULE = """
import pytest

@pytest.fixture(scope="module", params=["a", "b"])
def shared():
    yield {"alive": True, "untouched": True}

@pytest.mark.parametrize("n", range(5))
def test_uses_it(shared, n):
    assert shared["alive"]
    shared["untouched"] = False

@pytest.mark.begins("shared")
def test_needs_it_untouched(shared):
    assert shared["untouched"]

@pytest.mark.ends("shared")
def test_ends_it(shared):
    shared.update(alive=False, untouched=False)
"""


SHARING = """
from tests.order import is_last_module, pytest_collection_modifyitems
import pytest

@pytest.fixture(scope="session")
def running():
    kept = {}
    yield kept
    assert kept == {}

@pytest.fixture(scope="module")
def across(request, running):
    yield running.setdefault("across", {"untouched": True})
    if is_last_module(request, "across"):
        del running["across"]
"""
BEGINNER = """
import pytest

@pytest.mark.begins("across")
def test_needs_it_untouched(across):
    assert across["untouched"]
"""
USER = """
def test_uses_it(across):
    across["untouched"] = False
"""


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_modules_share_a_fixture_which_ends_with_the_last_one_and_is_untouched_for_who_begins(
    pytester: pytest.Pytester, seed: int
) -> None:
    pytester.makeconftest(SHARING)
    pytester.makeini("[pytest]\nmarkers =\n  begins(fixture): first")
    pytester.syspathinsert(Path(__file__).parents[1])
    others = {f"test_{n}": "def test_uses_nothing(running): assert set(running) <= {'across'}" for n in range(3)}
    pytester.makepyfile(test_a=USER, test_b=BEGINNER, test_c=USER, test_d=USER, **others)
    done = pytester.runpytest_inprocess("-p", "no:xdist", f"--randomly-seed={seed}")
    done.assert_outcomes(passed=7)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_who_begins_or_ends_a_fixture_comes_before_or_behind_those_that_share_it(
    pytester: pytest.Pytester, seed: int
) -> None:
    pytester.makeconftest("from tests.order import pytest_collection_modifyitems")
    pytester.makeini("[pytest]\nmarkers =\n  begins(fixture): first\n  ends(fixture): last")
    pytester.syspathinsert(Path(__file__).parents[1])
    pytester.makepyfile(test_one=MODULE, test_two=MODULE)
    done = pytester.runpytest_inprocess("-p", "no:xdist", f"--randomly-seed={seed}")
    done.assert_outcomes(passed=28)


def test_the_units_that_took_longest_begin_first_and_stay_together() -> None:
    nodes = ("tests/a/test_a.py::x", "tests/e2e/test_b.py::x", "tests/c/test_c.py::x", "tests/dev/test_d.py::x")
    items: list[Any] = [SimpleNamespace(nodeid=node) for node in (*nodes, "tests/a/test_a.py::y")]
    seconds = {"tests/a/test_a.py": 5.0, "tests/e2e/test_b.py": 3.0, "tests/dev/test_d.py": 4.0}
    ordered = [item.nodeid for item in long_ones_first(items, seconds)]
    assert ordered == [nodes[1], nodes[3], nodes[0], "tests/a/test_a.py::y", nodes[2]]  # e2e and dev are one unit


@pytest.mark.parametrize(
    ("module", "mark", "seconds", "quick"),
    [
        ("tests/relay/test_a.py", "", 2.9, True),
        ("tests/relay/test_a.py", "", 3.1, False),
        ("tests/relay/test_new.py", "", None, True),
        ("tests/relay/test_a.py", "vllm", 0.1, False),
        ("tests/e2e/test_a.py", "", 0.1, False),
    ],
)
def test_a_test_is_quick_without_an_engine_or_a_platform_and_in_a_short_module(
    module: str, mark: str, seconds: float | None, quick: bool
) -> None:
    item: Any = SimpleNamespace(nodeid=f"{module}::x", get_closest_marker=lambda name: name == mark)
    assert is_quick(item, {} if seconds is None else {module: seconds}) is quick


def test_a_recorder_adds_up_what_the_tests_of_a_module_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durations, "_FILE", tmp_path / "durations.json")
    recorder = durations.Recorder()
    for node, seconds in (("tests/b.py::x", 1.0), ("tests/a.py::x", 0.25), ("tests/b.py::y", 0.5)):
        recorder.pytest_runtest_logreport(cast(Any, SimpleNamespace(nodeid=node, duration=seconds)))
    recorder.pytest_sessionfinish(cast(Any, None), 0)
    assert durations.recorded.__wrapped__() == {"tests/a.py": 0.2, "tests/b.py": 1.5}

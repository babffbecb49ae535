"""The rules of tests/order.py for the order in which tests run."""

from __future__ import annotations

from pathlib import Path

import pytest

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

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

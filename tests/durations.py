"""How long each module of tests took in the last recorded run (durations.json): the long ones begin first, and
``make quick`` leaves them out.

``make test RECORD=1`` writes the file anew.  A module that is not in it counts as short.  ``python -m tests.durations
2`` prints the least time that two processes need for all of them, and the folders that need most.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

_FILE: Final = Path(__file__).with_suffix(".json")
_QUICK_S: Final = 3.0
"""The longest module of ``make quick``, which has two minutes for all of them."""
_WHOLE: Final = ("tests/e2e/", "tests/dev/", "tests/docker/", "tests/kubernetes_real/", "tests/native/")
"""These start platforms, containers or compilers."""


@cache
def recorded() -> dict[str, float]:
    found: dict[str, float] = json.loads(_FILE.read_text())
    return found


def is_quick(item: pytest.Item, seconds: dict[str, float]) -> bool:
    module = item.nodeid.partition("::")[0]
    if module.startswith(_WHOLE) or any(item.get_closest_marker(name) for name in ("vllm", "full", "kubernetes")):
        return False
    return seconds.get(module, 0.0) <= _QUICK_S


def pytest_itemcollected(item: pytest.Item) -> None:
    if is_quick(item, recorded()):
        item.add_marker(pytest.mark.quick)


class Recorder:
    """Adds up what the tests of each module take, with their fixtures, and writes the file at the run's end."""

    def __init__(self) -> None:
        self._seconds = Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration  # type: ignore[assignment]

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: Any) -> None:
        rounded = {module: round(seconds, 1) for module, seconds in sorted(self._seconds.items())}
        _FILE.write_text(json.dumps(rounded, indent=1) + "\n")


def least_s(seconds: dict[str, float], n_processes: int) -> float:
    """The least duration of a run whose processes never wait for one another."""
    return sum(seconds.values()) / n_processes


def main(n_processes: int = 2) -> None:
    by_folder = Counter[str]()
    for module, seconds in recorded().items():
        by_folder[module.rpartition("/")[0]] += seconds  # type: ignore[assignment]
    print(f"{n_processes} processes need at least {least_s(recorded(), n_processes):.0f} s")
    for folder, seconds in by_folder.most_common():
        print(f"{seconds:6.0f} s  {folder}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

"""A benchmark that claims figures of the relay ends where a trace names another path."""

from __future__ import annotations

import pytest

from bench import _paths
from thaw.tracing.trace import Phase, TraceEvent


def answer(*hops: str) -> list[TraceEvent]:
    return [TraceEvent(Phase.PREFILL_END, wall_ns=1, attrs={"hops": hops})]


@pytest.mark.parametrize(
    ("transport", "direct", "path"),
    [
        ("auto", False, "relay"),
        ("auto", True, "tcp"),
        ("redis", True, "tcp"),
        ("tcp", True, "tcp"),
        ("object", True, "object"),
    ],
)
def test_the_config_and_the_platform_decide_which_path_is_claimed(transport: str, direct: bool, path: str) -> None:
    assert _paths.expected(transport, direct=direct) == path


def test_a_pipeline_that_kept_to_the_relay_is_reported_as_that() -> None:
    assert _paths.checked(answer("relay", "relay"), 2, "relay") == "relay"
    assert _paths.checked(answer(), 1, "relay") == ""


@pytest.mark.parametrize(
    ("hops", "used"),
    [
        (("tcp", "tcp"), "tcp"),
        (("relay", "tcp"), "mixed"),
        (("relay", "unknown"), "mixed"),
        ((), "a path they did not name"),
    ],
)
def test_another_path_than_the_claimed_one_ends_the_benchmark(hops: tuple[str, ...], used: str) -> None:
    with pytest.raises(SystemExit, match=f"2 stages that were to use relay used {used}"):
        _paths.checked(answer(*hops), 2, "relay")


def test_answers_of_several_paths_are_a_mixture() -> None:
    assert _paths.together(["", "relay", "relay"]) == "relay"
    assert _paths.together(["relay", "tcp"]) == "mixed"
    assert _paths.together([""]) == ""

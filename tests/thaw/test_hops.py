"""The path of each hop of a pipeline, read from a request's events."""

from __future__ import annotations

import pytest

from thaw.tracing.hops import Hop, HopPath, hops_of, path_of
from thaw.tracing.trace import Phase, TraceEvent

RELAY, TCP, UNKNOWN = HopPath.RELAY, HopPath.TCP, HopPath.UNKNOWN


def told(name: Phase, wall_ns: int, *paths: object) -> TraceEvent:
    return TraceEvent(name, wall_ns=wall_ns, attrs={"hops": list(paths)})


def test_the_last_stage_s_hop_ends_at_the_first_stage() -> None:
    hops = hops_of([told(Phase.PREFILL_END, 1, "relay", "tcp", "relay")])
    assert hops == (Hop(0, 1, (RELAY,)), Hop(1, 2, (TCP,)), Hop(2, 0, (RELAY,)))


def test_a_path_that_changed_during_the_answer_is_told_in_the_order_of_time() -> None:
    hops = hops_of([told(Phase.RUN_END, 2, "tcp", "relay"), told(Phase.PREFILL_END, 1, "relay", "relay")])
    assert hops == (Hop(0, 1, (RELAY, TCP)), Hop(1, 0, (RELAY,)))


def test_a_single_container_has_no_hops() -> None:
    assert hops_of([TraceEvent(Phase.PREFILL_END)]) == ()
    assert path_of(()) == ""


@pytest.mark.parametrize(
    ("paths", "name"),
    [
        (("relay", "relay"), "relay"),
        (("tcp", "tcp"), "tcp"),
        (("relay", "tcp"), "mixed"),
        (("unknown", "tcp"), "mixed"),
    ],
)
def test_a_pipeline_has_one_path_or_a_mixture(paths: tuple[str, ...], name: str) -> None:
    assert path_of(hops_of([told(Phase.PREFILL_END, 1, *paths)])) == name


def test_what_an_older_command_line_does_not_know_is_called_unknown() -> None:
    assert hops_of([told(Phase.PREFILL_END, 1, "pigeon", [3])]) == (Hop(0, 1, (UNKNOWN,)), Hop(1, 0, (UNKNOWN,)))

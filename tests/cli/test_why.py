"""The output of `thaw activation explain` for a group: its size and other sizes, its hosts, its parallel fetches."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from thaw import wire
from thaw.cli.explanation import explain
from thaw.tracing.trace import Phase, TraceEvent

SIZES = [
    {"stages": 1, "full": 1, "why": "ttft", "ttft_s": 10.938, "tpot_s": 0.0058},
    {"stages": 2, "full": 1, "why": "chosen", "ttft_s": 6.709, "tpot_s": 0.0113},
    {"stages": 3, "full": 1, "why": "memory", "ttft_s": 4.756, "tpot_s": 0.017},
    {"stages": 4, "full": 1, "why": "no room"},
]
PLANNED = {
    "action": "guest/chat",
    "stages": 2,
    "full": 1,
    "host": "h0",
    "hosts": ["h0", "h1"],
    "transport": "redis",
    "predicted_ttft_s": 6.709,
    "bound_ttft_s": 6.5,
    "fallback": False,
    "slo_ttft_s": 7.5,
    "slo_tpot_s": 0.2,
    "t_w_s": 0.25,
    "sizes": SIZES,
}


def event(
    ms: float, name: Phase, host: str = "", stage: int = 0, n: int | None = None, attrs: dict[str, Any] | None = None
) -> TraceEvent:
    return TraceEvent(name, "a" * 32, "", stage, host, "boot", int(ms * 1e6), int(ms * 1e6), n, attrs or {})


def group(planned: dict[str, Any]) -> list[TraceEvent]:
    """The events of two stages whose fetches overlap for most of their time."""
    return [
        event(0, Phase.RECEIVED),
        event(1, Phase.PLANNED_BEGIN),
        event(2, Phase.PLANNED_END, attrs=planned),
        event(10, Phase.FETCH_BEGIN, "h0", 0),
        event(12, Phase.CONTAINER_BEGIN, "h1", 1),
        event(14, Phase.FETCH_BEGIN, "h1", 1),
        event(40, Phase.CONTAINER_END, "h1", 1),
        event(6010, Phase.FETCH_END, "h0", 0, 150_000_000),
        event(6514, Phase.FETCH_END, "h1", 1, 162_500_000),
        event(6600, Phase.FIRST_TOKEN),
    ]


def drawn(planned: dict[str, Any]) -> list[str]:
    screen = io.StringIO()
    reply = {"events": [wire.to_plain(e) for e in group(planned)], "plan": None}
    explain.show(Console(file=screen, width=120), reply, "a" * 32)
    return screen.getvalue().splitlines()


def test_a_groups_size_is_explained_by_what_the_others_were_worth() -> None:
    lines = drawn(PLANNED)
    at = lines.index("2 stages, 1 full, over redis: h0 (full), h1")
    assert lines[at + 1 : at + 6] == [
        "objective: first token in 7.50 s, of which 250 ms were waited when it was planned",
        "  1 stage, 1 full:  first token in 10.94 s, then 5.8 ms a token: first token later than the objective",
        "  2 stages, 1 full: first token in 6.71 s, then 11 ms a token: chosen",
        "  3 stages, 1 full: first token in 4.76 s, then 17 ms a token: in time too, but holds more memory",
        "  4 stages, 1 full: no room for so many workers on hosts of their own",
    ]


CANDIDATES = [
    {
        "host": "h0",
        "role": "full",
        "from": "remote",
        "ready_s": 6.5,
        "runtime_s": 0.7,
        "fetched_s": 6.5,
        "copied_s": 1.3,
        "queue_s": 0.4,
    },
    {
        "host": "host-1",
        "role": "low",
        "from": "memory",
        "ready_s": 3.1,
        "runtime_s": 3.1,
        "fetched_s": 0.2,
        "copied_s": 0.9,
        "cell_wait_s": 2.4,
    },
    {"host": "h2", "from": "resident", "ready_s": 0.9, "runtime_s": 0.7, "copied_s": 0.9},
    {"host": "h3", "from": "remote", "why": "promised"},
]


def test_each_host_that_was_looked_at_says_when_a_worker_would_have_its_part_there_and_why() -> None:
    lines = drawn(PLANNED | {"candidates": CANDIDATES})
    at = lines.index("a worker would have its part on")
    assert lines[at + 1 : at + 5] == [
        "  h0 (chosen, full):    after 6.50 s: its bytes come over the network; all there after 6.50 s, 400 ms of it"
        " behind others; runtime after 700 ms; copied after 1.30 s at the earliest",
        "  host-1 (chosen, low): after 3.10 s: its bytes are copied within host memory; all there after 200 ms;"
        " runtime after 3.10 s, 2.40 s of it until its stem cell is made; copied after 900 ms at the earliest",
        "  h2:                   after 900 ms: its bytes lie in host memory; runtime after 700 ms; copied after 900 ms"
        " at the earliest",
        "  h3:                   not now: would break the deadline of a fetch that was admitted",
    ]


def test_the_fetches_of_a_group_stand_one_above_the_other_and_are_added_up() -> None:
    lines = drawn(PLANNED)
    rows = [i for i, line in enumerate(lines) if " fetch " in line and "█" in line]
    assert len(rows) == 2
    assert rows[1] == rows[0] + 1
    together = [a == b == "█" for a, b in zip(*(lines[i] for i in rows), strict=False)]
    assert sum(together) > 40
    assert "2 fetches side by side: 298 MiB in 6.50 s, 384 Mbit/s; one after another 12.50 s" in lines


def test_a_forced_size_says_so_and_an_objective_that_cannot_be_had_too() -> None:
    forced = {k: v for k, v in PLANNED.items() if k != "sizes"} | {"fallback": True, "t_w_s": 0.0}
    lines = drawn(forced)
    assert "2 stages, 1 full, over redis: h0 (full), h1; the size was forced by scaling.stages" in lines
    assert "objective: first token in 7.50 s; it cannot be met, so no fetch has a deadline" in lines


@pytest.mark.parametrize("planned", [{}, {"action": "guest/hello", "stages": 1, "host": "h0"}])
def test_an_ordinary_function_has_no_reasons(planned: dict[str, Any]) -> None:
    assert not any(line.startswith(("objective", "1 stage")) for line in drawn(planned))

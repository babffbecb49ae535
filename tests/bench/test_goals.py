"""A benchmark's goals.  A value that was not measured, or that was measured on a paced link, meets no goal.

Time without an explanation counts as unexplained.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from bench._calibrate import Constants
from bench._common import figure, interleave, judge, report
from bench._explained import read_start
from bench._links import Link
from bench.cold_start import ColdRun, VllmRun, judge_all
from thaw.tracing.trace import Phase, TraceEvent

N_BYTES = 270_000_000
LINK = 1e9
MS = 1_000_000


def at(name: Phase, ms: float, n_bytes: int | None = None, **attrs: object) -> TraceEvent:
    ns = round(ms * MS)
    return TraceEvent(name, boot_id="one", mono_ns=ns, wall_ns=ns, n_bytes=n_bytes, attrs=attrs)


def phase(name: str, begin_ms: float, end_ms: float, n_bytes: int | None = None, **attrs: object) -> list[TraceEvent]:
    return [at(Phase(f"{name}.begin"), begin_ms), at(Phase(f"{name}.end"), end_ms, n_bytes, **attrs)]


def later(event: TraceEvent, ms: int, **attrs: object) -> TraceEvent:
    return replace(event, mono_ns=event.mono_ns + ms * MS, wall_ns=event.wall_ns + ms * MS, **attrs)


def start_events(before_fetch_ms: float = 0.0, fetch_ms: float = 270.0) -> list[TraceEvent]:
    """The events of a good start: everything happens during the fetch or shortly after it."""
    t = before_fetch_ms
    last = t + 5 + fetch_ms
    events = [
        at(Phase.RECEIVED, 0),
        *phase("queued", 1, last + 56),
        *phase("planned", 1, 4),
        *phase("fetch", 5 + t, last, N_BYTES, fetched_bytes=N_BYTES),
        at(Phase.FETCH_FIRST_BYTE, 8 + t),
        *phase("container", 5 + t, 45 + t),
        *phase("load", 60 + t, last + 25, wait_s=(fetch_ms - 120) / 1e3, cpu_s=0.09),
        *phase("engine", last + 25, last + 55),
        *phase("prefill", last + 57, last + 115),
        at(Phase.FIRST_TOKEN, last + 117),
        at(Phase.FINISHED, last + 225),
    ]
    return sorted(events, key=lambda event: event.mono_ns)


def cold_run(before_fetch_ms: float = 0.0, fetch_ms: float = 270.0) -> ColdRun:
    start = read_start(start_events(before_fetch_ms, fetch_ms), N_BYTES / fetch_ms * 1e3)
    return ColdRun(start.ttft_s, start, 0.06, {})


def goals_of(before_fetch_ms: float = 0.0, *, paced: bool = False) -> dict[str, bool]:
    constants = Constants(t_cc=0.04, t_l=7.0, t_l_cpu_s=7.0, copy_bytes_per_s=8e9)
    free, slow = (Link("any", "", rate, paced, None, None) for rate in (LINK, LINK / 40))  # type: ignore[arg-type]
    found: dict[str, list[ColdRun | VllmRun]] = {
        "stem_unlimited": [cold_run(before_fetch_ms)],
        "stem_200m": [cold_run(before_fetch_ms, 10_800)],
    }
    return {g.name: g.ok for g in judge_all(found, constants, N_BYTES, free, slow)}


def test_a_good_start_meets_every_goal() -> None:
    assert all(goals_of().values())


def test_two_seconds_before_the_fetch_fail_every_goal_but_the_tail() -> None:
    missed = ("first_byte_ms", "ttft_vs_bound_200m", "ttft_vs_bound_unlimited", "unexplained_ms")
    assert goals_of(2000) == {"tail_ratio": True, **dict.fromkeys(missed, False)}


def test_a_paced_link_satisfies_no_goal_about_the_link() -> None:
    goals = goals_of(paced=True)
    assert (goals["tail_ratio"], goals["ttft_vs_bound_200m"]) == (False, False)


def test_time_that_no_leaf_covers_is_unexplained() -> None:
    assert read_start(start_events(2000), LINK).unexplained_s == pytest.approx(2.0, abs=0.01)


def test_a_long_leaf_explains_only_what_its_evidence_does() -> None:
    events = [replace(e, attrs={}) if e.name is Phase.LOAD_END else e for e in start_events()]
    events = [later(e, 500) if e.mono_ns >= 300 * MS else e for e in events]
    # load now lasts 740 ms and has no evidence of waiting or computing; the fetch covers the time until 275 ms
    assert read_start(events, LINK).unexplained_s == pytest.approx(0.525, abs=0.01)


def test_the_prefill_of_a_busy_host_is_explained_by_what_its_thread_waited_for() -> None:
    def unexplained_s(**attrs: object) -> float:
        late = {Phase.PREFILL_END, Phase.FIRST_TOKEN, Phase.FINISHED}
        events = [later(e, 100, attrs=attrs) if e.name in late else e for e in start_events()]
        return read_start(events, LINK).unexplained_s

    # 158 ms, of which 100 ms need no evidence
    assert unexplained_s() - unexplained_s(cpu_s=0.06, core_wait_s=0.09) == pytest.approx(0.05, abs=0.001)
    assert unexplained_s() - unexplained_s(cpu_s=0.06, threads_wait_s=0.09) == pytest.approx(0.05, abs=0.001)


def test_bytes_explain_a_fetch_only_at_the_rate_of_the_link() -> None:
    slow = read_start(start_events(), LINK)
    fast = read_start([e for e in start_events() if e.name not in (Phase.LOAD_BEGIN, Phase.LOAD_END)], 10 * LINK)
    assert slow.unexplained_s < 0.02
    assert fast.unexplained_s > 0.15


def test_what_was_not_measured_is_missed() -> None:
    goal = judge("vs_iperf_1g", None, ">=", 0.98, floor="network namespaces need root")
    assert not goal.ok
    assert goal.floor == "network namespaces need root"


@pytest.mark.parametrize(
    ("value", "op", "goal", "ok"),
    [(2, "<=", 2, True), (2.1, "<=", 2, False), (1, "==", 1, True), (0.84, ">=", 0.85, False)],
)
def test_a_goal_is_compared_as_it_says(value: float, op: str, goal: float, ok: bool) -> None:
    assert judge("any", value, op, goal).ok is ok
    assert not judge("any", value, op, goal, paced=True).ok


def test_the_last_line_is_json_that_tells_goals_and_machine(capsys: pytest.CaptureFixture[str]) -> None:
    report(
        "fetch",
        [judge("vs_curl", 3.5, ">=", 3), judge("vs_boto3", 4, ">=", 5, floor="busy", rounds=1), figure("cpu_s", 0.0)],
        rounds=7,
    )
    plain = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert plain["bench"] == "fetch"
    assert plain["goals"] == [
        {"name": "vs_curl", "value": 3.5, "op": ">=", "goal": 3, "ok": True, "rounds": 7},
        {"name": "vs_boto3", "value": 4.0, "op": ">=", "goal": 5, "ok": False, "floor": "busy", "rounds": 1},
        {"name": "cpu_s", "value": 0.0, "rounds": 7},
    ]
    assert plain["rounds"] == 7
    assert plain["command"]
    assert plain["machine"]["cores"] >= 1
    assert len(plain["machine"]["load_1m"]) == 2
    assert plain["machine"]["dirty"] in (True, False)


def test_competitors_alternate_and_each_round_begins_with_another() -> None:
    order: list[str] = []
    interleave({name: lambda name=name: order.append(name) for name in "abc"}, 3)  # type: ignore[misc]
    assert "".join(order) == "abcbcacab"

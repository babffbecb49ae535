"""The explained time of a start, its evidence, and the phases of the unexplained rest."""

from __future__ import annotations

import itertools
import random

import pytest

from thaw.cli.explanation.evidence import evidence_lines
from thaw.tracing.evidence import Account, Explanation, explain
from thaw.tracing.timeline import Interval, Timeline, analyse
from thaw.tracing.trace import Phase, TraceEvent

P = Phase
LINK = 1e9
FETCHED = 500_000_000


def at(seconds: float, name: Phase, n_bytes: int | None = None, **attrs: object) -> TraceEvent:
    ns = round(seconds * 1e9)
    return TraceEvent(name, host="h", boot_id="b", mono_ns=ns, wall_ns=ns, n_bytes=n_bytes, attrs=attrs)


def spent(
    phase: str, begin_s: float, end_s: float, n_bytes: int | None = None, **evidence: object
) -> tuple[TraceEvent, TraceEvent]:
    """A phase from its begin to its end."""
    return at(begin_s, P(f"{phase}.begin")), at(end_s, P(f"{phase}.end"), n_bytes, **evidence)


def timeline_of(*events: TraceEvent, first_token_s: float = 5.0) -> Timeline:
    made = analyse([at(0, P.RECEIVED), *events, at(first_token_s, P.FIRST_TOKEN)])
    assert made is not None
    return made


def explained(*events: TraceEvent, first_token_s: float = 5.0, rate: float | None = LINK) -> Explanation:
    return explain(timeline_of(*events, first_token_s=first_token_s), lambda _: rate)


def account(explanation: Explanation, phase: str) -> Account:
    return next(a for a in explanation.accounts if a.phase.phase == phase)


def test_a_phase_of_100_ms_explains_itself_and_a_longer_one_only_what_its_evidence_covers() -> None:
    short = explained(*spent("kv", 0, 0.1), first_token_s=0.1)
    assert short.unexplained_s == pytest.approx(0)
    long = explained(*spent("libraries", 0, 5, cpu_s=3.0, core_wait_s=0.5, disk_wait_s=0.5))
    assert long.unexplained_s == pytest.approx(1.0)
    assert long.worst is not None
    assert (long.worst.phase, long.worst_s) == ("libraries", pytest.approx(1.0))


def test_a_phase_that_names_what_it_waited_for_and_measured_no_wait_explains_nothing_by_the_name() -> None:
    only_named = explained(*spent("planned", 0, 5, waits_for="room on a host"))
    assert only_named.unexplained_s == pytest.approx(4.9)
    measured = explained(*spent("planned", 0, 5, waits_for="room on a host", wait_s=4.9))
    assert measured.unexplained_s == pytest.approx(0.1)


def slow_fetch(fetch_s: float, wait_s: float) -> Explanation:
    """A start whose bytes take 0.5 s at the link's rate.  The load waits for them and works for 0.5 s more."""
    load = spent("load", 0, 5, wait_s=wait_s, waits_for="fetch", cpu_s=0.5)
    return explained(*spent("fetch", 0, fetch_s, FETCHED), *load)


def test_a_wait_for_another_phase_is_explained_as_far_as_that_phase_is() -> None:
    stalled = slow_fetch(fetch_s=4.5, wait_s=4.5)
    assert account(stalled, "load").unexplained_s == pytest.approx(0, abs=0.01)
    assert stalled.worst is not None
    assert stalled.worst.phase == "fetch"
    assert stalled.worst_s == pytest.approx(4.5 - 0.51)
    assert stalled.unexplained_s == pytest.approx(4.5 - 0.51)  # the load's waiting explains none of it


def test_a_wait_that_goes_on_after_what_was_waited_for_has_ended_is_unexplained_there() -> None:
    held_up = slow_fetch(fetch_s=0.5, wait_s=4.5)
    assert held_up.worst is not None
    assert held_up.worst.phase == "load"
    assert held_up.worst_s == pytest.approx(4.0, abs=0.01)
    assert held_up.unexplained_s == pytest.approx(4.0, abs=0.01)


def test_what_another_phase_explains_meanwhile_is_nobodys_unexplained_time() -> None:
    """An import holds the interpreter's lock, and a short phase at the same time cannot say what it waited for."""
    beside = explained(*spent("libraries", 0, 5, cpu_s=4.8), *spent("context", 1, 3, cpu_s=0.1))
    assert account(beside, "context").unexplained_s == pytest.approx(1.9)
    assert beside.worst is not None
    assert (beside.worst.phase, beside.worst_s) == ("libraries", pytest.approx(0.2))


def test_a_stop_explains_the_phase_of_the_stopped_process_and_no_other() -> None:
    stop = {"process": "engine", "signal": "SIGSTOP"}
    stopped = explained(
        *spent("fetch", 0, 0.5, FETCHED),
        *spent("load", 0, 3, wait_s=0.5, waits_for="fetch", cpu_s=0.5),
        *(at(1, P.STOPPED_BEGIN, **stop), at(3, P.STOPPED_END)),
        *spent("tokenizer", 3, 3.05),
        first_token_s=3.05,
    )
    assert stopped.unexplained_s == pytest.approx(0, abs=0.01)
    assert ("stopped", 2.0) in [(s.what, pytest.approx(s.seconds)) for s in account(stopped, "load").shares]
    others = [s.what for a in stopped.accounts if a.phase.phase != "load" for s in a.shares]
    assert others == ["its bytes at the link's rate"]
    assert "engine on h did not run for 2.00 s at 1.00 s, in load (SIGSTOP)" in list(evidence_lines(stopped))


def test_a_process_that_went_on_unseen_is_named_without_a_length_and_its_time_stays_unexplained() -> None:
    stop = at(3, P.STOPPED_BEGIN, process="engine", signal="SIGCONT"), at(3, P.STOPPED_END)
    seen = explained(*spent("load", 0, 5, cpu_s=2.0), *stop)
    assert seen.unexplained_s == pytest.approx(3.0)
    first = next(iter(evidence_lines(seen)))
    assert first == "engine on h went on at 3.00 s, in load (SIGCONT); it is not known how long it had been stopped"


def test_a_function_s_own_code_needs_no_evidence() -> None:
    ran = explained(*spent("run", 0, 5))
    assert ran.unexplained_s == pytest.approx(0)


def test_the_first_start_on_a_host_says_that_it_pulled_an_image() -> None:
    seen = explained(*spent("container", 0, 5, cpu_s=0.5, image_pull_s=4.2))
    assert seen.unexplained_s == pytest.approx(0.3)
    assert "pulling the image of its container, which the host did not have 4.20 s" in list(evidence_lines(seen))[1]


def test_bytes_explain_a_fetch_of_a_known_link_only_and_resident_ones_none() -> None:
    fetch = spent("fetch", 0, 5, FETCHED, cpu_s=4.0, reader_cpu_s=0.2)
    assert explained(*fetch).unexplained_s == pytest.approx(5 - 0.51)
    assert explained(*fetch, rate=None).unexplained_s == pytest.approx(4.8)  # other connections computed in parallel
    waited = (fetch[0], at(5, P.FETCH_END, FETCHED, reader_cpu_s=0.2, wait_s=4.7, waits_for="the store"))
    assert explained(*waited).unexplained_s == pytest.approx(0.1)
    resident = spent("fetch", 0, 5, FETCHED, resident=True)
    assert explained(*resident).unexplained_s == pytest.approx(4.9)


def test_what_is_explained_and_what_is_not_add_up_and_no_phase_covers_more_than_it_lasted() -> None:
    rng = random.Random(3)
    for _ in range(300):
        events = []
        for phase in ("fetch", "load", "kv", "container", "stopped"):
            begin = rng.uniform(0, 4)
            evidence = {n: rng.uniform(0, 3) for n in ("cpu_s", "wait_s", "disk_wait_s") if rng.random() < 0.5}
            said = {"process": "engine"} if phase == "stopped" else {"waits_for": rng.choice(("fetch", "fetchd"))}
            events += spent(phase, begin, begin + rng.uniform(0, 3), FETCHED, **evidence, **said)
        found = explained(*events)
        assert found.explained_s + found.unexplained_s == pytest.approx(5.0)
        assert -1e-9 <= found.unexplained_s <= 5.0
        for each in found.accounts:
            assert each.passed_on_s <= each.covered_s <= each.phase.seconds + 1e-9
            begin, end = each.span
            assert each.phase.begin_s - 1e-9 <= begin <= end + 1e-9 <= each.phase.end_s + 2e-9


def test_the_lines_name_the_longest_phases_their_evidence_and_the_phase_with_most_unexplained_time() -> None:
    libraries = spent("libraries", 0, 4, cpu_s=1.0, core_wait_s=0.5, major_faults=77, disk_bytes=300 << 20)
    lines = list(evidence_lines(explained(*libraries, *spent("kv", 4, 4.9, cpu_s=0.8))))
    said = "  libraries on h, 4.00 s: computing 1.00 s, waiting for a core 500 ms, unexplained 2.50 s"
    assert lines[1].startswith(said)
    assert "read 300 MiB from a disk, with 77 page faults" in lines[1]
    assert lines[2] == "  kv on h, 900 ms: computing 800 ms, unexplained 100 ms"
    assert lines[-1] == "explained: 2.30 s; unexplained: 2.70 s; the phase with most of it: libraries on h, 2.50 s"


def test_only_so_many_phases_get_a_line() -> None:
    timeline = timeline_of()
    leaves = tuple(Interval("kv", f"host-{i}", i, 0.0, 0.2 + i / 10) for i in range(9))
    many = explain(Timeline(leaves, (), 5.0, "first_token", ()), lambda _: None)
    lines = list(itertools.takewhile(lambda line: not line.startswith("explained"), evidence_lines(many)))
    assert lines[1].startswith("  kv on host-8, 1.00 s")
    assert lines[-1] == "  and 3 shorter ones"
    assert list(evidence_lines(explain(timeline, lambda _: None))) == ["explained: 0.0 ms; unexplained: 5.00 s"]

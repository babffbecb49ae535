"""No start is ever faster than its bound, in random histories and in recorded ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from gateway.scheduler.view.bound_terms import StageFacts, bound_terms
from gateway.scheduler.view.shortest_times import Best, Key, Least
from tests.scheduler.cluster import few_or_many
from tests.scheduler.starts import Recorded, event, phase, starts
from thaw import partition, wire
from thaw.instance import StartMode
from thaw.plan import Plan
from thaw.tracing.bound import Part, Source, Term, for_prompt, is_partial, least_s, prompt_bucket, with_this_start
from thaw.tracing.start_times import StageTook, StartTook, Took, start_took
from thaw.tracing.trace import Phase, TraceEvent

CHAT = "guest/chat"
_ROUNDING_S = 1e-6
RECORDED = json.loads((Path(__file__).parents[1] / "vectors" / "starts.json").read_text())["histories"]


def learn(best: Best, start: Recorded) -> None:
    took = start_took(start.events)
    best.learn_start(CHAT, start.kinds, took)
    if len(set(start.kinds)) == 1 and took.prefill_s is not None and took.prompt_tokens is not None:
        best.learn_prefill(CHAT, start.kinds[0], len(start.kinds), took.prompt_tokens, took.prefill_s)


def holds(history: Sequence[Recorded]) -> None:
    """Check the bounds of the starts in the order in which the scheduler sees them."""
    best = Best()
    for start in history:
        took = start_took(start.events)
        planned = bound_terms(best, CHAT, start.facts(as_it_went=False))
        shown = with_this_start(planned, took)
        assert (least_s(shown) or 0.0) <= start.measured_s + _ROUNDING_S
        learn(best, start)
        # the least of all starts, this one included
        known = for_prompt(bound_terms(best, CHAT, start.facts(as_it_went=True)), took.prompt_tokens or 0)
        assert (least_s(known) or 0.0) <= start.measured_s + _ROUNDING_S
        if len(set(start.kinds)) == 1:
            assert least_s(known) is not None


@few_or_many(300, 2_000, history=st.lists(starts(), min_size=1, max_size=5))
def test_no_start_is_ever_faster_than_its_bound(history: list[Recorded]) -> None:
    holds(history)


@few_or_many(300, 2_000, history=st.lists(starts(), min_size=1, max_size=4))
def test_a_start_that_is_repeated_is_no_faster_than_the_bound_that_its_plan_had(history: list[Recorded]) -> None:
    """If nothing in a start is new, the bound in its plan holds too, not only the bound that is shown afterwards."""
    best = Best()
    for start in history:
        learn(best, start)
    for start in history:
        planned = for_prompt(
            bound_terms(best, CHAT, start.facts(as_it_went=True)), start_took(start.events).prompt_tokens or 0
        )
        assert (least_s(planned) or 0.0) <= start.measured_s + _ROUNDING_S


def recorded(plain: dict[str, Any]) -> Recorded:
    events = tuple(wire.from_plain(TraceEvent, e) for e in plain["events"])
    plan = wire.from_plain(Plan, plain["plan"])
    by_name = {e.name: e for e in events}
    seconds = (by_name[Phase.FIRST_TOKEN].mono_ns - by_name[Phase.RECEIVED].mono_ns) / 1e9
    sizes = tuple(partition.size(s.first_ranges) for s in plan.stages)
    return Recorded(events, tuple("cpu" for _ in sizes), sizes, tuple(plain["declared_bytes_per_s"]), seconds)


@pytest.mark.parametrize("history", RECORDED, ids=lambda h: h["name"])
def test_no_recorded_start_is_faster_than_its_bound(history: dict[str, Any]) -> None:
    holds([recorded(start) for start in history["starts"]])


@pytest.mark.parametrize("history", RECORDED, ids=lambda h: h["name"])
def test_the_bound_that_a_recorded_plan_carries_holds_with_its_start(history: dict[str, Any]) -> None:
    for plain in history["starts"]:
        start, plan = recorded(plain), wire.from_plain(Plan, plain["plan"])
        shown_s = least_s(with_this_start(plan.bound_terms, start_took(start.events)))
        assert shown_s <= start.measured_s


def test_recorded_starts_are_of_every_kind() -> None:
    assert {h["name"] for h in RECORDED} == {"prewarmed", "cold", "resident", "group", "shaped"}
    took = [start_took(recorded(s).events) for h in RECORDED for s in h["starts"]]
    assert {len(t.stages) for t in took} == {1, 4}
    assert {s.mode for t in took for s in t.stages} == {"cold", "prewarmed"}
    assert {s.link_bytes > 0 for t in took for s in t.stages} == {True, False}


# the terms ───────────────────────────────────────────────────────────────────────────────────────────────────────────

ONE = StageFacts(0, "h0", "cpu", StartMode.PREWARMED, 100_000_000, 100_000_000, declared_bytes_per_s=50e6)


def took(seconds: dict[str, float], *, fetch_s: float = 2.0, mode: str = "prewarmed", **fields: Any) -> StartTook:
    parts = tuple(Took(part, value) for part, value in seconds.items())
    stage = StageTook(0, "h0", mode, parts, 100_000_000, 100_000_000, (0, int(fetch_s * 1e9)))
    return StartTook((replace(stage, **fields),))


def learned(*starts: StartTook, action: str = CHAT) -> Best:
    """What these starts of one stage have shown."""
    best = Best()
    for start in starts:
        best.learn_start(action, ["cpu"], start)
    return best


PHASES = {"container": 0.1, "context": 0.2, "model": 0.05, "kv": 0.05, "copy": 0.4, "engine": 0.01}


def term(terms: Sequence[Term], part: Part) -> Term:
    (found,) = [t for t in terms if t.part == part]
    return found


def test_of_a_kind_of_device_that_no_start_has_shown_only_the_bytes_are_known() -> None:
    terms = bound_terms(Best(), CHAT, [ONE])
    assert {t.part for t in terms if t.seconds is None} == {*PHASES, "prefill"}
    assert (least_s(terms), is_partial(terms)) == (pytest.approx(2.0), True)
    assert term(terms, Part.BYTES).source == Source.DECLARED


def test_a_start_from_a_stem_cell_has_no_libraries_in_its_bound_and_a_cold_one_has() -> None:
    best = learned(took(PHASES | {"libraries": 8.0}, mode="cold"), took(PHASES))
    prewarmed, cold = (bound_terms(best, CHAT, [replace(ONE, mode=m)]) for m in (StartMode.PREWARMED, StartMode.COLD))
    assert Part.LIBRARIES not in {t.part for t in prewarmed}
    assert term(cold, Part.LIBRARIES).seconds == 8.0


def test_the_least_of_all_starts_counts_and_not_their_mean() -> None:
    best = learned(*(took(PHASES | {"engine": engine_s}) for engine_s in (0.5, 0.1, 0.9)))
    engine = term(bound_terms(best, CHAT, [ONE]), Part.ENGINE)
    assert (engine.seconds, engine.source, engine.n_starts) == (0.1, Source.BEST, 3)


def test_what_depends_on_the_model_is_known_of_the_function_alone_and_the_rest_of_any() -> None:
    terms = bound_terms(learned(took(PHASES), action="guest/other"), CHAT, [ONE])
    assert {t.part for t in terms if t.seconds is None} == {"model", "kv", "engine", "prefill"}


def test_the_bytes_take_the_declared_rate_or_the_best_that_was_seen_whichever_is_higher() -> None:
    best = learned(took({}, fetch_s=4.0))  # 25 MB/s
    assert term(bound_terms(best, CHAT, [ONE]), Part.BYTES).source == Source.DECLARED
    best.learn_start(CHAT, ["cpu"], took({}, fetch_s=1.0))
    seen = term(bound_terms(best, CHAT, [ONE]), Part.BYTES)
    assert (seen.seconds, seen.source, seen.n_starts) == (pytest.approx(1.0), Source.BEST, 2)
    measured = replace(ONE, declared_bytes_per_s=None, measured_bytes_per_s=200e6)
    assert term(bound_terms(best, CHAT, [measured]), Part.BYTES).source == Source.MEASURED


def test_without_a_rate_that_somebody_names_the_bytes_are_unknown() -> None:
    bytes_ = term(bound_terms(Best(), CHAT, [replace(ONE, declared_bytes_per_s=None)]), Part.BYTES)
    assert (bytes_.seconds, bytes_.source) == (None, Source.UNKNOWN)


def test_a_fetch_that_is_too_short_to_tell_the_rate_has_no_term_and_teaches_none() -> None:
    best = learned(took({}, fetch_s=0.001, link_bytes=1_000_000))
    assert best.link("h0") is None
    assert term(bound_terms(best, CHAT, [replace(ONE, link_bytes=1_000_000)]), Part.BYTES).seconds is None


def test_stages_that_share_a_host_share_its_link() -> None:
    two = [ONE, replace(ONE, stage=1)]
    assert least_s(bound_terms(Best(), CHAT, two)) == pytest.approx(4.0)
    assert least_s(bound_terms(Best(), CHAT, [ONE, replace(ONE, stage=1, host="h1")])) == pytest.approx(2.0)


def test_the_chains_run_side_by_side_and_the_engine_and_the_prefill_follow() -> None:
    best = learned(took(PHASES, fetch_s=2.0))
    best.learn_prefill(CHAT, "cpu", 1, 60, 0.3)
    assert least_s(bound_terms(best, CHAT, [ONE])) == pytest.approx(2.0 + 0.01 + 0.3)
    here = bound_terms(best, CHAT, [replace(ONE, link_bytes=0)])
    assert least_s(here) == pytest.approx(0.1 + 0.2 + 0.05 + 0.05 + 0.4 + 0.01 + 0.3)


def test_the_prefill_is_that_of_prompts_as_long_else_of_shorter_ones_and_never_of_longer_ones() -> None:
    best = Best()
    for tokens, seconds in ((60, 0.3), (700, 1.2)):
        best.learn_prefill(CHAT, "cpu", 1, tokens, seconds)
    terms = bound_terms(best, CHAT, [ONE])
    found = [term(for_prompt(terms, n), Part.PREFILL).seconds for n in (5, 33, 64, 65, 600, 5_000)]
    assert found == [None, 0.3, 0.3, 0.3, 1.2, 1.2]
    assert [prompt_bucket(n) for n in (0, 16, 17, 64, 65)] == [16, 16, 32, 64, 128]


def test_a_start_that_beats_its_plan_is_shown_with_what_it_showed_itself() -> None:
    best = learned(took(PHASES))
    planned = bound_terms(best, CHAT, [replace(ONE, link_bytes=0)])
    shown = with_this_start(planned, took(PHASES | {"context": 0.15}, link_bytes=0, fetch=None))
    context = term(shown, Part.CONTEXT)
    assert (context.seconds, context.source) == (0.15, Source.THIS_START)
    assert term(shown, Part.CONTAINER).source == Source.BEST
    assert term(shown, Part.PREFILL).seconds is None, "what no start had shown before stays unknown"


def test_bytes_that_did_not_cross_the_link_after_all_are_no_part_of_the_bound() -> None:
    """The scheduler's last heartbeat was too old to say that the host already had the bytes."""
    planned = bound_terms(Best(), CHAT, [ONE])
    here = term(with_this_start(planned, took({}, link_bytes=0, fetch=(0, 0))), Part.BYTES)
    half = term(with_this_start(planned, took({}, link_bytes=50_000_000, fetch_s=1.5)), Part.BYTES)
    assert (here.seconds, half.seconds) == (0.0, pytest.approx(1.0))


def test_a_stage_whose_trace_is_not_there_makes_no_part_of_the_bound() -> None:
    shown = with_this_start(bound_terms(Best(), CHAT, [ONE]), StartTook())
    assert least_s(shown) is None


def test_a_moment_that_two_phases_cover_counts_once() -> None:
    imports = [*phase("container", 0, 1, mode="cold"), *phase("context", 1, 1.5), *phase("libraries", 0.5, 4)]
    (stage,) = start_took([*imports, event(Phase.READY, 5), *phase("context", 4, 4.25)]).stages
    seconds = {t.part: t.seconds for t in stage.parts}
    assert seconds == pytest.approx({"container": 1, "context": 0.75, "libraries": 2.5})


def test_what_is_kept_of_a_deleted_function_goes_and_of_hosts_and_devices_stays() -> None:
    best = learned(took(PHASES))
    best.learn_prefill(CHAT, "cpu", 1, 60, 0.3)
    gone = best.forget(CHAT)
    assert {key.what for key in gone} == {"model", "kv", "engine", "prefill"}
    assert best.actions() == set()
    assert best.link("h0") is not None


def test_a_key_is_read_as_it_was_written_and_one_of_another_version_is_passed_over() -> None:
    for key in (Key("engine", "NVIDIA H200", "cold", 4, 0, CHAT), Key("link", of="host|7")):
        assert Key.parse(str(key)) == key
    assert Key.parse("guest/chat|cpu|cold") is None
    assert Key.parse("engine|cpu|cold|four|0|guest/chat") is None


def test_values_that_are_no_numbers_teach_nothing() -> None:
    best = Best({Key("link", of="h0"): Least(1e-8, 3)})
    assert best.learn_prefill(CHAT, "cpu", 1, 5, float("nan")) == {}
    assert best.link("h0") == Least(1e-8, 3)


def test_a_copy_within_memory_takes_the_best_rate_that_a_copy_has_had_and_never_a_links() -> None:
    best = learned(took({}, fetch_s=0.5, link_bytes=0, within_memory=True), took({}, fetch_s=0.2))
    terms = bound_terms(best, CHAT, [replace(ONE, stage=0, part_bytes=50_000_000, link_bytes=0, within_memory=True)])
    assert terms[0] == Term(Part.MEMORY, pytest.approx(0.25), Source.BEST, 0, "h0", 1, 50_000_000)


def test_every_term_names_its_stage_its_host_and_its_bytes() -> None:
    best = Best()
    best.learn_prefill(CHAT, "cpu", 3, 60, 0.3)
    here = replace(ONE, link_bytes=0)
    three = [
        here,
        replace(here, stage=1, host="h1", is_shared=True),
        replace(here, stage=2, host="h2", within_memory=True),
    ]
    terms = bound_terms(best, CHAT, three)
    assert [t for t in terms if t.part in (Part.BYTES, Part.MEMORY, Part.PREFILL)] == [
        Term(Part.BYTES, 0.0, Source.RESIDENT, 0, "h0"),
        Term(Part.BYTES, 0.0, Source.SHARED, 1, "h1"),
        Term(Part.MEMORY, None, Source.UNKNOWN, 2, "h2", n_bytes=100_000_000),
        Term(Part.PREFILL, 0.3, Source.BEST, n_starts=1, prompt_tokens=64),
    ]
    assert [t for t in terms if t.part == Part.COPY] == [
        Term(Part.COPY, None, Source.UNKNOWN, k, f"h{k}", n_bytes=100_000_000) for k in range(3)
    ]
    assert {(t.stage, t.host) for t in terms if t.part == Part.ENGINE} == {(0, "h0"), (1, "h1"), (2, "h2")}


def test_the_engine_of_whichever_stage_is_last_follows_the_bytes_that_share_a_link() -> None:
    best = Best()
    best.learn_start(CHAT, ["cpu", ""], took({"engine": 0.5}))
    two = bound_terms(best, CHAT, [ONE, replace(ONE, stage=1)])
    assert least_s(two) == pytest.approx(2.0 + 2.0 + 0.5)
    mixed = bound_terms(best, CHAT, [ONE, replace(ONE, stage=1, device_kind="A10")])
    assert least_s(mixed) == pytest.approx(4.0), "the stage whose engine takes no known time may be the last"


def test_a_trace_tells_the_prefill_of_its_prompt_and_which_bytes_crossed_the_link() -> None:
    prefill = [event(Phase.PREFILL_BEGIN, 5, prompt_tokens=35), event(Phase.PREFILL_END, 5.5)]
    again = [event(Phase.PREFILL_BEGIN, 7, prompt_tokens=90), event(Phase.PREFILL_END, 9)]
    told = start_took([*prefill, *again])
    assert (told.prefill_s, told.prompt_tokens) == (0.5, 35)
    for copied, crossed, within in ((0, 900, False), (300, 600, False), (900, 0, True)):
        fetch = phase("fetch", 1, 3, 900, copied_bytes=copied)
        (stage,) = start_took([*fetch, event(Phase.READY, 4)]).stages
        assert (stage.link_bytes, stage.within_memory, stage.fetch_s) == (crossed, within, 2.0)
    for torn in ([event(Phase.FETCH_BEGIN, 1)], [event(Phase.FETCH_END, 3, 900)]):
        (stage,) = start_took([*torn, event(Phase.READY, 4)]).stages
        assert (stage.fetch, stage.part_bytes) == (None, 0)

"""A start on a host that has the model in memory is a path of its own: nothing is fetched there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.scheduler.decisions import StartGroup
from gateway.scheduler.view.history import Measured
from relay.protocol.messages import ModelInspected
from tests.scheduler.facts import CHAT, FACTS, MIB, SMOLLM2, chat, report
from tests.scheduler.world import foretold_s, llm_world, of, starting
from thaw.host import Device, Resident
from thaw.ids import HostId
from thaw.instance import StartMode

SLOW = 1e6  # at this rate 100 MiB take 105 s


def test_a_model_in_memory_beats_a_less_loaded_host_and_its_link_is_not_booked() -> None:
    there = report("h1", network_bytes_per_s=SLOW, resident=(Resident("s3://m/x", FACTS.weight_bytes),))
    w, start = starting(llm_world(report("h0", network_bytes_per_s=SLOW), there))
    assert [s.host for s in start.plan.stages] == ["h1"]
    assert start.attrs["fallback"] is False
    assert w.view.hosts[HostId("h1")].ledger.fetches() == {}


@pytest.mark.parametrize(
    ("resident", "is_fetched"),
    [
        (Resident("s3://m/x", FACTS.weight_bytes // 2), True),
        (Resident("s3://m/other", 10**12), True),
        (Resident("s3://m/x", FACTS.n_bytes, "the former"), True),
        (Resident("s3://m/x", FACTS.n_bytes, FACTS.sha256), False),
    ],
    ids=["a part of it", "another model", "its former version", "the model"],
)
def test_what_is_not_the_whole_model_in_its_newest_version_is_fetched_like_any(
    resident: Resident, is_fetched: bool
) -> None:
    w, start = starting(llm_world(report("h0", network_bytes_per_s=SLOW, resident=(resident,))))
    assert start.attrs["fallback"] is is_fetched
    assert len(w.view.hosts[HostId("h0")].ledger.fetches()) == is_fetched
    assert (foretold_s(start) > FACTS.n_bytes / SLOW) is is_fetched


def test_what_a_host_has_given_up_is_forgotten_with_its_next_report() -> None:
    w = llm_world(report("h0"), report("h1", resident=(Resident("s3://m/x", FACTS.n_bytes),)))
    assert set(w.view.index.with_model("s3://m/x", "")) == {"h1"}
    w.see(report("h0"), report("h1"))
    assert set(w.view.index.with_model("s3://m/x", "")) == set()


@pytest.mark.parametrize(("content", "host"), [("c0ffee", "h1"), ("another", "h0")])
def test_a_model_of_a_hub_lies_where_another_one_with_the_same_files_lies(content: str, host: str) -> None:
    mine, other = "a" * 40, "b" * 40
    uri = f"hf://org/x@{mine}"
    there = Resident(f"hf://other/copy@{other}", FACTS.n_bytes, f"{other}.{content}")
    w = llm_world(
        report("h0", network_bytes_per_s=2 * SLOW),
        report("h1", network_bytes_per_s=SLOW, resident=(there,)),
        facts=chat(model_uri=uri),
    )
    w.answers_looks = False
    w.ask(CHAT)
    facts = replace(FACTS, uri=uri, name=uri, sha256="", etag=f"{mine}.c0ffee")
    (start,) = of(w.do(ModelInspected(uri, HostId("h0"), facts)), StartGroup)
    assert [s.host for s in start.plan.stages] == [host]
    assert bool(w.view.hosts[HostId(host)].ledger.fetches()) == (host == "h0")


def test_stages_on_a_host_that_has_the_model_copy_their_parts_and_book_no_link() -> None:
    there = report("h0", network_bytes_per_s=SLOW, resident=(Resident("s3://m/x", SMOLLM2.n_bytes, "aa"),))
    w, start = starting(llm_world(there, facts=chat(forced_stages=2), model=SMOLLM2, relay_url="redis://relay:1"))
    assert w.view.hosts[HostId("h0")].ledger.fetches() == {}
    assert start.plan.predicted_ttft_s < SMOLLM2.n_bytes / SLOW
    assert start.plan.bound_ttft_s is None  # no start has shown yet how fast parts are copied


def test_what_is_explained_of_the_chosen_hosts_is_what_the_start_was_placed_by() -> None:
    there = Resident("s3://m/x", SMOLLM2.n_bytes, "aa")
    reports = [report(f"h{i}", network_bytes_per_s=25e6, resident=(there,) if i == 3 else ()) for i in range(4)]
    w = llm_world(*reports, facts=chat(forced_stages=3), model=SMOLLM2, relay_url="redis://relay:1")
    w.view.history.update(CHAT, "cpu", StartMode.COLD, Measured(t_p=0.3, t_n=0.01, t_tail=0.2, memory=50e6, copy=80e6))
    start = w.started(CHAT)
    explained = start.attrs["candidates"]
    assert isinstance(explained, list)
    assert [c["host"] for c in explained[:3]] == [s.host for s in start.plan.stages]
    assert {c["host"]: c["from"] for c in explained}["h3"] == "memory"  # a part is copied into a segment of its own
    worst_s = max(c["ready_s"] for c in explained[:3])
    assert start.plan.predicted_ttft_s == pytest.approx(worst_s + 0.3 + 3 * 0.01 + 0.2, abs=0.002)
    assert {c.get("copied_s") for c in explained} != {None}


def test_a_rate_that_starts_have_shown_moves_the_place_of_the_next_one() -> None:
    """A resident model wins because it needs no link, and loses where the copy to the device is known to be slow."""
    devices = {k: (Device("cuda:0", k, 4096 * MIB, 4096 * MIB),) for k in ("A10", "V100")}
    here = Resident("s3://m/x", FACTS.n_bytes, "aa")
    reports = (
        report("h0", devices=devices["A10"], network_bytes_per_s=10e6),
        report("h1", devices=devices["V100"], network_bytes_per_s=10e6, resident=(here,)),
    )
    for copy, chosen in ((12e9, "h1"), (5e6, "h0")):
        w = llm_world(*reports, facts=chat(max_stages=1))
        w.view.history.update("guest/other", "V100", StartMode.COLD, Measured(copy=copy))
        start = w.started(CHAT)
        assert start.plan.stages[0].host == chosen


_HERE = Resident("s3://m/x", SMOLLM2.n_bytes, "aa")
_HOST = st.fixed_dictionaries(
    {
        "network_bytes_per_s": st.sampled_from([SLOW, 25e6, 1e9]),
        "resident": st.sampled_from(
            [(), (_HERE,), (replace(_HERE, version="former"),), (replace(_HERE, n_bytes=10**7),)]
        ),
        "stem_kinds": st.sampled_from([(), ("llm:vllm",)]),
    }
)
_TIMES = st.fixed_dictionaries(
    {n: st.floats(0.001, 3.0) for n in ("t_cc", "t_cu", "t_l", "t_p", "t_d", "t_n", "t_tail")}
)


@settings(max_examples=150, deadline=None)
@given(
    hosts=st.lists(_HOST, min_size=1, max_size=4),
    cold=_TIMES,
    prewarmed=_TIMES,
    stages=st.sampled_from([None, 1, 2, 4]),
    slo_ttft_s=st.sampled_from([1.0, 7.5, 60.0]),
    n=st.integers(1, 3),
)
def test_no_start_is_foretold_earlier_than_idle_links_allow(
    hosts: list[dict[str, Any]], cold: Any, prewarmed: Any, stages: int | None, slo_ttft_s: float, n: int
) -> None:
    """This holds for any known times, wherever the model is, and whichever other fetches are in progress."""
    reports = [report(f"h{i}", memory_mb=16_384, **fields) for i, fields in enumerate(hosts)]
    facts = chat(forced_stages=stages, max_stages=4, slo_ttft_s=slo_ttft_s, slots=1)
    w = llm_world(*reports, facts=facts, model=SMOLLM2, relay_url="redis://relay:1")
    w.view.history.update(CHAT, "cpu", StartMode.COLD, Measured(**cold))
    w.view.history.update(CHAT, "cpu", StartMode.PREWARMED, Measured(**prewarmed))
    for start in [s for _ in range(n) for s in of(w.ask(CHAT), StartGroup)]:
        assert start.plan.predicted_ttft_s >= (start.plan.bound_ttft_s or 0.0) - 1e-9

"""A host that has the model in memory is a start path of its own: nothing is fetched there."""

from __future__ import annotations

from gateway.scheduler.decisions import StartGroup
from gateway.scheduler.events import HostsSeen
from tests.scheduler.test_policy import CHAT, FACTS, llm_world, of, report
from thaw.host import Resident
from thaw.ids import HostId

SLOW = 1e6  # 100 MiB take 105 s


def test_a_model_in_memory_beats_a_less_loaded_host_and_its_link_is_not_booked() -> None:
    there = report("h1", network_bytes_per_s=SLOW, resident=(Resident("s3://m", FACTS.weight_bytes),))
    w = llm_world(report("h0", network_bytes_per_s=SLOW), there)
    (start,) = of(w.ask(CHAT), StartGroup)
    assert [s.host for s in start.plan.stages] == ["h1"]
    assert start.attrs["fallback"] is False
    assert w.view.hosts[HostId("h1")].ledger.fetches() == {}


def test_a_part_of_a_model_or_another_one_is_fetched_like_any() -> None:
    for resident in (Resident("s3://m", FACTS.weight_bytes // 2), Resident("s3://other", 10**12)):
        w = llm_world(
            report("h0", network_bytes_per_s=SLOW), report("h1", network_bytes_per_s=SLOW, resident=(resident,))
        )
        (start,) = of(w.ask(CHAT), StartGroup)
        assert start.attrs["fallback"] is True
        assert len(w.view.hosts[start.plan.stages[0].host].ledger.fetches()) == 1


def test_what_a_host_has_given_up_is_forgotten_with_its_next_report() -> None:
    w = llm_world(report("h0"), report("h1", resident=(Resident("s3://m", FACTS.n_bytes),)))
    assert set(w.view.index.with_model("s3://m")) == {"h1"}
    w.do(HostsSeen((report("h0"), report("h1"))))
    assert set(w.view.index.with_model("s3://m")) == set()

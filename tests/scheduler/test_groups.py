"""Groups of several stages as the policy sees them: their sizes, their places, and when they start."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from gateway.scheduler.ablations import Parts
from gateway.scheduler.decisions import Decision, FailDemand, ReleaseInstance, StartGroup
from gateway.scheduler.placement.plans import fetch_key
from gateway.scheduler.placement.predict import Times
from gateway.scheduler.policy.starts import GATHER_S
from tests.scheduler.facts import CHAT, FACTS, MIB, OTHER, SMOLLM2, chat, divisible, forced, report
from tests.scheduler.groups import group_world
from tests.scheduler.world import World, llm_world, of, starting
from thaw import partition
from thaw.model import FileRange
from thaw.plan import StageRole, TransportKind

BURST = chat(max_stages=4, need_bytes=600 * MIB, slo_ttft_s=60.0)
"""A function whose bursts get groups of full workers."""


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_a_forced_size_is_kept_on_hosts_of_its_own(n: int) -> None:
    plan = group_world(facts=forced(n)).started(CHAT).plan
    assert len(plan.stages) == n
    assert len({s.host for s in plan.stages}) == n


def test_eight_stages_on_four_hosts_are_two_on_each_and_share_its_link() -> None:
    start = group_world(facts=forced(8)).started()
    assert Counter(s.host for s in start.plan.stages) == {f"h{i}": 2 for i in range(4)}
    assert [s.reserve_bytes for s in start.plan.stages] == [1024 * MIB] + [128 * MIB] * 7
    on_hosts = Counter[str]()
    for stage in start.plan.stages:
        on_hosts[stage.host] += partition.size(stage.first_ranges)
    assert start.plan.bound_ttft_s == pytest.approx(max(on_hosts.values()) / 25e6)


def test_a_forced_size_waits_when_memory_for_all_its_stages_is_not_there() -> None:
    w = group_world(n_hosts=1, facts=forced(4, need_bytes=3000 * MIB))  # 3000 + 3 x 750 of 4096
    assert of(w.ask(CHAT), StartGroup) == []


def test_more_stages_than_layers_fail_with_the_number_of_layers() -> None:
    w = group_world(facts=forced(8), model=divisible(1_000, 500, n_layers=5))
    (failed,) = of(w.ask(CHAT), FailDemand)
    assert failed.error.code == "ModelUnsupported"
    assert failed.error.message == "a model of 5 layers cannot be divided into 8 stages"


def test_a_model_whose_layers_are_not_known_has_one_stage_and_no_forced_size() -> None:
    assert len(group_world(facts=chat(max_stages=4, slo_ttft_s=0.1), model=FACTS).started(CHAT).plan.stages) == 1
    (failed,) = of(group_world(facts=forced(2), model=FACTS).ask(CHAT), FailDemand)
    assert failed.error.code == "ModelUnsupported"
    assert "where its layers lie is not known" in failed.error.message


def test_a_model_that_no_device_holds_whole_is_served_by_low_stages_when_its_size_is_forced() -> None:
    w = group_world(facts=forced(4, need_bytes=8192 * MIB))  # devices have 4096
    assert [s.role for s in w.started(CHAT).plan.stages] == [StageRole.LOW] * 4
    (failed,) = of(group_world(facts=forced(1, need_bytes=8192 * MIB)).ask(CHAT), FailDemand)
    assert failed.error.code == "MemoryTooSmall"


def test_a_policy_without_overlap_foretells_the_sum_of_the_phases() -> None:
    """Eq. 1 is applied to the scheme whose time Eq. 5 predicts."""
    plans = []
    for overlap in (True, False):
        w = group_world(facts=forced(1), stem_kinds=("llm:vllm",))
        w.view.parts = Parts(overlap=overlap)
        plans.append(w.started(CHAT).plan)
    by_5, by_1 = (plan.predicted_ttft_s or 0.0 for plan in plans)
    copy_s = SMOLLM2.n_bytes / w.view.history.rates(CHAT, "cpu").copy
    assert by_1 - by_5 == pytest.approx(Times().t_c + copy_s)  # in Eq. 5 the fetch hides this time


@pytest.mark.parametrize(("ttft_s", "stages"), [(60.0, 1), (7.5, 2), (4.9, 3), (4.2, 4)])
def test_the_tighter_the_objective_the_more_stages_on_four_hosts_of_200_mbit(ttft_s: float, stages: int) -> None:
    w = group_world(facts=chat(max_stages=4, slo_ttft_s=ttft_s), stem_kinds=("llm:vllm",))
    plan = w.started(CHAT).plan
    assert len(plan.stages) == stages
    assert plan.predicted_ttft_s <= ttft_s
    assert sum(s.role is StageRole.FULL for s in plan.stages) == 1
    assert all(s.fetch_deadline_ms is not None for s in plan.stages)


@pytest.mark.parametrize(("mbit", "stages"), [(400, 2), (200, 2), (150, 3), (120, 4)])
def test_a_function_that_may_take_a_part_of_the_link_has_more_stages_for_the_same_objective(
    mbit: int, stages: int
) -> None:
    """The limit is that of each container, and four containers fetch four times as much.  The links have 200 Mbit/s."""
    limited = chat(max_stages=4, slo_ttft_s=7.5, fetch_bytes_per_s=mbit * 125_000)
    plan = group_world(facts=limited, stem_kinds=("llm:vllm",)).started(CHAT).plan
    assert len(plan.stages) == stages
    assert plan.predicted_ttft_s <= 7.5
    assert [s.pace_bytes_per_s for s in plan.stages] == [mbit * 125_000] * stages


def test_a_limited_fetch_is_foretold_at_its_limit_and_bounded_by_the_link() -> None:
    """Another function may fetch the same model at the whole rate of the link, and the start then takes part in that."""
    starts = [
        group_world(facts=chat(slo_ttft_s=60.0, fetch_bytes_per_s=most), stem_kinds=("llm:vllm",)).started(CHAT).plan
        for most in (None, 5_000_000)
    ]
    predicted = [plan.predicted_ttft_s or 0.0 for plan in starts]
    assert predicted[1] - predicted[0] == pytest.approx(SMOLLM2.n_bytes / 5e6 - SMOLLM2.n_bytes / 25e6, rel=0.02)
    assert starts[0].bound_ttft_s == starts[1].bound_ttft_s


def test_a_plans_trace_says_what_every_other_number_of_stages_was_worth() -> None:
    w = group_world(facts=chat(max_stages=5, slo_ttft_s=4.9), stem_kinds=("llm:vllm",))
    sizes = w.started(CHAT).attrs["sizes"]
    assert [(s["stages"], s["full"], s["why"]) for s in sizes] == [
        (1, 1, "ttft"),
        (2, 2, "ttft"),
        (3, 1, "chosen"),
        (4, 1, "memory"),
        (5, 1, "no room"),
    ]
    assert [s["ttft_s"] > 4.9 for s in sizes[:4]] == [True, True, False, False]
    assert "ttft_s" not in sizes[4]


def test_an_objective_that_no_size_meets_gives_one_full_worker_without_a_deadline() -> None:
    plan = group_world(facts=chat(max_stages=4, slo_ttft_s=1.0)).started(CHAT).plan
    assert [(s.role, s.fetch_deadline_ms) for s in plan.stages] == [(StageRole.FULL, None)]


def test_without_a_relay_no_group_has_several_stages() -> None:
    facts = chat(max_stages=4, slo_ttft_s=4.2)
    hosts = [report(f"h{i}", network_bytes_per_s=25e6, stem_kinds=("llm:vllm",)) for i in range(4)]
    assert len(llm_world(*hosts, facts=facts, model=SMOLLM2).started(CHAT).plan.stages) == 1


def test_the_stages_fetch_every_byte_and_a_full_one_the_rest_behind_the_traffic() -> None:
    stages = group_world(facts=forced(4)).started(CHAT).plan.stages
    header, end = 30_536, SMOLLM2.files["model.safetensors"]
    fetched = partition.join([r for s in stages for r in s.first_ranges[1:]])
    assert {r.file for s in stages for r in s.first_ranges[:1]} == {"config.json"}
    assert sum(r.n_bytes for r in fetched) == end - header + 56_623_104  # both ends fetch the tied embedding
    full, low = stages[0], stages[1:]
    assert partition.join([*full.first_ranges[1:], *full.later_ranges]) == (
        FileRange("model.safetensors", header, end - header),
    )
    assert all(s.later_ranges == () for s in low)
    assert [s.share for s in stages] == [1.0, 0.25, 0.25, 0.25]


def test_each_stages_own_bytes_are_booked_on_its_own_hosts_link() -> None:
    w = group_world(facts=forced(4))
    plan = w.started(CHAT).plan
    for stage in plan.stages:
        booked = w.view.hosts[stage.host].ledger.fetches()
        assert {k: f.pending for k, f in booked.items()} == {
            fetch_key(plan.group_id, stage.stage): partition.size(stage.first_ranges)
        }


@pytest.mark.parametrize(
    ("transport", "kind"), [("auto", "redis"), ("redis", "redis"), ("tcp", "tcp"), ("object",) * 2]
)
def test_a_plan_says_where_its_stages_meet_without_a_secret(transport: str, kind: str) -> None:
    settings = {"relay_url": "redis://user:secret@relay:6379/0", "object_address": "s3://stages/x"}
    facts = forced(2, transport=transport)
    plan = llm_world(report("h0"), report("h1"), facts=facts, model=SMOLLM2, **settings).started().plan
    address = "s3://stages/x" if kind == "object" else "redis://relay:6379/0"
    assert (plan.transport.kind, plan.transport.address) == (TransportKind(kind), address)
    assert plan.transport.credential_ref == f"thaw:group-credential:{plan.group_id}"


def test_a_transport_that_is_not_configured_is_refused_with_the_setting() -> None:
    (failed,) = of(group_world(facts=forced(2, transport="object")).ask(CHAT), FailDemand)
    assert "which this installation does not have" in failed.error.message
    assert "THAW_TRANSPORT_OBJECT" in failed.error.hint


def test_figure_7_thirty_waiting_requests_of_one_slot_get_seven_groups_of_four_and_one_of_two() -> None:
    facts = chat(max_stages=4, slots=1, max_instances=30, need_bytes=600 * MIB)
    w = World(
        *(report(f"h{i:02d}", stem_kinds=("llm:vllm",)) for i in range(30)),
        relay_url="redis://relay:6379/0",
        window_s=1e-9,
    )
    w.deploy(facts)
    w.burst(30)
    w.now += 1  # so that only the queue counts
    starts = of(w.looked(SMOLLM2), StartGroup)
    assert [len(s.plan.stages) for s in starts] == [4] * 7 + [2]
    assert all(sum(x.role is StageRole.FULL for x in s.plan.stages) == len(s.plan.stages) for s in starts)
    assert sum(len(s.activation_ids) for s in starts) == 30


def test_thirty_requests_at_once_in_batches_of_eight_get_two_groups_of_four() -> None:
    w = group_world(n_hosts=8, facts=BURST)
    starts = of(w.burst(30), StartGroup)
    assert [len(s.plan.stages) for s in starts] == [4, 4]
    assert [len(s.activation_ids) for s in starts] == [30, 0]  # one group has 32 slots; later requests get the other


def test_of_requests_that_come_one_by_one_the_first_starts_at_once_and_the_others_start_in_groups() -> None:
    w, first = starting(group_world(n_hosts=8, facts=BURST))
    assert len(first.plan.stages) == 1
    decided: list[Decision] = []
    for _ in range(29):
        decided += w.later(0.001) + w.ask(CHAT)
    assert of(decided, StartGroup) == []
    starts = of(w.later(GATHER_S), StartGroup)
    assert [len(s.plan.stages) for s in starts] == [4, 3]
    assert all(w.view.awaits_start(d) for d in w.view.demand.values())


def test_a_burst_of_one_model_does_not_hold_up_the_first_request_of_another() -> None:
    other = OTHER
    w = group_world(n_hosts=8, facts=chat(max_stages=4, slo_ttft_s=60.0))
    w.deploy(chat(name=other))
    w.ask(CHAT)
    assert of(w.burst(20), StartGroup) == []  # these requests are gathered
    assert len(of(w.ask(other), StartGroup)) == 1


def test_a_minimum_counts_groups_and_starts_as_many() -> None:
    w = group_world(n_hosts=8, facts=BURST)
    starts = of(w.deploy(replace(BURST, min_instances=4)), StartGroup)
    assert [len(s.plan.stages) for s in starts] == [1, 1, 1, 1]
    for start in starts:
        assert of(w.ready(start), StartGroup) == []
    assert of(w.later(600.0), ReleaseInstance) == []


def test_a_minimum_of_a_forced_size_is_as_many_groups_of_it() -> None:
    w = group_world(n_hosts=4, facts=forced(2))
    starts = of(w.deploy(forced(2, min_instances=3)), StartGroup)
    assert [len(s.plan.stages) for s in starts] == [2, 2, 2]


def test_a_burst_starts_no_more_groups_than_max_instances() -> None:
    w = group_world(n_hosts=8, facts=replace(BURST, slots=1, max_instances=2))
    assert [len(s.plan.stages) for s in of(w.burst(30), StartGroup)] == [4, 4]
    assert of(w.burst(30) + w.later(5.0), StartGroup) == []


def test_a_burst_where_hosts_are_few_gets_smaller_groups_in_time() -> None:
    w = group_world(n_hosts=2, facts=chat(max_stages=4, slots=1, slo_ttft_s=60.0, need_bytes=512 * MIB))
    starts = of(w.burst(4), StartGroup)
    assert all(len(s.plan.stages) <= 2 for s in starts)
    assert sum(len(s.plan.stages) for s in starts) >= 4

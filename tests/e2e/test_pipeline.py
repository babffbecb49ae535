"""One model on several hosts: its number of stages, the same tokens at every size, and the effects of a lost stage.

The tests use float32, so that the shape of a matrix product decides no tie: a pipeline's answer equals a single
worker's exactly.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from tests.e2e.fleet import ANSWER, PROMPTS, Fleet
from tests.e2e.machine import text_of
from tests.e2e.pipelines import Pipelines, StageContainer, plan_of, wait_for, wait_gone
from thaw.dev.known_answers import FRANCE
from thaw.ids import GroupId
from thaw.plan import Plan, TransportKind

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    directory = tmp_path_factory.mktemp("fleet")
    made = Fleet(directory, dict(os.environ))
    made.directory = directory
    try:
        made.up("--hosts", "4", "--link", "200mbit", "--memory-mb", "8192", "--pool-mb", "768")
        made.thaw("model", "demo")
        made.pipelines = Pipelines(made)
        made.pipelines.wait_stem_cells(4)
        yield made
        made.pipelines.close()
    finally:
        made.down()
    assert made.leftovers() == []


@pytest.fixture(scope="module")
def reference(fleet: Fleet) -> list[str]:
    """The answers of a single worker.  An action gets only one worker if one host can meet its SLO."""
    fleet.deploy("loose", slo={"ttft_ms": 60_000})
    answers, activation_id = fleet.answers("loose")
    plan, _ = plan_of(fleet, activation_id)
    assert [s.layers for s in plan.stages] == [(0, 30)]
    assert all(len(set(answer.split())) >= 8 for answer in answers), f"nothing to compare: {answers}"
    fleet.remove("loose")
    return answers


@pytest.mark.begins("fleet")
def test_an_slo_that_no_single_host_can_meet_gets_four_stages_which_fetch_side_by_side(
    fleet: Fleet, request: pytest.FixtureRequest
) -> None:
    """No host has a byte of the model, and 258 MiB take 10.8 s on one link."""
    fleet.deploy("tight", slo={"ttft_ms": 4200, "tpot_ms": 2000})
    response = fleet.chat("tight", PROMPTS[0], **ANSWER)
    text = text_of(response)
    assert text.startswith(FRANCE.text)
    plan, fetches = plan_of(fleet, response.headers["X-Openwhisk-Activation-Id"])
    explained = fleet.thaw("activation", "explain", response.headers["X-Openwhisk-Activation-Id"]).stdout
    # the group may have become one worker since, and its plan has one stage then: the trace says how it started
    started_on = {f.stage: f.host for f in fetches}
    assert len(fetches) == len(started_on) == len(set(started_on.values())) == 4, explained
    assert max(f.begin_s for f in fetches) < min(f.end_s for f in fetches)
    assert max(f.n_bytes or 0 for f in fetches) < plan.model.n_bytes * 0.45 if plan.model else False
    assert "4 stages" in explained
    assert [line.rpartition(": ")[2] for line in explained.splitlines() if line.startswith("hop ")] == ["relay"] * 4
    fleet.remove("tight")
    assert text == request.getfixturevalue("reference")[0]  # only now: a single worker would have brought the model


@pytest.mark.full
@pytest.mark.parametrize("stages", [4, 8])
def test_any_number_of_stages_gives_the_same_tokens(fleet: Fleet, reference: list[str], stages: int) -> None:
    """Eight stages run on four hosts.  The tests around this one compare four stages, three and two."""
    fleet.deploy(f"forced-{stages}", scaling={"stages": stages})
    answers, activation_id = fleet.answers(f"forced-{stages}")
    assert answers == reference
    plan, _ = plan_of(fleet, activation_id)
    check_stages(plan, stages)
    fleet.remove(f"forced-{stages}")


def test_hidden_states_may_travel_as_files_and_are_the_same(fleet: Fleet, reference: list[str]) -> None:
    fleet.deploy("by-files", scaling={"stages": 2}, transport="object")
    answers, activation_id = fleet.answers("by-files")
    assert answers == reference
    plan, _ = plan_of(fleet, activation_id)
    assert (plan.transport.kind, len(plan.stages)) == (TransportKind.OBJECT, 2)
    fleet.remove("by-files")


@pytest.mark.full
def test_stages_of_a_platform_with_direct_links_say_that_they_use_tcp(tmp_path: Path, reference: list[str]) -> None:
    """This needs a platform of its own, because the stages of the other tests must not be able to connect directly."""
    made = Fleet(tmp_path, dict(os.environ))
    made.directory = tmp_path
    try:
        made.up("--hosts", "2", "--direct", "--memory-mb", "8192", "--pool-mb", "768")
        made.thaw("model", "demo")
        made.deploy("direct", scaling={"stages": 2})
        answers = [made.answers("direct") for _ in range(2)]
        assert [texts for texts, _ in answers] == [reference, reference]
        explained = made.thaw("activation", "explain", answers[-1][1]).stdout
        assert [line.rpartition(": ")[2] for line in explained.splitlines() if line.startswith("hop ")] == ["tcp"] * 2
    finally:
        made.down()
    assert made.leftovers() == []


def check_stages(plan: Plan, n: int) -> None:
    assert len(plan.stages) == n
    assert [b.layers[0] - a.layers[1] for a, b in pairwise(plan.stages)] == [0] * (n - 1)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.full), 1, pytest.param(2, marks=pytest.mark.full)])
def test_a_stage_killed_before_the_first_token_costs_a_start_and_nothing_else(
    fleet: Fleet, reference: list[str], stage: int
) -> None:
    fleet.deploy("early", scaling={"stages": 3})
    response = fleet.chat("early", PROMPTS[1], **ANSWER)  # the head of the response comes while the stages start
    lost = wait_for(lambda: fleet.pipelines.stages("early").get(stage), "no container")
    lost.kill()
    assert text_of(response) == reference[1]
    assert fleet.pipelines.stages("early")[0].record.group_id != lost.record.group_id
    wait_gone(lambda: fleet.pipelines.leftovers([lost.record.group_id]))
    fleet.remove("early")


@pytest.fixture(scope="module")
def served(fleet: Fleet, reference: list[str]) -> Iterator[str]:
    """An action with two stages that are ready."""
    fleet.deploy("two", scaling={"stages": 2})
    answers, activation_id = fleet.answers("two")
    assert answers == reference
    check_stages(plan_of(fleet, activation_id)[0], 2)
    yield "two"
    fleet.remove("two")


@pytest.mark.parametrize("transport", ["auto", pytest.param("object", marks=pytest.mark.full)])
def test_a_group_becomes_one_worker_while_it_answers(fleet: Fleet, reference: list[str], transport: str) -> None:
    """The rest of the model comes within six seconds.  Answers before, during and after the switch are the same."""
    fleet.deploy("folds", scaling={"stages": 3, "keep": 1}, transport=transport)
    first, activation_id = fleet.answers("folds")
    group = fleet.pipelines.stages("folds")[0].record.group_id
    during: list[list[str]] = []
    while len(fleet.pipelines.stages("folds")) > 1:
        during.append(fleet.answers("folds")[0])
        assert len(during) < 60, fleet.thaw("action", "get", "folds").stdout
    after, _ = fleet.answers("folds")
    assert [first, *during, after] == [reference] * (len(during) + 2)
    (whole,) = fleet.pipelines.stages("folds").values()
    assert (whole.record.group_id, whole.record.n_stages, whole.record.stage) == (group, 1, 0)
    wait_gone(lambda: fleet.pipelines.credentials([group]))
    assert '"stages": 1' in fleet.thaw("action", "get", "folds").stdout
    explained = fleet.thaw("activation", "explain", activation_id).stdout
    assert "the pipeline of 3 was one worker" in explained, explained
    fleet.remove("folds")


def test_a_burst_on_a_group_ends_with_two_workers_that_both_answer(fleet: Fleet, reference: list[str]) -> None:
    """Six requests are answered by a pipeline of three, of which two stages become workers meanwhile."""
    fleet.deploy("grows", scaling={"stages": 3, "keep": 2, "max_batch": 4, "max_instances": 2})

    def burst(n: int) -> list[tuple[str, str]]:
        """The answers, each with the host that gave it."""
        with ThreadPoolExecutor(n) as pool:
            asked = [pool.submit(fleet.chat, "grows", PROMPTS[i % 2], **ANSWER) for i in range(n)]
            answered = [each.result() for each in asked]
            texts = list(pool.map(text_of, answered))
        assert texts == [reference[i % 2] for i in range(n)]
        ids = [r.headers["X-Openwhisk-Activation-Id"] for r in answered]
        return [(activation_id, host_of(fleet, activation_id)) for activation_id in ids]

    def grown() -> list[StageContainer] | None:
        found = fleet.pipelines.containers("grows")
        return found if [c.record.n_stages for c in found] == [1, 1] else None

    first = burst(6)
    workers = wait_for(grown, "the pipeline is not two workers", 180)
    assert len({c.record.group_id for c in workers}) == 2
    both = {host for _, host in burst(6)}
    assert both == {c.record.host_id for c in workers}
    assert "2 × one worker" in fleet.thaw("action", "get", "grows").stderr
    explained = [fleet.thaw("activation", "explain", activation_id).stdout for activation_id, _ in first]
    assert any("stage 1 was a worker of its own" in said for said in explained), explained  # by a cold one
    wait_gone(lambda: fleet.pipelines.credentials([c.record.group_id for c in workers]))
    fleet.remove("grows")


@pytest.mark.parametrize("stage", [1, pytest.param(0, marks=pytest.mark.full)])
def test_a_stage_killed_under_an_answer_costs_no_token_and_doubles_none(
    fleet: Fleet, served: str, reference: list[str], stage: int
) -> None:
    lost = fleet.pipelines.stages(served)[stage]
    response = fleet.chat(served, PROMPTS[1], **ANSWER)
    assert text_of(response, after=lambda n: lost.kill() if n == 8 else None) == reference[1]
    wait_gone(lambda: fleet.pipelines.leftovers([lost.record.group_id]))


@pytest.mark.full
def test_a_killed_relay_under_an_answer_costs_no_token_and_the_next_group_gets_into_the_new_one(
    fleet: Fleet, served: str, reference: list[str]
) -> None:
    response = fleet.chat(served, PROMPTS[1], **ANSWER)

    def kill_relay(n: int) -> None:
        if n == 8:
            fleet.kill("relay")

    text = text_of(response, after=kill_relay)
    assert text == reference[1]
    groups = {s.record.group_id for s in fleet.pipelines.stages(served).values()}
    fleet.thaw("action", "update", served, "--config", str(fleet.directory / f"{served}.json"))
    assert fleet.answers(served)[0] == reference
    wait_gone(lambda: fleet.pipelines.leftovers(groups))


def test_a_killed_scheduler_or_invoker_takes_no_stage_along(fleet: Fleet, served: str, reference: list[str]) -> None:
    assert fleet.answers(served)[0] == reference
    before = fleet.pipelines.stages(served)
    fleet.kill("scheduler")
    fleet.kill(f"{before[1].record.host_id}/invoker")
    assert fleet.answers(served)[0] == reference
    assert pids(fleet.pipelines.stages(served)) == pids(before)


def test_a_group_ends_as_a_whole_when_it_has_been_idle_for_its_keep_alive(fleet: Fleet, reference: list[str]) -> None:
    fleet.deploy("brief", scaling={"stages": 2, "keep_alive_s": 1})
    assert text_of(fleet.chat("brief", PROMPTS[0], **ANSWER)) == reference[0]
    groups: set[GroupId] = {s.record.group_id for s in fleet.pipelines.stages("brief").values()}
    wait_gone(lambda: [str(s) for s in fleet.pipelines.stages("brief").values()])
    wait_gone(lambda: fleet.pipelines.leftovers(groups))


def host_of(fleet: Fleet, activation_id: str) -> str:
    """The host that answered, as the record says, which is written after the answer."""

    def written() -> str | None:
        found = fleet.request("GET", f"/api/v1/namespaces/_/activations/{activation_id}")
        if found.status_code != 200:
            return None
        return next((str(a["value"]) for a in found.json()["annotations"] if a["key"] == "host"), None)

    return wait_for(written, f"no record of {activation_id}")


def pids(stages: dict[int, StageContainer]) -> dict[int, int]:
    return {stage: container.pid for stage, container in stages.items()}

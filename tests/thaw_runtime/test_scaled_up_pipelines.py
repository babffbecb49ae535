"""A group becomes several workers while it answers, in real processes with vLLM: every token is plain vLLM's.

The cases are those of consolidation_case.py with ``keep``: stage 0 is asked, becomes a worker during the answers, and is
asked again.  The later stages that stay answer the same requests as soon as they are workers (scale_up_case.py).
"""

from __future__ import annotations

from itertools import product

import pytest

from tests.thaw_runtime.pipelines import Case, Pipelines
from tests.thaw_runtime.test_consolidated_pipelines import Found, check_answered, check_lost, run
from tests.thaw_runtime.test_pipeline import FAMILIES, case

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

SCALED: dict[str, Case] = {
    "both stages of two": case("llama", 2, ["greedy"], keep=2),
    "two of four, seeded, over TCP": case("gpt2", 4, ["seeded"], keep=2, transport="tcp"),
    "all of three, asked after stage 0 has left": case("qwen3", 3, ["penalties"], keep=3, late=[1, 2]),
}
ENDED: dict[str, Case] = {
    "killed after stage 0 has left": case("llama", 2, ["greedy"], keep=2, ends={1: "parted"}),
    "killed with its engine half built": case("llama", 3, ["greedy"], keep=2, ends={1: "built"}),
}
REFUSED = {"another weight than the pipeline": case("llama", 2, ["greedy"], keep=2, ends={1: "weight"})}
LOST = {"killed while its blocks are copied": case("llama", 2, ["greedy"], keep=2, faults={1: ["die", 1]})}


@pytest.fixture(scope="module")
def found(pipelines: Pipelines) -> Found:
    return run(pipelines, SCALED | ENDED | REFUSED | LOST)


@pytest.mark.parametrize("name", SCALED)
def test_every_token_of_every_worker_is_plain_vllms(found: Found, name: str) -> None:
    check_scaled_up(found[name])


def check_scaled_up(result: Case) -> None:
    check_answered(result)
    assert list(result["later"]) == [str(k) for k in range(1, result["keep"])]
    for later in result["later"].values():
        (outcome,) = later["outcome"]
        assert outcome.startswith("Consolidated("), outcome
        same = {w: tokens == result["plain"][w.partition(",")[0]] for w, tokens in later["answers"].items()}
        assert len(same) == 2 * len(result["works"])
        assert all(same.values()), same
        assert (later["kept_blocks"], later["strangers"]) == (0, [])


@pytest.mark.parametrize("name", ENDED)
def test_a_stage_that_ends_while_it_becomes_a_worker_costs_no_request_anything(found: Found, name: str) -> None:
    check_answered(found[name])
    assert found[name]["later"] == {"1": {}}


def test_a_stage_that_computes_something_else_becomes_no_worker(found: Found) -> None:
    result = found["another weight than the pipeline"]
    check_answered(result)
    later = result["later"]["1"]
    (outcome,) = later["outcome"]
    assert "logprobs differ" in outcome
    assert later["refuses"] == ["WorkerLost"]


def test_one_that_ends_before_stage_0_has_left_ends_the_pipeline_as_any_stage_does(found: Found) -> None:
    check_lost(found["killed while its blocks are copied"])


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_groups_of_every_family_become_several_workers(pipelines: Pipelines, family: str) -> None:
    works = [["long"]] if family == "gemma2" else [["greedy"], ["seeded", "penalties"], ["long"]]
    transports = ("redis", "tcp", "object")
    cases = {
        f"{n} {keep} {' '.join(w)}": case(family, n, w, keep=keep, transport=transports[i % 3], at_once=i % 2 == 0)
        for i, ((n, keep), w) in enumerate(product(((2, 2), (4, 2), (4, 4)), works))
    }
    for result in run(pipelines, cases).values():
        check_scaled_up(result)


@pytest.mark.full
@pytest.mark.parametrize("fault", ["delay", "twice", "backwards", "die", "hang"])
def test_a_stage_that_stays_may_fail_in_every_round_as_any_stage(pipelines: Pipelines, fault: str) -> None:
    cases = {str(at): case("llama", 3, ["seeded"], keep=2, faults={1: [fault, at]}) for at in (1, 2, "last")}
    for result in run(pipelines, cases).values():
        (check_lost if fault in ("die", "hang") else check_scaled_up)(result)

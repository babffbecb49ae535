"""A group becomes one worker while it answers, in real processes with vLLM: every token is plain vLLM's.

Each case is described in consolidation_case.py.  The first stage is asked, consolidated during the answers, and asked
the same again, when its prefix cache has blocks of before.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import pytest
from _pytest.mark import ParameterSet

from tests.thaw_runtime.pipelines import Case, Pipelines
from tests.thaw_runtime.test_pipeline import FAMILIES, case

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

LONG = {
    "one request",
    "the decoder is one of Transformers",
    "every part twice",
    "killed in the first round",
    "killed in the round after the check",
    "other layer",
    "swapped blocks, unchecked",
}
"""The cases of the long run alone: each of their settings, faults and errors meets an ordinary case, too."""
ANSWERED: dict[str, Case] = {
    # a pairwise choice of families, stages, requests in flight, sampling, transports and neighbours' faults; every
    # round is disturbed at least once
    "one request": case("llama", 2, ["one"]),
    "eight long prompts, and the other stages are killed after the switch": case("llama", 2, ["long"], release=True),
    "sixteen requests, eight more behind them, and one that is aborted": case(
        "llama", 2, ["many", "seeded"], at_once=True, leaves=9
    ),
    "requests that began elsewhere": case("llama", 2, ["seeded"], resumes=True, transport="tcp"),
    "over TCP, with penalties": case("gpt2", 3, ["penalties"], transport="tcp", at_once=True),
    "over files": case("qwen3", 2, ["seeded"], transport="object"),
    "three requests, after a first attempt that failed": case(
        "llama", 2, ["three"], before=["long"], at_once=True, plant="other layer, once", tries=2
    ),
    "prefixes of requests that had ended": case("llama", 3, ["greedy"], before=["long"]),
    "late in the last round, backwards in the first": case(
        "gemma", 3, ["penalties"], faults={1: ["delay", "last"], 2: ["backwards", 1]}
    ),
    "the decoder is one of Transformers": case("phi", 2, ["seeded"], before=["long"]),
    "every part twice": case("opt", 3, ["seeded"], faults={1: ["twice", "last"], 2: ["twice", 2]}),
}
LOST: dict[str, Case] = {
    "killed in the first round": case("llama", 2, ["greedy"], faults={1: ["die", 1]}),
    "killed in the round after the check": case("llama", 3, ["greedy"], faults={2: ["die", 2]}),
    "killed in the last round": case("llama", 3, ["seeded"], faults={2: ["die", "last"]}),
    "stopped in the last round": case("llama", 2, ["greedy"], faults={1: ["hang", "last"]}),
}
REFUSED: dict[str, tuple[Case, tuple[str, ...]]] = {
    error: (case("llama", 2, ["lasting"], plant=error, then=["one"]), said)  # what has ended cannot be checked
    for error, said in (
        # which check is the first to see it depends on whether the requests grow before the second round
        ("swapped blocks", ("is not the one that was copied before", "differ from the whole worker's")),
        ("stale block", ("differ from the whole worker's",)),
        ("other layer", ("differ from the whole worker's",)),
        ("other layout", ("are arranged as",)),
        ("other weight", ("the whole worker's logprobs differ",)),
    )
}
SEEN: dict[str, Case] = {
    error: case("llama", 2, works, before=before, plant=f"{error}, unchecked", then=then)
    for error, works, before, then in (
        ("swapped blocks", ["lasting"], [], ["one"]),  # what has ended would show nothing
        ("stale block", ["lasting"], [], ["one"]),
        ("kept prefixes", ["greedy"], ["long"], ["long"]),
    )
}
"""With the checks switched off, the tokens must show the error; otherwise comparing them would prove nothing."""

Found = dict[str, Case]


def run(pipelines: Pipelines, cases: dict[str, Case]) -> Found:
    """The results by the cases' names, each with ``same``: work → whether every token is plain vLLM's."""
    plain, found = pipelines.plain(list(cases.values())), Found()
    for answer in pipelines.answers([{**c, "name": name, "consolidate": True} for name, c in cases.items()]):
        known = plain[answer["family"]]
        same = {work: tokens == known[work.partition(",")[0]] for work, tokens in answer["answers"].items()}
        found[answer["name"]] = answer | {"same": same, "plain": known}
    return found


class Results:
    """The results of the cases.  A case of the long run is computed when a test asks for it."""

    def __init__(self, pipelines: Pipelines) -> None:
        cases = {**ANSWERED, **LOST, **{name: c for name, (c, _) in REFUSED.items()}}
        self._cases = cases | {f"{name}, unchecked": c for name, c in SEEN.items()}
        self._pipelines = pipelines
        self._found = run(pipelines, {name: c for name, c in self._cases.items() if name not in LONG})

    def __getitem__(self, name: str) -> Case:
        if name not in self._found:
            self._found |= run(self._pipelines, {name: self._cases[name]})
        return self._found[name]


def names(cases: Iterable[str], suffix: str = "") -> list[ParameterSet]:
    return [pytest.param(name, marks=pytest.mark.full if name + suffix in LONG else ()) for name in cases]


@pytest.fixture(scope="module")
def found(pipelines: Pipelines) -> Results:
    return Results(pipelines)


def check_answered(result: Case) -> None:
    assert all(result["same"].values()), result["same"]
    assert (result["errors"], result["in_order"], result["kept_blocks"]) == ([], True, 0)
    *failed, outcome = result["outcome"]
    assert outcome.startswith("Consolidated("), outcome
    assert len(failed) == result.get("tries", 1) - 1
    assert 1 <= result["largest_batch"] <= 8  # the limit of one worker; a pipeline of s stages takes s times as many


def check_lost(result: Case) -> None:
    """The open requests fail as lost, with a part of plain vLLM's tokens, so the gateway goes on from there."""
    assert result["errors"] == ["WorkerLost"]
    (outcome,) = result["outcome"]
    assert outcome.startswith("ErrorInfo("), outcome
    for work in result["works"]:
        for tokens, whole in zip(result["answers"][work], result["plain"][work], strict=True):
            assert tokens == whole[: len(tokens)]
    assert result["in_order"]
    assert result["statuses"][0] == 0


@pytest.mark.parametrize("name", names(ANSWERED))
def test_every_token_is_the_same_before_during_and_after_the_switch(found: Results, name: str) -> None:
    check_answered(found[name])


def test_a_request_that_leaves_during_the_consolidation_gets_no_token_more(found: Results) -> None:
    left = found["sixteen requests, eight more behind them, and one that is aborted"]
    assert 9 <= len(left["leaver"]) < 64


def test_the_other_stages_may_die_after_the_switch(found: Results) -> None:
    released = found["eight long prompts, and the other stages are killed after the switch"]
    assert released["statuses"] == [0, -9]


@pytest.mark.parametrize("name", names(LOST))
def test_a_stage_that_is_lost_before_the_switch_costs_no_token_twice(found: Results, name: str) -> None:
    check_lost(found[name])


@pytest.mark.parametrize("name", names(REFUSED))
def test_a_planted_error_is_refused_and_the_pipeline_answers_on(found: Results, name: str) -> None:
    result = found[name]
    (outcome,) = result["outcome"]
    assert any(said in outcome for said in REFUSED[name][1]), outcome
    assert all(result["same"].values()), result["same"]
    assert (result["errors"], result["kept_blocks"]) == ([], 0)


@pytest.mark.parametrize("name", names(SEEN, ", unchecked"))
def test_without_the_checks_the_tokens_show_the_error(found: Results, name: str) -> None:
    assert not all(found[f"{name}, unchecked"]["same"].values())


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_groups_of_every_family_and_size_become_one_worker(pipelines: Pipelines, family: str) -> None:
    works = [["long"]] if family == "gemma2" else [["greedy"], ["seeded"], ["penalties"], ["long", "many"]]
    transports = ("redis", "tcp", "object")
    cases = {
        f"{n} {' '.join(w)}": case(family, n, w, transport=transports[i % 3], at_once=i % 2 == 0, release=n == 3)
        for i, (n, w) in enumerate(product((2, 3, 5, 8), works))
    }
    for result in run(pipelines, cases).values():
        check_answered(result)


@pytest.mark.full
@pytest.mark.parametrize("fault", ["die", "hang", "delay", "twice", "backwards"])
@pytest.mark.parametrize("transport", ["redis", "tcp", "object"])
def test_every_stage_may_fail_in_every_round(pipelines: Pipelines, transport: str, fault: str) -> None:
    cases = {
        f"{stage} {at}": case("llama", 3, ["seeded"], transport=transport, faults={stage: [fault, at]})
        for stage, at in product((1, 2), (1, 2, "last"))
    }
    for result in run(pipelines, cases).values():
        (check_lost if fault in ("die", "hang") else check_answered)(result)

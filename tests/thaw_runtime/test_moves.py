"""A run that moves from one worker to another: rounds of prefill while it goes on, then the rest of its answer there."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.thaw_runtime.conftest import STREAM, Container, Zygote, forked_container, frames, run_body
from tests.thaw_runtime.models import real_model

pytestmark = pytest.mark.vllm

N_TOKENS = 100
PROMPT = "The history of the city of Rome begins with a legend, and it goes on for many centuries. " * 8
SAMPLINGS = {
    "greedy": {"temperature": 0},
    "seeded, with penalties": {
        "temperature": 0.9,
        "top_p": 0.95,
        "presence_penalty": 0.8,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
    },
}


@pytest.fixture(scope="module")
def workers(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Container, Container]]:
    with contextlib.ExitStack() as stack:
        source, destination = (
            stack.enter_context(forked_container(zygote, tmp_path_factory.mktemp(name), real_model()))
            for name in ("source", "destination")
        )
        for container in (source, destination):
            status, reply = container.init(dtype="float32", max_model_len=1024)
            assert status == 200, reply
        yield source, destination


def cached(end: dict[str, Any]) -> int:
    (prefill,) = (e for e in end["events"] if e["name"] == "prefill.end")
    return int(prefill["attrs"].get("cached_tokens", 0))


def test_a_caller_of_a_shared_function_finds_only_its_own_namespaces_prompts_in_the_cache(
    workers: tuple[Container, Container],
) -> None:
    """The function is guest's.  What a prompt takes would tell whether somebody else has sent it."""
    container, _ = workers
    body = {"prompt": f"Who else has asked this? {PROMPT}", "max_tokens": 1}
    found = [cached(container.stream(body, namespace=name)[-1]) for name in ("guest", "spy", "other") * 2]
    assert found[:3] == [0, 0, 0]
    assert all(found[3:])


@pytest.mark.parametrize(  # tests/e2e/test_moves.py moves greedy runs too
    "sampling", [pytest.param("greedy", marks=pytest.mark.full), "seeded, with penalties"]
)
def test_a_run_that_moves_in_the_middle_says_what_it_would_have_said_and_finds_its_prompt_computed(
    workers: tuple[Container, Container], sampling: str
) -> None:
    source, destination = workers
    body = {"prompt": f"{sampling}. {PROMPT}", "max_tokens": N_TOKENS, "ignore_eos": True, **SAMPLINGS[sampling]}
    body |= {"logprobs": 2}
    whole = source.stream(body)  # the reference: nothing moves
    assert len({m["token_id"] for m in whole[:-1]}) > 20, "a degenerate reference proves nothing"

    source.http.request("POST", "/run", json.dumps(run_body(body, "completions")), STREAM)
    running = frames(source.http.getresponse())
    said = [next(running)]
    for n_tokens in (2, 40):  # two rounds, while the source goes on
        said += [next(running) for _ in range(n_tokens - len(said))]
        so_far = {"output_token_ids": [m["token_id"] for m in said]}
        (prefilled,) = destination.stream(body, resume=so_far, prefill_only=True)
        assert (prefilled["t"], prefilled["reason"]) == ("RunFinished", "prefilled")
    n_prompt = prefilled["prompt_tokens"]
    said += [next(running) for _ in range(70 - len(said))]
    source.http.close()  # the source's run is aborted

    rest = destination.stream(body, resume={"output_token_ids": [m["token_id"] for m in said]})
    moved = [*said, *rest]
    assert [m["token_id"] for m in moved[:-1]] == [m["token_id"] for m in whole[:-1]]
    assert [m["index"] for m in moved[:-1]] == list(range(N_TOKENS))
    assert "".join(m["text"] for m in moved) == "".join(m["text"] for m in whole)
    assert cached(rest[-1]) >= (n_prompt + 40) // 128 * 128 > 0, "the rounds left nothing in the prefix cache"

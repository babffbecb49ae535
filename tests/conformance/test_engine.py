"""One suite for every engine: the tests' toy engine, and vLLM with the real small model, whole and in two stages."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from relay.protocol.messages import GroupCredential, GroupLink, LlmInit, StageShape
from tests.conftest import ValkeyServer
from tests.thaw_runtime.fake_descriptor_socket import FakeDescriptorSocket
from tests.thaw_runtime.models import read_segment, real_model, write_tiny_model
from tests.thaw_runtime.remote_engine import RemoteEngine
from tests.toy_engine import ToyEngine
from thaw.config import EngineConfig, LlmConfig, ModelConfig
from thaw.errors import BadParameter, InstanceBusy, WorkerLost
from thaw.ids import ActionName, GroupId, HostId, random_hex_id
from thaw.plan import TransportKind
from thaw_runtime.engine import main as engine_main
from thaw_runtime.engine.protocol import (
    Engine,
    EngineRequest,
    Event,
    Failed,
    Finished,
    Grammar,
    GrammarKind,
    Sampling,
    Token,
)
from thaw_runtime.engine.registry import find_engine

PROMPT = (84, 104, 101, 32, 99)
DEADLINE_S = 60.0


class Listener:
    """Collects events.  A test waits for the events that it needs, and never for a time."""

    def __init__(self) -> None:
        self.events: dict[str, list[Event]] = {}
        self.changed = threading.Condition()

    def emit(self, events: object) -> None:
        with self.changed:
            for request_id, event in events:  # type: ignore[attr-defined]
                self.events.setdefault(request_id, []).append(event)
            self.changed.notify_all()

    def wait(self, request_id: str, n_tokens: int | None = None) -> list[Event]:
        """Wait until the request has ended or ``n_tokens`` have come, and return its events."""

        def ready() -> bool:
            have = self.events.get(request_id, [])
            if n_tokens is not None and len(have) >= n_tokens:
                return True
            return bool(have) and not isinstance(have[-1], Token)

        with self.changed:
            assert self.changed.wait_for(ready, timeout=DEADLINE_S), f"{request_id} never ended"
            return list(self.events[request_id])


class Bench:
    def __init__(self, engine: Engine, listener: Listener) -> None:
        self.engine = engine
        self.listener = listener
        self._count = 0

    def submit(
        self,
        sampling: Sampling,
        *,
        prompt: tuple[int, ...] = PROMPT,
        seed: int = 7,
        output_so_far: tuple[int, ...] = (),
    ) -> str:
        self._count += 1
        name = f"r{self._count}"
        self.engine.submit(EngineRequest(name, prompt, sampling, seed, len(output_so_far), output_so_far))
        return name

    def run(self, sampling: Sampling, **kwargs: object) -> list[Event]:
        return self.listener.wait(self.submit(sampling, **kwargs))  # type: ignore[arg-type]


def plan(reserve: int = 1 << 30, dtype: str = "float32") -> LlmInit:
    config = LlmConfig("llm:vllm", ModelConfig("test"), EngineConfig(dtype=dtype, max_model_len=512))
    return LlmInit(ActionName("guest/chat"), GroupId("0" * 32), 0, 1, (0, 30), config, reserve, 1.0, 1, HostId("h1"))


def stage_plans(url: str) -> list[LlmInit]:
    """The plans of two stages that communicate through the relay server at ``url``."""
    layers = ((0, 15), (15, 30))
    shapes = tuple(StageShape(part, 1 << 30, 1 << 20) for part in layers)
    link = GroupLink(TransportKind.REDIS, url, GroupCredential("", ""))
    whole = replace(plan(), group_id=GroupId(random_hex_id()), n_stages=2, link=link, stages=shapes)
    return [replace(whole, stage=k, layers=part) for k, part in enumerate(layers)]


TWO_STAGES = "vllm in two stages"


def vllm(name: str, *more: object, full: bool = False) -> Any:
    marks = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]  # the warnings are vLLM's
    return pytest.param(name, *more, marks=[*marks, pytest.mark.full] if full else marks)


@pytest.fixture(scope="module", params=["toy", "toy in two stages", vllm("vllm"), vllm(TWO_STAGES)])
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, _shared_relay: ValkeyServer
) -> Iterator[Bench]:
    listener, url = Listener(), _shared_relay.url
    directory = tmp_path_factory.mktemp("engine")
    model = real_model() if request.param.startswith("vllm") else write_tiny_model(directory / "model")
    plans = stage_plans(url) if request.param == "toy in two stages" else [plan()]
    engines: list[Engine]
    if request.param == "vllm":
        engines = [engine_main.load_cold(find_engine("vllm"))(listener.emit)]
    elif request.param == TWO_STAGES:
        engines = [RemoteEngine(listener.emit, url, model, 2, directory)]
    else:
        engines = [ToyEngine(listener.emit) for _ in plans]
    descriptor_socket = FakeDescriptorSocket(model, directory / "socket")
    clients = []
    for engine, stage_plan in zip(engines, plans, strict=True):
        client, segment = read_segment(descriptor_socket)
        clients.append(client)
        assert engine.start(stage_plan, segment).max_model_len == 512
    yield Bench(engines[0], listener)
    engines[0].stop()
    for engine in engines:
        engine.join()  # a follower ends with stage 0
    if isinstance(engines[0], RemoteEngine):
        assert engines[0].close() == 0
    for client in clients:
        client.close()
    descriptor_socket.close()


def tokens(events: list[Event]) -> list[int]:
    return [e.token_id for e in events if isinstance(e, Token)]


def test_indices_count_from_zero_and_the_answer_ends_once(bench: Bench) -> None:
    events = bench.run(Sampling(12, temperature=0))
    assert [e.index for e in events if isinstance(e, Token)] == list(range(12))
    assert [type(e) for e in events if not isinstance(e, Token)] == [Finished]
    assert isinstance(events[-1], Finished)
    assert events[-1].reason == "length"
    assert (events[-1].usage.prompt_tokens, events[-1].usage.completion_tokens) == (5, 12)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(12, temperature=0),
        Sampling(12, temperature=1.0, top_p=0.9),
        Sampling(12, temperature=0.8, top_k=50, presence_penalty=1.5, frequency_penalty=0.5),
    ],
    ids=["greedy", "seeded", "penalties"],
)
def test_a_continued_answer_equals_an_uninterrupted_one(bench: Bench, sampling: Sampling) -> None:
    whole = tokens(bench.run(sampling))
    for cut in (1, 6, 11):
        rest = bench.run(sampling, output_so_far=tuple(whole[:cut]))
        assert tokens(rest) == whole[cut:], cut
        assert isinstance(rest[0], Token)
        assert rest[0].index == cut
        assert isinstance(rest[-1], Finished)
        assert rest[-1].usage.completion_tokens == 12


def test_the_same_seed_gives_the_same_answer_and_another_seed_another(bench: Bench) -> None:
    sampling = Sampling(16, temperature=1.0)
    first, again, other = (tokens(bench.run(sampling, seed=s)) for s in (1, 1, 2))
    assert first == again
    assert first != other


def test_requests_run_side_by_side_without_mixing(bench: Bench) -> None:
    sampling = Sampling(8, temperature=0)
    alone = [tokens(bench.run(sampling, prompt=(*PROMPT, 100 + i))) for i in range(4)]
    names = [bench.submit(sampling, prompt=(*PROMPT, 100 + i)) for i in range(4)]
    assert [tokens(bench.listener.wait(name)) for name in names] == alone


def test_a_stop_token_ends_the_answer_and_is_delivered(bench: Bench) -> None:
    whole = tokens(bench.run(Sampling(12, temperature=0)))
    stop = whole[5]
    events = bench.run(Sampling(12, temperature=0, stop_token_ids=(stop,)))
    assert tokens(events) == whole[: whole.index(stop) + 1]
    assert isinstance(events[-1], Finished)
    assert events[-1].reason == "stop"


def test_an_aborted_request_ends_in_abort_and_leaves_nothing(bench: Bench) -> None:
    name = bench.submit(Sampling(400, temperature=0))
    bench.listener.wait(name, n_tokens=2)
    bench.engine.abort(name)
    last = bench.listener.wait(name)[-1]
    assert isinstance(last, Finished)
    assert last.reason == "abort"
    assert bench.engine.drain(DEADLINE_S)
    assert bench.engine.requests() == ()


def test_logprobs_come_with_the_number_of_alternatives_asked_for(bench: Bench) -> None:
    events = bench.run(Sampling(3, temperature=0, logprobs=2))
    for event in events[:-1]:
        assert isinstance(event, Token)
        assert event.logprobs is not None
        assert event.logprobs.logprob <= 0
        assert len(event.logprobs.top) == 2


def test_aborting_what_is_unknown_changes_nothing(bench: Bench) -> None:
    bench.engine.abort("never seen")
    assert tokens(bench.run(Sampling(2, temperature=0)))


@pytest.mark.ends("bench")
def test_a_stopped_engine_fails_its_requests_and_those_that_come_later(bench: Bench) -> None:
    name = bench.submit(Sampling(400, temperature=0))
    bench.listener.wait(name, n_tokens=1)
    bench.engine.stop()
    last = bench.listener.wait(name)[-1]
    assert isinstance(last, Failed)
    assert last.error.code == WorkerLost.__name__
    late = bench.run(Sampling(2, temperature=0))
    assert [type(e) for e in late] == [Failed]


# ── structured output: the toy engine knows no grammar ──

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "people": {"type": "integer"}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
JSON_OF_A_CITY = Grammar(GrammarKind.JSON, json.dumps(SCHEMA), "response_format")
END = 2  # the real model's end-of-sequence token
constrains = pytest.mark.parametrize("bench", [vllm("vllm"), vllm(TWO_STAGES)], indirect=True)


def words(token_ids: Sequence[int]) -> str:
    text: str = Tokenizer.from_file(str(real_model() / "tokenizer.json")).decode(list(token_ids))
    return text


def constrained(grammar: Grammar = JSON_OF_A_CITY, **changes: Any) -> Sampling:
    return Sampling(**{"max_tokens": 96, "temperature": 0.0, "stop_token_ids": (END,), "grammar": grammar} | changes)


@constrains
def test_an_answer_follows_its_grammar_and_ends_where_that_ends(bench: Bench) -> None:
    free = words(tokens(bench.run(Sampling(24, temperature=0, stop_token_ids=(END,)))))
    with pytest.raises(ValueError, match="Expecting value"):
        json.loads(free)
    events = bench.run(constrained())
    assert isinstance(events[-1], Finished)
    assert events[-1].reason == "stop"
    jsonschema.validate(json.loads(words(tokens(events))), SCHEMA)


KINDS = (
    (Grammar(GrammarKind.CHOICE, '["Paris", "Rome"]', "guided_choice"), "Paris|Rome"),
    (Grammar(GrammarKind.REGEX, r"\d{3}-\d{4}", "guided_regex"), r"\d{3}-\d{4}"),
    (Grammar(GrammarKind.GRAMMAR, 'root ::= ("yes" | "no") "!"', "guided_grammar"), "(yes|no)!"),
)


@pytest.mark.parametrize(
    ("bench", "grammar", "pattern"),
    [
        *(vllm("vllm", *kind) for kind in KINDS),
        *(vllm(TWO_STAGES, *kind, full=kind is not KINDS[0]) for kind in KINDS),
    ],
    indirect=["bench"],
)
def test_every_kind_of_grammar_is_followed(bench: Bench, grammar: Grammar, pattern: str) -> None:
    assert re.fullmatch(pattern, words(tokens(bench.run(constrained(grammar)))))


@pytest.mark.parametrize(
    ("bench", "temperature"),
    [
        vllm("vllm", 1.0),
        vllm(TWO_STAGES, 0.0),
        vllm("vllm", 0.0, full=True),
        vllm(TWO_STAGES, 1.0, full=True),
    ],
    indirect=["bench"],
)
def test_an_answer_under_a_grammar_goes_on_elsewhere_as_if_uninterrupted(bench: Bench, temperature: float) -> None:
    sampling = constrained(temperature=temperature)
    whole = tokens(bench.run(sampling))
    for cut in (1, len(whole) - 1):
        assert tokens(bench.run(sampling, output_so_far=tuple(whole[:cut]))) == whole[cut:]


@constrains
def test_a_grammar_binds_its_own_request_alone(bench: Bench) -> None:
    free, bound = Sampling(12, temperature=0), constrained()
    alone = [tokens(bench.run(sampling)) for sampling in (free, bound)]
    names = [bench.submit(sampling) for sampling in (free, bound, free, bound)]
    assert [tokens(bench.listener.wait(name)) for name in names] == alone * 2


@constrains
@pytest.mark.parametrize(
    ("grammar", "so_far", "words"),
    [
        (Grammar(GrammarKind.JSON, '{"type": "nothing"}', "response_format"), (), "response_format: the schema"),
        (
            Grammar(GrammarKind.JSON, '{"type": "number", "multipleOf": 3}', "guided_json"),
            (),
            "guided_json: the schema",
        ),
        (Grammar(GrammarKind.REGEX, "((", "guided_regex"), (), "guided_regex: this is not a grammar that can be"),
        (JSON_OF_A_CITY, (84, 104), "response_format: the answer so far does not follow it"),
    ],
)
def test_a_grammar_that_cannot_be_followed_fails_its_request_by_the_parameters_name(
    bench: Bench, grammar: Grammar, so_far: tuple[int, ...], words: str
) -> None:
    (failed,) = bench.run(constrained(grammar), output_so_far=so_far)
    assert isinstance(failed, Failed)
    assert failed.error.code == BadParameter.__name__
    assert failed.error.message.startswith(words)
    assert bench.engine.drain(DEADLINE_S)


@constrains
def test_a_request_that_is_aborted_while_its_grammar_is_compiled_ends_in_abort(bench: Bench) -> None:
    parts = "".join(f'"{i}" | ' for i in range(200))
    slow = Grammar(GrammarKind.GRAMMAR, f'root ::= ({parts} "x"){{1,200}}', "guided_grammar")
    name = bench.submit(constrained(slow))
    bench.engine.abort(name)
    last = bench.listener.wait(name)[-1]
    assert isinstance(last, Finished)
    assert last.reason == "abort"
    assert tokens(bench.run(Sampling(2, temperature=0)))


@constrains
def test_the_logprobs_of_a_prompt_come_with_its_first_token_or_are_refused(bench: Bench) -> None:
    name = bench.submit(Sampling(2, temperature=0, logprobs=1, prompt_logprobs=1))
    events = bench.listener.wait(name)
    if isinstance(events[0], Failed):  # in a pipeline
        assert events[0].error.code == BadParameter.__name__
        assert events[0].error.message.startswith("echo: a model in several stages has no logprobs of the prompt")
        return
    assert isinstance(events[0], Token)
    assert [len(one.top) for one in events[0].prompt] == [1] * (len(PROMPT) - 1)
    assert all((one.rank == 1) is (one.top[0][1] <= one.logprob) for one in events[0].prompt)
    assert isinstance(events[1], Token)
    assert events[1].prompt == ()
    (whole,) = [bench.run(Sampling(1, temperature=0, prompt_logprobs=0), prompt=(*PROMPT, events[0].token_id))]
    assert isinstance(whole[0], Token)
    assert events[0].logprobs is not None
    assert whole[0].prompt[-1].logprob == pytest.approx(events[0].logprobs.logprob, abs=1e-3)


@pytest.mark.parametrize("bench", [vllm("vllm")], indirect=True)
@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        ('root ::= ((("a"?){1,30}){1,30}){1,30}', "it takes too much time or memory"),
        ('root ::= "x" ((("a"?){1,30}){1,30}){1,30}', "it takes too much time or memory"),
        ("root ::= root", "no token can come next"),
        ('root ::= "a" x\nx ::= x "b"', "no token can come next"),
    ],
    ids=["endless masks", "endless masks later", "empty first mask", "empty second mask"],
)
def test_a_grammar_that_takes_for_ever_or_has_no_end_fails_its_own_request_alone(
    bench: Bench, rules: str, problem: str
) -> None:
    free = bench.submit(Sampling(400, temperature=0))
    events = bench.run(constrained(Grammar(GrammarKind.GRAMMAR, rules, "guided_grammar")))
    assert isinstance(events[-1], Failed)
    assert events[-1].error.code == BadParameter.__name__
    assert events[-1].error.message.startswith(f"guided_grammar: {problem}")
    assert re.fullmatch("x?a*", words(tokens(events)))  # and never a token that the rules do not allow
    bench.engine.abort(free)
    assert isinstance(bench.listener.wait(free)[-1], Finished)
    assert isinstance(bench.run(constrained())[-1], Finished)


@pytest.mark.parametrize("bench", [vllm("vllm")], indirect=True)
def test_the_schemas_of_tools_are_checked_and_their_white_space_is_bounded(bench: Bench) -> None:
    def tag(schema: Any) -> Grammar:
        content = {"type": "json_schema", "json_schema": schema}
        rules = {"type": "tag", "begin": "<", "content": content, "end": ">"}
        text = json.dumps({"type": "structural_tag", "format": rules})
        return Grammar(GrammarKind.STRUCTURAL_TAG, text, "tools", ("tools[3].function.parameters",))

    small: Any = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    small["additionalProperties"] = False
    whole = words(tokens(bench.run(constrained(tag(small)))))
    assert re.fullmatch("<.*>", whole, re.DOTALL)
    jsonschema.validate(json.loads(whole[1:-1]), small)
    for schema in ({"type": "number", "multipleOf": 5}, {"type": "nothing"}):
        (failed,) = bench.run(constrained(tag(schema)))
        assert isinstance(failed, Failed)
        assert failed.error.message.startswith("tools[3].function.parameters: ")
    tokenizer = Tokenizer.from_file(str(real_model() / "tokenizer.json"))
    for n_spaces, follows in ((8, True), (40, False)):
        so_far = tokenizer.encode("<{" + " \n" * (n_spaces // 2) + '"', add_special_tokens=False).ids
        last = bench.run(constrained(tag(small)), output_so_far=tuple(so_far))[-1]
        assert isinstance(last, Finished) is follows


GRAMMARS = "thaw_runtime.engine.vllm.grammars"
in_this_process = pytest.mark.parametrize("bench", [vllm("vllm")], indirect=True)


def is_put_off(events: Sequence[Event]) -> bool:
    return isinstance(events[-1], Failed) and events[-1].error.code == InstanceBusy.__name__


def grammar_process(bench: Bench) -> int:
    pid: int = bench.engine._grammars._process.pid  # type: ignore[attr-defined]
    return pid


LONG = constrained(Grammar(GrammarKind.REGEX, "[a-z ]{70,}", "guided_regex"), max_tokens=60)


def children(pid: int) -> list[int]:
    """The children of the grammar process: it has one for each request."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@in_this_process
@pytest.mark.parametrize("late", ["at first", "later"])
def test_a_grammar_that_a_busy_machine_makes_late_puts_its_request_off(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """It goes on from the tokens so far, here or elsewhere, as if uninterrupted."""
    whole = tokens(bench.run(LONG))
    with monkeypatch.context() as patched:
        patched.setattr(f"{GRAMMARS}.{'_FIRST_MASK_S' if late == 'at first' else '_MASK_S'}", 1e-6)
        name = bench.submit(LONG)
        if late == "later":
            bench.listener.wait(name, n_tokens=1)
            for child in children(grammar_process(bench)):
                os.kill(child, signal.SIGSTOP)
        events = bench.listener.wait(name)
    assert is_put_off(events)
    so_far = tuple(tokens(events))
    assert so_far == tuple(whole[: len(so_far)])
    rest = tokens(bench.run(LONG, output_so_far=so_far))
    assert [*so_far, *rest] == whole


@in_this_process
def test_a_request_whose_grammars_process_was_killed_is_put_off(bench: Bench) -> None:
    """The kernel kills a request's process for its own time or memory alone, and then that of all requests lives."""
    whole = tokens(bench.run(LONG))
    name = bench.submit(LONG)
    bench.listener.wait(name, n_tokens=1)
    pid = grammar_process(bench)
    of_requests = children(pid)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    for child in of_requests:
        os.kill(child, signal.SIGKILL)
    assert is_put_off(bench.listener.wait(name))
    assert tokens(bench.run(LONG)) == whole
    assert grammar_process(bench) != pid


@in_this_process
def test_a_grammar_process_that_does_not_come_up_in_time_puts_its_request_off_and_is_begun_anew(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tokens(bench.run(constrained()))
    os.kill(grammar_process(bench), signal.SIGKILL)
    bench.engine._grammars._process.wait(20)  # type: ignore[attr-defined]
    with monkeypatch.context() as patched:
        patched.setattr(f"{GRAMMARS}._PROCESS_S", 1e-3)
        assert is_put_off(bench.run(constrained()))
    assert tokens(bench.run(constrained()))

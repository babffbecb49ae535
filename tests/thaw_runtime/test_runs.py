"""One answer between its request and its engine.  The test takes the place of the engine and reads its messages."""

from __future__ import annotations

import queue
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from relay.clients.channel import Channel, ChannelClosed
from relay.protocol.messages import LlmResume, LlmRun, RankedToken, RunFinished, RunPrompt, RunToken
from tests.thaw_runtime.models import write_tiny_model
from thaw.errors import BadParameter, TimeLimitExceeded
from thaw_runtime.engine.link import EngineLink
from thaw_runtime.engine.protocol import Event, Finished, Logprobs, Token, Usage
from thaw_runtime.engine.wire import Abort, Events, Message, Submit, decode, encode
from thaw_runtime.llm.model_text import ModelText
from thaw_runtime.llm.runs import RunStream
from thaw_runtime.llm.tokenize_answers import TextAnswer
from thaw_runtime.process.start_trace import StartTrace


class Engine:
    """The other end of the proxy's socket.

    It answers a request as soon as it gets it, because earlier tokens would belong to no request.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._channel = Channel(sock)
        self._answer: tuple[tuple[str, Event], ...] = ()
        self.told: queue.Queue[Message] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def will_say(self, text: str, *, ends: bool = False, prompt: tuple[Logprobs, ...] = ()) -> None:
        """Answer the next request with a token for each byte of ``text``, and then end it if ``ends``."""
        spent = {} if prompt else None  # only a first token that says what it took brings logprobs of the prompt
        tokens = tuple(("r", Token(i, b, None, spent, prompt=prompt)) for i, b in enumerate(text.encode()))
        self._answer = (*tokens, ("r", Finished("length", Usage(1, len(tokens))))) if ends else tokens

    def _listen(self) -> None:
        try:
            while True:
                message = decode(self._channel.receive()[0])
                self.told.put(message)
                if isinstance(message, Submit) and self._answer:
                    self._channel.send(encode(Events(self._answer)))
        except (ChannelClosed, OSError):
            return


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    directory: Path = write_tiny_model(tmp_path_factory.mktemp("m") / "model")
    return ModelText(Tokenizer.from_file(str(directory / "tokenizer.json")), None, (256,), 257, {})


@pytest.fixture
def ends() -> Iterator[tuple[EngineLink, Engine]]:
    """When the socket closes, the link ends its engine's process.  Here this is a process that only waits."""
    ours, theirs = socket.socketpair()
    lost = threading.Event()
    with ours, theirs, subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        engine, link = Engine(theirs), EngineLink(Channel(ours), process.pid)
        link.listen(lambda _status: lost.set())
        yield link, engine
        ours.shutdown(socket.SHUT_RDWR)
        assert lost.wait(10)


def run(link: EngineLink, text: ModelText, **body: object) -> RunStream:
    asked = LlmRun("completions", {"prompt": "p", "max_tokens": 100, **body}, 7)
    return RunStream(link, text, asked, "r", 512, StartTrace())


def test_the_engine_is_told_to_stop_when_a_stop_string_has_come(
    text: ModelText, ends: tuple[EngineLink, Engine]
) -> None:
    """The engine does not know the text, so it would continue to the request's last token and keep a slot busy."""
    link, engine = ends
    messages = run(link, text, stop="END").messages(None)
    engine.will_say("one END two")
    batches = list(messages)
    assert isinstance(engine.told.get(timeout=10), Submit)
    assert engine.told.get(timeout=10) == Abort("r")
    assert link.inflight() == 0
    assert isinstance(batches[-1][-1], RunFinished)
    assert batches[-1][-1].reason == "stop"
    assert "".join(m.text for batch in batches for m in batch if isinstance(m, RunToken)) == "one "


@pytest.mark.parametrize(("stops", "said"), [([ord("!")], "no"), ([ord("x")], "no!")])
def test_a_token_that_ends_the_answer_is_no_part_of_its_text(
    ends: tuple[EngineLink, Engine], text: ModelText, stops: list[int], said: str
) -> None:
    link, engine = ends
    engine.will_say("no!", ends=True)
    told = [message for batch in run(link, text, stop_token_ids=stops).messages(None) for message in batch]
    tokens = [message for message in told if isinstance(message, RunToken)]
    assert [message.token_id for message in tokens] == list(b"no!")
    assert "".join(message.text for message in tokens) == said


def test_the_logprobs_of_a_prompt_are_computed_again_for_an_answer_that_is_over(
    text: ModelText, ends: tuple[EngineLink, Engine]
) -> None:
    link, engine = ends
    body = {"prompt": [112, 113], "max_tokens": 2, "echo": True, "logprobs": 0}
    asked = LlmRun("completions", body, 7, LlmResume((104, 105)))
    engine.will_say("x", ends=True, prompt=(Logprobs(-0.5),))
    (batch,) = RunStream(link, text, asked, "r", 512, StartTrace()).messages(None)
    told = engine.told.get(timeout=10)
    assert isinstance(told, Submit)
    assert (told.request.sampling.max_tokens, told.request.output_so_far) == (1, ())
    (last,) = batch
    assert isinstance(last, RunFinished)
    assert (last.reason, last.completion_tokens) == ("length", 2)
    assert last.prompt is not None
    assert last.prompt.logprobs[0] is None
    assert [one.logprob for one in last.prompt.logprobs[1:] if one is not None] == [-0.5]


def test_the_tokens_that_could_stand_in_a_prompt_come_with_their_ranks(
    text: ModelText, ends: tuple[EngineLink, Engine]
) -> None:
    link, engine = ends
    asked = {"prompt": [112, 113, 114], "max_tokens": 1, "echo": True, "logprobs": 1, "prompt_logprobs": 2}
    top = ((113, -0.5), (97, -0.75), (98, -1.0))
    engine.will_say("x", ends=True, prompt=(Logprobs(-0.5, top, 1), Logprobs(-9.0, top, 40)))
    batches = list(RunStream(link, text, LlmRun("completions", asked, 7), "r", 512, StartTrace()).messages(None))
    told = engine.told.get(timeout=10)
    assert isinstance(told, Submit)
    assert (told.request.sampling.prompt_logprobs, told.request.sampling.prompt_param) == (2, "prompt_logprobs")
    last = batches[-1][-1]
    assert isinstance(last, RunFinished)
    assert last.prompt is not None
    assert last.prompt.ranked == (
        (RankedToken(113, "q", -0.5, 1), RankedToken(97, "a", -0.75, 2)),
        (RankedToken(114, "r", -9.0, 40), RankedToken(113, "q", -0.5, 1), RankedToken(97, "a", -0.75, 2)),
    )
    assert [len(one.top) for one in last.prompt.logprobs[1:] if one is not None] == [1, 1]


@pytest.mark.parametrize(
    ("asked", "param"),
    [({"prompt_logprobs": 20}, "prompt_logprobs"), ({"echo": True, "logprobs": 20}, "echo")],
)
def test_more_logprobs_of_a_prompt_than_a_message_holds_are_refused_before_anything_is_computed(
    text: ModelText, ends: tuple[EngineLink, Engine], asked: dict[str, object], param: str
) -> None:
    link, engine = ends
    run_of = partial(RunStream, link, text, request_id="r", max_model_len=1 << 20, trace=StartTrace())
    with pytest.raises(BadParameter, match=f"{param}: the logprobs of 9000 tokens take about"):
        run_of(run=LlmRun("completions", {"prompt": [97] * 9000, **asked}, 7))
    run_of(run=LlmRun("completions", {"prompt": [97] * 3000, **asked}, 7))
    assert engine.told.empty()


def test_a_text_is_filled_in_by_a_model_that_has_the_marks_for_it(
    text: ModelText, ends: tuple[EngineLink, Engine]
) -> None:
    with pytest.raises(BadParameter, match="suffix: this model has no tokens for a text that is filled in"):
        run(ends[0], text, suffix="c")
    taught = Tokenizer.from_str(text.tokenizer.to_str())
    marks = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    taught.add_special_tokens(marks)
    able = ModelText(taught, None, (256,), 260, {})
    begin, hole, end = map(taught.token_to_id, marks)
    prompt = run(ends[0], able, prompt="a", suffix="c").parsed.engine.prompt_token_ids
    assert prompt == (begin, ord("a"), hole, ord("c"), end)
    with pytest.raises(BadParameter, match="send the prompt as one"):
        run(ends[0], able, prompt=[1, 2], suffix="c")


def test_the_engine_is_told_to_stop_when_the_time_of_a_run_is_over(
    text: ModelText, ends: tuple[EngineLink, Engine]
) -> None:
    link, engine = ends
    with pytest.raises(TimeLimitExceeded):
        list(run(link, text).messages(time.monotonic()))
    assert isinstance(engine.told.get(timeout=10), Submit)
    assert engine.told.get(timeout=10) == Abort("r")
    assert link.inflight() == 0


def test_the_engine_is_told_to_stop_when_nobody_reads_an_answer_further(
    text: ModelText, ends: tuple[EngineLink, Engine]
) -> None:
    link, engine = ends
    messages = run(link, text).messages(None)
    engine.will_say("o")
    next(messages)
    messages.close()
    assert isinstance(engine.told.get(timeout=10), Submit)
    assert engine.told.get(timeout=10) == Abort("r")


def test_a_client_that_leaves_before_the_logprobs_of_its_prompt_came_ends_its_run_like_any_other(
    text: ModelText, ends: tuple[EngineLink, Engine]
) -> None:
    link, engine = ends
    stream = run(link, text, prompt=[112, 113], prompt_logprobs=1)
    with ThreadPoolExecutor(1) as other:
        batches = other.submit(lambda: list(stream.messages(None)))
        assert isinstance(engine.told.get(timeout=10), Submit)
        stream.hang_up()
        (last,) = batches.result(10)[-1]
    assert isinstance(last, RunFinished)
    assert last.reason == "abort"


def test_the_texts_of_tokens_are_made_for_those_who_ask(text: ModelText) -> None:
    """A text may have millions of tokens, and making theirs would hold up everybody's answers for seconds."""
    for wants, texts in ((None, ()), (False, ()), (True, ("h", "i"))):
        asked = LlmRun("tokenize", {"prompt": "hi", "return_token_strs": wants}, 7)
        ((last,),) = TextAnswer(text, asked, StartTrace()).messages(None)
        assert isinstance(last, RunFinished)
        assert last.prompt == RunPrompt((104, 105), "", texts)


def test_an_engine_that_ended_a_request_is_told_nothing_more_of_it(
    text: ModelText, ends: tuple[EngineLink, Engine]
) -> None:
    link, engine = ends
    messages = run(link, text).messages(None)
    engine.will_say("ok", ends=True)
    last = list(messages)[-1][-1]
    assert isinstance(last, RunFinished)
    assert (last.reason, last.completion_tokens) == ("length", 2)
    link.submit(run(link, text).parsed.engine)
    assert [type(engine.told.get(timeout=10)) for _ in range(2)] == [Submit, Submit]

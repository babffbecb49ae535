"""An LLM container; its state is new, starting, ready or failed.  proxy.py speaks HTTP; the link leads to the
engine."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing, contextmanager, nullcontext
from typing import Any, Final

from relay.clients.fetch import DescriptorClient
from relay.protocol.messages import TEXT_ENDPOINTS, InitReply, LlmInit, LlmRun, PreflightReply
from relay.protocol.model_kinds import check_kind
from thaw import wire
from thaw.checkpoints import versions
from thaw.errors import BadRequest, Conflict, InstanceGone, ModelChanged, ModelUnsupported, TimeLimitExceeded
from thaw.tracing.trace import Phase
from thaw_runtime.engine.link import EngineLink
from thaw_runtime.engine.protocol import GRANT_DEADLINE_S, Consolidated, Embeds
from thaw_runtime.llm.adapters import Adapters
from thaw_runtime.llm.consolidation import Consolidation
from thaw_runtime.llm.embedding_run import EmbeddingRun
from thaw_runtime.llm.model_text import ModelText, load_model_text, notes_on
from thaw_runtime.llm.runs import RunStream
from thaw_runtime.llm.text_check import differences
from thaw_runtime.llm.tokenize_answers import TextAnswer
from thaw_runtime.process.memory_bound import bound_memory
from thaw_runtime.process.start_trace import StartTrace

Answer = RunStream | EmbeddingRun | TextAnswer
CHECK_BYTES: Final = 384 << 20
"""The memory that the tokenizer and the chat template of a checked model may take."""
LONG_BYTES: Final = 256 << 10
"""A body of this length takes a core for some tenths of a second."""


class LlmContainer:
    def __init__(self, link: EngineLink, descriptor_socket: str) -> None:
        self._link = link
        self._descriptor_socket = descriptor_socket
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._long_text = threading.Lock()
        self._state = "new"
        self._owed = 0
        self._text: ModelText | None = None
        self._init: LlmInit | None = None
        self._consolidation: Consolidation | None = None
        self._max_model_len = 0
        self._embeds: Embeds | None = None
        self.adapters = Adapters(link)

    def preflight(self, init: LlmInit) -> PreflightReply:
        """Say whether :meth:`init` would succeed, from the sidecars alone.  The container is of no further use.  Raises
        the error with which it would fail."""
        self._begin("checking")
        self._link.begin_check(init, self._descriptor_socket)
        bound_memory(CHECK_BYTES)
        with (
            closing(DescriptorClient.connect(self._descriptor_socket)) as client,
            closing(client.segment(deadline_s=GRANT_DEADLINE_S)) as segment,
        ):
            text = load_model_text(segment)
            notes = notes_on(text)
        checked = self._link.wait_checked()
        notes = ("it is an embedding model, which answers /v1/embeddings",) if checked.embeds else notes
        said = (*checked.notes, *notes, *differences(text, checked.reading))
        return PreflightReply(checked.engine, checked.max_model_len, said, checked.embeds, checked.most_stages)

    def _begin(self, state: str) -> None:
        with self._lock:
            if self._state != "new":
                raise Conflict("Cannot initialize the action more than once.")
            self._state = state

    def init(self, init: LlmInit) -> InitReply:
        """Block until the engine accepts requests.  The tokenizer loads while the weights arrive.  Raises ThawError."""
        self._begin("starting")
        with self._lock:
            self._init = init
            self._consolidation = Consolidation(init, self._become_worker)
        trace = StartTrace(group_id=init.group_id, stage=init.stage, host=init.host)
        try:
            with trace.phase(Phase.INIT_BEGIN):
                memory = self._start(init, trace)
        except Exception:
            self._set_state("failed")
            raise
        gc.freeze()  # the tokenizer stays in memory, so no garbage collection should traverse it while a token waits
        self._set_state("ready")
        return InitReply(True, trace.events, memory)

    def _start(self, init: LlmInit, trace: StartTrace) -> Mapping[str, int]:
        self._link.begin_start(init, self._descriptor_socket)
        text: Future[None] = Future()
        if init.stage == 0:
            threading.Thread(target=self._load_text_beside, args=(trace, text), name="text", daemon=True).start()
        else:  # other stages handle only hidden states
            text.set_result(None)
        started = self._link.wait_started()
        text.result()
        trace.extend(started.events)
        trace.adopt(self._link.stops.since(0))  # includes stops during the imports, before the action was known
        self._max_model_len, self._embeds = started.max_model_len, started.embeds
        return started.memory

    def _load_text_beside(self, trace: StartTrace, ended: Future[None]) -> None:
        """Load the text side while the engine starts.  An error ends the start at once, as one of the engine does, even
        if the other side still waits for its bytes."""
        try:
            self._load_text(trace)
        except Exception as e:  # noqa: BLE001  the edge of a thread: /init answers with it
            ended.set_exception(e)
            self._link.give_up_start(e)
        else:
            ended.set_result(None)

    def _become_worker(self) -> Consolidated:
        """A later stage has handled only hidden states so far."""
        init = self._init
        if init is not None and self._text is None:
            self._load_text(StartTrace(group_id=init.group_id, stage=init.stage, host=init.host))
        return self._link.consolidate()

    def _load_text(self, trace: StartTrace) -> None:
        with (
            trace.phase(Phase.TOKENIZER_BEGIN),
            closing(DescriptorClient.connect(self._descriptor_socket)) as client,
            closing(client.segment(deadline_s=GRANT_DEADLINE_S)) as segment,
        ):
            tool_parser = self._init.config.engine.tool_parser if self._init is not None else ""
            self._text = load_model_text(segment, tool_parser)

    def run(self, body: Mapping[str, Any], adapter: str = "", n_bytes: int = 0) -> tuple[Answer, float | None]:
        """The request's stream, ready to start, and its monotonic deadline.  ``adapter`` names the loaded adapter that
        answers; if it is empty, the base model answers.  ``n_bytes``: the length of the body as it came.  Raises
        BadRequest, InstanceGone, AdapterMissing for an adapter that is not loaded, ModelUnsupported for a function's
        adapter that the host has not loaded, ModelChanged for an answer that another version of the model began, and
        TimeLimitExceeded."""
        deadline = _deadline(body)
        with self._turn(deadline) if n_bytes > LONG_BYTES else nullcontext():
            return self._made(body, adapter), deadline

    @contextmanager
    def _turn(self, deadline: float | None) -> Iterator[None]:
        """Long texts are tokenised one after another, so that short ones find a core.  Raises TimeLimitExceeded."""
        if not self._long_text.acquire(timeout=-1 if deadline is None else max(0.0, deadline - time.monotonic())):
            raise TimeLimitExceeded("the action ran longer than its time limit")
        try:
            yield
        finally:
            self._long_text.release()

    def _made(self, body: Mapping[str, Any], adapter: str) -> Answer:
        value = body.get("value")
        if not isinstance(value, dict):
            raise BadRequest('/run wants {"value": {endpoint, body, seed, …}}')
        if self._state != "ready" or self._text is None or self._init is None:
            raise InstanceGone(f"this container is {self._state} and cannot run requests")
        if self._init.stage and self.consolidation.n_stages > 1:
            raise InstanceGone(f"stage {self._init.stage} of a pipeline takes no requests")
        run = wire.from_plain(LlmRun, {"endpoint": "chat", "seed": 0, **value})
        _check_version(run, self._init, adapter)
        is_text = run.endpoint in TEXT_ENDPOINTS
        if not is_text:
            self._check_adapter(run, self._init, adapter)
        activation_id = str(body.get("activation_id") or "")
        trace = StartTrace(group_id=self._init.group_id, host=self._init.host, activation_id=activation_id)
        trace.mark(Phase.RUN_BEGIN)
        # One activation may come twice (when it is resumed on the same worker), but an engine's ids must be unique.
        request_id = f"{activation_id or 'run'}-{time.monotonic_ns():x}"
        if is_text:
            return TextAnswer(self._text, run, trace)
        of_request = self._link, self._text, run, request_id, self._max_model_len, trace
        if (embeds := _embeds(run, self._embeds)) is not None:
            return EmbeddingRun(*of_request, embeds, _cache_salt(body, self._init))
        return RunStream(*of_request, adapter, _cache_salt(body, self._init))

    def _check_adapter(self, run: LlmRun, init: LlmInit, adapter: str) -> None:
        if not adapter and (run.adapter or init.config.model.adapter):
            raise ModelUnsupported(
                "the function has an adapter, and this host brings none", hint="update thaw on every machine"
            )
        self.adapters.check(adapter)

    @property
    def consolidation(self) -> Consolidation:
        """Raises InstanceGone when the container does not serve."""
        if self._state != "ready" or self._consolidation is None:
            raise InstanceGone(f"this container is {self._state} and cannot become a worker")
        return self._consolidation

    def health(self) -> dict[str, object]:
        found: dict[str, object] = {"state": self._state, "inflight": self._link.inflight()}
        if (consolidation := self._consolidation) is not None:
            found |= {"stages": consolidation.n_stages, "consolidating": consolidation.is_under_way}
        return found

    @contextmanager
    def answering(self) -> Iterator[None]:
        """While the block runs, a client waits for its answer, and the process must not end."""
        with self._idle:
            self._owed += 1
        try:
            yield
        finally:
            with self._idle:
                self._owed -= 1
                self._idle.notify_all()

    def engine_lost(self, deadline_s: float) -> None:
        """Take no run any more, and wait until every client has been answered, including the client of /init."""
        with self._idle:
            self._state = "failed"
            self._idle.wait_for(lambda: self._owed == 0, timeout=deadline_s)

    def _set_state(self, state: str) -> None:
        with self._lock:
            self._state = state


def _check_version(run: LlmRun, init: LlmInit, adapter: str) -> None:
    """Refuse an answer that another version of the model began: this version would not have generated those tokens, and
    its vocabulary may lack them."""
    if run.resume is not None and adapter and run.resume.adapter not in ("", adapter):
        raise ModelChanged("another version of the adapter began this answer", hint="send the request again")
    began = run.resume.model_version if run.resume is not None else ""
    if began and init.model_version and began != init.model_version:
        raise ModelChanged(
            f"version {versions.short(began)} of the model began this answer, and this instance runs "
            f"{versions.short(init.model_version)}",
            hint="send the request again",
        )


def _embeds(run: LlmRun, found: Embeds | None) -> Embeds | None:
    """Return None for a run that generates text.  Raises BadRequest for a run that the model's kind does not answer."""
    check_kind(run.endpoint, embeds=found is not None)
    return found


def _cache_salt(body: Mapping[str, Any], init: LlmInit) -> str:
    """Callers of another namespace than the function's (it is in a shared package) have a part of the prefix cache for
    each namespace: what is found there would tell them what others have asked, by the time that a prompt takes."""
    caller, owner = str(body.get("namespace") or ""), init.action.partition("/")[0]
    return "" if caller == owner else caller


def _deadline(body: Mapping[str, Any]) -> float | None:
    """``deadline`` is wall-clock milliseconds, as OpenWhisk sends it."""
    try:
        left_s = int(body["deadline"]) / 1000 - time.time()
    except (KeyError, TypeError, ValueError):
        return None
    return time.monotonic() + left_s

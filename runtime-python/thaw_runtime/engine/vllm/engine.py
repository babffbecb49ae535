"""The engine protocol on vLLM: EngineCore in a thread of this process, without API server, tokenizer or profiling.

A start has no second process, no profiling run (the KV size is computed), no dummy weights, no compilation and no
tokenizer.  In a pipeline (docs/pipeline.md), stage 0 has vLLM's engine and scheduler; every other stage follows.
"""

from __future__ import annotations

import thaw_runtime.engine.vllm.compat  # noqa: F401  first: it names what the imports below would miss

# isort: split
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from time import monotonic
from typing import Any

import torch
from vllm.exceptions import VLLMClientError
from vllm.v1.engine.core import EngineCore

from relay.protocol.messages import LlmInit
from thaw.errors import (
    BadParameter,
    Conflict,
    ErrorInfo,
    InstanceGone,
    ModelUnsupported,
    PlatformError,
    ThawError,
    WorkerLost,
)
from thaw.logs import Log, print_traceback
from thaw.tracing.trace import Phase
from thaw_runtime.engine.kv_memory import MemoryPlan
from thaw_runtime.engine.protocol import (
    AdapterFiles,
    Checked,
    Consolidated,
    ConsolidationEnded,
    EmbedRequest,
    Emit,
    EngineRequest,
    EngineStarted,
    Event,
    Failed,
    Finished,
)
from thaw_runtime.engine.vllm.adapters import Adapters
from thaw_runtime.engine.vllm.background_load import BackgroundLoad
from thaw_runtime.engine.vllm.check import check
from thaw_runtime.engine.vllm.configuration import engine_config, forget_surroundings, plan_memory
from thaw_runtime.engine.vllm.current_start import load_postponed, starting_from
from thaw_runtime.engine.vllm.embeddings import Embeddings
from thaw_runtime.engine.vllm.errors import translated
from thaw_runtime.engine.vllm.executors import executor_for, rehearse_whole
from thaw_runtime.engine.vllm.first_stage import VllmFirstStage
from thaw_runtime.engine.vllm.grammars import Constrained, Grammars, set_grammar
from thaw_runtime.engine.vllm.inbox import AdapterWanted, EndConsolidation, EndLoad, Item, Unprepared, refuse
from thaw_runtime.engine.vllm.open_request import OpenRequest
from thaw_runtime.engine.vllm.own_core import OwnCore, verify
from thaw_runtime.engine.vllm.packing import give_back_freed
from thaw_runtime.engine.vllm.scheduler import FollowerCore
from thaw_runtime.engine.vllm.state_layers import counted
from thaw_runtime.engine.vllm.translation import vllm_request
from thaw_runtime.engine.vllm.work import Work
from thaw_runtime.pipeline.consolidation import Consolidation
from thaw_runtime.pipeline.link import StageLink, open_transport
from thaw_runtime.pipeline.stage_parts import StagePart
from thaw_runtime.pipeline.staying import Staying
from thaw_runtime.pipeline.wire import Parted
from thaw_runtime.process.start_trace import StartTrace
from thaw_runtime.weights.readable_segment import Segment
from thaw_runtime.weights.sidecars import materialised
from thaw_runtime.weights.tokenizer_files import read_tokenizer_files

_log = Log("engine")
_STOPPED = ErrorInfo(WorkerLost.__name__, "the engine was stopped")


class VllmEngine:
    """See :class:`thaw_runtime.engine.protocol.Engine`.

    Requests and aborts go to an inbox; the engine thread takes them between steps and sleeps on the condition while
    there is nothing to do.
    """

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._changed = threading.Condition()
        self._inbox: list[Item] = []
        self._open: dict[str, OpenRequest] = {}
        self._stopping = False
        self._dead: ErrorInfo | None = None
        self._broken: ErrorInfo | None = None  # why the pipeline broke
        self._core: Any = None
        self._link: StageLink | None = None
        self._memory: MemoryPlan | None = None
        self._background: BackgroundLoad | None = None
        self._consolidation: Consolidation | None = None
        self._first_stage: VllmFirstStage | None = None  # set during a consolidation
        self._n_attempts = 0
        self._staying = Staying(self._changed, None)  # used by a later stage only
        self._whole = False  # one worker computes everything, from the start or since its group was consolidated

    # ── the protocol ──

    def check(self, stage_plan: LlmInit, segment: Segment) -> Checked:
        return check(stage_plan, segment)

    def start(self, stage_plan: LlmInit, segment: Segment) -> EngineStarted:
        outcome: list[EngineStarted | BaseException] = []
        ready = threading.Event()
        # Loading and stepping share one thread, because OpenMP keeps a pool of workers for each thread that calls it.
        args = (stage_plan, [segment], outcome, ready)  # in a list: the thread empties it, but keeps its arguments
        self._thread = threading.Thread(target=self._run, args=args, name="engine", daemon=True)
        self._thread.start()
        ready.wait()
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        return outcome[0]

    def submit(self, request: EngineRequest | EmbedRequest) -> None:
        grammar = None if isinstance(request, EmbedRequest) else request.sampling.grammar
        with self._changed:
            dead = self._dead
            if dead is None:
                hops = self._link.hops if self._link is not None and not self._whole else None
                self._open[request.request_id] = OpenRequest(request, hops)
                if grammar is None:
                    self._inbox.append(request)
                    self._changed.notify_all()
        if dead is not None:
            self._emit([(request.request_id, Failed(dead))])
        elif grammar is not None and isinstance(request, EngineRequest):
            self._grammars.prepare(request, partial(self._prepared, request.request_id))

    def _prepared(self, request_id: str, outcome: Constrained | ErrorInfo) -> None:
        """A request's grammar is ready, or cannot be.  Called on another thread; the request may have ended."""
        with self._changed:
            if request_id in self._open:
                self._inbox.append(Unprepared(request_id, outcome) if isinstance(outcome, ErrorInfo) else outcome)
                self._changed.notify_all()

    def abort(self, request_id: str) -> None:
        with self._changed:
            if request_id in self._open:
                self._inbox.append(request_id)
                self._changed.notify_all()

    def requests(self) -> tuple[str, ...]:
        with self._changed:
            return tuple(self._open)

    def drain(self, deadline_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._open, timeout=deadline_s)

    def memory(self) -> Mapping[str, int]:
        return asdict(self._memory) if self._memory else {}

    def consolidate(self, ended: Callable[[ConsolidationEnded], None]) -> None:
        if not self._part.first:
            self._staying.ask(ended)
            return
        if (dead := self._ask(ended)) is not None:
            ended(dead)

    def _ask(self, item: AdapterWanted | EndConsolidation) -> ErrorInfo | None:
        """Put the item into the inbox.  If the engine takes no more items, return the reason."""
        with self._changed:
            if self._dead is None:
                self._inbox.append(item)
                self._changed.notify_all()
            return self._dead

    def load_adapter(self, files: AdapterFiles, ended: EndLoad) -> None:
        wanted = AdapterWanted(files, ended)
        if (dead := self._ask(wanted)) is not None:
            wanted.end(dead)

    def load_rest(self) -> None:
        """Let a full worker in a pipeline load the other layers, as a consolidation does first."""
        if self._background is not None:
            self._background.begin(lambda: None)

    def wait_whole(self, deadline_s: float) -> bool:
        """Wait until a full worker in a pipeline has loaded all of the model.

        False after ``deadline_s`` seconds, when the load has failed, and for any other worker.
        """
        return self._background is not None and self._background.wait(deadline_s)

    def stop(self) -> None:
        if self._link is not None:
            self._link.end(_STOPPED)
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def join(self) -> None:
        self._thread.join()

    # ── the engine thread ──

    def _run(self, init: LlmInit, segments: list[Segment], outcome: list[Any], ready: threading.Event) -> None:
        try:
            outcome.append(self._start(init, segments.pop()))
        except ThawError as e:
            outcome.append(e)
        except Exception as e:  # noqa: BLE001  the edge to vLLM: every error becomes one of Thaw's
            print_traceback()
            outcome.append(translated(e))
        started = isinstance(outcome[0], EngineStarted)
        if not started and self._link is not None:
            self._link.end(outcome[0].info())
        ready.set()
        if started:
            give_back_freed()
            self._work(self._follow if init.stage else self._lead)

    def _work(self, work: Callable[[], None]) -> None:
        """Work until the engine is stopped or breaks.  Then fail the open requests and tell the other stages."""
        error = _STOPPED
        try:
            work()
        except ThawError as e:
            error = ErrorInfo(WorkerLost.__name__, e.message, e.hint)
        except Exception as e:  # noqa: BLE001  a broken step loop must fail its requests, not hang them
            print_traceback()
            error = ErrorInfo(WorkerLost.__name__, f"the engine failed: {type(e).__name__}: {e}")
        with self._changed:
            self._dead = error = _STOPPED if self._stopping else error
            lost = tuple(self._open)
            inbox, self._inbox = self._inbox, []
            self._open.clear()
            self._changed.notify_all()
        if self._consolidation is not None:
            self._consolidation.give_up(error)
        self._staying.end(error)
        refuse(inbox, error)
        if lost:
            self._emit([(request_id, Failed(error)) for request_id in lost])
        if self._link is not None:
            self._link.end(error)
        self._grammars.close()

    def _lead(self) -> None:
        while self._take_inbox():
            if self._consolidation is not None:
                self._consolidation.advance(computes=self._busy())
            if self._busy():
                self._step()

    def _follow(self) -> None:
        """Compute the batches that stage 0 sends.  When it has left, become a worker too, if that is wanted."""
        link = self._link
        assert link is not None  # noqa: S101  a later stage has one
        while (batch := link.next_batch()) is not None:
            self._core.model_executor.follow(batch)
        assert link.parted is not None  # noqa: S101  otherwise next_batch raises
        waited_s = self._staying.wait(lambda: self._stopping)
        if waited_s is not None:
            self._become_worker(link.parted, waited_s)
            link.leave()
            self._lead()

    def _become_worker(self, parted: Parted, waited_s: float) -> None:
        """Build an engine core around the model in memory.  An error ends this engine, but no request depends on it."""
        began_s, n_layers = monotonic(), self._part.bounds[-1][1]
        self._core = OwnCore(self._core, n_layers)
        verify(self._core, parted, n_layers)
        self._spending = Work(None)
        with self._changed:
            self._whole, self._dead = True, None
        build_s = monotonic() - began_s
        _log.event("worker_built", stage=self._part.stage, wait_s=round(waited_s, 3), build_s=round(build_s, 4))
        self._staying.end(Consolidated(0, 0, 0, round(waited_s, 3), 0.0, build_s=round(build_s, 4)))

    def _break(self, error: ErrorInfo) -> None:
        """Called on the link's thread: wake the engine thread, which may be waiting for requests."""
        with self._changed:
            is_over, attempt = self._whole, self._consolidation  # one worker needs no other stage
            self._broken = None if is_over else error
            self._changed.notify_all()
        if attempt is not None:
            attempt.fail(error)
        if is_over and self._link is not None:
            self._link.end(error)

    def _take_inbox(self) -> bool:
        """Sleep until there is work, then hand new requests and aborts to vLLM.  False when the engine shall stop."""
        with self._changed:
            while not (self._inbox or self._stopping or self._broken or self._busy() or self._is_due()):
                self._changed.wait(self._consolidation.left_s() if self._consolidation is not None else None)
            if self._stopping:
                return False
            if self._broken:
                raise WorkerLost(self._broken.message, hint=self._broken.hint)
            inbox, self._inbox = self._inbox, []
        for item in inbox:
            if isinstance(item, str):
                self._abort(item)
            elif isinstance(item, EngineRequest):
                self._add(item)
            elif isinstance(item, EmbedRequest):
                self._end(self._embeddings.begin(item))
            elif isinstance(item, Constrained):
                if item.request.request_id in self._open:  # it was not aborted while its grammar was compiled
                    self._add(item.request, item)
            elif isinstance(item, Unprepared):
                if item.request_id in self._open:
                    self._end([(item.request_id, Failed(item.error))])
            elif isinstance(item, AdapterWanted):
                item.end(self._adapters.try_load(item.files, {o.adapter for o in self._open.values()}))
            else:
                self._begin_consolidation(item)
        self._embeddings.feed()
        return True

    def _busy(self) -> bool:
        """True while there are requests to compute, or batches in the pipeline."""
        return bool(self._core.scheduler.has_requests() or self._core.batch_queue or self._embeddings.are_due())

    def _is_due(self) -> bool:
        return self._consolidation is not None and self._consolidation.is_due()

    def _begin_consolidation(self, ended: EndConsolidation) -> None:
        if self._whole or self._consolidation is not None:
            state = "one worker" if self._whole else "becoming one worker"
            ended(Conflict(f"this group is already {state}").info())
        elif self._link is None or self._background is None:
            ended(ModelUnsupported("stage 0 of this group cannot hold the whole model").info())
        else:
            self._n_attempts += 1
            try:
                self._consolidate(self._link, self._background, ended)
            except ThawError as e:
                ended(e.info())

    def _consolidate(self, link: StageLink, background: BackgroundLoad, ended: EndConsolidation) -> None:
        stage = VllmFirstStage(self._core, self._part, background, self._n_attempts, self._add, self._step)
        attempt = Consolidation(
            stage, self._n_attempts, stage.n_groups, self._changed, partial(self._consolidated, ended)
        )
        self._first_stage, self._consolidation = stage, attempt
        link.on_kv_part = attempt.take
        background.begin(attempt.load_ended)

    def _consolidated(self, ended: EndConsolidation, outcome: ConsolidationEnded) -> None:
        stage, self._consolidation, self._first_stage = self._first_stage, None, None
        if isinstance(outcome, Consolidated):
            with self._changed:
                lost, self._whole, self._broken = self._broken, True, None  # the loss of another stage is no news now
            if stage is not None and self._link is not None:
                self._link.send_parted(stage.parted())
            if lost is not None and self._link is not None:
                self._link.end(lost)
        ended(outcome)

    def _add(self, request: EngineRequest, constrained: Constrained | None = None) -> None:
        """Hand a request to vLLM.  One that vLLM refuses fails alone."""
        try:
            if request.sampling.prompt_logprobs is not None and self._link is not None and not self._whole:
                why = "a model in several stages has no logprobs of the prompt: leave it out"
                raise BadParameter(request.sampling.prompt_param, why)
            self._embeddings.check_generates()
            made = vllm_request(request, self._adapters.request_of(request.adapter), self._core.request_block_hasher)
            if constrained is not None:
                set_grammar(self._core, made, constrained.grammar)
            self._core.add_request(made)
            self._core.model_executor.begin(request)
            if opened := self._open.get(request.request_id):  # a rehearsed request has no client
                opened.begin(self._spending, constrained.grammar if constrained is not None else None)
        except (BadParameter, InstanceGone) as e:
            self._end([(request.request_id, Failed(e.info()))])
        except (ValueError, TypeError, VLLMClientError) as e:
            self._end([(request.request_id, Failed(ErrorInfo("BadRequest", str(e))))])

    def _abort(self, request_id: str) -> None:
        opened = self._open.get(request_id)
        if opened is not None:
            self._core.abort_requests(self._embeddings.forget(request_id) or [request_id])
            self._end([(request_id, Finished("abort", opened.usage()))])

    def _step(self) -> None:
        outputs, _ = self._core.step_fn()
        events: list[tuple[str, Event]] = []
        for batch in (outputs or {}).values():
            for output in batch.outputs:
                opened = self._open.get(output.request_id)
                if opened is not None:  # an aborted request may still have had a token in flight
                    events.extend((output.request_id, e) for e in opened.events(output))
                elif found := self._embeddings.events(output):
                    events.extend(found)
                elif self._first_stage is not None:
                    self._first_stage.take_output(output)
        self._end(events)

    def _end(self, events: Sequence[tuple[str, Event]]) -> None:
        """Forget the requests that ended, then emit the events."""
        if not events:
            return
        with self._changed:
            for request_id, event in events:
                if isinstance(event, Finished | Failed):
                    self._open.pop(request_id, None)
                    self._core.model_executor.forget(request_id)
                    self._grammars.forget(request_id)
            if not self._open:
                self._changed.notify_all()
        self._emit(events)

    # ── starting ──

    def _start(self, init: LlmInit, segment: Segment) -> EngineStarted:
        trace = StartTrace(group_id=init.group_id, stage=init.stage, host=init.host)
        forget_surroundings()
        torch.set_num_threads(max(1, init.n_threads))
        self._part = part = StagePart.of(init)
        self._whole = part.whole
        if not part.whole:
            self._link = StageLink(open_transport(init), init.stage, init.n_stages)
            self._link.when_lost(self._break)
        if not part.first:
            self._dead = ErrorInfo(PlatformError.__name__, f"stage {init.stage} of a pipeline takes no requests")
        with starting_from(segment, trace, part, self._link) as begun:
            with ExitStack() as stack:
                directory = stack.enter_context(materialised(segment))  # the built engine does not read it any more
                config = engine_config(init, segment, part, str(directory))
                self._memory = begun.memory = plan_memory(init, segment, config)
                core = EngineCore if part.first else FollowerCore
                self._core = core(config, executor_for(part), log_stats=False)
                self._memory = counted(self._memory, config, self._core)
            self._embeddings = Embeddings.of(self._core)
            worker = self._core.model_executor.driver_worker.worker
            self._adapters = Adapters(worker, init.config, begun.offered)
            whole = partial(rehearse_whole, self._core, self._add)
            load_postponed(whole if part.whole else self._core.model_executor.rehearse)
            self._background = begun.background
            self._staying = Staying(self._changed, begun.background)
            self._spending = Work(getattr(self._core.model_executor, "stages_awaited", None))
        vocabulary = read_tokenizer_files(segment), config.model_config.get_vocab_size()
        self._grammars = Grammars(*vocabulary, init.n_threads)
        trace.mark(Phase.ENGINE_END)
        if self._link is not None:
            self._link.check()
        return EngineStarted(trace.events, self.memory(), config.model_config.max_model_len, self._embeddings.facts)

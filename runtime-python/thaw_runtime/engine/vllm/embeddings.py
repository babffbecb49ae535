"""Embedding models in vLLM's engine: this module recognises them and computes the texts of a request.

A request may have thousands of texts.  vLLM gets as many of them as it computes at once, and the requests take turns,
so that one text does not wait for all of another request.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from vllm import PoolingParams
from vllm.exceptions import VLLMClientError
from vllm.model_executor.models import ModelRegistry
from vllm.v1.request import Request

from relay.protocol.messages import LlmInit
from thaw.checkpoints import pooling
from thaw.errors import BadRequest, DeveloperError, ErrorInfo, ModelUnsupported, WorkerLost
from thaw_runtime.engine.protocol import Embedded, EmbedRequest, Embeds, Event, Failed, Finished, Usage
from thaw_runtime.engine.vllm.settings import cache_salt_of
from thaw_runtime.shown import shown
from thaw_runtime.weights.readable_segment import Segment
from thaw_runtime.weights.sidecars import model_config, read_sidecar

TASK: Final = "embed"
TEXTS_AT_ONCE: Final = 128
"""The number of texts that are computed at once, the same as in vLLM's own server on a CPU.  Texts have no logits, so
memory does not grow with this number."""
REHEARSED_TOKENS: Final = 64


@dataclass(frozen=True, slots=True)
class Pooled:
    """The pooling that the model's files ask for (thaw/checkpoints/pooling.py).  If ``at_once`` is true, a text must be
    computed in one batch, because its tokens attend to later ones, or because the pooling needs all of them."""

    mode: str
    at_once: bool

    def args(self, own: Mapping[str, Any], most_tokens: int, length: int) -> dict[str, Any]:
        """Return vLLM's arguments; ``own`` are the function's.  With ``at_once``, a batch has room for the longest
        text."""
        tokens = int(own.get("max_num_batched_tokens", most_tokens))
        return {
            "runner": "pooling",
            "max_num_seqs": own.get("max_num_seqs", TEXTS_AT_ONCE),
            "max_num_batched_tokens": max(tokens, length) if self.at_once else tokens,
        }

    def check(self, model_config: Any) -> None:
        """Raises ModelUnsupported unless the engine pools as the model's files say."""
        found = model_config.pooler_config.seq_pooling_type
        if found != self.mode:
            raise ModelUnsupported(
                f"the model's files ask for the pooling {self.mode}, and the engine would take {found}",
                hint="use another model, or correct its 1_Pooling/config.json",
            )


def found(init: LlmInit, segment: Segment, architecture: str) -> Pooled | None:
    """Return the model's pooling, or None for a model that generates text.

    As in vLLM, a model embeds texts if it has a modules.json or generates no text.  Raises ModelUnsupported for a
    function that asks for stages or adapters, which an embedding model cannot have, and ModelCorrupt.
    """
    generates = ModelRegistry.models[architecture].inspect_model_cls().is_text_generation_model
    if generates and read_sidecar(segment, pooling.MODULES_NAME) is None:
        return None
    mode = pooling.pooling_of(partial(read_sidecar, segment))
    if (init.config.scaling.stages or 1) > 1 or init.n_stages > 1:
        raise ModelUnsupported(
            "an embedding model runs in one stage", hint="remove scaling.stages from the function's config"
        )
    if init.config.adapter_slots:
        raise ModelUnsupported(
            "an embedding model takes no adapters here",
            hint="merge the adapter into its base model and push the result as a model of its own",
        )
    is_causal = generates and model_config(segment).get("is_causal") is not False
    return Pooled(mode, at_once=not is_causal or mode != "LAST")


def check_tasks(tasks: Collection[str]) -> None:
    """Check the ``tasks`` of the built model.  Raises ModelUnsupported for a model that classifies or ranks."""
    if TASK not in tasks:
        raise ModelUnsupported(
            f"the model has no embeddings of texts ({shown(', '.join(sorted(tasks)), 80)}), and Thaw serves models "
            "that generate text or embed it",
            hint="deploy a model of text embeddings",
        )


def _facts_of(model_config: Any) -> Embeds:
    sizes = model_config.matryoshka_dimensions or ()
    return Embeds(int(model_config.embedding_size), bool(model_config.is_matryoshka), tuple(map(int, sizes)))


@dataclass(slots=True)
class _Open:
    request: EmbedRequest
    params: PoolingParams
    n_given: int = 0
    n_done: int = 0
    running: set[str] = field(default_factory=set)


class Embeddings:
    """The open requests for embeddings of one engine.  Everything here is called on the engine thread."""

    def __init__(self, core: Any, facts: Embeds | None) -> None:
        """``facts`` is None for a model that generates text, which has no such requests."""
        self._core, self.facts = core, facts
        self._open: dict[str, _Open] = {}
        self._turns: deque[str] = deque()  # requests with texts that vLLM does not have yet
        self._owners: dict[str, tuple[str, int]] = {}  # (request id, index of the text) by vLLM's name of the text

    @classmethod
    def of(cls, core: Any) -> Embeddings:
        """Raises ModelUnsupported for a model that neither generates text nor embeds it."""
        if core.vllm_config.model_config.runner_type != "pooling":
            return cls(core, None)
        check_tasks(core.get_supported_tasks())
        return cls(core, _facts_of(core.vllm_config.model_config))

    def check_generates(self) -> None:
        """Raises ValueError for an embedding model."""
        if self.facts is not None:
            raise ValueError("this model computes embeddings and generates no text")

    def are_due(self) -> bool:
        return bool(self._turns)

    def begin(self, request: EmbedRequest) -> list[tuple[str, Event]]:
        """Take a request; return its end if it cannot be computed."""
        try:
            if self.facts is None:
                raise ValueError("this model generates text and computes no embeddings")
            params = PoolingParams(task=TASK, dimensions=request.dimensions or None)
            params.verify(self._core.vllm_config.model_config)
        except (ValueError, VLLMClientError) as e:
            return [(request.request_id, Failed(BadRequest(str(e)).info()))]
        self._open[request.request_id] = _Open(request, params)
        self._turns.append(request.request_id)
        return []

    def feed(self) -> None:
        """Give vLLM texts, one of each request in turn, until it has TEXTS_AT_ONCE."""
        while self._turns and len(self._owners) < TEXTS_AT_ONCE:
            request_id = self._turns.popleft()
            opened = self._open[request_id]
            self._give(request_id, opened)
            if opened.n_given < len(opened.request.prompts):
                self._turns.append(request_id)

    def _give(self, request_id: str, opened: _Open) -> None:
        number, opened.n_given = opened.n_given, opened.n_given + 1
        name = f"{request_id}#{number}"
        made = Request(
            request_id=name,
            prompt_token_ids=list(opened.request.prompts[number]),
            sampling_params=None,
            pooling_params=opened.params,
            cache_salt=cache_salt_of(opened.request.cache_salt),
            block_hasher=self._core.request_block_hasher,
        )
        self._core.add_request(made)
        self._owners[name] = request_id, number
        opened.running.add(name)

    def events(self, output: Any) -> list[tuple[str, Event]]:
        """Convert an EngineCoreOutput of vLLM to events; the list is empty if it belongs to none of these requests."""
        request_id, number = self._owners.pop(output.request_id, ("", 0))
        opened, vector = self._open.get(request_id), output.pooling_output
        if opened is None:
            return []
        opened.running.discard(output.request_id)
        if vector is None or not vector.isfinite().all():
            self._core.abort_requests(self.forget(request_id))
            return [(request_id, Failed(_no_vector(output)))]
        opened.n_done += 1
        data = base64.b64encode(vector.float().numpy().tobytes()).decode()
        events: list[tuple[str, Event]] = [(request_id, Embedded(number, data))]
        if opened.n_done == len(opened.request.prompts):
            del self._open[request_id]
            events.append((request_id, Finished("stop", Usage(sum(map(len, opened.request.prompts)), 0))))
        return events

    def forget(self, request_id: str) -> list[str]:
        """Forget a request, if it is one of these, and return the names of its texts that vLLM has."""
        opened = self._open.pop(request_id, None)
        if opened is None:
            return []
        if request_id in self._turns:
            self._turns.remove(request_id)
        for name in opened.running:
            del self._owners[name]
        return sorted(opened.running)


def _no_vector(output: Any) -> ErrorInfo:
    if output.pooling_output is None:
        return WorkerLost(f"the engine ended a text without a vector: {output.finish_reason}").info()
    hint = "set engine.dtype to float32"
    return DeveloperError("The model computes numbers that are not finite.", hint=hint).info()


def rehearse(core: Any) -> None:
    """Compute one text and keep nothing of it."""
    texts, n_tokens = Embeddings.of(core), min(REHEARSED_TOKENS, core.vllm_config.model_config.max_model_len)
    texts.begin(EmbedRequest("rehearsal", ((0,) * n_tokens,)))
    texts.feed()
    while core.scheduler.has_requests():
        core.step_fn()
    core.reset_prefix_cache()

"""Thaw's messages as vLLM's objects.  stage.py has the other direction."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.core.sched.output import CachedRequestData, GrammarOutput, NewRequestData, SchedulerOutput
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request

from thaw_runtime.engine.protocol import EngineRequest
from thaw_runtime.engine.vllm.grammars import MARKER
from thaw_runtime.engine.vllm.settings import cache_salt_of
from thaw_runtime.pipeline.wire import NewSequence, Sampled, Step


def sampling_params(request: EngineRequest) -> SamplingParams:
    s = request.sampling
    greedy = s.temperature == 0
    done = len(request.output_so_far)
    return SamplingParams(
        temperature=s.temperature,
        top_p=1.0 if greedy else s.top_p,
        top_k=0 if greedy else s.top_k,
        min_p=0.0 if greedy else s.min_p,
        seed=None if greedy else request.seed % 2**63,  # vLLM takes -1 for "no seed"
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        repetition_penalty=s.repetition_penalty,
        stop_token_ids=list(s.stop_token_ids),
        max_tokens=s.max_tokens - done,
        min_tokens=max(0, s.min_tokens - done),
        logprobs=s.logprobs,
        prompt_logprobs=s.prompt_logprobs,
        logit_bias=dict(s.logit_bias) or None,
        structured_outputs=MARKER if s.grammar is not None else None,
        detokenize=False,
        ignore_eos=True,  # the end-of-sequence tokens are among the stop tokens
    )


def vllm_request(request: EngineRequest, lora: LoRARequest | None, block_hasher: Any) -> Request:
    return Request(
        request_id=request.request_id,
        prompt_token_ids=[*request.prompt_token_ids, *request.output_so_far],
        sampling_params=sampling_params(request),
        pooling_params=None,
        lora_request=lora,
        cache_salt=cache_salt_of(request.cache_salt),
        block_hasher=block_hasher,
    )


def scheduler_output_of(step: Step) -> SchedulerOutput:
    """The output that a scheduler in this stage would have made for the batch."""
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [_new_request(new) for new in step.new]
    output.scheduled_cached_reqs = CachedRequestData(
        req_ids=[k.request_id for k in step.known],
        resumed_req_ids={k.request_id for k in step.known if k.resumed},
        new_token_ids=[list(k.tokens) for k in step.known],
        all_token_ids={},
        new_block_ids=[None if k.blocks is None else tuple(map(list, k.blocks)) for k in step.known],
        num_computed_tokens=[k.computed for k in step.known],
        num_output_tokens=[k.n_output for k in step.known],
    )
    output.num_scheduled_tokens, output.total_num_scheduled_tokens = dict(step.scheduled), step.n_tokens
    output.finished_req_ids = set(step.finished)
    output.kv_cache_block_copies = [KVCacheBlockCopy(a, b) for a, b in step.copies] or None
    return output


def _new_request(new: NewSequence) -> NewRequestData:
    return NewRequestData(
        req_id=new.request.request_id,
        prompt_token_ids=[*new.request.prompt_token_ids, *new.request.output_so_far],
        mm_features=[],
        sampling_params=sampling_params(new.request),
        pooling_params=None,
        block_ids=tuple(map(list, new.blocks)),
        num_computed_tokens=new.computed,
        lora_request=None,
    )


def grammar_output(step: Step) -> GrammarOutput | None:
    """The masks of a batch as vLLM's sampler takes them."""
    if not step.masks:
        return None
    rows = np.array([np.frombuffer(mask, np.int32) for mask in step.masks.values()])
    return GrammarOutput(list(step.masks), rows, [0] * len(step.masks))


def model_runner_output(sampled: Sampled) -> ModelRunnerOutput:
    """The last stage's samples, in the form that stage 0's own runner would return."""
    logprobs = None
    if sampled.logprobs is not None:
        logprobs = LogprobsLists(
            logprob_token_ids=np.array(sampled.logprobs.token_ids),
            logprobs=np.array(sampled.logprobs.logprobs, np.float32),
            sampled_token_ranks=np.array(sampled.logprobs.ranks),
        )
    names = list(sampled.request_ids)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: i for i, name in enumerate(names)},
        sampled_token_ids=list(map(list, sampled.token_ids)),
        logprobs=logprobs,
    )

"""Convert an OpenAI request body to a prompt in token ids and to sampling parameters.

The gateway has validated types and whether each option is supported.  This module makes the checks that need the model:
lengths, token ids and the template.  The engine does not check its input: a token id that the model does not have would
end the engine together with all its other requests.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from relay.protocol.messages import MAX_RUN_MESSAGE_BYTES, LlmRun
from thaw.errors import BadParameter, BadRequest
from thaw_runtime.engine.protocol import EngineRequest, Grammar, Sampling
from thaw_runtime.llm.model_text import CONTEXT_HINT, ModelText
from thaw_runtime.llm.tools import ToolUse, tool_use

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; a chat may fill the context
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 4
MAX_BIAS = 100.0  # OpenAI's limit
_ECHOED_BYTES = 50
_RANKED_BYTES = 100
"""The bytes of one logprob of a prompt token in the message that ends an answer: for ``echo`` and for
``prompt_logprobs``."""


@dataclass(frozen=True, slots=True)
class ParsedRun:
    engine: EngineRequest
    stops: tuple[str, ...]
    tools: ToolUse
    emits: bool = True  # its tokens are for the client


def parse_run(run: LlmRun, request_id: str, text: ModelText, max_model_len: int) -> ParsedRun:
    """Parse and check the request.

    Raises BadRequest; its hint is ``context_length_exceeded`` when prompt and answer exceed the context.
    """
    body = run.body
    tools = tool_use(body, text.tool_format)
    prompt = _prompt(run.endpoint, body, text, tools, max_model_len)
    if not prompt:
        raise BadRequest("the prompt is empty")
    check_ids(prompt, text)
    output = run.resume.output_token_ids if run.resume else ()
    check_ids(output, text)
    usual = text.default_sampling.get("max_new_tokens")
    max_tokens = _max_tokens(run.endpoint, body, len(prompt), max_model_len, None if usual is None else int(usual))
    sampling, stops = _sampling(run.endpoint, body, text, max_tokens, tools.grammar), _stops(body)
    _check_prompt_logprobs(run.endpoint, body, len(prompt), sampling.prompt_param)
    request = EngineRequest(request_id, prompt, sampling, run.seed, len(output), tuple(output))
    if run.prefill_only and request.over is None:
        # an engine computes a prompt only for a token to follow it, so one is sampled, by the cheapest rule
        request, stops = replace(request, sampling=Sampling(len(output) + 1, temperature=0.0)), ()
    return ParsedRun(request, stops, tools, emits=not run.prefill_only and body.get("max_tokens") != 0)


def _prompt(
    endpoint: str, body: Mapping[str, Any], text: ModelText, tools: ToolUse, max_model_len: int
) -> tuple[int, ...]:
    if endpoint == "chat":
        variables = body.get("chat_template_kwargs") or {}
        if not isinstance(variables, dict) or {"messages", "tools"} & variables.keys():
            raise BadRequest("chat_template_kwargs must be an object of what the template knows beside the messages")
        goes_on = bool(body.get("continue_final_message"))
        if goes_on or body.get("add_generation_prompt") is not None:
            variables = {**variables, "add_generation_prompt": not goes_on and bool(body.get("add_generation_prompt"))}
        return text.encode_chat(body["messages"], variables, tools.offered, goes_on=goes_on, most_tokens=max_model_len)
    if endpoint != "completions":
        raise BadRequest(f"unknown endpoint {endpoint!r}", hint="chat or completions")
    prompt = body.get("prompt")
    if body.get("suffix"):
        text.check_length(f"{prompt}{body['suffix']}", max_model_len)
        return text.fill_in(prompt, body["suffix"])
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        text.check_length(prompt, max_model_len)
        return text.encode(prompt)
    if isinstance(prompt, list) and prompt and all(type(t) is int for t in prompt):
        return tuple(prompt)
    raise BadRequest("prompt must be one string or one list of token ids")


def check_ids(token_ids: Collection[int], text: ModelText, what: str = "") -> None:
    """Raises BadRequest for ids outside the vocabulary.  ``what`` is the parameter that holds the ids."""
    for worst in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= worst < text.vocab_size:
            problem = f"token id {worst} is outside the vocabulary of {text.vocab_size}"
            raise BadParameter(what, problem) if what else BadRequest(problem)


def _max_tokens(endpoint: str, body: Mapping[str, Any], n_prompt: int, max_model_len: int, usual: int | None) -> int:
    """``usual`` is the checkpoint's own limit, for a chat request without a limit."""
    room = max_model_len - n_prompt
    wanted = body.get("max_completion_tokens") or body.get("max_tokens")
    if wanted == 0:
        wanted = 1  # the engine computes a prompt only for a token to follow it
    if wanted is None:
        wanted = max(1, min(room, usual or room)) if endpoint == "chat" else DEFAULT_COMPLETION_TOKENS
    if wanted > room:
        raise BadRequest(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{n_prompt + wanted} tokens ({n_prompt} in the prompt, {wanted} in the completion). Please reduce the "
            "length of the prompt or completion.",
            hint=CONTEXT_HINT,
        )
    return int(wanted)


def _sampling(
    endpoint: str, body: Mapping[str, Any], text: ModelText, max_tokens: int, grammar: Grammar | None
) -> Sampling:
    def number(name: str, fallback: float) -> float:
        """The value of the request, else of the checkpoint, else OpenAI's default (``fallback``)."""
        value = body.get(name)
        return text.default_sampling.get(name, fallback) if value is None else value

    ignore_eos = bool(body.get("ignore_eos"))
    min_tokens = int(body.get("min_tokens") or 0)
    if min_tokens > max_tokens:
        raise BadRequest(f"min_tokens={min_tokens} is more than the {max_tokens} tokens the answer may have")
    return Sampling(
        max_tokens=max_tokens,
        temperature=float(number("temperature", 1.0)),
        top_p=float(number("top_p", 1.0)),
        top_k=max(0, int(number("top_k", 0))),  # like 0, -1 means all tokens
        min_p=float(number("min_p", 0.0)),
        presence_penalty=float(number("presence_penalty", 0.0)),
        frequency_penalty=float(number("frequency_penalty", 0.0)),
        repetition_penalty=float(number("repetition_penalty", 1.0)),
        stop_token_ids=(*(() if ignore_eos else text.eos_token_ids), *_stop_token_ids(body, text)),
        min_tokens=min_tokens,
        logprobs=_logprobs(endpoint, body),
        logit_bias=_logit_bias(body, text),
        grammar=grammar,
        prompt_logprobs=_prompt_logprobs(endpoint, body),
        prompt_param="echo" if body.get("prompt_logprobs") is None else "prompt_logprobs",
    )


def _stop_token_ids(body: Mapping[str, Any], text: ModelText) -> Sequence[int]:
    token_ids = body.get("stop_token_ids") or []
    if not isinstance(token_ids, list) or not all(type(t) is int for t in token_ids):
        raise BadRequest("stop_token_ids must be a list of token ids")
    check_ids(token_ids, text)
    return token_ids


def _logit_bias(body: Mapping[str, Any], text: ModelText) -> Mapping[int, float]:
    """The biases by token id; the request has them by string, because JSON has no integer keys."""
    try:
        biases = {int(token): float(bias) for token, bias in (body.get("logit_bias") or {}).items()}
    except (AttributeError, TypeError, ValueError, OverflowError) as e:
        raise BadRequest("logit_bias must be an object of token ids and numbers") from e
    check_ids(biases, text)
    if not all(-MAX_BIAS <= bias <= MAX_BIAS for bias in biases.values()):
        raise BadRequest(f"a logit_bias must be a number from {-MAX_BIAS:g} to {MAX_BIAS:g}")
    return biases


def _logprobs(endpoint: str, body: Mapping[str, Any]) -> int | None:
    """The number of logprobs per token.  A chat request has a switch and a number, a completion only a number."""
    wanted = body.get("logprobs")
    if wanted is None or wanted is False:
        return None
    count = (body.get("top_logprobs") or 0) if endpoint == "chat" else int(wanted)
    if not 0 <= count <= MAX_TOP_LOGPROBS:
        raise BadRequest(f"at most {MAX_TOP_LOGPROBS} logprobs a token can be had, not {count}")
    return int(count)


def _prompt_logprobs(endpoint: str, body: Mapping[str, Any]) -> int | None:
    """Return the largest requested number of logprobs per prompt token.  An echoed prompt has as many as the answer;
    vLLM's ``prompt_logprobs`` has its own number."""
    echoed = _logprobs(endpoint, body) if body.get("echo") else None
    wanted = [n for n in (echoed, body.get("prompt_logprobs")) if n is not None]
    return max(wanted, default=None)


def _check_prompt_logprobs(endpoint: str, body: Mapping[str, Any], n_prompt: int, param: str) -> None:
    """Refuse a request whose prompt logprobs would exceed a message, because all of them come in one.  Raises
    BadParameter, before anything is computed."""
    echoed, ranked = _logprobs(endpoint, body) if body.get("echo") else None, body.get("prompt_logprobs")
    each = ((echoed, _ECHOED_BYTES), (ranked, _RANKED_BYTES))
    n_bytes = n_prompt * sum((1 + n) * size for n, size in each if n is not None)
    if n_bytes > MAX_RUN_MESSAGE_BYTES:
        said = f"the logprobs of {n_prompt} tokens take about {n_bytes} bytes, and at most {MAX_RUN_MESSAGE_BYTES}"
        raise BadParameter(param, f"{said} can be had: ask for fewer of each token, or send less text")


def _stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop")
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise BadRequest(f"stop must be a string or up to {MAX_STOPS} non-empty strings")
    return stops

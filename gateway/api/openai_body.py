"""Checks the bodies of /v1/chat/completions and /v1/completions.

Types and ranges are checked here, so that the container gets only bodies that it can run.  The container makes the
checks that need the model (lengths, token ids, grammars).  No parameter is passed over in silence: one that Thaw does
not know, or that has no effect here, is refused by its name, unless no value of it changes an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from gateway.api.bad_field import BadField
from gateway.api.openai_grammar import GRAMMARS, check_grammars
from gateway.api.openai_messages import check_messages
from gateway.api.openai_tools import check_tools
from gateway.serving.answers.several import MOST_CHOICES, MOST_PARTS, prompts_of
from thaw.ids import ActivationId

Check = Callable[[Any], bool]


def _number(low: float, high: float) -> Check:
    return lambda v: type(v) in (int, float) and low <= v <= high


def _whole(low: int, high: int) -> Check:
    return lambda v: type(v) is int and low <= v <= high


def _flag(v: Any) -> bool:
    return isinstance(v, bool)


def _object(v: Any) -> bool:
    return isinstance(v, dict)


def _text(v: Any) -> bool:
    return isinstance(v, str)


def _stops(v: Any) -> bool:
    stops = [v] if isinstance(v, str) else v
    return isinstance(stops, list) and len(stops) <= 4 and all(isinstance(s, str) and s for s in stops)


def _token_ids(v: Any) -> bool:
    return isinstance(v, list) and all(type(t) is int for t in v)


_BIG: Final = 2**31 - 1
_CHECKS: Final[Mapping[str, tuple[Check, str]]] = {
    "model": (_text, "the name of a deployed action"),
    "temperature": (_number(0, 2), "a number from 0 to 2"),
    "top_p": (lambda v: _number(0, 1)(v) and v > 0, "a number above 0, at most 1"),
    "top_k": (_whole(-1, _BIG), "a whole number, -1 or 0 for all"),
    "min_p": (_number(0, 1), "a number from 0 to 1"),
    "max_tokens": (_whole(0, _BIG), "a whole number of at least 1"),
    "min_tokens": (_whole(0, _BIG), "a whole number of at least 0"),
    "presence_penalty": (_number(-2, 2), "a number from -2 to 2"),
    "frequency_penalty": (_number(-2, 2), "a number from -2 to 2"),
    "repetition_penalty": (lambda v: _number(0, 100)(v) and v > 0, "a number above 0"),
    "seed": (_whole(-(2**63), 2**63 - 1), "a whole number of 64 bits"),
    "stop": (_stops, "a string or up to 4 non-empty strings"),
    "n": (_whole(1, MOST_CHOICES), f"a whole number from 1 to {MOST_CHOICES}"),
    "return_token_ids": (_flag, "true or false"),
    "prompt_logprobs": (_whole(0, 20), "a whole number from 0 to 20"),
    "stop_token_ids": (_token_ids, "a list of token ids"),
    "stream": (_flag, "true or false"),
    "ignore_eos": (_flag, "true or false"),
    "stream_options": (_object, "an object"),
    "logit_bias": (_object, "an object of token ids and numbers"),
}
_OF_CHAT: Final[Mapping[str, tuple[Check, str]]] = {
    "max_completion_tokens": (_whole(1, _BIG), "a whole number of at least 1"),
    "logprobs": (_flag, "true or false"),
    "top_logprobs": (_whole(0, 20), "a whole number from 0 to 20"),
    "chat_template_kwargs": (_object, "an object"),
    "add_generation_prompt": (_flag, "true or false"),
    "continue_final_message": (_flag, "true or false"),
    "parallel_tool_calls": (_flag, "true or false"),
}
_OF_COMPLETIONS: Final[Mapping[str, tuple[Check, str]]] = {
    "logprobs": (_whole(0, 20), "a whole number from 0 to 20"),
    "echo": (_flag, "true or false"),
    "suffix": (_text, "a string"),
    "best_of": (_whole(1, MOST_CHOICES), f"a whole number from 1 to {MOST_CHOICES}"),
}
_ENDPOINTS: Final = {"chat": {**_CHECKS, **_OF_CHAT}, "completions": {**_CHECKS, **_OF_COMPLETIONS}}
_OWN: Final = {"chat": {"messages", "response_format", "tools", "tool_choice"}, "completions": {"prompt"}}
"""Parameters of one endpoint that have a check of their own."""

NO_EFFECT: Final[Mapping[str, tuple[Check, str]]] = {
    "user": (_text, "a string"),
    "metadata": (_object, "an object"),
    "store": (_flag, "true or false"),
    "service_tier": (_text, "a string"),
    "safety_identifier": (_text, "a string"),
    "prompt_cache_key": (_text, "a string"),
    "prompt_cache_retention": (_text, "a string"),
    "prediction": (_object, "an object"),
}
"""Parameters about the user, about what OpenAI stores, and about the speed: no value of them changes an answer."""
ONLY: Final[Mapping[str, tuple[Any, ...]]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "bad_words": ([],),
    "priority": (0,),
}
"""Parameters that have one value here; null counts as absent."""
_STREAM_OPTIONS: Final = ("include_usage", "include_obfuscation")


def known(endpoint: str) -> set[str]:
    """The parameters that are not refused by their name alone."""
    return _ENDPOINTS[endpoint].keys() | NO_EFFECT.keys() | ONLY.keys() | GRAMMARS | _OWN[endpoint]


def validate(endpoint: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body without the parameters that have no effect: each choice carries the others to its worker.  Raises
    BadField, which names the parameter."""
    checks, every = {**_ENDPOINTS[endpoint], **NO_EFFECT}, known(endpoint)
    for name, allowed in ONLY.items():
        if body.get(name) is not None and not any(_same(body[name], value) for value in allowed):
            raise BadField(name, f"{name}={body[name]!r:.60} is not supported: leave {name} out.")
    for name, (check, wanted) in checks.items():
        if body.get(name) is not None and not check(body[name]):
            raise BadField(name, f"{name} must be {wanted}, not {body[name]!r:.60}.")
    for name, value in body.items():
        if value is not None and name not in every:
            raise BadField(name, f"Unrecognized request argument supplied: {name}.")
    if body.get("max_tokens") == 0 and not body.get("echo"):
        raise BadField("max_tokens", "max_tokens must be a whole number of at least 1, not 0.")
    for name in ("echo", "return_token_ids", "prompt_logprobs"):
        if body.get("stream") and body.get(name) is not None and body[name] is not False:
            raise BadField(name, f"{name} is only known at the end here: leave stream out.")
    _stream_options(body)
    check_grammars(body)
    _chat(body) if endpoint == "chat" else _completions(body)
    return {name: value for name, value in body.items() if name not in NO_EFFECT and name not in ONLY}


def choose_seed(body: Mapping[str, Any], activation_id: ActivationId) -> int:
    """Return the request's seed, or 31 of the activation's random bits.  An answer that goes on elsewhere uses the same
    random numbers, even if nothing but the activation's id is left of it."""
    seed = body.get("seed")
    return int(activation_id[:8], 16) >> 1 if seed is None else int(seed)


def _same(value: Any, allowed: Any) -> bool:
    """As JSON has it: 1 is not true, and 1.0 is 1."""
    return isinstance(value, bool) is isinstance(allowed, bool) and bool(value == allowed)


def _stream_options(body: Mapping[str, Any]) -> None:
    options = body.get("stream_options")
    if options is None:
        return
    if not body.get("stream"):
        raise BadField("stream_options", "stream_options is only allowed when stream is true.")
    for name, value in options.items():
        path = f"stream_options.{name}"
        if name not in _STREAM_OPTIONS:
            raise BadField(path, f"Unrecognized request argument supplied: {path}.")
        if value is not None and not _flag(value):
            raise BadField(path, f"{path} must be true or false, not {value!r:.60}.")


def _chat(body: Mapping[str, Any]) -> None:
    check_messages(body.get("messages"))
    check_tools(body)
    newer, older = body.get("max_completion_tokens"), body.get("max_tokens")
    if newer is not None and older is not None and newer != older:
        raise BadField("max_tokens", "max_tokens is the older name of max_completion_tokens: leave one of them out.")
    if body.get("continue_final_message") and body.get("add_generation_prompt"):
        raise BadField("continue_final_message", "continue_final_message goes on with a message: add no new one.")
    if body.get("top_logprobs") is not None and not body.get("logprobs"):
        raise BadField("top_logprobs", "top_logprobs must be a whole number from 0 to 20, with logprobs true.")


def _completions(body: Mapping[str, Any]) -> None:
    prompts = prompts_of(body)
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, str) and not (prompt and _token_ids(prompt)):
            path = "prompt" if len(prompts) == 1 else f"prompt[{i}]"
            raise BadField(path, f"{path} must be a string or a list of token ids.")
    n_each = max(body.get("n") or 1, body.get("best_of") or 1)
    if len(prompts) * n_each > MOST_PARTS:
        raise BadField("prompt", f"{len(prompts)} prompts with {n_each} answers each; at most {MOST_PARTS} in all.")
    if body.get("suffix") and body.get("echo"):
        raise BadField("suffix", "suffix has no place in an answer that begins with its prompt: leave echo out.")
    if body.get("best_of") is not None and body["best_of"] < (body.get("n") or 1):
        raise BadField("best_of", f"best_of must be at least n, not {body['best_of']}.")
    if body.get("stream") and n_each > (body.get("n") or 1):
        raise BadField("best_of", "best_of is only known at the end: leave stream out.")


_OF_TEXT: Final = {
    "tokenize": {
        "prompt": (_text, "a string"),
        "add_special_tokens": (_flag, "true or false"),
        "add_generation_prompt": (_flag, "true or false"),
        "return_token_strs": (_flag, "true or false"),
        "chat_template_kwargs": (_object, "an object"),
    },
    "detokenize": {"tokens": (_token_ids, "a list of token ids")},
}


_OF_MESSAGES: Final = ("tools", "add_generation_prompt", "chat_template_kwargs")


def check_text(endpoint: str, body: Mapping[str, Any]) -> None:
    """Check a body of /tokenize or /detokenize.  Raises BadField."""
    checks: Mapping[str, tuple[Check, str]] = {"model": _CHECKS["model"], **_OF_TEXT[endpoint]}
    for name, value in body.items():
        if value is not None and name not in checks and not (endpoint == "tokenize" and name in ("messages", "tools")):
            raise BadField(name, f"Unrecognized request argument supplied: {name}.")
    for name, (check, wanted) in checks.items():
        if body.get(name) is not None and not check(body[name]):
            raise BadField(name, f"{name} must be {wanted}, not {body[name]!r:.60}.")
    if body.get("model") is None:
        raise BadField("model", "model must be the name of a deployed action.")
    if endpoint == "detokenize":
        if body.get("tokens") is None:
            raise BadField("tokens", "tokens must be a list of token ids.")
    elif body.get("messages") is not None:
        if body.get("prompt") is not None:
            raise BadField("prompt", "prompt and messages are two texts: leave one out.")
        check_messages(body["messages"])
        check_tools(body)
    elif body.get("prompt") is None:
        raise BadField("prompt", "prompt must be a string.")
    elif idle := [n for n in _OF_MESSAGES if body.get(n) is not None]:
        raise BadField(idle[0], f"{idle[0]} has an effect on messages alone: leave {idle[0]} out, or send messages.")

"""Structured output: the grammar that an answer must follow, as vLLM's scheduler asks for it.

::

    submit ──▶ thread "grammar": compile, then accept the tokens so far ──▶ inbox ──▶ scheduler ──mask──▶ sampler

vLLM compiles in its own front end, with its own tokenizer.  This engine has neither: it compiles a grammar here, beside
the steps of other requests, from the checkpoint's tokenizer.json.  The scheduler gets only requests whose grammar is
ready.  An answer that goes on here was begun under the same grammar: its tokens so far are accepted first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import xgrammar
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar, has_xgrammar_unsupported_json_features
from vllm.v1.structured_output.utils import choice_as_grammar, compile_regex_with_timeout, grammar_is_likely_lark

from thaw.errors import BadParameter, ErrorInfo, ThawError, WorkerLost
from thaw.logs import print_traceback
from thaw_runtime.engine.protocol import EngineRequest, Grammar, GrammarKind

_CACHE_BYTES: Final = 64 << 20
_MAX_WHITESPACE: Final = 16
"""Characters of white space between two tokens of JSON.  A small model that may write any number writes them to the end
of its answer."""

_PLACE: Final = re.compile(r"\[[\d:]+\] \S+\.cc:\d+: ")
"""Where in xgrammar's source an error was found, in front of its sentence."""

MARKER: Final = StructuredOutputsParams(json_object=True)
"""Tells vLLM's scheduler that a request has a grammar.  The grammar itself is compiled here."""


@dataclass(frozen=True, slots=True)
class Constrained:
    """A request whose grammar is ready, and stands behind the tokens that the request has already."""

    request: EngineRequest
    grammar: XgrammarGrammar


class _ModelTokenizer(PreTrainedTokenizerFast):
    """Without special tokens, none of which is text: as part of a string they would vanish from the answer."""

    def get_vocab(self) -> dict[str, int]:
        special = {t.content for t in self.backend_tokenizer.get_added_tokens_decoder().values() if t.special}
        return {token: i for token, i in super().get_vocab().items() if token not in special}


class Grammars:
    """The compiler of one engine.  It costs nothing before the first request with a grammar."""

    def __init__(self, tokenizer_json: bytes | None, vocab_size: int, n_threads: int) -> None:
        self._tokenizer_json, self._vocab_size, self._n_threads = tokenizer_json, vocab_size, max(1, n_threads)
        self._compiler: Any = None
        self._thread: ThreadPoolExecutor | None = None

    def prepare(self, request: EngineRequest, ready: Callable[[Constrained | ErrorInfo], None]) -> None:
        """Compile the request's grammar on the compiler's thread, which calls ``ready`` once.  Does not block."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "grammar")
        self._thread.submit(self._prepare, request, ready)

    def _prepare(self, request: EngineRequest, ready: Callable[[Constrained | ErrorInfo], None]) -> None:
        try:
            ready(Constrained(request, self.compiled(request)))
        except ThawError as e:
            ready(e.info())
        except Exception as e:  # noqa: BLE001  an error of the compiler fails this request alone
            print_traceback()
            ready(WorkerLost(f"the grammar cannot be compiled: {type(e).__name__}: {e}").info())

    def compiled(self, request: EngineRequest) -> XgrammarGrammar:
        """The request's grammar behind its tokens so far.  Raises BadParameter."""
        grammar, stops = request.sampling.grammar, request.sampling.stop_token_ids
        assert grammar is not None  # noqa: S101  the caller asks for a request that has one
        if not stops:
            raise BadParameter(grammar.param, "nothing could end the answer: there is no end-of-sequence token")
        rules = self._rules(grammar)
        matcher = xgrammar.GrammarMatcher(rules, override_stop_tokens=list(stops))
        made = XgrammarGrammar(matcher=matcher, vocab_size=self._vocab_size, ctx=rules)
        if not made.accept_tokens(request.request_id, list(request.output_so_far)):
            raise BadParameter(grammar.param, "the answer so far does not follow it")
        return made

    def _rules(self, grammar: Grammar) -> Any:
        compiler = self._compiler = self._compiler or self._new_compiler(grammar.param)
        try:
            return _compile(compiler, grammar)
        except (RuntimeError, ValueError, TypeError) as e:  # what xgrammar raises for rules that it cannot read
            problem = _PLACE.sub("", str(e)).strip()
            raise BadParameter(grammar.param, f"this is not a grammar that can be followed: {problem}") from e

    def _new_compiler(self, param: str) -> Any:
        if self._tokenizer_json is None:
            raise BadParameter(param, "the checkpoint has no tokenizer.json, which structured output needs")
        tokenizer = _ModelTokenizer(tokenizer_object=Tokenizer.from_str(self._tokenizer_json.decode()))
        special = sorted(i for i, t in tokenizer.backend_tokenizer.get_added_tokens_decoder().items() if t.special)
        # any one that is no text: each request names the tokens that end it
        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=self._vocab_size, stop_token_ids=special[:1] or None
        )
        return xgrammar.GrammarCompiler(info, max_threads=self._n_threads, cache_limit_bytes=_CACHE_BYTES)


def _compile(compiler: Any, grammar: Grammar) -> Any:
    """Raises BadParameter, and xgrammar's errors."""
    kind, text = grammar.kind, grammar.text
    if kind is GrammarKind.JSON:
        _check_schema(grammar)
        return compiler.compile_json_schema(text, max_whitespace_cnt=_MAX_WHITESPACE)
    if kind is GrammarKind.REGEX:
        return compile_regex_with_timeout(compiler.compile_regex, text)
    if kind is GrammarKind.CHOICE:
        return compiler.compile_grammar(choice_as_grammar(json.loads(text)))
    if kind is GrammarKind.STRUCTURAL_TAG:
        return compiler.compile_structural_tag(text)
    return compiler.compile_lark(text) if grammar_is_likely_lark(text) else compiler.compile_grammar(text)


def _check_schema(grammar: Grammar) -> None:
    """xgrammar passes over the keywords that it does not know, and the answer would not follow them."""
    schema = json.loads(grammar.text)
    if isinstance(schema, dict) and has_xgrammar_unsupported_json_features(schema):
        raise BadParameter(
            grammar.param,
            "the schema uses a keyword that answers cannot be held to, such as multipleOf, uniqueItems, contains, an "
            "unknown format, or patternProperties beside properties",
            hint="leave it out of the schema and check it in the answer",
        )


def set_grammar(core: Any, request: Any, grammar: XgrammarGrammar) -> None:
    """Give a vLLM request its grammar, and the manager memory for the masks of a batch, which its back end would."""
    request.structured_output_request.grammar = grammar
    manager, config = core.structured_output_manager, core.vllm_config
    if manager._grammar_bitmask is None:
        n_rows, n_tokens = config.scheduler_config.max_num_seqs, config.model_config.get_vocab_size()
        manager._grammar_bitmask = xgrammar.allocate_token_bitmask(n_rows, n_tokens)

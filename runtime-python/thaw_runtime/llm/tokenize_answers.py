"""Answers that need the model's tokenizer and not its engine: text as tokens, and tokens as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from relay.protocol.messages import LlmRun, RunFinished, RunPrompt
from thaw.errors import BadParameter
from thaw.tracing.trace import Phase
from thaw_runtime.llm.model_text import ModelText
from thaw_runtime.llm.openai_request import check_ids
from thaw_runtime.llm.runs import RunMessage
from thaw_runtime.llm.tools import tool_use
from thaw_runtime.process.start_trace import StartTrace


class TextAnswer:
    """Has the interface of a RunStream."""

    def __init__(self, text: ModelText, run: LlmRun, trace: StartTrace) -> None:
        """Raises BadRequest."""
        self._trace = trace
        if run.endpoint == "tokenize":
            token_ids = _tokens(run.body, text)
            texts = tuple(map(text.token_text, token_ids)) if run.body.get("return_token_strs") else ()
            self._prompt = RunPrompt(token_ids, "", texts)
        else:
            token_ids = tuple(run.body["tokens"])
            check_ids(token_ids, text, "tokens")
            self._prompt = RunPrompt(token_ids, text.decode(token_ids))

    def messages(self, deadline: float | None) -> Iterator[list[RunMessage]]:
        self._trace.mark(Phase.RUN_END)
        yield [RunFinished("stop", len(self._prompt.token_ids), 0, "", self._trace.events, prompt=self._prompt)]

    def hang_up(self) -> None:
        """There is nothing to end."""


def _tokens(body: Mapping[str, Any], text: ModelText) -> tuple[int, ...]:
    if body.get("messages") is None:
        return text.encode(body["prompt"], add_special_tokens=body.get("add_special_tokens") is not False)
    if body.get("add_special_tokens"):
        raise BadParameter("add_special_tokens", "the chat template writes the special tokens of messages")
    variables = dict(body.get("chat_template_kwargs") or {})
    if body.get("add_generation_prompt") is not None:
        variables["add_generation_prompt"] = body["add_generation_prompt"]
    return text.encode_chat(body["messages"], variables, tool_use(body, text.tool_format).offered)

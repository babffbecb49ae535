"""Reads the text side of checkpoints as vLLM does: cases come as JSON on stdin, and each answer is a line on stdout.

A case has its kind and the content of the checkpoint's small files."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.thaw_runtime.conftest import run_probe
from tests.thaw_runtime.sidecar_segment import as_bytes
from tests.thaw_runtime.tokenizer_cases import N_MODEL, TEXTS
from thaw import wire


def answers(cases: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to each case, of a program that is this module."""
    done = run_probe("text_probe", stdin=json.dumps(cases))
    lines = [line.removeprefix("ANSWER ") for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert len(lines) == len(cases), done.stderr[-3000:]
    return dict(json.loads(line) for line in lines)


def model_config(directory: Path) -> Any:
    """What vLLM asks of a model's configuration for its text side."""
    from vllm.transformers_utils.config import try_get_generation_config

    generation = try_get_generation_config(str(directory), trust_remote_code=False)
    return SimpleNamespace(
        model=str(directory),
        tokenizer=str(directory),
        revision=None,
        tokenizer_revision=None,
        code_revision=None,
        trust_remote_code=False,
        hf_config=SimpleNamespace(model_type="llama"),
        multimodal_config=None,
        enable_prompt_embeds=False,
        get_vocab_size=lambda: N_MODEL,
        try_get_generation_config=lambda: {} if generation is None else generation.to_diff_dict(),
    )


def chat(directory: Path, case: Mapping[str, Any]) -> dict[str, Any]:
    """A request as vLLM's server goes through it, up to the engine."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.renderers.chat_utils import parse_chat_messages
    from vllm.renderers.hf import resolve_chat_template_content_format, safe_apply_chat_template
    from vllm.tokenizers import get_tokenizer

    tokenizer, model = get_tokenizer(str(directory)), model_config(directory)
    goes_on = case.get("continue_final_message", False)
    request = ChatCompletionRequest(
        messages=case["messages"],
        tools=case.get("tools"),
        documents=case.get("documents"),
        chat_template_kwargs=case.get("variables"),
        continue_final_message=goes_on,
        add_generation_prompt=not goes_on and case.get("variables", {}).get("add_generation_prompt", True),
    )
    tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
    params = request.build_chat_params(None, "auto")
    form = resolve_chat_template_content_format(None, tools, "auto", tokenizer, model_config=model)
    said, _, _ = parse_chat_messages(request.messages, model, form)
    variables = params.chat_template_kwargs
    text = safe_apply_chat_template(model, tokenizer, said, tools=tools, tokenize=False, **variables)
    return {"text": text, "ids": tokenizer.encode(text, add_special_tokens=False)}


def tokenizer(directory: Path, case: Mapping[str, Any]) -> dict[str, Any]:
    """A decoded text is not cleaned up: vLLM's detokenizer does not do it either."""
    from vllm.tokenizers import get_tokenizer

    made = get_tokenizer(str(directory))
    ids = [made.encode(text, add_special_tokens=False) for text in TEXTS]
    ends = model_config(directory).try_get_generation_config().get("eos_token_id")
    found = {made.eos_token_id, *([ends] if isinstance(ends, int) else ends or [])}
    return {
        "plain": ids,
        "whole": [made.encode(text) for text in TEXTS],
        "shown": [made.decode(some, skip_special_tokens=True, clean_up_tokenization_spaces=False) for some in ids],
        "texts": [made.decode([i], clean_up_tokenization_spaces=False) for i in range(len(made))],
        "special": made.special_tokens_map,
        "ends": sorted(found - {None}),
    }


def reading(directory: Path, case: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the check of a model reads."""
    from thaw_runtime.engine.vllm import text_side

    read = text_side.reading(directory, SimpleNamespace(model_config=model_config(directory)))
    return None if read is None else wire.to_plain(read)


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    kinds: dict[str, Callable[[Path, Mapping[str, Any]], Any]]
    kinds = {"chat": chat, "tokenizer": tokenizer, "reading": reading}
    for name, case in json.loads(sys.stdin.read()).items():
        with tempfile.TemporaryDirectory() as directory:
            for file, content in case["files"].items():
                path = Path(directory) / file
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(as_bytes(content))
            try:
                answer = kinds[case["kind"]](Path(directory), case)
            except Exception as e:  # noqa: BLE001  the answer of this case
                answer = {"error": f"{type(e).__name__}: {e}"}
        print("ANSWER", json.dumps([name, answer]))


if __name__ == "__main__":
    main()

"""How vLLM's server would read the text side of a model, for a check to compare with Thaw's reading in the proxy.

This engine has no tokenizer, and the proxy reads the files with code of its own, because transformers is too heavy for
it.  tests/thaw_runtime/test_text_conformance.py holds that code to vLLM for the kinds of files that are known; this
module does so for the very model that is deployed, so that a difference is said and not silent.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from vllm.renderers.hf import resolve_chat_template_content_format, safe_apply_chat_template
from vllm.tokenizers import get_tokenizer

from thaw_runtime.engine.text_reading import CHAT, SAMPLES, TextReading

_MOST_BYTES: Final = 32 << 20
"""The largest tokenizer.json that is read.  transformers takes twelve times its size, and a check has 512 MiB
(thaw_runtime/engine/main.py); a tokenizer of 260 000 words has 29 MB and takes 2.6 s, one of 128 000 words 1 s."""


def reading(directory: Path, config: Any) -> TextReading | None:
    """None when transformers cannot read the tokenizer.  A start does not need it to, so this is no problem of the
    model's."""
    try:
        if (directory / "tokenizer.json").stat().st_size > _MOST_BYTES:
            return None
        tokenizer = get_tokenizer(str(directory), trust_remote_code=False)
        samples = tuple(tuple(tokenizer.encode(text)) for text in SAMPLES)
        prompt = _prompt(tokenizer, config.model_config)
        prompt_ids = tuple(tokenizer.encode(prompt, add_special_tokens=False))
        return TextReading(samples, _ends(tokenizer, config.model_config), prompt, prompt_ids)
    except Exception:  # noqa: BLE001  the edge to transformers
        return None


def _ends(tokenizer: Any, model_config: Any) -> tuple[int, ...]:
    """The tokens that end an answer of vLLM's server (``update_from_generation_config``)."""
    ends = model_config.try_get_generation_config().get("eos_token_id")
    found = {tokenizer.eos_token_id, *([ends] if isinstance(ends, int) else ends or ())}
    return tuple(sorted(t for t in found if t is not None and 0 <= t < model_config.get_vocab_size()))


def _prompt(tokenizer: Any, model_config: Any) -> str:
    try:
        # named, so that vLLM does not look for a processor's template: it would load the tokenizer once more
        template = tokenizer.get_chat_template()
        form = resolve_chat_template_content_format(template, None, "auto", tokenizer, model_config=model_config)
        in_parts = form == "openai"
        said = [{**m, "content": [{"type": "text", "text": m["content"]}] if in_parts else m["content"]} for m in CHAT]
        options = {"chat_template": template, "tokenize": False, "add_generation_prompt": True}
        return str(safe_apply_chat_template(model_config, tokenizer, said, **options))
    except Exception:  # noqa: BLE001  no template, or one that refuses these messages
        return ""

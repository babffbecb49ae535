"""Convert a checkpoint with transformers: ``python -m thaw_runtime.convert KIND SOURCE TARGET``.

KIND ``gguf``: SOURCE is a GGUF file, whose weights become safetensors and whose tokenizer becomes tokenizer.json.
KIND ``tokenizer``: SOURCE is a directory with a slow tokenizer, of which tokenizer.json is made.

The process takes gigabytes, and its libraries take seconds to import: neither is for the command line's own process.
The last line of its output is a JSON object: ``{}``, or ``{"error": text}`` with the exit status 1.  No code of a
checkpoint is run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

_EXACT: Final = {0: "float32", 1: "float16"}
"""GGUF's file types whose numbers are kept as they are.  Quantised ones become bfloat16."""


def gguf(source: Path, target: Path) -> None:
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    field = GGUFReader(source).get_field("general.file_type")
    dtype = getattr(torch, _EXACT.get(int(field.contents()) if field is not None else -1, "bfloat16"))
    named: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    plain = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(source.parent, dtype=dtype, quantization_config=plain, **named)
    model.save_pretrained(target)
    if not (target / "tokenizer.json").exists():
        AutoTokenizer.from_pretrained(source.parent, **named).save_pretrained(target)


def tokenizer(source: Path, target: Path) -> None:
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(source, use_fast=True, local_files_only=True)
    fast = getattr(found, "backend_tokenizer", None)
    if fast is None:
        raise ValueError(f"transformers has no fast form of {type(found).__name__}")
    fast.save(str(target / "tokenizer.json"))


def main(kind: str, source: str, target: str) -> int:
    try:
        {"gguf": gguf, "tokenizer": tokenizer}[kind](Path(source), Path(target))
    except ImportError as e:
        print(json.dumps({"missing": str(e)}))
        return 1
    except Exception as e:  # noqa: BLE001  the edge to transformers, which raises anything
        print(json.dumps({"error": f"{type(e).__name__}: {e}"}))
        return 1
    print("{}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

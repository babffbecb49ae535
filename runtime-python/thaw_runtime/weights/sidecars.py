"""The checkpoint's small files (config.json, tokenizer.json …), which lie at the start of a segment.

They are ordinary ranges, so the text side can begin as soon as they are below the watermark.  vLLM's ModelConfig reads
a directory, so the files are written to a directory inside the container's own one, which disappears with the container
however the container ends.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from relay.protocol.messages import PlacedRange
from thaw.checkpoints.text_half import text_half, text_tensors
from thaw.errors import ModelCorrupt, ModelUnsupported
from thaw.model import TensorInfo
from thaw_runtime.weights.readable_segment import ARRIVAL_DEADLINE_S, Segment

_CONFIG: Final = "config.json"
WEIGHT_SUFFIXES = (".safetensors",)
CALL_MARKS: Final = ("<tool_call>", "</tool_call>")
"""Text around a call, which some checkpoints have as special tokens: a special token is no part of an answer, and no
grammar could ask for it."""
_CALL_MARK: Final = re.compile(rb'("content"\s*:\s*"</?tool_call>"[^{}]{0,400}?"special"\s*:\s*)true')
MAX_SIDECAR_BYTES = 256 * 1024 * 1024  # tokenizers of 256k words have about 30 MB; a larger file is no sidecar


def sidecar_ranges(segment: Segment) -> tuple[PlacedRange, ...]:
    """The segment's ranges that are sidecar files.  Ranges of a weight file are not sidecars."""
    return tuple(
        r
        for r in segment.offer.layout
        if r.offset == 0 and not r.file.endswith(WEIGHT_SUFFIXES) and r.n_bytes <= MAX_SIDECAR_BYTES
    )


def read_sidecar(segment: Segment, name: str) -> bytes | None:
    """Wait for the bytes of file ``name`` and return them.  None when the checkpoint has no such file."""
    for placed in sidecar_ranges(segment):
        if placed.file == name:
            segment.wait(placed.segment_offset + placed.n_bytes, ARRIVAL_DEADLINE_S)
            return bytes(segment.view(placed.segment_offset, placed.n_bytes))
    return None


def read_tokenizer(segment: Segment) -> bytes | None:
    """tokenizer.json, in which the marks of a call are text.  weights/tokenizer_files.py makes the tokenizer of it."""
    data = read_sidecar(segment, "tokenizer.json")
    if data is None:
        return None
    end = data.find(b'"model"')  # behind the added tokens; the vocabulary that follows has megabytes
    if data.find(b"tool_call>", 0, end) < 0:
        return data
    return _CALL_MARK.sub(rb"\1false", data[:end]) + data[end:]


def read_json(segment: Segment, name: str) -> dict[str, Any] | None:
    """Read a sidecar that must be a JSON object if it exists.  Raises ModelCorrupt."""
    data = read_sidecar(segment, name)
    if data is None:
        return None
    try:
        value = json.loads(data)
    except ValueError as e:
        raise ModelCorrupt(f"{name} is not JSON: {e}") from e
    if not isinstance(value, dict):
        raise ModelCorrupt(f"{name} holds no JSON object")
    return value


def model_config(segment: Segment) -> dict[str, Any]:
    """config.json, or that of the language model inside a model that also reads pictures or sound.  Raises
    ModelUnsupported when there is none."""
    config = _whole_config(segment)
    return text_half(config) or config


def model_tensors(segment: Segment) -> tuple[TensorInfo, ...]:
    """The tensors of the model that ``model_config`` describes, in load order, under that model's own names."""
    return text_tensors(_whole_config(segment), segment.offer.tensors) if segment.offer.tensors else ()


def reads_more_than_text(segment: Segment) -> bool:
    return text_half(_whole_config(segment)) is not None


def _whole_config(segment: Segment) -> dict[str, Any]:
    config = read_json(segment, _CONFIG)
    if config is None:
        raise ModelUnsupported(f"the checkpoint has no {_CONFIG}", hint="push the model's whole directory")
    return config


@contextmanager
def materialised(segment: Segment) -> Iterator[Path]:
    """Write the sidecars to a private directory, which is removed when the block ends or with the container."""
    directory = Path(tempfile.mkdtemp(prefix="model-"))  # see use_own_tmp in thaw_runtime/engine/main.py
    try:
        for placed in sidecar_ranges(segment):
            target = directory / placed.file
            if not target.resolve().is_relative_to(directory.resolve()):
                raise ModelCorrupt(f"the checkpoint has a file outside itself: {placed.file!r}")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(_content(segment, placed.file))
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _content(segment: Segment, name: str) -> bytes:
    if name == _CONFIG and reads_more_than_text(segment):
        return json.dumps(model_config(segment)).encode()
    return read_sidecar(segment, name) or b""

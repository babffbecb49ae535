"""The answer of an embedding model, as it is kept and as OpenAI's API shows it."""

from __future__ import annotations

import base64
import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from thaw.errors import DeveloperError


@dataclass(frozen=True, slots=True)
class Vectors:
    """An answer: the vectors in the order of the texts, as base64 of float32, little-endian."""

    data: tuple[str, ...]
    n_tokens: int

    def result(self, model: str, encoding: str, max_bytes: int) -> tuple[object, int]:
        """OpenAI's object for a record, and its length as JSON.  Raises DeveloperError for a longer one."""
        pieces, n_bytes = [], 0
        for piece in self.texts(model, encoding):
            pieces.append(piece)
            n_bytes += len(piece)
            if n_bytes > max_bytes:
                raise too_long(max_bytes, hint="send fewer texts at once, or use /v1/embeddings")
        return json.loads("".join(pieces)), n_bytes

    def texts(self, model: str, encoding: str) -> Iterator[str]:
        """OpenAI's object in pieces, because it may be long."""
        usage = {"prompt_tokens": self.n_tokens, "total_tokens": self.n_tokens}
        yield '{"object":"list","data":['
        for i, data in enumerate(self.data):
            shown = f'"{data}"' if encoding == "base64" else json.dumps(_numbers(data), separators=(",", ":"))
            yield f'{"," if i else ""}{{"object":"embedding","index":{i},"embedding":{shown}}}'
        yield f'],"model":{json.dumps(model)},"usage":{json.dumps(usage, separators=(",", ":"))}}}'


def too_long(max_bytes: int, *, hint: str = "send fewer texts at once") -> DeveloperError:
    return DeveloperError(
        f"The action produced a response that exceeded the allowed length: its vectors take more than {max_bytes} "
        "bytes.",
        hint=hint,
    )


def _numbers(data: str) -> list[float]:
    return array("f", base64.b64decode(data)).tolist()

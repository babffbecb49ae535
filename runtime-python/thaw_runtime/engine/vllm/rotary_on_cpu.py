"""Rotary embeddings on a CPU for models that pass queries and keys by head, (tokens, heads, head_dim), as LFM2 does.

vLLM's kernel for CPUs takes the last dimension of a three-dimensional query for the row of a token, and rotates heads
by the positions of other tokens.  It computes the right result for (tokens, heads · head_dim), so it gets that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

BY_HEAD = 3  # dimensions


def install(embedding: type[Any]) -> None:
    """Let ``embedding``, vLLM's RotaryEmbedding, join the heads before it calls its kernel.  A second call does
    nothing."""
    if not hasattr(embedding.forward_cpu, "__wrapped__"):
        embedding.forward_cpu = _joining_heads(embedding.forward_cpu)


def _joining_heads(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def joining(
        self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if query.dim() != BY_HEAD or positions.dim() != 1:
            made: tuple[torch.Tensor, torch.Tensor | None] = forward(self, positions, query, key)
            return made
        rotated, keys = forward(self, positions, query.flatten(1), key if key is None else key.flatten(1))
        return rotated.view(query.shape), keys if key is None or keys is None else keys.view(key.shape)

    return joining

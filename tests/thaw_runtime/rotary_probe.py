"""Prints how far vLLM's rotary embedding on a CPU is from the one in plain torch, for each form of its arguments."""

from __future__ import annotations

import json
from typing import Any

from thaw_runtime.engine.vllm import env

HEADS, HEAD, TOKENS = 4, 32, 7


def main() -> None:
    env.prepare()
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    from thaw_runtime.engine.vllm import rotary_on_cpu

    rotary_on_cpu.install(RotaryEmbedding)
    rotary_on_cpu.install(RotaryEmbedding)
    with set_current_vllm_config(VllmConfig()):
        rope: Any = get_rope(
            HEAD,
            max_position=512,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            is_neox_style=True,
            dtype=torch.float32,
        )
    torch.manual_seed(0)
    positions = torch.arange(TOKENS) + 3
    query, key = torch.randn(TOKENS, HEADS * HEAD), torch.randn(TOKENS, HEAD)
    right_query, right_key = rope.forward_native(positions, query.clone(), key.clone())

    def distance(asked: torch.Tensor, of_key: torch.Tensor | None, where: torch.Tensor = positions) -> float:
        made, made_key = rope.forward_cpu(where, asked.clone(), None if of_key is None else of_key.clone())
        pairs = [(made, right_query)] + ([(made_key, right_key)] if of_key is not None else [])
        return max(float((of.reshape(right.shape) - right).abs().max()) for of, right in pairs)

    by_head, key_by_head = query.view(TOKENS, HEADS, HEAD), key.view(TOKENS, 1, HEAD)
    found = {
        "by token": distance(query, key),
        "by head": distance(by_head, key_by_head),
        "by head, without keys": distance(by_head, None),
        "in two dimensions of positions": distance(query[None], key[None], positions[None]),
    }
    print("ROTATED " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

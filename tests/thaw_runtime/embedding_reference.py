"""Plain vLLM's vectors, in a process of its own: the models' directories come as arguments, and texts and the number of
dimensions (0: all) as JSON on stdin.  Prints one JSON list of vectors for each model."""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CONFIGURE_LOGGING": "0",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    import torch
    from vllm import LLM, PoolingParams

    torch.set_num_threads(1)
    texts, dimensions = json.load(sys.stdin)
    for model in sys.argv[1:]:
        if child := os.fork():  # a process has one engine
            os.waitpid(child, 0)
            continue
        llm = LLM(
            model=model,
            dtype="float32",
            enforce_eager=True,
            kv_cache_memory_bytes=64 << 20,
            gpu_memory_utilization=0.05,  # only this much of a GPU must be free: others may use it too
            distributed_executor_backend="uni",
        )
        asked = PoolingParams(dimensions=dimensions or None) if "qwen3" in model else PoolingParams()
        answers = [a.outputs.embedding for a in llm.embed(texts, pooling_params=asked, use_tqdm=False)]
        print("REFERENCE " + json.dumps([os.path.basename(model), answers]), flush=True)
        os._exit(0)


if __name__ == "__main__":
    main()

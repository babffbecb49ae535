"""Plain vLLM in a process of its own, as the reference.  Prints one JSON list of token lists.

``python vanilla.py MODEL DTYPE N_TOKENS`` reads the prompts' token ids as JSON from stdin.  Each prompt is a batch of
its own.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    model, dtype, n_tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
    prompts = json.load(sys.stdin)
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CONFIGURE_LOGGING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    import torch
    from vllm import LLM, SamplingParams

    torch.set_num_threads(1)
    llm = LLM(
        model=model,
        dtype=dtype,
        max_model_len=512,
        enforce_eager=True,
        kv_cache_memory_bytes=256 << 20,
        gpu_memory_utilization=0.05,  # only this much of a GPU must be free: others may use it too
        max_num_seqs=8,
        max_num_batched_tokens=2048,
        skip_tokenizer_init=True,
        distributed_executor_backend="uni",
    )
    sampling = SamplingParams(temperature=0, max_tokens=n_tokens, ignore_eos=True, detokenize=False)
    answers = [llm.generate([{"prompt_token_ids": p}], sampling, use_tqdm=False)[0] for p in prompts]
    print("REFERENCE " + json.dumps([list(a.outputs[0].token_ids) for a in answers]), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()

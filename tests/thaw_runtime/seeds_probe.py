"""Prints the seeds with which vLLM draws, as a JSON list, for the requests' seeds that are its arguments."""

from __future__ import annotations

import json
import sys

from thaw_runtime.engine.protocol import EngineRequest, Sampling
from thaw_runtime.engine.vllm.translation import sampling_params

if __name__ == "__main__":
    requests = [EngineRequest("r", (1,), Sampling(8), int(seed)) for seed in sys.argv[1:]]
    print(json.dumps([sampling_params(request).seed for request in requests]))

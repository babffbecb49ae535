"""Published results, which a faithful simulator should approach.  None of these numbers enters a simulation.

A = HydraServe's artifact (the revised system), P = the ParaServe paper, H = its slides.
"""

from __future__ import annotations

from typing import Final

COLD_START_MODELS: Final[dict[str, tuple[str, ...]]] = {
    "V100": ("opt-2.7b", "opt-6.7b", "opt-13b", "llama2-7b", "llama2-13b", "llama3-8b", "falcon-7b"),
    "A10": ("opt-2.7b", "opt-6.7b", "llama2-7b", "llama3-8b", "falcon-7b"),
}
COLD_START_S: Final[dict[str, dict[str, tuple[float, ...]]]] = {  # A, short prompt
    "V100": {
        "vllm": (16.8, 23.6, 40.3, 23.2, 38.6, 29.2, 25.4),
        "serverlessllm": (13.1, 17.1, 26.1, 19.1, 26.2, 21.2, 19.1),
        "serverlessllm-cache": (11.1, 11.8, 14.8, 12.1, 15.1, 13.1, 12.1),
        "paraserve-single": (7.9, 9.7, 17.0, 9.9, 17.4, 11.7, 10.2),
        "paraserve": (7.9, 8.2, 8.5, 7.7, 8.7, 8.6, 8.3),
    },
    "A10": {
        "vllm": (10.1, 17.0, 16.6, 19.3, 16.2),
        "serverlessllm": (10.0, 14.1, 14.1, 17.1, 14.1),
        "serverlessllm-cache": (7.1, 7.7, 8.1, 9.1, 8.1),
        "paraserve-single": (4.7, 8.3, 8.4, 10.3, 9.0),
        "paraserve": (4.7, 5.9, 5.6, 6.3, 6.2),
    },
}
RPS: Final = (0.6, 0.7, 0.8)
ATTAINMENT: Final = {  # A, percent, at these rates; the published ServerlessLLM caches in host memory
    8: {
        "vllm": (53.5, 53.3, 48.5),
        "serverlessllm-cache": (60.3, 57.7, 54.0),
        "paraserve": (82.5, 76.3, 75.2),
        "paraserve-cache": (88.2, 85.0, 78.5),
    },
    4: {
        "vllm": (49.9, 48.6, 44.7),
        "serverlessllm-cache": (61.5, 57.7, 47.7),
        "paraserve": (84.2, 78.2, 71.8),
        "paraserve-cache": (88.2, 83.8, 79.3),
    },
    2: {
        "vllm": (46.7, 45.7, 43.9),
        "serverlessllm-cache": (57.5, 49.8, 45.3),
        "paraserve": (81.1, 77.2, 73.8),
        "paraserve-cache": (83.7, 79.1, 78.3),
    },
}
ORDER: Final = ("vllm", "serverlessllm-cache", "paraserve", "paraserve-cache")
APP_RATIO: Final = {"chatbot": 1.61, "code": 1.70}  # ParaServe / vLLM, CV 8, RPS 0.6

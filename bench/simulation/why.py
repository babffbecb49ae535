"""What is known of the reasons why a band is missed: by the beginning of its name.  First match wins."""

from __future__ import annotations

from typing import Final

REASONS: Final[tuple[tuple[str, str], ...]] = (
    ("cold start, every cell",
     "A10, four workers: the tail after the last byte hides entirely behind the runtime here; "
     "the published starts still grow with the model"),
    ("cold start, ServerlessLLM / four", "follows from the A10 cells above"),
    ("scale_up_ttft",
     "four single workers share one server's 16 Gbit/s, so each fetch takes four times as long; "
     "prompt and output lengths of the published run are unknown"),
    ("scale_down",
     "F = 3.25 with one whole worker among four gives this on decoding alone; counted with the start it is inside, "
     "and which one was published is unclear"),
    ("attainment, CV",
     "levels follow the share of cold requests, which the trace decides; published levels fall from CV 8 to CV 2, "
     "while the cold share of these traces falls too, so that simulated ones rise"),
    ("attainment ratio, ParaServe / vLLM", "where many requests are cold the baseline's misses weigh more"),
    ("attainment ratio, ParaServe / Serv", "where many requests are cold the baseline's misses weigh more"),
    ("order", "ServerlessLLM takes whole devices and is out of them first"),
    ("ParaServe / vLLM", "vLLM's cold starts miss every 7.5 s objective, so the ratio is that of the cold shares"),
    ("code ≤ chatbot", "short outputs free their slots sooner and short prompts prefill in a fifth of the time"),
    ("looser SLO", "a vLLM cold start is within reach of a looser objective only on some devices"),
    ("tight SLO", "warm requests alone are more than this"),
    ("mean TPOT", "pipelines pay F until they are consolidated"),
    ("mean cost", "pipelines hold whole and low workers at once until they are consolidated"),
    ("L scheduler", "runs are not migrated in the simulator; the planning of a migration is tested by itself"),
)  # fmt: skip

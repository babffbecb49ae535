"""An LLM's start from nothing, by driver: the time to its first token, and what of it was spent on a container.

*From nothing*: a platform of its own is up, no process has imported the engine, no byte of the model is on the host;
what both import is in the page cache.  The container's phase runs beside the fetch, which was asked for first: that
part of it costs nothing, and the trace says how long it was.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench import _model
from bench._common import PYTHON, ROOT, Goal, interleave, judge, median, python_env, say
from bench._explained import read_start
from bench._links import Link, shaped, unlimited
from bench._origin import Origin
from bench._platform import BenchPlatform, llm_config
from thaw.cli.demo_model import cache_dir
from thaw.dev.smollm2 import obtain
from thaw.timeline import Interval

_PROMPT = "What is the capital of France? Answer in one sentence."
_IMPORT = "import torch, vllm, transformers, vllm.model_executor.models.llama"
_SETTLE_S = 3.0
"""A platform that has been up for a while: the scheduler has seen its hosts and what the model consists of."""


@dataclass(frozen=True, slots=True)
class DriverStart:
    """Seconds.  ``overlap_s`` is the part of the container's phase during which bytes were on their way."""

    ttft_s: float
    container_s: float
    overlap_s: float
    fetch_s: float
    libraries_s: float = 0.0

    def __str__(self) -> str:
        return (f"ttft {self.ttft_s:.2f} s, container {self.container_s:.2f} s, of which {self.overlap_s:.2f} s "
                f"beside the fetch ({self.fetch_s:.2f} s), imports {self.libraries_s:.2f} s")  # fmt: skip


def measure(rounds: int, image: str, rate_mbit: int, work: Path) -> tuple[dict[str, list[DriverStart]], Link]:
    """``rate_mbit`` 0: loopback without a limit."""
    os.environ["THAW_IMAGE_LLM"] = image
    (work / "empty").mkdir()
    model = work / "models" / "smollm2"
    shutil.copytree(obtain(cache_dir(), say), model)
    _model.write_index(model)
    _into_the_page_cache(image)
    with ExitStack() as stack:
        loopback = stack.enter_context(Origin(work, work))
        link = shaped(work, loopback, rate_mbit) if rate_mbit else unlimited(work, loopback)
        return interleave({driver: partial(_start, driver, link) for driver in ("docker", "process")}, rounds), link


def goals(found: dict[str, list[DriverStart]], link: Link) -> list[Goal]:
    """The issue is whether creation hides behind the fetch: what does not is added to the process driver's time."""
    docker, process = found["docker"], found["process"]
    creation, overlap = median([s.container_s for s in docker]), median([s.overlap_s for s in docker])
    ttft = {name: median([s.ttft_s for s in starts]) for name, starts in found.items()}
    bound = ttft["process"] + creation - overlap
    say(f"driver docker {ttft['docker']:.2f} s; driver process {ttft['process']:.2f} s + creation {creation:.2f} s "
        f"- overlap with the fetch {overlap:.2f} s = {bound:.2f} s")  # fmt: skip
    floor = (f"{ttft['docker']:.2f} against {bound:.2f} s; single starts: docker {_range(docker)}, "
             f"process {_range(process)}")  # fmt: skip
    samples = {name: [str(s) for s in starts] for name, starts in found.items()}
    name = f"docker_ttft_vs_process_and_creation_{link.name}"
    return [judge(name, ttft["docker"] / bound, "<=", 1.0, paced=link.paced, floor=floor, samples=samples)]


def _start(driver: str, link: Link) -> DriverStart:
    with BenchPlatform(link.work / f"state-{driver}", stem_cells=False, link=link.option, driver=driver,
                       store=link.work / "empty") as platform, link.store(platform) as url:  # fmt: skip
        platform.deploy("chat", llm_config(f"{url}/models/smollm2"))
        time.sleep(_SETTLE_S)
        caller = platform.caller("chat")
        cold = caller.chat(_PROMPT, 8)
        caller.close()
        timeline = read_start(platform.trace(cold.activation_id)[0], link.bytes_per_s).timeline
    container, fetch = _phase(timeline.intervals, "container"), _phase(timeline.intervals, "fetch")
    overlap_s = min(container.end_s, fetch.end_s) - max(container.begin_s, fetch.begin_s)
    libraries = _phase(timeline.intervals, "libraries")
    return DriverStart(cold.ttft_s, container.seconds, max(0.0, overlap_s), fetch.seconds, libraries.seconds)


def _phase(intervals: Iterable[Interval], phase: str) -> Interval:
    return next(i for i in intervals if i.phase == phase)


def _into_the_page_cache(image: str) -> None:
    """What an import reads: the image's files and the environment's are not the same."""
    subprocess.run(["docker", "run", "--rm", "--network", "none", "--entrypoint", "python", image, "-c", _IMPORT],
                   check=True, capture_output=True)  # fmt: skip
    subprocess.run([PYTHON, "-c", _IMPORT], check=True, capture_output=True, cwd=ROOT, env=python_env())


def _range(starts: list[DriverStart]) -> str:
    found = [s.ttft_s for s in starts]
    return f"{min(found):.2f} to {max(found):.2f}"

"""An LLM's start from nothing, by driver: the time to its first token, and the part of it that creates a container.

*From nothing* means: each start has a platform of its own, no process has imported the engine, and no byte of the model
is on the host.  The files that both drivers import are in the page cache.  The container is created during the fetch,
which was requested first.  The part of the container's phase that overlaps the fetch costs nothing, and the trace says
how long this part was.
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
from thaw.cli.model_stores.demo_model import cache_dir
from thaw.dev.known_answers import FRANCE
from thaw.dev.smollm2 import obtain
from thaw.tracing.timeline import Interval

_PROMPT = FRANCE.prompt
_IMPORT = "import torch, vllm, transformers, vllm.model_executor.models.llama"
_SETTLE_S = 3.0
"""After this time the scheduler has seen the platform's hosts and knows what the model consists of."""


@dataclass(frozen=True, slots=True)
class DriverStart:
    """Times in seconds.  ``overlap_s`` is the part of the container's phase that overlapped the fetch."""

    ttft_s: float
    container_s: float
    overlap_s: float
    fetch_s: float
    libraries_s: float = 0.0

    def __str__(self) -> str:
        return (
            f"ttft {self.ttft_s:.2f} s, container {self.container_s:.2f} s, of which {self.overlap_s:.2f} s "
            f"beside the fetch ({self.fetch_s:.2f} s), imports {self.libraries_s:.2f} s"
        )


def measure(rounds: int, image: str, rate_mbit: int, work: Path) -> tuple[dict[str, list[DriverStart]], Link]:
    """Measure both drivers in turn.  ``rate_mbit`` 0 means loopback without a limit."""
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
    """The question is whether the creation hides behind the fetch.

    The bound is the process driver's time plus the part of the creation that does not overlap the fetch.
    """
    docker, process = found["docker"], found["process"]
    creation, overlap = median([s.container_s for s in docker]), median([s.overlap_s for s in docker])
    ttft = {name: median([s.ttft_s for s in starts]) for name, starts in found.items()}
    bound = ttft["process"] + creation - overlap
    say(
        f"driver docker {ttft['docker']:.2f} s; driver process {ttft['process']:.2f} s + creation {creation:.2f} s "
        f"- overlap with the fetch {overlap:.2f} s = {bound:.2f} s"
    )
    floor = (
        f"{ttft['docker']:.2f} against {bound:.2f} s; single starts: docker {_range(docker)}, process {_range(process)}"
    )
    samples = {name: [str(s) for s in starts] for name, starts in found.items()}
    name = f"docker_ttft_vs_process_and_creation_{link.name}"
    return [judge(name, ttft["docker"] / bound, "<=", 1.0, paced=link.paced, floor=floor, samples=samples)]


def _start(driver: str, link: Link) -> DriverStart:
    with (
        BenchPlatform(
            link.work / f"state-{driver}", stem_cells=False, link=link.option, driver=driver, store=link.work / "empty"
        ) as platform,
        link.store(platform) as url,
    ):
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
    """Import the engine once in the image and once in the environment: these are different files."""
    subprocess.run(
        ["docker", "run", "--rm", "--network", "none", "--entrypoint", "python", image, "-c", _IMPORT],
        check=True,
        capture_output=True,
    )
    subprocess.run([PYTHON, "-c", _IMPORT], check=True, capture_output=True, cwd=ROOT, env=python_env())


def _range(starts: list[DriverStart]) -> str:
    found = [s.ttft_s for s in starts]
    return f"{min(found):.2f} to {max(found):.2f}"
